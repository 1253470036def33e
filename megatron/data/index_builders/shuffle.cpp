// numpy's RandomState.shuffle with the same result, at several times the speed for arrays beyond the caches.
//
// numpy draws a partner, swaps, draws the next: every swap waits for memory. Which partners are drawn does not depend on
// what is swapped, so here a block of partners is drawn ahead and their memory is fetched meanwhile.
//
// Generator: MT19937 (Matsumoto and Nishimura, 1998), its state as numpy keeps it: 624 words and the next one's number.
// Draws: numpy's legacy rule: a 32-bit word, masked to the bits of the largest partner, until it is not larger.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <utility>

namespace py = pybind11;

namespace {

constexpr int kWords = 624, kShift = 397;

class Twister {
   public:
    Twister(uint32_t* words, int next) : words_(words), next_(next) { temper(); }

    uint32_t draw() {
        if (next_ == kWords) {
            advance();
            temper();
            next_ = 0;
        }
        return tempered_[next_++];
    }

    int next() const { return next_; }

   private:
    static uint32_t twist(uint32_t upper, uint32_t lower, uint32_t far) {
        const uint32_t mixed = (upper & 0x80000000u) | (lower & 0x7fffffffu);
        return far ^ (mixed >> 1) ^ (-(lower & 1u) & 0x9908b0dfu);
    }

    void advance() {
        for (int k = 0; k < kWords - kShift; ++k) words_[k] = twist(words_[k], words_[k + 1], words_[k + kShift]);
        for (int k = kWords - kShift; k < kWords - 1; ++k)
            words_[k] = twist(words_[k], words_[k + 1], words_[k + kShift - kWords]);
        words_[kWords - 1] = twist(words_[kWords - 1], words_[0], words_[kShift - 1]);
    }

    void temper() {
        for (int k = 0; k < kWords; ++k) {
            uint32_t y = words_[k];
            y ^= y >> 11;
            y ^= (y << 7) & 0x9d2c5680u;
            y ^= (y << 15) & 0xefc60000u;
            tempered_[k] = y ^ (y >> 18);
        }
    }

    uint32_t* words_;
    uint32_t tempered_[kWords];
    int next_;
};

constexpr int kBlock = 128;

// Partners of up to kBlock elements from `last` on downwards, whose memory is fetched. Returns how many.
template <typename T>
int draw_partners(Twister& random, T* data, int64_t last, uint32_t* partner) {
    uint32_t mask = static_cast<uint32_t>(last);
    for (int shift = 1; shift <= 16; shift *= 2) mask |= mask >> shift;
    // One mask for the block: it ends where the elements' numbers need one bit less.
    const int64_t alike = last - static_cast<int64_t>(mask >> 1);
    const int wanted = alike < kBlock ? static_cast<int>(alike) : kBlock;
    for (int k = 0; k < wanted;) {
        partner[k] = random.draw() & mask;  // a partner that is too large is drawn over; no branch to mispredict
        k += static_cast<int64_t>(partner[k]) <= last - k;
    }
    for (int k = 0; k < wanted; ++k) __builtin_prefetch(data + partner[k], 1);
    return wanted;
}

template <typename T>
int shuffle(py::array_t<T, py::array::c_style> array, py::array_t<uint32_t, py::array::c_style> words, int next) {
    if (array.ndim() != 1 || array.size() > (int64_t{1} << 32)) throw std::invalid_argument("one dimension, up to 2^32");
    if (words.size() != kWords || next < 0 || next > kWords) throw std::invalid_argument("not a state of MT19937");
    T* data = array.mutable_data();
    uint32_t* state = words.mutable_data();
    const int64_t size = array.size();

    py::gil_scoped_release unlocked;
    Twister random(state, next);
    uint32_t partners[2][kBlock + 1];
    int64_t last = size - 1, ahead = last;
    int turn = 0, count = 0;
    if (ahead > 0) {
        count = draw_partners(random, data, ahead, partners[turn]);
        ahead -= count;
    }
    while (count > 0) {
        int following = 0;
        if (ahead > 0) {
            following = draw_partners(random, data, ahead, partners[1 - turn]);
            ahead -= following;
        }
        for (int k = 0; k < count; ++k) std::swap(data[last - k], data[partners[turn][k]]);
        last -= count;
        count = following;
        turn = 1 - turn;
    }
    return random.next();
}

}  // namespace

PYBIND11_MODULE(_shuffle, module) {
    module.def("shuffle", &shuffle<int32_t>, py::arg("array").noconvert(), py::arg("words").noconvert(), py::arg("next"));
    module.def("shuffle", &shuffle<uint32_t>, py::arg("array").noconvert(), py::arg("words").noconvert(), py::arg("next"));
    module.def("shuffle", &shuffle<int64_t>, py::arg("array").noconvert(), py::arg("words").noconvert(), py::arg("next"));
}

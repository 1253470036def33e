// Native builders of the packings of whole documents: filling samples until they overflow, best fit decreasing, and
// which documents have a trained label.
//
// All give exactly the arrays of packing_fallback.py. Compiled by the package build (setup.py), never at start-up.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace py = pybind11;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

// Moves the entries of `order` that are used (length > 0) to its front and fills rows with them. A row is begun at an
// entry that no longer fits, and at the first one when `running`, the tokens of the row in progress, is 0. Stops at the
// start number `limit`. Returns (used entries, positions among them where rows begin, running).
template <typename Doc>
py::tuple overflow_pass(const Array<int32_t>& lengths, Array<Doc> order, int64_t capacity, int64_t running,
                        int64_t limit) {
    const int32_t* length = lengths.data();
    Doc* entry = order.mutable_data();
    const int64_t documents = lengths.size(), entries = order.size();
    std::vector<int64_t> starts;
    int64_t kept = 0;
    {
        py::gil_scoped_release unlocked;
        constexpr int64_t ahead = 32;
        for (int64_t i = 0; i < entries; ++i) {
            // The order is shuffled, so lengths are all over memory: fetch early. A prefetch may name any address.
            if (i + ahead < entries) __builtin_prefetch(length + static_cast<int64_t>(entry[i + ahead]));
            const Doc document = entry[i];
            if (document < 0 || document >= documents) throw std::out_of_range("order names a document not there");
            const int64_t tokens = length[document];
            if (tokens == 0) continue;
            if (running == 0 || running + tokens > capacity) {
                if (static_cast<int64_t>(starts.size()) == limit) break;
                starts.push_back(kept);
                running = 0;
            }
            running += tokens;
            entry[kept++] = document;
        }
    }
    Array<int64_t> out(static_cast<py::ssize_t>(starts.size()));
    std::copy(starts.begin(), starts.end(), out.mutable_data());
    return py::make_tuple(kept, out, running);
}

// Counting sort: pieces by length, equal ones in their order, unused ones (length 0) left out. `starts` [capacity + 2]
// holds where each length begins in `out`.
template <typename Doc>
void by_length(const Array<int32_t>& lengths, const Array<int64_t>& starts, Array<Doc> out) {
    const int32_t* length = lengths.data();
    const int64_t pieces = lengths.size(), classes = starts.size() - 1;
    std::vector<int64_t> cursor(starts.data(), starts.data() + starts.size());
    Doc* place = out.mutable_data();
    py::gil_scoped_release unlocked;
    for (int64_t i = 0; i < pieces; ++i) {
        if (length[i] == 0) continue;
        if (length[i] < 0 || length[i] >= classes) throw std::out_of_range("a length beyond the capacity");
        int64_t& at = cursor[length[i]];
        if (at >= starts.data()[length[i] + 1]) throw std::invalid_argument("starts do not go with the lengths");
        place[at++] = static_cast<Doc>(i);
    }
}

// Rows of the patterns: pattern g is made counts[g] times, of copies[k] pieces of length sizes[k] for each k in
// [paths[g], paths[g + 1]). Pieces of a length are taken from `order` one after the other; a row is then sorted.
template <typename Doc>
void fill_patterns(const Array<Doc>& order, const Array<int64_t>& starts, const Array<int64_t>& counts,
                   const Array<int64_t>& paths, const Array<int32_t>& sizes, const Array<int32_t>& copies,
                   Array<Doc> out) {
    const Doc* from = order.data();
    const int64_t patterns = counts.size(), available = order.size(), room = out.size();
    const int64_t* begin = paths.data();
    std::vector<int64_t> cursor(starts.data(), starts.data() + starts.size());
    Doc* place = out.mutable_data();
    py::gil_scoped_release unlocked;
    int64_t at = 0;
    for (int64_t g = 0; g < patterns; ++g) {
        for (int64_t row = 0; row < counts.data()[g]; ++row) {
            const int64_t first = at;
            for (int64_t k = begin[g]; k < begin[g + 1]; ++k) {
                int64_t& next = cursor[sizes.data()[k]];
                const int64_t many = copies.data()[k];
                if (next + many > available || at + many > room)
                    throw std::invalid_argument("the patterns do not go with the pieces");
                std::copy(from + next, from + next + many, place + at);
                next += many;
                at += many;
            }
            std::sort(place + first, place + at);
        }
    }
}

// For each range of the labels, whether one in it is trained (not negative). Stops at the first, so that most of what
// is trained is never read.
template <typename Label>
void any_trained(const Array<Label>& labels, const Array<int64_t>& begins, const Array<int64_t>& ends,
                 Array<bool> out) {
    const Label* label = labels.data();
    const int64_t* begin = begins.data();
    const int64_t* end = ends.data();
    const int64_t ranges = out.size(), tokens = labels.size();
    if (begins.size() != ranges || ends.size() != ranges) throw std::invalid_argument("ranges of different number");
    bool* found = out.mutable_data();
    py::gil_scoped_release unlocked;
    for (int64_t i = 0; i < ranges; ++i) {
        if (begin[i] < 0 || end[i] > tokens) throw std::out_of_range("a range beyond the labels");
        found[i] = std::any_of(label + begin[i], label + std::max(begin[i], end[i]), [](Label l) { return l >= 0; });
    }
}

template <typename Doc>
void define(py::module_& module) {
    module.def("overflow_pass", &overflow_pass<Doc>, py::arg("lengths").noconvert(), py::arg("order").noconvert(),
               py::arg("capacity"), py::arg("running"), py::arg("limit"));
    module.def("by_length", &by_length<Doc>, py::arg("lengths").noconvert(), py::arg("starts").noconvert(),
               py::arg("out").noconvert());
    module.def("any_trained", &any_trained<Doc>, py::arg("labels").noconvert(), py::arg("begins").noconvert(),
               py::arg("ends").noconvert(), py::arg("out").noconvert());
    module.def("fill_patterns", &fill_patterns<Doc>, py::arg("order").noconvert(), py::arg("starts").noconvert(),
               py::arg("counts").noconvert(), py::arg("paths").noconvert(), py::arg("sizes").noconvert(),
               py::arg("copies").noconvert(), py::arg("out").noconvert());
}

}  // namespace

PYBIND11_MODULE(_packing, module) {
    define<int32_t>(module);
    define<int64_t>(module);
}

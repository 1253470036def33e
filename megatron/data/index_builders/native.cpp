// Native index builders: the walk that cuts a stream of documents into samples, and the blend of sources.
//
// Both give exactly the arrays of fallback.py. Compiled by the package build (setup.py), never at start-up.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

namespace py = pybind11;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

// The sizes lie at byte 34 of a memory-mapped file, so they are not aligned.
inline int64_t size_at(const char* sizes, int64_t item) {
    int32_t value;
    std::memcpy(&value, sizes + item * sizeof(int32_t), sizeof(value));
    return value;
}

// Rows (position in doc_idx, offset in that document) at which sample 0 .. samples starts. `out` has samples + 1 rows.
template <typename Doc, typename Out>
void sample_index(const Array<int32_t>& sizes, const Array<Doc>& doc_idx, int64_t seq_length, Array<Out> out) {
    const char* size = reinterpret_cast<const char*>(sizes.data());
    const Doc* docs = doc_idx.data();
    Out* row = out.mutable_data();
    const int64_t items = sizes.size(), entries = doc_idx.size(), rows = out.shape(0);
    if (out.ndim() != 2 || out.shape(1) != 2) throw std::invalid_argument("out must be [samples + 1, 2]");

    py::gil_scoped_release unlocked;
    row[0] = 0;
    row[1] = 0;
    constexpr int64_t ahead_of = 32;
    int64_t position = 0, offset = 0, left = 0;  // left: tokens of the document from `offset` on
    const auto open = [&](int64_t at) {
        if (at >= entries) throw std::invalid_argument("the documents hold too few tokens for the samples asked for");
        const int64_t document = static_cast<int64_t>(docs[at]);
        // The documents are shuffled: their sizes are all over memory, so fetch early. A prefetch may name any address.
        if (at + ahead_of < entries) __builtin_prefetch(size + static_cast<int64_t>(docs[at + ahead_of]) * 4);
        if (document < 0 || document >= items) throw std::out_of_range("doc_idx names a document that is not there");
        left = size_at(size, document);
    };
    if (rows > 1) open(0);
    for (int64_t k = 1; k < rows; ++k) {
        int64_t ahead = seq_length;  // the row's token is the one `ahead` tokens further on
        while (ahead >= left) {
            ahead -= left;
            offset = 0;
            open(++position);
        }
        offset += ahead;
        left -= ahead;
        row[2 * k] = static_cast<Out>(position);
        row[2 * k + 1] = static_cast<Out>(offset);
    }
}

// Blending. Position i goes to the source with the largest w_d * max(i, 1) - taken_d, the first of equals. Every
// choice waits for the one before, so what counts is the length of that chain of instructions: for up to 16 sources the
// state stays in registers, two sources in each, and is reduced as a tree.
typedef double Pair __attribute__((vector_size(16)));

inline Pair larger(Pair a, Pair b) { return a > b ? a : b; }
inline Pair smaller(Pair a, Pair b) { return a < b ? a : b; }
inline Pair swapped(Pair a) { return Pair{a[1], a[0]}; }

template <int Pairs, Pair (*better)(Pair, Pair)>
inline Pair reduce(Pair* values) {
    for (int n = Pairs; n > 1; n = (n + 1) / 2)
        for (int p = 0; p < n / 2; ++p) values[p] = better(values[p], values[n - 1 - p]);
    return better(values[0], swapped(values[0]));
}

template <int Pairs, typename Source>
void blend_few(const double* weights, int64_t sources, Source* source, int64_t* sample, int64_t samples) {
    const double never = std::numeric_limits<double>::infinity();
    Pair w[Pairs], taken[Pairs], number[Pairs];
    for (int d = 0; d < 2 * Pairs; ++d) {
        w[d / 2][d % 2] = d < sources ? weights[d] : 0.0;
        taken[d / 2][d % 2] = d < sources ? 0.0 : never;  // what fills up the last pair is never owed anything
        number[d / 2][d % 2] = d;
    }
    const Pair one = {1.0, 1.0}, zero = {0.0, 0.0}, none = {never, never};
    int64_t count[2 * Pairs] = {};
    for (int64_t i = 0; i < samples; ++i) {
        const double position = i > 0 ? static_cast<double>(i) : 1.0;
        const Pair scale = {position, position};
        Pair owed[Pairs], work[Pairs];
        for (int p = 0; p < Pairs; ++p) work[p] = owed[p] = w[p] * scale - taken[p];
        const Pair most = reduce<Pairs, larger>(work);
        for (int p = 0; p < Pairs; ++p) work[p] = owed[p] == most ? number[p] : none;
        const Pair first = reduce<Pairs, smaller>(work);
        for (int p = 0; p < Pairs; ++p) taken[p] += number[p] == first ? one : zero;
        const int64_t chosen = static_cast<int64_t>(first[0]);
        source[i] = static_cast<Source>(chosen);
        sample[i] = count[chosen]++;
    }
}

template <typename Source>
void blend_many(const double* weights, int64_t sources, Source* source, int64_t* sample, int64_t samples) {
    std::vector<double> taken(sources, 0.0);  // counts are exact: far below 2^53
    for (int64_t i = 0; i < samples; ++i) {
        const double scale = i > 0 ? static_cast<double>(i) : 1.0;
        int64_t best = 0;
        double most = weights[0] * scale - taken[0];
        for (int64_t d = 1; d < sources; ++d) {
            const double owed = weights[d] * scale - taken[d];
            if (owed > most) {
                most = owed;
                best = d;
            }
        }
        source[i] = static_cast<Source>(best);
        sample[i] = static_cast<int64_t>(taken[best]);
        taken[best] += 1.0;
    }
}

template <typename Source>
void blend(const Array<double>& weights, Array<Source> source, Array<int64_t> sample) {
    const int64_t sources = weights.size(), samples = source.size();
    if (sources == 0) throw std::invalid_argument("there is no source");
    if (sample.size() != samples) throw std::invalid_argument("source and sample must be equally long");
    const double* w = weights.data();
    Source* which = source.mutable_data();
    int64_t* number = sample.mutable_data();

    py::gil_scoped_release unlocked;
    if (sources <= 2) return blend_few<1>(w, sources, which, number, samples);
    if (sources <= 4) return blend_few<2>(w, sources, which, number, samples);
    if (sources <= 6) return blend_few<3>(w, sources, which, number, samples);
    if (sources <= 8) return blend_few<4>(w, sources, which, number, samples);
    if (sources <= 10) return blend_few<5>(w, sources, which, number, samples);
    if (sources <= 12) return blend_few<6>(w, sources, which, number, samples);
    if (sources <= 16) return blend_few<8>(w, sources, which, number, samples);
    blend_many(w, sources, which, number, samples);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.def("sample_index", &sample_index<int32_t, int32_t>, py::arg("sizes").noconvert(),
               py::arg("doc_idx").noconvert(), py::arg("seq_length"), py::arg("out").noconvert());
    module.def("sample_index", &sample_index<int32_t, int64_t>, py::arg("sizes").noconvert(),
               py::arg("doc_idx").noconvert(), py::arg("seq_length"), py::arg("out").noconvert());
    module.def("sample_index", &sample_index<int64_t, int32_t>, py::arg("sizes").noconvert(),
               py::arg("doc_idx").noconvert(), py::arg("seq_length"), py::arg("out").noconvert());
    module.def("sample_index", &sample_index<int64_t, int64_t>, py::arg("sizes").noconvert(),
               py::arg("doc_idx").noconvert(), py::arg("seq_length"), py::arg("out").noconvert());
    module.def("blend", &blend<uint8_t>, py::arg("weights"), py::arg("source").noconvert(),
               py::arg("sample").noconvert());
    module.def("blend", &blend<uint16_t>, py::arg("weights"), py::arg("source").noconvert(),
               py::arg("sample").noconvert());
}

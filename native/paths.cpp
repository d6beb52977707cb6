// Shortest paths through a chain of layers, many searches side by side: see kernels.h.
#include <limits>

#include "kernels.h"

namespace plait {
namespace {

// The innermost loop runs over the searches, so that it is as wide as the vectors of the machine.
template <typename Number>
inline __attribute__((always_inline)) void run(Number *values, const Number *moving, const Number *weights,
                                               std::size_t layers, std::size_t places, std::size_t searches) {
    const std::size_t layer = places * searches, table = places * places;
    const Number *first = weights, *second = weights + searches;
    for (std::size_t at = 1; at < layers; ++at) {
        const Number *before = values + (at - 1) * layer;
        const Number *one = moving + at * table, *other = moving + (layers + at) * table;
        for (std::size_t place = 0; place < places; ++place) {
            constexpr std::size_t width = 64;
            Number *to = values + at * layer + place * searches;
            for (std::size_t begin = 0; begin < searches; begin += width) {
                const std::size_t count = searches - begin < width ? searches - begin : width;
                Number best[width];
                for (std::size_t s = 0; s < count; ++s) best[s] = std::numeric_limits<Number>::infinity();
                for (std::size_t from = 0; from < places; ++from) {
                    const Number a = one[from * places + place], b = other[from * places + place];
                    const Number *value = before + from * searches + begin;
                    for (std::size_t s = 0; s < count; ++s) {
                        const Number found = (b * second[begin + s] + a * first[begin + s]) + value[s];
                        best[s] = found < best[s] ? found : best[s];
                    }
                }
                for (std::size_t s = 0; s < count; ++s) to[begin + s] += best[s];
            }
        }
    }
}

#if PLAIT_X86
template <typename Number>
PLAIT_AVX2 void run_avx2(Number *values, const Number *moving, const Number *weights, std::size_t layers,
                         std::size_t places, std::size_t searches) {
    run(values, moving, weights, layers, places, searches);
}

template <typename Number>
PLAIT_AVX512 void run_avx512(Number *values, const Number *moving, const Number *weights, std::size_t layers,
                             std::size_t places, std::size_t searches) {
    run(values, moving, weights, layers, places, searches);
}
#endif

template <typename Number>
void chosen(Number *values, const Number *moving, const Number *weights, std::size_t layers, std::size_t places,
            std::size_t searches, Isa isa) {
#if PLAIT_X86
    if (isa == Isa::avx512) return run_avx512(values, moving, weights, layers, places, searches);
    if (isa == Isa::avx2) return run_avx2(values, moving, weights, layers, places, searches);
#endif
    (void)isa;
    run(values, moving, weights, layers, places, searches);
}

}  // namespace

void paths(float *values, const float *moving, const float *weights, std::size_t layers, std::size_t places,
           std::size_t searches, Isa isa) {
    chosen(values, moving, weights, layers, places, searches, isa);
}

void paths(double *values, const double *moving, const double *weights, std::size_t layers, std::size_t places,
           std::size_t searches, Isa isa) {
    chosen(values, moving, weights, layers, places, searches, isa);
}

}  // namespace plait

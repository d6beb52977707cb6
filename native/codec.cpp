// The codec: ranges of buckets, each with the kernels of the instruction set that was chosen.
#include "codec.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "codec_grid.h"

#if PLAIT_X86
#include <immintrin.h>
#endif

namespace plait {
namespace {

constexpr std::size_t kHeaderBytes = 8;
constexpr unsigned kBlock = 32;    // elements whose codes one step of the vector kernels finds
constexpr std::size_t kSpare = 8;  // planes of 1 bit may reach so far beyond the last code

constexpr std::size_t plane_bytes(std::size_t n, int width) { return n / 8 * width + (n % 8 * width + 7) / 8; }

namespace scalar {
#define PLAIT_TARGET

template <bool Random, typename T>
void encode_part(const T *values, std::size_t begin, std::size_t end, const Grid &grid, const Stream &stream,
                 std::uint8_t *codes) {
    const float step = grid.step(), scale = grid.scale();
    for (std::size_t i = begin; i < end; ++i) {
        const auto fixed = static_cast<std::uint32_t>((widen(values[i]) * scale - grid.low) / step);
        const std::uint32_t random = Random ? stream.at(static_cast<std::uint32_t>(i)) : 0x8000;
        codes[i] = static_cast<std::uint8_t>((fixed + random) >> 16);
    }
}

template <typename T>
void subtract_part(const T *values, const std::uint8_t *codes, std::size_t begin, std::size_t end, const Grid &grid,
                   float *residual) {
    for (std::size_t i = begin; i < end; ++i) residual[i] = within_range(widen(values[i]) - grid.value(codes[i]));
}

template <bool Add, typename T>
void decode_part(const std::uint8_t *codes, std::size_t begin, std::size_t end, const Grid &grid, T *target) {
    for (std::size_t i = begin; i < end; ++i) {
        const float value = grid.value(codes[i]);
        narrow(Add ? widen(target[i]) + value : value, target[i]);
    }
}

template <typename T>
Extremes find_extremes(const T *values, std::size_t n) {
    Extremes found;
    found.add(values, 0, n);
    return found;
}

template <bool Random, typename T>
Extremes encode(const T *values, std::size_t n, const Grid &grid, const Stream &stream, std::uint8_t *codes,
                const T *next) {
    encode_part<Random>(values, 0, n, grid, stream, codes);
    return find_extremes(next, n);
}

template <typename T>
void subtract(const T *values, const std::uint8_t *codes, std::size_t n, const Grid &grid, float *residual) {
    subtract_part(values, codes, 0, n, grid, residual);
}

template <bool Add, typename T>
void decode(const std::uint8_t *codes, std::size_t n, const Grid &grid, T *target) {
    decode_part<Add>(codes, 0, n, grid, target);
}

#include "codec_records.h"
#undef PLAIT_TARGET
}  // namespace scalar

#if PLAIT_X86
namespace avx2 {
#define PLAIT_TARGET PLAIT_AVX2
#include "codec_avx2.h"
#include "codec_lanes.h"
#include "codec_records.h"
#undef PLAIT_TARGET
}  // namespace avx2

// GCC 12 takes the deliberately undefined operands inside its own intrinsics for mistakes of ours.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
namespace avx512 {
#define PLAIT_TARGET PLAIT_AVX512
#include "codec_avx512.h"
#include "codec_lanes.h"
#include "codec_records.h"
#undef PLAIT_TARGET
}  // namespace avx512
#pragma GCC diagnostic pop
#endif

// Rounding to the nearest, and denormals as numbers, whatever the caller's thread was set to.
class PlainArithmetic {
  public:
#if PLAIT_X86
    PlainArithmetic() : before_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
    ~PlainArithmetic() { _mm_setcsr(before_); }
    PlainArithmetic(const PlainArithmetic &) = delete;
    PlainArithmetic &operator=(const PlainArithmetic &) = delete;

  private:
    unsigned before_;
#endif
};

// Calls work(first bucket, buckets) for shares of all buckets, one share a thread.
template <typename Work>
void share(std::size_t buckets, int threads, const Work &work) {
    const std::size_t parts = std::min<std::size_t>(std::max(threads, 1), buckets);
    const auto part = [&](std::size_t p) {
        [[maybe_unused]] const PlainArithmetic plain;
        const std::size_t begin = buckets / parts * p + std::min(p, buckets % parts);
        work(begin, buckets / parts + (p < buckets % parts));
    };
    std::vector<std::thread> others;
    for (std::size_t p = 1; p < parts; ++p) others.emplace_back(part, p);
    if (parts > 0) part(0);
    for (std::thread &other : others) other.join();
}

std::size_t buckets_of(std::size_t count, Layout layout) {
    return count / layout.bucket + (count % layout.bucket != 0);
}

template <typename T>
void quantize_as(const T *source, std::size_t count, Layout layout, Rounding rounding, std::uint8_t *payload,
                 float *residual, int threads, [[maybe_unused]] Isa isa) {
    const auto with = [&](auto random) {
        share(buckets_of(count, layout), threads, [&](std::size_t begin, std::size_t buckets) {
            constexpr bool Random = decltype(random)::value;
            const std::size_t at = begin * layout.bucket, n = std::min(buckets * layout.bucket, count - at);
            const Rounding here{rounding.stochastic, rounding.key, rounding.first_bucket + begin};
            std::uint8_t *out = payload + begin * layout.record_bytes(layout.bucket);
            float *lost = residual ? residual + at : nullptr;
#if PLAIT_X86
            if (isa == Isa::avx512) return avx512::encode_records<Random>(source + at, n, layout, here, out, lost);
            if (isa == Isa::avx2) return avx2::encode_records<Random>(source + at, n, layout, here, out, lost);
#endif
            scalar::encode_records<Random>(source + at, n, layout, here, out, lost);
        });
    };
    if (rounding.stochastic) with(std::true_type{});
    else with(std::false_type{});
}

template <typename T>
void dequantize_as(const std::uint8_t *payload, std::size_t count, Layout layout, T *target, bool add, int threads,
                   [[maybe_unused]] Isa isa) {
    const auto with = [&](auto adding) {
        share(buckets_of(count, layout), threads, [&](std::size_t begin, std::size_t buckets) {
            constexpr bool Add = decltype(adding)::value;
            const std::size_t at = begin * layout.bucket, n = std::min(buckets * layout.bucket, count - at);
            const std::uint8_t *in = payload + begin * layout.record_bytes(layout.bucket);
#if PLAIT_X86
            if (isa == Isa::avx512) return avx512::decode_records<Add>(in, n, layout, target + at);
            if (isa == Isa::avx2) return avx2::decode_records<Add>(in, n, layout, target + at);
#endif
            scalar::decode_records<Add>(in, n, layout, target + at);
        });
    };
    if (add) with(std::true_type{});
    else with(std::false_type{});
}

}  // namespace

std::size_t Layout::record_bytes(std::size_t n) const {
    std::size_t bytes = kHeaderBytes;
    for (int width : {8, 4, 2, 1})
        if (bits & width) bytes += plane_bytes(n, width);
    return bytes;
}

void quantize(const void *source, Dtype dtype, std::size_t count, Layout layout, Rounding rounding,
              std::uint8_t *payload, float *residual, int threads, Isa isa) {
    const auto as = [&](auto *values) {
        quantize_as(values, count, layout, rounding, payload, residual, threads, isa);
    };
    if (dtype == Dtype::fp32) as(static_cast<const float *>(source));
    else if (dtype == Dtype::fp16) as(static_cast<const Half *>(source));
    else as(static_cast<const Bfloat *>(source));
}

void dequantize(const std::uint8_t *payload, std::size_t count, Layout layout, void *target, Dtype dtype, bool add,
                int threads, Isa isa) {
    const auto as = [&](auto *values) { dequantize_as(payload, count, layout, values, add, threads, isa); };
    if (dtype == Dtype::fp32) as(static_cast<float *>(target));
    else if (dtype == Dtype::fp16) as(static_cast<Half *>(target));
    else as(static_cast<Bfloat *>(target));
}

}  // namespace plait

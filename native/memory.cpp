// Streaming reads and copies: what memory can do, with nothing else in the way.
#include <cstring>

#include "kernels.h"

#if PLAIT_X86
#include <immintrin.h>
#endif

namespace plait {
namespace {

std::uint64_t little_endian(std::uint64_t word) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    return __builtin_bswap64(word);
#else
    return word;
#endif
}

std::uint64_t read_scalar(const std::uint8_t *data, std::size_t bytes) {
    std::uint64_t sum = 0;
    std::size_t i = 0;
    for (; i + 8 <= bytes; i += 8) {
        std::uint64_t word;
        std::memcpy(&word, data + i, 8);
        sum ^= word;
    }
    if (i < bytes) {
        std::uint64_t word = 0;
        std::memcpy(&word, data + i, bytes - i);
        sum ^= word;
    }
    return little_endian(sum);
}

#if PLAIT_X86
// Four accumulators: a load may be issued every half cycle, the exclusive or must not chain them.
PLAIT_AVX2 std::uint64_t read_avx2(const std::uint8_t *data, std::size_t bytes) {
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    std::size_t i = 0;
    for (; i + 128 <= bytes; i += 128) {
        const auto *from = reinterpret_cast<const __m256i *>(data + i);
        a = _mm256_xor_si256(a, _mm256_loadu_si256(from));
        b = _mm256_xor_si256(b, _mm256_loadu_si256(from + 1));
        c = _mm256_xor_si256(c, _mm256_loadu_si256(from + 2));
        d = _mm256_xor_si256(d, _mm256_loadu_si256(from + 3));
    }
    std::uint64_t words[4];
    const __m256i all = _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(words), all);
    return words[0] ^ words[1] ^ words[2] ^ words[3] ^ read_scalar(data + i, bytes - i);
}

PLAIT_AVX512 std::uint64_t read_avx512(const std::uint8_t *data, std::size_t bytes) {
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    std::size_t i = 0;
    for (; i + 256 <= bytes; i += 256) {
        a = _mm512_xor_si512(a, _mm512_loadu_si512(data + i));
        b = _mm512_xor_si512(b, _mm512_loadu_si512(data + i + 64));
        c = _mm512_xor_si512(c, _mm512_loadu_si512(data + i + 128));
        d = _mm512_xor_si512(d, _mm512_loadu_si512(data + i + 192));
    }
    std::uint64_t words[8], sum = 0;
    _mm512_storeu_si512(words, _mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d)));
    for (std::uint64_t word : words) sum ^= word;
    return sum ^ read_scalar(data + i, bytes - i);
}

// Bytes before the first address that a streaming store of `width` may use.
std::size_t head(const std::uint8_t *target, std::size_t bytes, std::size_t width) {
    const std::size_t past = reinterpret_cast<std::uintptr_t>(target) % width;
    const std::size_t before = past ? width - past : 0;
    return before < bytes ? before : bytes;
}

PLAIT_AVX2 void copy_avx2(std::uint8_t *target, const std::uint8_t *source, std::size_t bytes) {
    std::size_t i = head(target, bytes, 32);
    std::memcpy(target, source, i);
    for (; i + 128 <= bytes; i += 128) {
        const auto *from = reinterpret_cast<const __m256i *>(source + i);
        auto *to = reinterpret_cast<__m256i *>(target + i);
        const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
        const __m256i c = _mm256_loadu_si256(from + 2), d = _mm256_loadu_si256(from + 3);
        _mm256_stream_si256(to, a);
        _mm256_stream_si256(to + 1, b);
        _mm256_stream_si256(to + 2, c);
        _mm256_stream_si256(to + 3, d);
    }
    _mm_sfence();  // streaming stores are ordered with nothing else until this
    std::memcpy(target + i, source + i, bytes - i);
}

PLAIT_AVX512 void copy_avx512(std::uint8_t *target, const std::uint8_t *source, std::size_t bytes) {
    std::size_t i = head(target, bytes, 64);
    std::memcpy(target, source, i);
    for (; i + 128 <= bytes; i += 128) {
        const __m512i a = _mm512_loadu_si512(source + i), b = _mm512_loadu_si512(source + i + 64);
        _mm512_stream_si512(reinterpret_cast<__m512i *>(target + i), a);
        _mm512_stream_si512(reinterpret_cast<__m512i *>(target + i + 64), b);
    }
    _mm_sfence();
    std::memcpy(target + i, source + i, bytes - i);
}
#endif

}  // namespace

std::uint64_t read(const std::uint8_t *data, std::size_t bytes, Isa isa) {
#if PLAIT_X86
    if (isa == Isa::avx512) return read_avx512(data, bytes);
    if (isa == Isa::avx2) return read_avx2(data, bytes);
#endif
    (void)isa;
    return read_scalar(data, bytes);
}

void copy(std::uint8_t *target, const std::uint8_t *source, std::size_t bytes, Isa isa) {
#if PLAIT_X86
    if (isa == Isa::avx512) return copy_avx512(target, source, bytes);
    if (isa == Isa::avx2) return copy_avx2(target, source, bytes);
#endif
    (void)isa;
    std::memcpy(target, source, bytes);
}

}  // namespace plait

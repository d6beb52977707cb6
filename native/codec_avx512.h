// The primitives of codec_lanes.h with AVX-512: sixteen numbers a vector.

using Floats = __m512;
using Words = __m512i;
using Marks = __mmask16;
constexpr int kLanes = 16;

PLAIT_TARGET inline Floats all(float value) { return _mm512_set1_ps(value); }
PLAIT_TARGET inline Words all_words(std::uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); }

PLAIT_TARGET inline __m256i load_half(const void *from) {
    return _mm256_loadu_si256(static_cast<const __m256i *>(from));
}
PLAIT_TARGET inline Floats load(const float *from) { return _mm512_loadu_ps(from); }
PLAIT_TARGET inline Floats load(const Half *from) { return _mm512_cvtph_ps(load_half(from)); }
PLAIT_TARGET inline Floats load(const Bfloat *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_half(from)), 16));
}

PLAIT_TARGET inline void store(float *to, Floats values) { _mm512_storeu_ps(to, values); }
PLAIT_TARGET inline void store(Half *to, Floats values) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to),
                        _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
PLAIT_TARGET inline void store(Bfloat *to, Floats values) {
    const Words bits = _mm512_castps_si512(values);
    const Words odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), all_words(1));
    const Words rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, all_words(0x7FFF)));
    const Marks nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    const Words high = _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, all_words(0x7FC00000)), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm512_cvtepi32_epi16(high));
}

PLAIT_TARGET inline Floats lesser(Floats a, Floats b) { return _mm512_min_ps(a, b); }
PLAIT_TARGET inline Floats greater(Floats a, Floats b) { return _mm512_max_ps(a, b); }
PLAIT_TARGET inline Marks no_marks() { return 0; }
PLAIT_TARGET inline Marks mark_unordered(Marks marks, Floats a, Floats b) {
    return static_cast<Marks>(marks | _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q));
}
PLAIT_TARGET inline bool any(Marks marks) { return marks != 0; }

PLAIT_TARGET inline Words truncate(Floats values) { return _mm512_cvttps_epi32(values); }
PLAIT_TARGET inline Floats to_floats(Words words) { return _mm512_cvtepi32_ps(words); }
PLAIT_TARGET inline Words plus(Words a, Words b) { return _mm512_add_epi32(a, b); }
PLAIT_TARGET inline Words times(Words a, Words b) { return _mm512_mullo_epi32(a, b); }
PLAIT_TARGET inline Words exclusive(Words a, Words b) { return _mm512_xor_si512(a, b); }
template <int Bits>
PLAIT_TARGET inline Words right(Words words) {
    return _mm512_srli_epi32(words, Bits);
}
PLAIT_TARGET inline Words lower_half(Words words) { return _mm512_and_si512(words, all_words(0xFFFF)); }
// start, start + step, start + 2 step, ...
PLAIT_TARGET inline Words ramp(std::uint32_t start, std::uint32_t step) {
    const Words places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return plus(all_words(start), times(places, all_words(step)));
}

PLAIT_TARGET inline Words load_bytes(const std::uint8_t *from) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}
// 32 words below 256 as bytes.
PLAIT_TARGET inline void store_bytes(std::uint8_t *to, const Words *words) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm512_cvtepi32_epi8(words[0]));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to + 16), _mm512_cvtepi32_epi8(words[1]));
}

// A block's cache lines; an address beyond the end is harmless.
template <typename T>
PLAIT_TARGET inline void fetch(const T *block) {
    for (std::size_t byte = 0; byte < 32 * sizeof(T); byte += 64)
        _mm_prefetch(reinterpret_cast<const char *>(block) + byte, _MM_HINT_T0);
}

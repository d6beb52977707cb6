// The primitives of codec_lanes.h with AVX2: eight numbers a vector.

using Floats = __m256;
using Words = __m256i;
using Marks = __m256;
constexpr int kLanes = 8;

PLAIT_TARGET inline Floats all(float value) { return _mm256_set1_ps(value); }
PLAIT_TARGET inline Words all_words(std::uint32_t word) { return _mm256_set1_epi32(static_cast<int>(word)); }

PLAIT_TARGET inline __m128i load_half(const void *from) {
    return _mm_loadu_si128(static_cast<const __m128i *>(from));
}
PLAIT_TARGET inline Floats load(const float *from) { return _mm256_loadu_ps(from); }
PLAIT_TARGET inline Floats load(const Half *from) { return _mm256_cvtph_ps(load_half(from)); }
PLAIT_TARGET inline Floats load(const Bfloat *from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(from)), 16));
}

PLAIT_TARGET inline void store(float *to, Floats values) { _mm256_storeu_ps(to, values); }
PLAIT_TARGET inline void store(Half *to, Floats values) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to),
                     _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
PLAIT_TARGET inline void store(Bfloat *to, Floats values) {
    const Words bits = _mm256_castps_si256(values);
    const Words odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), all_words(1));
    const Words rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, all_words(0x7FFF)));
    const Words nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    const Words high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, all_words(0x7FC00000), nan), 16);
    const Words packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0xD8);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm256_castsi256_si128(packed));
}

PLAIT_TARGET inline Floats lesser(Floats a, Floats b) { return _mm256_min_ps(a, b); }
PLAIT_TARGET inline Floats greater(Floats a, Floats b) { return _mm256_max_ps(a, b); }
PLAIT_TARGET inline Marks no_marks() { return _mm256_setzero_ps(); }
PLAIT_TARGET inline Marks mark_unordered(Marks marks, Floats a, Floats b) {
    return _mm256_or_ps(marks, _mm256_cmp_ps(a, b, _CMP_UNORD_Q));
}
PLAIT_TARGET inline bool any(Marks marks) { return _mm256_movemask_ps(marks) != 0; }

PLAIT_TARGET inline Words truncate(Floats values) { return _mm256_cvttps_epi32(values); }
PLAIT_TARGET inline Floats to_floats(Words words) { return _mm256_cvtepi32_ps(words); }
PLAIT_TARGET inline Words plus(Words a, Words b) { return _mm256_add_epi32(a, b); }
PLAIT_TARGET inline Words times(Words a, Words b) { return _mm256_mullo_epi32(a, b); }
PLAIT_TARGET inline Words exclusive(Words a, Words b) { return _mm256_xor_si256(a, b); }
template <int Bits>
PLAIT_TARGET inline Words right(Words words) {
    return _mm256_srli_epi32(words, Bits);
}
PLAIT_TARGET inline Words lower_half(Words words) { return _mm256_and_si256(words, all_words(0xFFFF)); }
// start, start + step, start + 2 step, ...
PLAIT_TARGET inline Words ramp(std::uint32_t start, std::uint32_t step) {
    const Words places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return plus(all_words(start), times(places, all_words(step)));
}

PLAIT_TARGET inline Words load_bytes(const std::uint8_t *from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)));
}
// 32 words below 256 as bytes. The packs work within halves of a vector, which the last step undoes.
PLAIT_TARGET inline void store_bytes(std::uint8_t *to, const Words *words) {
    const Words packed = _mm256_packus_epi16(_mm256_packus_epi32(words[0], words[1]),
                                             _mm256_packus_epi32(words[2], words[3]));
    const Words order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm256_permutevar8x32_epi32(packed, order));
}

// A block's cache lines; an address beyond the end is harmless.
template <typename T>
PLAIT_TARGET inline void fetch(const T *block) {
    for (std::size_t byte = 0; byte < 32 * sizeof(T); byte += 64)
        _mm_prefetch(reinterpret_cast<const char *>(block) + byte, _MM_HINT_T0);
}

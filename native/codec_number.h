// The numbers that the codec reads and writes: fp32 and the two formats of 16 bits, which are widened
// to fp32 exactly and narrowed to the nearest, ties to even.
#pragma once

#include <cstdint>
#include <cstring>

namespace plait {

struct Half {
    std::uint16_t bits;
};

struct Bfloat {
    std::uint16_t bits;
};

inline float from_bits(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline std::uint32_t to_bits(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float widen(float value) { return value; }

inline float widen(Bfloat value) { return from_bits(std::uint32_t{value.bits} << 16); }

inline float widen(Half value) {
    const std::uint32_t sign = (value.bits & 0x8000u) << 16, exponent = (value.bits >> 10) & 31u;
    const std::uint32_t mantissa = value.bits & 1023u;
    if (exponent == 0) {
        const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
        return from_bits(sign | to_bits(magnitude));
    }
    const std::uint32_t wide = exponent == 31 ? 255u : exponent + (127 - 15);
    return from_bits(sign | wide << 23 | mantissa << 13);
}

inline void narrow(float value, float &out) { out = value; }

inline void narrow(float value, Bfloat &out) {
    const std::uint32_t bits = to_bits(value);
    const std::uint32_t even = 0x7FFF + ((bits >> 16) & 1);
    out.bits = static_cast<std::uint16_t>(value != value ? 0x7FC0 : (bits + even) >> 16);
}

inline void narrow(float value, Half &out) {
    const std::uint32_t bits = to_bits(value), sign = (bits >> 16) & 0x8000u;
    std::uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude >= 0x47800000u) {  // 2^16 and above, infinity and NaN
        magnitude = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
    } else if (magnitude < 0x38800000u) {
        // Below 2^-14 the last place is worth 2^-24: adding 1/2 makes it the last place of a float too.
        magnitude = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);
    } else {
        magnitude = (magnitude - ((127u - 15u) << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    }
    out.bits = static_cast<std::uint16_t>(sign | magnitude);
}

}  // namespace plait

// What a bucket's record starts with, and the random numbers that round its codes: the arithmetic that
// every implementation shares. It is exact IEEE in the order written: no contraction, true division.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "codec_number.h"

namespace plait {

struct Extremes {
    float low = std::numeric_limits<float>::infinity();
    float high = -std::numeric_limits<float>::infinity();
    bool broken = false;  // a NaN was met

    void add(float lowest, float highest) {
        low = lowest < low ? lowest : low;
        high = highest > high ? highest : high;
    }

    template <typename T>
    void add(const T *values, std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) {
            const float value = widen(values[i]);
            add(value, value);
            broken |= value != value;
        }
    }
};

constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kWide = 0x1p126f;        // from here on sums may overflow: such a bucket is kept at a quarter
constexpr float kLeastUnit = 0x1p-110f;  // its 2^-16, the step, is the least normal number

inline float within_range(float value) {
    return value > kLargest ? kLargest : value < -kLargest ? -kLargest : value;
}

// The grid of values that a bucket's codes stand for: low + code * unit. Both are as in the record: a unit
// of 0 says that there is one value only, one below 0 that all is kept at a quarter of its size.
struct Grid {
    float low, unit;

    bool flat() const { return unit == 0; }
    bool wide() const { return unit < 0; }
    float scale() const { return wide() ? 0.25f : 1.0f; }
    float step() const { return std::fabs(unit) * 0x1p-16f; }  // codes are found with 16 bits after the point

    float value(std::uint32_t code) const {
        const float value = low + static_cast<float>(code) * std::fabs(unit);
        return wide() ? within_range(value * 4) : value;
    }

    static Grid of(const Extremes &seen, int bits) {
        const float low = seen.low + 0.0f, high = seen.high + 0.0f;  // -0 becomes 0
        if (seen.broken || !(low >= -kLargest) || !(high <= kLargest)) return {from_bits(0x7FC00000), 0};
        if (low == high) return {low, 0};
        const bool wide = low <= -kWide || high >= kWide;
        const float scale = wide ? 0.25f : 1.0f, least = low * scale, range = high * scale - least;
        const float levels = static_cast<float>((1 << bits) - 1);
        float unit = range / levels;
        if (unit < kLeastUnit) unit = kLeastUnit;
        // Rounded down, it could give the highest value a code too many: the next number above cannot.
        if (range / unit > levels) unit = from_bits(to_bits(unit) + 1);
        return {least, wide ? -unit : unit};
    }
};

// The random numbers of one bucket: 16 bits for each element, from its place alone. A 32-bit word serves
// two elements that are 16 apart, so that vectors of 8 and of 16 both use whole words.
struct Stream {
    static constexpr std::uint32_t kWeyl = 0x9E3779B1, kFirst = 0x7FEB352D, kSecond = 0x846CA68B;

    std::uint32_t start, twist;

    // Step `bucket` of SplitMix64 from the key (Steele, Lea and Flood, OOPSLA 2014).
    Stream(std::uint64_t key, std::uint64_t bucket) {
        std::uint64_t z = key + (bucket + 1) * 0x9E3779B97F4A7C15;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
        z = (z ^ z >> 27) * 0x94D049BB133111EB;
        z ^= z >> 31;
        start = static_cast<std::uint32_t>(z);
        twist = static_cast<std::uint32_t>(z >> 32);
    }

    std::uint32_t word(std::uint32_t number) const {
        std::uint32_t h = start + number * kWeyl;
        h = (h ^ h >> 16) * kFirst;
        h = (h ^ h >> 15 ^ twist) * kSecond;
        return h ^ h >> 16;
    }

    std::uint32_t at(std::uint32_t element) const {
        const std::uint32_t h = word(element >> 5 << 4 | (element & 15));
        return element & 16 ? h >> 16 : h & 0xFFFF;
    }
};

}  // namespace plait

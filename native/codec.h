// The codec of gradients: each bucket of numbers becomes a record of a lowest value, a unit and a code
// of 1 to 8 bits for each number. docs/wire.md has the bytes; plait/compress/plain.py computes the same
// ones with torch, and a test holds the two together.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa.h"

namespace plait {

enum class Dtype : int { fp32 = 0, fp16 = 1, bf16 = 2 };

struct Layout {
    int bits;            // of a code, 1 to 8
    std::size_t bucket;  // numbers that share a lowest value and a unit, 1 or more

    // Bytes of the record of n numbers.
    std::size_t record_bytes(std::size_t n) const;
};

struct Rounding {
    bool stochastic;             // else to the nearest
    std::uint64_t key;           // of the stream of random numbers
    std::uint64_t first_bucket;  // where in that stream the first bucket stands
};

// Encodes `count` numbers into payload_bytes(count) bytes. `residual`, where given, receives what the
// codes lose; it may be the source itself. The bytes do not depend on `threads` or `isa`.
void quantize(const void *source, Dtype dtype, std::size_t count, Layout layout, Rounding rounding,
              std::uint8_t *payload, float *residual, int threads, Isa isa);

// Decodes `count` numbers, over the target or added to it.
void dequantize(const std::uint8_t *payload, std::size_t count, Layout layout, void *target, Dtype dtype,
                bool add, int threads, Isa isa);

}  // namespace plait

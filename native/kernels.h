// The kernels that module.cpp hands to Python. They take plain addresses, so that memory of torch,
// numpy or a map serves alike and nothing here links to any of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa.h"

namespace plait {

// Exclusive or of all 64-bit little-endian words; a last partial word is padded with zeros.
std::uint64_t read(const std::uint8_t *data, std::size_t bytes, Isa isa);

// Copies without pulling the target into the cache. The ranges must not overlap.
void copy(std::uint8_t *target, const std::uint8_t *source, std::size_t bytes, Isa isa);

// CRC-32C (Castagnoli) of the bytes, continued from `start`, the checksum of what came before.
std::uint32_t checksum(const std::uint8_t *data, std::size_t bytes, std::uint32_t start, Isa isa);

}  // namespace plait

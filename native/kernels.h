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

// Shortest paths through layers of places, for several searches at once. `values`, [layer][place][search], holds
// what each place costs, and on return the least that a path to it costs; `moving`, [2][layer][from][to], two costs
// of going from a place of the layer before to one of this, which count `weights`, [2][search], times.
void paths(float *values, const float *moving, const float *weights, std::size_t layers, std::size_t places,
           std::size_t searches, Isa isa);
void paths(double *values, const double *moving, const double *weights, std::size_t layers, std::size_t places,
           std::size_t searches, Isa isa);

}  // namespace plait

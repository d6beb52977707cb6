// CRC-32C, the checksum of iSCSI (RFC 3720, B.4) and of ext4's metadata: polynomial 0x1EDC6F41,
// reflected in and out, starting from and finished with all ones; "123456789" gives 0xE3069283.
//
// The register is kept reflected. Two facts carry everything below:
//   1. the register is linear over GF(2), so "append n zero bytes" is a 32x32 bit matrix;
//   2. crc(A then B) = zeros(|B|) * crc(A)  xor  crc0(B), where crc0 starts from zero.
// The instruction crc32 takes three cycles but one can start in each, so three neighbouring stretches
// are run side by side from zero and then joined by fact 2.
#include <array>
#include <cstring>

#include "kernels.h"

#if PLAIT_X86
#include <immintrin.h>
#endif

namespace plait {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // 0x1EDC6F41 with its bits reversed

using Table = std::array<std::uint32_t, 256>;
using Matrix = std::array<std::uint32_t, 32>;  // column i: what bit i becomes

// slices[k][b]: the register after byte b and k zero bytes.
constexpr std::array<Table, 8> make_slices() {
    std::array<Table, 8> slices{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? kPolynomial : 0);
        slices[0][byte] = crc;
    }
    for (std::size_t k = 1; k < 8; ++k)
        for (std::uint32_t byte = 0; byte < 256; ++byte) {
            const std::uint32_t before = slices[k - 1][byte];
            slices[k][byte] = (before >> 8) ^ slices[0][before & 0xFF];
        }
    return slices;
}

constexpr std::array<Table, 8> kSlices = make_slices();

constexpr std::uint32_t times(const Matrix &matrix, std::uint32_t vector) {
    std::uint32_t sum = 0;
    for (int i = 0; vector; ++i, vector >>= 1)
        if (vector & 1) sum ^= matrix[i];
    return sum;
}

// Appends `bytes` zero bytes, a power of two, to a register: four look-ups.
class Zeros {
  public:
    constexpr explicit Zeros(std::size_t bytes) : tables_{} {
        Matrix matrix{};
        for (int i = 0; i < 32; ++i) {
            const std::uint32_t bit = std::uint32_t{1} << i;
            matrix[i] = (bit >> 8) ^ kSlices[0][bit & 0xFF];
        }
        for (; bytes > 1; bytes /= 2) {
            Matrix squared{};
            for (int i = 0; i < 32; ++i) squared[i] = times(matrix, matrix[i]);
            matrix = squared;
        }
        for (int k = 0; k < 4; ++k)
            for (std::uint32_t byte = 0; byte < 256; ++byte)
                tables_[k][byte] = times(matrix, byte << (8 * k));
    }

    std::uint32_t operator()(std::uint32_t crc) const {
        return tables_[0][crc & 0xFF] ^ tables_[1][(crc >> 8) & 0xFF] ^ tables_[2][(crc >> 16) & 0xFF] ^
               tables_[3][crc >> 24];
    }

  private:
    std::array<Table, 4> tables_;
};

std::uint32_t update_scalar(std::uint32_t crc, const std::uint8_t *data, std::size_t bytes) {
    std::size_t i = 0;
    for (; i + 8 <= bytes; i += 8) {
        const std::uint8_t *at = data + i;
        const std::uint32_t low = crc ^ (std::uint32_t{at[0]} | std::uint32_t{at[1]} << 8 |
                                         std::uint32_t{at[2]} << 16 | std::uint32_t{at[3]} << 24);
        crc = kSlices[7][low & 0xFF] ^ kSlices[6][(low >> 8) & 0xFF] ^ kSlices[5][(low >> 16) & 0xFF] ^
              kSlices[4][low >> 24] ^ kSlices[3][at[4]] ^ kSlices[2][at[5]] ^ kSlices[1][at[6]] ^ kSlices[0][at[7]];
    }
    for (; i < bytes; ++i) crc = (crc >> 8) ^ kSlices[0][(crc ^ data[i]) & 0xFF];
    return crc;
}

#if PLAIT_X86
constexpr std::size_t kLong = 8192, kShort = 256;
constexpr Zeros kAfterLong(kLong), kAfterShort(kShort);

std::uint64_t word(const std::uint8_t *at) {
    std::uint64_t value;
    std::memcpy(&value, at, 8);
    return value;
}

PLAIT_AVX2 std::uint32_t triple(std::uint32_t crc, const std::uint8_t *data, std::size_t stretch,
                                const Zeros &after) {
    std::uint64_t a = crc, b = 0, c = 0;
    for (std::size_t i = 0; i < stretch; i += 8) {
        a = _mm_crc32_u64(a, word(data + i));
        b = _mm_crc32_u64(b, word(data + stretch + i));
        c = _mm_crc32_u64(c, word(data + 2 * stretch + i));
    }
    const std::uint32_t ab = after(static_cast<std::uint32_t>(a)) ^ static_cast<std::uint32_t>(b);
    return after(ab) ^ static_cast<std::uint32_t>(c);
}

PLAIT_AVX2 std::uint32_t update_crc32(std::uint32_t crc, const std::uint8_t *data, std::size_t bytes) {
    for (; bytes >= 3 * kLong; data += 3 * kLong, bytes -= 3 * kLong) crc = triple(crc, data, kLong, kAfterLong);
    for (; bytes >= 3 * kShort; data += 3 * kShort, bytes -= 3 * kShort)
        crc = triple(crc, data, kShort, kAfterShort);
    std::uint64_t wide = crc;
    for (; bytes >= 8; data += 8, bytes -= 8) wide = _mm_crc32_u64(wide, word(data));
    crc = static_cast<std::uint32_t>(wide);
    for (; bytes; ++data, --bytes) crc = _mm_crc32_u8(crc, *data);
    return crc;
}
#endif

}  // namespace

std::uint32_t checksum(const std::uint8_t *data, std::size_t bytes, std::uint32_t start, Isa isa) {
#if PLAIT_X86
    // The instruction came with SSE4.2, so every vector level has it and gains nothing over AVX2's.
    if (isa != Isa::scalar) return ~update_crc32(~start, data, bytes);
#endif
    (void)isa;
    return ~update_scalar(~start, data, bytes);
}

}  // namespace plait

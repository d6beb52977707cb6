// Records: codes of one byte each to and from planes of bits, and buckets to and from records. Included
// once for each instruction set, inside its namespace, with PLAIT_TARGET set, after encode and decode.
//
// A plane holds `Width` bits of each of n codes in h = ceil(n * Width / 8) bytes: byte i has those of
// elements i, i + h, i + 2h, ... from its lowest bits up, and zeros beyond element n. Its loops are plain
// so that the compiler makes vectors of them by itself.

template <int Width, int Shift>
PLAIT_TARGET void pack_plane(const std::uint8_t *__restrict codes, std::size_t h, std::uint8_t *__restrict plane) {
    constexpr unsigned mask = (1u << Width) - 1;
    for (std::size_t i = 0; i < h; ++i) {
        std::uint8_t byte = 0;
        for (int slot = 0; slot < 8 / Width; ++slot)
            byte |= static_cast<std::uint8_t>(((codes[i + slot * h] >> Shift) & mask) << (Width * slot));
        plane[i] = byte;
    }
}

template <int Width, int Shift>
PLAIT_TARGET void unpack_plane(const std::uint8_t *__restrict plane, std::size_t h, std::uint8_t *__restrict codes) {
    constexpr unsigned mask = (1u << Width) - 1;
    for (int slot = 0; slot < 8 / Width; ++slot)
        for (std::size_t i = 0; i < h; ++i) {
            const auto bits = static_cast<std::uint8_t>(((plane[i] >> (Width * slot)) & mask) << Shift);
            codes[i + slot * h] = Shift ? static_cast<std::uint8_t>(codes[i + slot * h] | bits) : bits;
        }
}

// The planes have 4, 2 and 1 bits, those that make up the width of a code, its lowest bits first.
template <int Bits>
PLAIT_TARGET void pack(const std::uint8_t *codes, std::size_t n, std::uint8_t *out) {
    if constexpr (Bits & 4) {
        pack_plane<4, 0>(codes, plane_bytes(n, 4), out);
        out += plane_bytes(n, 4);
    }
    if constexpr (Bits & 2) {
        pack_plane<2, Bits & 4>(codes, plane_bytes(n, 2), out);
        out += plane_bytes(n, 2);
    }
    if constexpr (Bits & 1) pack_plane<1, Bits & 6>(codes, plane_bytes(n, 1), out);
}

template <int Bits>
PLAIT_TARGET void unpack(const std::uint8_t *in, std::size_t n, std::uint8_t *codes) {
    if constexpr (Bits & 4) {
        unpack_plane<4, 0>(in, plane_bytes(n, 4), codes);
        in += plane_bytes(n, 4);
    }
    if constexpr (Bits & 2) {
        unpack_plane<2, Bits & 4>(in, plane_bytes(n, 2), codes);
        in += plane_bytes(n, 2);
    }
    if constexpr (Bits & 1) unpack_plane<1, Bits & 6>(in, plane_bytes(n, 1), codes);
}

using Pack = void (*)(const std::uint8_t *, std::size_t, std::uint8_t *);
constexpr Pack kPack[] = {nullptr, pack<1>, pack<2>, pack<3>, pack<4>, pack<5>, pack<6>, pack<7>};
constexpr Pack kUnpack[] = {nullptr, unpack<1>, unpack<2>, unpack<3>, unpack<4>, unpack<5>, unpack<6>, unpack<7>};

template <bool Random, typename T>
PLAIT_TARGET void encode_records(const T *values, std::size_t count, Layout layout, Rounding rounding,
                                 std::uint8_t *payload, float *residual) {
    std::vector<std::uint8_t> scratch(std::min(layout.bucket, count) + kSpare);
    Extremes seen = find_extremes(values, std::min(layout.bucket, count));
    for (std::uint64_t bucket = rounding.first_bucket; count > 0; ++bucket) {
        const std::size_t n = std::min(layout.bucket, count), rest = count - n;
        const std::size_t record = layout.record_bytes(n);
        const Grid grid = Grid::of(seen, layout.bits);
        std::memcpy(payload, &grid.low, 4);
        std::memcpy(payload + 4, &grid.unit, 4);
        std::uint8_t *out = payload + kHeaderBytes, *codes = layout.bits == 8 ? out : scratch.data();
        if (grid.flat()) {
            std::memset(out, 0, record - kHeaderBytes);
            if (residual) std::memset(residual, 0, n * sizeof(float));
        } else {
            const T *next = rest >= n ? values + n : values;
            seen = encode<Random>(values, n, grid, Stream(rounding.key, bucket), codes, next);
            if (residual) subtract(values, codes, n, grid, residual);
            if (layout.bits < 8) {
                std::memset(codes + n, 0, kSpare);
                kPack[layout.bits](codes, n, out);
            }
        }
        if (grid.flat() || rest < n) seen = find_extremes(values + n, std::min(n, rest));
        values += n;
        count -= n;
        payload += record;
        if (residual) residual += n;
    }
}

template <bool Add, typename T>
PLAIT_TARGET void decode_records(const std::uint8_t *payload, std::size_t count, Layout layout, T *target) {
    std::vector<std::uint8_t> scratch(std::min(layout.bucket, count) + kSpare);
    while (count > 0) {
        const std::size_t n = std::min(layout.bucket, count);
        Grid grid;
        std::memcpy(&grid.low, payload, 4);
        std::memcpy(&grid.unit, payload + 4, 4);
        const std::uint8_t *codes = payload + kHeaderBytes;
        if (layout.bits < 8) {
            kUnpack[layout.bits](codes, n, scratch.data());
            codes = scratch.data();
        }
        decode<Add>(codes, n, grid, target);
        target += n;
        count -= n;
        payload += layout.record_bytes(n);
    }
}

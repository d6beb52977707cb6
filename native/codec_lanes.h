// The codec's kernels over vectors. Included once for each vector instruction set, inside its namespace,
// after its primitives (see codec_avx2.h) and with PLAIT_TARGET set. Whole blocks of 32 elements go
// through vectors; what is left over, and buckets of an extreme range, go through the scalar kernels.

constexpr int kVectors = kBlock / kLanes;
constexpr int kWords = kBlock / 2 / kLanes;  // vectors of random words that serve a block
constexpr std::size_t kAhead = 512;          // elements to fetch before they are needed

struct Seen {
    Floats low, high;
    Marks broken;

    PLAIT_TARGET Seen()
        : low(all(std::numeric_limits<float>::infinity())),
          high(all(-std::numeric_limits<float>::infinity())),
          broken(no_marks()) {}

    template <typename T>
    PLAIT_TARGET void add(const T *block) {
        Floats values[kVectors];
        for (int v = 0; v < kVectors; ++v) values[v] = load(block + v * kLanes);
        for (int v = 0; v < kVectors; v += 2) {
            low = lesser(low, lesser(values[v], values[v + 1]));
            high = greater(high, greater(values[v], values[v + 1]));
            broken = mark_unordered(broken, values[v], values[v + 1]);
        }
    }

    PLAIT_TARGET Extremes extremes() const {
        float lows[kLanes], highs[kLanes];
        store(lows, low);
        store(highs, high);
        Extremes found;
        for (int lane = 0; lane < kLanes; ++lane) found.add(lows[lane], highs[lane]);
        found.broken = any(broken);
        return found;
    }
};

template <typename T>
PLAIT_TARGET Extremes find_extremes(const T *values, std::size_t n) {
    const std::size_t whole = n / kBlock * kBlock;
    Seen seen;
    for (std::size_t i = 0; i < whole; i += kBlock) {
        fetch(values + i + kAhead);
        seen.add(values + i);
    }
    Extremes found = seen.extremes();
    found.add(values, whole, n);
    return found;
}

// Writes the codes of n values; returns the extremes of the n values at `next`, whose loads and
// comparisons hide behind the divisions.
template <bool Random, typename T>
PLAIT_TARGET Extremes encode(const T *values, std::size_t n, const Grid &grid, const Stream &stream,
                             std::uint8_t *codes, const T *next) {
    if (grid.wide()) {
        scalar::encode_part<Random>(values, 0, n, grid, stream, codes);
        return find_extremes(next, n);
    }
    const std::size_t whole = n / kBlock * kBlock;
    const Floats low = all(grid.low), step = all(grid.step());
    const Words twist = all_words(stream.twist), first = all_words(Stream::kFirst);
    const Words second = all_words(Stream::kSecond), stride = all_words(kBlock / 2 * Stream::kWeyl);
    const Words half = all_words(0x8000);
    Words weyl[kWords];
    for (int w = 0; w < kWords; ++w) weyl[w] = ramp(stream.start + w * kLanes * Stream::kWeyl, Stream::kWeyl);
    Seen seen;
    for (std::size_t i = 0; i < whole; i += kBlock) {
        fetch(next + i + kAhead);
        seen.add(next + i);
        Words random[kVectors];
        for (int w = 0; w < kWords; ++w) {
            Words h = weyl[w];
            weyl[w] = plus(h, stride);
            h = times(exclusive(h, right<16>(h)), first);
            h = times(exclusive(exclusive(h, right<15>(h)), twist), second);
            h = exclusive(h, right<16>(h));
            random[w] = Random ? lower_half(h) : half;
            random[w + kWords] = Random ? right<16>(h) : half;
        }
        Words code[kVectors];
        for (int v = 0; v < kVectors; ++v) {
            const Floats fixed = (load(values + i + v * kLanes) - low) / step;
            code[v] = right<16>(plus(truncate(fixed), random[v]));
        }
        store_bytes(codes + i, code);
    }
    scalar::encode_part<Random>(values, whole, n, grid, stream, codes);
    Extremes found = seen.extremes();
    found.add(next, whole, n);
    return found;
}

// Writes what the codes of n values lose. A loop of its own, over what is in the nearest cache, is faster
// than a longer one in `encode`.
template <typename T>
PLAIT_TARGET void subtract(const T *values, const std::uint8_t *codes, std::size_t n, const Grid &grid,
                           float *residual) {
    const std::size_t whole = grid.wide() ? 0 : n / kBlock * kBlock;
    const Floats low = all(grid.low), unit = all(grid.unit);
    for (std::size_t i = 0; i < whole; i += kLanes)
        store(residual + i, load(values + i) - (low + to_floats(load_bytes(codes + i)) * unit));
    scalar::subtract_part(values, codes, whole, n, grid, residual);
}

template <bool Add, typename T>
PLAIT_TARGET void decode(const std::uint8_t *codes, std::size_t n, const Grid &grid, T *target) {
    const std::size_t whole = grid.wide() ? 0 : n / kBlock * kBlock;
    const Floats low = all(grid.low), unit = all(std::fabs(grid.unit));
    for (std::size_t i = 0; i < whole; i += kBlock) {
        fetch(target + i + 2 * kAhead);
        for (int v = 0; v < kVectors; ++v) {
            T *at = target + i + v * kLanes;
            Floats value = low + to_floats(load_bytes(codes + i + v * kLanes)) * unit;
            if (Add) value = load(at) + value;
            store(at, value);
        }
    }
    scalar::decode_part<Add>(codes, whole, n, grid, target);
}

// Floating-point weights: a few rows, read in place, times a few columns.
//
// The sum of a product has one accumulator per lane, for stretches of CHUNK weights that are added up in order. It does
// not depend on which rows and columns are computed together.
#pragma once

#include "columns.h"

namespace specdec {
namespace {

// Rows that share each load of columns, and columns that share each load of rows. Their products, and what is loaded,
// fill the registers: with 16 of them, seven loads for twelve products.
constexpr int FLOAT_ROWS = Simd::registers == 32 ? 4 : 3;
constexpr int FLOAT_COLUMNS = 4;

// Weights of a row that are multiplied by all columns before the next ones: 8 columns fill a first-level cache of 32 kB.
constexpr int64_t CHUNK = 1024;

constexpr int float_bytes(FloatType t) { return t == FloatType::F32 ? 4 : 2; }

template <FloatType T>
Float load_weights(const uint8_t *p) {
    if constexpr (T == FloatType::F32) return Simd::load_floats((const float *)p);
    if constexpr (T == FloatType::BF16) return Simd::load_bfloats(p);
    return Simd::load_halves(p);
}

// Multiply the next `lanes` weights of R rows by those of N columns.
template <FloatType T, int R, int N>
[[gnu::always_inline]] inline void add_floats(Float (&sums)[R][N], const uint8_t *w, size_t row_bytes, const float *x) {
    Float v[R];
    for (int r = 0; r < R; r++) v[r] = load_weights<T>(w + r * row_bytes);
    for (int j = 0; j < N; j++) {
        const Float c = Simd::load_floats(x + j * Simd::lanes);
        for (int r = 0; r < R; r++) sums[r][j] = Simd::fma(v[r], c, sums[r][j]);
    }
}

// Multiply a chunk of R rows by N columns in the layout of `pack_floats`, and add the products to `y` unless they are the
// first. `next` is where the weights of the next rows begin, which are prefetched: into the second-level cache, because
// the columns fill the first.
template <FloatType T, int R, int N>
void multiply_chunk(int64_t k, const uint8_t *w, size_t row_bytes, const uint8_t *next, const float *x, float *const *y,
                    int row, bool first) {
    constexpr int lanes = Simd::lanes, bytes = lanes * float_bytes(T), steps = LINE / bytes;
    Float sums[R][N];
    for (int r = 0; r < R; r++)
        for (int j = 0; j < N; j++) sums[r][j] = Simd::none();
    int64_t left = k / lanes;
    for (; left >= steps; left -= steps, w += LINE, next += LINE, x += steps * N * lanes) {
        for (int r = 0; r < R; r++) prefetch_far(next + r * row_bytes);
        for (int s = 0; s < steps; s++) add_floats<T, R, N>(sums, w + s * bytes, row_bytes, x + s * N * lanes);
    }
    for (; left > 0; left--, w += bytes, x += N * lanes) add_floats<T, R, N>(sums, w, row_bytes, x);
    if (k % lanes > 0) {  // the remainder, padded with zeros
        alignas(LINE) uint8_t rest[R][LINE] = {};
        for (int r = 0; r < R; r++) __builtin_memcpy(rest[r], w + r * row_bytes, k % lanes * float_bytes(T));
        add_floats<T, R, N>(sums, rest[0], LINE, x);
    }
    for (int j = 0; j < N; j++)
        for (int r = 0; r < R; r++) {
            float &to = y[j][row + r];
            to = (first ? 0.f : to) + Simd::total(sums[r][j]);
        }
}

template <int N>
struct MultiplyChunk {
    template <class... Arguments>
    static void run(FloatType t, int rows, Arguments... arguments) {
        rows == 1 ? of<1>(t, arguments...) : rows == FLOAT_ROWS ? of<FLOAT_ROWS>(t, arguments...) : of<3>(t, arguments...);
    }

    template <int R, class... Arguments>
    static void of(FloatType t, Arguments... arguments) {
        switch (t) {
            case FloatType::F32: return multiply_chunk<FloatType::F32, R, N>(arguments...);
            case FloatType::F16: return multiply_chunk<FloatType::F16, R, N>(arguments...);
            case FloatType::BF16: return multiply_chunk<FloatType::BF16, R, N>(arguments...);
        }
    }
};

// Columns are stored in groups of nearly equal size, at most FLOAT_COLUMNS. A group holds the first `lanes` floats of
// all its columns, then the next `lanes` floats of all, and so on.
struct FloatGroup {
    int first, width;  // its columns
};

inline int float_groups(int n) { return (n + FLOAT_COLUMNS - 1) / FLOAT_COLUMNS; }

inline FloatGroup float_group(int n, int i) {
    const int count = float_groups(n), first = i * n / count;
    return {first, (i + 1) * n / count - first};
}

void pack_floats(int64_t k, const float *x, int column, int n, float *packed) {
    constexpr int lanes = Simd::lanes;
    const int64_t steps = (k + lanes - 1) / lanes;
    int i = column * float_groups(n) / n;
    if (float_group(n, i).first + float_group(n, i).width <= column) i++;
    const FloatGroup group = float_group(n, i);
    float *out = packed + (group.first * steps + column - group.first) * lanes;
    for (int64_t i = 0; i < k / lanes; i++, out += group.width * lanes) Simd::store(out, Simd::load_floats(x + i * lanes));
    if (k % lanes)
        for (int l = 0; l < lanes; l++) out[l] = l < k % lanes ? x[k / lanes * lanes + l] : 0.f;
}

void multiply_floats(FloatType t, int64_t k, const uint8_t *w, size_t row_bytes, int rows, const float *packed, int n,
                     float *const *y) {
    const int64_t padded = (k + Simd::lanes - 1) / Simd::lanes * Simd::lanes;
    const int groups = float_groups(n);
    const auto multiply = [=](int row, int some, int64_t at) {
        const uint8_t *from = w + row * row_bytes + at * float_bytes(t), *next = from + some * row_bytes;
        const int64_t length = k - at < CHUNK ? k - at : CHUNK;
        for (int i = 0; i < groups; i++) {
            const FloatGroup g = float_group(n, i);
            const float *x = packed + g.first * padded + at * g.width;
            with_number<FLOAT_COLUMNS, MultiplyChunk>(g.width, t, some, length, from, row_bytes, next, x, y + g.first, row,
                                                       at == 0);
        }
    };
    // On Zen 5, one stream of reads is faster than four: 0.75 to 0.86 of the time with two or three columns of 2,048 weights.
    // From four columns on, or if the columns do not stay in the first-level cache, rows must share the loads of columns (2.0
    // times the time with three of 8,192). On Zen 3, even a single column is fastest with several streams. On Zen 4, three of
    // 1,536 or 8,960 halves take 0.8 and 0.5 of the time of one, whose sum has to wait for each product of its row.
    constexpr size_t first_level = 32 * 1024;
    const bool few = Simd::lanes == 16 && (n == 1 || (n <= 3 && n * padded * sizeof(float) <= first_level));
    const int together = few ? reading.rows : FLOAT_ROWS;
    // With one group, rows are read sequentially. With more, two chunks of all columns stay in the second-level cache.
    // Measured on Zen 3 with 6 to 12 columns: one or four chunks are 4 to 8 % slower.
    const int64_t stretch = groups == 1 ? k : 2 * CHUNK;
    for (int64_t begin = 0; begin < k; begin += stretch)
        for (int row = 0, some; row < rows; row += some) {
            some = rows - row >= together ? together : 1;
            for (int64_t at = begin; at < k && at < begin + stretch; at += CHUNK) multiply(row, some, at);
        }
}

}  // namespace
}  // namespace specdec

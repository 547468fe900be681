// Floating-point weights: a few rows, read in place, times a few columns.
#pragma once

#include "columns.h"

namespace specdec {
namespace {

// Prefetch distance of floating-point weights, into the second-level cache because the columns fill the first (a sixth
// faster at four tokens).
constexpr size_t FLOATS_AHEAD = 6 * 1024;

template <FloatType T>
Float load_weights(const uint8_t *p) {
    if constexpr (T == FloatType::F32) return Simd::load_floats((const float *)p);
    return Simd::load_halves(p);
}

// Number of rows that share each load of a column, and of columns that share each load of a row. With two accumulators
// per product, they fill the registers.
constexpr int FLOAT_ROWS = Simd::lanes == 16 ? 2 : 1;
constexpr int FLOAT_COLUMNS = 4;

// Multiply R rows by N columns in the layout of `pack_floats`. The two accumulators of a product are summed in the same
// order for every R and N. With only one, a single product would be limited by the latency of the addition.
template <FloatType T, int R, int N>
void multiply_rows(int64_t k, const uint8_t *w, size_t row_bytes, const float *x, float *const *y, int row) {
    constexpr int lanes = Simd::lanes, bytes = lanes * (T == FloatType::F32 ? 4 : 2);
    Float sums[2][R][N];
    for (int r = 0; r < R; r++)
        for (int j = 0; j < N; j++) sums[0][r][j] = sums[1][r][j] = Simd::none();
    const auto add = [&x](Float (&sums)[R][N], const Float (&v)[R]) {
        for (int j = 0; j < N; j++) {
            const Float c = Simd::load_floats(x + j * lanes);
            for (int r = 0; r < R; r++) sums[r][j] = Simd::fma(v[r], c, sums[r][j]);
        }
        x += N * lanes;
    };
    const auto load = [&w, row_bytes](Float (&v)[R]) {
        for (int r = 0; r < R; r++) v[r] = load_weights<T>(w + r * row_bytes);
        w += bytes;
    };
    Float v[R];
    int64_t left = k;
    for (; left >= 2 * lanes; left -= 2 * lanes) {
        for (int r = 0; r < R; r++) _mm_prefetch((const char *)w + r * row_bytes + FLOATS_AHEAD, _MM_HINT_T1);
        load(v), add(sums[0], v);
        load(v), add(sums[1], v);
    }
    if (left >= lanes) load(v), add(sums[0], v), left -= lanes;
    if (left > 0) {  // the remainder, padded with zeros
        for (int r = 0; r < R; r++) {
            alignas(LINE) uint8_t rest[bytes] = {};
            __builtin_memcpy(rest, w + r * row_bytes, left * (bytes / lanes));
            v[r] = load_weights<T>(rest);
        }
        add(sums[1], v);
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < N; j++)
            y[j][row + r] = Simd::total(Simd::fma(sums[0][r][j], Simd::all(1.f), sums[1][r][j]));
}

template <int N>
struct MultiplyRows {
    static void run(FloatType t, int rows, int64_t k, const uint8_t *w, size_t row_bytes, const float *x,
                    float *const *y, int row) {
        rows == 1 ? of<1>(t, k, w, row_bytes, x, y, row) : of<FLOAT_ROWS>(t, k, w, row_bytes, x, y, row);
    }

    template <int R>
    static void of(FloatType t, int64_t k, const uint8_t *w, size_t row_bytes, const float *x, float *const *y, int row) {
        switch (t) {
            case FloatType::F32: return multiply_rows<FloatType::F32, R, N>(k, w, row_bytes, x, y, row);
            case FloatType::F16: return multiply_rows<FloatType::F16, R, N>(k, w, row_bytes, x, y, row);
        }
    }
};

// Columns are stored in groups of FLOAT_COLUMNS. A group holds the first `lanes` floats of all its columns, then the
// next `lanes` floats of all, and so on.
void pack_floats(int64_t k, const float *x, int column, int n, float *packed) {
    constexpr int lanes = Simd::lanes;
    const int64_t steps = (k + lanes - 1) / lanes;
    const int group = column / FLOAT_COLUMNS * FLOAT_COLUMNS;
    const int width = n - group < FLOAT_COLUMNS ? n - group : FLOAT_COLUMNS;
    float *out = packed + (group * steps + column - group) * lanes;
    for (int64_t i = 0; i < k / lanes; i++, out += width * lanes) Simd::store(out, Simd::load_floats(x + i * lanes));
    if (k % lanes)
        for (int l = 0; l < lanes; l++) out[l] = l < k % lanes ? x[k / lanes * lanes + l] : 0.f;
}

void multiply_floats(FloatType t, int64_t k, const uint8_t *w, size_t row_bytes, int rows, const float *packed, int n,
                     float *const *y) {
    const int64_t padded = (k + Simd::lanes - 1) / Simd::lanes * Simd::lanes;
    for (int row = 0; row < rows;) {
        // With a single column, one stream of reads is fastest.
        const int some = n > 1 && rows - row >= FLOAT_ROWS ? FLOAT_ROWS : 1;
        for (int j = 0; j < n; j += FLOAT_COLUMNS)
            with_columns<FLOAT_COLUMNS, MultiplyRows>(n - j < FLOAT_COLUMNS ? n - j : FLOAT_COLUMNS, t, some, k, w + row * row_bytes,
                                       row_bytes, packed + j * padded, y + j, row);
        row += some;
    }
}

}  // namespace
}  // namespace specdec

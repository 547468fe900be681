// The kernels of one instruction set: its source file includes its `Simd`, then this.
#pragma once

#include <algorithm>

#include "attention.h"
#include "multiply.h"
#include "multiply_floats.h"
#ifndef __aarch64__  // where columns are arranged for instructions that multiply several of them
#include "multiply_many.h"
#include "multiply_two.h"
#endif

namespace specdec {
namespace {

#ifdef __aarch64__
int columns_per_call(Type) { return Simd::max_columns; }
#endif

// Multiply the first tile, or the first two, by the columns. Returns how many.
int multiply_some(Type t, int64_t k, const uint8_t *tile, const Columns &x, float *const *y, int rows) {
#ifndef __aarch64__
    if constexpr (Simd::two_tiles)
        if (rows > ROWS && x.n > 1 && !is_k_quant(t)) {
            with_number<Simd::max_columns, MultiplyTwo, 2>(x.n, t, k, tile, &x, y, std::min(rows, 2 * ROWS));
            return 2;
        }
    if constexpr (Simd::most_columns > Simd::max_columns)
        if (x.n > Simd::max_columns) {
            with_type<MultiplyMany>(t, k, tile, &x, y, std::min(rows, ROWS));
            return 1;
        }
#endif
    with_number<Simd::max_columns, MultiplyTile>(x.n, t, k, tile, &x, y, std::min(rows, ROWS));
    return 1;
}

void multiply(Type t, int64_t k, const uint8_t *tile, const Columns &x, float *const *y, int rows) {
    float *to[MOST_COLUMNS];
    std::copy_n(y, x.n, to);
    for (int done; rows > 0; rows -= done * ROWS, tile += done * tile_bytes(t, k)) {
        done = multiply_some(t, k, tile, x, to, rows);
        for (int j = 0; j < x.n; j++) to[j] += done * ROWS;
    }
}

constexpr Kernels kernels_named(const char *name) {
    return {name, columns_per_call, quantize, copy_column, multiply, pack_floats, multiply_floats, attend};
}

}  // namespace
}  // namespace specdec

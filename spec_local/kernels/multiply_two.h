// The kernels for two tiles of simple types together, where the tiles are in the second-level cache: of a prompt, or of more
// tokens than one group of columns.
//
// Processors with AVX-512 start two products and two loads in a cycle. A single tile loads activations for each product, and
// scales and totals besides, so that its loads take longer than its products. Two tiles share the activations. Measured on
// Zen 5 with Q8_0: 0.82 of the time with 12 columns, 0.71 with four. From memory, two tiles are read more slowly than one
// after the other: 1.06 with two columns, 1.2 with 12.
//
// What is rounded is computed in the same order as in multiply.h: the results are the same.
#pragma once

#include "multiply.h"

namespace specdec {
namespace {

constexpr int TWO = 2;  // tiles
template <class F>
[[gnu::always_inline]] inline void for_both(F f) { unrolled<TWO>(f); }

// Columns of a group. The sums and totals of seven columns and two tiles, the codes of a step and the activations of a
// column fill 31 registers. More columns are two groups.
constexpr int most_of_two(int columns) { return columns <= 7 ? columns : (columns + 1) / 2; }

// Multiply two tiles by columns from ... from+G-1 of N.
template <Type T, int N, int G>
[[gnu::noinline]] void multiply_two_tiles(int64_t k, const uint8_t *tile, const Columns &x, int from, float *const *y, int rows) {
    constexpr int steps = BLOCK / CODES;
    Blocks<T> blocks[TWO] = {Blocks<T>(tile), Blocks<T>(tile + tile_bytes(T, k))};
    const int32_t *xq = x.codes + from, *starts = x.starts + from;
    const float *xd = x.scales + from, *xs = (const float *)x.sums + from;
    Float totals[TWO][G];
    unrolled<G>([&](auto j) __attribute__((always_inline)) {
        for_both([&](auto t) __attribute__((always_inline)) { totals[t][j] = Simd::none(); });
    });
    for (int64_t b = 0; b < k / BLOCK; b++) {
        Int sums[TWO][G];
        unrolled<G>([&](auto j) __attribute__((always_inline)) {
            Int start = zero_point(T) ? Simd::broadcast(starts + j) : Simd::zero();
            Simd::keep(start);
            for_both([&](auto t) __attribute__((always_inline)) { sums[t][j] = start; });
        });
        unrolled<steps>([&](auto i) __attribute__((always_inline)) {
            forget_loads();
            Int codes[TWO];
            for_both([&](auto t) __attribute__((always_inline)) {
                codes[t] = codes_of<T>(blocks[t].codes, i, 1);
                Simd::keep(codes[t]);
            });
            unrolled<G>([&](auto j) __attribute__((always_inline)) {
                Int activations = Simd::broadcast(xq + i * N + j);
                Simd::keep(activations);
                for_both([&](auto t) __attribute__((always_inline)) {
                    sums[t][j] = Simd::dot(sums[t][j], codes[t], activations);
                    Simd::keep(sums[t][j]);
                });
            });
        });
        forget_loads();
        for_both([&](auto t) __attribute__((always_inline)) {
            const Float d = blocks[t].scale(0), m = blocks[t].minimum(0);
            unrolled<G>([&](auto j) __attribute__((always_inline)) {
                Float &total = totals[t][j];
                total = Simd::fma(Simd::floats(sums[t][j]), Simd::times(d, Simd::all(xd[j])), total);
                if constexpr (has_minimum(T)) total = Simd::fma(m, Simd::all(xs[j]), total);
                Simd::keep(total);
            });
        });
        for_both([&](auto t) __attribute__((always_inline)) { blocks[t].advance(); });
        xq += steps * N, xd += N, starts += N, xs += N;
    }
    Total last[G];
    float *second[G];
    unrolled<G>([&](auto j) __attribute__((always_inline)) {
        Simd::store(y[from + j], totals[0][j]);
        Simd::store(last[j].of, totals[1][j]);
        second[j] = y[from + j] + ROWS;
    });
    write_totals(last, G, second, rows - ROWS);
}

template <int N>
struct MultiplyTwo {
    static void run(Type t, int64_t k, const uint8_t *tile, const Columns *x, float *const *y, int rows) {
        with_type<MultiplyTwo>(t, k, tile, x, y, rows);
    }

    template <Type T>
    static void of(int64_t k, const uint8_t *tile, const Columns *x, float *const *y, int rows) {
        if constexpr (!is_k_quant(T)) {
            constexpr int G = most_of_two(N);
            multiply_two_tiles<T, N, G>(k, tile, *x, 0, y, rows);
            if constexpr (N > G) multiply_two_tiles<T, N, N - G>(k, tile, *x, G, y, rows);
        }
    }
};

}  // namespace
}  // namespace specdec

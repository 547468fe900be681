// The kernels for packed weights and many columns, of a prompt or of several users.
//
// 256 weights of each row of a tile are unpacked once, into the first-level cache, and multiplied from there by one group of
// columns after the other. Both registers of a line share each load of activations, and a group shares each load of codes.
// The totals of the tile stay in the cache, too.
//
// The integer sums are those of multiply.h, and what is rounded is computed in the same order: the results are the same.
#pragma once

#include "multiply.h"

namespace specdec {
namespace {

// Columns of a group: a sum for each of them and each register of a line, the codes of a step and the activations of a
// column fill the registers. Signed codes need their magnitudes as well.
constexpr int most_of_group(Type t) { return is_signed(t) ? 4 : 6; }
// Groups are of nearly equal size, and there are more than Simd::max_columns columns: no group is smaller.
constexpr int least_of_group(Type t) { return most_of_group(t) / 2 + 1; }

// 256 weights of each row of a tile: of a super-block, or of up to eight blocks of a simple type.
template <Type T>
struct alignas(LINE) Unpacked {
    static constexpr int parts = SUPER_BLOCK / part_length(T), n_sums = is_k_quant(T) ? sums_per_block(T) : 0;

    Int codes[SUPER_BLOCK / CODES][REGISTERS];
    // Simple types: scales and minima.
    Float scales[REGISTERS][parts], minima[REGISTERS][parts];
    // K-quants: integer scales and minima of the parts, the factors of both, and the sums of the parts times their scales
    // for the group at hand.
    Simd::Scale part_scales[REGISTERS][parts];
    Simd::Pairs part_minima[REGISTERS][n_sums + 1];
    Float factor[REGISTERS], minimum_factor[REGISTERS];
    Simd::Scaled scaled[REGISTERS][most_of_group(T)];
};

template <Type T>
void unpack_super_block(const uint8_t *tile, Unpacked<T> &to) {
    for (size_t i = 0; i < block_bytes(T); i += LINE) prefetch_near(tile + block_bytes(T) + i);
    for (int h = 0; h < REGISTERS; h++) {
        const Lines lines = {tile, h};
        for (int group = 0; group < 4; group++)
            unrolled<16>([&](auto i) __attribute__((always_inline)) {
                to.codes[step_of<T>(group, i)][h] = super_codes<T>(lines, group, i);
            });
        unpack_scales<T>(lines, to.part_scales[h]);
        to.factor[h] = Simd::load_halves(lines.pairs(0));
        if constexpr (has_minimum(T)) {
            to.minimum_factor[h] = Simd::times(Simd::load_halves(lines.pairs(2 * ROWS)), Simd::all(-1.f));
            Simd::Pairs pairs[sums_per_block(T)];
            unpack_minima<T>(lines, pairs);
            for (int i = 0; i < sums_per_block(T); i++) to.part_minima[h][i] = pairs[i];
        }
    }
}

// The next blocks of a simple type.
template <Type T>
void unpack_blocks(Blocks<T> &blocks, int n, Unpacked<T> &to) {
    for (int b = 0; b < n; b++, blocks.advance()) {
        const uint8_t *ahead = blocks.codes + header_at(T, SUPER_BLOCK / BLOCK);
        for (size_t i = 0; i < block_bytes(T); i += LINE) prefetch_near(ahead + i);
        for (size_t i = 0; i < header_bytes(T) && blocks.at_header(); i += LINE) prefetch_near(ahead - header_bytes(T) + i);
        for (int h = 0; h < REGISTERS; h++) {
            unrolled<BLOCK / CODES>([&](auto i) __attribute__((always_inline)) {
                to.codes[b * (BLOCK / CODES) + i][h] = codes_of<T>(blocks.codes + h * STEP, i, 1);
            });
            to.scales[h][b] = blocks.scale(h);
            if constexpr (has_minimum(T)) to.minima[h][b] = blocks.minimum(h);
        }
    }
}

// The sums of some steps for G columns. `x` is the first column's first code, `starts` what the sums begin with, or null.
template <Type T, int G, int Steps>
[[gnu::always_inline]] inline void sums_of_steps(Int (&sums)[REGISTERS][G], const Int (*codes)[REGISTERS], const int32_t *x, int n,
                                                 const int32_t *starts) {
    unrolled<G>([&](auto j) __attribute__((always_inline)) {
        Int start = Simd::zero();
        if (zero_point(T) && starts) {
            start = Simd::broadcast(starts + j);
            Simd::keep(start);
        }
        unrolled<REGISTERS>([&](auto h) __attribute__((always_inline)) { sums[h][j] = start; });
    });
    unrolled<Steps>([&](auto i) __attribute__((always_inline)) {
        forget_loads();
        Int of_step[REGISTERS];
        unrolled<REGISTERS>([&](auto h) __attribute__((always_inline)) {
            of_step[h] = codes[i][h];
            Simd::keep(of_step[h]);
        });
        unrolled<G>([&](auto j) __attribute__((always_inline)) {
            Int activations = Simd::broadcast(x + i * int64_t(n) + j);
            Simd::keep(activations);
            unrolled<REGISTERS>([&](auto h) __attribute__((always_inline)) {
                sums[h][j] = is_signed(T) ? Simd::dot_bytes(sums[h][j], of_step[h], activations)
                                          : Simd::dot(sums[h][j], of_step[h], activations);
                Simd::keep(sums[h][j]);
            });
        });
    });
}

// Multiply an unpacked super-block by columns first ... first+G-1.
template <Type T, int G>
[[gnu::noinline]] void multiply_super_block(Unpacked<T> &weights, const Columns &x, int first, int64_t block, Total *totals) {
    constexpr int parts = parts_per_block(T), n_sums = sums_per_block(T), steps = part_length(T) / CODES;
    constexpr int summed = is_signed(T) || T == Type::Q4_K ? steps : 4;  // see `steps_per_sum`
    const int n = x.n;
    const int32_t *xq = x.codes + block * (SUPER_BLOCK / CODES) * n + first, *xs = x.sums + block * n_sums * n + first;
    const int32_t *starts = x.starts + block * parts * n + first;
    const Int(*codes)[REGISTERS] = weights.codes;
#pragma GCC unroll 1
    for (int part = 0; part < parts; part++) {
        unrolled<steps / summed>([&](auto piece) __attribute__((always_inline)) {
            Int sums[REGISTERS][G];
            sums_of_steps<T, G, summed>(sums, codes, xq, n, piece == 0 ? starts : nullptr);
            unrolled<REGISTERS>([&](auto h) __attribute__((always_inline)) {
                Simd::Scale scale = weights.part_scales[h][part];
                Simd::keep(scale);
                unrolled<G>([&](auto j) __attribute__((always_inline)) {
                    Simd::Scaled &total = weights.scaled[h][j];
                    const Simd::Scaled before = part == 0 && piece == 0 ? Simd::no_parts() : total;
                    total = is_signed(T) ? Simd::add_scaled_wide(before, sums[h][j], scale)
                                         : Simd::add_scaled(before, sums[h][j], scale);
                });
            });
            codes += summed, xq += summed * n;
        });
        starts += n;
    }
    unrolled<G>([&](auto j) __attribute__((always_inline)) {
        const Float xd = Simd::all(x.scales[block * n + first + j]);
        for (int h = 0; h < REGISTERS; h++) {
            Float sum = Simd::times(Simd::floats(weights.scaled[h][j]), weights.factor[h]);
            if constexpr (has_minimum(T)) {
                Int of_minima = Simd::zero();
                for (int i = 0; i < n_sums; i++)
                    of_minima = Simd::dot_pairs(of_minima, weights.part_minima[h][i], xs + i * n + j);
                sum = Simd::fma(Simd::floats(of_minima), weights.minimum_factor[h], sum);
            }
            float *total = totals[j].of + h * Simd::lanes;
            Simd::store(total, Simd::fma(sum, xd, Simd::load_floats(total)));
        }
    });
}

// Multiply unpacked blocks of a simple type, from block `block` on, by columns first ... first+G-1.
template <Type T, int G>
[[gnu::noinline]] void multiply_blocks(Unpacked<T> &weights, const Columns &x, int first, int64_t block, int n_blocks, Total *totals) {
    constexpr int steps = BLOCK / CODES;
    const int n = x.n;
    const int64_t at = block * n + first;
    const int32_t *xq = x.codes + block * steps * n + first, *starts = x.starts + at;
    const float *xd = x.scales + at, *xs = (const float *)x.sums + at;
    const Int(*codes)[REGISTERS] = weights.codes;
#pragma GCC unroll 1
    for (int part = 0; part < n_blocks; part++) {
        Int sums[REGISTERS][G];
        sums_of_steps<T, G, steps>(sums, codes, xq, n, starts);
        unrolled<G>([&](auto j) __attribute__((always_inline)) {
            const Float column_scale = Simd::all(xd[j]);
            unrolled<REGISTERS>([&](auto h) __attribute__((always_inline)) {
                float *total = totals[j].of + h * Simd::lanes;
                const Int whole = is_signed(T) ? sums[h][j] : Simd::widened(sums[h][j]);
                const Float scale = Simd::times(weights.scales[h][part], column_scale);
                Float sum = Simd::fma(Simd::floats(whole), scale, Simd::load_floats(total));
                if constexpr (has_minimum(T)) sum = Simd::fma(weights.minima[h][part], Simd::all(xs[j]), sum);
                Simd::store(total, sum);
            });
        });
        codes += steps, xq += steps * n, xd += n, starts += n, xs += n;
    }
}

template <Type T>
struct Many {
    template <int G>
    struct Group {
        static void run(Unpacked<T> *weights, const Columns *x, int first, int64_t block, int n_blocks, Total *totals) {
            if constexpr (is_k_quant(T)) multiply_super_block<T, G>(*weights, *x, first, block, totals + first);
            else multiply_blocks<T, G>(*weights, *x, first, block, n_blocks, totals + first);
        }
    };

    static void multiply(int64_t k, const uint8_t *tile, const Columns &x, float *const *y, int rows) {
        constexpr int most = most_of_group(T), least = least_of_group(T), together = SUPER_BLOCK / block_length(T);
        Unpacked<T> weights;
        Total totals[Simd::most_columns] = {};
        const int groups = (x.n + most - 1) / most;
        const int64_t n_blocks = k / block_length(T);
        Blocks<T> blocks(tile);
        for (int64_t block = 0; block < n_blocks; block += together) {
            const int some = int(n_blocks - block < together ? n_blocks - block : together);
            if constexpr (is_k_quant(T)) unpack_super_block<T>(tile + block * block_bytes(T), weights);
            else unpack_blocks<T>(blocks, some, weights);
            for (int g = 0; g < groups; g++) {
                const int first = g * x.n / groups, last = (g + 1) * x.n / groups;
                with_number<most, Group, least>(last - first, &weights, &x, first, block, some, totals);
            }
        }
        write_totals(totals, x.n, y, rows);
    }
};

static_assert(Simd::most_columns <= MOST_COLUMNS);

// Q8_0 has nothing to unpack, and is limited by its products.
int columns_per_call(Type t) { return t == Type::Q8_0 ? Simd::max_columns : Simd::most_columns; }

struct MultiplyMany {
    template <Type T>
    static void of(int64_t k, const uint8_t *tile, const Columns *x, float *const *y, int rows) {
        if constexpr (T != Type::Q8_0) Many<T>::multiply(k, tile, *x, y, rows);
    }
};

}  // namespace
}  // namespace specdec

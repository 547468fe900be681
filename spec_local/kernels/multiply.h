// The kernels for packed weights.
#pragma once

#include "columns.h"

namespace specdec {
namespace {

constexpr int HALVES = ROWS / Simd::lanes;            // registers per line
constexpr int STEP = Simd::lanes * int(sizeof(int32_t));  // bytes per register

// Prefetch distance of weights, in bytes, into the first-level cache. Measured on Zen 5 with a single token, where it
// matters most: 2 kB or 16 kB, or prefetching into the second-level cache, is 3 to 8 % slower.
constexpr size_t AHEAD = 4096;

// A compiler barrier: values loaded before it are loaded again after it. Otherwise the compiler would try to keep every
// line of a block in registers, run out of them and spill.
inline void forget_loads() { __asm__ volatile("" ::: "memory"); }

inline void prefetch(const uint8_t *p) { _mm_prefetch((const char *)p + AHEAD, _MM_HINT_T0); }

// ---- activations ----

// Factor of `Columns::sums` for a simple type: its negated zero point.
constexpr int sum_factor(Type t) {
    switch (t) {
        case Type::Q4_0: return -8;
        case Type::Q5_0: return -16;
        case Type::Q4_1: return 1;
        default: return -Simd::zero_of_bytes;
    }
}

// Codes are round(x * 127 / largest), as in ggml's Q8_0 and Q8_K, but with the scale in single precision.
template <Type T>
void quantize_as(const float *x, const Columns &columns, int column, int64_t first, int64_t last) {
    constexpr int length = block_length(T), per_sum = T == Type::Q6_K ? 16 : BLOCK;
    const int n = columns.n;
    for (int64_t b = first; b < last; b++) {
        const float *in = x + b * length;
        Int magnitude = Simd::zero();
        for (int i = 0; i < length; i += Simd::lanes) magnitude = Simd::larger(magnitude, Simd::magnitude(in + i));
        const int32_t bits = Simd::largest(magnitude);
        float largest;
        __builtin_memcpy(&largest, &bits, sizeof largest);
        // Below 1e-30 the inverse might overflow; such activations count as zero.
        const float inverse = largest > 1e-30f && bits < 0x7f800000 ? 127.f / largest : 0.f;
        columns.scales[b * n + column] =
            bits < 0x7f800000 ? (inverse != 0.f ? largest / 127.f : 0.f) : __builtin_nanf("");
        alignas(LINE) int8_t codes[length] = {};
        if (inverse != 0.f)
            for (int i = 0; i < length; i += Simd::lanes) Simd::store_codes(codes + i, in + i, inverse);
        int32_t *out = columns.codes + b * (length / CODES) * n + column;
        for (int i = 0; i < length / CODES; i++) __builtin_memcpy(out + i * n, codes + i * CODES, CODES);
        int16_t sums[length / per_sum];
        for (int s = 0; s < length / per_sum; s++) {
            int sum = 0;
            for (int i = 0; i < per_sum; i++) sum += codes[s * per_sum + i];
            sums[s] = int16_t(sum);
        }
        int32_t *sums_out = columns.sums + b * sums_per_block(T) * n + column;
        if constexpr (is_k_quant(T))
            for (int s = 0; s < sums_per_block(T); s++) __builtin_memcpy(sums_out + s * n, sums + 2 * s, sizeof(int32_t));
        else
            *sums_out = sums[0] * sum_factor(T);
    }
}

// ---- simple types: blocks of 32 weights with one scale each ----

// The codes of step i of a block, in one register: half a line or a line. A block has eight steps of four weights.
template <Type T>
Int codes_of(const uint8_t *block, int i) {
    const Int low = Simd::bytes(15);
    if constexpr (T == Type::Q8_0) {
        const Int v = Simd::load(block + i * LINE);
        return Simd::zero_of_bytes ? v : v ^ Simd::bytes(0x80);
    } else {
        const Int line = Simd::load(block + (i & 3) * LINE);
        const Int nibbles = (i < 4 ? line : line >> 4) & low;
        if constexpr (T == Type::IQ4_NL) {
            constexpr int z = Simd::zero_of_bytes;
            static const int8_t values[16] = {int8_t(z - 127), int8_t(z - 104), int8_t(z - 83), int8_t(z - 65),
                                              int8_t(z - 49),  int8_t(z - 35),  int8_t(z - 22), int8_t(z - 10),
                                              int8_t(z + 1),   int8_t(z + 13),  int8_t(z + 25), int8_t(z + 38),
                                              int8_t(z + 53),  int8_t(z + 69),  int8_t(z + 89), int8_t(z + 113)};
            return Simd::shuffle(Simd::words(values), nibbles);
        } else if constexpr (T == Type::Q5_0) {
            const Int bits = Simd::load(block + 4 * LINE);
            return nibbles | ((i < 4 ? bits << (4 - i) : bits >> (i - 4)) & Simd::bytes(16));
        } else {
            return nibbles;
        }
    }
}

// Write a tile's results for one column. The last tile may have fewer than 16 rows.
inline void write(float *y, const Float (&sums)[HALVES], int rows) {
    if (rows == ROWS) {
        for (int h = 0; h < HALVES; h++) Simd::store(y + h * Simd::lanes, sums[h]);
        return;
    }
    alignas(LINE) float all[ROWS];
    for (int h = 0; h < HALVES; h++) Simd::store(all + h * Simd::lanes, sums[h]);
    for (int r = 0; r < rows; r++) y[r] = all[r];
}

template <Type T, int N>
void multiply_simple(int64_t k, const uint8_t *tile, const Columns &x, float *const *y, int rows) {
    const size_t header = header_bytes(T, k);
    const uint8_t *scales = tile, *minima = tile + header / 2, *block = tile + header;
    const int32_t *xq = x.codes, *xs = x.sums;
    const float *xd = x.scales;
    Float f[N][HALVES];
    for (int j = 0; j < N; j++)
        for (int h = 0; h < HALVES; h++) f[j][h] = Simd::none();
    for (int64_t b = 0; b < k / BLOCK; b++) {
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++) {
            Int a[N];
            for (int j = 0; j < N; j++) a[j] = has_minimum(T) || sum_factor(T) == 0 ? Simd::zero() : Simd::broadcast(xs + j);
#pragma GCC unroll 8
            for (int i = 0; i < BLOCK / CODES; i++) {
                if (h == 0 && i * LINE < block_bytes(T)) prefetch(block + i * LINE);
                const Int v = codes_of<T>(block + h * STEP, i);
                for (int j = 0; j < N; j++)
                    a[j] = T == Type::Q8_0 || T == Type::IQ4_NL ? Simd::dot_bytes(a[j], v, xq + i * N + j)
                                                                : Simd::dot(a[j], v, xq + i * N + j);
            }
            const Float d = Simd::load_halves(scales + h * Simd::lanes * 2);
            for (int j = 0; j < N; j++) {
                f[j][h] = Simd::fma(Simd::floats(a[j]), Simd::times(d, Simd::all(xd[j])), f[j][h]);
                if constexpr (has_minimum(T)) {
                    const Float m = Simd::times(Simd::load_halves(minima + h * Simd::lanes * 2), Simd::all(xd[j]));
                    f[j][h] = Simd::fma(m, Simd::all(float(xs[j])), f[j][h]);
                }
            }
        }
        block += block_bytes(T), scales += 2 * ROWS, minima += 2 * ROWS;
        xq += BLOCK / CODES * N, xs += N, xd += N;
    }
    for (int j = 0; j < N; j++) write(y[j], f[j], rows);
}

// ---- K-quants: super-blocks of 256 weights, in parts with an integer scale each ----

// Totals are kept in memory between blocks: the registers are needed for the sums within a block.
struct alignas(LINE) Total {
    float of[ROWS];
};

template <int N>
void write_totals(const Total (&totals)[N], float *const *y, int rows) {
    for (int j = 0; j < N; j++) {
        Float sums[HALVES];
        for (int h = 0; h < HALVES; h++) sums[h] = Simd::load_floats(totals[j].of + h * Simd::lanes);
        write(y[j], sums, rows);
    }
}

// Q4_K and Q5_K: weight = d * scale * code - dmin * minimum. Eight 6-bit scales and eight 6-bit minima fill 12 bytes.
// Bytes 0-3 hold the scales of parts 0-3, bytes 4-7 their minima. Those of parts 4-7 are in bytes 8-11 and the upper
// bits of bytes 0-7.
template <Type T, int N>
void multiply_k(int64_t k, const uint8_t *tile, const Columns &x, float *const *y, int rows) {
    constexpr bool five = T == Type::Q5_K;
    constexpr size_t lines_before = five ? 12 : 4;  // of scales and fifth bits
    Total totals[N] = {};
    const int32_t *xq = x.codes, *xs = x.sums;
    const float *xd = x.scales;
    // Bytes 0 and 1, and bytes 2 and 3, of each lane as two 16-bit numbers.
    static const int8_t first_pair[16] = {0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1};
    static const int8_t second_pair[16] = {2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15, -1};
    for (int64_t b = 0; b < k / SUPER_BLOCK; b++) {
        for (size_t i = 0; i < lines_before; i++) prefetch(tile + i * LINE);
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++) {
            const uint8_t *in = tile + h * STEP, *codes = in + lines_before * LINE;
            const Float d = Simd::load_halves(tile + h * Simd::lanes * 2);
            const Float dmin = Simd::load_halves(tile + 2 * ROWS + h * Simd::lanes * 2);
            const Int u0 = Simd::load(in + LINE), u1 = Simd::load(in + 2 * LINE), u2 = Simd::load(in + 3 * LINE);
            const Int six = Simd::bytes(0x3f), upper = Simd::bytes(0x30), low = Simd::bytes(0x0f);
            const Int scales[2] = {u0 & six, (u2 & low) | (u0 >> 2 & upper)};
            const Int minima[2] = {u1 & six, (u2 >> 4 & low) | (u1 >> 2 & upper)};
            const Int pairs[4] = {Simd::shuffle(minima[0], Simd::words(first_pair)),
                                  Simd::shuffle(minima[0], Simd::words(second_pair)),
                                  Simd::shuffle(minima[1], Simd::words(first_pair)),
                                  Simd::shuffle(minima[1], Simd::words(second_pair))};
            Float g[N];
            for (int j = 0; j < N; j++) {
                Int a = Simd::zero();
                for (int i = 0; i < 4; i++) a = Simd::dot_pairs(a, pairs[i], xs + i * N + j);
                g[j] = Simd::times(Simd::floats(a), Simd::times(dmin, Simd::all(-1.f)));
            }
#pragma GCC unroll 8
            for (int s = 0; s < 8; s++) {
                forget_loads();
                Int a[N];
                for (int j = 0; j < N; j++) a[j] = Simd::zero();
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++) {
                    const uint8_t *line = codes + ((s / 2) * 8 + i) * LINE;
                    if (h == 0 && s % 2 == 0) prefetch(line);
                    const Int both = Simd::load(line);
                    Int v = (s % 2 ? both >> 4 : both) & low;
                    if constexpr (five) {
                        const Int bits = Simd::load(in + (4 + i) * LINE);
                        v = v | ((s < 4 ? bits << (4 - s) : bits >> (s - 4)) & Simd::bytes(16));
                    }
                    for (int j = 0; j < N; j++) a[j] = Simd::dot(a[j], v, xq + (s * 8 + i) * N + j);
                }
                const Float scale = Simd::times(Simd::floats(Simd::byte(scales[s / 4], s % 4)), d);
                for (int j = 0; j < N; j++) g[j] = Simd::fma(Simd::floats(a[j]), scale, g[j]);
            }
            for (int j = 0; j < N; j++) {
                float *total = totals[j].of + h * Simd::lanes;
                Simd::store(total, Simd::fma(g[j], Simd::all(xd[j]), Simd::load_floats(total)));
            }
        }
        tile += block_bytes(T), xq += SUPER_BLOCK / CODES * N, xs += sums_per_block(T) * N, xd += N;
    }
    write_totals(totals, y, rows);
}

// Q6_K: weight = d * scale * (code - 32), with sixteen int8 scales.
template <int N>
void multiply_q6_k(int64_t k, const uint8_t *tile, const Columns &x, float *const *y, int rows) {
    Total totals[N] = {};
    const int32_t *xq = x.codes, *xs = x.sums;
    const float *xd = x.scales;
    for (int64_t b = 0; b < k / SUPER_BLOCK; b++) {
        for (int i = 0; i < 5; i++) prefetch(tile + i * LINE);
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++) {
            const uint8_t *in = tile + h * STEP, *lows = in + 5 * LINE, *highs = lows + 32 * LINE;
            const Float d = Simd::load_halves(tile + h * Simd::lanes * 2);
            const Int low = Simd::bytes(15), upper = Simd::bytes(0x30);
            Int scales[4], zeros[N];
            for (int i = 0; i < 4; i++) scales[i] = Simd::load(in + (1 + i) * LINE);
            for (int j = 0; j < N; j++) zeros[j] = Simd::zero();
            for (int i = 0; i < 8; i++) {
                const Int pair = Simd::signed_pair(scales[i / 2], i % 2);
                for (int j = 0; j < N; j++) zeros[j] = Simd::dot_pairs(zeros[j], pair, xs + i * N + j);
            }
            Float g[N];
            for (int j = 0; j < N; j++) g[j] = Simd::times(Simd::floats(zeros[j]), Simd::all(-32.f));
#pragma GCC unroll 16
            for (int s = 0; s < 16; s++) {
                forget_loads();
                Int a[N];
                for (int j = 0; j < N; j++) a[j] = Simd::zero();
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    const int step = s * 4 + i;
                    const uint8_t *l = lows + (step & 31) * LINE, *u = highs + (step & 15) * LINE;
                    if (h == 0 && step < 32) prefetch(l);
                    if (h == 0 && step < 16) prefetch(u);
                    const Int four = (step < 32 ? Simd::load(l) : Simd::load(l) >> 4) & low;
                    const Int two = step < 16   ? Simd::load(u) << 4
                                    : step < 32 ? Simd::load(u) << 2
                                    : step < 48 ? Simd::load(u)
                                                : Simd::load(u) >> 2;
                    const Int v = four | (two & upper);
                    for (int j = 0; j < N; j++) a[j] = Simd::dot(a[j], v, xq + step * N + j);
                }
                const Float scale = Simd::floats(Simd::signed_byte(scales[s / 4], s % 4));
                for (int j = 0; j < N; j++) g[j] = Simd::fma(Simd::floats(a[j]), scale, g[j]);
            }
            for (int j = 0; j < N; j++) {
                float *total = totals[j].of + h * Simd::lanes;
                const Float scale = Simd::times(d, Simd::all(xd[j]));
                Simd::store(total, Simd::fma(g[j], scale, Simd::load_floats(total)));
            }
        }
        tile += block_bytes(Type::Q6_K), xq += SUPER_BLOCK / CODES * N, xs += 8 * N, xd += N;
    }
    write_totals(totals, y, rows);
}

// ---- dispatch to template instances ----

template <int N>
struct MultiplyTile {
    static void run(Type t, int64_t k, const uint8_t *tile, const Columns *x, float *const *y, int rows) {
        switch (t) {
            case Type::Q4_0: return multiply_simple<Type::Q4_0, N>(k, tile, *x, y, rows);
            case Type::Q4_1: return multiply_simple<Type::Q4_1, N>(k, tile, *x, y, rows);
            case Type::Q5_0: return multiply_simple<Type::Q5_0, N>(k, tile, *x, y, rows);
            case Type::Q8_0: return multiply_simple<Type::Q8_0, N>(k, tile, *x, y, rows);
            case Type::IQ4_NL: return multiply_simple<Type::IQ4_NL, N>(k, tile, *x, y, rows);
            case Type::Q4_K: return multiply_k<Type::Q4_K, N>(k, tile, *x, y, rows);
            case Type::Q5_K: return multiply_k<Type::Q5_K, N>(k, tile, *x, y, rows);
            case Type::Q6_K: return multiply_q6_k<N>(k, tile, *x, y, rows);
        }
    }
};

void quantize(Type t, const float *x, const Columns &columns, int column, int64_t first, int64_t last) {
    switch (t) {
        case Type::Q4_0: return quantize_as<Type::Q4_0>(x, columns, column, first, last);
        case Type::Q4_1: return quantize_as<Type::Q4_1>(x, columns, column, first, last);
        case Type::Q5_0: return quantize_as<Type::Q5_0>(x, columns, column, first, last);
        case Type::Q8_0: return quantize_as<Type::Q8_0>(x, columns, column, first, last);
        case Type::IQ4_NL: return quantize_as<Type::IQ4_NL>(x, columns, column, first, last);
        case Type::Q4_K: return quantize_as<Type::Q4_K>(x, columns, column, first, last);
        case Type::Q5_K: return quantize_as<Type::Q5_K>(x, columns, column, first, last);
        case Type::Q6_K: return quantize_as<Type::Q6_K>(x, columns, column, first, last);
    }
}

void multiply(Type t, int64_t k, const uint8_t *tile, const Columns &x, float *const *y, int rows) {
    with_columns<Simd::max_columns, MultiplyTile>(x.n, t, k, tile, &x, y, rows);
}

}  // namespace
}  // namespace specdec

// The kernels for packed weights.
//
// A part is what shares a scale: 32 or 16 weights of each of 16 rows. Its codes are unpacked a few registers at a time,
// and those are multiplied by one column after the other. What limits the number of columns is that each has a sum.
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

// The code that stands for zero. 8-bit codes are signed where the dot product cannot read them as unsigned.
constexpr int zero_point(Type t) {
    switch (t) {
        case Type::Q4_0: return 8;
        case Type::Q5_0: return 16;
        case Type::Q6_K: return 32;
        case Type::Q8_0:
        case Type::IQ4_NL: return Simd::zero_of_bytes;
        default: return 0;
    }
}

constexpr bool is_signed(Type t) { return (t == Type::Q8_0 || t == Type::IQ4_NL) && zero_point(t) == 0; }

// ---- activations ----

// Codes are round(x * 127 / largest), as in ggml's Q8_0 and Q8_K, but with the scale in single precision.
template <Type T>
void quantize_as(const float *x, const Columns &columns, int column, int64_t first, int64_t last) {
    constexpr int length = block_length(T), parts = parts_per_block(T), n_sums = sums_per_block(T);
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
        const float scale = bits < 0x7f800000 ? (inverse != 0.f ? largest / 127.f : 0.f) : __builtin_nanf("");
        columns.scales[b * n + column] = scale;
        alignas(LINE) int8_t codes[length] = {};
        if (inverse != 0.f)
            for (int i = 0; i < length; i += Simd::lanes) Simd::store_codes(codes + i, in + i, inverse);
        int32_t *out = columns.codes + b * (length / CODES) * n + column;
        for (int i = 0; i < length / CODES; i++) __builtin_memcpy(out + i * n, codes + i * CODES, CODES);
        if constexpr (zero_point(T) == 0 && n_sums == 0) continue;
        int16_t sums[parts][2];  // of the first two and of the last two codes of each step
        for (int p = 0; p < parts; p++) {
            int pair[2] = {};
            for (int i = 0; i < part_length(T); i++) pair[i / 2 % 2] += codes[p * part_length(T) + i];
            sums[p][0] = int16_t(pair[0]), sums[p][1] = int16_t(pair[1]);
        }
        if constexpr (zero_point(T) != 0)
            for (int p = 0; p < parts; p++)
                columns.starts[(b * parts + p) * n + column] = Simd::start(-zero_point(T) * sums[p][0], -zero_point(T) * sums[p][1]);
        int32_t *sums_out = columns.sums + b * n_sums * n + column;
        if constexpr (n_sums == 1) {
            const float sum = scale * float(sums[0][0] + sums[0][1]);
            __builtin_memcpy(sums_out, &sum, sizeof sum);
        } else {
            for (int s = 0; s < n_sums; s++) {
                const int16_t two[2] = {int16_t(sums[2 * s][0] + sums[2 * s][1]), int16_t(sums[2 * s + 1][0] + sums[2 * s + 1][1])};
                __builtin_memcpy(sums_out + s * n, two, sizeof two);
            }
        }
    }
}

// ---- what simple types and K-quants share ----

// sum + the products of several registers of codes with one column. `x` is the column's first code; the next ones are n
// int32 apart.
template <bool Signed, int N, int Steps>
Int add_products(Int sum, const Int (&codes)[Steps], const int32_t *x) {
    for (int i = 0; i < Steps; i++) {
        sum = Signed ? Simd::dot_bytes(sum, codes[i], x + i * N) : Simd::dot(sum, codes[i], x + i * N);
        Simd::keep(sum);
    }
    return sum;
}

// Totals of a tile are kept in memory between blocks: the registers are needed for the sums within a block.
struct alignas(LINE) Total {
    float of[ROWS];
};

// Write a tile's results. The last tile may have fewer than 16 rows.
template <int N>
void write_totals(const Total (&totals)[N], float *const *y, int rows) {
    for (int j = 0; j < N; j++) __builtin_memcpy(y[j], totals[j].of, rows * sizeof(float));
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
        const Int nibbles = (i < 4 ? line : Simd::right(line, 4)) & low;
        if constexpr (T == Type::IQ4_NL) {
            constexpr int z = Simd::zero_of_bytes;
            static const int8_t values[16] = {int8_t(z - 127), int8_t(z - 104), int8_t(z - 83), int8_t(z - 65),
                                              int8_t(z - 49),  int8_t(z - 35),  int8_t(z - 22), int8_t(z - 10),
                                              int8_t(z + 1),   int8_t(z + 13),  int8_t(z + 25), int8_t(z + 38),
                                              int8_t(z + 53),  int8_t(z + 69),  int8_t(z + 89), int8_t(z + 113)};
            return Simd::shuffle(Simd::words(values), nibbles);
        } else if constexpr (T == Type::Q5_0) {
            const Int bits = Simd::load(block + 4 * LINE);
            return nibbles | ((i < 4 ? Simd::left(bits, 4 - i) : Simd::right(bits, i - 4)) & Simd::bytes(16));
        } else {
            return nibbles;
        }
    }
}

template <Type T, int N>
void multiply_simple(int64_t k, const uint8_t *tile, const Columns &x, float *const *y, int rows) {
    constexpr int steps = BLOCK / CODES, held = is_signed(T) ? Simd::held_signed : Simd::held;
    const size_t header = header_bytes(T, k);
    const uint8_t *scales = tile, *minima = tile + header / 2, *block = tile + header;
    const int32_t *xq = x.codes, *starts = x.starts;
    const float *xd = x.scales, *xs = (const float *)x.sums;
    Total totals[N] = {};
    for (int64_t b = 0; b < k / BLOCK; b++) {
#pragma GCC unroll 1
        for (int h = 0; h < HALVES; h++) {
            for (size_t i = h; i < block_bytes(T) / LINE; i += HALVES) prefetch(block + i * LINE);
            forget_loads();
            Int sums[N];
            for (int j = 0; j < N; j++) sums[j] = zero_point(T) ? Simd::broadcast(starts + j) : Simd::zero();
#pragma GCC unroll 8
            for (int first = 0; first < steps; first += held) {
                if (first > 0) forget_loads();
                Int codes[held];
                for (int i = 0; i < held; i++) codes[i] = codes_of<T>(block + h * STEP, first + i);
                for (int j = 0; j < N; j++) sums[j] = add_products<is_signed(T), N>(sums[j], codes, xq + first * N + j);
            }
            const Float d = Simd::load_halves(scales + h * Simd::lanes * 2);
            for (int j = 0; j < N; j++) {
                float *total = totals[j].of + h * Simd::lanes;
                const Int whole = is_signed(T) ? sums[j] : Simd::widened(sums[j]);
                Float sum = Simd::fma(Simd::floats(whole), Simd::times(d, Simd::all(xd[j])), Simd::load_floats(total));
                if constexpr (has_minimum(T))
                    sum = Simd::fma(Simd::load_halves(minima + h * Simd::lanes * 2), Simd::all(xs[j]), sum);
                Simd::store(total, sum);
            }
        }
        block += block_bytes(T), scales += 2 * ROWS, minima += 2 * ROWS;
        xq += steps * N, xd += N, starts += N, xs += N;
    }
    write_totals(totals, y, rows);
}

// ---- K-quants: super-blocks of 256 weights, in parts with an integer scale each ----

// The sums of one half of a super-block: for each column, those of its parts times their scales.
template <int N>
struct Parts {
    Simd::Scaled of[N];

    Parts() {
        for (int j = 0; j < N; j++) of[j] = Simd::no_parts();
    }

    // Add (a piece of) a part: the products of codes and columns, times its scale. `starts` is null if they begin with 0.
    template <bool Signed = false, int Steps>
    void add(const Int (&codes)[Steps], const int32_t *x, const int32_t *starts, Simd::Scale scale) {
        for (int j = 0; j < N; j++) {
            const Int start = starts ? Simd::broadcast(starts + j) : Simd::zero();
            of[j] = Simd::add_scaled(of[j], add_products<Signed, N>(start, codes, x + j), scale);
            Simd::keep(of[j]);
        }
    }
};

// Q4_K and Q5_K: weight = d * scale * code - dmin * minimum. Eight 6-bit scales and eight 6-bit minima fill 12 bytes.
// Bytes 0-3 hold the scales of parts 0-3, bytes 4-7 their minima. Those of parts 4-7 are in bytes 8-11 and the upper
// bits of bytes 0-7.
template <Type T, int N>
void multiply_k(int64_t k, const uint8_t *tile, const Columns &x, float *const *y, int rows) {
    constexpr bool five = T == Type::Q5_K;
    constexpr size_t lines_before = five ? 12 : 4;  // of scales and fifth bits
    constexpr int held = Simd::held;
    Total totals[N] = {};
    const int32_t *xq = x.codes, *xs = x.sums;
    const float *xd = x.scales;
    // Bytes 0 and 1, and bytes 2 and 3, of each lane as two 16-bit numbers.
    static const int8_t first_pair[16] = {0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1};
    static const int8_t second_pair[16] = {2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15, -1};
    for (int64_t b = 0; b < k / SUPER_BLOCK; b++) {
#pragma GCC unroll 1
        for (int h = 0; h < HALVES; h++) {
            const uint8_t *in = tile + h * STEP, *codes = in + lines_before * LINE;
            for (size_t i = h; i < lines_before; i += HALVES) prefetch(tile + i * LINE);
            const Int low = Simd::bytes(15), six = Simd::bytes(63), top = Simd::bytes(0x30);
            const Int a = Simd::load(in + LINE), m = Simd::load(in + 2 * LINE), c = Simd::load(in + 3 * LINE);
            const Int scales[2] = {a & six, (c & low) | (Simd::right(a, 2) & top)};
            const Int minima[2] = {m & six, (Simd::right(c, 4) & low) | (Simd::right(m, 2) & top)};
            Simd::Scale scale[8];
            for (int p = 0; p < 8; p++) scale[p] = Simd::scale(scales[p / 4], p % 4);
            Parts<N> parts;
#pragma GCC unroll 1
            for (int g = 0; g < 4; g++) {  // a line holds the codes of two parts
                const uint8_t *lines = codes + g * 8 * LINE;
                for (int i = h; i < 8; i += HALVES) prefetch(tile + lines_before * LINE + (g * 8 + i) * LINE);
                for (int part = 0; part < 2; part++)
                    for (int first = 0; first < 8; first += held) {
                        forget_loads();
                        Int v[held];
                        for (int i = 0; i < held; i++) {
                            const Int line = Simd::load(lines + (first + i) * LINE);
                            v[i] = (part ? Simd::right(line, 4) : line) & low;
                            if constexpr (five) {
                                const Int bits = Simd::right_by(Simd::load(in + (4 + first + i) * LINE), 2 * g + part);
                                v[i] = v[i] | (Simd::left(bits, 4) & Simd::bytes(16));
                            }
                        }
                        parts.add(v, xq + ((2 * g + part) * 8 + first) * N, nullptr, scale[2 * g + part]);
                    }
            }
            forget_loads();
            const Int words1 = Simd::words(first_pair), words2 = Simd::words(second_pair);
            const Int pairs[4] = {Simd::shuffle(minima[0], words1), Simd::shuffle(minima[0], words2),
                                  Simd::shuffle(minima[1], words1), Simd::shuffle(minima[1], words2)};
            const Float d = Simd::load_halves(tile + h * Simd::lanes * 2);
            const Float dmin = Simd::times(Simd::load_halves(tile + 2 * ROWS + h * Simd::lanes * 2), Simd::all(-1.f));
            for (int j = 0; j < N; j++) {
                Int sum = Simd::zero();
                for (int i = 0; i < 4; i++) sum = Simd::dot_pairs(sum, pairs[i], xs + i * N + j);
                float *total = totals[j].of + h * Simd::lanes;
                const Float scale = Simd::all(xd[j]);
                const Float both = Simd::fma(Simd::floats(parts.of[j]), d, Simd::times(Simd::floats(sum), dmin));
                Simd::store(total, Simd::fma(both, scale, Simd::load_floats(total)));
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
    const int32_t *xq = x.codes, *starts = x.starts;
    const float *xd = x.scales;
    for (int64_t b = 0; b < k / SUPER_BLOCK; b++) {
#pragma GCC unroll 1
        for (int h = 0; h < HALVES; h++) {
            const uint8_t *in = tile + h * STEP, *lows = in + 5 * LINE, *highs = lows + 32 * LINE;
            for (int i = h; i < 5; i += HALVES) prefetch(tile + i * LINE);
            const Int low = Simd::bytes(15), upper = Simd::bytes(0x30);
            Parts<N> parts;
#pragma GCC unroll 1
            for (int z = 0; z < 4; z++) {  // a line of high bits holds those of four parts
                for (int i = h; i < 8; i += HALVES) prefetch(tile + (5 + z * 8 + i) * LINE);
                for (int i = h; i < 4; i += HALVES) prefetch(tile + (37 + z * 4 + i) * LINE);
                for (int quarter = 0; quarter < 4; quarter++) {
                    forget_loads();
                    const int part = 4 * quarter + z;
                    Int v[4];
                    for (int i = 0; i < 4; i++) {
                        const Int l = Simd::load(lows + ((quarter & 1) * 16 + z * 4 + i) * LINE);
                        const Int u = Simd::load(highs + (z * 4 + i) * LINE);
                        const Int two = quarter < 2 ? Simd::left(u, 4 - 2 * quarter) : Simd::right(u, 2 * quarter - 4);
                        v[i] = ((quarter < 2 ? l : Simd::right(l, 4)) & low) | (two & upper);
                    }
                    const Simd::Scale scale = Simd::signed_scale(Simd::load(in + (1 + quarter) * LINE), z);
                    parts.add(v, xq + part * 4 * N, starts + part * N, scale);
                }
            }
            const Float d = Simd::load_halves(tile + h * Simd::lanes * 2);
            for (int j = 0; j < N; j++) {
                float *total = totals[j].of + h * Simd::lanes;
                const Float scale = Simd::times(d, Simd::all(xd[j]));
                Simd::store(total, Simd::fma(Simd::floats(parts.of[j]), scale, Simd::load_floats(total)));
            }
        }
        tile += block_bytes(Type::Q6_K), xq += SUPER_BLOCK / CODES * N, starts += 16 * N, xd += N;
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

// The kernels for packed weights.
//
// A part is what shares a scale: 32 or 16 weights of each of 16 rows. Its codes are unpacked a few registers at a time,
// and those are multiplied by one column after the other. What limits the number of columns is that each has a sum.
//
// The compiler must inline what unpacks codes: their number is a constant for it then, and they stay in registers.
#pragma once

#include "columns.h"

namespace specdec {
namespace {

constexpr int REGISTERS = ROWS / Simd::lanes;             // per line
constexpr int STEP = Simd::lanes * int(sizeof(int32_t));  // bytes per register

// A compiler barrier: values loaded before it are loaded again after it. Otherwise the compiler would try to keep every
// line of a block in registers, run out of them and spill.
inline void forget_loads() { __asm__ volatile("" ::: "memory"); }

// GCC drops a call of a function that only prefetches, unless it inlines it early. With nine columns or more, it would spill
// sums beside a condition; their weights are read before they are needed in any case.
template <int N>
[[gnu::always_inline]] inline void prefetch(const uint8_t *p) {
    const Ahead ahead = reading.ahead;
    if (N > 8 || ahead.near) prefetch_near(p + ahead.near);
    if constexpr (N >= Simd::far_from) prefetch_far(p + ahead.far);
}

// The code that stands for zero. 8-bit codes are signed where the dot product cannot read them as unsigned.
constexpr int zero_point(Type t) {
    switch (t) {
        case Type::Q3_K: return 4;
        case Type::Q4_0: return 8;
        case Type::MXFP4: return 12;
        case Type::Q5_0:
        case Type::Q5_1: return 16;
        case Type::Q6_K: return 32;
        case Type::Q8_0:
        case Type::IQ4_NL:
        case Type::IQ4_XS: return Simd::zero_of_bytes;
        default: return 0;
    }
}

// What the codes of a part are multiplied by where they are unpacked: bits that are not the lowest ones of their byte need
// no shift then, and the scale of the part makes up for it. Exact, since all of these are powers of two.
constexpr int multiple(Type t, int part) {  // of a group
    constexpr int of_q2_k[] = {1, 4, 16, 64}, of_q3_k[] = {1, 8, 8, 32};
    if (!Simd::multiples) return 1;
    switch (t) {
        case Type::Q2_K: return of_q2_k[part];
        case Type::Q3_K: return of_q3_k[part];
        case Type::Q4_K: return part ? 16 : 1;
        case Type::Q5_K: return part ? 8 : 1;
        case Type::Q6_K: return part == 3 ? 4 : 1;
        default: return 1;
    }
}
constexpr int parts_per_group(Type t) { return parts_per_block(t) / 4; }
constexpr int most_multiple(Type t) { return multiple(t, parts_per_group(t) - 1); }
// The part of its group that is part p of the super-block: see `step_of`.
constexpr int part_of_group(Type t, int p) { return part_length(t) == 32 ? p % 2 : p / 4; }

constexpr bool is_signed(Type t) {
    return (t == Type::Q8_0 || t == Type::IQ4_NL || t == Type::IQ4_XS) && zero_point(t) == 0;
}

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
        for (int i = 0; i < length / CODES; i++)
            __builtin_memcpy(columns.codes + place_of(b * (length / CODES) + i, column, n), codes + i * CODES, CODES);
        if constexpr (zero_point(T) == 0 && n_sums == 0) continue;
        int16_t sums[parts][2];  // of the first two and of the last two codes of each step
        for (int p = 0; p < parts; p++) {
            const int32_t two = sums_of_pairs<part_length(T)>(codes + p * part_length(T));
            __builtin_memcpy(sums[p], &two, sizeof two);
        }
        if constexpr (zero_point(T) != 0)
            for (int p = 0; p < parts; p++) {
                const int zero = -zero_point(T) * (is_k_quant(T) ? multiple(T, part_of_group(T, p)) : 1);
                columns.starts[(b * parts + p) * n + column] = Simd::start(zero * sums[p][0], zero * sums[p][1]);
            }
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

void copy_column(Type t, const Columns &from, int i, const Columns &to, int j, int64_t first, int64_t last) {
    const int64_t steps = block_length(t) / CODES;
    for (int64_t s = first * steps; s < last * steps; s++)
        to.codes[place_of(s, j, to.n)] = from.codes[place_of(s, i, from.n)];
    const auto copy = [&](const auto *source, auto *target, int64_t per_block) {
        for (int64_t c = first * per_block; c < last * per_block; c++) target[c * to.n + j] = source[c * from.n + i];
    };
    copy(from.scales, to.scales, 1);
    copy(from.starts, to.starts, parts_per_block(t));
    copy(from.sums, to.sums, sums_per_block(t));
}

// ---- what simple types and K-quants share ----

// Up to so many columns, both registers of a line of AVX2 are multiplied together and share the loads of activations: as
// long as the registers suffice for what the type needs. Measured on Zen 3 with four columns: 0.87 of the time for Q4_0,
// 0.90 for Q4_K. The other K-quants spill with more than two: Q6_K took 1.7 times as long with four. Q3_K spills with any
// number.
constexpr int most_of_both(Type t) { return !is_k_quant(t) || t == Type::Q4_K ? 4 : t == Type::Q3_K ? 0 : 2; }

// Registers of a line that are multiplied together, and the steps of each whose codes are held.
template <Type T, int N>
constexpr int WIDTH = REGISTERS == 2 && N <= most_of_both(T) ? 2 : 1;
template <Type T, int N>
constexpr int HELD = (is_signed(T) ? Simd::held_signed(N) : Simd::held(N)) / WIDTH<T, N>;

// Columns are multiplied in groups of COLUMNS_TOGETHER, and what remains one by one. Call `f` with the number of each group
// and its size.
template <int N>
constexpr int GROUPS = (N + COLUMNS_TOGETHER - 1) / COLUMNS_TOGETHER;
template <int N, class F>
[[gnu::always_inline]] inline void for_groups(F f) {
    unrolled<GROUPS<N>>([&](auto g) __attribute__((always_inline)) {
        constexpr int left = N - g * COLUMNS_TOGETHER;
        f(g, std::integral_constant<int, (left < COLUMNS_TOGETHER ? 1 : COLUMNS_TOGETHER)>{});
    });
}

// Totals of a tile are kept in memory between blocks: the registers are needed for the sums within a block.
struct alignas(LINE) Total {
    float of[ROWS];
};

// Write a tile's results for n columns. The last tile of a matrix may have fewer than 16 rows; the others need no call of
// memcpy.
inline void write_totals(const Total *totals, int n, float *const *y, int rows) {
    for (int j = 0; j < n; j++) {
        if (rows == ROWS) __builtin_memcpy(y[j], totals[j].of, sizeof(Total));
        else __builtin_memcpy(y[j], totals[j].of, rows * sizeof(float));
    }
}

// ---- simple types: blocks of 32 weights with one scale each ----

// The values that the nibbles of IQ4_NL and IQ4_XS stand for, plus their zero point.
[[gnu::always_inline]] inline Int iq4_values(Int nibbles) {
    constexpr int z = Simd::zero_of_bytes;
    static const int8_t values[16] = {int8_t(z - 127), int8_t(z - 104), int8_t(z - 83), int8_t(z - 65),
                                      int8_t(z - 49),  int8_t(z - 35),  int8_t(z - 22), int8_t(z - 10),
                                      int8_t(z + 1),   int8_t(z + 13),  int8_t(z + 25), int8_t(z + 38),
                                      int8_t(z + 53),  int8_t(z + 69),  int8_t(z + 89), int8_t(z + 113)};
    return Simd::shuffle(Simd::words(values), nibbles);
}

// Twice the values that the nibbles of MXFP4 stand for, plus their zero point.
[[gnu::always_inline]] inline Int mxfp4_values(Int nibbles) {
    constexpr int z = zero_point(Type::MXFP4);
    static const int8_t values[16] = {z, z + 1, z + 2, z + 3, z + 4, z + 6, z + 8, z + 12,
                                      z, z - 1, z - 2, z - 3, z - 4, z - 6, z - 8, z - 12};
    return Simd::shuffle(Simd::words(values), nibbles);
}

// The low or the high nibbles of a line.
[[gnu::always_inline]] inline Int nibbles_of(Int line, bool high) {
    return high ? Simd::high_nibbles(line) : line & Simd::bytes(15);
}

// Some bits of each byte of `v`, moved to the right.
[[gnu::always_inline]] inline Int bits_of(Int v, int shift, int mask) {
    return (shift ? Simd::right(v, shift) : v) & Simd::bytes(mask);
}

// Five bytes hold eight codes of five bits: the first five in their low bits, the others in their upper bits. One of those,
// i = 0, 1 or 2, times 1 or 8.
template <class Bytes>
[[gnu::always_inline]] inline Int upper_five_bits(Bytes bytes, int i, int multiple) {
    const int s = multiple == 1 ? 3 : 0;
    const Int upper = bits_of(bytes(i), s, 0xe0 >> s);
    if (i < 2) return upper | bits_of(bytes(3 + i), 3 + s, 0x18 >> s);
    return upper | bits_of(bytes(3), 1 + s, 0x10 >> s) | bits_of(bytes(4), 2 + s, 0x08 >> s);
}

// The codes of step i of a block, in one register: a line or a part of it. A block has eight steps of four weights. The
// last ones are multiplied by `multiple`.
template <Type T>
[[gnu::always_inline]] inline Int codes_of(const uint8_t *block, int i, int multiple) {
    if constexpr (T == Type::Q8_0) {
        const Int v = Simd::load(block + i * LINE);
        return Simd::zero_of_bytes == PACKED_ZERO ? v : v ^ Simd::bytes(0x80);
    }
    const auto line = [&](int which) __attribute__((always_inline)) { return Simd::load(block + which * LINE); };
    if constexpr (T == Type::Q5_0 || T == Type::Q5_1)
        return i < 5 ? line(i) & Simd::bytes(31) : upper_five_bits(line, i - 5, multiple);
    if (i >= 4 && multiple == 16) return line(i - 4) & Simd::bytes(0xf0);
    const Int nibbles = nibbles_of(line(i % 4), i >= 4);
    if constexpr (T == Type::IQ4_NL) return iq4_values(nibbles);
    if constexpr (T == Type::MXFP4) return mxfp4_values(nibbles);
    return nibbles;
}

// What the last steps of a block are multiplied by where they are unpacked, and the first one of those steps. It costs a
// shift and an addition for each column, so that it pays for one.
template <Type T, int N>
constexpr int SIMPLE_MULTIPLE = !Simd::multiples || N > 1                  ? 1
                                : T == Type::Q4_0 || T == Type::Q4_1 ? 16
                                : T == Type::Q5_0 || T == Type::Q5_1 ? 8
                                                                     : 1;
constexpr int first_multiple(Type t) { return t == Type::Q5_0 || t == Type::Q5_1 ? 5 : 4; }

// The blocks of a tile of a simple type, one after the other.
template <Type T>
class Blocks {
public:
    const uint8_t *scales, *codes;

    explicit Blocks(const uint8_t *tile) : scales(tile), codes(tile + header_bytes(T)) {}

    bool at_header() const { return left == TOGETHER; }

    [[gnu::always_inline]] void advance() {
        scales += scales_bytes(T), codes += block_bytes(T);
        if (--left > 0) return;
        scales = codes, codes += header_bytes(T);
        left = TOGETHER;
    }

    // The scales of the rows of register `h` of a line.
    [[gnu::always_inline]] Float scale(int h) const { return at(scales, h); }

    // The minima of these rows, without what the zero point adds to them.
    [[gnu::always_inline]] Float minimum(int h) const {
        if constexpr (!has_minimum(T)) return Simd::none();
        const Float m = at(scales + header_bytes(T) / 2, h);
        return zero_point(T) != 0 ? Simd::fma(scale(h), Simd::all(float(zero_point(T))), m) : m;
    }

private:
    [[gnu::always_inline]] static Float at(const uint8_t *numbers, int h) {
        if constexpr (T == Type::MXFP4) return Simd::half_powers(numbers + h * Simd::lanes);
        return Simd::load_halves(numbers + h * Simd::lanes * 2);
    }

    int left = TOGETHER;  // blocks that share a header
};

template <Type T, int N>
void multiply_simple(int64_t k, const uint8_t *tile, const Columns &x, float *const *y, int rows) {
    constexpr int steps = BLOCK / CODES, width = WIDTH<T, N>, held = HELD<T, N>, multiple = SIMPLE_MULTIPLE<T, N>;
    constexpr bool totals_stay = N <= Simd::most_totals;  // in registers
    Blocks<T> blocks(tile);
    const int32_t *xq = x.codes, *starts = x.starts;
    const float *xd = x.scales, *xs = (const float *)x.sums;
    Total totals[N] = {};
    Float kept[N];
    for (Float &total : kept) total = Simd::none();
    for (int64_t b = 0; b < k / BLOCK; b++) {
#pragma GCC unroll 1
        for (int h = 0; h < REGISTERS; h += width) {
            const uint8_t *block = blocks.codes;
            for (size_t i = h; i < block_bytes(T) / LINE; i += REGISTERS / width) prefetch<N>(block + i * LINE);
            if (h == 0 && blocks.at_header())
                for (size_t i = 0; i < header_bytes(T) / LINE; i++) prefetch<N>(blocks.scales + i * LINE);
            forget_loads();
            Int sums[GROUPS<N>][COLUMNS_TOGETHER][width];
            for_groups<N>([&](auto g, auto size) __attribute__((always_inline)) {
                for (int j = 0; j < size; j++)
                    for (int w = 0; w < width; w++)
                        sums[g][j][w] = zero_point(T) && multiple == 1 ? broadcast_starts<size>(starts + g * COLUMNS_TOGETHER) : Simd::zero();
            });
            const auto add_steps = [&](auto from, auto to) __attribute__((always_inline)) {
                unrolled<(to - from + held - 1) / held>([&](auto piece) __attribute__((always_inline)) {
                    constexpr int first = from + piece * held, n = to - first < held ? to - first : held;
                    if (piece > 0) forget_loads();
                    Codes<width, n> codes;
                    for (int i = 0; i < n; i++)
                        for (int w = 0; w < width; w++) codes[w][i] = codes_of<T>(block + (h + w) * STEP, first + i, multiple);
                    const auto &operand = rearranged<N>(codes);
                    for_groups<N>([&](auto g, auto size) __attribute__((always_inline)) {
                        const int32_t *of_group = xq + first * N + g * COLUMNS_TOGETHER * STEPS_TOGETHER;
                        add_products<is_signed(T), N, size>(sums[g], operand, of_group);
                    });
                });
            };
            if constexpr (multiple > 1) {
                constexpr int first = first_multiple(T);
                add_steps(std::integral_constant<int, first>{}, std::integral_constant<int, steps>{});
                unrolled<N>([&](int j) __attribute__((always_inline)) {
                    for (Int &sum : sums[j / COLUMNS_TOGETHER][j % COLUMNS_TOGETHER]) {
                        sum = Simd::quotient(sum, multiple == 16 ? 4 : 3);
                        if constexpr (zero_point(T) != 0) sum = Simd::plus(sum, Simd::broadcast(starts + j));
                    }
                });
                add_steps(std::integral_constant<int, 0>{}, std::integral_constant<int, first>{});
            } else {
                add_steps(std::integral_constant<int, 0>{}, std::integral_constant<int, steps>{});
            }
            for_groups<N>([&](auto g, auto size) __attribute__((always_inline)) { separate<size>(sums[g]); });
            unrolled<width>([&](int w) __attribute__((always_inline)) {
                const Float d = blocks.scale(h + w), m = blocks.minimum(h + w);
                unrolled<N>([&](int j) __attribute__((always_inline)) {
                    float *total = totals[j].of + (h + w) * Simd::lanes;
                    const Int sum_of_codes = sums[j / COLUMNS_TOGETHER][j % COLUMNS_TOGETHER][w];
                    const Int whole = is_signed(T) ? sum_of_codes : Simd::widened(sum_of_codes);
                    const Float before = totals_stay ? kept[j] : Simd::load_floats(total);
                    Float sum = Simd::fma(Simd::floats(whole), Simd::times(d, Simd::all(xd[j])), before);
                    if constexpr (has_minimum(T)) sum = Simd::fma(m, Simd::all(xs[j]), sum);
                    if constexpr (totals_stay) kept[j] = sum;
                    else Simd::store(total, sum);
                });
            });
        }
        blocks.advance();
        xq += steps * N, xd += N, starts += N, xs += N;
    }
    if constexpr (totals_stay)
        for (int j = 0; j < N; j++) Simd::store(totals[j].of, kept[j]);
    write_totals(totals, N, y, rows);
}

// ---- K-quants: super-blocks of 256 weights, in parts with an integer scale each ----
//
// A super-block has 64 steps of four weights, in four groups of 16: two parts of eight steps or four parts of four.

// Which step of the super-block is step i of a group.
template <Type T>
constexpr int step_of(int group, int i) {
    return part_length(T) == 32 ? group * 16 + i : i / 4 * 16 + group * 4 + i % 4;
}

// Register `h` of lines of a super-block.
struct Lines {
    const uint8_t *block;
    int h;

    Int operator[](int i) const { return Simd::load(block + i * LINE + h * STEP); }
    // Of two bytes per row, the first of which are those of row 0.
    const uint8_t *pairs(int at) const { return block + at + h * Simd::lanes * 2; }
};

// The codes of step i of a group.
template <Type T>
[[gnu::always_inline]] inline Int super_codes(Lines lines, int group, int i) {
    const int part = i / (part_length(T) / CODES);  // within the group
    const bool in_place = multiple(T, part) > 1;         // rather than shifted
    if constexpr (T == Type::Q4_K) {                     // a line holds the codes of two parts
        const Int line = lines[4 + group * 8 + i % 8];
        return in_place ? line & Simd::bytes(0xf0) : nibbles_of(line, part);
    } else if constexpr (T == Type::Q5_K) {  // ten lines hold 16 codes, the last six in the upper bits of five lines each
        const int first = 4 + group * 10;
        if (i < 8) return lines[first + i] & Simd::bytes(31);
        if (i < 10) return in_place ? Simd::left(lines[first + i], 3) & Simd::bytes(0xf8) : lines[first + i] & Simd::bytes(31);
        const auto five = [&](int which) __attribute__((always_inline)) { return lines[first + (i >= 13) * 5 + which]; };
        return upper_five_bits(five, (i - 10) % 3, multiple(T, part));
    } else if constexpr (T == Type::IQ4_XS) {  // a line holds two steps of a part
        const Int line = lines[2 + (2 * group + part) * 4 + i % 4];
        return iq4_values(nibbles_of(line, i % 8 >= 4));
    } else if constexpr (T == Type::Q6_K) {
        // A line holds a step of one of three parts, and the upper bits of three lines one of the fourth part.
        const int first = 5 + group * 12 + i % 4, s = in_place ? 0 : 2;
        if (part < 3) return lines[first + 4 * part] & Simd::bytes(63);
        return bits_of(lines[first], s, 0xc0 >> s) | bits_of(lines[first + 4], 2 + s, 0x30 >> s) |
               bits_of(lines[first + 8], 4 + s, 0x0c >> s);
    } else if constexpr (T == Type::Q2_K) {  // a line holds a step of all four parts
        const Int line = lines[5 + group * 4 + i % 4];
        return in_place ? line & Simd::bytes(3 << 2 * part) : bits_of(line, 2 * part, 3);
    } else {
        static_assert(T == Type::Q3_K);
        // The bits of six lines are, from the lowest up: three of a code of part 0, of part 1 and the upper two of one of part
        // 3, in four lines; three of two codes of part 2, and the last ones of two codes of part 3.
        const int first = 4 + group * 6, step = i % 4;
        const Int line = lines[first + (part == 2 ? 4 + step % 2 : step)];
        if (part == 0) return line & Simd::bytes(7);
        if (part == 2 && step >= 2) return in_place ? Simd::left(line, 3) & Simd::bytes(0x38) : line & Simd::bytes(7);
        const int s = in_place ? 0 : part == 3 ? 5 : 3;
        if (part < 3) return bits_of(line, s, 0x38 >> s);
        return bits_of(line, s, 0xc0 >> s) | bits_of(lines[first + 4 + step / 2], 2 - step % 2 + s, 0x20 >> s);
    }
}

// The scales of a super-block's parts, times `most_multiple` where the codes are no multiples.
template <Type T>
[[gnu::always_inline]] inline void unpack_scales(Lines lines, Simd::Scale (&scales)[parts_per_block(T)]) {
    const Int low = Simd::bytes(15), upper = Simd::bytes(0x30);
    const auto factor = [](int p) { return most_multiple(T) / multiple(T, part_of_group(T, p)); };
    if constexpr (T == Type::Q4_K || T == Type::Q5_K) {
        // Eight 6-bit scales and eight 6-bit minima fill 12 bytes. Bytes 0-3 hold the scales of parts 0-3, bytes 4-7
        // their minima. Those of parts 4-7 are in bytes 8-11 and the upper bits of bytes 0-7.
        const Int first = lines[1], last = (lines[3] & low) | (Simd::right(first, 2) & upper);
        for (int p = 0; p < 8; p++) scales[p] = Simd::scale(p < 4 ? first & Simd::bytes(63) : last, p % 4, factor(p));
    } else if constexpr (T == Type::Q2_K) {
        for (int p = 0; p < 16; p++) scales[p] = Simd::scale(lines[1 + p / 4] & low, p % 4, factor(p));
    } else if constexpr (T == Type::Q3_K) {
        // The low four bits of scales 0-7 and 8-15 fill bytes 0-7, the high two bytes 8-11. 32 stands for zero.
        for (int q = 0; q < 4; q++) {
            const Int four = q < 2 ? lines[1 + q] : Simd::right(lines[1 + q % 2], 4);
            const Int two = q < 2 ? Simd::left(lines[3], 4 - 2 * q) : Simd::right(lines[3], 2 * q - 4);
            const Int six = Simd::minus_bytes((four & low) | (two & upper), Simd::bytes(32));
            for (int p = 0; p < 4; p++) scales[4 * q + p] = Simd::signed_scale(six, p, factor(4 * q + p));
        }
    } else if constexpr (T == Type::Q6_K) {
        for (int p = 0; p < 16; p++) scales[p] = Simd::signed_scale(lines[1 + p / 4], p % 4, factor(p));
    } else {
        static_assert(T == Type::IQ4_XS);  // four bits and two bits of each. 32 stands for zero.
        const Int four = lines[1], two = Simd::load_words(lines.pairs(2 * ROWS));
        for (int p = 0; p < 8; p++) scales[p] = Simd::six_bit_scale(four, two, p);
    }
}

// The minima of a super-block's parts, as pairs of 16-bit numbers in each lane.
template <Type T>
[[gnu::always_inline]] inline void unpack_minima(Lines lines, Simd::Pairs (&pairs)[sums_per_block(T)]) {
    // Bytes 0 and 1, and bytes 2 and 3, of each lane.
    static const int8_t first_pair[16] = {0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1};
    static const int8_t second_pair[16] = {2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15, -1};
    const Int low = Simd::bytes(15), first = Simd::words(first_pair), second = Simd::words(second_pair);
    for (int i = 0; i < sums_per_block(T); i += 2) {
        Int four;
        if constexpr (T == Type::Q2_K) {
            four = Simd::right(lines[1 + i / 2], 4) & low;
        } else {
            const Int m = lines[2];
            four = i == 0 ? m & Simd::bytes(63) : (Simd::right(lines[3], 4) & low) | (Simd::right(m, 2) & Simd::bytes(0x30));
        }
        pairs[i] = Simd::pairs(Simd::shuffle(four, first)), pairs[i + 1] = Simd::pairs(Simd::shuffle(four, second));
    }
}

// Steps whose products are added before they are scaled. Sums in 32 bits are in range for a part, sums in 16 bits for four
// steps, or, of 4-bit codes, for eight. Few columns leave registers for the latter. Where totals are floating-point
// numbers, it must not depend on the number of columns.
template <Type T, int N>
constexpr int steps_per_sum() {
    constexpr int steps = part_length(T) / CODES;
    if (is_signed(T) || (Simd::integer_totals && !Simd::sums_of_words)) return steps;
    const int most = Simd::sums_of_words ? (T == Type::Q4_K && WIDTH<T, N> > 1 ? 8 : 4) : Simd::steps_per_sum;
    return most < steps ? most : steps;
}

template <Type T, int N>
void multiply_k(int64_t k, const uint8_t *tile, const Columns &x, float *const *y, int rows) {
    constexpr int parts = parts_per_block(T), n_sums = sums_per_block(T), lines_per_block = block_bytes(T) / LINE;
    constexpr int steps = part_length(T) / CODES, width = WIDTH<T, N>, held = HELD<T, N> < steps ? HELD<T, N> : steps;
    constexpr int summed = steps_per_sum<T, N>();
    constexpr int iterations = REGISTERS / width * 4, prefetched = lines_per_block / iterations;  // lines in each
    Total totals[N] = {};
    const int32_t *xq = x.codes, *xs = x.sums, *starts = x.starts;
    const float *xd = x.scales;
    for (int64_t b = 0; b < k / SUPER_BLOCK; b++) {
#pragma GCC unroll 1
        for (int h = 0; h < REGISTERS; h += width) {
            if (h == 0)
                unrolled<lines_per_block % iterations>(
                    [&](int i) __attribute__((always_inline)) { prefetch<N>(tile + (lines_per_block - 1 - i) * LINE); });
            forget_loads();
            Simd::Scale scales[width][parts];
            for (int w = 0; w < width; w++) unpack_scales<T>(Lines{tile, h + w}, scales[w]);
            Simd::Scaled scaled[GROUPS<N>][COLUMNS_TOGETHER][width];  // the sums of parts times their scales
            for_groups<N>([&](auto g, auto size) __attribute__((always_inline)) {
                for (int j = 0; j < size; j++)
                    for (int w = 0; w < width; w++) scaled[g][j][w] = Simd::no_parts();
            });
#pragma GCC unroll 1
            for (int group = 0; group < 4; group++) {
                unrolled<prefetched>([&](int i) __attribute__((always_inline)) {
                    prefetch<N>(tile + ((h / width * 4 + group) * prefetched + i) * LINE);
                });
                Int sums[GROUPS<N>][COLUMNS_TOGETHER][width];
                unrolled<16 / held>([&](auto piece) __attribute__((always_inline)) {
                    constexpr int first = piece * held;
                    forget_loads();
                    const int step = step_of<T>(group, first), part = step / steps;
                    Codes<width, held> codes;
                    for (int i = 0; i < held; i++)
                        for (int w = 0; w < width; w++) codes[w][i] = super_codes<T>(Lines{tile, h + w}, group, first + i);
                    const auto &operand = rearranged<N>(codes);
                    for_groups<N>([&](auto g, auto size) __attribute__((always_inline)) {
                        constexpr int column = g * COLUMNS_TOGETHER;
                        const bool has_start = zero_point(T) && first % steps == 0;
                        for (int j = 0; j < size && first % summed == 0; j++)
                            for (int w = 0; w < width; w++)
                                sums[g][j][w] = has_start ? broadcast_starts<size>(starts + part * N + column) : Simd::zero();
                        add_products<is_signed(T), N, size>(sums[g], operand, xq + step * N + column * STEPS_TOGETHER);
                        if constexpr ((first + held) % summed != 0) return;
                        for (int j = 0; j < size; j++)
                            for (int w = 0; w < width; w++) {
                                const Simd::Scale scale = scale_of<size>(scales[w][part], j);
                                Simd::Scaled &total = scaled[g][j][w];
                                total = is_signed(T) ? Simd::add_scaled_wide(total, sums[g][j][w], scale)
                                                     : Simd::add_scaled(total, sums[g][j][w], scale);
                                Simd::keep(total);
                            }
                    });
                });
            }
            forget_loads();
            for_groups<N>([&](auto g, auto size) __attribute__((always_inline)) { separate<size>(scaled[g]); });
            unrolled<width>([&](int w) __attribute__((always_inline)) {
                const Lines lines = {tile, h + w};
                Float d = Simd::load_halves(lines.pairs(0));
                if constexpr (most_multiple(T) > 1) d = Simd::times(d, Simd::all(1.f / most_multiple(T)));
                Float minimum = Simd::none();
                Simd::Pairs minima[n_sums ? n_sums : 1];
                if constexpr (has_minimum(T)) {
                    minimum = Simd::times(Simd::load_halves(lines.pairs(2 * ROWS)), Simd::all(-1.f));
                    unpack_minima<T>(lines, minima);
                }
                unrolled<N>([&](int j) __attribute__((always_inline)) {
                    float *total = totals[j].of + (h + w) * Simd::lanes;
                    Float sum = Simd::times(Simd::floats(scaled[j / COLUMNS_TOGETHER][j % COLUMNS_TOGETHER][w]), d);
                    if constexpr (has_minimum(T)) {
                        Int of_minima = Simd::zero();
                        for (int i = 0; i < n_sums; i++) of_minima = Simd::dot_pairs(of_minima, minima[i], xs + i * N + j);
                        sum = Simd::fma(Simd::floats(of_minima), minimum, sum);
                    }
                    Simd::store(total, Simd::fma(sum, Simd::all(xd[j]), Simd::load_floats(total)));
                });
            });
        }
        tile += block_bytes(T), xq += SUPER_BLOCK / CODES * N, xd += N;
        xs += n_sums * N, starts += parts * N;
    }
    write_totals(totals, N, y, rows);
}

// ---- dispatch to template instances ----

// F::of<T>(arguments...) for a type that is known at run time.
template <class F, class... Arguments>
void with_type(Type t, Arguments... arguments) {
    switch (t) {
        case Type::Q4_0: return F::template of<Type::Q4_0>(arguments...);
        case Type::Q4_1: return F::template of<Type::Q4_1>(arguments...);
        case Type::Q5_0: return F::template of<Type::Q5_0>(arguments...);
        case Type::Q5_1: return F::template of<Type::Q5_1>(arguments...);
        case Type::Q8_0: return F::template of<Type::Q8_0>(arguments...);
        case Type::IQ4_NL: return F::template of<Type::IQ4_NL>(arguments...);
        case Type::MXFP4: return F::template of<Type::MXFP4>(arguments...);
        case Type::Q2_K: return F::template of<Type::Q2_K>(arguments...);
        case Type::Q3_K: return F::template of<Type::Q3_K>(arguments...);
        case Type::Q4_K: return F::template of<Type::Q4_K>(arguments...);
        case Type::Q5_K: return F::template of<Type::Q5_K>(arguments...);
        case Type::Q6_K: return F::template of<Type::Q6_K>(arguments...);
        case Type::IQ4_XS: return F::template of<Type::IQ4_XS>(arguments...);
    }
}

template <int N>
struct MultiplyTile {
    static void run(Type t, int64_t k, const uint8_t *tile, const Columns *x, float *const *y, int rows) {
        with_type<MultiplyTile>(t, k, tile, x, y, rows);
    }

    template <Type T>
    static void of(int64_t k, const uint8_t *tile, const Columns *x, float *const *y, int rows) {
        if constexpr (is_k_quant(T)) multiply_k<T, N>(k, tile, *x, y, rows);
        else multiply_simple<T, N>(k, tile, *x, y, rows);
    }
};

struct Quantize {
    template <Type T>
    static void of(const float *x, const Columns *columns, int column, int64_t first, int64_t last) {
        quantize_as<T>(x, *columns, column, first, last);
    }
};

void quantize(Type t, const float *x, const Columns &columns, int column, int64_t first, int64_t last) {
    with_type<Quantize>(t, x, &columns, column, first, last);
}

}  // namespace
}  // namespace specdec

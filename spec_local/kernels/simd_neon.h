// NEON with dot products (Armv8.2), with or without products of small matrices (i8mm). Four registers hold a line of 16
// rows. All codes are read as signed: those of up to seven bits are positive, and those of eight are packed so.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace specdec {
namespace {

struct Simd {
    static constexpr int lanes = 4, registers = 32;
    // The sums of eight columns and their totals, eight registers of codes and the temporaries of unpacking fill the 32
    // registers.
    static constexpr int max_columns = 8;
    static constexpr int far_from = 1 << 30;      // columns: see Ahead
    static constexpr int few_queries = 6;         // see `is_direct` in attention.h
    static constexpr int held(int) { return 4; }  // registers of codes
    static constexpr int held_signed(int) { return 4; }
    static constexpr int steps_per_sum = 4;  // of a part, at most
    static constexpr int zero_of_bytes = 0;
    static constexpr int most_totals = 0;     // columns whose totals stay in registers
    static constexpr bool multiples = false;  // codes must be signed bytes

    using Int = int32x4_t;
    using Float = float32x4_t;

    static Int of(int8x16_t v) { return vreinterpretq_s32_s8(v); }
    static Int of(uint8x16_t v) { return vreinterpretq_s32_u8(v); }
    static Int of(uint32x4_t v) { return vreinterpretq_s32_u32(v); }
    static int8x16_t signed_bytes(Int v) { return vreinterpretq_s8_s32(v); }
    static uint8x16_t unsigned_bytes(Int v) { return vreinterpretq_u8_s32(v); }

    static Int load(const void *p) { return vld1q_s32((const int32_t *)p); }
    static Int bytes(int value) { return of(vdupq_n_s8(int8_t(value))); }
    static Int zero() { return vdupq_n_s32(0); }
    static Int broadcast(const int32_t *p) { return vld1q_dup_s32(p); }
    static Int words(const int8_t (&pattern)[16]) { return of(vld1q_s8(pattern)); }
    static Int load_words(const void *p) { return of(vmovl_u16(vld1_u16((const uint16_t *)p))); }
    static Int minus_bytes(Int a, Int b) { return of(vsubq_s8(signed_bytes(a), signed_bytes(b))); }
    static Int shuffle(Int table, Int indices) { return of(vqtbl1q_s8(signed_bytes(table), unsigned_bytes(indices))); }
    static Int right(Int v, int bits) { return of(unsigned_bytes(v) >> bits); }
    static Int high_nibbles(Int v) { return of(vshrq_n_u8(unsigned_bytes(v), 4)); }
    static Int left(Int v, int bits) { return of(unsigned_bytes(v) << bits); }
    static Int plus(Int a, Int b) { return a + b; }
    static Int quotient(Int v, int bits) { return v >> bits; }
    // The compiler must have computed the value here (see simd_avx2.h).
    template <class T>
    static void keep(T &value) {
        __asm__("" : "+w"(value));
    }
    static int32_t start(int first, int second) { return first + second; }
    static Int widened(Int sum) { return sum; }

    // Products of a part have up to 17 bits and a scale, which fits 8; a super-block has at most 16 parts.
    static constexpr bool integer_totals = true, sums_of_words = false;
    using Scaled = Int;
    using Scale = Int;
    static Scaled no_parts() { return zero(); }
    static Scale scale(Int v, int which, int /*factor*/) { return byte(v, which); }
    static Scale signed_scale(Int v, int which, int /*factor*/) { return signed_byte(v, which); }
    // Number `part` of eight 6-bit numbers in each lane, of which four and two bits are given, less 32.
    static Scale six_bit_scale(Int four, Int two, int part) {
        const uint32x4_t low = vreinterpretq_u32_s32(four) >> (4 * part) & vdupq_n_u32(15);
        const uint32x4_t high = vreinterpretq_u32_s32(two) >> (2 * part) & vdupq_n_u32(3);
        return vsubq_s32(of(low | high << 4), vdupq_n_s32(32));
    }
    static Scaled add_scaled(Scaled total, Int sum, Scale scale) { return vmlaq_s32(total, sum, scale); }
    static Scaled add_scaled_wide(Scaled total, Int sum, Scale scale) { return add_scaled(total, sum, scale); }

    // Two 16-bit numbers in each lane, and sum + their products with two activations.
    struct Pairs {
        int16x4_t first, second;
    };
    static Pairs pairs(Int v) { return {vmovn_s32(v), vshrn_n_s32(v, 16)}; }
    static Int dot_pairs(Int sum, Pairs a, const int32_t *x) {
        const int16x4_t both = vreinterpret_s16_s32(vld1_dup_s32(x));
        return vmlal_lane_s16(vmlal_lane_s16(sum, a.first, both, 0), a.second, both, 1);
    }
    static Int byte(Int v, int which) { return of(vreinterpretq_u32_s32(v) >> (8 * which) & vdupq_n_u32(255)); }
    static Int signed_byte(Int v, int which) { return (v << (24 - 8 * which)) >> 24; }

    static Float floats(Float v) { return v; }
    static Float floats(Int v) { return vcvtq_f32_s32(v); }
    static Float all(float v) { return vdupq_n_f32(v); }
    static Float none() { return vdupq_n_f32(0); }
    static Float load_floats(const float *p) { return vld1q_f32(p); }
    static Float load_halves(const void *p) {
        return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)p)));
    }
    static Float load_bfloats(const void *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)p), 16)); }
    // 2^(byte - 128), half of what the scale byte of an MX format stands for. Below 2^-126, 0.
    static Float half_powers(const uint8_t *bytes) {
        const uint32x4_t exponents = {bytes[0], bytes[1], bytes[2], bytes[3]};
        return vreinterpretq_f32_u32(vqsubq_u32(exponents, vdupq_n_u32(1)) << 23);
    }
    static void store(float *p, Float v) { vst1q_f32(p, v); }
    static Float times(Float a, Float b) { return vmulq_f32(a, b); }
    static Float fma(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }
    static float total(Float v) { return vaddvq_f32(v); }

    // As on x86: b if a or b is NaN.
    static Float max(Float a, Float b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
    static Float min(Float a, Float b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
    static Float divided(Float a, Float b) { return vdivq_f32(a, b); }
    static float highest(Float v) { return vmaxvq_f32(v); }
    static Float rounded(Float v) { return vrndnq_f32(v); }
    // 2^v for integers v from -126 to 127.
    static Float power_of_two(Float v) {
        return vreinterpretq_f32_s32(vaddq_s32(vcvtnq_s32_f32(v), vdupq_n_s32(127)) << 23);
    }
    // v where x >= limit, 0 elsewhere.
    static Float where_not_below(Float x, float limit, Float v) {
        return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(v), vcltq_f32(x, all(limit))));
    }

    static Float load_bytes(const void *p) {
        int32_t four;
        __builtin_memcpy(&four, p, sizeof four);
        return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
    }
    // Store the totals of four registers.
    static void store_totals(float *p, const Float (&v)[4]) {
        vst1q_f32(p, vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3])));
    }

    using Double = float64x2_t;
    static Double no_doubles() { return vdupq_n_f64(0); }
    static Double all(double v) { return vdupq_n_f64(v); }
    static Double load_doubles(const double *p) { return vld1q_f64(p); }
    static void store(double *p, Double v) { vst1q_f64(p, v); }
    static Double low_doubles(Float v) { return vcvt_f64_f32(vget_low_f32(v)); }
    static Double high_doubles(Float v) { return vcvt_high_f64_f32(v); }
    static Double plus(Double a, Double b) { return vaddq_f64(a, b); }
    static Double fma(Double a, Double b, Double c) { return vfmaq_f64(c, a, b); }
    static double total(Double v) { return vaddvq_f64(v); }

    static Int magnitude(const float *p) { return vreinterpretq_s32_f32(vabsq_f32(vld1q_f32(p))); }
    static Int larger(Int a, Int b) { return vmaxq_s32(a, b); }
    static int32_t largest(Int v) { return vmaxvq_s32(v); }
    static void store_codes(int8_t *out, const float *x, float factor) {
        const int16x4_t words = vqmovn_s32(vcvtnq_s32_f32(times(load_floats(x), all(factor))));
        const int32_t four = vget_lane_s32(vreinterpret_s32_s8(vqmovn_s16(vcombine_s16(words, words))), 0);
        __builtin_memcpy(out, &four, sizeof four);
    }
};

}  // namespace
}  // namespace specdec

#include "columns.h"

namespace specdec {
namespace {

[[gnu::always_inline]] inline void prefetch_near(const void *p) { __builtin_prefetch(p, 0, 3); }  // into the first-level cache
[[gnu::always_inline]] inline void prefetch_far(const void *p) { __builtin_prefetch(p, 0, 2); }   // into the second-level cache

// The sums of the first two and of the last two of each four codes, of 16 or 32: two 16-bit numbers, the first one lowest.
template <int length>
inline int32_t sums_of_pairs(const int8_t *codes) {
    int16x8_t sum = vdupq_n_s16(0);
    for (int i = 0; i < length; i += 16) sum = vpadalq_s8(sum, vld1q_s8(codes + i));
    sum = vaddq_s16(sum, vextq_s16(sum, sum, 4));
    sum = vaddq_s16(sum, vextq_s16(sum, sum, 2));
    return vgetq_lane_s32(vreinterpretq_s32_s16(sum), 0);
}

inline float from_half(uint16_t half) {
    __fp16 number;
    __builtin_memcpy(&number, &half, sizeof number);
    return float(number);
}

// Which of 16 words are equal to a value, one bit each.
inline uint64_t equal_words(const uint16_t *words, uint16_t value) {
    static const uint8_t bit[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint16x8_t all = vdupq_n_u16(value);
    const uint8x8_t low = vmovn_u16(vceqq_u16(vld1q_u16(words), all)), high = vmovn_u16(vceqq_u16(vld1q_u16(words + 8), all));
    const uint8x16_t bits = vandq_u8(vcombine_u8(low, high), vld1q_u8(bit));
    return uint64_t(vaddv_u8(vget_low_u8(bits))) | uint64_t(vaddv_u8(vget_high_u8(bits))) << 8;
}

// Steps of a column whose codes are stored together: one register, whose lanes `sdot` selects.
constexpr int STEPS_TOGETHER = 4;
// Columns that are multiplied together: `smmla` multiplies eight codes of two rows by those of two columns.
#ifdef __ARM_FEATURE_MATMUL_INT8
constexpr int COLUMNS_TOGETHER = 2;
#else
constexpr int COLUMNS_TOGETHER = 1;
#endif

// The place of a step's codes in `Columns::codes`. Columns that are multiplied together share a register: two steps of
// one, then two of the other.
inline int64_t place_of(int64_t step, int column, int n) {
    const int64_t group = step / STEPS_TOGETHER * STEPS_TOGETHER * n;
    const int i = int(step % STEPS_TOGETHER), in_pair = column % COLUMNS_TOGETHER;
    const bool is_pair = COLUMNS_TOGETHER == 2 && column - in_pair + 1 < n;
    const int first = (column - (is_pair ? in_pair : 0)) * STEPS_TOGETHER;
    return group + first + (is_pair ? i / 2 * 4 + in_pair * 2 + i % 2 : i);
}

// The codes of some steps, and, for two columns, of each two of them: eight codes of rows 0 and 1 in one register, those of
// rows 2 and 3 in the next.
template <int Steps>
struct Rearranged {
    Int codes[Steps], pairs[Steps];
};
template <int N, int Width, int Steps>
[[gnu::always_inline]] inline Rearranged<Steps> rearranged(const Codes<Width, Steps> &codes) {
    static_assert(Width == 1 && Steps % STEPS_TOGETHER == 0);
    Rearranged<Steps> all;
    unrolled<Steps>([&](auto i) __attribute__((always_inline)) {
        const Int even = codes[0][i & ~1], odd = codes[0][i | 1];
        all.codes[i] = codes[0][i];
        if (COLUMNS_TOGETHER == 2 && N > 1) all.pairs[i] = i % 2 ? vzip2q_s32(even, odd) : vzip1q_s32(even, odd);
    });
    return all;
}

// What the sums of one column, or of two, begin with.
template <int Together>
[[gnu::always_inline]] inline Int broadcast_starts(const int32_t *starts) {
    if constexpr (Together == 1) return Simd::broadcast(starts);
    return vreinterpretq_s32_s64(vld1q_dup_s64((const int64_t *)starts));
}

// sums + the products of some steps with one column, or with two: then the first sum is that of rows 0 and 1 for both, and
// the second that of rows 2 and 3. `x` is the first code of the columns.
template <bool, int N, int Together, int Steps>
[[gnu::always_inline]] inline void add_products(Int (&sums)[COLUMNS_TOGETHER][1], const Rearranged<Steps> &all, const int32_t *x) {
    unrolled<Steps>([&](auto i) __attribute__((always_inline)) {
        const auto *group = (const int8_t *)(x + i / STEPS_TOGETHER * STEPS_TOGETHER * N);
        if constexpr (Together == 1) {
            sums[0][0] = vdotq_laneq_s32(sums[0][0], Simd::signed_bytes(all.codes[i]), vld1q_s8(group), i % STEPS_TOGETHER);
            Simd::keep(sums[0][0]);
        } else {
#ifdef __ARM_FEATURE_MATMUL_INT8
            Int &sum = sums[i % 2][0];
            sum = vmmlaq_s32(sum, Simd::signed_bytes(all.pairs[i]), vld1q_s8(group + i % STEPS_TOGETHER / 2 * 16));
            Simd::keep(sum);
#endif
        }
    });
}

// The scales of the rows of sum `i` of two columns.
template <int Together>
[[gnu::always_inline]] inline Int scale_of(Int scale, int i) {
    return Together == 1 ? scale : i == 0 ? vzip1q_s32(scale, scale) : vzip2q_s32(scale, scale);
}

// From the sums of rows 0 and 1 and of rows 2 and 3 for two columns to those of each column.
template <int Together>
[[gnu::always_inline]] inline void separate(Int (&sums)[COLUMNS_TOGETHER][1]) {
    if constexpr (Together == 2) {
        Int &low = sums[0][0], &high = sums[COLUMNS_TOGETHER - 1][0];
        const Int first = vuzp1q_s32(low, high), second = vuzp2q_s32(low, high);
        low = first, high = second;
    }
}

}  // namespace
}  // namespace specdec

// AVX-512 with VNNI. One register holds a line: 16 rows of four codes.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace specdec {
namespace {

struct Simd {
    static constexpr int lanes = 16, registers = 32;
    // 12 sums, their 12 totals and the temporaries of unpacking fill the 32 registers.
    static constexpr int max_columns = 12;
    static constexpr int most_columns = max_columns;  // no more at once: see multiply_many.h
    static constexpr int far_from = 3;                // columns: see Ahead
    static constexpr int few_queries = 1 << 30;       // see `is_direct` in attention.h
    // Registers of codes. A dot product waits four cycles for the sum of the one before: nine columns or more hide that if
    // each register is multiplied by all of them. Measured on Zen 5 with 12 columns: 0.83 of the time for Q6_K, 0.95 for Q4_K.
    static constexpr int held(int columns) { return columns < 9 ? 8 : 1; }
    static constexpr int held_signed(int columns) { return held(columns); }
    static constexpr int steps_per_sum = 8;             // of a part, at most
    static constexpr int most_totals = 8;               // columns whose totals stay in registers
    static constexpr bool two_tiles = true;             // of simple types are multiplied together: see multiply_two.h
    static constexpr bool multiples = true;             // products of bytes are added in 32 bits, so that codes may be multiples
    // 8-bit codes are read as 0 ... 255, with a zero point of 128.
    static constexpr int zero_of_bytes = 128;

    using Int = __m512i;
    using Float = __m512;

    static Int load(const void *p) { return _mm512_load_si512(p); }
    static Int bytes(int value) { return _mm512_set1_epi8(char(value)); }
    static Int zero() { return _mm512_setzero_si512(); }
    static Int broadcast(const int32_t *p) { return _mm512_set1_epi32(*p); }
    static Int words(const int8_t (&pattern)[16]) {  // the same 16 bytes in each 128-bit lane
        return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)pattern));
    }
    static Int load_words(const void *p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)); }
    static Int minus_bytes(Int a, Int b) { return _mm512_sub_epi8(a, b); }
    static Int shuffle(Int table, Int indices) { return _mm512_shuffle_epi8(table, indices); }
    // sum + the four products in each lane of unsigned weight codes and signed activation codes, of which four are repeated
    // in all lanes. GCC 12 would need two instructions.
    using Activations = const int32_t *;
    static Activations activations(const int32_t *x) { return x; }
    static Int dot(Int sum, Int codes, Activations x) {
#ifdef __AVX512VNNI__
        __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*x));
        return sum;
#else  // emulated
        return _mm512_dpbusd_epi32(sum, codes, broadcast(x));
#endif
    }
    static Int dot(Int sum, Int codes, Int x) { return _mm512_dpbusd_epi32(sum, codes, x); }
    static Int dot_bytes(Int sum, Int codes, Activations x) { return dot(sum, codes, x); }
    // Two 16-bit numbers in each lane, and sum + their products with two activations.
    using Pairs = Int;
    static Pairs pairs(Int v) { return v; }
    static Int dot_pairs(Int sum, Pairs a, const int32_t *x) { return _mm512_dpwssd_epi32(sum, a, broadcast(x)); }

    static Int right(Int v, int bits) { return _mm512_srli_epi16(v, bits); }
    static Int high_nibbles(Int v) { return right(v, 4) & bytes(15); }
    static Int left(Int v, int bits) { return _mm512_slli_epi16(v, bits); }
    static Int plus(Int a, Int b) { return _mm512_add_epi32(a, b); }
    static Int quotient(Int v, int bits) { return _mm512_srai_epi32(v, bits); }  // v / 2^bits, rounded down
    // The compiler must have computed the value here (see simd_avx2.h).
    template <class T>
    static void keep(T &value) {
        __asm__("" : "+v"(value));
    }
    // What the sum of a part begins with, from the contributions of the first two and of the last two codes of a step.
    static int32_t start(int first, int second) { return first + second; }
    static Int widened(Int sum) { return sum; }

    // The sums of parts times their scales, the scale of a part, and their product. Whether totals are integers, and
    // whether sums are 16-bit words.
    static constexpr bool integer_totals = false, sums_of_words = false;
    using Scaled = Float;
    using Scale = Float;
    static Scaled no_parts() { return _mm512_setzero_ps(); }
    // Byte `which` of each lane, -128 ... 127, times a factor: a dot product is the shortest way. It cannot saturate;
    // disassembly.py tells the products of codes from it by the instruction.
    static Scale signed_scale(Int v, int which, int factor) {
        return floats(_mm512_dpbusds_epi32(zero(), _mm512_set1_epi32(factor << 8 * which), v));
    }
    static Scale scale(Int v, int which, int factor) { return signed_scale(v, which, factor); }  // 0 ... 127
    // Number `part` of eight 6-bit numbers in each lane, of which four and two bits are given, less 32.
    static Scale six_bit_scale(Int four, Int two, int part) {
        const Int low = _mm512_and_si512(_mm512_srli_epi32(four, 4 * part), _mm512_set1_epi32(15));
        const Int high = _mm512_and_si512(_mm512_srli_epi32(two, 2 * part), _mm512_set1_epi32(3));
        return floats(_mm512_sub_epi32(_mm512_or_si512(low, _mm512_slli_epi32(high, 4)), _mm512_set1_epi32(32)));
    }
    static Scaled add_scaled(Scaled total, Int sum, Scale scale) { return fma(floats(sum), scale, total); }
    static Scaled add_scaled_wide(Scaled total, Int sum, Scale scale) { return add_scaled(total, sum, scale); }

    static Float floats(Float v) { return v; }
    static Float floats(Int v) { return _mm512_cvtepi32_ps(v); }
    static Float all(float v) { return _mm512_set1_ps(v); }
    static Float none() { return _mm512_setzero_ps(); }
    static Float load_floats(const float *p) { return _mm512_loadu_ps(p); }
    static Float load_halves(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
    static Float load_bfloats(const void *p) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
    }
    // 2^(byte - 128), half of what the scale byte of an MX format stands for. Below 2^-126, 0.
    static Float half_powers(const uint8_t *bytes) {
        const Int exponents = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes));
        const Int one = _mm512_set1_epi32(1);
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_sub_epi32(_mm512_max_epi32(exponents, one), one), 23));
    }
    static void store(float *p, Float v) { _mm512_storeu_ps(p, v); }
    static Float times(Float a, Float b) { return _mm512_mul_ps(a, b); }
    static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
    static float total(Float v) { return _mm512_reduce_add_ps(v); }

    static Float max(Float a, Float b) { return _mm512_max_ps(a, b); }
    static Float min(Float a, Float b) { return _mm512_min_ps(a, b); }
    static Float divided(Float a, Float b) { return _mm512_div_ps(a, b); }
    static float highest(Float v) { return _mm512_reduce_max_ps(v); }
    static Float rounded(Float v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    // 2^v for integers v from -126 to 127.
    static Float power_of_two(Float v) {
        const Int exponent = _mm512_add_epi32(_mm512_cvtps_epi32(v), _mm512_set1_epi32(127));
        return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
    }
    // v where x >= limit, 0 elsewhere.
    static Float where_not_below(Float x, float limit, Float v) {
        return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, all(limit), _CMP_NLT_UQ), v);
    }

    static Float load_bytes(const void *p) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
    }
    // Store the totals of four registers.
    static void store_totals(float *p, const Float (&v)[4]) {
        __m256 half[4];
        for (int i = 0; i < 4; i++) half[i] = _mm256_add_ps(_mm512_castps512_ps256(v[i]), _mm512_extractf32x8_ps(v[i], 1));
        const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
        _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
    }

    using Double = __m512d;
    static Double no_doubles() { return _mm512_setzero_pd(); }
    static Double all(double v) { return _mm512_set1_pd(v); }
    static Double load_doubles(const double *p) { return _mm512_loadu_pd(p); }
    static void store(double *p, Double v) { _mm512_storeu_pd(p, v); }
    static Double low_doubles(Float v) { return _mm512_cvtps_pd(_mm512_castps512_ps256(v)); }
    static Double high_doubles(Float v) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)); }
    static Double plus(Double a, Double b) { return _mm512_add_pd(a, b); }
    static Double fma(Double a, Double b, Double c) { return _mm512_fmadd_pd(a, b, c); }
    static double total(Double v) { return _mm512_reduce_add_pd(v); }

    // The absolute values as bits. As integers, those of NaN are the largest.
    static Int magnitude(const float *p) {
        return _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(0x7fffffff));
    }
    static Int larger(Int a, Int b) { return _mm512_max_epi32(a, b); }
    static int32_t largest(Int v) { return _mm512_reduce_max_epi32(v); }
    // Store `lanes` activations times a factor, rounded to int8.
    static void store_codes(int8_t *out, const float *x, float factor) {
        _mm_storeu_si128((__m128i *)out, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(times(load_floats(x), all(factor)))));
    }
};

}  // namespace
}  // namespace specdec

#include "x86.h"

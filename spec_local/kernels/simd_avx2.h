// AVX2, with or without the dot-product instruction of AVX-VNNI. Two registers hold a line of 16 rows.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace specdec {
namespace {

struct Simd {
    static constexpr int lanes = 8, registers = 16;
    // The sums of eight columns, four registers of codes, a scale and temporaries fill the 16 registers.
    static constexpr int max_columns = 8;
#ifdef __AVXVNNI__
    static constexpr int most_columns = max_columns;
#else
    // Of multiply_many.h: eight groups of six. The activations of 256 weights take 12 kB of the first-level cache. Measured
    // on Zen 3: 32 or 64 columns take 1 to 4 % longer.
    static constexpr int most_columns = 48;
#endif
    static constexpr int far_from = 2;            // columns: see Ahead
    static constexpr int few_queries = 24;        // see `is_direct` in attention.h
    static constexpr int held(int) { return 4; }  // registers of codes
    static constexpr int steps_per_sum = 4;       // of a part, at most
    static constexpr int most_totals = 0;         // columns whose totals stay in registers
    static constexpr bool two_tiles = false;      // multiplied together

    using Int = __m256i;
    using Float = __m256;

    static Int load(const void *p) { return _mm256_load_si256((const Int *)p); }
    static Int bytes(int value) { return _mm256_set1_epi8(char(value)); }
    static Int zero() { return _mm256_setzero_si256(); }
    static Int broadcast(const int32_t *p) { return _mm256_set1_epi32(*p); }
    using Activations = Int;
    static Activations activations(const int32_t *x) { return broadcast(x); }
    static Int words(const int8_t (&pattern)[16]) {
        return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)pattern));
    }
    static Int load_words(const void *p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)); }
    static Int minus_bytes(Int a, Int b) { return _mm256_sub_epi8(a, b); }
    static Int shuffle(Int table, Int indices) { return _mm256_shuffle_epi8(table, indices); }
    static Int right(Int v, int bits) { return _mm256_srli_epi16(v, bits); }
    static Int high_nibbles(Int v) { return right(v, 4) & bytes(15); }
    static Int left(Int v, int bits) { return _mm256_slli_epi16(v, bits); }
    static Int plus(Int a, Int b) { return _mm256_add_epi32(a, b); }
    static Int quotient(Int v, int bits) { return _mm256_srai_epi32(v, bits); }
    // The compiler must have computed the value here. Otherwise it would reassociate sums: compute all products of a
    // part first, keep them on the stack, and add them up in a tree.
    template <class T>
    static void keep(T &value) {
        __asm__("" : "+x"(value));
    }
    // Number `part` of eight 6-bit numbers in each lane, of which four and two bits are given, less 32.
    static Int six_bits(Int four, Int two, int part) {
        const Int low = _mm256_and_si256(_mm256_srli_epi32(four, 4 * part), _mm256_set1_epi32(15));
        const Int high = _mm256_and_si256(_mm256_srli_epi32(two, 2 * part), _mm256_set1_epi32(3));
        return _mm256_sub_epi32(_mm256_or_si256(low, _mm256_slli_epi32(high, 4)), _mm256_set1_epi32(32));
    }
#ifdef __AVXVNNI__
    static constexpr int zero_of_bytes = 128;
    static constexpr bool multiples = true;
    static constexpr int held_signed(int columns) { return held(columns); }
    static Int dot(Int sum, Int codes, Int x) { return _mm256_dpbusd_avx_epi32(sum, codes, x); }
    static Int dot_bytes(Int sum, Int codes, Int x) { return dot(sum, codes, x); }
    static int32_t start(int first, int second) { return first + second; }
    static Int widened(Int sum) { return sum; }

    static constexpr bool integer_totals = false, sums_of_words = false;
    using Scaled = Float;
    using Scale = Float;
    static Scaled no_parts() { return _mm256_setzero_ps(); }
    static Scale signed_scale(Int v, int which, int factor) {
        return floats(_mm256_dpbusds_avx_epi32(zero(), _mm256_set1_epi32(factor << 8 * which), v));
    }
    static Scale scale(Int v, int which, int factor) { return signed_scale(v, which, factor); }
    static Scale six_bit_scale(Int four, Int two, int part) { return floats(six_bits(four, two, part)); }
    static Scaled add_scaled(Scaled total, Int sum, Scale scale) { return fma(floats(sum), scale, total); }
    static Scaled add_scaled_wide(Scaled total, Int sum, Scale scale) { return add_scaled(total, sum, scale); }
    static Float floats(Float v) { return v; }
#else
    // maddubs adds two products in 16 bits, which codes of 0 ... 255 would overflow: 8-bit codes stay signed.
    static constexpr int zero_of_bytes = 0;
    static constexpr bool multiples = false;
    static constexpr int held_signed(int) { return 2; }  // each with its magnitudes
    // The sums of a part stay in 16 bits, modulo 2^16: the final ones are in range, because `start` subtracts the zero
    // point. At most 16 products of a lane are added: 16 * 16 * 127 for 5-bit codes, 16 * 15 * 127 for 4-bit codes
    // without a zero point, 8 * 32 * 127 for 6-bit codes.
    static Int dot(Int sum, Int codes, Int x) { return _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, x)); }
    static Int dot_bytes(Int sum, Int codes, Int x) {
        const Int pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
        return _mm256_add_epi32(sum, widened(pairs));
    }
    static int32_t start(int first, int second) { return int32_t(uint32_t(second) << 16 | uint16_t(first)); }
    static Int widened(Int sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }

    static constexpr bool integer_totals = true, sums_of_words = true;
    using Scaled = Int;
    using Scale = Int;  // twice in each lane
    static Scaled no_parts() { return zero(); }
    static Scale scale(Int v, int which, int /*factor*/) {
        const Int s = _mm256_and_si256(_mm256_srli_epi32(v, 8 * which), _mm256_set1_epi32(255));
        return _mm256_or_si256(s, _mm256_slli_epi32(s, 16));
    }
    static Scale signed_scale(Int v, int which, int /*factor*/) {
        const Int s = _mm256_slli_epi32(v, 24 - 8 * which);
        return _mm256_blend_epi16(_mm256_srai_epi32(s, 24), _mm256_srai_epi16(s, 8), 0xaa);
    }
    static Scaled add_scaled(Scaled total, Int sum, Scale scale) {
        return _mm256_add_epi32(total, _mm256_madd_epi16(sum, scale));
    }
    // Of sums in 32 bits, with a scale once in each lane.
    static Scale six_bit_scale(Int four, Int two, int part) { return six_bits(four, two, part); }
    static Scaled add_scaled_wide(Scaled total, Int sum, Scale scale) {
        return _mm256_add_epi32(total, _mm256_mullo_epi32(sum, scale));
    }
#endif
    using Pairs = Int;
    static Pairs pairs(Int v) { return v; }
    static Int dot_pairs(Int sum, Pairs a, const int32_t *x) {
        return _mm256_add_epi32(sum, _mm256_madd_epi16(a, broadcast(x)));
    }
    static Float floats(Int v) { return _mm256_cvtepi32_ps(v); }
    static Float all(float v) { return _mm256_set1_ps(v); }
    static Float none() { return _mm256_setzero_ps(); }
    static Float load_floats(const float *p) { return _mm256_loadu_ps(p); }
    static Float load_halves(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
    static Float load_bfloats(const void *p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
    }
    // 2^(byte - 128), half of what the scale byte of an MX format stands for. Below 2^-126, 0.
    static Float half_powers(const uint8_t *bytes) {
        const Int exponents = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)bytes));
        const Int one = _mm256_set1_epi32(1);
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_sub_epi32(_mm256_max_epi32(exponents, one), one), 23));
    }
    static void store(float *p, Float v) { _mm256_storeu_ps(p, v); }
    static Float times(Float a, Float b) { return _mm256_mul_ps(a, b); }
    static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
    static float total(Float v) {
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        four = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
    }

    static Float max(Float a, Float b) { return _mm256_max_ps(a, b); }
    static Float min(Float a, Float b) { return _mm256_min_ps(a, b); }
    static Float divided(Float a, Float b) { return _mm256_div_ps(a, b); }
    static float highest(Float v) {
        __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        four = _mm_max_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
    }
    static Float rounded(Float v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    // 2^v for integers v from -126 to 127.
    static Float power_of_two(Float v) {
        const Int exponent = _mm256_add_epi32(_mm256_cvtps_epi32(v), _mm256_set1_epi32(127));
        return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
    }
    // v where x >= limit, 0 elsewhere.
    static Float where_not_below(Float x, float limit, Float v) {
        return _mm256_and_ps(_mm256_cmp_ps(x, all(limit), _CMP_NLT_UQ), v);
    }

    static Float load_bytes(const void *p) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
    }
    // Store the totals of four registers.
    static void store_totals(float *p, const Float (&v)[4]) {
        const Float pairs = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
        _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
    }

    using Double = __m256d;
    static Double no_doubles() { return _mm256_setzero_pd(); }
    static Double all(double v) { return _mm256_set1_pd(v); }
    static Double load_doubles(const double *p) { return _mm256_loadu_pd(p); }
    static void store(double *p, Double v) { _mm256_storeu_pd(p, v); }
    static Double low_doubles(Float v) { return _mm256_cvtps_pd(_mm256_castps256_ps128(v)); }
    static Double high_doubles(Float v) { return _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)); }
    static Double plus(Double a, Double b) { return _mm256_add_pd(a, b); }
    static Double fma(Double a, Double b, Double c) { return _mm256_fmadd_pd(a, b, c); }
    static double total(Double v) {
        const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
        return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
    }

    static Int magnitude(const float *p) {
        return _mm256_and_si256(_mm256_loadu_si256((const Int *)p), _mm256_set1_epi32(0x7fffffff));
    }
    static Int larger(Int a, Int b) { return _mm256_max_epi32(a, b); }
    static int32_t largest(Int v) {
        __m128i four = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
        four = _mm_max_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
        return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(2, 3, 0, 1))));
    }
    static void store_codes(int8_t *out, const float *x, float factor) {
        const Int v = _mm256_cvtps_epi32(times(load_floats(x), all(factor)));
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
        _mm_storel_epi64((__m128i *)out, _mm_packs_epi16(words, words));
    }
};

}  // namespace
}  // namespace specdec

#include "x86.h"

// What AVX2 and AVX-512 share. Included after `Simd`.
#pragma once

#include <immintrin.h>

#include "columns.h"

namespace specdec {
namespace {

[[gnu::always_inline]] inline void prefetch_near(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }  // into the first-level cache
[[gnu::always_inline]] inline void prefetch_far(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }   // into the second-level cache

inline float from_half(uint16_t half) { return _cvtsh_ss(half); }

// The sums of the first two and of the last two of each four codes, of 16 or 32: two 16-bit numbers, the first one lowest.
template <int length>
inline int32_t sums_of_pairs(const int8_t *codes) {
    __m128i sum = _mm_setzero_si128();
    for (int i = 0; i < length; i += 16)
        sum = _mm_add_epi16(sum, _mm_maddubs_epi16(_mm_set1_epi8(1), _mm_loadu_si128((const __m128i *)(codes + i))));
    sum = _mm_add_epi16(sum, _mm_shuffle_epi32(sum, 0x4e));  // the upper half
    sum = _mm_add_epi16(sum, _mm_shuffle_epi32(sum, 0xb1));  // the second quarter
    return _mm_cvtsi128_si32(sum);
}

// Which of 16 words are equal to a value, one bit each.
inline uint64_t equal_words(const uint16_t *words, uint16_t value) {
    const __m128i all = _mm_set1_epi16(short(value));
    const __m128i low = _mm_loadu_si128((const __m128i *)words), high = _mm_loadu_si128((const __m128i *)(words + 8));
    return uint64_t(_mm_movemask_epi8(_mm_packs_epi16(_mm_cmpeq_epi16(low, all), _mm_cmpeq_epi16(high, all))));
}

// Steps of a column whose codes are stored together, and columns that are multiplied together.
constexpr int STEPS_TOGETHER = 1, COLUMNS_TOGETHER = 1;

// The place of a step's codes in `Columns::codes`.
inline int64_t place_of(int64_t step, int column, int n) { return step * n + column; }

// sum + the products of several registers of codes with one column. `x` is the column's first code; the next ones are N
// int32 apart.
template <bool Signed, int N, int Steps>
[[gnu::always_inline]] inline Int add_products(Int sum, const Int (&codes)[Steps], const int32_t *x) {
    for (int i = 0; i < Steps; i++) {
        const Simd::Activations activations = Simd::activations(x + i * N);
        sum = Signed ? Simd::dot_bytes(sum, codes[i], activations) : Simd::dot(sum, codes[i], activations);
        Simd::keep(sum);
    }
    return sum;
}

// The same for one register of a line or two. (One loop for any number would be unrolled too late, and spill.)
template <bool Signed, int N, int, int Steps>
[[gnu::always_inline]] inline void add_products(Int (&sums)[1][1], const Codes<1, Steps> &codes, const int32_t *x) {
    sums[0][0] = add_products<Signed, N>(sums[0][0], codes[0], x);
}

template <bool Signed, int N, int, int Steps>
[[gnu::always_inline]] inline void add_products(Int (&sums)[1][2], const Codes<2, Steps> &codes, const int32_t *x) {
    unrolled<Steps>([&](int i) __attribute__((always_inline)) {
        const Simd::Activations activations = Simd::activations(x + i * N);
        unrolled<2>([&](int w) __attribute__((always_inline)) {
            Int &sum = sums[0][w];
            sum = Signed ? Simd::dot_bytes(sum, codes[w][i], activations) : Simd::dot(sum, codes[w][i], activations);
            Simd::keep(sum);
        });
    });
}

// What only instructions for several columns need (see simd_neon.h).
template <int N, int Width, int Steps>
[[gnu::always_inline]] inline const Codes<Width, Steps> &rearranged(const Codes<Width, Steps> &codes) {
    return codes;
}
template <int>
[[gnu::always_inline]] inline Int broadcast_starts(const int32_t *starts) {
    return Simd::broadcast(starts);
}
template <int>
[[gnu::always_inline]] inline Simd::Scale scale_of(Simd::Scale scale, int) {
    return scale;
}
template <int, class Sum, int Width>
[[gnu::always_inline]] inline void separate(Sum (&)[1][Width]) {}

}  // namespace
}  // namespace specdec

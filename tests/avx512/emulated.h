// Emulates the AVX-512 instructions of simd_avx512.h with AVX2, so that its kernels can be tested on processors without
// AVX-512. `tests/llama/test_avx512_emulated.py` compiles avx512.cpp with this header before it. (SIMDe 0.7 lacks a
// quarter of the intrinsics.)
//
// Where AVX2 has an instruction of half the length, two of those are used; the others follow Intel's description.
//
// The compiler's header declares the intrinsics, too, but a function without AVX-512 must not call them. The functions
// below are in the kernels' namespace, and hide them there.
#pragma once

#include <immintrin.h>

#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

// `Simd::keep` needs a value in a register, and there are none of 512 bits. A compiler barrier is `__asm__ volatile`,
// which this leaves alone.
#define __asm__(...)

namespace specdec {
namespace {

// The first and the last half of a register.
template <class Half, class Whole>
struct Halves {
    Half of[2];

    explicit Halves(Whole v) { std::memcpy(of, &v, sizeof v); }
    Halves(Half first, Half last) : of{first, last} {}
    operator Whole() const {
        Whole v;
        std::memcpy(&v, of, sizeof v);
        return v;
    }
};
using Ints = Halves<__m256i, __m512i>;
using Singles = Halves<__m256, __m512>;
using Doubles = Halves<__m256d, __m512d>;

// Define an intrinsic by that for half the length, with one, two or three registers and any constants.
#define EMULATE(name, Kind, Register, half)                                               \
    template <class... Constants>                                                         \
    Register name(Register a, Constants... c) {                                           \
        return Kind(half(Kind(a).of[0], c...), half(Kind(a).of[1], c...));                \
    }
#define EMULATE_2(name, Kind, Register, half)                                             \
    inline Register name(Register a, Register b) {                                        \
        return Kind(half(Kind(a).of[0], Kind(b).of[0]), half(Kind(a).of[1], Kind(b).of[1])); \
    }
#define EMULATE_3(name, Kind, Register, half)                                             \
    inline Register name(Register a, Register b, Register c) {                            \
        return Kind(half(Kind(a).of[0], Kind(b).of[0], Kind(c).of[0]),                    \
                    half(Kind(a).of[1], Kind(b).of[1], Kind(c).of[1]));                   \
    }

EMULATE_2(_mm512_add_epi32, Ints, __m512i, _mm256_add_epi32)
EMULATE_2(_mm512_sub_epi32, Ints, __m512i, _mm256_sub_epi32)
EMULATE_2(_mm512_sub_epi8, Ints, __m512i, _mm256_sub_epi8)
EMULATE_2(_mm512_max_epi32, Ints, __m512i, _mm256_max_epi32)
EMULATE_2(_mm512_and_si512, Ints, __m512i, _mm256_and_si256)
EMULATE_2(_mm512_or_si512, Ints, __m512i, _mm256_or_si256)
EMULATE_2(_mm512_shuffle_epi8, Ints, __m512i, _mm256_shuffle_epi8)
EMULATE(_mm512_slli_epi16, Ints, __m512i, _mm256_slli_epi16)
EMULATE(_mm512_slli_epi32, Ints, __m512i, _mm256_slli_epi32)
EMULATE(_mm512_srli_epi16, Ints, __m512i, _mm256_srli_epi16)
EMULATE(_mm512_srli_epi32, Ints, __m512i, _mm256_srli_epi32)
EMULATE(_mm512_srai_epi32, Ints, __m512i, _mm256_srai_epi32)
EMULATE_2(_mm512_max_ps, Singles, __m512, _mm256_max_ps)
EMULATE_2(_mm512_min_ps, Singles, __m512, _mm256_min_ps)
EMULATE_2(_mm512_mul_ps, Singles, __m512, _mm256_mul_ps)
EMULATE_2(_mm512_div_ps, Singles, __m512, _mm256_div_ps)
EMULATE_3(_mm512_fmadd_ps, Singles, __m512, _mm256_fmadd_ps)
EMULATE_2(_mm512_add_pd, Doubles, __m512d, _mm256_add_pd)
EMULATE_3(_mm512_fmadd_pd, Doubles, __m512d, _mm256_fmadd_pd)

inline __m512i _mm512_setzero_si512() { return __m512i{}; }
inline __m512i _mm512_set1_epi8(char v) { return Ints(_mm256_set1_epi8(v), _mm256_set1_epi8(v)); }
inline __m512i _mm512_set1_epi32(int v) { return Ints(_mm256_set1_epi32(v), _mm256_set1_epi32(v)); }
inline __m512i _mm512_broadcast_i32x4(__m128i v) { return Ints(_mm256_broadcastsi128_si256(v), _mm256_broadcastsi128_si256(v)); }
inline __m512 _mm512_setzero_ps() { return __m512{}; }
inline __m512 _mm512_set1_ps(float v) { return Singles(_mm256_set1_ps(v), _mm256_set1_ps(v)); }
inline __m512d _mm512_setzero_pd() { return __m512d{}; }
inline __m512d _mm512_set1_pd(double v) { return Doubles(_mm256_set1_pd(v), _mm256_set1_pd(v)); }

inline __m512i _mm512_loadu_si512(const void *p) {
    const auto *at = (const __m256i *)p;
    return Ints(_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1));
}
inline __m512i _mm512_load_si512(const void *p) {
    if ((uintptr_t)p % 64) __builtin_trap();
    return _mm512_loadu_si512(p);
}
inline __m512 _mm512_loadu_ps(const float *p) { return Singles(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
inline __m512d _mm512_loadu_pd(const double *p) { return Doubles(_mm256_loadu_pd(p), _mm256_loadu_pd(p + 4)); }
inline void _mm512_storeu_ps(float *p, __m512 v) { std::memcpy(p, &v, sizeof v); }
inline void _mm512_storeu_pd(double *p, __m512d v) { std::memcpy(p, &v, sizeof v); }

inline __m512 _mm512_castsi512_ps(__m512i v) { return (__m512)v; }
inline __m256 _mm512_castps512_ps256(__m512 v) { return Singles(v).of[0]; }
inline __m256 _mm512_extractf32x8_ps(__m512 v, int which) { return Singles(v).of[which]; }

inline __m512 _mm512_cvtepi32_ps(__m512i v) {
    const Ints halves(v);
    return Singles(_mm256_cvtepi32_ps(halves.of[0]), _mm256_cvtepi32_ps(halves.of[1]));
}
inline __m512i _mm512_cvtps_epi32(__m512 v) {
    const Singles halves(v);
    return Ints(_mm256_cvtps_epi32(halves.of[0]), _mm256_cvtps_epi32(halves.of[1]));
}
inline __m512d _mm512_cvtps_pd(__m256 v) {
    return Doubles(_mm256_cvtps_pd(_mm256_castps256_ps128(v)), _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)));
}
inline __m512 _mm512_cvtph_ps(__m256i v) {
    return Singles(_mm256_cvtph_ps(_mm256_castsi256_si128(v)), _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1)));
}
inline __m512i _mm512_cvtepu16_epi32(__m256i v) {
    return Ints(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(v)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(v, 1)));
}
inline __m512i _mm512_cvtepu8_epi32(__m128i v) {
    return Ints(_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8)));
}
inline __m512i _mm512_cvtepi8_epi32(__m128i v) {
    return Ints(_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)));
}

// Loops over lanes.
template <class Lane, class Register>
struct Lanes {
    static constexpr int n = sizeof(Register) / sizeof(Lane);
    Lane of[n];

    explicit Lanes(Register v) { std::memcpy(of, &v, sizeof v); }
    template <class F>
    Lane reduced(F f) const {  // halves are combined, as the intrinsics do: the order matters for sums
        Lanes rest = *this;
        for (int half = n / 2; half > 0; half /= 2)
            for (int i = 0; i < half; i++) rest.of[i] = f(rest.of[i], rest.of[i + half]);
        return rest.of[0];
    }
    operator Register() const {
        Register v;
        std::memcpy(&v, of, sizeof v);
        return v;
    }
};

inline float _mm512_reduce_add_ps(__m512 v) {
    return Lanes<float, __m512>(v).reduced([](float a, float b) { return a + b; });
}
inline float _mm512_reduce_max_ps(__m512 v) {
    return Lanes<float, __m512>(v).reduced([](float a, float b) { return a > b ? a : b; });
}
inline double _mm512_reduce_add_pd(__m512d v) {
    return Lanes<double, __m512d>(v).reduced([](double a, double b) { return a + b; });
}
inline int _mm512_reduce_max_epi32(__m512i v) {
    return Lanes<int32_t, __m512i>(v).reduced([](int32_t a, int32_t b) { return a > b ? a : b; });
}

// Four products in each lane, of unsigned bytes and signed bytes.
inline __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
    const Ints s(sum), of_a(a), of_b(b);
    Ints result = s;
    for (int h = 0; h < 2; h++) {
        const __m256i odd = _mm256_set1_epi16(short(0xff00));
        const __m256i low = _mm256_madd_epi16(_mm256_andnot_si256(odd, of_a.of[h]), _mm256_srai_epi16(_mm256_slli_epi16(of_b.of[h], 8), 8));
        const __m256i high = _mm256_madd_epi16(_mm256_srli_epi16(of_a.of[h], 8), _mm256_srai_epi16(of_b.of[h], 8));
        result.of[h] = _mm256_add_epi32(result.of[h], _mm256_add_epi32(low, high));
    }
    return result;
}
// What the kernels multiply with it cannot saturate.
inline __m512i _mm512_dpbusds_epi32(__m512i sum, __m512i a, __m512i b) { return _mm512_dpbusd_epi32(sum, a, b); }
// Two products in each lane, of signed 16-bit numbers.
inline __m512i _mm512_dpwssd_epi32(__m512i sum, __m512i a, __m512i b) {
    const Ints s(sum), of_a(a), of_b(b);
    return Ints(_mm256_add_epi32(s.of[0], _mm256_madd_epi16(of_a.of[0], of_b.of[0])),
                _mm256_add_epi32(s.of[1], _mm256_madd_epi16(of_a.of[1], of_b.of[1])));
}
inline __m128i _mm512_cvtsepi32_epi8(__m512i v) {
    const Lanes<int32_t, __m512i> wide(v);
    Lanes<int8_t, __m128i> bytes(_mm_setzero_si128());
    for (int i = 0; i < 16; i++) bytes.of[i] = int8_t(wide.of[i] < -128 ? -128 : wide.of[i] > 127 ? 127 : wide.of[i]);
    return bytes;
}
inline __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int comparison) {
    if (comparison != _CMP_NLT_UQ) __builtin_trap();
    const Singles of_a(a), of_b(b);
    const int first = _mm256_movemask_ps(_mm256_cmp_ps(of_a.of[0], of_b.of[0], _CMP_NLT_UQ));
    return __mmask16(first | _mm256_movemask_ps(_mm256_cmp_ps(of_a.of[1], of_b.of[1], _CMP_NLT_UQ)) << 8);
}
inline __m512 _mm512_maskz_mov_ps(__mmask16 mask, __m512 v) {
    Lanes<float, __m512> lanes(v);
    for (int i = 0; i < 16; i++)
        if (!(mask >> i & 1)) lanes.of[i] = 0;
    return lanes;
}
inline __m512 _mm512_roundscale_ps(__m512 v, int mode) {
    if (mode != (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)) __builtin_trap();
    const Singles halves(v);
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return Singles(_mm256_round_ps(halves.of[0], nearest), _mm256_round_ps(halves.of[1], nearest));
}

}  // namespace
}  // namespace specdec

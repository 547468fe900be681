// Attention of a few queries over many half-precision keys. Each block of keys is read once for all queries of its
// head. A query's result does not depend on which other queries are computed with it.
#pragma once

#include "multiply_floats.h"

namespace specdec {
namespace {

// exp(x) for x <= 0, as 2^n * exp(r) with |r| <= ln(2) / 2 and a Taylor series. The relative error is below 2e-7.
inline Float exponential(Float x) {
    constexpr float least = -87.f;  // below this, the result would be denormal and 0 is returned
    const Float in_range = Simd::max(Simd::all(least), x);  // in this order NaN stays NaN
    const Float n = Simd::rounded(Simd::times(in_range, Simd::all(1.44269504f)));
    Float r = Simd::fma(n, Simd::all(-0.693359375f), in_range);
    r = Simd::fma(n, Simd::all(2.12194440e-4f), r);
    constexpr float coefficients[] = {1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f};
    Float p = Simd::all(1.f / 720);
    for (const float c : coefficients) p = Simd::fma(p, r, Simd::all(c));
    return Simd::where_not_below(x, least, Simd::times(p, Simd::power_of_two(n)));
}

// One step of the online softmax: scale and mask a query's products with a block of keys, and turn them into weights,
// exp(product - highest). `highest` is the query's running maximum and `sum` its running sum of weights; both are
// updated. Returns the factor by which to rescale the results accumulated so far.
inline float soften(float *products, const uint16_t *mask, int n, float scale, float &highest, float &sum) {
    alignas(LINE) uint16_t hidden[KEY_BLOCK];
    if (n < KEY_BLOCK) {  // a partial last block: mask the keys past the end
        for (int i = 0; i < KEY_BLOCK; i++) hidden[i] = 0xfc00, products[i] = i < n ? products[i] : 0.f;
        __builtin_memcpy(hidden, mask, n * sizeof(uint16_t));
        mask = hidden;
    }
    Float most = Simd::all(-__builtin_inff());
    for (int i = 0; i < KEY_BLOCK; i += Simd::lanes) {
        const Float m = Simd::load_halves(mask + i);
        // A masked key may hold anything, even NaN.
        const Float product = Simd::where_not_below(m, -65504.f, Simd::load_floats(products + i));
        const Float v = Simd::fma(product, Simd::all(scale), m);
        Simd::store(products + i, v);
        most = Simd::max(v, most);
    }
    // The maximum ignores NaN, but the weights do not: NaN or infinite products make the result NaN.
    const float before = highest, now = Simd::highest(most);
    if (now > highest) highest = now;
    Float total = Simd::none();
    for (int i = 0; i < KEY_BLOCK; i += Simd::lanes) {
        const Float p = exponential(Simd::fma(Simd::all(highest), Simd::all(-1.f), Simd::load_floats(products + i)));
        Simd::store(products + i, p);
        total = Simd::fma(p, Simd::all(1.f), total);
    }
    float factor[Simd::lanes];
    Simd::store(factor, exponential(Simd::all(before - highest)));
    sum = sum * factor[0] + Simd::total(total);
    return factor[0];
}

// results[q] = results[q] * factors[q] + the weighted values of a block, for Q queries and C registers per value.
template <int Q, int C>
void add_values(const uint8_t *values, size_t value_bytes, int n, const float *const *weights, const float *factors,
                float *const *results) {
    Float sums[Q][C];
    for (int q = 0; q < Q; q++)
        for (int c = 0; c < C; c++)
            sums[q][c] = Simd::times(Simd::load_floats(results[q] + c * Simd::lanes), Simd::all(factors[q]));
    for (int i = 0; i < n; i++, values += value_bytes) {
        Float v[C];
        for (int c = 0; c < C; c++) v[c] = Simd::load_halves((const uint16_t *)values + c * Simd::lanes);
        for (int q = 0; q < Q; q++) {
            if (weights[q][i] == 0.f) continue;  // the value of a masked key may hold anything, even NaN
            for (int c = 0; c < C; c++) sums[q][c] = Simd::fma(Simd::all(weights[q][i]), v[c], sums[q][c]);
        }
    }
    for (int q = 0; q < Q; q++)
        for (int c = 0; c < C; c++) Simd::store(results[q] + c * Simd::lanes, sums[q][c]);
}

template <int C>
void add_all_values(const Attention &a, int64_t from, int64_t first_key, int n_keys, const int *which, int n,
                    const float *weights, const float *factors, float *results) {
    const uint8_t *values = a.values + first_key * a.value_bytes + from * sizeof(uint16_t);
    for (int i = 0; i < n; i += 2) {
        const int last = i + 1 < n ? i + 1 : i;
        const float *both[2] = {weights + i * KEY_BLOCK, weights + last * KEY_BLOCK};
        float *to[2] = {results + which[i] * a.value_length + from, results + which[last] * a.value_length + from};
        if (i < last) add_values<2, C>(values, a.value_bytes, n_keys, both, factors + i, to);
        else add_values<1, C>(values, a.value_bytes, n_keys, both, factors + i, to);
    }
}

bool sees_any(const uint16_t *mask, int n_keys) {
    unsigned open = 0;
    for (int i = 0; i < n_keys; i++) open |= mask[i] ^ 0xfc00;  // minus infinity hides a key
    return open != 0;
}

// Find the queries that see one of a block's keys, and return how many there are. Those of a token share their mask.
int seeing(const Attention &a, int64_t first_key, int n_keys, int *which) {
    int n = 0;
    for (int q = 0; q < a.n; q++) {
        const bool as_before = q > 0 && a.masks[q] == a.masks[q - 1];
        if (as_before ? n > 0 && which[n - 1] == q - 1 : sees_any(a.masks[q] + first_key, n_keys)) which[n++] = q;
    }
    return n;
}

// Several rows share a call and a cache, but few blocks of keys. Each block is multiplied only by the queries that see
// one of its keys.
void attend(const Attention &a, float *scratch) {
    float *weights = scratch, *results = weights + a.n * KEY_BLOCK, *queries = results + a.n * a.value_length;
    float highest[MOST_QUERIES], sums[MOST_QUERIES], factors[MOST_QUERIES];
    float *products[MOST_QUERIES];
    int which[MOST_QUERIES], packed[MOST_QUERIES], n_packed = 0;
    for (int q = 0; q < a.n; q++) {
        highest[q] = -__builtin_inff(), sums[q] = 0.f, products[q] = weights + q * KEY_BLOCK;
        for (int64_t i = 0; i < a.value_length; i++) results[q * a.value_length + i] = 0.f;
    }
    for (int64_t first = 0; first < a.n_keys; first += KEY_BLOCK) {
        const int n_keys = a.n_keys - first < KEY_BLOCK ? int(a.n_keys - first) : KEY_BLOCK;
        const int n = seeing(a, first, n_keys, which);
        if (n == 0) continue;
        if (n != n_packed || __builtin_memcmp(which, packed, n * sizeof(int)) != 0) {
            for (int i = 0; i < n; i++) pack_floats(a.length, a.queries[which[i]], i, n, queries);
            __builtin_memcpy(packed, which, n * sizeof(int)), n_packed = n;
        }
        multiply_floats(FloatType::F16, a.length, a.keys + first * a.key_bytes, a.key_bytes, n_keys, queries, n, products);
        for (int i = 0; i < n; i++) {
            const int q = which[i];
            factors[i] = soften(products[i], a.masks[q] + first, n_keys, a.scale, highest[q], sums[q]);
        }
        int64_t from = 0;
        for (; from + 8 * Simd::lanes <= a.value_length && Simd::lanes == 16; from += 8 * Simd::lanes)
            add_all_values<8>(a, from, first, n_keys, which, n, weights, factors, results);
        for (; from + 4 * Simd::lanes <= a.value_length; from += 4 * Simd::lanes)
            add_all_values<4>(a, from, first, n_keys, which, n, weights, factors, results);
        for (; from < a.value_length; from += Simd::lanes)
            add_all_values<1>(a, from, first, n_keys, which, n, weights, factors, results);
    }
    for (int q = 0; q < a.n; q++) {
        const float inverse = sums[q] == 0.f ? 0.f : 1.f / sums[q];
        for (int64_t i = 0; i < a.value_length; i++) a.results[q][i] = results[q * a.value_length + i] * inverse;
    }
}

}  // namespace
}  // namespace specdec

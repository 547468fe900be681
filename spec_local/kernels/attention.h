// Attention of a few queries over many keys. A query's result depends neither on the other queries nor on where in the
// cache its keys lie:
// - the product of a query and a key is always summed in the same order;
// - a weight is 2^(x - M) with an integer M, so that another M changes its exponent but not its mantissa;
// - the weights, and the weighted values, are summed in double precision. (The product of a weight and a value has at
//   most 24 + 11 bits and is exact.) Another order changes bit 53, which the rounding of the result to single precision
//   hides, except for about one result in 10^8.
#pragma once

#include "columns.h"

namespace specdec {
namespace {

using Double = Simd::Double;

// Number of queries and keys that are multiplied at once, and of queries whose values are summed at once. Their sums
// (12 each) and operands fill 16 registers.
constexpr int PRODUCT_QUERIES = 3, PRODUCT_KEYS = 4, VALUE_QUERIES = 6;

constexpr float LOG2_E = 1.44269504f;
// In place of a masked key's product and of the maximum over no keys. Unlike infinity, its difference to itself is 0.
constexpr float HIDDEN = -3.4e38f;

// Compiled on its own: inlined, a loop that needs all registers competes with its surroundings for them.
#define SPECDEC_ALONE __attribute__((noinline))

// Before it decides what to keep in registers, GCC unrolls a short loop only if it is told to.
#define SPECDEC_UNROLLED _Pragma("GCC unroll 8")

// 2^x as mantissa * 2^exponent, with a Taylor series: its relative error is that of rounding to single precision.
// Not finite if x is not finite.
struct Power {
    Float mantissa, exponent;
};
inline Power power(Float x) {
    const Float n = Simd::rounded(x), r = Simd::fma(n, Simd::all(-1.f), x);
    constexpr float coefficients[] = {1.540353039e-4f, 1.333355815e-3f, 9.618129108e-3f,
                                      5.550410866e-2f, 2.402265070e-1f, 6.931471806e-1f, 1.f};
    Float p = Simd::all(1.525273380e-5f);  // ln(2)^7 / 7!
    for (const float c : coefficients) p = Simd::fma(p, r, Simd::all(c));
    return {p, n};
}

// tanh(x / (2 * log2(e))) = 1 - 2 / (2^x + 1).
inline Float half_tanh(Float x) {
    constexpr float enough = 60.f;  // beyond it, the result is rounded to 1
    const Float bounded = Simd::max(Simd::all(-enough), Simd::min(Simd::all(enough), x));  // in this order NaN stays NaN
    const Power e = power(bounded);
    const Float one = Simd::all(1.f), sum = Simd::fma(e.mantissa, Simd::power_of_two(e.exponent), one);
    return Simd::fma(Simd::all(-2.f), Simd::divided(one, sum), one);
}

// Elements from ... from + lanes - 1 of a cached row of the given length; zeros after its end.
template <CacheType T>
inline Float load_cached(const uint8_t *row, int64_t from, int64_t length) {
    if constexpr (T == CacheType::Q8_0) {
        const uint8_t *block = row + from / BLOCK * CACHE_BLOCK_BYTES;
        uint16_t scale;
        __builtin_memcpy(&scale, block, sizeof scale);
        return Simd::times(Simd::all(from_half(scale)), Simd::load_bytes(block + sizeof scale + from % BLOCK));
    } else {
        const uint16_t *halves = (const uint16_t *)row + from;
        if (from + Simd::lanes <= length) return Simd::load_halves(halves);
        if (from >= length) return Simd::none();
        alignas(LINE) uint16_t rest[Simd::lanes] = {};
        __builtin_memcpy(rest, halves, (length - from) * sizeof(uint16_t));
        return Simd::load_halves(rest);
    }
}

// Some queries, and the keys of a block that at least one of them sees.
struct Group {
    uint64_t seen = 0;  // one bit per key of the block
    int n_keys = 0, n = 0;
    const uint8_t *keys[KEY_BLOCK], *values[KEY_BLOCK];
    int places[KEY_BLOCK];      // of the keys in the block
    int queries[MOST_QUERIES];
    bool all[MOST_QUERIES];     // whether a query sees all keys, and its mask adds nothing
};

// What is known of the queries after some blocks, and memory for one block.
struct Progress {
    float highest[MOST_QUERIES];  // the integer M: at least the largest x so far
    double sums[MOST_QUERIES];    // of weights
    double *results;              // [query][value_length], sums of weighted values
    double *weights;              // [query of the group][KEY_BLOCK]
    double *values;               // [key][lanes], a slice of the values
    float *queries;               // [query][length]
    float *keys;                  // [PRODUCT_KEYS][length]
    float *products;              // [query of the group][KEY_BLOCK]
    int64_t length, value_length; // padded

    Progress(const Attention &a, void *scratch)
        : length(padded_length(a.length)), value_length(padded_length(a.value_length)) {
        results = (double *)scratch, weights = results + a.n * value_length, values = weights + a.n * KEY_BLOCK;
        queries = (float *)(values + KEY_BLOCK * Simd::lanes), keys = queries + a.n * length;
        products = keys + PRODUCT_KEYS * length;
        for (int q = 0; q < a.n; q++) {
            highest[q] = HIDDEN, sums[q] = 0;
            for (int64_t i = 0; i < value_length; i++) results[q * value_length + i] = 0;
            for (int64_t i = 0; i < length; i++) queries[q * length + i] = i < a.length ? a.queries[q][i] : 0.f;
        }
    }

    // Raise a query's M, and rescale its sums, which is exact.
    void raise(int q, float now) {
        if (now <= highest[q]) return;
        const float change = highest[q] - now;
        const double factor = change < -1000.f ? 0. : __builtin_ldexp(1., int(change));
        highest[q] = now, sums[q] *= factor;
        double *result = results + q * value_length;
        for (int64_t i = 0; i < value_length; i++) result[i] *= factor;
    }
};

inline Float load_row(const float *p) { return Simd::load_floats(p); }
inline Float load_row(const uint16_t *p) { return Simd::load_halves(p); }

// Multiply Q queries by PRODUCT_KEYS keys, which are floats or halves.
template <int Q>
struct MultiplyKeys {
    template <class Element>
    SPECDEC_ALONE static void run(int64_t length, const Element *const *keys, const float *const *queries,
                                  float *const *products) {
        Float sums[Q][PRODUCT_KEYS];
        SPECDEC_UNROLLED for (int q = 0; q < Q; q++)
            SPECDEC_UNROLLED for (int k = 0; k < PRODUCT_KEYS; k++) sums[q][k] = Simd::none();
        for (int64_t i = 0; i < length; i += Simd::lanes) {
            Float x[Q];
            SPECDEC_UNROLLED for (int q = 0; q < Q; q++) x[q] = Simd::load_floats(queries[q] + i);
            SPECDEC_UNROLLED for (int k = 0; k < PRODUCT_KEYS; k++) {
                const Float key = load_row(keys[k] + i);
                SPECDEC_UNROLLED for (int q = 0; q < Q; q++) sums[q][k] = Simd::fma(x[q], key, sums[q][k]);
            }
        }
        SPECDEC_UNROLLED for (int q = 0; q < Q; q++) Simd::store_totals(products[q], sums[q]);
    }
};

inline void prefetch(const uint8_t *row, size_t bytes) {
    for (size_t i = 0; i < bytes; i += LINE) prefetch_far(row + i);
}

// Whether halves are converted where they are used, and not once for all queries. Measured with 7 to 21 queries of a head and
// 1,500 keys, calls of whole models: 0.90 to 0.96 of the time on Zen 5 with AVX-512 (with all queries 0.98), 0.83 to 0.98 with
// AVX2 (with more than 24 queries 1.02). Not measured on Arm.
template <CacheType T>
bool is_direct(const Group &group, int64_t length, int64_t padded) {
    return T == CacheType::F16 && group.n <= Simd::few_queries && length == padded;
}

template <CacheType T>
void multiply_keys(const Attention &a, const Group &group, Progress &p) {
    const bool direct = is_direct<T>(group, a.length, p.length);
    for (int first = 0; first < group.n_keys; first += PRODUCT_KEYS) {
        const float *floats[PRODUCT_KEYS];
        const uint16_t *halves[PRODUCT_KEYS];
        for (int k = 0; k < PRODUCT_KEYS; k++) {
            const int key = first + k < group.n_keys ? first + k : group.n_keys - 1;
            const uint8_t *row = group.keys[key];
            // Fetch the key of the next block, and the value, which is needed soon and read in slices.
            prefetch(row + KEY_BLOCK * a.key_bytes, row_bytes(T, a.length));
            prefetch(group.values[key], row_bytes(a.value_type, a.value_length));
            float *out = p.keys + k * p.length;
            floats[k] = out, halves[k] = (const uint16_t *)row;
            if (direct) continue;
            for (int64_t i = 0; i < p.length; i += Simd::lanes) Simd::store(out + i, load_cached<T>(row, i, a.length));
        }
        for (int i = 0; i < group.n; i += PRODUCT_QUERIES) {
            const int n = group.n - i < PRODUCT_QUERIES ? group.n - i : PRODUCT_QUERIES;
            const float *queries[PRODUCT_QUERIES];
            float *products[PRODUCT_QUERIES];
            for (int q = 0; q < n; q++) {
                queries[q] = p.queries + group.queries[i + q] * p.length;
                products[q] = p.products + (i + q) * KEY_BLOCK + first;
            }
            if (direct) with_number<PRODUCT_QUERIES, MultiplyKeys>(n, p.length, halves, queries, products);
            else with_number<PRODUCT_QUERIES, MultiplyKeys>(n, p.length, floats, queries, products);
        }
    }
}

// What to add to the products of a token's queries: the mask, or HIDDEN.
void penalties(const Group &group, const uint16_t *mask, float *penalty) {
    for (int i = 0; i < (group.n_keys + Simd::lanes - 1) / Simd::lanes * Simd::lanes; i++) {
        const uint16_t m = i < group.n_keys ? mask[group.places[i]] : MASKED;
        penalty[i] = m == MASKED ? HIDDEN : from_half(m) * LOG2_E;
    }
}

// One step of the online softmax: turn a query's products with the keys of a group into weights.
void soften(const Attention &a, int n_keys, int q, float *x, const float *penalty, double *weights, Progress &p) {
    const Float cap = Simd::all(a.soft_cap * LOG2_E);
    const Float scale = Simd::all(a.soft_cap == 0.f ? a.scale * LOG2_E : a.scale / a.soft_cap * 2 * LOG2_E);
    Float most = Simd::all(HIDDEN);
    for (int i = 0; i < n_keys; i += Simd::lanes) {
        Float v = Simd::times(Simd::load_floats(x + i), scale);
        if (a.soft_cap != 0.f) v = Simd::times(half_tanh(v), cap);
        if (penalty) {
            const Float more = Simd::load_floats(penalty + i);
            // A masked key may hold anything, even NaN.
            v = Simd::fma(Simd::all(1.f), Simd::where_not_below(more, HIDDEN / 2, v), more);
        }
        Simd::store(x + i, v);
        most = Simd::max(v, most);
    }
    // The maximum ignores NaN, but the weights do not: NaN or infinite products make the result NaN.
    p.raise(q, __builtin_ceilf(Simd::highest(most)));
    Double total = Simd::no_doubles();
    for (int i = 0; i < n_keys; i += Simd::lanes) {
        constexpr float least = -126.f;  // below it, a weight is denormal, and 0 instead
        const Power e = power(Simd::load_floats(x + i));
        const Float exponent = Simd::fma(Simd::all(p.highest[q]), Simd::all(-1.f), e.exponent);
        const Float factor = Simd::power_of_two(Simd::max(Simd::all(least), exponent));
        const Float weight = Simd::where_not_below(exponent, least, Simd::times(e.mantissa, factor));
        const Double low = Simd::low_doubles(weight), high = Simd::high_doubles(weight);
        Simd::store(weights + i, low), Simd::store(weights + i + Simd::lanes / 2, high);
        total = Simd::plus(total, Simd::plus(low, high));
    }
    p.sums[q] += Simd::total(total);
}

void soften_all(const Attention &a, const Group &group, int64_t first_key, Progress &p) {
    alignas(LINE) float penalty[KEY_BLOCK];
    const uint16_t *mask = nullptr;  // of `penalty`
    for (int i = 0; i < group.n; i++) {
        const int q = group.queries[i];
        const bool none = group.all[i] && group.n_keys % Simd::lanes == 0;
        if (!none && a.masks[q] != mask) mask = a.masks[q], penalties(group, mask + first_key, penalty);
        soften(a, group.n_keys, q, p.products + i * KEY_BLOCK, none ? nullptr : penalty, p.weights + i * KEY_BLOCK, p);
    }
}

// A slice of `lanes` columns of all values, as doubles.
struct Slice {
    const double *values;
    void load(int key, Double &low, Double &high) const {
        low = Simd::load_doubles(values + key * Simd::lanes);
        high = Simd::load_doubles(values + key * Simd::lanes + Simd::lanes / 2);
    }
};

// The same in half precision, in the rows of the cache.
struct HalfSlice {
    const uint8_t *const *rows;
    int64_t from;
    void load(int key, Double &low, Double &high) const {
        const Float v = Simd::load_halves((const uint16_t *)rows[key] + from);
        low = Simd::low_doubles(v), high = Simd::high_doubles(v);
    }
};

// Add the weighted values of n keys to the results of Q queries.
template <int Q>
struct AddValues {
    template <class Values>
    SPECDEC_ALONE static void run(Values values, int n_keys, const double *weights, double *const *results) {
        constexpr int half = Simd::lanes / 2;
        Double sums[Q][2];
        SPECDEC_UNROLLED for (int q = 0; q < Q; q++)
            SPECDEC_UNROLLED for (int c = 0; c < 2; c++) sums[q][c] = Simd::load_doubles(results[q] + c * half);
        for (int i = 0; i < n_keys; i++) {
            Double low, high;
            values.load(i, low, high);
            SPECDEC_UNROLLED for (int q = 0; q < Q; q++) {
                const Double weight = Simd::all(weights[q * KEY_BLOCK + i]);
                sums[q][0] = Simd::fma(weight, low, sums[q][0]), sums[q][1] = Simd::fma(weight, high, sums[q][1]);
            }
        }
        SPECDEC_UNROLLED for (int q = 0; q < Q; q++)
            SPECDEC_UNROLLED for (int c = 0; c < 2; c++) Simd::store(results[q] + c * half, sums[q][c]);
    }
};

// As `AddValues`, for a slice with infinite or NaN values, which must not reach queries from which they are masked.
void add_careful(const double *values, int n_keys, const double *weights, double *result) {
    for (int i = 0; i < n_keys; i++)
        if (weights[i] != 0.) AddValues<1>::run(Slice{values + i * Simd::lanes}, 1, weights + i, &result);
}

// Convert a slice of the values of a group. Returns whether all of them are finite.
template <CacheType T>
bool convert(const Group &group, int64_t from, int64_t length, double *slice) {
    Float zero = Simd::none();  // NaN if a value is not finite
    for (int i = 0; i < group.n_keys; i++) {
        const Float v = load_cached<T>(group.values[i], from, length);
        zero = Simd::fma(v, Simd::none(), zero);
        Simd::store(slice + i * Simd::lanes, Simd::low_doubles(v));
        Simd::store(slice + i * Simd::lanes + Simd::lanes / 2, Simd::high_doubles(v));
    }
    return Simd::total(zero) == 0.f;
}

template <CacheType T>
void add_values(const Attention &a, const Group &group, Progress &p) {
    const int n_parts = (group.n + VALUE_QUERIES - 1) / VALUE_QUERIES, part = (group.n + n_parts - 1) / n_parts;
    // If no query has a masked key, no value must be kept from one.
    bool direct = is_direct<T>(group, a.value_length, p.value_length);
    for (int i = 0; i < group.n; i++) direct &= group.all[i];
    for (int64_t from = 0; from < p.value_length; from += Simd::lanes) {
        const bool finite = direct || convert<T>(group, from, a.value_length, p.values);
        for (int i = 0; i < group.n; i += part) {
            const int n = group.n - i < part ? group.n - i : part;
            double *results[VALUE_QUERIES];
            for (int q = 0; q < n; q++) results[q] = p.results + group.queries[i + q] * p.value_length + from;
            const double *weights = p.weights + i * KEY_BLOCK;
            if (direct)
                with_number<VALUE_QUERIES, AddValues>(n, HalfSlice{group.values, from}, group.n_keys, weights, results);
            else if (finite)
                with_number<VALUE_QUERIES, AddValues>(n, Slice{p.values}, group.n_keys, weights, results);
            else
                for (int q = 0; q < n; q++) add_careful(p.values, group.n_keys, weights + q * KEY_BLOCK, results[q]);
        }
    }
}

void attend_to(const Attention &a, Group &group, int64_t first_key, Progress &p) {
    for (uint64_t left = group.seen; left; left &= left - 1) {
        const int i = __builtin_ctzll(left);
        group.keys[group.n_keys] = a.keys + (first_key + i) * a.key_bytes;
        group.values[group.n_keys] = a.values + (first_key + i) * a.value_bytes;
        group.places[group.n_keys++] = i;
    }
    if (a.key_type == CacheType::Q8_0) multiply_keys<CacheType::Q8_0>(a, group, p);
    else multiply_keys<CacheType::F16>(a, group, p);
    soften_all(a, group, first_key, p);
    if (a.value_type == CacheType::Q8_0) add_values<CacheType::Q8_0>(a, group, p);
    else add_values<CacheType::F16>(a, group, p);
}

// The keys of a block that a mask does not hide, and those for which it is 0; one bit each.
struct Seen {
    uint64_t keys, plainly;
};
Seen seen_by(const uint16_t *mask, int n_keys) {
    Seen seen = {0, 0};
    int i = 0;
    for (; i + 16 <= n_keys; i += 16) {
        seen.keys |= (0xffff ^ equal_words(mask + i, MASKED)) << i;
        seen.plainly |= equal_words(mask + i, 0) << i;
    }
    for (; i < n_keys; i++) {
        seen.keys |= uint64_t(mask[i] != MASKED) << i;
        seen.plainly |= uint64_t(mask[i] == 0) << i;
    }
    return seen;
}

// Each block of keys is read once for all queries that see mostly the same of its keys. The tokens of one text share
// nearly all keys; those of several texts in one cache share few, and each reads its own.
void attend(const Attention &a, void *scratch) {
    Progress p(a, scratch);
    for (int64_t first = 0; first < a.n_keys; first += KEY_BLOCK) {
        const int n_keys = a.n_keys - first < KEY_BLOCK ? int(a.n_keys - first) : KEY_BLOCK;
        Seen seen[MOST_QUERIES];
        bool done[MOST_QUERIES];
        for (int q = 0; q < a.n; q++) {
            seen[q] = q > 0 && a.masks[q] == a.masks[q - 1] ? seen[q - 1] : seen_by(a.masks[q] + first, n_keys);
            done[q] = seen[q].keys == 0;
        }
        for (int begin = 0; begin < a.n; begin++) {
            if (done[begin]) continue;
            Group group;
            for (int q = begin; q < a.n; q++) {
                const uint64_t keys = seen[q].keys, shared = group.n ? keys & group.seen : keys;
                if (done[q] || 2 * __builtin_popcountll(shared) < __builtin_popcountll(keys)) continue;
                group.seen |= keys, group.queries[group.n++] = q, done[q] = true;
            }
            for (int i = 0; i < group.n; i++) group.all[i] = seen[group.queries[i]].plainly == group.seen;
            attend_to(a, group, first, p);
        }
    }
    for (int q = 0; q < a.n; q++) {
        if (a.sinks) {  // a key without a value
            const float x = a.sinks[q] * LOG2_E;
            p.raise(q, __builtin_ceilf(x));
            p.sums[q] += __builtin_exp2(double(x) - p.highest[q]);
        }
        const double inverse = p.sums[q] == 0. ? 0. : 1. / p.sums[q];
        for (int64_t i = 0; i < a.value_length; i++)
            a.results[q][i] = float(p.results[q * p.value_length + i] * inverse);
    }
}

}  // namespace
}  // namespace specdec

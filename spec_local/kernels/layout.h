// The memory layout of weights and activations for the kernels; README.md has a diagram.
#pragma once

#include <cstddef>
#include <cstdint>

namespace specdec {

// Rows of a matrix that are packed together, one per 32-bit lane of a cache line: of one AVX-512 register, two AVX2 or four
// NEON registers.
constexpr int ROWS = 16;
// Codes of one row that share a 32-bit lane: one dot-product instruction multiplies them and sums the products.
constexpr int CODES = 4;
// Weights per row in ggml's blocks: those of the simple types, and the super-blocks of the K-quants.
constexpr int BLOCK = 32;
constexpr int SUPER_BLOCK = 256;
// What is added to 8-bit codes when they are packed. The dot products of x86 take unsigned codes.
#ifdef __aarch64__
constexpr uint8_t PACKED_ZERO = 0;
#else
constexpr uint8_t PACKED_ZERO = 0x80;
#endif
// Bytes of a cache line, and the alignment of packed weights and work buffers.
constexpr size_t LINE = 64;

enum class Type { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS };

static constexpr bool is_k_quant(Type t) { return t >= Type::Q2_K; }  // including IQ4_XS, which is built like them
static constexpr bool has_minimum(Type t) {
    return t == Type::Q4_1 || t == Type::Q5_1 || t == Type::Q2_K || t == Type::Q4_K || t == Type::Q5_K;
}
static constexpr int block_length(Type t) { return is_k_quant(t) ? SUPER_BLOCK : BLOCK; }
// Weights of a row that share a scale. A super-block has several of these parts, with an integer scale each.
static constexpr int part_length(Type t) { return t == Type::Q2_K || t == Type::Q3_K || t == Type::Q6_K ? 16 : 32; }
static constexpr int parts_per_block(Type t) { return block_length(t) / part_length(t); }
static constexpr size_t rounded_up(size_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

// Bytes of one block of ROWS packed rows, of simple types without the scales.
static constexpr size_t block_bytes(Type t) {
    switch (t) {
        case Type::Q8_0: return ROWS * BLOCK;
        case Type::Q5_0:
        case Type::Q5_1: return ROWS * (BLOCK / 2 + BLOCK / 8);
        case Type::Q2_K: return ROWS * (4 + 16 + SUPER_BLOCK / 4);
        case Type::Q3_K: return LINE + ROWS * (12 + SUPER_BLOCK / 4 + SUPER_BLOCK / 8);
        case Type::Q4_K: return ROWS * (4 + 12 + SUPER_BLOCK / 2);
        case Type::Q5_K: return ROWS * (4 + 12 + SUPER_BLOCK / 8 + SUPER_BLOCK / 2);
        case Type::Q6_K: return LINE + ROWS * (16 + SUPER_BLOCK / 2 + SUPER_BLOCK / 4);
        case Type::IQ4_XS: return ROWS * (4 + 4 + SUPER_BLOCK / 2);
        default: return ROWS * BLOCK / 2;  // Q4_0, Q4_1, IQ4_NL, MXFP4
    }
}

// Simple types: the scales (and minima) of so many blocks precede their codes. They fill whole lines, and all bytes of a tile
// are stored in the order in which they are read.
constexpr int TOGETHER = 4;
// Bytes of the scales of ROWS rows of a block.
static constexpr size_t scales_bytes(Type t) { return ROWS * (t == Type::MXFP4 ? 1 : sizeof(uint16_t)); }
// Bytes of the scales (and minima) of TOGETHER blocks; 0 for K-quants.
static constexpr size_t header_bytes(Type t) { return is_k_quant(t) ? 0 : TOGETHER * scales_bytes(t) * (has_minimum(t) ? 2 : 1); }

// Where the TOGETHER blocks begin that block b of a tile belongs to, and where block b begins.
static constexpr size_t header_at(Type t, int64_t b) { return b / TOGETHER * (header_bytes(t) + TOGETHER * block_bytes(t)); }
static constexpr size_t block_at(Type t, int64_t b) { return (b / TOGETHER + 1) * header_bytes(t) + b * block_bytes(t); }

// Bytes of ROWS packed rows of k weights.
static constexpr size_t tile_bytes(Type t, int64_t k) {
    const int64_t blocks = k / block_length(t);
    return (blocks + TOGETHER - 1) / TOGETHER * header_bytes(t) + blocks * block_bytes(t);
}

// Bytes of a packed matrix. The last tile is padded with rows of zeros.
static constexpr size_t packed_bytes(Type t, int64_t rows, int64_t k) { return (rows + ROWS - 1) / ROWS * tile_bytes(t, k); }

// Bytes of one block of one row in ggml's own layout.
size_t source_bytes(Type t);

// Pack tiles first ... last-1 of a matrix that is in ggml's own layout.
void pack(Type type, int64_t rows, int64_t k, const uint8_t *source, uint8_t *packed, int64_t first, int64_t last);

// Activations of n columns (tokens) as 8-bit codes, interleaved so that a kernel reads all columns sequentially.
//   codes: [k / 4][n], four int8 each, in an order that the instruction set determines (`place_of`).
//   scales: [k / block][n]; NaN where an activation of the block is not finite.
//   starts: [k / part][n], for types whose codes have a zero point: what the sum of a part begins with, the zero point
//           times the negated sum of codes. The instruction set determines its form.
//   sums: for types with a minimum. Simple types: [k / 32][n] float32, the sum of codes times their scale.
//         K-quants: [k / part / 2][n], two int16, the sums of codes of two parts.
struct Columns {
    int n;
    int32_t *codes;
    float *scales;
    int32_t *starts;
    int32_t *sums;
};

// Number of int32 per block and column in `Columns::sums`.
static constexpr int sums_per_block(Type t) { return has_minimum(t) ? (parts_per_block(t) + 1) / 2 : 0; }

// Bytes of one column of `Columns`.
static constexpr size_t column_bytes(Type t, int64_t k) {
    return k + k / block_length(t) * (sizeof(float) + (parts_per_block(t) + sums_per_block(t)) * sizeof(int32_t));
}

// `Columns` in memory of n times `column_bytes`.
inline Columns columns_at(void *memory, Type t, int64_t k, int n) {
    const int64_t blocks = k / block_length(t);
    auto *codes = (int32_t *)memory;
    auto *scales = (float *)(codes + k / CODES * n);
    auto *starts = (int32_t *)(scales + blocks * n);
    return {n, codes, scales, starts, starts + blocks * parts_per_block(t) * n};
}

// How far ahead of their products packed weights are prefetched, in bytes: into the first-level cache (0: not at all), and, by
// calls of a few columns or more (`far_from`), into the second. Which is fastest is measured on each machine (measure.py).
struct Ahead {
    size_t near, far;
};
constexpr Ahead AHEADS[] = {
    // Zen 5 and Zen 3 wait for what is not in the first-level cache. On Zen 5, one token of a K-quant takes the least time with
    // 6 kB, 1.04 of that with 4 kB and up to 1.12 with 2 or 12 kB. Calls of more columns compute longer for the same weights,
    // and 6 kB are then read before they end: with 16 kB into the second-level cache, eight columns take 0.93 (Q4_K) to 0.86
    // (Q8_0) of the time with AVX-512, and two to four 0.77 to 1.01 with AVX2.
    {6144, 16384},
    // Zen 4 itself recognizes reads that follow one another, and prefetches into the first-level cache disturb it. Without
    // them, one token takes 0.90 (Q4_K_M) and 0.85 (Q8_0) of the time, and several, with prefetches into the second, 0.81 to 1.
    {0, 8192},
};
// Rows of floating-point weights that are read together if there are few columns (see `multiply_floats`), likewise.
constexpr int ROWS_TOGETHER[] = {1, 3};

struct Reading {
    Ahead ahead = AHEADS[0];
    int rows = ROWS_TOGETHER[0];
};
inline Reading reading;

enum class FloatType { F32, F16, BF16 };

// Number of floats that n columns of length k occupy in the layout that `multiply_floats` reads.
static constexpr size_t packed_floats(int64_t k, int64_t n) { return rounded_up(k) * n; }

// The types of cached keys and values.
enum class CacheType { F16, Q8_0 };

// Bytes of a block of Q8_0: a scale in half precision, and the codes.
constexpr size_t CACHE_BLOCK_BYTES = sizeof(uint16_t) + BLOCK;
// Minus infinity in half precision masks a key.
constexpr uint16_t MASKED = 0xfc00;

// Bytes of a cached key or value.
static constexpr size_t row_bytes(CacheType t, int64_t length) {
    return t == CacheType::F16 ? length * sizeof(uint16_t) : length / BLOCK * CACHE_BLOCK_BYTES;
}

// Arguments of `Kernels::attend`: some queries of one key-value head, over all keys.
struct Attention {
    int64_t length;          // of a key and a query; any number for F16, a multiple of BLOCK for Q8_0
    int64_t value_length;    // of a value and a result; likewise
    int64_t n_keys;          // any number
    CacheType key_type, value_type;
    const uint8_t *keys;     // one row per key
    size_t key_bytes;        // from one key to the next
    const uint8_t *values;
    size_t value_bytes;
    float scale;             // factor of the dot product of query and key
    float soft_cap;          // c: a product x becomes c * tanh(x / c); 0: none
    int n;                   // number of queries, at most MOST_QUERIES
    const float *const *queries;
    const uint16_t *const *masks;  // one per query: half precision, added to its products
    const float *sinks;            // one per query: the product with a key that has no value; may be null
    float *const *results;
};

// Queries that are computed together. Their sums of values fill half of a second-level cache of 256 kB (value length
// 128).
constexpr int MOST_QUERIES = 48;
// Keys that are processed together, one bit each of a 64-bit mask.
constexpr int KEY_BLOCK = 64;

// The length of a query or value in the scratch memory, a multiple of the lanes of any instruction set.
static constexpr int64_t padded_length(int64_t length) { return (length + ROWS - 1) / ROWS * ROWS; }

// Bytes of scratch memory that `attend` needs: see `Progress` in attention.h.
static constexpr size_t attention_scratch(int64_t length, int64_t value_length) {
    const size_t doubles = MOST_QUERIES * (padded_length(value_length) + KEY_BLOCK) + KEY_BLOCK * ROWS;
    const size_t floats = (MOST_QUERIES + 4) * padded_length(length) + MOST_QUERIES * KEY_BLOCK;
    return doubles * sizeof(double) + floats * sizeof(float);
}

// The most columns that an instruction set multiplies in one call of `Kernels::multiply`.
constexpr int MOST_COLUMNS = 48;

// The kernels of one instruction set.
struct Kernels {
    const char *name;
    // Maximum number of columns per call of `multiply`, at most MOST_COLUMNS.
    int (*max_columns)(Type);
    // Fill in column `column` of blocks first ... last-1 from k float32 activations.
    void (*quantize)(Type, const float *x, const Columns &, int column, int64_t first, int64_t last);
    // Copy blocks first ... last-1 of column i to column j of others.
    void (*copy_column)(Type, const Columns &from, int i, const Columns &to, int j, int64_t first, int64_t last);
    // Multiply tiles that follow one another by the columns. Writes `rows` results to each y[column].
    void (*multiply)(Type, int64_t k, const uint8_t *tiles, const Columns &, float *const *y, int rows);
    // Store column `column` of n, k float32 activations, in the layout that `multiply_floats` reads.
    void (*pack_floats)(int64_t k, const float *x, int column, int n, float *packed);
    // Multiply `rows` unpacked rows of floating-point weights, `row_bytes` apart, by n columns.
    void (*multiply_floats)(FloatType, int64_t k, const uint8_t *w, size_t row_bytes, int rows, const float *packed,
                            int n, float *const *y);
    // Attention with a softmax over the unmasked keys. `scratch` has `attention_scratch` bytes and is aligned to LINE.
    void (*attend)(const Attention &, void *scratch);
};

// Null where they were not compiled.
const Kernels *kernels_avx512_vnni();
const Kernels *kernels_avx_vnni();
const Kernels *kernels_avx2();
const Kernels *kernels_neon_i8mm();
const Kernels *kernels_neon_dotprod();

}  // namespace specdec

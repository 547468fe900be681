// How weights and activations lie in memory for the kernels: see README.md for the picture.
#pragma once

#include <cstddef>
#include <cstdint>

namespace specdec {

// Rows of a matrix that are packed together, one per 32-bit lane of an AVX-512 register (two AVX2 registers).
constexpr int ROWS = 16;
// Codes of one row that share a 32-bit lane: what one dot-product instruction multiplies and adds up.
constexpr int CODES = 4;
// Weights a row in a block of the simple types, and in a block of the K-quants, as ggml has them.
constexpr int BLOCK = 32;
constexpr int SUPER_BLOCK = 256;
// A cache line, and the alignment of whatever the kernels load.
constexpr size_t LINE = 64;

enum class Type { Q4_0, Q4_1, Q5_0, Q8_0, IQ4_NL, Q4_K, Q5_K, Q6_K };

constexpr bool is_k_quant(Type t) { return t == Type::Q4_K || t == Type::Q5_K || t == Type::Q6_K; }
constexpr bool has_minimum(Type t) { return t == Type::Q4_1; }
constexpr int block_length(Type t) { return is_k_quant(t) ? SUPER_BLOCK : BLOCK; }
constexpr size_t rounded_up(size_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

// Bytes of ROWS packed rows of one block, without the scales of the simple types, which lie in front of all blocks.
constexpr size_t block_bytes(Type t) {
    switch (t) {
        case Type::Q8_0: return ROWS * BLOCK;
        case Type::Q5_0: return ROWS * (BLOCK / 2 + BLOCK / 8);
        case Type::Q4_K: return ROWS * (4 + 12 + SUPER_BLOCK / 2);
        case Type::Q5_K: return ROWS * (4 + 12 + SUPER_BLOCK / 8 + SUPER_BLOCK / 2);
        case Type::Q6_K: return LINE + ROWS * (16 + SUPER_BLOCK / 2 + SUPER_BLOCK / 4);
        default: return ROWS * BLOCK / 2;  // Q4_0, Q4_1, IQ4_NL
    }
}

// Bytes of the scales (and minima) in front of the blocks of ROWS rows of k weights; 0 for K-quants.
constexpr size_t header_bytes(Type t, int64_t k) {
    return is_k_quant(t) ? 0 : rounded_up(k / BLOCK * ROWS * sizeof(uint16_t)) * (has_minimum(t) ? 2 : 1);
}

// Bytes of ROWS packed rows of k weights.
constexpr size_t tile_bytes(Type t, int64_t k) {
    return header_bytes(t, k) + k / block_length(t) * block_bytes(t);
}

// Bytes of a packed matrix; the last tile is filled up with rows of zeros.
constexpr size_t packed_bytes(Type t, int64_t rows, int64_t k) { return (rows + ROWS - 1) / ROWS * tile_bytes(t, k); }

// Pack the rows of tiles first ... last-1 of a matrix in ggml's own layout.
void pack(Type type, int64_t rows, int64_t k, const uint8_t *source, uint8_t *packed, int64_t first, int64_t last);

// Activations of n columns (tokens), as 8-bit codes that are interleaved so that a kernel reads on in all columns.
//   codes: [k / 4][n], four int8 each.
//   scales: [k / block][n]; NaN where an activation of the block is not finite.
//   sums: of codes. Simple types: [k / 32][n], times minus the type's zero point (Q4_1: as they are).
//         Q4_K, Q5_K: [k / 64][n], two int16 (of 32 codes each). Q6_K: [k / 32][n], two int16 (of 16 codes each).
struct Columns {
    int n;
    int32_t *codes;
    float *scales;
    int32_t *sums;
};

// int32 a block and column in `Columns::sums`.
constexpr int sums_per_block(Type t) { return t == Type::Q6_K ? 8 : is_k_quant(t) ? 4 : 1; }

// Bytes of one column of `Columns`.
constexpr size_t column_bytes(Type t, int64_t k) {
    return k + k / block_length(t) * (sizeof(float) + sums_per_block(t) * sizeof(int32_t));
}

enum class FloatType { F32, F16 };

// Floats that n columns of k take where `multiply_floats` reads them.
constexpr size_t packed_floats(int64_t k, int64_t n) { return rounded_up(k) * n; }

// Some queries of one key-value head, over all keys.
struct Attention {
    int64_t length;          // of a key and a query
    int64_t value_length;    // of a value and a result; a multiple of 16, as `length` is
    int64_t n_keys;          // a multiple of nothing
    const uint8_t *keys;     // half precision, a row each
    size_t key_bytes;        // from one key to the next
    const uint8_t *values;   // half precision
    size_t value_bytes;
    float scale;             // of the product of query and key
    int n;                   // queries, at most MOST_QUERIES
    const float *const *queries;
    const uint16_t *const *masks;  // of each query: half precision, added to its products; -infinity hides a key
    float *const *results;
};

constexpr int MOST_QUERIES = 32;
// Keys that are taken together. A query's sums are in the order of these blocks, whoever else is computed with it.
constexpr int KEY_BLOCK = 64;

// Floats of scratch memory that `attend` needs.
constexpr size_t attention_scratch(int64_t length, int64_t value_length) {
    return MOST_QUERIES * (KEY_BLOCK + value_length) + packed_floats(length, MOST_QUERIES);
}

// The kernels of one instruction set.
struct Kernels {
    const char *name;
    // Columns that one pass over a tile serves; `multiply` takes no more.
    int max_columns;
    // Fill in column `column` of blocks first ... last-1 from k float32 activations.
    void (*quantize)(Type, const float *x, const Columns &, int column, int64_t first, int64_t last);
    // One tile times the columns: rows <= ROWS results at each y[column].
    void (*multiply)(Type, int64_t k, const uint8_t *tile, const Columns &, float *const *y, int rows);
    // Put column `column` of n, k float32 activations, to where `multiply_floats` reads it.
    void (*pack_floats)(int64_t k, const float *x, int column, int n, float *packed);
    // The same for `rows` plain rows of floats, `row_bytes` apart, and n columns.
    void (*multiply_floats)(FloatType, int64_t k, const uint8_t *w, size_t row_bytes, int rows, const float *packed,
                            int n, float *const *y);
    // Attention with a softmax over the keys that are not hidden; `scratch` as `attention_scratch` says, aligned.
    void (*attend)(const Attention &, float *scratch);
};

const Kernels *kernels_avx512_vnni();
const Kernels *kernels_avx_vnni();
const Kernels *kernels_avx2();

}  // namespace specdec

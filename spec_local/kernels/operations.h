// The operations of ggml that the kernels compute, for plugin.cpp.
#pragma once

#include "plugin.h"

namespace specdec {

// Whether the kernels can multiply a packed matrix as `op`, a MUL_MAT or MUL_MAT_ID, does.
bool fits_packed(const ggml_tensor *op);
ggml::cpu::tensor_traits *packed_traits();

// Products of floating-point weights with more columns than this are left to ggml, which reads a tile of several columns
// once, and is faster on any processor.
constexpr int64_t MOST_FLOAT_COLUMNS = 64;

// Set `type` to that of floating-point weights. Returns false if there are no kernels for it.
bool float_type(ggml_type from, FloatType &type);

// The code for products of unpacked floating-point weights; null if `op` is another operation or is left to ggml.
ggml::cpu::tensor_traits *float_traits(const ggml_tensor *op);

// The code for attention; null if `op` is left to ggml.
ggml::cpu::tensor_traits *attention_traits(const ggml_tensor *op);

// Some tiles of ROWS rows of a matrix. Without any, all rows are meant.
struct ChosenTiles {
    const int32_t *tiles;  // ascending; null: all
    int64_t n;

    // The i-th tile of those that are computed.
    int64_t operator[](int64_t i) const { return tiles ? tiles[i] : i; }
};

constexpr ChosenTiles all_tiles(int64_t rows) { return {nullptr, (rows + ROWS - 1) / ROWS}; }

// The tiles of a matrix of so many rows that products in this thread's calls compute: see `specdec_kernels_choose_rows`.
ChosenTiles chosen_tiles(int64_t rows);

// Bytes at the start of an operation's work buffer in which its first thread, which makes the call, tells the others.
constexpr size_t CHOSEN_BYTES = LINE;
static_assert(sizeof(ChosenTiles) <= CHOSEN_BYTES);

// The start of a row of a tensor.
inline const char *row(const ggml_tensor *x, int64_t i1, int64_t i2, int64_t i3) {
    return (const char *)x->data + i1 * x->nb[1] + i2 * x->nb[2] + i3 * x->nb[3];
}

// Call `f` with the start of each row of a tensor, in order.
template <class F>
void for_each_row(const ggml_tensor *x, F f) {
    for (int64_t i3 = 0; i3 < x->ne[3]; i3++)
        for (int64_t i2 = 0; i2 < x->ne[2]; i2++)
            for (int64_t i1 = 0; i1 < x->ne[1]; i1++) f(row(x, i1, i2, i3));
}

}  // namespace specdec

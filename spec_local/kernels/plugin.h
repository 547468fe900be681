// The interface of plugin.cpp for Python and self_test.cpp.
#pragma once

#include "ggml_internals.h"
#include "layout.h"

namespace specdec {

// Set `type` to the packed type of a matrix. Returns false if its type or shape is not supported.
bool packed_type(const ggml_tensor *matrix, Type &type);

// The installed kernels, or null before `specdec_kernels_install`.
const Kernels *kernels();

// The most columns that products with weights of a type have if the kernels compute them: 0 if llama.cpp does.
int64_t most_columns(ggml_type type);

// The type of this name, such as "Q4_K", or GGML_TYPE_COUNT if there is none.
ggml_type type_named(const char *name);

// ggml's list of extra buffer types, which ends with null; null if there is none.
ggml_backend_buffer_type_t *extra_buffer_types();

// The buffer type that holds packed matrices.
ggml_backend_buffer_type_t packed_buffer_type();

}  // namespace specdec

extern "C" {

// Install the kernels of an instruction set (a `Kernels::name`), which take precedence over ggml's own. Call it once,
// before the first model is loaded. Returns null on success, otherwise the reason for the failure.
const char *specdec_kernels_install(const char *instruction_set);

// Enable or disable the packing of models loaded from now on, and the kernels for floating-point weights and attention.
// Must not be called during a computation.
void specdec_kernels_enable(int on);

// Pack only the first and the last tile of each matrix of models loaded from now on, whose results are then worthless: to
// try in a moment whether a model can be loaded.
void specdec_kernels_pack_ends(int on);

// Leave products of more than `most` columns with weights of a type, such as "Q4_K", to llama.cpp. A type that is packed is
// left to it as a whole if `most` is 0, when models are loaded from now on; other numbers have no effect on it.
void specdec_kernels_limit(const char *type, int64_t most);

// Read packed weights as `AHEADS[packed]` says from now on, and floating-point ones as `ROWS_TOGETHER[floats]`. Must not be
// called during a computation.
void specdec_kernels_read_as(int packed, int floats);

// In calls of llama.cpp that this thread makes from now on, compute only some rows of products with matrices of `rows` rows,
// such as the output matrix: those of `tiles` of 16 rows, ascending, which must live until the next call of this function.
// The other rows of the result are undefined. tiles null: compute all rows.
void specdec_kernels_choose_rows(int64_t rows, const int32_t *tiles, int64_t n_tiles);

// Time products of a matrix with `sizes[0 ... n_sizes-1]` columns in two ways, one after the other: with the kernels and
// without them, or, if `readings` is not 0, with the kernels and `specdec_kernels_read_as(0, 0)` and `(1, 1)`, of which the
// first is left set. seconds[round][size][2]. Returns null on success, otherwise the reason for the failure.
const char *specdec_kernels_time(const char *type, int64_t rows, int64_t k, const int *sizes, int n_sizes, int threads,
                                 int rounds, int readings, double *seconds);

// The number of experts' packed matrices that all calls up to now have read: of each call, gate, up and down of each
// expert that any of its tokens is routed to, in each layer.
int64_t specdec_kernels_experts_read(void);

// Compare the installed kernels with a float64 reference and with ggml's own. Returns null if they
// pass, otherwise the error.
const char *specdec_kernels_self_test(void);

// For tests: y[n][rows] = x[n][k] times a matrix in ggml's layout, which is packed for this call only. `type` is a
// ggml_type. Returns null on success, otherwise the reason for the failure.
const char *specdec_kernels_multiply(const char *instruction_set, int type, int64_t rows, int64_t k, int n,
                                     const void *matrix, const float *x, float *y);
}

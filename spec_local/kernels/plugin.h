// What plugin.cpp offers to Python and to self_test.cpp.
#pragma once

#include "ggml_internals.h"
#include "layout.h"

namespace specdec {

// The type of a matrix that can be packed; false: the kernels have none for it, or its shape does not fit.
bool packed_type(const ggml_tensor *matrix, Type &type);

// The kernels that were chosen; null before.
const Kernels *kernels();

// The buffer type whose matrices are packed.
ggml_backend_buffer_type_t packed_buffer_type();

}  // namespace specdec

extern "C" {

// Put the kernels of an instruction set (as `Kernels::name` has it) before ggml's own. Call it once, before the first
// model is loaded. Returns null, or why not.
const char *specdec_kernels_install(const char *instruction_set);

// Whether models that are loaded from now on are packed, and whether plain floats and attention are computed here. Not
// while a model computes.
void specdec_kernels_enable(int on);

// Compare the installed kernels with a float64 reference and with ggml's own. Returns null, or what is wrong.
const char *specdec_kernels_self_test(void);

// y[n][rows] = x[n][k] times a matrix in ggml's layout, packed for this one call; for tests. `type` is a ggml_type.
// Returns null, or why not.
const char *specdec_kernels_multiply(const char *instruction_set, int type, int64_t rows, int64_t k, int n,
                                     const void *matrix, const float *x, float *y);
}

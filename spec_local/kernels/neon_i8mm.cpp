#ifdef SPECDEC_LEAVE_OUT  // this library is for a processor that has better instructions, or lacks these
#include "operations.h"

const specdec::Kernels *specdec::kernels_neon_i8mm() { return nullptr; }
#else
#include "simd_neon.h"
#include "attention.h"
#include "multiply.h"
#include "multiply_floats.h"

const specdec::Kernels *specdec::kernels_neon_i8mm() {
    static const Kernels kernels = {"neon_i8mm",     Simd::max_columns, quantize,        copy_column,
                                    multiply,     pack_floats,       multiply_floats, attend};
    return &kernels;
}
#endif

#ifdef SPECDEC_LEAVE_OUT  // this library is for a processor that has better instructions, or lacks these
#include "operations.h"

const specdec::Kernels *specdec::kernels_avx512_vnni() { return nullptr; }
#else
#include "simd_avx512.h"
#include "attention.h"
#include "multiply.h"
#include "multiply_floats.h"

const specdec::Kernels *specdec::kernels_avx512_vnni() {
    static const Kernels kernels = {"avx512_vnni",     Simd::max_columns, quantize,        copy_column,
                                    multiply,     pack_floats,       multiply_floats, attend};
    return &kernels;
}
#endif

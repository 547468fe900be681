#include "simd_avx512.h"
#include "attention.h"
#include "multiply.h"
#include "multiply_floats.h"

const specdec::Kernels *specdec::kernels_avx512_vnni() {
    static const Kernels kernels = {"avx512_vnni", Simd::max_columns, quantize,       multiply,
                                    pack_floats, multiply_floats, attend};
    return &kernels;
}

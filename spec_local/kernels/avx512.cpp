#ifdef SPECDEC_LEAVE_OUT  // this library is for a processor that has better instructions, or lacks these
#include "operations.h"

const specdec::Kernels *specdec::kernels_avx512_vnni() { return nullptr; }
#else
#include "simd_avx512.h"
#include "instruction_set.h"

const specdec::Kernels *specdec::kernels_avx512_vnni() {
    static constexpr Kernels kernels = kernels_named("avx512_vnni");
    return &kernels;
}
#endif

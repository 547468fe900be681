#ifdef SPECDEC_LEAVE_OUT  // this library is for a processor that has better instructions, or lacks these
#include "operations.h"

const specdec::Kernels *specdec::kernels_neon_i8mm() { return nullptr; }
#else
#include "simd_neon.h"
#include "instruction_set.h"

const specdec::Kernels *specdec::kernels_neon_i8mm() {
    static constexpr Kernels kernels = kernels_named("neon_i8mm");
    return &kernels;
}
#endif

// The kernels of one instruction set: its source file includes its `Simd`, then this.
#pragma once

#include "attention.h"
#include "multiply_many.h"
#include "multiply_floats.h"

namespace specdec {
namespace {

constexpr Kernels kernels_named(const char *name) {
    return {name, columns_per_call, quantize, copy_column, multiply_any, pack_floats, multiply_floats, attend};
}

}  // namespace
}  // namespace specdec

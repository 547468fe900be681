// The kernels of one instruction set: its source file includes its `Simd`, then this.
#pragma once

#include "attention.h"
#include "multiply.h"
#include "multiply_floats.h"
#ifndef __aarch64__  // where columns are arranged for instructions that multiply several of them
#include "multiply_many.h"
#endif

namespace specdec {
namespace {

#ifdef __aarch64__
int columns_per_call(Type) { return Simd::max_columns; }
constexpr auto multiply_any = multiply;
#endif

constexpr Kernels kernels_named(const char *name) {
    return {name, columns_per_call, quantize, copy_column, multiply_any, pack_floats, multiply_floats, attend};
}

}  // namespace
}  // namespace specdec

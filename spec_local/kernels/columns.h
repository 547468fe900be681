// What the kernels of all types share. They are written in terms of `Simd`: the source file of each instruction set
// includes its own `Simd`, then the kernels. Everything is in an unnamed namespace: otherwise the linker would keep a
// single copy of each function, compiled for an arbitrary instruction set, for all of them.
#pragma once

#include <utility>

#include "layout.h"

namespace specdec {
namespace {

using Int = Simd::Int;
using Float = Simd::Float;

// Some steps (of four codes) of one or two registers of a line.
template <int Width, int Steps>
using Codes = Int[Width][Steps];

// Call `f` with the constants 0 ... n-1.
template <class F, int... I>
[[gnu::always_inline]] inline void unrolled(F f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
}

template <int n, class F>
[[gnu::always_inline]] inline void unrolled(F f) {
    unrolled(f, std::make_integer_sequence<int, n>{});
}

// F<n>::run(arguments...) for n = Least ... Most.
template <int Most, template <int> class F, int Least = 1, class... Arguments>
void with_number(int n, Arguments... arguments) {
    if constexpr (Most > Least)
        if (n < Most) return with_number<Most - 1, F, Least>(n, arguments...);
    F<Most>::run(arguments...);
}

}  // namespace
}  // namespace specdec

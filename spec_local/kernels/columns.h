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

// Call `f` with the constants 0 ... n-1.
template <class F, int... I>
[[gnu::always_inline]] inline void unrolled(F f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
}

template <int n, class F>
[[gnu::always_inline]] inline void unrolled(F f) {
    unrolled(f, std::make_integer_sequence<int, n>{});
}

// F<n>::run(arguments...) for n = 1 ... Most, which is 4, 8 or 12.
template <int Most, template <int> class F, class... Arguments>
void with_columns(int n, Arguments... arguments) {
    switch (n) {
        case 1: return F<1>::run(arguments...);
        case 2: return F<2>::run(arguments...);
        case 3: return F<3>::run(arguments...);
        case 4: return F<4>::run(arguments...);
    }
    if constexpr (Most > 4) switch (n) {
            case 5: return F<5>::run(arguments...);
            case 6: return F<6>::run(arguments...);
            case 7: return F<7>::run(arguments...);
            case 8: return F<8>::run(arguments...);
        }
    if constexpr (Most > 8) switch (n) {
            case 9: return F<9>::run(arguments...);
            case 10: return F<10>::run(arguments...);
            case 11: return F<11>::run(arguments...);
            case 12: return F<12>::run(arguments...);
        }
}

}  // namespace
}  // namespace specdec

// Products of e4m3 numbers (FP8: 4 exponent bits, 3 bits after the point) on Hopper, and their rounding. hopper.cuh has
// the other primitives.
//
// A panel is a matrix [rows, 128] of e4m3 numbers in shared memory. A row takes 128 bytes, as in hopper.cuh, so copies,
// swizzle and descriptors are the same. Both factors of a product run along the columns of their panels ("K-major"):
// wgmma does not transpose 8-bit factors.
#pragma once

#include "hopper.cuh"

#ifndef TWIN  // twin_hopper.h defines these functions for the twin
// Rounds four numbers to nearest, ties to even, and packs them into one register, the first one in the lowest byte. A
// number above 448 becomes 448.
DEVICE unsigned pack_four(float a, float b, float c, float d) {
    unsigned result;
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(result)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return result;
}

// One product: d[64, N] = a[64, 32] b[N, 32]^T + (add ? d : 0), factors in e4m3, sums in float32 of 14 bits. The sums
// are held as those of Product in hopper.cuh. A left operand in registers holds row g, columns 4t to 4t + 3; row g + 8,
// the same columns; row g, columns 4t + 16 to 4t + 19; row g + 8, the same columns.
//
// So a thread holds other columns of its sums than of a left operand. `pack_columns` takes them in another order:
// column 16 G + 4t + 2h + i of the operand is column 16 G + 8h + 2t + i of the sums (h and i are 0 or 1). The right
// operand must have its columns in the same order.
template <int N>
struct ProductE4m3;

#define MMA_E4M3(N) "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 "
#define SHAPE_E4M3(N, LAST, A, B, C, D, E, F)                                                             \
    template <>                                                                                           \
    struct ProductE4m3<N> {                                                                               \
        static DEVICE void shared(float (&d)[N / 2], Matrix a, Matrix b, bool add) {                      \
            asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #C ", 0;\n" MMA_E4M3(N) "{" TEXT_##LAST \
                         "}, "                                                                            \
                         "%" #A ", %" #B ", add, 1, 1;\n}"                                                \
                         : SUMS_##LAST(d)                                                                 \
                         : "l"(a), "l"(b), "r"(int(add)));                                                \
        }                                                                                                 \
        static DEVICE void registers(float (&d)[N / 2], const unsigned* a, Matrix b, bool add) {          \
            asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #F ", 0;\n" MMA_E4M3(N) "{" TEXT_##LAST \
                         "}, "                                                                            \
                         "{%" #A ", %" #B ", %" #C ", %" #D "}, %" #E ", add, 1, 1;\n}"                   \
                         : SUMS_##LAST(d)                                                                 \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));            \
        }                                                                                                 \
    };
SHAPE_E4M3(64, 3, 32, 33, 34, 35, 36, 37)
SHAPE_E4M3(128, 7, 64, 65, 66, 67, 68, 69)
#endif  // for the twin

// Rounds 16 columns of sums to two registers of a left operand, of rows g and g + 8, with the columns in that order.
DEVICE void pack_columns(unsigned* p, const float* sums) {
    p[0] = pack_four(sums[0], sums[1], sums[4], sums[5]);
    p[1] = pack_four(sums[2], sums[3], sums[6], sums[7]);
}

#ifndef TWIN  // twin_hopper.h defines these functions for the twin
// Loads and stores a number in shared memory.
DEVICE float load_float(Address from) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
    return x;
}
DEVICE void store_float(Address to, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory"); }
#endif  // for the twin

// Float32 numbers as sums of three bfloat16 parts, for the float32 kernels of Hopper (fa3_float32.cu and
// fa3_float32_backward.cu), and the few primitives that these kernels need beyond those of hopper.cuh.
//
//   x1 = bfloat16(x),  x2 = bfloat16(x - x1),  x3 = bfloat16(x - x1 - x2)
//
// A float32 number has 24 bits, and each part holds 8 bits and a sign. So x = x1 + x2 + x3 exactly, apart from numbers
// below 2^-110, whose last bits are below the smallest bfloat16 number. A product x y is replaced by the six largest
// products of parts. The other three are at most 2^-24 of it.
//
// The order is x1 y3, x2 y2, x1 y2, x3 y1, x2 y1, x1 y1, small products first: the tensor core cuts the sum off after
// each step, and a small sum loses little. It also needs the parts of y in the order y3, y2, y1, each in one stretch,
// so y arrives part by part, and a part leaves shared memory early. docs/arithmetic.md derives the bound.
#pragma once

#define BF16 1
#define TRUNCATES 1  // for the twin: the sums of products are cut off, as a tensor core does it
#include "hopper.cuh"

constexpr int PARTS = 3;
constexpr float LARGEST_PART = 3.38953138925153547590e38f;  // the largest finite bfloat16 number

struct View {
    float* data;
    long long batch, head, row, column;  // strides in elements
};

// Splits two numbers. part[i] holds part i + 1 of both, `low` in the low half.
DEVICE void split_two(float low, float high, unsigned& first, unsigned& second, unsigned& third) {
    first = pack(low, high);
    low -= low_of(first);
    high -= high_of(first);
    second = pack(low, high);
    third = pack(low - low_of(second), high - high_of(second));
}

// Splits sums of a product into left operands of later products.
template <int COUNT>
DEVICE void split_all(unsigned (&parts)[PARTS][COUNT / 2], const float (&sums)[COUNT]) {
    UNROLL
    for (int i = 0; i < COUNT / 2; ++i) split_two(sums[2 * i], sums[2 * i + 1], parts[0][i], parts[1][i], parts[2][i]);
}

template <int COUNT>
DEVICE void clear(float (&sums)[COUNT]) {
    UNROLL
    for (int e = 0; e < COUNT; ++e) sums[e] = 0.0f;
}

#ifndef TWIN
// Transposes and stores four 8x8 matrices of 16-bit numbers in shared memory. Lane 8i + r gives the address of row r of
// the transpose of matrix i. Lane 4g + t holds the elements [g, 2t] and [g, 2t + 1] of matrix i in register i.
DEVICE void store_transposed(Address row, const unsigned* from) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(from[0]),
                 "r"(from[1]), "r"(from[2]), "r"(from[3])
                 : "memory");
}
// Four numbers in shared memory. The address is a multiple of 16.
DEVICE void store_four(Address to, const float* four) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(four[0]), "f"(four[1]), "f"(four[2]),
                 "f"(four[3])
                 : "memory");
}
DEVICE float4 load_four(Address from) {
    float4 four;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
                 : "r"(from)
                 : "memory");
    return four;
}
// One, two and four numbers in device memory. The address is a multiple of their size.
DEVICE float load_number(const float* from) { return *from; }
DEVICE float4 load_numbers(const float* from) { return *reinterpret_cast<const float4*>(from); }
DEVICE void store_two(float* to, float first, float second) {
    *reinterpret_cast<float2*>(to) = make_float2(first, second);
}
DEVICE void store_numbers(float* to, float4 four) { *reinterpret_cast<float4*>(to) = four; }
#endif

// Stores `factor` times one of the thread's two rows of sums (r is 0 or 1). Only the first `columns` columns are
// stored, a multiple of 8, or none if it is at most 0.
template <int COUNT>
DEVICE void store_float_row(float* to, const float (&sums)[COUNT], int r, float factor, int columns) {
    const int first = thread_again() % 4 * 2;
    UNROLL
    for (int j = 0; j < COUNT / 4; ++j) {
        if (8 * j < columns)
            store_two(to + 8 * j + first, sums[4 * j + 2 * r] * factor, sums[4 * j + 2 * r + 1] * factor);
    }
}

// The primitives of a Hopper multiprocessor (sm_90a), one small function each: mbarriers, the copy engine (TMA),
// products of a warpgroup (wgmma), and the division of the registers between warpgroups. fa3.cu and fa3_backward.cu use
// them, and all their PTX is here. If TWIN is defined, the functions that contain PTX come from twin_hopper.h, where a
// CPU runs the block.
//
// A warpgroup is 4 warps, 128 threads. A panel is a matrix [rows, 64] of 16-bit numbers in shared memory. A row takes
// 128 bytes, so 8 rows take 1024 bytes; a panel starts at a multiple of 1024. The copy engine stores the 16-byte piece
// c of row r at place c ^ (r % 8) of that row (the 128-byte swizzle), and wgmma reads it in the same way. A tile of DIM
// columns consists of DIM / 64 panels, one after the other.
#pragma once

#ifdef TWIN
#include "twin_hopper.h"
#else
#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#define INFINITY __int_as_float(0x7f800000)
#define EXPORT(name)  // only the twin uses it

// A pointer to device memory. The twin checks accesses to it.
template <class T>
using Global = T*;
#endif

using Address = unsigned;  // of shared memory

constexpr int PANEL = 64;       // columns of a panel
constexpr int ROW_BYTES = 128;  // of a panel
constexpr unsigned ALL = ~0u;   // lanes of a warp

// The type of the elements: its name in PTX.
#if BF16
#define ELEMENT "bf16"
#else
#define ELEMENT "f16"
#endif

struct alignas(2) Element {
    unsigned short bits;
};

// ------------------------------------------------------------------------------------------------------------- numbers

#ifndef TWIN
// Rounds two numbers to the nearest, ties to even, and packs them into one register. `low` is in the low half.
DEVICE unsigned pack(float low, float high) {
    unsigned result;
    asm("cvt.rn." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

// The two numbers of a register as float32.
#if BF16
DEVICE float low_of(unsigned two) { return __uint_as_float(two << 16); }
DEVICE float high_of(unsigned two) { return __uint_as_float(two & 0xffff0000u); }
#else
DEVICE float low_of(unsigned two) {
    float result;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}" : "=f"(result) : "r"(two));
    return result;
}
DEVICE float high_of(unsigned two) { return low_of(two >> 16); }
#endif

// 2^x on the special function unit. The error is at most 2 ulp. A result below 2^-126 is 0.
DEVICE float exp2_of(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// Reads the thread's index in the block again. The compiler then computes what depends on it where it is used, and does
// not keep it in registers across a loop.
DEVICE int thread_again() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

// The same number, hidden from the compiler. It then computes again what depends on the number.
DEVICE Address again(Address x) {
    Address result;
    asm volatile("mov.u32 %0, %1;" : "=r"(result) : "r"(x));
    return result;
}

// The smaller of two numbers, or NaN if one of them is NaN.
DEVICE float smaller_or_nan(float a, float b) {
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
#endif

DEVICE int smaller_of(int a, int b) { return a < b ? a : b; }
DEVICE int larger_of(int a, int b) { return a > b ? a : b; }

// Reductions over a quad, the lanes 4g to 4g + 3, which together hold a row of a matrix. Every lane gets the result.
DEVICE float quad_maximum(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL, x, 2));
}
DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(ALL, x, 1);
    return x + __shfl_xor_sync(ALL, x, 2);
}

// ------------------------------------------------------------------------------------------------------------ barriers

// An mbarrier takes 8 bytes of shared memory. A phase ends when `count` threads have arrived and all announced bytes
// have landed. The phases have parity 0, 1, 0, 1, ... A wait for parity p returns when the current phase has the other
// parity. On a new barrier, a wait for 1 returns at once, and a wait for 0 returns when the first phase has ended.
#ifndef TWIN
DEVICE void barrier_create(Address barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
DEVICE void barriers_created() {
    asm volatile("fence.mbarrier_init.release.cluster;\n fence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void barrier_arrive(Address barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void barrier_arrive_expecting(Address barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(Address barrier, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra.uni over;\n"
        "bra.uni again;\n"
        "over:\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
#endif

// A position in a ring of COUNT places in shared memory, and the parity of the current round.
template <int COUNT>
struct Walk {
    int state = 0;  // twice the place, plus the parity: both fit in one register

    DEVICE int place() const { return state >> 1; }
    DEVICE unsigned parity() const { return state & 1; }
    DEVICE void next() {
        state += 2;
        if (state >= 2 * COUNT) state = (state & 1) ^ 1;
    }
};

// ----------------------------------------------------------------------------------------------------------- registers

// The compiler gives each thread of a block as many registers as the launch bounds allow. A warpgroup may return some
// of them. Another warpgroup waits for them and takes more.
#ifndef TWIN
template <int COUNT>
DEVICE void registers_reduce() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
DEVICE void registers_increase() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
#endif

// -------------------------------------------------------------------------------------------------------------- copies

// The description of a tensor for the copy engine (CUtensorMap): address, sizes, strides, the box that one copy moves,
// and the swizzle.
struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

#ifndef TWIN
// The block's shared memory. The launch sets its size. It is aligned to 1024 bytes.
DEVICE char* shared_memory() {
    extern __shared__ __align__(1024) char memory[];
    return memory;
}
// Starts the copy of a box of a tensor [batch, head, row, column] to shared memory. The barrier counts its bytes when
// they arrive. Elements outside the tensor arrive as 0. One thread calls it.
DEVICE void copy_box(Address to, const TensorMap& tensor, Address barrier, int column, int row, int head, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
        "l"(&tensor), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(barrier)
        : "memory");
}
// Starts the copy of `bytes` contiguous bytes. Their number and both addresses are multiples of 16.
DEVICE void copy_bytes(Address to, const void* from, int bytes, Address barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
// Adds four numbers to four numbers in device memory, each atomically. The address is a multiple of 16.
DEVICE void add_to_memory(float* to, const float* four) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(four[0]), "f"(four[1]),
                 "f"(four[2]), "f"(four[3])
                 : "memory");
}
// Stores four 8x8 matrices of 16-bit numbers in shared memory. Lane 8i + r gives the address of row r of matrix i. Lane
// 4g + t holds the elements [g, 2t] and [g, 2t + 1] of matrix i in register i.
DEVICE void store_matrices(Address row, const unsigned* from) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(from[0]),
                 "r"(from[1]), "r"(from[2]), "r"(from[3])
                 : "memory");
}
// Loads two numbers from shared memory. The address is a multiple of 8.
DEVICE float2 load_two(Address from) {
    float2 two;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(two.x), "=f"(two.y) : "r"(from) : "memory");
    return two;
}
// Loads and stores eight elements in device memory. The address is a multiple of 16.
DEVICE uint4 load_eight(const Element* from) { return *reinterpret_cast<const uint4*>(from); }
DEVICE void store_eight(Element* to, uint4 eight) { *reinterpret_cast<uint4*>(to) = eight; }
// Makes this thread's writes to shared memory visible to products and copies that start after a later barrier.
DEVICE void shared_written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void prefetch_map(const TensorMap& tensor) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&tensor) : "memory");
}
#endif

// ------------------------------------------------------------------------------------------------------------ products

// A matrix descriptor tells wgmma where a matrix of 16-bit numbers lies in panels. Bits 0-13 hold the address / 16;
// bits 16-29 the leading offset / 16; bits 32-45 the distance of 8 rows / 16; bits 62-63 the swizzle, 1 for 128 bytes.
// If the sum of a product runs along the columns of the panels ("K-major", Q and K in Q K^T), a product reads one panel
// and needs no leading offset. If it runs along their rows ("MN-major", V in P V), the leading offset is the distance
// from one panel to the next.
using Matrix = unsigned long long;
DEVICE Matrix matrix(Address address, int leading = 16) {
    const Matrix start = (address & 0x3FFFF) >> 4, from_panel = leading >> 4, eight_rows = 1024 >> 4, swizzle = 1;
    return swizzle << 62 | eight_rows << 32 | from_panel << 16 | start;
}
// The matrix that starts some bytes later. 32 bytes are 16 columns, 2048 bytes are 16 rows.
DEVICE Matrix ahead(Matrix m, int bytes) { return m + (bytes >> 4); }

// Products run asynchronously. `products_begin` separates earlier uses of their registers from the first product.
// `products_end` closes a group. `products_wait<N>` waits until at most the last N groups are unfinished. Before that,
// nothing may touch the sums of a product or its left operand in registers. `pin` keeps the compiler from doing so.
#ifndef TWIN
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int GROUPS>
DEVICE void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}
template <int COUNT>
DEVICE void pin(float (&registers)[COUNT]) {
    UNROLL
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

#endif

// One product: d[64, N] = a[64, 16] b[16, N] + (add ? d : 0), 16-bit factors, float32 sums. Thread 32w + 4g + t of the
// warpgroup holds, for j = 0 .. N / 8 - 1,
//   d[4j], d[4j + 1]: row 16w + g, columns 8j + 2t and 8j + 2t + 1;   d[4j + 2], d[4j + 3]: row 16w + g + 8.
// A left operand in registers holds row g, columns 2t and 2t + 1; row g + 8, the same columns; row g, columns 2t + 8
// and 2t + 9; row g + 8, the same columns. So rounded sums can be the left operand of a later product. ROWS_x is 1 if
// the sum runs along the rows of the panels of x, and 0 if it runs along their columns.
#ifndef TWIN
template <int N>
struct Product;

#define TEXT_0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define TEXT_1 TEXT_0 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define TEXT_2 TEXT_1 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define TEXT_3 TEXT_2 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define TEXT_4 TEXT_3 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define TEXT_5 TEXT_4 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define TEXT_6 TEXT_5 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define TEXT_7 TEXT_6 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define TEXT_8 TEXT_7 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define TEXT_9 TEXT_8 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define TEXT_10 TEXT_9 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define TEXT_11 TEXT_10 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define TEXT_12 TEXT_11 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define TEXT_13 TEXT_12 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define TEXT_14 TEXT_13 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define TEXT_15 TEXT_14 ",%120,%121,%122,%123,%124,%125,%126,%127"

#define FOUR(d, i) "+f"(d[(i)]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define EIGHT(d, i) FOUR(d, i), FOUR(d, i + 4)
#define SUMS_0(d) EIGHT(d, 0)
#define SUMS_1(d) SUMS_0(d), EIGHT(d, 8)
#define SUMS_2(d) SUMS_1(d), EIGHT(d, 16)
#define SUMS_3(d) SUMS_2(d), EIGHT(d, 24)
#define SUMS_4(d) SUMS_3(d), EIGHT(d, 32)
#define SUMS_5(d) SUMS_4(d), EIGHT(d, 40)
#define SUMS_6(d) SUMS_5(d), EIGHT(d, 48)
#define SUMS_7(d) SUMS_6(d), EIGHT(d, 56)
#define SUMS_8(d) SUMS_7(d), EIGHT(d, 64)
#define SUMS_9(d) SUMS_8(d), EIGHT(d, 72)
#define SUMS_10(d) SUMS_9(d), EIGHT(d, 80)
#define SUMS_11(d) SUMS_10(d), EIGHT(d, 88)
#define SUMS_12(d) SUMS_11(d), EIGHT(d, 96)
#define SUMS_13(d) SUMS_12(d), EIGHT(d, 104)
#define SUMS_14(d) SUMS_13(d), EIGHT(d, 112)
#define SUMS_15(d) SUMS_14(d), EIGHT(d, 120)

// SHAPE takes N, the index of the last group of eight sums, and the numbers of the six operands that follow the sums.
#define MMA(N) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." ELEMENT "." ELEMENT " "
#define SHAPE(N, LAST, A, B, C, D, E, F)                                                             \
    template <>                                                                                      \
    struct Product<N> {                                                                              \
        template <int ROWS_A, int ROWS_B>                                                            \
        static DEVICE void shared(float (&d)[N / 2], Matrix a, Matrix b, bool add) {                 \
            asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #C ", 0;\n" MMA(N) "{" TEXT_##LAST \
                         "}, "                                                                       \
                         "%" #A ", %" #B ", add, 1, 1, %" #D ", %" #E ";\n}"                         \
                         : SUMS_##LAST(d)                                                            \
                         : "l"(a), "l"(b), "r"(int(add)), "n"(ROWS_A), "n"(ROWS_B));                 \
        }                                                                                            \
        template <int ROWS_B>                                                                        \
        static DEVICE void registers(float (&d)[N / 2], const unsigned* a, Matrix b) {               \
            asm volatile("{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n" MMA(N) "{" TEXT_##LAST       \
                         "}, "                                                                       \
                         "{%" #A ", %" #B ", %" #C ", %" #D "}, %" #E ", add, 1, 1, %" #F ";\n}"     \
                         : SUMS_##LAST(d)                                                            \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ROWS_B));         \
        }                                                                                            \
    };
SHAPE(16, 0, 8, 9, 10, 11, 12, 13)
SHAPE(32, 1, 16, 17, 18, 19, 20, 21)
SHAPE(48, 2, 24, 25, 26, 27, 28, 29)
SHAPE(64, 3, 32, 33, 34, 35, 36, 37)
SHAPE(80, 4, 40, 41, 42, 43, 44, 45)
SHAPE(96, 5, 48, 49, 50, 51, 52, 53)
SHAPE(112, 6, 56, 57, 58, 59, 60, 61)
SHAPE(128, 7, 64, 65, 66, 67, 68, 69)
SHAPE(144, 8, 72, 73, 74, 75, 76, 77)
SHAPE(160, 9, 80, 81, 82, 83, 84, 85)
SHAPE(176, 10, 88, 89, 90, 91, 92, 93)
SHAPE(192, 11, 96, 97, 98, 99, 100, 101)
SHAPE(208, 12, 104, 105, 106, 107, 108, 109)
SHAPE(224, 13, 112, 113, 114, 115, 116, 117)
SHAPE(240, 14, 120, 121, 122, 123, 124, 125)
SHAPE(256, 15, 128, 129, 130, 131, 132, 133)
#endif

// Rounds and stores `factor` times one of the thread's two rows of sums (r is 0 or 1). Only the first `columns` columns
// are stored; `columns` is a multiple of 8, or at most 0 for a row outside the tensor. All threads of a warp call it. A
// lane of a quad holds two of every eight columns. The lanes exchange them, and each lane then stores eight columns at
// once.
template <int COUNT>
DEVICE void store_row(Element* to, const float (&sums)[COUNT], int r, float factor, int columns) {
    const int t = thread_again() % 4;
    UNROLL
    for (int first = 0; first < 2 * COUNT; first += 32) {
        unsigned word[4];  // word[i]: the lane's two of the eight columns from first + 8 i on
        UNROLL
        for (int i = 0; i < 4; ++i) {
            const int e = first / 2 + 4 * i + 2 * r;
            word[i] = pack(sums[e] * factor, sums[e + 1] * factor);
        }
        UNROLL
        for (int bit = 1; bit <= 2; bit *= 2) {
            UNROLL
            for (int i = 0; i < 4; ++i) {
                if (i & bit) continue;
                const unsigned received = __shfl_xor_sync(ALL, t & bit ? word[i] : word[i | bit], bit);
                if (t & bit)
                    word[i] = received;
                else
                    word[i | bit] = received;
            }
        }
        // Now word[i] holds columns 2 i and 2 i + 1 of the eight columns from first + 8 t on.
        if (first + 8 * t < columns) store_eight(to + first + 8 * t, make_uint4(word[0], word[1], word[2], word[3]));
    }
}

// The primitives of a thread, a warp and a block, one small function each. They need sm_80 or later. Apart from
// hopper.cuh, only this file contains PTX.
//
// Each primitive has two implementations. On a GPU it is a few instructions of this file. If TWIN is defined, it comes
// from twin.h, where a CPU runs the block. The kernels are the same in both cases. A lane is thread % 32, and a quad is
// the four lanes 4g to 4g + 3.
#pragma once

// 16-bit numbers, as their bits. Arithmetic on them is done in float32.
struct half {
    unsigned short bits;
};
struct bfloat16 {
    unsigned short bits;
};

#ifdef TWIN
#include "twin.h"
#else

#define DEVICE __device__ __forceinline__
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) name
#define EXPORT(name)  // only the twin uses it
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")

#define INFINITY __int_as_float(0x7f800000)

// A pointer to device memory, and N registers of a thread. The twin checks accesses to both, and fills registers with
// NaN.
template <class T>
using Global = T*;

template <class T, int N>
struct Registers {
    T at[N];
    DEVICE T& operator[](int i) { return at[i]; }
    DEVICE const T& operator[](int i) const { return at[i]; }
};

DEVICE int block_index() { return blockIdx.x; }
DEVICE int thread_index() { return threadIdx.x; }
// Reads the block's or the thread's index again. The compiler then computes what depends on it where it is used, and
// does not keep it in registers across a loop.
DEVICE int block_index_again() {
    int index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    return index;
}
DEVICE int thread_index_again() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}
DEVICE void barrier() { __syncthreads(); }
// A barrier of THREADS threads, those of the warps that call it with the same number, 1 to 15. Other warps do not wait.
// The barrier of all threads has number 0.
template <int THREADS>
DEVICE void barrier_of(int number) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}
// On sm_90 and later, a kernel may be launched early (`early` of launching.py): it starts when each block of the kernel
// before it has called next_may_start or has ended. Its threads call previous_has_ended, which waits for this end.
DEVICE void next_may_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void previous_has_ended() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The block's shared memory. The launch sets its size. It is aligned to 1024 bytes.
DEVICE char* shared_memory() {
    extern __shared__ __align__(1024) char memory[];
    return memory;
}
// An address in shared memory, as copies and ldmatrix take it. `flipped` is the exclusive or of an address and `bytes`.
// The compiler cannot compute the result ahead of a loop and keep it, because all addresses of a loop would fill the
// registers.
using Spot = unsigned;
DEVICE Spot spot_of(const void* pointer) { return static_cast<Spot>(__cvta_generic_to_shared(pointer)); }
DEVICE Spot flipped(Spot spot, int bytes) {
    Spot result;
    asm volatile("xor.b32 %0, %1, %2;" : "=r"(result) : "r"(spot), "r"(bytes));
    return result;
}

// Reads and writes of shared memory: four float32 numbers at an aligned address, or one number.
DEVICE float4 read_four(const void* pointer) { return *static_cast<const float4*>(pointer); }
template <class T>
DEVICE T read(const T* pointer) {
    return *pointer;
}
template <class T>
DEVICE void write(T* pointer, T value) {
    *pointer = value;
}
// Writes or reads four registers of a lane, 16 bytes at an aligned address.
DEVICE void write_registers(void* pointer, const Registers<unsigned, 4>& from) {
    *static_cast<uint4*>(pointer) = make_uint4(from[0], from[1], from[2], from[3]);
}
DEVICE void read_registers(Registers<unsigned, 4>& to, const void* pointer) {
    const uint4 four = *static_cast<const uint4*>(pointer);
    to[0] = four.x;
    to[1] = four.y;
    to[2] = four.z;
    to[3] = four.w;
}

// ------------------------------------------------------------------------------------------------------------- numbers

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(half x) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
    return result;
}
DEVICE float to_float(bfloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

// Rounds two numbers to the nearest, ties to even, and packs them into one register. `low` is in the low half. Only the
// versions for 16-bit types are called.
template <class T>
DEVICE unsigned pack(float, float) {
    return 0;
}
template <>
DEVICE unsigned pack<half>(float low, float high) {
    unsigned result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}
template <>
DEVICE unsigned pack<bfloat16>(float low, float high) {
    unsigned result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

template <class T>
DEVICE T rounded(float x) {
    return {static_cast<unsigned short>(pack<T>(x, 0.0f))};
}
template <>
DEVICE float rounded<float>(float x) {
    return x;
}

// Reads or writes 16 bytes of device memory at an aligned address.
template <class T>
DEVICE void read_sixteen(T (&to)[16 / sizeof(T)], Global<const T> from) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
}
DEVICE void write_sixteen(Global<unsigned> to, const Registers<unsigned, 4>& from) {
    *reinterpret_cast<uint4*>(to) = make_uint4(from[0], from[1], from[2], from[3]);
}
DEVICE void write_sixteen(Global<float> to, const Registers<float, 4>& from) {
    *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
}

// Rounds two numbers and writes them to neighbouring elements in device memory at once. The address is aligned.
template <class T>
DEVICE void write_two(Global<T> to, float low, float high) {
    *reinterpret_cast<unsigned*>(to) = pack<T>(low, high);
}
template <>
DEVICE void write_two<float>(Global<float> to, float low, float high) {
    *reinterpret_cast<float2*>(to) = make_float2(low, high);
}

// a b + c with one rounding.
DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float maximum_of(float a, float b) { return fmaxf(a, b); }
DEVICE bool is_negative_zero(float x) { return __float_as_uint(x) == 0x80000000u; }

// 2^x on the special function unit. The error is at most 2 ulp, and a result below 2^-126 is 0 (PTX ISA,
// ex2.approx.ftz.f32).
DEVICE float exp2_of(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
// The natural logarithm. The error is at most 1 ulp (CUDA C++ Programming Guide, standard functions). log 0 = -inf.
DEVICE float log_of(float x) { return logf(x); }

// -------------------------------------------------------------------------------------------------------------- copies

// Starts an asynchronous copy of 16 bytes, or of one number of 4 bytes, from device memory to shared memory. If
// `inside` is false, it writes 0 and reads nothing.
template <int BYTES>
DEVICE void copy_async(Spot shared, const void* global, bool inside) {
    const int bytes = inside ? BYTES : 0;
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
// Waits for the copies that this thread has started. A barrier then makes them visible to the other threads.
DEVICE void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// --------------------------------------------------------------------------------------------------------------- lanes

// The value that another lane of the warp holds. All lanes of the warp call it.
DEVICE float from_lane(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
DEVICE unsigned from_lane(unsigned value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
DEVICE float from_lane_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

// ------------------------------------------------------------------------------------------------------------ matrices

// Loads four 8x8 matrices of 16-bit numbers from shared memory. Lane 8i + r gives the address of row r of matrix i: 16
// bytes, aligned. Lane 4g + t receives two elements of matrix i in register i: [g, 2t] and [g, 2t + 1]. If the matrices
// are transposed, it receives [2t, g] and [2t + 1, g].
DEVICE void ldmatrix(Registers<unsigned, 4>& to, Spot row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}
DEVICE void ldmatrix_transposed(Registers<unsigned, 4>& to, Spot row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

// The transpose of an 8x8 matrix of 16-bit numbers. Lane 4g + t holds two elements of it: [g, 2t] and [g, 2t + 1].
DEVICE unsigned transposed(unsigned two) {
    unsigned result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(two));
    return result;
}

// c += a b on a tensor core. a [16, 16] and b [16, 8] are 16-bit, and c [16, 8] is float32. Lane 4g + t holds
//   of a: [g, 2t..2t+1], [g + 8, 2t..2t+1], [g, 2t+8..2t+9], [g + 8, 2t+8..2t+9]
//   of b: [2t..2t+1, g], [2t+8..2t+9, g]
//   of c: [g, 2t..2t+1], [g + 8, 2t..2t+1]
// Only the versions for 16-bit types are called.
template <class T>
DEVICE void mma(Registers<float, 4>&, const Registers<unsigned, 4>&, unsigned, unsigned) {}
template <>
DEVICE void mma<half>(Registers<float, 4>& c, const Registers<unsigned, 4>& a, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
DEVICE void mma<bfloat16>(Registers<float, 4>& c, const Registers<unsigned, 4>& a, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif

// ----------------------------------------------------------------------------------- the same on a GPU and on its twin

constexpr float LOG2_E = 1.44269504088896340736f;

DEVICE int lane_index() { return thread_index() % 32; }
DEVICE int lane_index_again() { return thread_index_again() % 32; }
DEVICE int warp_index_again() { return thread_index_again() / 32; }
DEVICE int warp_index() { return thread_index() / 32; }
DEVICE int smaller_of(int a, int b) { return a < b ? a : b; }
DEVICE int larger_of(int a, int b) { return a > b ? a : b; }

// Reductions over a quad, whose four lanes together hold a row of a matrix, and over LANES neighbouring lanes, a power
// of two. Every lane gets the result.
DEVICE float quad_maximum(float x) {
    x = maximum_of(x, from_lane_xor(x, 1));
    return maximum_of(x, from_lane_xor(x, 2));
}
DEVICE float quad_sum(float x) {
    x += from_lane_xor(x, 1);
    return x + from_lane_xor(x, 2);
}
template <int LANES>
DEVICE float sum_of_lanes(float x) {
    UNROLL
    for (int mask = LANES / 2; mask > 0; mask /= 2) x += from_lane_xor(x, mask);
    return x;
}

// The dropout mask: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Its key is
// the 64-bit seed, and its counter is (key position, query position, head, batch). So the forward and the backward draw
// the same mask. A weight is kept if the first output word is above `last_dropped`.
DEVICE bool kept(unsigned long long seed, unsigned last_dropped, unsigned batch, unsigned head, unsigned query,
                 unsigned key) {
    unsigned c0 = key, c1 = query, c2 = head, c3 = batch, k0 = static_cast<unsigned>(seed),
             k1 = static_cast<unsigned>(seed >> 32);
    UNROLL
    for (int round = 0; round < 10; ++round) {
        const unsigned long long first = 0xD2511F53ull * c0, second = 0xCD9E8D57ull * c2;
        c0 = static_cast<unsigned>(second >> 32) ^ c1 ^ k0;
        c1 = static_cast<unsigned>(second);
        c2 = static_cast<unsigned>(first >> 32) ^ c3 ^ k1;
        c3 = static_cast<unsigned>(first);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c0 > last_dropped;
}

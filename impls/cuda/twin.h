// The CPU twin of primitives.cuh. One core of a CPU runs all threads of a block, so that the source of a kernel also
// runs on a machine without a GPU. twin_machine.h runs the threads.
//
// The twin is stricter than a GPU. The following faults end a kernel with an error that names block and thread:
//   - an access outside the tensors of the launch, outside the block's shared memory or outside a set of registers, or
//     an access that is not aligned;
//   - lanes of a warp that are at different meetings, or at meetings of different source lines;
//   - a barrier that not all of its threads reach, or warps that wait at it at different source lines;
//   - a barrier_of whose threads, or lanes of one warp, name different numbers or sizes, or that takes other warps than
//     before while nothing keeps these from taking part instead;
//   - a race: two warps access the same 16 bytes of shared memory, one of them writes, and no barrier of both, or chain
//     of barriers from one to the other, is in between;
//   - a read, a write or another copy at a place of shared memory to which an asynchronous copy is on its way, before
//     its thread has waited for it.
// Shared memory and registers hold NaN until they are written. A local variable that may be read before it is set is a
// compilation error (launching.py), if the host's compiler detects it.
//
// The twin does not detect the following faults. On a GPU, compute-sanitizer may detect them:
//   - races on device memory, between blocks or between warps, and results that no thread writes;
//   - lanes of one warp that pass numbers through shared memory without a meeting in between, because the lanes of a
//     warp run in order up to the next meeting;
//   - accesses to memory through a plain pointer or array instead of read, write, copies, ldmatrix, Global or
//     Registers;
//   - lanes that diverge and then meet at the same source line, as in a function that both branches call.
#pragma once
#include "twin_machine.h"

template <class T, int N>
struct Registers {
    T at[N];
    Registers() { memset(static_cast<void*>(at), 0xff, sizeof at); }
    T& operator[](int i) { return at[checked(i)]; }
    const T& operator[](int i) const { return at[checked(i)]; }
    static int checked(int i) {
        if (i < 0 || i >= N) twin::fail("register %d of %d", i, N);
        return i;
    }
};

inline int block_index() { return twin::machine.block; }
inline int thread_index() { return twin::thread(); }
inline int block_index_again() { return twin::machine.block; }
inline int thread_index_again() { return twin::thread(); }
inline void barrier(int line = __builtin_LINE()) { twin::barrier(line); }
template <int THREADS>
inline void barrier_of(int number, int line = __builtin_LINE()) {
    static_assert(THREADS > 0 && THREADS % twin::LANES == 0, "a barrier takes whole warps");
    twin::barrier_of(number, THREADS / twin::LANES, line);
}
inline void next_may_start() {}
inline void previous_has_ended() {}
inline char* shared_memory() { return twin::machine.shared; }

using Spot = char*;
inline Spot spot_of(const void* pointer) { return static_cast<Spot>(const_cast<void*>(pointer)); }
inline Spot flipped(Spot spot, int bytes) { return twin::machine.shared + ((spot - twin::machine.shared) ^ bytes); }

inline float4 read_four(const void* pointer) {
    twin::reading(pointer, 16, twin::machine.warp);
    return *static_cast<const float4*>(pointer);
}
template <class T>
inline T read(const T* pointer) {
    twin::reading(pointer, sizeof(T), twin::machine.warp);
    return *pointer;
}
template <class T>
inline void write(T* pointer, T value) {
    twin::writing(pointer, sizeof(T), twin::machine.warp);
    *pointer = value;
}
inline void write_registers(void* pointer, const Registers<unsigned, 4>& from) {
    twin::writing(pointer, 16, twin::machine.warp);
    memcpy(pointer, from.at, 16);
}
inline void read_registers(Registers<unsigned, 4>& to, const void* pointer) {
    twin::reading(pointer, 16, twin::machine.warp);
    memcpy(to.at, pointer, 16);
}

template <class T>
inline void read_sixteen(T (&to)[16 / sizeof(T)], Global<const T> from) {
    twin::check_global(from.pointer, 16);
    memcpy(to, from.pointer, 16);
}
template <class T>
inline void write_sixteen(Global<T> to, const Registers<T, 4>& from) {
    twin::check_global(to.pointer, 16);
    memcpy(to.pointer, from.at, 16);
}
template <class T>
inline void write_two(Global<T> to, float low, float high) {
    twin::check_global(to.pointer, 2 * sizeof(T));
    to[0] = rounded<T>(low);
    to[1] = rounded<T>(high);
}

inline float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// As fmaxf: if one of the two numbers is NaN, the result is the other one.
inline float maximum_of(float a, float b) { return a > b || b != b ? a : b; }
inline bool is_negative_zero(float x) { return twin::bits_of(x) == 0x80000000u; }
inline float exp2_of(float x) { return exp2f(x); }
inline float log_of(float x) { return logf(x); }

template <int BYTES, class T>
inline void copy_async(Spot shared, Global<T> from, bool inside) {
    using namespace twin;
    const void* global = from.pointer;
    if (inside) check_global(global, BYTES);
    writing(shared, BYTES, machine.warp).settled &= ~words_of(shared, BYTES);
    memset(shared, 0xff, BYTES);
    const int t = thread();
    if (machine.pending[t] == machine.room[t]) {
        machine.room[t] = machine.room[t] ? 2 * machine.room[t] : 64;
        machine.copies[t] = static_cast<Copy*>(realloc(machine.copies[t], machine.room[t] * sizeof(Copy)));
    }
    machine.copies[t][machine.pending[t]++] = {shared, global, BYTES, inside};
}
inline void copies_wait() {
    using namespace twin;
    const int t = thread();
    for (int i = 0; i < machine.pending[t]; ++i) {
        const Copy& copy = machine.copies[t][i];
        check_shared(copy.to, copy.bytes).settled |= words_of(copy.to, copy.bytes);
        writing(copy.to, copy.bytes, machine.warp);
        if (copy.inside)
            memcpy(copy.to, copy.from, copy.bytes);
        else
            memset(copy.to, 0, copy.bytes);
    }
    machine.pending[t] = 0;
}

namespace twin {
struct Shuffle {
    float value;
    int lane;
    float result;
};
}  // namespace twin
inline float from_lane(float value, int lane, int line = __builtin_LINE()) {
    twin::Shuffle mine{value, lane, 0.0f};
    twin::meet(twin::SHUFFLE, line, &mine, [](twin::Warp& warp) {
        for (const void* slot : warp.slots) {
            auto* one = static_cast<twin::Shuffle*>(const_cast<void*>(slot));
            one->result = static_cast<const twin::Shuffle*>(warp.slots[one->lane % twin::LANES])->value;
        }
    });
    return mine.result;
}
inline unsigned from_lane(unsigned value, int lane, int line = __builtin_LINE()) {
    return twin::bits_of(from_lane(twin::from_bits<float>(value), lane, line));
}
inline float from_lane_xor(float value, int mask, int line = __builtin_LINE()) {
    return from_lane(value, (thread_index() % 32) ^ mask, line);
}

namespace twin {
struct Ldmatrix {
    unsigned* to;
    const unsigned short* row;
};
inline constexpr char LDMATRIX[] = "ldmatrix", MMA[] = "mma";
template <bool TRANSPOSED>
inline void ldmatrix(Registers<unsigned, 4>& to, Spot row, int line) {
    reading(row, 16, machine.warp);
    const Ldmatrix mine{to.at, reinterpret_cast<const unsigned short*>(row)};
    meet(LDMATRIX, line, &mine, [](Warp& warp) {
        const Ldmatrix* lanes[LANES];
        for (int i = 0; i < LANES; ++i) lanes[i] = static_cast<const Ldmatrix*>(warp.slots[i]);
        for (int i = 0; i < 4; ++i) {
            for (int lane = 0; lane < LANES; ++lane) {
                const int g = lane / 4, t = lane % 4;
                const unsigned low = TRANSPOSED ? lanes[8 * i + 2 * t]->row[g] : lanes[8 * i + g]->row[2 * t];
                const unsigned high = TRANSPOSED ? lanes[8 * i + 2 * t + 1]->row[g] : lanes[8 * i + g]->row[2 * t + 1];
                lanes[lane]->to[i] = low | high << 16;
            }
        }
    });
}
}  // namespace twin
inline void ldmatrix(Registers<unsigned, 4>& to, Spot row, int line = __builtin_LINE()) {
    twin::ldmatrix<false>(to, row, line);
}
inline void ldmatrix_transposed(Registers<unsigned, 4>& to, Spot row, int line = __builtin_LINE()) {
    twin::ldmatrix<true>(to, row, line);
}

inline unsigned transposed(unsigned two, int line = __builtin_LINE()) {
    const int g = thread_index() % 32 / 4, t = thread_index() % 4;
    const unsigned low = from_lane(two, 8 * t + g / 2, line), high = from_lane(two, 8 * t + 4 + g / 2, line);
    return (low >> 16 * (g % 2) & 0xffffu) | high >> 16 * (g % 2) << 16;
}

namespace twin {
struct Mma {
    float* c;
    const unsigned* a;
    unsigned b0, b1;
};
typedef float Eight __attribute__((vector_size(32)));
}  // namespace twin
// Products of two 16-bit numbers are exact in float32. The sum over k is computed in order.
template <class T>
inline void mma(Registers<float, 4>& c, const Registers<unsigned, 4>& a, unsigned b0, unsigned b1,
                int line = __builtin_LINE()) {
    const twin::Mma mine{c.at, a.at, b0, b1};
    twin::meet(twin::MMA, line, &mine, [](twin::Warp& warp) {
        alignas(32) unsigned short a[16][16], b[16][8];
        alignas(32) float wide_a[16][16], wide_b[16][8], sums[16][8];
        for (int lane = 0; lane < twin::LANES; ++lane) {
            const auto& one = *static_cast<const twin::Mma*>(warp.slots[lane]);
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 4; ++i) {
                memcpy(&a[g + 8 * (i % 2)][2 * t + 8 * (i / 2)], &one.a[i], 4);
                sums[g + 8 * (i / 2)][2 * t + i % 2] = one.c[i];
            }
            for (int i = 0; i < 2; ++i) {
                b[2 * t + i][g] = static_cast<unsigned short>(one.b0 >> 16 * i);
                b[2 * t + 8 + i][g] = static_cast<unsigned short>(one.b1 >> 16 * i);
            }
        }
        for (int i = 0; i < 256; ++i) wide_a[i / 16][i % 16] = to_float(T{a[i / 16][i % 16]});
        for (int i = 0; i < 128; ++i) wide_b[i / 8][i % 8] = to_float(T{b[i / 8][i % 8]});
        for (int r = 0; r < 16; ++r) {
            twin::Eight sum;
            memcpy(&sum, sums[r], sizeof sum);
            for (int k = 0; k < 16; ++k) {
                twin::Eight row;
                memcpy(&row, wide_b[k], sizeof row);
                sum += wide_a[r][k] * row;
            }
            memcpy(sums[r], &sum, sizeof sum);
        }
        for (int lane = 0; lane < twin::LANES; ++lane) {
            const auto& one = *static_cast<const twin::Mma*>(warp.slots[lane]);
            for (int i = 0; i < 4; ++i) one.c[i] = sums[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
        }
    });
}

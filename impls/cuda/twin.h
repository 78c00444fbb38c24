// The CPU twin of primitives.cuh. One core of a CPU runs all threads of a block, so that the source of a kernel also
// runs on a machine without a GPU.
//
// Each thread of a block is a fiber. A fiber has a stack of its own. A switch to another fiber saves the registers that
// a function call preserves. A fiber runs until it reaches a meeting of its warp's lanes (a shuffle, ldmatrix or mma)
// or a barrier. At a meeting, the last lane to arrive computes for all lanes. The lanes of a warp run in order, so a
// meeting costs 32 switches of a few nanoseconds each. Between barriers the warps run one after another. Their order
// reverses at each barrier.
//
// The twin is stricter than a GPU. The following faults end a kernel with an error that names block and thread:
//   - an access outside the tensors of the launch, outside the block's shared memory or outside a set of registers, or
//     an access that is not aligned;
//   - lanes of a warp that are at different meetings, or at meetings of different source lines;
//   - a barrier that not all threads reach, or warps that wait at barriers of different source lines;
//   - a race: two warps access the same 16 bytes of shared memory between two barriers, and one of them writes;
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
//
// CAUSAL, DROPOUT and VECTOR are constants of the compilation on a GPU. Here they are variables, because as constants
// they would only multiply the number of compilations.
#pragma once
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

#define DEVICE inline
#define KERNEL(name) static void name
#define UNROLL
#define ROLLED
#define EXPORT(name)                                                                      \
    extern "C" const char* name##_launch(void** parameters, const twin::Launch* launch) { \
        return twin::run(name, parameters, *launch);                                      \
    }                                                                                     \
    extern "C" int name##_sizes(int* sizes) { return twin::sizes_of(name, sizes); }

extern "C" {
int CAUSAL, DROPOUT, VECTOR;
}

struct alignas(16) float4 {
    float x, y, z, w;
};

namespace twin {

constexpr int LANES = 32, MAX_WARPS = 32, STACK = 128 * 1024;

// -------------------------------------------------------------------------------------------------------------- fibers

#if defined(__x86_64__)
struct Context {
    void* stack;
};
extern "C" void flashproof_switch(void** from, void* to);
asm(R"(
.text
.type flashproof_switch, @function
.local flashproof_switch
flashproof_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size flashproof_switch, .-flashproof_switch
)");
inline void switch_context(Context& from, Context& to) { flashproof_switch(&from.stack, to.stack); }
inline void prepare(Context& context, char* stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + STACK) - 2;  // on entry to a function, rsp % 16 is 8
    *top = reinterpret_cast<void*>(entry);
    context.stack = top - 6;
}
#elif defined(__aarch64__)
struct Context {
    void* stack;
};
extern "C" void flashproof_switch(void** from, void* to);
asm(R"(
.text
.type flashproof_switch, @function
.local flashproof_switch
flashproof_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size flashproof_switch, .-flashproof_switch
)");
inline void switch_context(Context& from, Context& to) { flashproof_switch(&from.stack, to.stack); }
inline void prepare(Context& context, char* stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + STACK) - 20;
    memset(top, 0, 160);
    top[11] = reinterpret_cast<void*>(entry);  // x30, the address to which ret jumps
    context.stack = top;
}
#else
using Context = ucontext_t;
inline void switch_context(Context& from, Context& to) { swapcontext(&from, &to); }
inline void prepare(Context& context, char* stack, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
}
#endif

// ------------------------------------------------------------------------------------------------------------- machine

struct Buffer {
    const char *start, *end;
};

struct Launch {
    int blocks, threads, shared_bytes, buffer_count;
    const Buffer* buffers;
};

struct Copy {
    char* to;
    const void* from;
    int bytes;
    bool inside;
};

struct Warp {
    Context lanes[LANES];
    const void* slots[LANES];  // what each lane brings to a meeting
    const char* meeting;
    int line, arrived, lane;  // source line of the meeting; number of lanes that have arrived; the lane that runs
    bool waiting, ended;
};

struct Access {             // the last accesses to 16 bytes of shared memory
    int written, read;      // phases of the last write and the last read: the number of barriers before it
    short writer, reader;   // the warps of these accesses; reader is -1 for several warps
    unsigned char settled;  // one bit for each 4 bytes, set if no copy to them is on its way
};

struct Machine {
    Launch launch;
    void (*body)();
    Context home;
    Warp warps[MAX_WARPS];
    int warp_count, warp, block, waiting, barrier_line, ended, phase, step;
    char *stacks, *shared;
    Access* accesses;
    Copy* copies[MAX_WARPS * LANES];
    int pending[MAX_WARPS * LANES], room[MAX_WARPS * LANES];
    Buffer last;
    char error[512];
};
static Machine machine;

inline int thread() { return machine.warp * LANES + machine.warps[machine.warp].lane; }

[[noreturn]] __attribute__((noinline, cold, format(printf, 1, 2))) inline void fail(const char* format, ...) {
    const int used = snprintf(machine.error, sizeof machine.error, "block %d, thread %d: ", machine.block, thread());
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(machine.error + used, sizeof machine.error - used, format, arguments);
    va_end(arguments);
    Context nowhere;
    switch_context(nowhere, machine.home);
    __builtin_unreachable();
}

inline Context& current() { return machine.warps[machine.warp].lanes[machine.warps[machine.warp].lane]; }

// Switches to the next warp that can run. If all warps have ended, it switches to `home`.
inline void next_warp(Context& from) {
    for (int i = 0; i < machine.warp_count; ++i) {
        machine.warp = (machine.warp + machine.step + machine.warp_count) % machine.warp_count;
        const Warp& warp = machine.warps[machine.warp];
        if (!warp.waiting && !warp.ended) {
            if (&from != &current()) switch_context(from, current());
            return;
        }
    }
    if (machine.waiting)
        fail("%d of %d warps wait at a barrier that the others never reach", machine.waiting, machine.warp_count);
    switch_context(from, machine.home);
}

// A meeting of the lanes of a warp. Each lane brings an argument. The last lane to arrive calls `complete` for all
// lanes. Each other lane switches to the next lane. `line` is the source line of the call. If the compiler duplicates
// the call, the copies are still one meeting.
template <class Complete>
inline void meet(const char* meeting, int line, const void* brought, Complete complete) {
    Warp& warp = machine.warps[machine.warp];
    const int lane = warp.lane;
    if (warp.arrived == 0) {
        warp.meeting = meeting;
        warp.line = line;
    } else if (warp.meeting != meeting) {
        fail("at '%s', where other lanes of its warp are at '%s'", meeting, warp.meeting);
    } else if (warp.line != line) {
        fail("at '%s' of line %d, where other lanes of its warp are at that of line %d", meeting, line, warp.line);
    }
    warp.slots[lane] = brought;
    if (++warp.arrived == LANES) {
        warp.arrived = 0;
        return complete(warp);
    }
    warp.lane = (lane + 1) % LANES;
    switch_context(warp.lanes[lane], warp.lanes[warp.lane]);
}

// The kinds of meetings. Each is one string object, and comparisons are by address.
inline constexpr char BARRIER[] = "barrier", END[] = "the kernel's end", SHUFFLE[] = "shuffle", LDMATRIX[] = "ldmatrix",
                      MMA[] = "mma";

inline void barrier(int line) {
    meet(BARRIER, line, nullptr, [](Warp& warp) {
        if (machine.ended)
            fail("a barrier that %d of %d warps have not reached: they have ended", machine.ended, machine.warp_count);
        if (machine.waiting == 0)
            machine.barrier_line = warp.line;
        else if (machine.barrier_line != warp.line)
            fail("at the barrier of line %d, where other warps wait at that of line %d", warp.line,
                 machine.barrier_line);
        warp.waiting = true;
        if (++machine.waiting == machine.warp_count) {
            for (int i = 0; i < machine.warp_count; ++i) machine.warps[i].waiting = false;
            machine.waiting = 0;
            machine.phase++;
            machine.step = -machine.step;
        }
        next_warp(current());
    });
}

inline void thread_main() {
    machine.body();
    meet(END, 0, nullptr, [](Warp& warp) {
        warp.ended = true;
        machine.ended++;
        next_warp(current());
    });
    __builtin_unreachable();
}

// -------------------------------------------------------------------------------------------------------------- memory

inline void check_global(const void* pointer, int bytes) {
    const char *first = static_cast<const char*>(pointer), *last = first + bytes;
    if (reinterpret_cast<uintptr_t>(pointer) % bytes)
        fail("%d bytes of device memory at %p: not aligned", bytes, pointer);
    if (first >= machine.last.start && last <= machine.last.end) return;
    for (int i = 0; i < machine.launch.buffer_count; ++i) {
        const Buffer& buffer = machine.launch.buffers[i];
        if (first >= buffer.start && last <= buffer.end) {
            machine.last = buffer;
            return;
        }
    }
    fail("%d bytes of device memory at %p are in no tensor of the launch", bytes, pointer);
}

inline long offset_of(const void* pointer) { return static_cast<const char*>(pointer) - machine.shared; }
inline Access& check_shared(const void* pointer, int bytes) {
    const long offset = offset_of(pointer);
    if (offset < 0 || offset + bytes > machine.launch.shared_bytes)
        fail("%d bytes at offset %ld of shared memory, which has %d", bytes, offset, machine.launch.shared_bytes);
    if (offset % bytes) fail("%d bytes at offset %ld of shared memory: not aligned", bytes, offset);
    return machine.accesses[offset / 16];
}
// The bits of `settled` for the `bytes` bytes at `pointer`.
inline int words_of(const void* pointer, int bytes) {
    return ((1 << (bytes + 3) / 4) - 1) << offset_of(pointer) % 16 / 4;
}
inline void check_settled(const Access& access, const void* pointer, int bytes) {
    if (access.settled != 0xff && ~access.settled & words_of(pointer, bytes))
        fail("offset %ld of shared memory, to which a copy is on its way that nobody has waited for",
             offset_of(pointer));
}
inline void reading(const void* pointer, int bytes, int warp) {
    Access& access = check_shared(pointer, bytes);
    if (access.written == machine.phase && access.writer != warp)
        fail("reads offset %ld of shared memory, which warp %d wrote since the last barrier", offset_of(pointer),
             access.writer);
    check_settled(access, pointer, bytes);
    access.reader = access.read == machine.phase && access.reader != warp ? -1 : warp;
    access.read = machine.phase;
}
inline Access& writing(const void* pointer, int bytes, int warp) {
    Access& access = check_shared(pointer, bytes);
    if ((access.written == machine.phase && access.writer != warp) ||
        (access.read == machine.phase && access.reader != warp))
        fail("writes offset %ld of shared memory, where another warp wrote or read since the last barrier",
             offset_of(pointer));
    check_settled(access, pointer, bytes);
    access.writer = warp;
    access.written = machine.phase;
    return access;
}

// -------------------------------------------------------------------------------------------------------------- launch

template <class... Parameters>
struct Body {
    static void (*kernel)(Parameters...);
    static void** parameters;
    template <size_t... I>
    static void call(std::index_sequence<I...>) { kernel(*static_cast<Parameters*>(parameters[I])...); }
    static void run() { call(std::index_sequence_for<Parameters...>{}); }
};
template <class... Parameters>
void (*Body<Parameters...>::kernel)(Parameters...);
template <class... Parameters>
void** Body<Parameters...>::parameters;

// Writes the size of each of a kernel's parameters in bytes, and returns their number.
template <class... Parameters>
int sizes_of(void (*)(Parameters...), int* sizes) {
    const int all[] = {static_cast<int>(sizeof(Parameters))...};
    memcpy(sizes, all, sizeof all);
    return sizeof...(Parameters);
}

// Runs the blocks one after another. Returns an error message, or null.
template <class... Parameters>
const char* run(void (*kernel)(Parameters...), void** parameters, const Launch& launch) {
    Body<Parameters...>::kernel = kernel;
    Body<Parameters...>::parameters = parameters;
    machine.launch = launch;
    machine.body = Body<Parameters...>::run;
    machine.warp_count = launch.threads / LANES;
    machine.last = {};
    machine.error[0] = 0;
    if (!machine.stacks) machine.stacks = static_cast<char*>(aligned_alloc(64, size_t(STACK) * MAX_WARPS * LANES));
    const int units = launch.shared_bytes / 16 + 1;
    machine.shared = static_cast<char*>(aligned_alloc(1024, (launch.shared_bytes + 2047) / 1024 * 1024));
    machine.accesses = static_cast<Access*>(malloc(units * sizeof(Access)));
    for (machine.block = 0; machine.block < launch.blocks && !machine.error[0]; ++machine.block) {
        memset(machine.shared, 0xff, launch.shared_bytes);
        memset(machine.accesses, 0xff, units * sizeof(Access));
        machine.waiting = machine.ended = machine.phase = 0;
        machine.step = 1;
        machine.warp = 0;
        for (int i = 0; i < machine.warp_count; ++i) {
            Warp& warp = machine.warps[i];
            warp.arrived = warp.lane = 0;
            warp.waiting = warp.ended = false;
            for (int lane = 0; lane < LANES; ++lane) {
                prepare(warp.lanes[lane], machine.stacks + size_t(STACK) * (i * LANES + lane), thread_main);
                machine.pending[i * LANES + lane] = 0;
            }
        }
        switch_context(machine.home, current());
    }
    free(machine.shared);
    free(machine.accesses);
    return machine.error[0] ? machine.error : nullptr;
}

template <class T>
inline T from_bits(unsigned bits) {
    T result;
    memcpy(&result, &bits, sizeof result);
    return result;
}
inline unsigned bits_of(float x) {
    unsigned bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

}  // namespace twin

// ------------------------------------------------------------------------------------------------ as in primitives.cuh

// A pointer to device memory. It checks that each access is inside a tensor of the launch.
template <class T>
struct Global {
    T* pointer;
    T& operator[](long long i) const {
        twin::check_global(pointer + i, sizeof(T));
        return pointer[i];
    }
    Global operator+(long long i) const { return {pointer + i}; }
    operator Global<const T>() const { return {pointer}; }
};

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
inline int thread_index_again() { return twin::thread(); }
inline void barrier(int line = __builtin_LINE()) { twin::barrier(line); }
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

inline float to_float(float x) { return x; }
inline float to_float(bfloat16 x) { return twin::from_bits<float>(unsigned(x.bits) << 16); }
inline float to_float(half x) {
    const unsigned magnitude = (x.bits & 0x7fffu) << 13, sign = (x.bits & 0x8000u) << 16;
    // The product is exact, also for subnormal numbers.
    const unsigned scaled = twin::bits_of(twin::from_bits<float>(magnitude) * 0x1p112f);
    return twin::from_bits<float>(sign | (magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : scaled));
}

template <class T>
T rounded(float x);
template <>
inline float rounded<float>(float x) { return x; }
template <>
inline bfloat16 rounded<bfloat16>(float x) {
    const unsigned bits = twin::bits_of(x);
    if (x != x) return {0x7fff};
    return {static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};
}
template <>
inline half rounded<half>(float x) {
    const unsigned bits = twin::bits_of(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    unsigned result;
    if (magnitude > 0x7f800000u)
        result = 0x7fffu;
    else if (magnitude >= 0x47800000u)  // 2^16
        result = 0x7c00u;
    else if (magnitude < 0x38800000u)  // 2^-14: the last place of the sum with 1/2 is float16's smallest number
        result = twin::bits_of(twin::from_bits<float>(magnitude) + 0.5f) - 0x3f000000u;
    else
        result = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1)) >> 13;
    return {static_cast<unsigned short>(sign | result)};
}
template <class T>
inline unsigned pack(float low, float high) { return rounded<T>(low).bits | unsigned(rounded<T>(high).bits) << 16; }

template <class T>
inline void write_two(Global<T> to, float low, float high) {
    twin::check_global(to.pointer, 2 * sizeof(T));
    to[0] = rounded<T>(low);
    to[1] = rounded<T>(high);
}

inline float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// As fmaxf: if one of the two numbers is NaN, the result is the other one.
inline float maximum_of(float a, float b) { return a > b || b != b ? a : b; }
inline float magnitude_of(float x) { return fabsf(x); }
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
inline float from_lane_xor(float value, int mask, int line = __builtin_LINE()) {
    return from_lane(value, (thread_index() % 32) ^ mask, line);
}

namespace twin {
struct Ldmatrix {
    unsigned* to;
    const unsigned short* row;
};
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

// The machine of the CPU twin: one core of a CPU runs all threads of a block. twin.h and twin_hopper.h define the
// primitives of primitives.cuh and of hopper.cuh on it. A file that includes this one first defines the types half and
// bfloat16.
//
// Each thread of a block is a fiber. A fiber has a stack of its own. A switch to another fiber saves the registers that
// a function call preserves. A fiber runs until it reaches a meeting of its warp's lanes (a shuffle, ldmatrix or mma),
// a barrier, or another reason to wait. At a meeting, the last lane to arrive computes for all lanes. The lanes of a
// warp run in order, so a meeting costs 32 switches of a few nanoseconds each. Between barriers the warps run one after
// another. Their order reverses at each barrier of the block.
//
// Races are found by what a warp knows (Knowledge), whatever that order is. Each access to shared memory has a number.
// A barrier gives each of its warps what all of them know.
//
// CAUSAL, DROPOUT, VECTOR and SIGN are constants of the compilation on a GPU. Here they are variables, because as
// constants they would only multiply the number of compilations.
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
int CAUSAL, DROPOUT, VECTOR, SIGN;
}

struct __attribute__((may_alias, aligned(16))) float4 {
    float x, y, z, w;
};

namespace twin {

constexpr int LANES = 32, MAX_WARPS = 32, STACK = 128 * 1024;
constexpr int NUMBERED = 16;  // the barriers of a block; number 0 is that of all its warps

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

// The last event of each kind that a warp knows of. The events of a kind have the numbers 1, 2 ...
template <int KINDS>
struct Knowledge {
    int of[KINDS];
    void join(const Knowledge& other) {
        for (int i = 0; i < KINDS; ++i) of[i] = of[i] > other.of[i] ? of[i] : other.of[i];
    }
};
// of[w]: the accesses of warp w to shared memory, and the barriers that it has passed.
using Known = Knowledge<MAX_WARPS>;

struct Warp {
    Context lanes[LANES];
    const void* slots[LANES];  // what each lane brings to a meeting
    const char* meeting;
    int line, lane;          // source line of the meeting; the lane that runs
    unsigned arrived, idle;  // one bit for each lane that is at the meeting, or that waits for something else
    int idle_for[LANES];     // what it waits for
    bool waiting, ended;     // at a barrier; at the kernel's end
    Known knows;
};

struct Access {             // the last write to 16 bytes of shared memory; `reads` of the machine has the last reads
    int written;            // its number
    short writer;           // its warp, or -1
    unsigned char settled;  // one bit for each 4 bytes, set if no copy to them is on its way
};

struct NumberedBarrier {
    int size, waiting, line;  // the number of warps that it takes and that wait; the source line at which they wait
    unsigned members;         // one bit for each warp that waits
    Known passed;             // the last time that each warp has passed it
};

struct Machine {
    Launch launch;
    void (*body)();
    Context home;
    Warp warps[MAX_WARPS];
    int warp_count, warp, block, ended, step;
    NumberedBarrier barriers[NUMBERED];
    char *stacks, *shared;
    Access* accesses;
    int* reads;  // [16 bytes of shared memory, warp]: the number of the warp's last read
    Copy* copies[MAX_WARPS * LANES];
    int pending[MAX_WARPS * LANES], room[MAX_WARPS * LANES];
    Buffer last;
    char error[640];
};
static Machine machine;

// What a set of primitives adds to the machine.
struct Extension {
    void (*begins)() = [] {};        // a block begins
    void (*ends)() = [] {};          // the last thread of a block ends
    void (*synchronises)() = [] {};  // all threads of the block are at a barrier
    void (*deadlocks)() = [] {};     // some lanes are idle and no warp can run
};
static Extension extension;

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

// Chooses the next lane of a warp that can run. Returns whether there is one.
inline bool choose_lane(Warp& warp) {
    const unsigned able = ~(warp.arrived | warp.idle);
    if (!able) return false;
    const unsigned later = able >> warp.lane << warp.lane;
    warp.lane = __builtin_ctz(later ? later : able);
    return true;
}

// Switches to the next warp that can run. If all warps have ended, it switches to `home`.
inline void next_warp(Context& from) {
    for (int i = 0; i < machine.warp_count; ++i) {
        machine.warp = (machine.warp + machine.step + machine.warp_count) % machine.warp_count;
        Warp& warp = machine.warps[machine.warp];
        if (!warp.waiting && !warp.ended && choose_lane(warp)) {
            if (&from != &current()) switch_context(from, current());
            return;
        }
    }
    for (int i = 0; i < machine.warp_count; ++i)
        if (machine.warps[i].idle) extension.deadlocks();
    for (int i = NUMBERED - 1; i >= 0; --i) {
        const NumberedBarrier& barrier = machine.barriers[i];
        if (barrier.waiting && i)
            fail("%d of %d warps wait at barrier %d of line %d, which the others never reach", barrier.waiting,
                 barrier.size, i, barrier.line);
        if (barrier.waiting)
            fail("%d of %d warps wait at a barrier that the others never reach", barrier.waiting, barrier.size);
    }
    switch_context(from, machine.home);
}

// Switches to another lane of the warp, or to another warp if none of the lanes can run.
inline void next_lane(Warp& warp) {
    Context& from = warp.lanes[warp.lane];
    if (choose_lane(warp))
        switch_context(from, warp.lanes[warp.lane]);
    else
        next_warp(from);
}

// A thread waits until another thread calls `wake` for the same thing.
inline void idle(int for_what) {
    Warp& warp = machine.warps[machine.warp];
    warp.idle |= 1u << warp.lane;
    warp.idle_for[warp.lane] = for_what;
    next_lane(warp);
}
inline void wake(int for_what) {
    for (int i = 0; i < machine.warp_count; ++i) {
        Warp& warp = machine.warps[i];
        for (unsigned left = warp.idle; left; left &= left - 1) {
            const int lane = __builtin_ctz(left);
            if (warp.idle_for[lane] == for_what) warp.idle &= ~(1u << lane);
        }
    }
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
    warp.arrived |= 1u << lane;
    if (warp.arrived == ~0u) {
        warp.arrived = 0;
        return complete(warp);
    }
    next_lane(warp);
}

// The kinds of meetings. Each is one string object, and comparisons are by address.
inline constexpr char BARRIER[] = "barrier", BARRIER_OF[] = "barrier_of", END[] = "the kernel's end",
                      SHUFFLE[] = "shuffle";

// A warp arrives at a barrier. With a number above 0, the barrier takes any `size` warps. So a warp must know that
// those that have passed it before have left it: otherwise it could take the place of one of them.
inline void arrive(Warp& warp, int number, int size) {
    if (number < 0 || number >= NUMBERED) fail("at barrier %d, where a block has %d", number, NUMBERED);
    NumberedBarrier& barrier = machine.barriers[number];
    if (!number && machine.ended)
        fail("a barrier that %d of %d warps have not reached: they have ended", machine.ended, machine.warp_count);
    if (barrier.waiting == 0) {
        barrier.line = warp.line;
        barrier.size = size;
    } else if (barrier.line != warp.line) {
        fail("at the barrier of line %d, where other warps wait at that of line %d", warp.line, barrier.line);
    } else if (barrier.size != size) {
        fail("at barrier %d of %d warps, where other warps wait at it as one of %d", number, size, barrier.size);
    }
    for (int i = 0; i < machine.warp_count; ++i)
        if (warp.knows.of[i] < barrier.passed.of[i])
            fail("at barrier %d, which warp %d has passed without this warp: in another order it would be this warp",
                 number, i);
    warp.waiting = true;
    barrier.members |= 1u << machine.warp;
    if (++barrier.waiting == size) {
        Known all = {};
        for (int i = 0; i < machine.warp_count; ++i) {
            if (~barrier.members >> i & 1) continue;
            Known& knows = machine.warps[i].knows;
            barrier.passed.of[i] = ++knows.of[i];
            all.join(knows);
        }
        for (int i = 0; i < machine.warp_count; ++i) {
            if (~barrier.members >> i & 1) continue;
            machine.warps[i].knows = all;
            machine.warps[i].waiting = false;
        }
        barrier.waiting = 0;
        barrier.members = 0;
        if (!number) {
            const int last = machine.warp;
            extension.synchronises();  // it visits all warps
            machine.warp = last;
            machine.step = -machine.step;
        }
    }
    next_warp(current());
}
inline void barrier(int line) {
    meet(BARRIER, line, nullptr, [](Warp& warp) { arrive(warp, 0, machine.warp_count); });
}
struct Arrival {
    int number, size;
};
inline void barrier_of(int number, int size, int line) {
    const Arrival mine{number, size};
    meet(BARRIER_OF, line, &mine, [](Warp& warp) {
        const Arrival& first = *static_cast<const Arrival*>(warp.slots[0]);
        for (const void* slot : warp.slots) {
            const Arrival& one = *static_cast<const Arrival*>(slot);
            if (one.number != first.number || one.size != first.size)
                fail("at barrier %d of %d warps, where lane 0 of its warp is at barrier %d of %d", one.number, one.size,
                     first.number, first.size);
        }
        if (!first.number) fail("at barrier 0, which is that of all warps");
        arrive(warp, first.number, first.size);
    });
}

inline void thread_main() {
    machine.body();
    meet(END, 0, nullptr, [](Warp& warp) {
        warp.ended = true;
        if (++machine.ended == machine.warp_count) extension.ends();
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
inline int* reads_of(const Access& access) { return machine.reads + (&access - machine.accesses) * machine.warp_count; }
inline void check_written(const Access& access, const void* pointer, const Known& knows, const char* does) {
    if (access.writer >= 0 && access.written > knows.of[access.writer])
        fail("%s offset %ld of shared memory, which warp %d wrote since the last barrier of both", does,
             offset_of(pointer), access.writer);
}
inline void reading(const void* pointer, int bytes, int warp) {
    const Access& access = check_shared(pointer, bytes);
    Known& knows = machine.warps[warp].knows;
    check_written(access, pointer, knows, "reads");
    check_settled(access, pointer, bytes);
    reads_of(access)[warp] = ++knows.of[warp];
}
inline Access& writing(const void* pointer, int bytes, int warp) {
    Access& access = check_shared(pointer, bytes);
    Known& knows = machine.warps[warp].knows;
    check_written(access, pointer, knows, "writes");
    const int* reads = reads_of(access);
    for (int i = 0; i < machine.warp_count; ++i)
        if (reads[i] > knows.of[i])
            fail("writes offset %ld of shared memory, which warp %d read since the last barrier of both",
                 offset_of(pointer), i);
    check_settled(access, pointer, bytes);
    access.writer = static_cast<short>(warp);
    access.written = ++knows.of[warp];
    return access;
}

// -------------------------------------------------------------------------------------------------------------- launch

// A parameter, whose address may be less aligned than its type.
template <class T>
inline T loaded(const void* from) {
    T result;
    memcpy(static_cast<void*>(&result), from, sizeof result);
    return result;
}

template <class... Parameters>
struct Body {
    static void (*kernel)(Parameters...);
    static void** parameters;
    template <size_t... I>
    static void call(std::index_sequence<I...>) {
        kernel(loaded<Parameters>(parameters[I])...);
    }
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
    const size_t read_bytes = size_t(units) * machine.warp_count * sizeof(int);
    machine.reads = static_cast<int*>(malloc(read_bytes));
    for (machine.block = 0; machine.block < launch.blocks && !machine.error[0]; ++machine.block) {
        memset(machine.shared, 0xff, launch.shared_bytes);
        memset(machine.accesses, 0xff, units * sizeof(Access));
        memset(machine.reads, 0, read_bytes);
        memset(machine.barriers, 0, sizeof machine.barriers);
        machine.ended = 0;
        machine.step = 1;
        machine.warp = 0;
        extension.begins();
        for (int i = 0; i < machine.warp_count; ++i) {
            Warp& warp = machine.warps[i];
            warp.arrived = warp.idle = 0;
            warp.lane = 0;
            warp.waiting = warp.ended = false;
            warp.knows = {};
            for (int lane = 0; lane < LANES; ++lane) {
                prepare(warp.lanes[lane], machine.stacks + size_t(STACK) * (i * LANES + lane), thread_main);
                machine.pending[i * LANES + lane] = 0;
            }
        }
        switch_context(machine.home, current());
    }
    free(machine.shared);
    free(machine.accesses);
    free(machine.reads);
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

// ------------------------------------------------------------------------------------------------------------- numbers

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
inline float rounded<float>(float x) {
    return x;
}
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
inline unsigned pack(float low, float high) {
    return rounded<T>(low).bits | unsigned(rounded<T>(high).bits) << 16;
}

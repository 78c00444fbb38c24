// The CPU twin of hopper.cuh, parts.cuh and e4m3.cuh: mbarriers, the copy engine and warpgroup products on one core.
// twin_machine.h runs the threads, one after another.
//
// What is asynchronous on a GPU happens as late as the kernel allows:
//   - A bulk copy delivers its bytes when a thread waits for its mbarrier and all bytes of the phase have been copied.
//     Until then the place in shared memory holds NaN and belongs to the copy engine.
//   - A product reads its factors and writes its sums when its warp waits for its group. Until then the sums hold a NaN
//     of their own (POISON), and the units of shared memory that it reads are busy.
//
// What a thread may touch follows from what its warp knows (Clock). Each access to shared memory has a number, and so
// has each phase of an mbarrier. An arrival gives the mbarrier what the warp knows. A wait gives it to the warp that
// waits.
// So a fault is found whatever the order is in which the twin runs the warps. Shared memory is divided into units of 16
// bytes. Each knows its last writer and its readers. So does each of the numbers that store_float writes.
//
// The following faults end a kernel with an error that names block and thread, in addition to those of twin_machine.h:
//   - a wait that never returns, with the arrivals and bytes that are missing; a wait for a phase that the thread has
//     waited for before, because it returns a phase early, or for one of several that have ended since it last waited;
//     more arrivals than the barrier counts; a barrier that is used by a warp that cannot know of its creation, or by
//     the copy engine without barriers_created;
//   - copies whose bytes differ from the expected ones, and copies that are on their way when the block ends;
//   - a read, write, product or copy at a place to which a copy is on its way;
//   - a read or a product of what another warp or a copy wrote, without a wait that makes it known;
//   - a write or a copy to what another warp or a product still reads, or may still read;
//   - a product or a copy of what threads wrote, without shared_written between the write and the arrival;
//   - a descriptor that reads other rows or columns of a copied tile than those of a matrix;
//   - sums or a left operand in registers that are read, written or given to another product before the wait; sums that
//     were touched without a later products_begin; products that differ between the warps of a warpgroup, and products
//     that nobody waits for;
//   - registers that a warpgroup increases to more than the others have returned;
//   - an access to device memory outside the tensors, by copies, atomic additions, Global, load_eight and store_eight.
//
// The twin does not detect the following faults:
//   - accesses to memory through a plain pointer or array (the mail of fa3.cu, the static array of `finish`), except by
//     their results;
//   - a missing wait of one lane if another lane of its warp has waited;
//   - a descriptor that does not match what threads have written, except by its results;
//   - left operands in registers that change between products_begin and the product;
//   - that the compiler serialises products (fa3.py looks for its warning), and everything about time;
//   - races on device memory, between blocks or between kernels.
// Products of e4m3 numbers are summed as the tensor cores of Hopper do it, with 14 bits: see `multiply_e4m3`. If
// TRUNCATES is defined, so are products of 16-bit numbers: see `multiply`. Otherwise these are summed in float32, in
// order.
// Clusters and barrier_of of primitives.cuh are missing, because the kernels do not use them.
#pragma once

struct half {
    unsigned short bits;
};
struct bfloat16 {
    unsigned short bits;
};

#include <vector>

#include "twin_machine.h"

#define __global__ __attribute__((visibility("hidden")))
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))

struct float2 {
    float x, y;
};
struct __attribute__((may_alias, aligned(8))) uint2 {
    unsigned x, y;
};
struct __attribute__((may_alias, aligned(16))) uint4 {
    unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct TensorMap;
struct Element;

namespace twin {

#if BF16
using Type = bfloat16;
#else
using Type = half;
#endif

constexpr int WARPS = 16, BARRIERS = 64, UNIT = 16, GROUP = 128;
constexpr unsigned BASE = 1024;           // the address of the first byte of a block's shared memory
constexpr unsigned POISON = 0x7fcab1e5u;  // what sums hold while a product runs: a NaN that arithmetic passes on
constexpr int SWIZZLED = 1;               // the swizzle of 128 bytes, in a descriptor

// What a warp knows: [w] the last access of warp w to shared memory; [WARPS + w] the last one whose writes are fenced
// for products and copies; [2 WARPS + b] the phases of barrier b that have ended.
using Clock = Knowledge<2 * WARPS + BARRIERS>;

// A tensor, as fa3.py describes it to the twin in the bytes of a TensorMap. Sizes and strides are those of columns,
// rows, heads and batches. The strides are in bytes.
struct Description {
    const char* data;
    long long strides[3];
    int sizes[4], rows;  // rows of a box, whose columns are those of a panel
    int element;         // bytes of an element
};

struct BulkCopy {
    unsigned to;
    int bytes;
    const char* from;  // contiguous bytes; or null for a box
    Description tensor;
    int column, row, head, batch;
};

struct Barrier {
    unsigned place;
    int count, pending, phase;  // arrivals that end a phase; those that are missing; phases that have ended
    int expected, coming;       // bytes of this phase: announced, and of copies that have started
    int creator, created;       // the warp that created it, and the number of that access
    bool visible;               // to the copy engine
    Clock gathered, passed;     // what the arrivals know, of this phase and of all that have ended
    std::vector<BulkCopy> copies;
};

constexpr int NEVER = -1, HOLDS_BARRIER = -2, HOLDS_NUMBERS = -3;
struct Unit {
    int writer, written;   // a warp, or 2 WARPS + a barrier; the number of the access, or the phase that makes it known
    const char* origin;    // for a copied box: the first element of its matrix, and the place of the unit in the matrix
    int row, column;       // the column in units
    short busy, busy_for;  // products that will read it, and a warp of one of them
    bool arriving;
    int reads[WARPS];  // the last read of each warp
};

struct Factor {
    unsigned long long descriptor;
    int count, first;  // rows of the left factor or columns of the right one; the first of them
    bool along_rows;   // whether the sum runs along the rows of the panels
    int terms;         // that a product adds to each sum: 16, or 32 of e4m3 numbers
};
struct Product {
    Factor a, b;
    bool in_registers, add;
    unsigned left[LANES][4];
    const unsigned* left_at[LANES];
    int group, sums;
};
struct Sums {
    float* at[LANES];
    int count;                 // columns
    int products;              // that have not run
    std::vector<float> value;  // [16, count]
};
struct Issued {  // what the warps of a warpgroup have to agree on
    unsigned long long a, b;
    int count;
    bool add;
};

struct WarpState {
    Clock knows;
    bool begun;     // products_begin came after the last wait
    int committed;  // groups
    long issued;
    std::vector<Product> products;
    std::vector<Sums> sums;
    int registers, wanted;
    struct {
        unsigned parity;
        int line;
    } waits[LANES];
};

struct Wide {  // a right factor in float32
    unsigned long long descriptor;
    int count, along_rows, terms;
    long time;
    std::vector<float> value;  // [terms, count]
};

struct Number {  // a float32 number that threads store and load by itself
    unsigned address;
    Unit as_unit;  // several warps may use the numbers of one unit
};

static struct {
    std::vector<Unit> units;
    std::vector<Number> numbers;
    std::vector<unsigned char> barrier_of;  // by offset / 8: the number of a barrier + 1
    std::vector<long> changed;              // by offset / 1024: the time of the last change
    Barrier barriers[BARRIERS];
    int barrier_count, spare_registers;
    WarpState warps[WARPS];
    std::vector<Issued> issued[WARPS / 4];
    long forgotten[WARPS / 4];  // products at the beginning of `issued` that were dropped
    int fenced[WARPS * LANES];
    int seen[WARPS * LANES][BARRIERS];
    Wide wide[64];
    long time;
} hopper;

inline WarpState& me() { return hopper.warps[machine.warp]; }
inline int place_of(unsigned address) { return static_cast<int>(address - BASE); }
inline char* memory_at(unsigned address) { return machine.shared + place_of(address); }
inline int next_access() { return ++me().knows.of[machine.warp]; }

inline const char* name_of(int writer, char (&text)[64]) {
    if (writer < 2 * WARPS)
        snprintf(text, sizeof text, "warp %d", writer);
    else
        snprintf(text, sizeof text, "a copy of the mbarrier at offset %d",
                 place_of(hopper.barriers[writer - 2 * WARPS].place));
    return text;
}

// The accesses of this warp that its fences cover: those before the last fence of each lane.
inline int fenced_here() {
    const int* fences = hopper.fenced + machine.warp * LANES;
    int least = fences[0];
    for (int i = 1; i < LANES; ++i) least = fences[i] < least ? fences[i] : least;
    return least;
}

// ------------------------------------------------------------------------------------------------------- shared memory

inline Unit& unit_at(unsigned address, int bytes, const char* does, bool of_numbers = false) {
    const int place = place_of(address);
    if (place < 0 || place + bytes > machine.launch.shared_bytes)
        fail("%s %d bytes at offset %d of shared memory, which has %d", does, bytes, place,
             machine.launch.shared_bytes);
    if (place % bytes) fail("%s %d bytes at offset %d of shared memory: not aligned", does, bytes, place);
    Unit& unit = hopper.units[place / UNIT];
    if (unit.writer == HOLDS_BARRIER) fail("%s offset %d of shared memory, where an mbarrier is", does, place);
    if (unit.writer == HOLDS_NUMBERS && !of_numbers)
        fail("%s offset %d of shared memory, where single numbers are", does, place);
    if (unit.arriving)
        fail("%s offset %d of shared memory, to which a copy is on its way that nobody has waited for", does, place);
    return unit;
}
// What is known about a single number. Only load_float and store_float access it.
inline Unit& number_at(unsigned address, const char* does) {
    unit_at(address, 4, does, true).writer = HOLDS_NUMBERS;
    for (Number& number : hopper.numbers)
        if (number.address == address) return number.as_unit;
    hopper.numbers.push_back({address, {NEVER, 0, nullptr, 0, 0, 0, 0, false, {}}});
    return hopper.numbers.back().as_unit;
}
inline void check_read(const Unit& unit, unsigned address, bool asynchronous, const char* does) {
    const Clock& knows = me().knows;
    char text[64];
    if (unit.writer == NEVER)
        fail("%s offset %d of shared memory, where nothing has been written", does, place_of(address));
    if (knows.of[unit.writer] < unit.written)
        fail("%s offset %d of shared memory, which %s wrote, before it has waited for that", does, place_of(address),
             name_of(unit.writer, text));
    if (asynchronous && unit.writer < WARPS &&
        (unit.writer == machine.warp ? fenced_here() : knows.of[WARPS + unit.writer]) < unit.written)
        fail("%s offset %d of shared memory, which warp %d wrote without shared_written after it", does,
             place_of(address), unit.writer);
}
inline void check_write(const Unit& unit, unsigned address, const char* does) {
    const Clock& knows = me().knows;
    char text[64];
    if (unit.busy)
        fail("%s offset %d of shared memory, which a product of warp %d is still reading", does, place_of(address),
             unit.busy_for);
    bool known = true;
    for (int i = 0; i < WARPS; ++i) known &= unit.reads[i] <= knows.of[i];
    for (int i = 0; i < WARPS && !known; ++i)
        if (unit.reads[i] > knows.of[i])
            fail("%s offset %d of shared memory, which warp %d has read, before it has waited for that", does,
                 place_of(address), i);
    if (unit.writer >= 0 && knows.of[unit.writer] < unit.written)
        fail("%s offset %d of shared memory, which %s wrote, before it has waited for that", does, place_of(address),
             name_of(unit.writer, text));
}
inline void read_here(unsigned address, int bytes) {
    Unit& unit = unit_at(address, bytes, "reads");
    check_read(unit, address, false, "reads");
    unit.reads[machine.warp] = next_access();
}
inline void write_here(unsigned address, int bytes, int access) {
    Unit& unit = unit_at(address, bytes, "writes");
    check_write(unit, address, "writes");
    unit.writer = machine.warp;
    unit.written = access;
    unit.origin = nullptr;
    hopper.changed[place_of(address) / 1024] = ++hopper.time;
}
// The copy engine and products exchange the 16-byte pieces of a row of 128 bytes by the row's number mod 8.
inline unsigned swizzled(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

// ----------------------------------------------------------------------------------------------------------- mbarriers

inline Barrier& barrier_at(unsigned address) {
    const int place = place_of(address);
    if (place < 0 || place + 8 > machine.launch.shared_bytes || place % 8 || !hopper.barrier_of[place / 8])
        fail("no mbarrier is at offset %d of shared memory", place);
    Barrier& barrier = hopper.barriers[hopper.barrier_of[place / 8] - 1];
    if (me().knows.of[barrier.creator] < barrier.created)
        fail("uses the mbarrier at offset %d, which warp %d created, without a barrier of the block in between", place,
             barrier.creator);
    return barrier;
}
inline int number_of(const Barrier& barrier) { return static_cast<int>(&barrier - hopper.barriers); }

// The first element of a copy's matrix, for boxes.
inline const char* origin_of(const BulkCopy& copy) {
    return copy.from ? nullptr
                     : copy.tensor.data + copy.head * copy.tensor.strides[1] + copy.batch * copy.tensor.strides[2];
}
// Calls visit(address, row, piece) for each unit to which a copy writes.
template <class Visit>
inline void each_unit(const BulkCopy& copy, Visit visit) {
    for (int i = 0; i < copy.bytes / UNIT; ++i) {
        const unsigned address = copy.to + i * UNIT;
        visit(copy.from ? address : swizzled(address), i / 8, i % 8);
    }
}
inline void deliver(const BulkCopy& copy) {
    const Description& tensor = copy.tensor;
    const bool inside =
        !copy.from && copy.head >= 0 && copy.head < tensor.sizes[2] && copy.batch >= 0 && copy.batch < tensor.sizes[3];
    const char* origin = origin_of(copy);
    each_unit(copy, [&](unsigned address, int row, int piece) {
        char* to = memory_at(address);
        hopper.units[place_of(address) / UNIT].arriving = false;
        if (copy.from) {
            memcpy(to, copy.from + (row * 8 + piece) * UNIT, UNIT);
            return;
        }
        memset(to, 0, UNIT);
        const int r = copy.row + row, columns = UNIT / tensor.element, first = copy.column + columns * piece;
        if (!inside || r < 0 || r >= tensor.sizes[1]) return;
        for (int c = first < 0 ? -first : 0; c < columns && first + c < tensor.sizes[0]; ++c) {
            const char* from = origin + r * tensor.strides[0] + tensor.element * (first + c);
            check_global(from, tensor.element);
            memcpy(to + tensor.element * c, from, tensor.element);
        }
    });
    for (int place = place_of(copy.to) / 1024; place <= (place_of(copy.to) + copy.bytes - 1) / 1024; ++place)
        hopper.changed[place] = ++hopper.time;
}

inline bool can_end(const Barrier& barrier) { return barrier.pending == 0 && barrier.coming == barrier.expected; }
// Ends the phase if everything is there. Its copies deliver.
inline void settle(Barrier& barrier) {
    if (!can_end(barrier)) return;
    for (const BulkCopy& copy : barrier.copies) deliver(copy);
    barrier.copies.clear();
    barrier.phase++;
    barrier.pending = barrier.count;
    barrier.expected = barrier.coming = 0;
    barrier.gathered.of[2 * WARPS + number_of(barrier)] = barrier.phase;
    barrier.passed.join(barrier.gathered);
}
inline void check_bytes(const Barrier& barrier) {
    if (barrier.pending == 0 && barrier.coming > barrier.expected)
        fail("copies bring %d bytes to the mbarrier at offset %d, which expects %d", barrier.coming,
             place_of(barrier.place), barrier.expected);
    if (can_end(barrier)) wake(number_of(barrier));
}
inline void arrive(unsigned address, int bytes) {
    Barrier& barrier = barrier_at(address);
    settle(barrier);
    if (barrier.pending == 0)
        fail("arrives at the mbarrier at offset %d, at which all %d arrivals of the phase have been", place_of(address),
             barrier.count);
    WarpState& state = me();
    state.knows.of[WARPS + machine.warp] = fenced_here();
    barrier.gathered.join(state.knows);
    barrier.expected += bytes;
    barrier.pending--;
    check_bytes(barrier);
}
inline void wait(unsigned address, unsigned parity, int line) {
    Barrier& barrier = barrier_at(address);
    WarpState& state = me();
    for (settle(barrier); ((barrier.phase - 1) & 1) != static_cast<int>(parity & 1); settle(barrier)) {
        state.waits[machine.warps[machine.warp].lane] = {parity & 1, line};
        idle(number_of(barrier));
    }
    int& seen = hopper.seen[thread()][number_of(barrier)];
    if (seen == barrier.phase)
        fail(
            "waits at line %d for parity %u of the mbarrier at offset %d once more: it has waited for that phase, and "
            "returns a phase early",
            line, parity & 1, place_of(address));
    if (seen >= 0 && barrier.phase > seen + 1)
        fail(
            "waits at line %d for parity %u of the mbarrier at offset %d, of which %d phases have ended since it last "
            "waited: parities do not tell them apart",
            line, parity & 1, place_of(address), barrier.phase - seen);
    seen = barrier.phase;
    if (state.knows.of[2 * WARPS + number_of(barrier)] < barrier.phase) state.knows.join(barrier.passed);
}

// Starts a bulk copy.
inline void start(unsigned address, BulkCopy copy) {
    Barrier& barrier = barrier_at(address);
    if (!barrier.visible)
        fail("copies to the mbarrier at offset %d, which was created without barriers_created after it",
             place_of(address));
    settle(barrier);
    const char* origin = origin_of(copy);
    each_unit(copy, [&](unsigned at, int row, int piece) {
        Unit& unit = unit_at(at, UNIT, "copies to");
        check_write(unit, at, "copies to");
        if (unit.writer >= 0) check_read(unit, at, true, "copies to");
        unit.writer = 2 * WARPS + number_of(barrier);
        unit.written = barrier.phase + 1;
        unit.arriving = true;
        unit.origin = origin;
        unit.row = copy.row + row;
        unit.column = (copy.from ? 0 : copy.column * copy.tensor.element / UNIT) + piece;
        memset(memory_at(at), 0xff, UNIT);
    });
    barrier.coming += copy.bytes;
    barrier.copies.push_back(copy);
    check_bytes(barrier);
}

// ------------------------------------------------------------------------------------------------------------ products

constexpr char BEGIN[] = "products_begin", COMMIT[] = "products_end", WAIT[] = "products_wait", PRODUCT[] = "a product",
               STORE[] = "store_matrices", REGISTERS[] = "a division of the registers", VOTE[] = "a vote";

// Calls visit(address, i, piece) for the units of a factor: along_rows, i is one of the 16 rows of the panels, and the
// piece holds 8 of the factor's columns; else i is one of the factor's rows, and the piece holds half of its terms.
template <class Visit>
inline void each_unit(const Factor& factor, Visit visit) {
    const unsigned long long m = factor.descriptor;
    const unsigned start = (m & 0x3fff) << 4, leading = (m >> 16 & 0x3fff) << 4, eight = (m >> 32 & 0x3fff) << 4;
    if (factor.along_rows) {
        for (int k = 0; k < 16; ++k)
            for (int n = factor.first; n < factor.first + factor.count; n += 8)
                visit(swizzled(start + n / 64 * leading + k / 8 * eight + k % 8 * 128 + n % 64 * 2), k, n / 8);
    } else {
        for (int n = factor.first; n < factor.first + factor.count; ++n)
            for (int piece = 0; piece < 2; ++piece)
                visit(swizzled(start + n / 8 * eight + n % 8 * 128 + piece * 16), n, piece);
    }
}
inline void check_factor(const Factor& factor) {
    if (factor.descriptor >> 62 != SWIZZLED)
        fail("a descriptor of swizzle %d, where tiles have the swizzle of 128 bytes, %d", int(factor.descriptor >> 62),
             SWIZZLED);
    const Unit* corner = nullptr;
    int row = 0, column = 0;
    each_unit(factor, [&](unsigned address, int i, int piece) {
        Unit& unit = unit_at(address, UNIT, "multiplies");
        check_read(unit, address, true, "multiplies");
        if (!corner) {
            corner = &unit;
            row = unit.row - i;
            column = unit.column - piece;
        } else if (unit.origin != corner->origin ||
                   (unit.origin && (unit.row != row + i || unit.column != column + piece))) {
            fail(
                "a descriptor that does not match its tile: at offset %d it has row %d and columns from %d on, where "
                "a matrix would have row %d and columns from %d on",
                place_of(address), unit.row, factor.terms / 2 * unit.column, row + i,
                factor.terms / 2 * (column + piece));
        }
        unit.busy++;
        unit.busy_for = static_cast<short>(machine.warp);
    });
}
inline void release(const Factor& factor, int access) {
    each_unit(factor, [&](unsigned address, int, int) {
        Unit& unit = hopper.units[place_of(address) / UNIT];
        unit.busy--;
        unit.reads[machine.warp] = access;
    });
}

// An e4m3 number: a sign, 4 bits of exponent, 3 bits after the point. There is no infinity.
inline float of_e4m3(int bits) {
    const int exponent = bits >> 3 & 15, last = bits & 7;
    const float magnitude = (bits & 127) == 127 ? from_bits<float>(0x7fc00000u)
                            : exponent          ? from_bits<float>((exponent + 120) << 23 | last << 20)
                                                : last * 0x1p-9f;
    return bits & 128 ? -magnitude : magnitude;
}
struct Numbers {
    float of[256];  // by their bits
};
static const Numbers e4m3 = [] {
    Numbers all;
    for (int bits = 0; bits < 256; ++bits) all.of[bits] = of_e4m3(bits);
    return all;
}();

inline void widen(float* to, const unsigned short* from, int count) {
    for (int i = 0; i < count; ++i) to[i] = to_float(Type{from[i]});
}
// Writes a factor as [terms, count] numbers.
inline void widen(float* to, const Factor& factor) {
    each_unit(factor, [&](unsigned address, int i, int piece) {
        const char* const at = memory_at(address);
        const auto* from = reinterpret_cast<const unsigned short*>(at);
        if (factor.along_rows) {
            widen(to + i * factor.count + 8 * piece - factor.first, from, 8);
        } else if (factor.terms == 32) {
            for (int k = 0; k < UNIT; ++k)
                to[(UNIT * piece + k) * factor.count + i - factor.first] = e4m3.of[static_cast<unsigned char>(at[k])];
        } else {
            float eight[8];
            widen(eight, from, 8);
            for (int k = 0; k < 8; ++k) to[(8 * piece + k) * factor.count + i - factor.first] = eight[k];
        }
    });
}
// A right factor in float32. All warps that multiply by it share the result.
inline const float* wide_of(const Factor& factor) {
    const unsigned long long m = factor.descriptor;
    Wide& wide = hopper.wide[(m ^ m >> 6 ^ factor.along_rows) % 64];
    long changed = 0;
    const int start = place_of((m & 0x3fff) << 4), leading = (m >> 16 & 0x3fff) << 4;
    const int panels = factor.along_rows ? (factor.count + 63) / 64 : 1;
    for (int panel = 0; panel < panels; ++panel) {
        const int first = start + panel * leading, bytes = 128 * (factor.along_rows ? 16 : factor.count);
        for (int i = first / 1024; i <= (first + bytes - 1) / 1024 && i < int(hopper.changed.size()); ++i)
            changed = hopper.changed[i] > changed ? hopper.changed[i] : changed;
    }
    if (wide.descriptor != m || wide.count != factor.count || wide.along_rows != factor.along_rows ||
        wide.terms != factor.terms || wide.time < changed) {
        wide.descriptor = m;
        wide.count = factor.count;
        wide.along_rows = factor.along_rows;
        wide.terms = factor.terms;
        wide.time = hopper.time;
        wide.value.resize(factor.terms * factor.count);
        widen(wide.value.data(), factor);
    }
    return wide.value.data();
}

// Eight numbers fill a register of AVX2. g++ takes longer vectors apart, through memory.
typedef float Eight __attribute__((vector_size(32)));
typedef int EightInts __attribute__((vector_size(32)));

// Sums as a tensor core of Hopper makes them. tests/suite/oracles/tensor_core.py has the same arithmetic. One step adds
// TERMS products to a sum. It cuts them and the sum off BELOW bits below the largest exponent among them, adds what
// remains, and cuts the new sum off after KEPT bits. The exponent of a product is the sum of its factors' exponents.

// The exponent of a number that is not 0; -1000 for 0.
inline int exponent_of(double x) {
    int exponent = 0;
    frexp(x, &exponent);
    return x == 0.0 ? -1000 : exponent - 1;
}
// One step for one sum of any numbers.
template <int TERMS, int BELOW, int KEPT>
inline float step_of(float sum, const float (*a)[16], int row, const float* b, int n) {
    int largest = exponent_of(sum);
    bool finite = std::isfinite(sum);
    float plain = sum;
    for (int k = 0; k < TERMS; ++k) {
        const int exponent = exponent_of(a[k][row]) + exponent_of(b[k * n]);
        largest = exponent > largest ? exponent : largest;
        finite &= std::isfinite(a[k][row]) && std::isfinite(b[k * n]);
        plain += a[k][row] * b[k * n];
    }
    if (!finite) return plain;
    if (largest < -900) return 0.0f;
    const double unit = ldexp(1.0, largest - BELOW);
    double added = trunc(sum / unit);
    for (int k = 0; k < TERMS; ++k) added += trunc(double(a[k][row]) * b[k * n] / unit);
    added *= unit;
    int last = exponent_of(added) + 1 - KEPT;
    last = last < -149 ? -149 : last;
    return static_cast<float>(ldexp(trunc(ldexp(added, -last)), last));
}

// The exponents of eight numbers, -1000 for 0. Numbers that are subnormal, infinite or NaN become odd.
inline EightInts exponents_of(const Eight& x, EightInts& odd) {
    EightInts bits;
    memcpy(&bits, &x, sizeof bits);
    const EightInts exponent = bits >> 23 & 255;
    odd |= (exponent == 255) | ((exponent == 0) & ((bits & 0x7fffffff) != 0));
    return (x == 0.0f) ? (exponent * 0 - 1000) : (exponent - 127);
}
inline bool any_of(const EightInts& x) {
    long long parts[4];
    memcpy(parts, &x, sizeof parts);
    return parts[0] | parts[1] | parts[2] | parts[3];
}
inline Eight powers_of_two(const EightInts& exponents) {
    const EightInts bits = (127 + exponents) << 23;
    Eight powers;
    memcpy(&powers, &bits, sizeof powers);
    return powers;
}

// sums [16, n] += a [TERMS, 16 (rows)]^T b [TERMS, n]. n is a multiple of 8. `add` makes eight sums of one row at a
// time: it gets the sums, a column of a, the right numbers and the largest exponents, which are moderate. Other sums
// are made one by one.
template <int TERMS, int BELOW, int KEPT, class Add>
inline void multiply_in_steps(float* sums, const float (*a)[16], const float* b, int n, Add add) {
    int of_a[TERMS][16];
    EightInts odd_rows = {};
    for (int k = 0; k < TERMS; ++k)
        for (int row = 0; row < 16; row += 8) {
            Eight left;
            memcpy(&left, a[k] + row, sizeof left);
            const EightInts exponents = exponents_of(left, odd_rows);
            memcpy(of_a[k] + row, &exponents, sizeof exponents);
        }
    for (int column = 0; column < n; column += 8) {
        Eight right[TERMS];
        EightInts of_right[TERMS], odd_columns = odd_rows;
        for (int k = 0; k < TERMS; ++k) {
            memcpy(&right[k], b + k * n + column, sizeof right[k]);
            of_right[k] = exponents_of(right[k], odd_columns);
        }
        const bool plain = !any_of(odd_columns);
        for (int row = 0; row < 16; ++row) {
            float* const to = sums + row * n + column;
            Eight sum;
            memcpy(&sum, to, sizeof sum);
            EightInts odd = {}, largest = exponents_of(sum, odd);
            for (int k = 0; k < TERMS; ++k) {
                const EightInts one = of_right[k] + of_a[k][row];
                largest = one > largest ? one : largest;
            }
            odd |= (largest > 100) | ((largest < -100) & (largest > -900));
            if (!plain || any_of(odd)) {
                for (int i = 0; i < 8; ++i) to[i] = step_of<TERMS, BELOW, KEPT>(to[i], a, row, b + column + i, n);
                continue;
            }
            largest = largest < -100 ? largest * 0 - 100 : largest;
            sum = add(sum, a, row, right, largest);
            memcpy(to, &sum, sizeof sum);
        }
    }
}

// sums [16, n] += a [32, 16 (rows)]^T b [32, n], of e4m3 numbers. Products of two are exact in float32. Cut off, they
// are integers below 2^15, so the sum of all of them is exact, too.
inline void multiply_e4m3(float* sums, const float (*a)[16], const float* b, int n) {
    constexpr int TERMS = 32, BELOW = 13, KEPT = 14;
    multiply_in_steps<TERMS, BELOW, KEPT>(
        sums, a, b, n,
        [](const Eight& sum, const float (*left)[16], int row, const Eight* right, const EightInts& largest) {
            const Eight scale = powers_of_two(BELOW - largest);
            EightInts added = __builtin_convertvector(sum * scale, EightInts);
            for (int k = 0; k < TERMS; ++k)
                added += __builtin_convertvector(left[k][row] * right[k] * scale, EightInts);
            const Eight whole = __builtin_convertvector(added, Eight);
            EightInts bits;
            memcpy(&bits, &whole, sizeof bits);
            bits &= ~((1 << (24 - KEPT)) - 1);
            Eight cut;
            memcpy(&cut, &bits, sizeof cut);
            return cut * powers_of_two(largest - BELOW);
        });
}

#if TRUNCATES
typedef float Four __attribute__((vector_size(16)));
typedef int FourInts __attribute__((vector_size(16)));
typedef double FourDoubles __attribute__((vector_size(32)));
typedef long long FourLongs __attribute__((vector_size(32)));

// sums [16, n] += a [16 (k), 16 (rows)]^T b [16 (k), n], as a tensor core adds.
inline void multiply(float* sums, const float (*a)[16], const float* b, int n) {
    constexpr int TERMS = 16, BELOW = 25, KEPT = 24;
    multiply_in_steps<TERMS, BELOW, KEPT>(
        sums, a, b, n,
        [](const Eight& sum, const float (*left)[16], int row, const Eight* right, const EightInts& largest) {
            const Eight scale = powers_of_two(BELOW - largest);
            EightInts first = __builtin_convertvector(sum * scale, EightInts), second = {};
            for (int k = 0; k < 8; ++k) {
                first += __builtin_convertvector(left[k][row] * right[k] * scale, EightInts);
                second += __builtin_convertvector(left[k + 8][row] * right[k + 8] * scale, EightInts);
            }
            Eight all;
            for (int half = 0; half < 2; ++half) {
                FourInts one, other, exponents;
                memcpy(&one, reinterpret_cast<const char*>(&first) + half * sizeof one, sizeof one);
                memcpy(&other, reinterpret_cast<const char*>(&second) + half * sizeof other, sizeof other);
                memcpy(&exponents, reinterpret_cast<const char*>(&largest) + half * sizeof exponents, sizeof exponents);
                const FourDoubles added =
                    __builtin_convertvector(one, FourDoubles) + __builtin_convertvector(other, FourDoubles);
                FourLongs cut;
                memcpy(&cut, &added, sizeof cut);
                cut &= ~((1ll << (53 - KEPT)) - 1);
                const FourLongs unit_bits = (__builtin_convertvector(exponents, FourLongs) + (1023 - BELOW)) << 52;
                FourDoubles kept, unit;
                memcpy(&kept, &cut, sizeof kept);
                memcpy(&unit, &unit_bits, sizeof unit);
                const Four sums_of_half = __builtin_convertvector(kept * unit, Four);
                memcpy(reinterpret_cast<char*>(&all) + half * sizeof sums_of_half, &sums_of_half, sizeof sums_of_half);
            }
            return all;
        });
}
#else
// sums [16, n] += a [16 (k), 16 (rows)]^T b [16 (k), n]. Products of two 16-bit numbers are exact in float32. The sum
// over k is computed in order. n is a multiple of 8.
inline void multiply(float* sums, const float (*a)[16], const float* b, int n) {
    for (int row = 0; row < 16; row += 8) {
        for (int column = 0; column < n; column += 8) {
            Eight sum[8];
            for (int r = 0; r < 8; ++r) memcpy(&sum[r], sums + (row + r) * n + column, sizeof(Eight));
            for (int k = 0; k < 16; ++k) {
                Eight right;
                memcpy(&right, b + k * n + column, sizeof right);
                for (int r = 0; r < 8; ++r) sum[r] += a[k][row + r] * right;
            }
            for (int r = 0; r < 8; ++r) memcpy(sums + (row + r) * n + column, &sum[r], sizeof(Eight));
        }
    }
}
#endif

// Sums in the registers of a warp: lane 4g + t holds of row g columns 8j + 2t and 8j + 2t + 1 in registers 4j and
// 4j + 1, and of row g + 8 the same columns in registers 4j + 2 and 4j + 3.
template <class Visit>
inline void each_register(int columns, Visit visit) {
    for (int lane = 0; lane < LANES; ++lane)
        for (int i = 0; i < columns / 2; ++i)
            visit(lane, i, (lane / 4 + 8 * (i / 2 % 2)) * columns + i / 4 * 8 + lane % 4 * 2 + i % 2);
}

struct Brought {
    float* sums;
    const unsigned* left;
    unsigned long long a, b;
    bool add;
};
inline void issue(Warp& warp, int terms, int columns, bool in_registers, bool rows_a, bool rows_b) {
    WarpState& state = me();
    Brought lanes[LANES];
    for (int i = 0; i < LANES; ++i) lanes[i] = *static_cast<const Brought*>(warp.slots[i]);
    const Brought& first = lanes[0];
    for (const Brought& lane : lanes)
        if (lane.a != first.a || lane.b != first.b || lane.add != first.add)
            fail("a product of other factors than in lane 0 of its warp");
    if (machine.launch.threads % GROUP) fail("a product in a block that does not consist of whole warpgroups");

    std::vector<Issued>& log = hopper.issued[machine.warp / 4];
    const long at = state.issued++ - hopper.forgotten[machine.warp / 4];
    if (at < long(log.size())) {
        const Issued& other = log[at];
        if (other.a != first.a || other.b != first.b || other.count != columns || other.add != first.add)
            fail("a product that differs from that of another warp of its warpgroup");
    } else {
        log.push_back({first.a, first.b, columns, first.add});
    }
    long least = state.issued;
    for (int i = 0; i < 4; ++i) {
        const long issued = hopper.warps[machine.warp / 4 * 4 + i].issued;
        least = issued < least ? issued : least;
    }
    if (least - hopper.forgotten[machine.warp / 4] == long(log.size())) {
        hopper.forgotten[machine.warp / 4] = least;
        log.clear();
    }

    int number = -1;
    for (int i = 0; i < int(state.sums.size()); ++i) {
        const Sums& other = state.sums[i];
        if (!other.products) continue;
        if (other.at[0] == first.sums && other.count == columns)
            number = i;
        else if (first.sums < other.at[0] + other.count / 2 && other.at[0] < first.sums + columns / 2)
            fail("a product whose sums overlap those of a product that nobody has waited for");
    }
    if (number < 0) {
        if (!state.begun) fail("a product on registers that may have been touched after the last products_begin");
        for (number = 0; number < int(state.sums.size()) && state.sums[number].products;) ++number;
        if (number == int(state.sums.size())) state.sums.emplace_back();
        Sums& sums = state.sums[number];
        sums.count = columns;
        sums.products = 0;
        sums.value.resize(16 * columns);
        for (int i = 0; i < LANES; ++i) sums.at[i] = lanes[i].sums;
        const float poison = from_bits<float>(POISON);
        each_register(columns, [&](int lane, int i, int to) {
            sums.value[to] = sums.at[lane][i];
            sums.at[lane][i] = poison;
        });
    }
    state.sums[number].products++;

    Product product;
    product.a = {first.a, 16, machine.warp % 4 * 16, rows_a, terms};
    product.b = {first.b, columns, 0, rows_b, terms};
    product.in_registers = in_registers;
    product.add = first.add;
    product.group = state.committed;
    product.sums = number;
    if (in_registers) {
        for (int i = 0; i < LANES; ++i) memcpy(product.left[i], product.left_at[i] = lanes[i].left, 16);
    } else {
        check_factor(product.a);
    }
    check_factor(product.b);
    state.products.push_back(product);
}

inline void run_product(const Product& product, int access) {
    Sums& sums = me().sums[product.sums];
    const bool of_e4m3 = product.b.terms == 32;
    alignas(64) float a[32][16];  // as many rows as terms
    if (product.in_registers) {
        for (int lane = 0; lane < LANES; ++lane) {
            if (memcmp(product.left[lane], product.left_at[lane], 16)) {
                machine.warps[machine.warp].lane = lane;
                fail("the left operand of a product changed before the product was waited for");
            }
            for (int i = 0; i < 16 && of_e4m3; ++i) {
                const unsigned four = product.left[lane][i / 4];
                a[lane % 4 * 4 + i % 4 + 16 * (i / 8)][lane / 4 + 8 * (i / 4 % 2)] = e4m3.of[four >> 8 * (i % 4) & 255];
            }
            for (int i = 0; i < 8 && !of_e4m3; ++i) {
                const unsigned two = product.left[lane][i / 2];
                a[lane % 4 * 2 + i % 2 + 8 * (i / 4)][lane / 4 + 8 * (i / 2 % 2)] =
                    to_float(Type{static_cast<unsigned short>(i % 2 ? two >> 16 : two)});
            }
        }
    } else {
        widen(a[0], product.a);
        release(product.a, access);
    }
    if (!product.add) memset(sums.value.data(), 0, sums.value.size() * sizeof(float));
    (of_e4m3 ? multiply_e4m3 : multiply)(sums.value.data(), a, wide_of(product.b), sums.count);
    release(product.b, access);
    if (--sums.products) return;
    each_register(sums.count, [&](int lane, int i, int from) {
        if (bits_of(sums.at[lane][i]) != POISON) {
            machine.warps[machine.warp].lane = lane;
            fail("the sums of a product were written before the product was waited for");
        }
        sums.at[lane][i] = sums.value[from];
    });
}
inline void wait_for_products(int groups) {
    WarpState& state = me();
    size_t done = 0;
    const int access = next_access();
    for (; done < state.products.size() && state.products[done].group < state.committed - groups; ++done)
        run_product(state.products[done], access);
    state.products.erase(state.products.begin(), state.products.begin() + long(done));
    state.begun = false;
}
inline void check_idle(const float* registers, int count) {
    for (const Sums& sums : me().sums) {
        const float* at = sums.at[machine.warps[machine.warp].lane];
        if (sums.products && registers < at + sums.count / 2 && at < registers + count)
            fail("uses the sums of a product before it has waited for the product");
    }
}
// A number that a thread uses. A product has filled its sums with POISON, which arithmetic passes on.
inline float used(float x) {
    if ((bits_of(x) & 0x7fffffffu) == POISON) fail("uses a sum of a product before it has waited for the product");
    return x;
}

// ----------------------------------------------------------------------------------------------------------- the block

inline void divide_registers(int count, bool increases) {
    WarpState& state = me();
    if (count < 24 || count > 256 || count % 8) fail("%d registers for a thread", count);
    if (increases ? count < state.registers : count > state.registers)
        fail("%s to %d registers for a thread, which has %d", increases ? "increases" : "reduces", count,
             state.registers);
    state.wanted = count;
    while (hopper.spare_registers < count - state.registers) idle(BARRIERS);
    hopper.spare_registers -= count - state.registers;
    state.registers = count;
    if (!increases) wake(BARRIERS);
}

inline void block_begins() {
    if (machine.launch.threads > WARPS * LANES) fail("%d threads in a block", machine.launch.threads);
    const int bytes = machine.launch.shared_bytes;
    hopper.units.assign(bytes / UNIT + 1, {NEVER, 0, nullptr, 0, 0, 0, 0, false, {}});
    hopper.numbers.clear();
    hopper.barrier_of.assign(bytes / 8 + 1, 0);
    hopper.changed.assign(bytes / 1024 + 1, ++hopper.time);
    hopper.barrier_count = hopper.spare_registers = 0;
    const int registers = 65536 / machine.launch.threads / 8 * 8;
    for (WarpState& warp : hopper.warps) {
        memset(&warp.knows, 0, sizeof warp.knows);
        warp.begun = false;
        warp.committed = 0;
        warp.issued = 0;
        warp.products.clear();
        warp.sums.clear();
        warp.registers = registers < 256 ? registers : 255;
    }
    for (int i = 0; i < WARPS / 4; ++i) {
        hopper.issued[i].clear();
        hopper.forgotten[i] = 0;
    }
    memset(hopper.fenced, 0, sizeof hopper.fenced);
    memset(hopper.seen, 0xff, sizeof hopper.seen);
}
inline void block_ends() {
    for (int i = 0; i < hopper.barrier_count; ++i)
        if (hopper.barriers[i].coming)
            fail("the block ends while %d bytes are on their way to the mbarrier at offset %d",
                 hopper.barriers[i].coming, place_of(hopper.barriers[i].place));
    for (int i = 0; i < machine.warp_count; ++i) {
        const WarpState &warp = hopper.warps[i], &first = hopper.warps[i / 4 * 4];
        if (!warp.products.empty()) fail("warp %d ends with products that it has not waited for", i);
        if (warp.issued != first.issued)
            fail("warps of one warpgroup issue different numbers of products: warp %d %ld, warp %d %ld", i, warp.issued,
                 i / 4 * 4, first.issued);
    }
}
inline void block_synchronises() {
    for (int i = 0; i < machine.warp_count; ++i) {
        machine.warp = i;
        hopper.warps[i].knows.of[WARPS + i] = fenced_here();
        hopper.warps[0].knows.join(hopper.warps[i].knows);
    }
    for (int i = 1; i < machine.warp_count; ++i) hopper.warps[i].knows = hopper.warps[0].knows;
}
// Reports all waits that never return, in the name of the first thread that waits.
inline void block_stands_still() {
    char text[400];
    int used = 0, first = -1;
    for (int i = 0; i < machine.warp_count && used < int(sizeof text); ++i) {
        if (!machine.warps[i].idle) continue;
        const WarpState& state = hopper.warps[i];
        const int lane = __builtin_ctz(machine.warps[i].idle), idle_for = machine.warps[i].idle_for[lane];
        char* const to = text + used;
        const size_t room = sizeof text - used;
        if (idle_for == BARRIERS) {
            used += snprintf(to, room, "; warp %d: for %d registers for a thread, of which %d are spare", i,
                             state.wanted - state.registers, hopper.spare_registers);
        } else {
            const Barrier& barrier = hopper.barriers[idle_for];
            used += snprintf(to, room,
                             "; warp %d, line %d: for parity %u of the mbarrier at offset %d (phase %d, "
                             "%d of %d arrivals missing, %d of %d bytes come)",
                             i, state.waits[lane].line, state.waits[lane].parity, place_of(barrier.place),
                             barrier.phase, barrier.pending, barrier.count, barrier.coming, barrier.expected);
        }
        if (first >= 0) continue;
        first = i;
        machine.warps[i].lane = lane;
    }
    machine.warp = first;
    fail("waits for ever%s", text);
}
static const bool extended = [] {
    extension = {block_begins, block_ends, block_synchronises, block_stands_still};
    return true;
}();

// An index that is computed where it is read.
template <int (*VALUE)()>
struct Index {
    operator unsigned() const { return static_cast<unsigned>(VALUE()); }
};
inline int block_of() { return machine.block; }
inline int blocks_of() { return machine.launch.blocks; }

template <class T>
struct Exchange {
    T value;
    int lane;
    T result;
};
template <class T>
inline T exchange(T value, int lane, int line) {
    Exchange<T> mine{value, lane, value};
    meet(SHUFFLE, line, &mine, [](Warp& warp) {
        for (const void* slot : warp.slots) {
            auto* one = static_cast<Exchange<T>*>(const_cast<void*>(slot));
            one->result = static_cast<const Exchange<T>*>(warp.slots[one->lane % LANES])->value;
        }
    });
    return mine.result;
}

}  // namespace twin

// ---------------------------------------------------------------------------------------------- what CUDA C++ provides

static constexpr struct {
    twin::Index<twin::thread> x;
} threadIdx{};
static constexpr struct {
    twin::Index<twin::block_of> x;
} blockIdx{};
static constexpr struct {
    twin::Index<twin::blocks_of> x;
} gridDim{};

inline void __syncthreads(int line = __builtin_LINE()) { twin::barrier(line); }
inline void __syncwarp(int line = __builtin_LINE()) {
    twin::meet(twin::SHUFFLE, line, nullptr, [](twin::Warp&) {});
}
template <class T>
inline T __shfl_sync(unsigned, T value, int lane, int line = __builtin_LINE()) {
    return twin::exchange(value, lane, line);
}
template <class T>
inline T __shfl_xor_sync(unsigned, T value, int mask, int line = __builtin_LINE()) {
    return twin::exchange(value, (twin::thread() % twin::LANES) ^ mask, line);
}
inline bool __any_sync(unsigned, bool mine, int line = __builtin_LINE()) {
    bool any = mine;
    twin::meet(twin::VOTE, line, &any, [](twin::Warp& warp) {
        bool found = false;
        for (const void* slot : warp.slots) found |= *static_cast<const bool*>(slot);
        for (const void* slot : warp.slots) *static_cast<bool*>(const_cast<void*>(slot)) = found;
    });
    return any;
}
inline void __threadfence() {}
inline int atomicAdd(int* to, int value) {
    twin::check_global(to, sizeof *to);
    const int before = *to;
    *to += value;
    return before;
}
inline int atomicExch(int* to, int value) {
    twin::check_global(to, sizeof *to);
    const int before = *to;
    *to = value;
    return before;
}
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline int __float_as_int(float x) { return static_cast<int>(twin::bits_of(x)); }
inline float __int_as_float(int bits) { return twin::from_bits<float>(static_cast<unsigned>(bits)); }

// ------------------------------------------------------------------------------------------------------- as hopper.cuh

inline char* shared_memory() { return twin::machine.shared; }
inline size_t __cvta_generic_to_shared(const void* shared) { return twin::BASE + twin::offset_of(shared); }

inline unsigned pack(float low, float high) { return pack<twin::Type>(twin::used(low), twin::used(high)); }
inline float low_of(unsigned two) { return to_float(twin::Type{static_cast<unsigned short>(two)}); }
inline float high_of(unsigned two) { return low_of(two >> 16); }
inline float exp2_of(float x) { return exp2f(twin::used(x)); }
inline int thread_again() { return twin::thread(); }
inline unsigned again(unsigned x) { return x; }
inline float smaller_or_nan(float a, float b) { return a != a || a < b ? twin::used(a) : twin::used(b); }

inline void barrier_create(unsigned address, int count) {
    using namespace twin;
    const int place = place_of(address);
    if (place < 0 || place + 8 > machine.launch.shared_bytes || place % 8)
        fail("creates an mbarrier at offset %d of shared memory, which has %d bytes", place,
             machine.launch.shared_bytes);
    hopper.units[place / UNIT].writer = HOLDS_BARRIER;
    if (hopper.barrier_count == BARRIERS) fail("more than %d mbarriers", BARRIERS);
    if (hopper.barrier_of[place / 8]) fail("creates the mbarrier at offset %d again", place);
    Barrier& barrier = hopper.barriers[hopper.barrier_count++];
    hopper.barrier_of[place / 8] = static_cast<unsigned char>(hopper.barrier_count);
    barrier = {address, count, count, 0, 0, 0, machine.warp, next_access(), false, {}, {}, {}};
}
inline void barriers_created() {
    using namespace twin;
    hopper.fenced[thread()] = me().knows.of[machine.warp];
    for (int i = 0; i < hopper.barrier_count; ++i)
        if (hopper.barriers[i].creator == machine.warp) hopper.barriers[i].visible = true;
}
inline void barrier_arrive(unsigned address) { twin::arrive(address, 0); }
inline void barrier_arrive_expecting(unsigned address, int bytes) { twin::arrive(address, bytes); }
inline void barrier_wait(unsigned address, unsigned parity, int line = __builtin_LINE()) {
    twin::wait(address, parity, line);
}

template <int COUNT>
inline void registers_reduce(int line = __builtin_LINE()) {
    twin::meet(twin::REGISTERS, line, nullptr, [](twin::Warp&) { twin::divide_registers(COUNT, false); });
}
template <int COUNT>
inline void registers_increase(int line = __builtin_LINE()) {
    twin::meet(twin::REGISTERS, line, nullptr, [](twin::Warp&) { twin::divide_registers(COUNT, true); });
}

inline void copy_box(unsigned to, const TensorMap& tensor, unsigned barrier, int column, int row, int head, int batch) {
    using namespace twin;
    Description description;
    memcpy(&description, &tensor, sizeof description);
    if (to % 1024) fail("copies a box to offset %d of shared memory, which is not a multiple of 1024", place_of(to));
    bool aligned = reinterpret_cast<uintptr_t>(description.data) % 16 == 0;
    for (int i = 0; i < 3; ++i) aligned &= description.sizes[i + 1] == 1 || description.strides[i] % 16 == 0;
    if (!aligned) fail("copies a box of a tensor whose address or strides are not multiples of 16 bytes");
    start(barrier, {to, description.rows * 128, nullptr, description, column, row, head, batch});
}
inline void copy_bytes(unsigned to, const void* from, int bytes, unsigned barrier) {
    using namespace twin;
    if (to % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16)
        fail("copies %d bytes from %p to offset %d of shared memory: not aligned", bytes, from, place_of(to));
    for (int i = 0; i < bytes; i += UNIT) check_global(static_cast<const char*>(from) + i, UNIT);
    start(barrier, {to, bytes, static_cast<const char*>(from), {}, 0, 0, 0, 0});
}
inline void add_to_memory(float* to, const float* four) {
    twin::check_global(to, 16);
    for (int i = 0; i < 4; ++i) to[i] += twin::used(four[i]);
}
namespace twin {
// Stores four 8x8 matrices, whose rows are at the addresses of the lanes. TRANSPOSED: rows of the transposes.
template <bool TRANSPOSED>
inline void store_four_matrices(unsigned row, const unsigned* from, int line) {
    struct Rows {
        unsigned to;
        const unsigned* from;
    };
    const Rows mine{row, from};
    meet(STORE, line, &mine, [](Warp& warp) {
        const Rows* lanes[LANES];
        for (int i = 0; i < LANES; ++i) lanes[i] = static_cast<const Rows*>(warp.slots[i]);
        const int access = next_access(), last = warp.lane;
        for (int i = 0; i < LANES; ++i) {  // row i % 8 of matrix i / 8
            warp.lane = i;
            write_here(lanes[i]->to, UNIT, access);
            char* const to = memory_at(lanes[i]->to);
            for (int c = 0; c < 8; ++c) {
                const int g = TRANSPOSED ? c : i % 8, column = TRANSPOSED ? i % 8 : c;
                const auto* two = reinterpret_cast<const char*>(lanes[4 * g + column / 2]->from + i / 8);
                memcpy(to + 2 * c, two + column % 2 * 2, 2);
            }
        }
        warp.lane = last;
    });
}
}  // namespace twin
inline void store_matrices(unsigned row, const unsigned* from, int line = __builtin_LINE()) {
    twin::store_four_matrices<false>(row, from, line);
}
inline void store_transposed(unsigned row, const unsigned* from, int line = __builtin_LINE()) {
    twin::store_four_matrices<true>(row, from, line);
}
inline void store_four(unsigned to, const float* four) {
    twin::write_here(to, 16, twin::next_access());
    for (int i = 0; i < 4; ++i) {
        const float x = twin::used(four[i]);
        memcpy(twin::memory_at(to) + 4 * i, &x, 4);
    }
}
inline float4 load_four(unsigned from) {
    twin::read_here(from, 16);
    float4 four;
    memcpy(&four, twin::memory_at(from), sizeof four);
    return four;
}
inline float load_number(const float* from) {
    twin::check_global(from, 4);
    return *from;
}
inline float4 load_numbers(const float* from) {
    twin::check_global(from, 16);
    float4 four;
    memcpy(&four, from, sizeof four);
    return four;
}
inline void store_two(float* to, float first, float second) {
    twin::check_global(to, 8);
    to[0] = twin::used(first);
    to[1] = twin::used(second);
}
inline void store_numbers(float* to, float4 four) {
    twin::check_global(to, 16);
    memcpy(to, &four, sizeof four);
}
inline float2 load_two(unsigned from) {
    twin::read_here(from, 8);
    float2 two;
    memcpy(&two, twin::memory_at(from), sizeof two);
    return two;
}
inline uint4 load_eight(const Element* from) {
    twin::check_global(from, 16);
    return *reinterpret_cast<const uint4*>(from);
}
inline void store_eight(Element* to, uint4 eight) {
    twin::check_global(to, 16);
    *reinterpret_cast<uint4*>(to) = eight;
}
inline void shared_written() { twin::hopper.fenced[twin::thread()] = twin::me().knows.of[twin::machine.warp]; }
inline void prefetch_map(const TensorMap&) {}

inline void products_begin(int line = __builtin_LINE()) {
    twin::meet(twin::BEGIN, line, nullptr, [](twin::Warp&) { twin::me().begun = true; });
}
inline void products_end(int line = __builtin_LINE()) {
    twin::meet(twin::COMMIT, line, nullptr, [](twin::Warp&) { twin::me().committed++; });
}
template <int GROUPS>
inline void products_wait(int line = __builtin_LINE()) {
    twin::meet(twin::WAIT, line, nullptr, [](twin::Warp&) { twin::wait_for_products(GROUPS); });
}
template <int COUNT>
inline void pin(float (&registers)[COUNT]) {
    twin::check_idle(registers, COUNT);
}
template <int N>
struct Product {
    template <int ROWS_A, int ROWS_B>
    static void shared(float (&d)[N / 2], unsigned long long a, unsigned long long b, bool add,
                       int line = __builtin_LINE()) {
        const twin::Brought mine{d, nullptr, a, b, add};
        twin::meet(twin::PRODUCT, line, &mine,
                   [](twin::Warp& warp) { twin::issue(warp, 16, N, false, ROWS_A, ROWS_B); });
    }
    template <int ROWS_B>
    static void registers(float (&d)[N / 2], const unsigned* a, unsigned long long b, int line = __builtin_LINE()) {
        const twin::Brought mine{d, a, 0, b, true};
        twin::meet(twin::PRODUCT, line, &mine, [](twin::Warp& warp) { twin::issue(warp, 16, N, true, false, ROWS_B); });
    }
};

// --------------------------------------------------------------------------------------------------------- as e4m3.cuh

namespace twin {
// Rounds to the nearest e4m3 number, ties to even. A number above 448 becomes 448.
inline unsigned rounded_e4m3(float x) {
    const unsigned bits = bits_of(used(x)), sign = bits >> 24 & 128, magnitude = bits & 0x7fffffffu;
    if (x != x) return 127;
    if (magnitude >= 0x43e00000u) return sign | 126;  // 448
    if (magnitude < 0x3c800000u)  // 2^-6: the last place of the sum with 2^14 is e4m3's smallest number
        return sign | (bits_of(from_bits<float>(magnitude) + 0x1p14f) & 15);
    return sign | (((magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20) - (120 << 3));
}
}  // namespace twin
inline unsigned pack_four(float a, float b, float c, float d) {
    using twin::rounded_e4m3;
    return rounded_e4m3(a) | rounded_e4m3(b) << 8 | rounded_e4m3(c) << 16 | rounded_e4m3(d) << 24;
}
template <int N>
struct ProductE4m3 {
    static void shared(float (&d)[N / 2], unsigned long long a, unsigned long long b, bool add,
                       int line = __builtin_LINE()) {
        const twin::Brought mine{d, nullptr, a, b, add};
        twin::meet(twin::PRODUCT, line, &mine, [](twin::Warp& warp) { twin::issue(warp, 32, N, false, false, false); });
    }
    static void registers(float (&d)[N / 2], const unsigned* a, unsigned long long b, bool add,
                          int line = __builtin_LINE()) {
        const twin::Brought mine{d, a, 0, b, add};
        twin::meet(twin::PRODUCT, line, &mine, [](twin::Warp& warp) { twin::issue(warp, 32, N, true, false, false); });
    }
};
inline float load_float(unsigned from) {
    twin::Unit& place = twin::number_at(from, "reads");
    twin::check_read(place, from, false, "reads");
    place.reads[twin::machine.warp] = twin::next_access();
    float x;
    memcpy(&x, twin::memory_at(from), sizeof x);
    return x;
}
inline void store_float(unsigned to, float x) {
    twin::Unit& place = twin::number_at(to, "writes");
    twin::check_write(place, to, "writes");
    place.writer = twin::machine.warp;
    place.written = twin::next_access();
    twin::used(x);
    memcpy(twin::memory_at(to), &x, sizeof x);
}

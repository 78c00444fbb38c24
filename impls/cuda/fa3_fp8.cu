// FlashAttention-3 in FP8, forward, in CUDA C++ for Hopper. The schedule is that of fa3.cu: a producer copies, workers
// multiply, and the softmax of a tile of keys runs while the products of its neighbours run. The factors of all
// products are e4m3 numbers (e4m3.cuh), which a multiprocessor multiplies twice as fast as 16-bit numbers.
//
// - The kernel `quantise` rounds Q, K and V to e4m3. The 128 rows of a block share a scale: the smallest power of two,
//   and at least 2^-126, that brings them into the range of e4m3. `quantise` also transposes V, because products take V
//   by columns. It stores the keys of V in the order in which a worker holds its weights (`pack_columns`).
// - The scale of a block of K enters the factor of the exponent. That of a block of V enters the sum over the tiles.
// - A weight is 2^8 times its usual value, so that small weights stay in the range of e4m3.
// - A tensor core keeps 14 bits of a sum. So each tile of P V is summed afresh and added to the output in float32.
// - Exponentials take as long as products. While the special function unit computes the second half of them, the other
//   units add P V of the last tile to the output and round the weights.
//
// Arithmetic. A weight is 2^(s c - m c + 8) with s the score of the rounded inputs, m the largest s of the row so far,
// and c = |scale| log2 e. One fma computes s c + round(8 - m c) and rounds once. All weights of the row share the error
// of round(8 - m c), so it cancels in the output, and the LSE takes it out again. For a large |m c| the row computes
// (s - m) c + 8, so that equal scores weigh the same, however large they are.
//
// The loader defines the kernel, QUANTISE or FORWARD, and BF16 (or float16). FORWARD needs DIM (64 or 128; tensors may
// have fewer columns, and the copy engine fills the others with zeros), WORKERS, STAGES (tiles of keys or values in
// shared memory), CAUSAL, and SIGN (of the scale).
#include "e4m3.cuh"

constexpr int BLOCK = 128;  // rows that share a scale

#ifdef QUANTISE

struct View {
    const Element* data;
    long long batch, head, row, column;  // strides in elements
};

// A tensor [batches, heads, rows, dim], and room for its e4m3 numbers and its scales [batches, heads, tiles]. The
// numbers are [batches, heads, rows, pitch], or [batches, heads, 8 pieces, pitch] if transposed. Those beyond dim and
// rows are 0.
struct Source {
    View from;
    unsigned char* to;
    float* scales;
    int heads, rows, dim, pieces;  // pieces of eight columns
    int pitch;
    int transposed;
    int vectors;  // whether rows can be read in aligned pieces of 16 bytes
    int tiles, blocks;
};
struct Sources {
    Source of[3];
};

constexpr int THREADS = 512;
constexpr int SHARE = 4;  // pieces of a thread

struct Piece {
    int row, index;  // in the block; columns 8 index to 8 index + 7
};

// The thread's pieces. Neighbouring threads take neighbouring pieces of a row. If the tensor is transposed, a thread
// takes four keys that `pack_columns` makes neighbours, and a warp takes all 128 keys of eight columns.
DEVICE Piece piece_of(const Source& source, int i) {
    const int lane = threadIdx.x % 32;
    if (source.transposed)
        return {lane / 4 * 16 + lane % 4 * 2 + i / 2 * 8 + i % 2, static_cast<int>(threadIdx.x) / 32};
    const int index = threadIdx.x + THREADS * i;
    return {index / source.pieces, index % source.pieces};
}

DEVICE uint4 load_piece(const Source& source, const Element* tile, const Piece& piece, int rows) {
    uint4 four = make_uint4(0, 0, 0, 0);
    if (piece.row >= rows || piece.index >= source.pieces) return four;
    const Element* const from = tile + piece.row * source.from.row + 8 * piece.index * source.from.column;
    if (source.vectors) return load_eight(from);
    unsigned* const words = reinterpret_cast<unsigned*>(&four);
    UNROLL
    for (int c = 0; c < 8; ++c) {
        if (8 * piece.index + c < source.dim)
            words[c / 2] |= static_cast<unsigned>(from[c * source.from.column].bits) << 16 * (c % 2);
    }
    return four;
}

DEVICE unsigned word_of(const uint4& four, int i) {
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}
DEVICE float number_of(const uint4& four, int column) {
    const unsigned word = word_of(four, column / 2);
    return column % 2 ? high_of(word) : low_of(word);
}

// The exponent of the smallest power of two, at least 2^-126, that brings numbers up to `largest` into the range of
// e4m3, up to 448 = 1.75 2^8.
DEVICE int exponent_for(float largest) {
    const int bits = __float_as_int(largest);
    return larger_of((bits >> 23) - 127 - 8 + ((bits & 0x7fffff) > 0x600000), -126);
}
DEVICE float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

// Rounds the blocks of up to three tensors, one after the other. A block with an infinite number becomes NaN.
extern "C" __global__ void __launch_bounds__(THREADS, 2) quantise(const __grid_constant__ Sources sources) {
    __shared__ float largest_of[THREADS / 32];
    int block = blockIdx.x, which = 0;
    while (block >= sources.of[which].blocks) block -= sources.of[which++].blocks;
    const Source& source = sources.of[which];
    const int pair = block / source.tiles, first_row = block % source.tiles * BLOCK;
    const int rows = smaller_of(source.rows - first_row, BLOCK);
    const Element* const tile = source.from.data + pair / source.heads * source.from.batch +
                                pair % source.heads * source.from.head + first_row * source.from.row;

    uint4 loaded[SHARE];
    UNROLL
    for (int i = 0; i < SHARE; ++i) loaded[i] = load_piece(source, tile, piece_of(source, i), rows);
    float largest = 0.0f;
    UNROLL
    for (int i = 0; i < SHARE; ++i) {
        UNROLL
        for (int c = 0; c < 8; ++c) largest = fmaxf(largest, fabsf(number_of(loaded[i], c)));
    }
    UNROLL
    for (int other = 16; other > 0; other /= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, other));
    if (threadIdx.x % 32 == 0) largest_of[threadIdx.x / 32] = largest;
    __syncthreads();
    UNROLL
    for (int i = 0; i < THREADS / 32; ++i) largest = fmaxf(largest, largest_of[i]);

    const int exponent = exponent_for(largest);
    const float inverse = largest < INFINITY ? power_of_two(-exponent) : __int_as_float(0x7fffffff);
    if (threadIdx.x == 0) source.scales[block] = power_of_two(exponent);
    if (source.transposed) {
        unsigned char* const to = source.to + static_cast<long long>(pair) * 8 * source.pieces * source.pitch;
        const int place = first_row + static_cast<int>(threadIdx.x) % 32 * 4;
        const int piece = piece_of(source, 0).index;
        if (piece >= source.pieces || place >= source.pitch) return;
        UNROLL
        for (int c = 0; c < 8; ++c) {
            float four[4];
            UNROLL
            for (int i = 0; i < 4; ++i) four[i] = number_of(loaded[i], c) * inverse;
            *reinterpret_cast<unsigned*>(to + static_cast<long long>(8 * piece + c) * source.pitch + place) =
                pack_four(four[0], four[1], four[2], four[3]);
        }
    } else {
        unsigned char* const to = source.to + (static_cast<long long>(pair) * source.rows + first_row) * source.pitch;
        UNROLL
        for (int i = 0; i < SHARE; ++i) {
            const Piece piece = piece_of(source, i);
            if (piece.row >= rows) continue;
            float x[8];
            UNROLL
            for (int c = 0; c < 8; ++c) x[c] = number_of(loaded[i], c) * inverse;
            *reinterpret_cast<uint2*>(to + piece.row * source.pitch + 8 * piece.index) =
                make_uint2(pack_four(x[0], x[1], x[2], x[3]), pack_four(x[4], x[5], x[6], x[7]));
        }
    }
}
EXPORT(quantise)  // for the twin

#endif

#ifdef FORWARD

constexpr int ROWS = 64;                // queries of a worker
constexpr int OWN = WORKERS * ROWS;     // queries of a block
constexpr int STEP = BLOCK;             // keys of a tile
constexpr int GROUPS = STEP / 16;       // groups of 16 columns that a softmax takes at a time
constexpr int EARLY = GROUPS / 2;       // groups before the product with V is complete
constexpr int SHARE = DIM / 2 / EARLY;  // the output in each of the other groups
constexpr int THREADS = 128 * (WORKERS + 1);
constexpr float LOG_2 = 0.693147180559945f;
constexpr float LARGEST_FLOAT = 3.402823466e38f, SMALLEST_FLOAT = 0x1p-126f;
constexpr float HUGE_SCALED = 256.0f;  // a row whose |m c| is larger subtracts before it multiplies

struct Problem {
    int batches, heads, groups;  // groups: heads that share a head of keys
    int queries, keys, dim;
    int offset;                       // with CAUSAL, query i sees key j if j <= i + offset
    int tiles, band;                  // tiles of OWN queries in a head; heads that are worked on together
    float magnitude, exponent_scale;  // |scale|, |scale| log2 e; 1 and log2 e where the scale is 0
};

struct Output {
    Element* data;
    long long batch, head, row;  // strides in elements; the columns are contiguous
};

// ------------------------------------------------------------------------------------------------------- shared memory

// Shared memory holds a panel of Q for each worker. A ring of STAGES panels follows: of K [STEP, DIM] and of the
// transpose of V [DIM, STEP]. They pass through it in the order of their use: K0 K1 V0 K2 V1 K3 V2 ...
constexpr int QUERY_BYTES = ROWS * ROW_BYTES;
constexpr int SLOT_BYTES = STEP * ROW_BYTES;
constexpr int RING = WORKERS * QUERY_BYTES;
constexpr int BARRIERS = RING + STAGES * SLOT_BYTES;
// Each place has two barriers. "Full" ends a phase when the copy has landed, "empty" when all readers are done.
constexpr int QUERY_FULL = BARRIERS, QUERY_EMPTY = QUERY_FULL + 8 * WORKERS;
constexpr int SLOT_FULL = QUERY_EMPTY + 8 * WORKERS, SLOT_EMPTY = SLOT_FULL + 8 * STAGES;
// Two places hold the index of the next piece of work.
constexpr int MAIL_FULL = SLOT_EMPTY + 8 * STAGES, MAIL_EMPTY = MAIL_FULL + 16;
constexpr int MAIL = MAIL_EMPTY + 16;
constexpr int SCALES = MAIL + 8;  // of the tile at each place of the ring, float32

// -------------------------------------------------------------------------------------------------------------- places

// A piece of work: OWN queries of one head, and the number of tiles of STEP keys that any of them sees.
struct Work {
    int first_query, head, batch, visits;
};

// The largest number of keys that a query before `end` sees.
DEVICE int seen_before(const Problem& problem, int end) {
    end = smaller_of(end, problem.queries);
    return CAUSAL ? smaller_of(problem.keys, larger_of(end + problem.offset, 0)) : problem.keys;
}

// The order of work. A band is a set of heads whose keys and values fit in the L2 cache together. Within a band the
// last queries come first, because they see most keys if the mask is causal.
DEVICE Work work_of(const Problem& problem, int index) {
    const int all = problem.batches * problem.heads;
    const int band = index / (problem.band * problem.tiles), within = index - band * problem.band * problem.tiles;
    const int width = smaller_of(problem.band, all - band * problem.band), tile = problem.tiles - 1 - within / width;
    const int pair = band * problem.band + within % width, first_query = tile * OWN;
    const int seen = seen_before(problem, first_query + OWN);
    return {first_query, pair % problem.heads, pair / problem.heads, (seen + STEP - 1) / STEP};
}

// ------------------------------------------------------------------------------------------------------------ producer

struct Scales {
    const float *query, *key, *value;  // [batches, heads, blocks]; fewer than 2^31
};
DEVICE int blocks_of(int rows) { return (rows + BLOCK - 1) / BLOCK; }

struct Producer {
    Address memory;
    Walk<STAGES> slot;
    Walk<1> query;

    // Waits until the next place of the ring is empty, and fetches a panel of `rows` rows and its scale into it.
    DEVICE void fetch(const TensorMap& tensor, int rows, float scale, int column, int row, int head, int batch) {
        const Address full = memory + SLOT_FULL + 8 * slot.place(), to = memory + RING + slot.place() * SLOT_BYTES;
        barrier_wait(memory + SLOT_EMPTY + 8 * slot.place(), slot.parity() ^ 1);
        store_float(memory + SCALES + 4 * slot.place(), scale);
        barrier_arrive_expecting(full, rows * ROW_BYTES);
        copy_box(to, tensor, full, column, row, head, batch);
        slot.next();
    }

    DEVICE void fetch_queries(const TensorMap& tensor, const Work& work) {
        ROLLED
        for (int worker = 0; worker < WORKERS; ++worker) {
            const Address full = memory + QUERY_FULL + 8 * worker, to = memory + worker * QUERY_BYTES;
            barrier_wait(memory + QUERY_EMPTY + 8 * worker, query.parity() ^ 1);
            barrier_arrive_expecting(full, QUERY_BYTES);
            copy_box(to, tensor, full, 0, work.first_query + worker * ROWS, work.head, work.batch);
        }
        query.next();
    }

    // Fetches all that the workers need for one piece of work, in the order of its use. The last keys come first, so
    // the first tile is the one that the mask cuts.
    DEVICE void produce(const TensorMap& query, const TensorMap& key, const TensorMap& value, const Scales& scales,
                        const Problem& problem, const Work& work) {
        if (work.visits == 0) return;
        const int head = work.head / problem.groups, last = work.visits - 1;
        const int first = (work.batch * (problem.heads / problem.groups) + head) * blocks_of(problem.keys);
        fetch(key, STEP, scales.key[first + last], 0, last * STEP, head, work.batch);
        fetch_queries(query, work);
        ROLLED
        for (int tile = last; tile >= 0; --tile) {
            if (tile > 0) fetch(key, STEP, scales.key[first + tile - 1], 0, (tile - 1) * STEP, head, work.batch);
            fetch(value, DIM, scales.value[first + tile], tile * STEP, 0, head, work.batch);
        }
    }
};

// ------------------------------------------------------------------------------------------------------------- softmax

// The state of the thread's two rows, g and g + 8 of its warp's 16 (the layout of wgmma; see Product in hopper.cuh).
struct Rows {
    float maximum[2];  // the largest score so far; all lanes of the quad hold the same number
    float total[2];    // the sum of the weights in this thread's columns
    float rescale[2];  // the factor of the last tile for earlier sums
};

// The exponent of a weight is s c + shift, for scores s whose maximum is m. A weight of 1 is held as 2^8.
DEVICE float shift_of(float maximum, float c) { return __fmaf_rn(-maximum, c, 8.0f); }

// How scores become weights: 2^(s factor + added), for each of the thread's rows.
struct Exponents {
    float factor[2], added[2];
};

// Updates the maximum of the rows by the scores of a tile. `unit` is the product of the scales of the queries and of
// the tile's keys. `visible` is the number of the tile's columns that each row sees, minus the thread's first column.
template <bool MASKED>
DEVICE Exponents exponents_of(float (&s)[STEP / 2], Rows& rows, float unit, const int (&visible)[2],
                              const Problem& problem) {
    float largest[2][4];
    UNROLL
    for (int j = 0; j < STEP / 8; ++j) {
        UNROLL
        for (int r = 0; r < 2; ++r) {
            UNROLL
            for (int i = 0; i < 2; ++i) {
                float& score = s[4 * j + 2 * r + i];
                if (SIGN != 1) score = SIGN == 0 ? 0.0f : -score;
                if (MASKED && 8 * j + i >= visible[r]) score = -INFINITY;
            }
            const float two = fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]);
            largest[r][j % 4] = j < 4 ? two : fmaxf(largest[r][j % 4], two);
        }
    }
    const float c = problem.exponent_scale;
    float base[2];
    Exponents exponents;
    bool huge[2];
    UNROLL
    for (int r = 0; r < 2; ++r) {
        const float of_tile = fmaxf(fmaxf(largest[r][0], largest[r][1]), fmaxf(largest[r][2], largest[r][3]));
        const float before = rows.maximum[r], maximum = fmaxf(before, quad_maximum(of_tile) * unit);
        rows.maximum[r] = maximum;
        // The maximum is -inf if the row has seen no key yet, or only scores of -inf. Then 0 is subtracted instead:
        // -inf - -inf would be NaN.
        base[r] = maximum == -INFINITY ? 0.0f : maximum;
        exponents.factor[r] = fminf(c * unit, LARGEST_FLOAT);
        exponents.added[r] = shift_of(base[r], c);
        huge[r] = fabsf(exponents.added[r]) > HUGE_SCALED;
        rows.rescale[r] = exp2_of(huge[r] ? (before - base[r]) * c : exponents.added[r] - shift_of(before, c));
    }
    if (__any_sync(ALL, huge[0] || huge[1])) {
        // The scores become (s unit - m) c + 8 in a huge row, and (s c + shift) 1 + 0 in another one.
        UNROLL
        for (int r = 0; r < 2; ++r) {
            const float factor = huge[r] ? unit : exponents.factor[r], added = huge[r] ? -base[r] : exponents.added[r];
            const float scale = huge[r] ? c : 1.0f, last = huge[r] ? 8.0f : 0.0f;
            UNROLL
            for (int j = 0; j < STEP / 8; ++j) {
                UNROLL
                for (int i = 0; i < 2; ++i) {
                    float& score = s[4 * j + 2 * r + i];
                    score = __fmaf_rn(__fmaf_rn(score, factor, added), scale, last);
                }
            }
            exponents.factor[r] = 1.0f;
            exponents.added[r] = 0.0f;
        }
    }
    return exponents;
}

// Turns 16 columns of scores into weights, and adds them to `sum`.
DEVICE void weigh(float* s, float (&sum)[2][2], const Exponents& exponents) {
    UNROLL
    for (int e = 0; e < 8; ++e) {
        const int r = e / 2 % 2;
        s[e] = exp2_of(__fmaf_rn(s[e], exponents.factor[r], exponents.added[r]));
        sum[r][e % 2] += s[e];
    }
}

DEVICE void add_to_totals(Rows& rows, const float (&sum)[2][2]) {
    UNROLL
    for (int r = 0; r < 2; ++r) rows.total[r] = __fmaf_rn(rows.total[r], rows.rescale[r], sum[r][0] + sum[r][1]);
}

// -------------------------------------------------------------------------------------------------------------- worker

// The thread's share of the worker's matrices.
struct Registers {
    float o[DIM / 2];      // the output [64, DIM], before the division by the sum of the weights
    float t[DIM / 2];      // P V of one tile
    float s[STEP / 2];     // the scores [64, STEP], then the weights
    unsigned p[STEP / 8];  // the rounded weights [64, STEP]: the left operand of P V
    Rows rows;
};

struct Worker {
    Address memory;
    int index;  // 0 to WORKERS - 1
    Walk<STAGES> slot;
    Walk<1> query;

    // The first of the thread's two rows among the worker's 64 (the other one is row() + 8), and the first of its two
    // columns among eight.
    static DEVICE int row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }
    static DEVICE int column() { return threadIdx.x % 4 * 2; }

    DEVICE bool first_lane() const { return threadIdx.x % 32 == 0; }
    DEVICE void wait_for_slot() const { barrier_wait(memory + SLOT_FULL + 8 * slot.place(), slot.parity()); }
    DEVICE void release(int place) const {
        if (first_lane()) barrier_arrive(memory + SLOT_EMPTY + 8 * place);
    }
    // Skips the next tile of the ring, which this worker does not need.
    DEVICE void pass_slot() {
        wait_for_slot();
        release(slot.place());
        slot.next();
    }

    // Issues s = Q K^T, with the keys at the ring's place.
    DEVICE void issue_scores(float (&s)[STEP / 2]) const {
        const Matrix q = matrix(memory + index * QUERY_BYTES), k = matrix(memory + RING + slot.place() * SLOT_BYTES);
        UNROLL
        for (int column = 0; column < DIM; column += 32)
            ProductE4m3<STEP>::shared(s, ahead(q, column), ahead(k, column), column > 0);
        products_end();
    }

    // Issues t = P V, with the values at the ring's place.
    DEVICE void issue_output(float (&t)[DIM / 2], const unsigned (&p)[STEP / 8]) const {
        const Matrix v = matrix(memory + RING + slot.place() * SLOT_BYTES);
        UNROLL
        for (int key = 0; key < STEP; key += 32) ProductE4m3<DIM>::registers(t, p + key / 8, ahead(v, key), key > 0);
        products_end();
    }

    DEVICE float scale_of_slot() const { return load_float(memory + SCALES + 4 * slot.place()); }

    // The factor of the scores of rounded numbers. Its limits keep 0 and infinite scores what they are.
    DEVICE float unit_of(float query_scale) const {
        return fminf(fmaxf(query_scale * scale_of_slot(), SMALLEST_FLOAT), LARGEST_FLOAT);
    }

    static DEVICE void rescale(float (&o)[DIM / 2], const Rows& rows) {
        // In most steps no row of the warp has a new maximum.
        if (!__any_sync(ALL, rows.rescale[0] != 1.0f || rows.rescale[1] != 1.0f)) return;
        UNROLL
        for (int e = 0; e < DIM / 2; ++e) o[e] *= rows.rescale[e / 2 % 2];
    }

    template <bool MASKED>
    static DEVICE Exponents exponents_for(Registers& x, float unit, const Problem& problem, int first_query, int tile) {
        int visible[2];
        UNROLL
        for (int r = 0; r < 2; ++r) {
            const int seen = first_query + row() + 8 * r + problem.offset + 1;
            visible[r] = (CAUSAL ? smaller_of(problem.keys, seen) : problem.keys) - tile * STEP - column();
        }
        return exponents_of<MASKED>(x.s, x.rows, unit, visible, problem);
    }

    // The weights of the last tile of keys, which is the first one that the worker sees.
    DEVICE void begin(Registers& x, float query_scale, const Problem& problem, int first_query, int tile) {
        wait_for_slot();
        products_begin();
        issue_scores(x.s);
        const float unit = unit_of(query_scale);
        products_wait<0>();
        pin(x.s);
        release(slot.place());
        slot.next();
        const Exponents exponents = exponents_for<true>(x, unit, problem, first_query, tile);
        float sum[2][2] = {};
        UNROLL
        for (int group = 0; group < GROUPS; ++group) {
            weigh(x.s + 8 * group, sum, exponents);
            pack_columns(x.p + 2 * group, x.s + 8 * group);
        }
        add_to_totals(x.rows, sum);
    }

    // One step of the pipeline. It starts with the weights p of tile + 1, adds their product with V to the output, and
    // leaves the weights of `tile`. query_scale: the scale of the worker's queries.
    //
    // The special function unit is the slowest one of a softmax. The product with V is complete after about half of it.
    // So the second half also adds the product to the output and packs the weights, which keeps the other units busy.
    // The branch in `rescale` keeps the assembler from moving the wait before the first half.
    template <bool MASKED>
    DEVICE void advance(Registers& x, float query_scale, const Problem& problem, int first_query, int tile) {
        wait_for_slot();
        pin(x.s);
        products_begin();
        issue_scores(x.s);
        const float unit = unit_of(query_scale);
        const int keys_place = slot.place();
        slot.next();
        wait_for_slot();
        pin(x.t);
        products_begin();
        issue_output(x.t, x.p);
        const float factor = scale_of_slot() * 0x1p-8f;
        products_wait<1>();  // the scores
        pin(x.s);
        release(keys_place);
        const Exponents exponents = exponents_for<MASKED>(x, unit, problem, first_query, tile);
        float sum[2][2] = {};
        UNROLL
        for (int group = 0; group < EARLY; ++group) weigh(x.s + 8 * group, sum, exponents);
        pin(x.s);
        rescale(x.o, x.rows);
        products_wait<0>();  // P V
        pin(x.t);
        release(slot.place());
        slot.next();
        const float factors[2] = {factor * x.rows.rescale[0], factor * x.rows.rescale[1]};
        UNROLL
        for (int early = 0; early < EARLY; ++early) {
            const int group = EARLY + early;
            weigh(x.s + 8 * group, sum, exponents);
            UNROLL
            for (int e = early * SHARE; e < (early + 1) * SHARE; ++e)
                x.o[e] = __fmaf_rn(x.t[e], factors[e / 2 % 2], x.o[e]);
            pack_columns(x.p + 2 * early, x.s + 8 * early);
            pack_columns(x.p + 2 * group, x.s + 8 * group);
        }
        add_to_totals(x.rows, sum);
    }

    // Adds the product of the last weights with V to the output.
    DEVICE void end(Registers& x) {
        wait_for_slot();
        pin(x.t);
        products_begin();
        issue_output(x.t, x.p);
        const float factor = scale_of_slot() * 0x1p-8f;
        products_wait<0>();
        pin(x.t);
        release(slot.place());
        slot.next();
        UNROLL
        for (int e = 0; e < DIM / 2; ++e) x.o[e] = __fmaf_rn(x.t[e], factor, x.o[e]);
    }

    // Computes and stores the output and the LSE of this worker's 64 queries of a piece of work.
    DEVICE void attend(const Problem& problem, const Work& work, const Scales& scales, const Output& out,
                       Global<float> lse) {
        const int first_query = work.first_query + index * ROWS;
        const int block = (work.batch * problem.heads + work.head) * blocks_of(problem.queries) + first_query / BLOCK;
        const float query_scale = first_query < problem.queries ? scales.query[block] : 1.0f;
        // `needed` tiles of keys are seen by some of the worker's queries, and `whole` tiles are seen by all of them
        // completely. Another worker of the block may need more tiles. These come first, and this worker skips them.
        const int seen = first_query < problem.queries ? seen_before(problem, first_query + ROWS) : 0;
        const int needed = (seen + STEP - 1) / STEP;
        const int whole = seen_before(problem, first_query + 1) / STEP;
        int tile = smaller_of(needed, work.visits) - 1;  // counted down

        Registers x;
        UNROLL
        for (int e = 0; e < DIM / 2; ++e) x.o[e] = 0.0f;
        UNROLL
        for (int r = 0; r < 2; ++r) {
            x.rows.maximum[r] = -INFINITY;
            x.rows.total[r] = 0.0f;
        }
        if (work.visits > 0) {
            barrier_wait(memory + QUERY_FULL + 8 * index, query.parity());
            int visit = 0;
            ROLLED
            for (; visit < work.visits - 1 - tile; ++visit) {
                pass_slot();
                if (visit > 0) pass_slot();
            }
            if (tile >= 0) begin(x, query_scale, problem, first_query, tile);
            if (visit > 0) pass_slot();
            ROLLED
            for (; tile > 0 && tile > whole; --tile) advance<true>(x, query_scale, problem, first_query, tile - 1);
            ROLLED
            for (; tile > 0; --tile) advance<false>(x, query_scale, problem, first_query, tile - 1);
            if (first_lane()) barrier_arrive(memory + QUERY_EMPTY + 8 * index);
            query.next();
            if (tile == 0) end(x);
        }
        store(problem, work, out, lse, first_query + row(), x.o, x.rows);
    }

    // Divides by the sums of the weights, and stores the output and the LSE. A row that sees no key has maximum -inf
    // and total 0. Its LSE is -inf, and its output is 0.
    static DEVICE void store(const Problem& problem, const Work& work, const Output& out, Global<float> lse,
                             int first_row, const float (&o)[DIM / 2], const Rows& rows) {
        UNROLL
        for (int r = 0; r < 2; ++r) {
            const int query = first_row + 8 * r;
            const bool inside = query < problem.queries;
            const float total = quad_sum(rows.total[r]), factor = total == 0.0f ? 0.0f : 256.0f / total;
            if (inside && threadIdx.x % 4 == 0) {
                const float maximum = rows.maximum[r], shift = shift_of(maximum, problem.exponent_scale);
                const long long head = static_cast<long long>(work.batch) * problem.heads + work.head;
                lse[head * problem.queries + query] =
                    fabsf(shift) <= HUGE_SCALED ? __fmaf_rn(-LOG_2, shift, logf(total))
                                                : __fmaf_rn(maximum, problem.magnitude, logf(total * 0x1p-8f));
            }
            Element* const to = out.data + work.batch * out.batch + work.head * out.head + query * out.row;
            store_row(to, o, r, factor, inside ? problem.dim : 0);
        }
    }
};

// -------------------------------------------------------------------------------------------------------------- kernel

// counter: two numbers. They are 0 before the first launch, and each launch leaves them at 0. Launches that may run at
// the same time need separate counters.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    forward(const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap key,
            const __grid_constant__ TensorMap value, const __grid_constant__ Scales scales,
            const __grid_constant__ Output out, Global<float> lse, const __grid_constant__ Problem problem,
            int* counter) {
    char* const shared = shared_memory();
    const Address memory = static_cast<Address>(__cvta_generic_to_shared(shared));
    const int warpgroup = __shfl_sync(ALL, threadIdx.x / 128, 0);
    const int count = problem.batches * problem.heads * problem.tiles;
    if (threadIdx.x == 0) {
        prefetch_map(query);
        prefetch_map(key);
        prefetch_map(value);
        for (int i = 0; i < WORKERS; ++i) {
            barrier_create(memory + QUERY_FULL + 8 * i, 1);
            barrier_create(memory + QUERY_EMPTY + 8 * i, 4);
        }
        for (int i = 0; i < STAGES; ++i) {
            barrier_create(memory + SLOT_FULL + 8 * i, 1);
            barrier_create(memory + SLOT_EMPTY + 8 * i, 4 * WORKERS);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_create(memory + MAIL_FULL + 8 * i, 1);
            barrier_create(memory + MAIL_EMPTY + 8 * i, 4 * WORKERS);
        }
        barriers_created();
    }
    __syncthreads();
    int* const mail = reinterpret_cast<int*>(shared + MAIL);

    // The producer draws the indices of the block's work from a counter and passes them to the workers, so a block that
    // finishes early does more work. An index past the end stops the block.
    if (warpgroup == 0) {
        registers_reduce<WORKERS == 2 ? 24 : 32>();
        if (threadIdx.x == 0) {
            Producer producer{memory};
            Walk<2> box;
            int index = blockIdx.x;
            ROLLED
            while (true) {
                barrier_wait(memory + MAIL_EMPTY + 8 * box.place(), box.parity() ^ 1);
                mail[box.place()] = index;
                barrier_arrive(memory + MAIL_FULL + 8 * box.place());
                box.next();
                if (index >= count) break;
                producer.produce(query, key, value, scales, problem, work_of(problem, index));
                index = gridDim.x + atomicAdd(counter, 1);
            }
            // The last block resets the counters.
            __threadfence();
            if (atomicAdd(counter + 1, 1) == gridDim.x - 1) {
                atomicExch(counter, 0);
                atomicExch(counter + 1, 0);
            }
        }
    } else {
        registers_increase<WORKERS == 2 ? 240 : 160>();
        Worker worker{again(memory), warpgroup - 1};
        Walk<2> box;
        ROLLED
        while (true) {
            barrier_wait(memory + MAIL_FULL + 8 * box.place(), box.parity());
            const int index = mail[box.place()];
            __syncwarp();
            if (worker.first_lane()) barrier_arrive(memory + MAIL_EMPTY + 8 * box.place());
            box.next();
            if (index >= count) break;
            worker.attend(problem, work_of(problem, index), scales, out, lse);
        }
    }
}
EXPORT(forward)

#endif

// FlashAttention-3, forward, in CUDA C++ for Hopper (Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao: "FlashAttention-3:
// Fast and Accurate Attention with Asynchrony and Low-precision", 2024; Algorithms 1 and 2).
//
// The sums are those of FlashAttention-2. The schedule is new: a multiprocessor has separate units for products,
// exponentials and copies, and this kernel keeps them busy at the same time.
// - One warpgroup, the producer, copies. One of its threads tells the copy engine (TMA) which tiles to fetch and does
//   nothing else. The producer returns most of its registers.
// - WORKERS warpgroups compute, 64 queries each. The scores S = Q K^T and the output O += P V are asynchronous products
//   of a warpgroup (wgmma). A worker issues the scores of the next tile of keys before O += P V of this tile. While
//   that product runs, it computes the softmax of the next tile.
// - One worker multiplies while another one computes its softmax.
// - P stays in registers: the rounded scores are the left operand of O += P V.
// - The grid has one block for each multiprocessor. A block takes one tile of queries after the other, and its producer
//   already fetches the next one.
//
//   worker:   S0 = Q K0 | softmax 0 | S1 = Q K1, O += P0 V0 | softmax 1 | S2 = Q K2, O += P1 V1 | ...
//                                      \__ softmax 1 starts when S1 is complete; O += P0 V0 runs at the same time
//
// Arithmetic. Sums are float32. P is rounded to the tensors' type for the second product. A weight is 2^(s c - m c)
// with s = q k, m the largest s of the row so far, and c = |scale| log2 e. One fma computes s c - round(m c) and rounds
// once. For s = m its value is the rounding error of m c, which is at most 2^-17 while |m c| <= 256. All weights of the
// row share this error, so it cancels in the output, and the LSE takes it out again. For a larger |m c| the row
// computes (s - m) c in two operations, so that equal scores weigh exactly 1, however large they are. Each row decides
// by its own maximum: its bits do not depend on other rows.
//
// The loader defines BF16 (or float16), DIM (64, 128 or 256; tensors may have fewer columns, and the copy engine fills
// the others with zeros), WORKERS, STEP (keys of a tile), STAGES (tiles of keys or values in shared memory), CAUSAL,
// and SIGN (of the scale).
#include "hopper.cuh"

constexpr int ROWS = 64;             // queries of a worker
constexpr int OWN = WORKERS * ROWS;  // queries of a block
constexpr int THREADS = 128 * (WORKERS + 1);
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

// Shared memory holds a tile of Q [64, DIM] for each worker. A ring of STAGES tiles [STEP, DIM] follows. K and V pass
// through it in the order of their use: K0 K1 V0 K2 V1 K3 V2 ...
constexpr int QUERY_BYTES = ROWS * DIM * 2;
constexpr int SLOT_BYTES = STEP * DIM * 2;
constexpr int RING = WORKERS * QUERY_BYTES;
constexpr int BARRIERS = RING + STAGES * SLOT_BYTES;
// Each place has two barriers. "Full" ends a phase when the copy has landed, "empty" when all readers are done.
constexpr int QUERY_FULL = BARRIERS, QUERY_EMPTY = QUERY_FULL + 8 * WORKERS;
constexpr int SLOT_FULL = QUERY_EMPTY + 8 * WORKERS, SLOT_EMPTY = SLOT_FULL + 8 * STAGES;
// Two places hold the index of the next piece of work.
constexpr int MAIL_FULL = SLOT_EMPTY + 8 * STAGES, MAIL_EMPTY = MAIL_FULL + 16;
constexpr int MAIL = MAIL_EMPTY + 16;

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

struct Producer {
    Address memory;
    Walk<STAGES> slot;
    Walk<1> query;

    // Waits until the next place of the ring is empty, and fetches a tile [STEP, DIM] of K or V into it.
    DEVICE void fetch(const TensorMap& tensor, int row, int head, int batch) {
        const Address full = memory + SLOT_FULL + 8 * slot.place(), to = memory + RING + slot.place() * SLOT_BYTES;
        barrier_wait(memory + SLOT_EMPTY + 8 * slot.place(), slot.parity() ^ 1);
        barrier_arrive_expecting(full, SLOT_BYTES);
        UNROLL
        for (int panel = 0; panel < DIM / PANEL; ++panel)
            copy_box(to + panel * STEP * ROW_BYTES, tensor, full, panel * PANEL, row, head, batch);
        slot.next();
    }

    DEVICE void fetch_queries(const TensorMap& tensor, const Work& work) {
        ROLLED
        for (int worker = 0; worker < WORKERS; ++worker) {
            const Address full = memory + QUERY_FULL + 8 * worker, to = memory + worker * QUERY_BYTES;
            barrier_wait(memory + QUERY_EMPTY + 8 * worker, query.parity() ^ 1);
            barrier_arrive_expecting(full, QUERY_BYTES);
            UNROLL
            for (int panel = 0; panel < DIM / PANEL; ++panel)
                copy_box(to + panel * ROWS * ROW_BYTES, tensor, full, panel * PANEL, work.first_query + worker * ROWS,
                         work.head, work.batch);
        }
        query.next();
    }

    // Fetches all that the workers need for one piece of work, in the order of its use. The last keys come first, so
    // the first tile is the one that the mask cuts.
    DEVICE void produce(const TensorMap& query, const TensorMap& key, const TensorMap& value, const Problem& problem,
                        const Work& work) {
        if (work.visits == 0) return;
        const int head = work.head / problem.groups, last = work.visits - 1;
        fetch(key, last * STEP, head, work.batch);
        fetch_queries(query, work);
        ROLLED
        for (int visit = 1; visit < work.visits; ++visit) {
            fetch(key, (last - visit) * STEP, head, work.batch);
            fetch(value, (last - visit + 1) * STEP, head, work.batch);
        }
        fetch(value, 0, head, work.batch);
    }
};

// ------------------------------------------------------------------------------------------------------------- softmax

// The state of the thread's two rows, g and g + 8 of its warp's 16 (the layout of wgmma; see Product in hopper.cuh).
struct Rows {
    float maximum[2];  // the largest score so far; all lanes of the quad hold the same number
    float total[2];    // the sum of the weights in this thread's columns
    float rescale[2];  // the factor of the last tile for earlier sums
};

// Turns the scores of a tile into weights. `visible` is the number of the tile's columns that each row sees, minus the
// thread's first column.
template <bool MASKED>
DEVICE void softmax(float (&s)[STEP / 2], Rows& rows, const int (&visible)[2], const Problem& problem) {
    float largest[2][2];
    UNROLL
    for (int r = 0; r < 2; ++r) largest[r][0] = largest[r][1] = rows.maximum[r];
    UNROLL
    for (int j = 0; j < STEP / 8; ++j) {
        UNROLL
        for (int r = 0; r < 2; ++r) {
            UNROLL
            for (int i = 0; i < 2; ++i) {
                float& score = s[4 * j + 2 * r + i];
                if (SIGN != 1) score = SIGN == 0 ? 0.0f : -score;
                if (MASKED && 8 * j + i >= visible[r]) score = -INFINITY;
                largest[r][i] = fmaxf(largest[r][i], score);
            }
        }
    }
    const float c = problem.exponent_scale;
    float base[2], scaled[2];
    bool huge[2];
    UNROLL
    for (int r = 0; r < 2; ++r) {
        const float maximum = quad_maximum(fmaxf(largest[r][0], largest[r][1])), before = rows.maximum[r];
        rows.maximum[r] = maximum;
        // The maximum is -inf if the row has seen no key yet, or only scores of -inf. Then 0 is subtracted instead:
        // -inf - -inf would be NaN.
        base[r] = maximum == -INFINITY ? 0.0f : maximum;
        scaled[r] = base[r] * c;
        huge[r] = fabsf(scaled[r]) > HUGE_SCALED;
        rows.rescale[r] = exp2_of(huge[r] ? (before - base[r]) * c : before * c - scaled[r]);
    }
    float sum[2][2] = {};
    if (!__any_sync(ALL, huge[0] || huge[1])) {
        UNROLL
        for (int e = 0; e < STEP / 2; ++e) {
            s[e] = exp2_of(__fmaf_rn(s[e], c, -scaled[e / 2 % 2]));
            sum[e / 2 % 2][e % 2] += s[e];
        }
    } else {
        UNROLL
        for (int e = 0; e < STEP / 2; ++e) {
            const int r = e / 2 % 2;
            s[e] = exp2_of(huge[r] ? (s[e] - base[r]) * c : __fmaf_rn(s[e], c, -scaled[r]));
            sum[r][e % 2] += s[e];
        }
    }
    UNROLL
    for (int r = 0; r < 2; ++r) rows.total[r] = __fmaf_rn(rows.total[r], rows.rescale[r], sum[r][0] + sum[r][1]);
}

// -------------------------------------------------------------------------------------------------------------- worker

// The thread's share of the worker's matrices.
struct Registers {
    float o[DIM / 2];      // the output [64, DIM], before the division by the sum of the weights
    float s[STEP / 2];     // the scores [64, STEP], then the weights
    unsigned p[STEP / 4];  // the rounded weights [64, STEP]: the left operand of P V
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
        for (int column = 0; column < DIM; column += 16) {
            const int panel = column / PANEL, bytes = column % PANEL * 2;
            const Matrix a = ahead(q, panel * ROWS * ROW_BYTES + bytes), b = ahead(k, panel * STEP * ROW_BYTES + bytes);
            Product<STEP>::template shared<0, 0>(s, a, b, column > 0);
        }
        products_end();
    }

    // Issues o += P V, with the values at the ring's place.
    DEVICE void issue_output(float (&o)[DIM / 2], const unsigned (&p)[STEP / 4]) const {
        const Matrix v = matrix(memory + RING + slot.place() * SLOT_BYTES, STEP * ROW_BYTES);
        UNROLL
        for (int key = 0; key < STEP; key += 16)
            Product<DIM>::template registers<1>(o, p + key / 4, ahead(v, key * ROW_BYTES));
        products_end();
    }

    static DEVICE void round_weights(unsigned (&p)[STEP / 4], const float (&s)[STEP / 2]) {
        UNROLL
        for (int i = 0; i < STEP / 4; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
    }

    static DEVICE void rescale(float (&o)[DIM / 2], const Rows& rows) {
        // In most steps no row of the warp has a new maximum.
        if (!__any_sync(ALL, rows.rescale[0] != 1.0f || rows.rescale[1] != 1.0f)) return;
        UNROLL
        for (int e = 0; e < DIM / 2; ++e) o[e] *= rows.rescale[e / 2 % 2];
    }

    // Turns the scores of a tile of keys into weights, for the worker's queries from first_query on.
    template <bool MASKED>
    static DEVICE void softmax_of(Registers& x, const Problem& problem, int first_query, int tile) {
        int visible[2];
        UNROLL
        for (int r = 0; r < 2; ++r) {
            const int seen = first_query + row() + 8 * r + problem.offset + 1;
            visible[r] = (CAUSAL ? smaller_of(problem.keys, seen) : problem.keys) - tile * STEP - column();
        }
        softmax<MASKED>(x.s, x.rows, visible, problem);
    }

    // One step of the pipeline. It starts with the weights p of tile + 1, adds their product with V to the output, and
    // leaves the weights of `tile`.
    template <bool MASKED>
    DEVICE void advance(Registers& x, const Problem& problem, int first_query, int tile) {
        wait_for_slot();
        pin(x.o);
        pin(x.s);
        products_begin();
        issue_scores(x.s);
        const int keys_place = slot.place();
        slot.next();
        wait_for_slot();
        products_begin();
        issue_output(x.o, x.p);
        products_wait<1>();  // the scores
        pin(x.s);
        release(keys_place);
        softmax_of<MASKED>(x, problem, first_query, tile);
        pin(x.s);
        products_wait<0>();  // the output
        pin(x.o);
        release(slot.place());
        slot.next();
        rescale(x.o, x.rows);
        round_weights(x.p, x.s);
    }

    // Computes and stores the output and the LSE of this worker's 64 queries of a piece of work.
    DEVICE void attend(const Problem& problem, const Work& work, const Output& out, Global<float> lse) {
        const int first_query = work.first_query + index * ROWS;
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
            if (tile >= 0) {
                wait_for_slot();
                products_begin();
                issue_scores(x.s);
                products_wait<0>();
                pin(x.s);
                release(slot.place());
                slot.next();
                softmax_of<true>(x, problem, first_query, tile);
                round_weights(x.p, x.s);
            }
            if (visit > 0) pass_slot();
            ROLLED
            for (; tile > 0 && tile > whole; --tile) advance<true>(x, problem, first_query, tile - 1);
            ROLLED
            for (; tile > 0; --tile) advance<false>(x, problem, first_query, tile - 1);
            if (first_lane()) barrier_arrive(memory + QUERY_EMPTY + 8 * index);
            query.next();
            if (tile == 0) {
                wait_for_slot();
                pin(x.o);
                products_begin();
                issue_output(x.o, x.p);
                products_wait<0>();
                pin(x.o);
                release(slot.place());
                slot.next();
            }
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
            const float total = quad_sum(rows.total[r]), factor = total == 0.0f ? 0.0f : 1.0f / total;
            if (inside && threadIdx.x % 4 == 0) {
                const float scaled = rows.maximum[r] * problem.exponent_scale;
                float logarithm = logf(total);
                // The weights of a row that is not huge are relative to round(m c). The LSE is relative to m c.
                const float residue = __fmaf_rn(rows.maximum[r], problem.exponent_scale, -scaled);
                if (fabsf(scaled) <= HUGE_SCALED) logarithm -= 0.693147180559945f * residue;
                const long long head = static_cast<long long>(work.batch) * problem.heads + work.head;
                lse[head * problem.queries + query] = __fmaf_rn(rows.maximum[r], problem.magnitude, logarithm);
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
            const __grid_constant__ TensorMap value, const __grid_constant__ Output out, Global<float> lse,
            const __grid_constant__ Problem problem, int* counter) {
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
                producer.produce(query, key, value, problem, work_of(problem, index));
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
        Worker worker{memory, warpgroup - 1};
        Walk<2> box;
        ROLLED
        while (true) {
            barrier_wait(memory + MAIL_FULL + 8 * box.place(), box.parity());
            const int index = mail[box.place()];
            __syncwarp();
            if (worker.first_lane()) barrier_arrive(memory + MAIL_EMPTY + 8 * box.place());
            box.next();
            if (index >= count) break;
            worker.attend(problem, work_of(problem, index), out, lse);
        }
    }
}
EXPORT(forward)

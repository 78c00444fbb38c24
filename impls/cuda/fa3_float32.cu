// Attention in float32 on the tensor cores of Hopper, forward. The algorithm is FlashAttention-3 (fa3.cu), and each
// product of float32 numbers is made of six products of bfloat16 parts (parts.cuh).
//
// What changes against fa3.cu:
// - The kernel of fa3_float32_split.cu writes the parts of Q, K and V to scratch. The copy engine fetches them from
//   there. P is split in registers.
// - A place of the ring holds one part of a tile of K or V. The parts come in the order of their use, 3 2 1, and each
//   is released as soon as its products are complete.
// - A tensor core cuts its sums off. So each tile of P V is summed afresh and added to the output in float32, by the
//   fma that rescales the output. The error of a tile's sum does not grow with the number of tiles.
// - A product takes longer than a softmax with its split. The softmax of a worker is hidden under the products of the
//   others: the workers take turns, one product each.
//
//   worker 0:   S = Q K^T   | softmax, split  | T = P V     | O = c O + T | S = Q K^T ...
//   worker 1:                 S = Q K^T       | softmax ...  | T = P V    | O = c O + T ...
//
// Arithmetic. The sums of a tensor core have at most max(DIM, STEP) terms. Softmax, sums of weights and the sum over
// tiles are in float32. A weight is 2^(s c - m c) with s = q k, m the largest s of the row so far, and c = |scale| log2
// e. One fma computes s c - round(m c) and rounds once. All weights of the row share the rounding error of m c, so it
// cancels in the output, and the LSE takes it out again. For a large |m c| the row computes (s - m) c in two
// operations, so that equal scores weigh exactly 1, however large they are.
//
// The loader defines DIM (64 or 128; tensors may have fewer columns, and the copy engine fills the others with zeros),
// WORKERS, STEP (keys of a tile), STAGES (parts of tiles in shared memory), CAUSAL, and SIGN (of the scale).
#include "parts.cuh"

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

// ------------------------------------------------------------------------------------------------------- shared memory

// Shared memory holds the three parts of Q [64, DIM] for each worker. A ring of STAGES parts of tiles [STEP, DIM]
// follows. K and V pass through it in the order of their use: K0 V0 K1 V1 ..., of each the parts 3 2 1.
constexpr int QUERY_BYTES = ROWS * DIM * 2;
constexpr int SLOT_BYTES = STEP * DIM * 2;
constexpr int RING = WORKERS * PARTS * QUERY_BYTES;
constexpr int BARRIERS = RING + STAGES * SLOT_BYTES;
// Each place has two barriers. "Full" ends a phase when the copy has landed, "empty" when all readers are done.
constexpr int QUERY_FULL = BARRIERS, QUERY_EMPTY = QUERY_FULL + 8 * WORKERS;
constexpr int SLOT_FULL = QUERY_EMPTY + 8 * WORKERS, SLOT_EMPTY = SLOT_FULL + 8 * STAGES;
constexpr int TURN = SLOT_EMPTY + 8 * STAGES;  // of each worker: a phase ends when it may issue its next product
// Two places hold the index of the next piece of work.
constexpr int MAIL_FULL = TURN + 8 * WORKERS, MAIL_EMPTY = MAIL_FULL + 16;
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

    // Fetches the parts of a tile [STEP, DIM] of K or V, each when the next place of the ring is empty.
    DEVICE void fetch(const TensorMap& tensor, const Problem& problem, int row, int head, int batch) {
        ROLLED
        for (int part = PARTS - 1; part >= 0; --part) {
            const Address full = memory + SLOT_FULL + 8 * slot.place(), to = memory + RING + slot.place() * SLOT_BYTES;
            barrier_wait(memory + SLOT_EMPTY + 8 * slot.place(), slot.parity() ^ 1);
            barrier_arrive_expecting(full, SLOT_BYTES);
            UNROLL
            for (int panel = 0; panel < DIM / PANEL; ++panel)
                copy_box(to + panel * STEP * ROW_BYTES, tensor, full, panel * PANEL, row, head,
                         part * problem.batches + batch);
            slot.next();
        }
    }

    DEVICE void fetch_queries(const TensorMap& tensor, const Problem& problem, const Work& work) {
        ROLLED
        for (int worker = 0; worker < WORKERS; ++worker) {
            const Address full = memory + QUERY_FULL + 8 * worker;
            barrier_wait(memory + QUERY_EMPTY + 8 * worker, query.parity() ^ 1);
            barrier_arrive_expecting(full, PARTS * QUERY_BYTES);
            ROLLED
            for (int part = 0; part < PARTS; ++part) {
                const Address to = memory + (worker * PARTS + part) * QUERY_BYTES;
                UNROLL
                for (int panel = 0; panel < DIM / PANEL; ++panel)
                    copy_box(to + panel * ROWS * ROW_BYTES, tensor, full, panel * PANEL,
                             work.first_query + worker * ROWS, work.head, part * problem.batches + work.batch);
            }
        }
        query.next();
    }

    // Fetches all that the workers need for one piece of work, in the order of its use. The last keys come first, so
    // the first tile is the one that the mask cuts.
    DEVICE void produce(const TensorMap& query, const TensorMap& key, const TensorMap& value, const Problem& problem,
                        const Work& work) {
        const int head = work.head / problem.groups;
        fetch_queries(query, problem, work);
        ROLLED
        for (int tile = work.visits - 1; tile >= 0; --tile) {
            fetch(key, problem, tile * STEP, head, work.batch);
            fetch(value, problem, tile * STEP, head, work.batch);
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

struct Worker {
    Address memory;
    int index;  // 0 to WORKERS - 1
    Walk<STAGES> slot;
    unsigned turn;  // the parity of the next turn; worker 0 begins, so its first wait returns at once

    DEVICE Worker(Address memory, int index) : memory(memory), index(index), turn(index == 0) {}

    // The first of the thread's two rows among the worker's 64 (the other one is row() + 8), and the first of its two
    // columns among eight.
    static DEVICE int row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }
    static DEVICE int column() { return threadIdx.x % 4 * 2; }

    DEVICE bool first_lane() const { return threadIdx.x % 32 == 0; }
    DEVICE void release(int place) const {
        if (first_lane()) barrier_arrive(memory + SLOT_EMPTY + 8 * place);
    }
    DEVICE void take_turn() {
        barrier_wait(memory + TURN + 8 * index, turn);
        turn ^= 1;
    }
    DEVICE void pass_turn() const {
        if (first_lane()) barrier_arrive(memory + TURN + 8 * (index + 1 == WORKERS ? 0 : index + 1));
    }

    // Waits for the next part in the ring, and returns its place.
    DEVICE int next_place() {
        const int place = slot.place();
        barrier_wait(memory + SLOT_FULL + 8 * place, slot.parity());
        slot.next();
        return place;
    }
    // Waits for the three groups of products, and releases the parts one by one.
    DEVICE void finish_parts(const int (&places)[PARTS]) const {
        products_wait<2>();
        release(places[2]);
        products_wait<1>();
        release(places[1]);
        products_wait<0>();
        release(places[0]);
    }
    // Skips a tile of K or V, which this worker does not need.
    DEVICE void skip() {
        take_turn();
        pass_turn();
        ROLLED
        for (int part = 0; part < PARTS; ++part) {
            barrier_wait(memory + SLOT_FULL + 8 * slot.place(), slot.parity());
            release(slot.place());
            slot.next();
        }
    }

    // s = Q K^T
    DEVICE void score(float (&s)[STEP / 2]) {
        memory = again(memory);
        const Address queries = memory + index * PARTS * QUERY_BYTES;
        int places[PARTS];
        take_turn();
        UNROLL
        for (int right = PARTS - 1; right >= 0; --right) {
            places[right] = next_place();
            const Matrix k = matrix(memory + RING + places[right] * SLOT_BYTES);
            products_begin();
            UNROLL
            for (int left = PARTS - 1 - right; left >= 0; --left) {
                const Matrix q = matrix(queries + left * QUERY_BYTES);
                UNROLL
                for (int column = 0; column < DIM; column += 16) {
                    const int panel = column / PANEL, bytes = column % PANEL * 2;
                    const Matrix a = ahead(q, panel * ROWS * ROW_BYTES + bytes);
                    const Matrix b = ahead(k, panel * STEP * ROW_BYTES + bytes);
                    Product<STEP>::template shared<0, 0>(s, a, b, right < PARTS - 1 || column > 0);
                }
            }
            products_end();
        }
        pass_turn();
        finish_parts(places);
        pin(s);
    }

    // o = c o + P V, with the factors c of the rows
    DEVICE void add_values(float (&o)[DIM / 2], const Rows& rows, const unsigned (&p)[PARTS][STEP / 4]) {
        memory = again(memory);
        int places[PARTS];
        float t[DIM / 2];  // P V
        clear(t);
        pin(t);
        take_turn();
        UNROLL
        for (int right = PARTS - 1; right >= 0; --right) {
            places[right] = next_place();
            const Matrix v = matrix(memory + RING + places[right] * SLOT_BYTES, STEP * ROW_BYTES);
            products_begin();
            UNROLL
            for (int left = PARTS - 1 - right; left >= 0; --left) {
                UNROLL
                for (int key = 0; key < STEP; key += 16)
                    Product<DIM>::template registers<1>(t, p[left] + key / 4, ahead(v, key * ROW_BYTES));
            }
            products_end();
        }
        pass_turn();
        finish_parts(places);
        pin(t);
        UNROLL
        for (int e = 0; e < DIM / 2; ++e) o[e] = __fmaf_rn(o[e], rows.rescale[e / 2 % 2], t[e]);
    }

    // Turns the scores of a tile of keys into weights, for the worker's queries from first_query on.
    template <bool MASKED>
    static DEVICE void softmax_of(float (&s)[STEP / 2], Rows& rows, const Problem& problem, int first_query, int tile) {
        int visible[2];
        UNROLL
        for (int r = 0; r < 2; ++r) {
            const int seen = first_query + row() + 8 * r + problem.offset + 1;
            visible[r] = (CAUSAL ? smaller_of(problem.keys, seen) : problem.keys) - tile * STEP - column();
        }
        softmax<MASKED>(s, rows, visible, problem);
    }

    // Computes and stores the output and the LSE of this worker's 64 queries of a piece of work.
    DEVICE void attend(const Problem& problem, const Work& work, unsigned parity, const View& out, Global<float> lse) {
        const int first_query = work.first_query + index * ROWS;
        // `needed` tiles of keys are seen by some of the worker's queries, and `whole` tiles are seen by all of them
        // completely. Another worker of the block may need more tiles. These come first, and this worker skips them.
        const int seen = first_query < problem.queries ? seen_before(problem, first_query + ROWS) : 0;
        const int needed = (seen + STEP - 1) / STEP;
        const int whole = seen_before(problem, first_query + 1) / STEP;
        float o[DIM / 2];  // the output [64, DIM], before the division by the sum of the weights
        Rows rows;
        clear(o);
        UNROLL
        for (int r = 0; r < 2; ++r) {
            rows.maximum[r] = -INFINITY;
            rows.total[r] = 0.0f;
        }
        barrier_wait(memory + QUERY_FULL + 8 * index, parity);
        int tile = work.visits - 1;
        ROLLED
        for (; tile >= needed; --tile) {
            skip();
            skip();
        }
        ROLLED
        for (; tile >= 0; --tile) {
            unsigned p[PARTS][STEP / 4];  // the parts of the weights: left operands of P V
            {
                float s[STEP / 2];  // the scores [64, STEP], then the weights
                score(s);
                if (tile < whole)
                    softmax_of<false>(s, rows, problem, first_query, tile);
                else
                    softmax_of<true>(s, rows, problem, first_query, tile);
                split_all(p, s);
            }
            add_values(o, rows, p);
        }
        if (first_lane()) barrier_arrive(memory + QUERY_EMPTY + 8 * index);
        store(problem, work, out, lse, first_query + row(), o, rows);
    }

    // Divides by the sums of the weights, and stores the output and the LSE. A row that sees no key has maximum -inf
    // and total 0. Its LSE is -inf, and its output is 0.
    static DEVICE void store(const Problem& problem, const Work& work, const View& out, Global<float> lse,
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
            float* const to = out.data + work.batch * out.batch + work.head * out.head + query * out.row;
            store_float_row(to, o, r, factor, inside ? problem.dim : 0);
        }
    }
};

// -------------------------------------------------------------------------------------------------------------- kernel

// counter: two numbers. They are 0 before the first launch, and each launch leaves them at 0. Launches that may run at
// the same time need separate counters.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    forward(const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap key,
            const __grid_constant__ TensorMap value, const __grid_constant__ View out, Global<float> lse,
            const __grid_constant__ Problem problem, int* counter) {
    char* const shared = shared_memory();
    const Address memory = static_cast<Address>(__cvta_generic_to_shared(shared));
    const int warpgroup = __shfl_sync(ALL, threadIdx.x / 128, 0);
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
        for (int i = 0; i < WORKERS; ++i) barrier_create(memory + TURN + 8 * i, 4);
        for (int i = 0; i < 2; ++i) {
            barrier_create(memory + MAIL_FULL + 8 * i, 1);
            barrier_create(memory + MAIL_EMPTY + 8 * i, 4 * WORKERS);
        }
        barriers_created();
    }
    __syncthreads();
    int* const mail = reinterpret_cast<int*>(shared + MAIL);

    // The producer draws the indices of the block's work from a counter and passes them to the workers, so a block that
    // finishes early does more work. A negative index stops the block.
    if (warpgroup == 0) {
        registers_reduce<WORKERS == 2 ? 40 : 56>();
        if (threadIdx.x == 0) {
            const int count = problem.batches * problem.heads * problem.tiles;
            Producer producer{memory};
            Walk<2> box;
            int index = blockIdx.x;
            ROLLED
            while (true) {
                barrier_wait(memory + MAIL_EMPTY + 8 * box.place(), box.parity() ^ 1);
                mail[box.place()] = index < count ? index : -1;
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
        registers_increase<WORKERS == 2 ? 232 : 152>();
        Worker worker(memory, warpgroup - 1);
        ROLLED
        for (int piece = 0;; ++piece) {
            const Address box = memory + piece % 2 * 8;
            barrier_wait(box + MAIL_FULL, piece / 2 % 2);
            const int index = mail[piece % 2];
            __syncwarp();
            if (worker.first_lane()) barrier_arrive(box + MAIL_EMPTY);
            if (index < 0) break;
            worker.attend(problem, work_of(problem, index), piece % 2, out, lse);
        }
    }
}
EXPORT(forward)

// Attention in float32 on the tensor cores of Hopper, backward. The algorithm is that of fa3_backward.cu, and each
// product of float32 numbers is made of six products of bfloat16 parts (parts.cuh). It consists of three kernels:
//   prepare   computes delta = rowsum(dO o O), copies the LSE beside it, pads both to whole tiles, and sets the sums of
//             dQ to 0
//   backward  computes dK and dV, and adds up dQ
//   finish    multiplies dQ by the scale and stores it in its usual order
//
// The parts of Q, K, V and dO are in scratch, where the kernel of fa3_float32_split.cu has written them. A block of
// `backward` owns 64 keys of a head and loops over the queries. Scores are transposed here, [keys, queries]. Its two
// workers have different work, so that each of them holds one gradient and the fresh sum of one tile:
//   values   S^T = K Q^T, P^T, dV += P^T dO                    keys   dP^T = V dO^T, dS^T, dK += dS^T Q
// The first gives P^T to the second through shared memory. The second writes the parts of dS to shared memory, and each
// worker computes half of dQ^T = K^T dS^T. Atomic additions add it to the sums in device memory. Their order varies, so
// the last bits of dQ vary from run to run. dK and dV have the same bits in every run.
//
//   values, tile i:   S(i), dQ(i - 1) issued | P, parts of P | dQ(i - 1) added to memory | dV += dV(i)
//   keys, tile i:    dP(i), dQ(i - 1) issued | dS, parts of dS | dQ(i - 1) added to memory | dK += dK(i)
// dQ is one tile late: it multiplies while both workers compute P, dS and their parts.
//
// The loader defines DIM (64 or 128), STEP (queries of a tile), STAGES (parts of tiles of Q and dO in shared memory),
// CAUSAL, and the kernel: PREPARE, BACKWARD or FINISH.
#include "parts.cuh"

constexpr int OWN = 64;  // keys of a block
// Columns of dQ^T [DIM, STEP] that a worker computes, in 64 rows: half of the queries at head dim 64, else all.
constexpr int PART = DIM == 64 ? STEP / 2 : STEP;
constexpr int TILE = STEP * DIM;  // numbers in a tile of dQ

struct Problem {
    int batches, heads, groups;  // groups: heads that share a head of keys
    int queries, keys, dim;
    int offset;                        // with CAUSAL, query i sees key j if j <= i + offset
    int query_tiles, key_tiles, band;  // tiles of STEP queries and of OWN keys in a head; key heads in a band
    float scale;
};

// The statistics of a tile of queries are STEP numbers L (the LSE), then STEP numbers delta. A row that sees no key, or
// that is past the end, has L = inf, so its weights are 0.
// The sums of dQ for a tile of queries have the shape [part][PART / 8][thread][4], in the order in which the threads of
// the workers hold them. The four numbers are dQ^T[row, column], [row, column + 1], [row + 8, column] and [row + 8,
// column + 1]. Row and column are those of the thread (Product in hopper.cuh). A part is 64 rows, or at head dim 64
// half of the columns.

#ifdef PREPARE

// A warp takes one query at a time.
extern "C" __global__ void __launch_bounds__(256)
    prepare(const __grid_constant__ View out, const __grid_constant__ View dout, Global<const float> lse,
            Global<float> statistics, Global<float4> sums, const __grid_constant__ Problem problem) {
    const int tile = blockIdx.x % problem.query_tiles, pair = blockIdx.x / problem.query_tiles;
    const int head = pair % problem.heads, batch = pair / problem.heads;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Global<float> to = statistics + static_cast<long long>(blockIdx.x) * 2 * STEP;
    const Global<float4> clear = sums + static_cast<long long>(blockIdx.x) * (TILE / 4);
    for (int i = threadIdx.x; i < TILE / 4; i += 256) clear[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int row = warp; row < STEP; row += 8) {
        const int query = tile * STEP + row;
        const bool inside = query < problem.queries;
        float sum = 0.0f;
        if (inside) {
            const float* const o = out.data + batch * out.batch + head * out.head + query * out.row;
            const float* const d = dout.data + batch * dout.batch + head * dout.head + query * dout.row;
            for (int column = lane; column < problem.dim; column += 32)
                sum = __fmaf_rn(load_number(o + column * out.column), load_number(d + column * dout.column), sum);
        }
        UNROLL
        for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(ALL, sum, apart);
        if (lane == 0) {
            const float l = inside ? lse[static_cast<long long>(pair) * problem.queries + query] : -INFINITY;
            to[row] = l == -INFINITY ? INFINITY : l;
            to[STEP + row] = sum;
        }
    }
}
EXPORT(prepare)

#endif

#ifdef FINISH

// Stores scale times the sums of a tile of dQ. They pass through shared memory [STEP, DIM + 4], whose rows are padded
// by 4 numbers.
extern "C" __global__ void __launch_bounds__(256)
    finish(Global<const float4> sums, const __grid_constant__ View dquery, const __grid_constant__ Problem problem) {
    __shared__ __align__(16) float scaled[STEP][DIM + 4];
    const int tile = blockIdx.x % problem.query_tiles, pair = blockIdx.x / problem.query_tiles;
    const int head = pair % problem.heads, batch = pair / problem.heads;
    const Global<const float4> from = sums + static_cast<long long>(blockIdx.x) * (TILE / 4);
    for (int i = threadIdx.x; i < TILE / 4; i += 256) {
        const float4 four = from[i];
        const int thread = i % 128, j = i / 128 % (PART / 8), part = i / 128 / (PART / 8);
        const int row = thread / 32 * 16 + thread % 32 / 4 + (DIM == 64 ? 0 : 64 * part);
        const int column = 8 * j + thread % 4 * 2 + (DIM == 64 ? PART * part : 0);
        scaled[column][row] = four.x * problem.scale;
        scaled[column + 1][row] = four.y * problem.scale;
        scaled[column][row + 8] = four.z * problem.scale;
        scaled[column + 1][row + 8] = four.w * problem.scale;
    }
    __syncthreads();
    float* const to = dquery.data + batch * dquery.batch + head * dquery.head;
    for (int i = threadIdx.x; i < TILE / 4; i += 256) {
        const int row = i / (DIM / 4), column = i % (DIM / 4) * 4, query = tile * STEP + row;
        if (query >= problem.queries || column >= problem.dim) continue;
        const float4 four = *reinterpret_cast<const float4*>(&scaled[row][column]);
        store_numbers(to + query * dquery.row + column, four);
    }
}
EXPORT(finish)

#endif

#ifdef BACKWARD

constexpr int WORKERS = 2;
constexpr int VALUES_WORKER = 0;  // computes dV; the other worker computes dK
constexpr int PANELS = DIM / PANEL;
constexpr int THREADS = 128 * (WORKERS + 1);

// ------------------------------------------------------------------------------------------------------- shared memory

// Shared memory holds the parts of K and V [64, DIM]; a ring of parts of tiles of Q and dO [STEP, DIM], in the order
// Q3 dO3 Q2 dO2 Q1 dO1; the parts of dS [STEP, 64]; P^T, as its threads hold it; and the statistics of two tiles.
constexpr int OWN_BYTES = OWN * DIM * 2, SLOT_BYTES = STEP * DIM * 2, STATISTICS_BYTES = STEP * 8;
constexpr int SCORE_BYTES = STEP * ROW_BYTES, WEIGHT_BYTES = STEP * OWN * 4;
constexpr int KEYS = 0, VALUES = KEYS + PARTS * OWN_BYTES, RING = VALUES + PARTS * OWN_BYTES;
constexpr int SCORES = RING + STAGES * SLOT_BYTES, WEIGHTS = SCORES + PARTS * SCORE_BYTES;
constexpr int STATISTICS = WEIGHTS + WEIGHT_BYTES;
// "Full" ends a phase when the data is there, "empty" when all readers are done with it.
constexpr int OWN_FULL = STATISTICS + 2 * STATISTICS_BYTES;
constexpr int SLOT_FULL = OWN_FULL + 8, SLOT_EMPTY = SLOT_FULL + 8 * STAGES;
constexpr int STATISTICS_FULL = SLOT_EMPTY + 8 * STAGES, STATISTICS_EMPTY = STATISTICS_FULL + 16;
constexpr int SCORE_FULL = STATISTICS_EMPTY + 16, SCORE_EMPTY = SCORE_FULL + 8;
constexpr int WEIGHT_FULL = SCORE_EMPTY + 8, WEIGHT_EMPTY = WEIGHT_FULL + 8;

// The work of a block: OWN keys of one key head. For each of the heads that share it, the block loops over the `visits`
// tiles of queries from `start` on, which see some of these keys.
struct Work {
    int first_key, head, batch, start, visits;
};

// The order of work. A band is a set of key heads whose queries and sums fit in the L2 cache together. Within a band
// the first keys come first, because most queries see them if the mask is causal.
DEVICE Work work_of(const Problem& problem, int index) {
    const int heads = problem.heads / problem.groups, all = problem.batches * heads;
    const int tiles = problem.band * problem.key_tiles, band = index / tiles, within = index % tiles;
    const int width = smaller_of(problem.band, all - band * problem.band);
    const int pair = band * problem.band + within % width, first_key = within / width * OWN;
    const int start = CAUSAL ? larger_of(first_key - problem.offset, 0) / STEP : 0;
    return {first_key, pair % heads, pair / heads, start, larger_of(problem.query_tiles - start, 0)};
}

// ------------------------------------------------------------------------------------------------------------ producer

struct Producer {
    Address memory;
    Walk<STAGES> slot;
    Walk<2> statistic;

    // Fetches a tile [LENGTH, DIM].
    template <int LENGTH>
    static DEVICE void fetch(Address to, const TensorMap& tensor, Address full, int row, int head, int batch) {
        UNROLL
        for (int panel = 0; panel < PANELS; ++panel)
            copy_box(to + panel * LENGTH * ROW_BYTES, tensor, full, panel * PANEL, row, head, batch);
    }
    DEVICE void fetch_step(const TensorMap& tensor, int row, int head, int batch) {
        const Address full = memory + SLOT_FULL + 8 * slot.place();
        barrier_wait(memory + SLOT_EMPTY + 8 * slot.place(), slot.parity() ^ 1);
        barrier_arrive_expecting(full, SLOT_BYTES);
        fetch<STEP>(memory + RING + slot.place() * SLOT_BYTES, tensor, full, row, head, batch);
        slot.next();
    }

    DEVICE void produce(const TensorMap& query, const TensorMap& key, const TensorMap& value, const TensorMap& dout,
                        const float* statistics, const Problem& problem, const Work& work) {
        if (work.visits == 0) return;
        barrier_arrive_expecting(memory + OWN_FULL, 2 * PARTS * OWN_BYTES);
        ROLLED
        for (int part = 0; part < PARTS; ++part) {
            const int batch = part * problem.batches + work.batch;
            const Address full = memory + OWN_FULL;
            fetch<OWN>(memory + KEYS + part * OWN_BYTES, key, full, work.first_key, work.head, batch);
            fetch<OWN>(memory + VALUES + part * OWN_BYTES, value, full, work.first_key, work.head, batch);
        }
        ROLLED
        for (int group = 0; group < problem.groups; ++group) {
            const int head = work.head * problem.groups + group;
            ROLLED
            for (int tile = work.start; tile < problem.query_tiles; ++tile) {
                const Address full = memory + STATISTICS_FULL + 8 * statistic.place();
                barrier_wait(memory + STATISTICS_EMPTY + 8 * statistic.place(), statistic.parity() ^ 1);
                barrier_arrive_expecting(full, STATISTICS_BYTES);
                const long long at = (static_cast<long long>(work.batch) * problem.heads + head) * problem.query_tiles;
                copy_bytes(memory + STATISTICS + statistic.place() * STATISTICS_BYTES,
                           statistics + (at + tile) * 2 * STEP, STATISTICS_BYTES, full);
                statistic.next();
                ROLLED
                for (int part = PARTS - 1; part >= 0; --part) {
                    const int batch = part * problem.batches + work.batch;
                    fetch_step(query, tile * STEP, head, batch);
                    fetch_step(dout, tile * STEP, head, batch);
                }
            }
        }
    }
};

// -------------------------------------------------------------------------------------------------------------- worker

struct Worker {
    Address memory;
    int index;
    Walk<STAGES> slot;  // the first part of the tile
    Walk<2> statistic;
    unsigned parity;  // of the tile, in the barriers that have one place

    static DEVICE int row(int thread) { return thread % 128 / 32 * 16 + thread % 32 / 4; }
    static DEVICE int column(int thread) { return thread % 4 * 2; }
    DEVICE void arrive(int barrier) const {
        if (thread_again() % 32 == 0) barrier_arrive(memory + barrier);
    }

    // Waits for a part of the tile, and returns its place. The two tensors of the tile alternate in the ring.
    DEVICE int next_place(Walk<STAGES>& at) const {
        const int place = at.place();
        barrier_wait(memory + SLOT_FULL + 8 * place, at.parity());
        at.next();
        at.next();
        return place;
    }
    // Releases the parts of the tile of one tensor.
    DEVICE void release(const int (&places)[PARTS]) const {
        UNROLL
        for (int part = PARTS - 1; part >= 0; --part) arrive(SLOT_EMPTY + 8 * places[part]);
    }

    // Issues s = own step^T: S^T = K Q^T or dP^T = V dO^T.
    DEVICE void issue_scores(float (&s)[STEP / 2], int (&places)[PARTS]) const {
        const Address own = memory + (index == VALUES_WORKER ? KEYS : VALUES);
        Walk<STAGES> at = slot;
        if (index != VALUES_WORKER) at.next();
        UNROLL
        for (int right = PARTS - 1; right >= 0; --right) {
            places[right] = next_place(at);
            const Matrix b = matrix(memory + RING + places[right] * SLOT_BYTES);
            products_begin();
            UNROLL
            for (int left = PARTS - 1 - right; left >= 0; --left) {
                const Matrix a = matrix(own + left * OWN_BYTES);
                UNROLL
                for (int column = 0; column < DIM; column += 16) {
                    const int panel = column / PANEL, bytes = column % PANEL * 2;
                    Product<STEP>::template shared<0, 0>(s, ahead(a, panel * OWN * ROW_BYTES + bytes),
                                                         ahead(b, panel * STEP * ROW_BYTES + bytes),
                                                         right < PARTS - 1 || column > 0);
                }
            }
        }
        products_end();
    }
    // sums += p step: dV += P^T dO or dK += dS^T Q
    DEVICE void add_sums(float (&sums)[DIM / 2], const unsigned (&p)[PARTS][STEP / 4]) {
        int places[PARTS];
        float t[DIM / 2];
        clear(t);
        pin(t);
        Walk<STAGES> at = slot;
        if (index == VALUES_WORKER) at.next();
        UNROLL
        for (int right = PARTS - 1; right >= 0; --right) {
            places[right] = next_place(at);
            const Matrix b = matrix(memory + RING + places[right] * SLOT_BYTES, STEP * ROW_BYTES);
            products_begin();
            UNROLL
            for (int left = PARTS - 1 - right; left >= 0; --left) {
                UNROLL
                for (int q = 0; q < STEP; q += 16)
                    Product<DIM>::template registers<1>(t, p[left] + q / 4, ahead(b, q * ROW_BYTES));
            }
            products_end();
        }
        products_wait<2>();
        arrive(SLOT_EMPTY + 8 * places[2]);
        products_wait<1>();
        arrive(SLOT_EMPTY + 8 * places[1]);
        products_wait<0>();
        arrive(SLOT_EMPTY + 8 * places[0]);
        pin(t);
        UNROLL
        for (int e = 0; e < DIM / 2; ++e) sums[e] += t[e];
    }
    // Waits for dS of the previous tile, and issues this worker's half of dQ^T = K^T dS^T of that tile.
    DEVICE void issue_last_dquery(float (&dq)[PART / 2]) const {
        barrier_wait(memory + SCORE_FULL, parity ^ 1);
        const Address keys = memory + KEYS + (DIM == 64 ? 0 : index * OWN * ROW_BYTES);
        const Address scores = memory + SCORES + (DIM == 64 ? index * PART * ROW_BYTES : 0);
        products_begin();
        UNROLL
        for (int right = PARTS - 1; right >= 0; --right) {
            UNROLL
            for (int left = PARTS - 1 - right; left >= 0; --left) {
                const Matrix a = matrix(keys + left * OWN_BYTES), b = matrix(scores + right * SCORE_BYTES);
                UNROLL
                for (int key = 0; key < OWN; key += 16)
                    Product<PART>::template shared<1, 0>(dq, ahead(a, key * ROW_BYTES), ahead(b, key * 2),
                                                         right < PARTS - 1 || key > 0);
            }
        }
        products_end();
    }
    // Waits for dQ, and adds it to the sums in device memory.
    DEVICE void add_dquery(float (&dq)[PART / 2], float* sums) const {
        products_wait<0>();
        pin(dq);
        arrive(SCORE_EMPTY);
        float* const to = sums + (index * (PART / 8) * 128 + thread_again() % 128) * 4;
        UNROLL
        for (int j = 0; j < PART / 8; ++j) add_to_memory(to + j * 512, dq + 4 * j);
    }

    // Writes the parts of dS^T, transposed, to shared memory [STEP, 64].
    DEVICE void leave(const unsigned (&ds)[PARTS][STEP / 4]) const {
        const int thread = thread_again(), lane = thread % 32, matrix = lane / 8;
        // Register i of a lane's four: keys 8 (i % 2) to 8 (i % 2) + 7 of the warp's 16, queries 8 (i / 2) to 8 (i / 2)
        // + 7 of 16. The piece of a row are 8 keys.
        const int query = matrix / 2 * 8 + lane % 8, piece = thread % 128 / 32 * 2 + matrix % 2;
        UNROLL
        for (int part = 0; part < PARTS; ++part) {
            UNROLL
            for (int q = 0; q < STEP; q += 16)
                store_transposed(
                    memory + SCORES + part * SCORE_BYTES + (q + query) * ROW_BYTES + ((piece ^ query % 8) << 4),
                    ds[part] + q / 4);
        }
        shared_written();
        __syncwarp();
    }

    // P = exp(scale s - L). No weight is above 1. For huge scores the rounding error of L would make it larger (half an
    // ulp of 1e10 is 512), so the exponent is at most 0.
    static DEVICE float weight_of(float score, float lse, const Problem& problem) {
        return exp2_of(smaller_or_nan(__fmaf_rn(score, problem.scale, -lse), 0.0f) * 1.44269504088896340736f);
    }

    // Sets the elements to 0 that the mask hides, and those of keys past the end.
    DEVICE void hide(float (&s)[STEP / 2], const Problem& problem, int first_key, int tile) const {
        const int thread = thread_again(), first_column = column(thread);
        UNROLL
        for (int r = 0; r < 2; ++r) {
            const int key = first_key + row(thread) + 8 * r;
            // The number of the tile's queries that do not see the key, minus the thread's first column.
            int hidden = CAUSAL ? key - problem.offset - tile * STEP - first_column : 0;
            if (key >= problem.keys) hidden = STEP;
            UNROLL
            for (int e = 2 * r; e < STEP / 2; e += e % 2 ? 3 : 1) {
                if (e / 4 * 8 + e % 2 < hidden) s[e] = 0.0f;
            }
        }
    }

    // Turns S^T into P^T, and gives it to the other worker.
    DEVICE void weigh(float (&s)[STEP / 2], const Problem& problem, int first_key, int tile, bool masked) const {
        const int thread = thread_again();
        const Address lses = memory + STATISTICS + statistic.place() * STATISTICS_BYTES + 4 * column(thread);
        UNROLL
        for (int j = 0; j < STEP / 8; ++j) {
            const float2 lse = load_two(lses + 32 * j);
            UNROLL
            for (int e = 0; e < 4; ++e) s[4 * j + e] = weight_of(s[4 * j + e], e % 2 ? lse.y : lse.x, problem);
        }
        if (masked) hide(s, problem, first_key, tile);
        barrier_wait(memory + WEIGHT_EMPTY, parity ^ 1);
        UNROLL
        for (int j = 0; j < STEP / 8; ++j) store_four(memory + WEIGHTS + (j * 128 + thread % 128) * 16, s + 4 * j);
        __syncwarp();
        arrive(WEIGHT_FULL);
    }
    // Turns dP^T into dS^T.
    DEVICE void differ(float (&dp)[STEP / 2], const Problem& problem, int first_key, int tile, bool masked) const {
        const int thread = thread_again();
        const Address deltas = memory + STATISTICS + statistic.place() * STATISTICS_BYTES + 4 * (STEP + column(thread));
        barrier_wait(memory + WEIGHT_FULL, parity);
        UNROLL
        for (int j = 0; j < STEP / 8; ++j) {
            const float2 delta = load_two(deltas + 32 * j);
            const float4 p = load_four(memory + WEIGHTS + (j * 128 + thread % 128) * 16);
            dp[4 * j] = p.x * (dp[4 * j] - delta.x);
            dp[4 * j + 1] = p.y * (dp[4 * j + 1] - delta.y);
            dp[4 * j + 2] = p.z * (dp[4 * j + 2] - delta.x);
            dp[4 * j + 3] = p.w * (dp[4 * j + 3] - delta.y);
        }
        __syncwarp();
        arrive(WEIGHT_EMPTY);
        if (masked) hide(dp, problem, first_key, tile);  // dP may be infinite, and 0 inf is not 0
    }

    // Processes one tile of queries, and adds dQ of the previous tile to `sums_before`.
    template <bool FIRST>
    DEVICE void advance(float (&sums)[DIM / 2], const Problem& problem, int first_key, int tile, bool masked,
                        float* sums_before) {
        memory = again(memory);
        float s[STEP / 2], dq[PART / 2];
        unsigned p[PARTS][STEP / 4];
        int places[PARTS];
        issue_scores(s, places);
        if constexpr (FIRST) {
            products_wait<0>();
        } else {
            issue_last_dquery(dq);
            products_wait<1>();  // the scores
        }
        pin(s);
        release(places);
        barrier_wait(memory + STATISTICS_FULL + 8 * statistic.place(), statistic.parity());
        if (index == VALUES_WORKER)
            weigh(s, problem, first_key, tile, masked);
        else
            differ(s, problem, first_key, tile, masked);
        arrive(STATISTICS_EMPTY + 8 * statistic.place());
        statistic.next();
        split_all(p, s);
        if constexpr (!FIRST) add_dquery(dq, sums_before);
        if (index != VALUES_WORKER) {
            if constexpr (!FIRST) barrier_wait(memory + SCORE_EMPTY, parity ^ 1);
            leave(p);
            arrive(SCORE_FULL);
        }
        add_sums(sums, p);
        UNROLL
        for (int i = 0; i < 2 * PARTS; ++i) slot.next();
        parity ^= 1;
    }

    DEVICE void attend(const Problem& problem, const Work& work, const View& dkey, const View& dvalue,
                       float* dqueries) {
        float sums[DIM / 2];  // dV or dK [64, DIM]
        clear(sums);
        if (work.visits > 0) {
            barrier_wait(memory + OWN_FULL, 0);
            // Tiles of queries before `cut` need a mask. These are all tiles if some of the block's keys are past the
            // end.
            const int all_see = CAUSAL ? larger_of(work.first_key + OWN - 1 - problem.offset, 0) : 0;
            const int cut = work.first_key + OWN > problem.keys ? problem.query_tiles : (all_see + STEP - 1) / STEP;
            int tile = work.start;
            const int first_head = work.batch * problem.heads + work.head * problem.groups;
            int position = first_head * problem.query_tiles + tile;  // of the tile among all tiles
            advance<true>(sums, problem, work.first_key, tile, tile < cut, dqueries);
            ROLLED
            for (int visit = problem.groups * work.visits - 1; visit > 0; --visit) {
                float* const at = dqueries + static_cast<long long>(position) * TILE;
                ++position;
                if (++tile == problem.query_tiles) {
                    tile = work.start;
                    position += work.start;
                }
                advance<false>(sums, problem, work.first_key, tile, tile < cut, at);
            }
            float dq[PART / 2];
            issue_last_dquery(dq);
            add_dquery(dq, dqueries + static_cast<long long>(position) * TILE);
        }
        const View& out = index == VALUES_WORKER ? dvalue : dkey;
        const float factor = index == VALUES_WORKER ? 1.0f : problem.scale;
        UNROLL
        for (int r = 0; r < 2; ++r) {
            const int key = work.first_key + row(thread_again()) + 8 * r;
            float* const to = out.data + work.batch * out.batch + work.head * out.head + key * out.row;
            store_float_row(to, sums, r, factor, key < problem.keys ? problem.dim : 0);
        }
    }
};

// -------------------------------------------------------------------------------------------------------------- kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    backward(const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap key,
             const __grid_constant__ TensorMap value, const __grid_constant__ TensorMap dout, const float* statistics,
             float* sums, const __grid_constant__ View dkey, const __grid_constant__ View dvalue,
             const __grid_constant__ Problem problem) {
    char* const shared = shared_memory();
    const Address memory = static_cast<Address>(__cvta_generic_to_shared(shared));
    const int warpgroup = __shfl_sync(ALL, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        barrier_create(memory + OWN_FULL, 1);
        for (int i = 0; i < STAGES; ++i) {
            barrier_create(memory + SLOT_FULL + 8 * i, 1);
            barrier_create(memory + SLOT_EMPTY + 8 * i, 4 * WORKERS);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_create(memory + STATISTICS_FULL + 8 * i, 1);
            barrier_create(memory + STATISTICS_EMPTY + 8 * i, 4 * WORKERS);
        }
        barrier_create(memory + SCORE_FULL, 4);
        barrier_create(memory + SCORE_EMPTY, 4 * WORKERS);
        barrier_create(memory + WEIGHT_FULL, 4);
        barrier_create(memory + WEIGHT_EMPTY, 4);
        barriers_created();
    }
    __syncthreads();
    // Each piece of work has a block. The longest come first, and the hardware gives the next block to the first free
    // multiprocessor.
    const Work work = work_of(problem, blockIdx.x);
    if (warpgroup == 0) {
        registers_reduce<40>();
        if (threadIdx.x == 0) Producer{memory}.produce(query, key, value, dout, statistics, problem, work);
    } else {
        registers_increase<232>();
        Worker{memory, warpgroup - 1}.attend(problem, work, dkey, dvalue, sums);
    }
}
EXPORT(backward)

#endif

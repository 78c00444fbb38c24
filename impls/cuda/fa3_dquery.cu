// FlashAttention-3, backward: dQ by a kernel of its own, in CUDA C++ for Hopper. `backward` of fa3_backward.cu then
// computes only dK and dV. S and dP are computed twice, so the backward makes 7 products instead of 5. But no two
// blocks add to the same number. The order of every sum is fixed, and dQ has the same bits in every run.
//
// The kernel resembles the forward (fa3.cu). A block owns 128 queries of a head and loops over the keys. Each of its
// two workers has 64 of the queries. With P = exp(S - L) and dS = P o (dP - delta):
//   S = Q K^T   dP = dO V^T   dQ += dS K
// The LSE L is known, so there is no maximum to find. The registers of dP become those of dS, the left operand of dS K.
// That product is one tile late, and runs under the exponentials of the next tile:
//
//   worker, tile i:   S(i), dP(i), dQ += dS(i - 1) K(i - 1) issued | P(i) | dS(i)
//
// The loader defines BF16, DIM (64, 128 or 256), STEP (keys of a tile), KEY_STAGES and VALUE_STAGES (tiles of K and of
// V in shared memory), PREPARED (queries of a tile of `prepare`), and CAUSAL.
#include "hopper.cuh"

constexpr int WORKERS = 2;
constexpr int ROWS = 64;             // queries of a worker
constexpr int OWN = WORKERS * ROWS;  // queries of a block
constexpr int PANELS = DIM / PANEL;
constexpr int THREADS = 128 * (WORKERS + 1);

struct Problem {
    int batches, heads, groups;  // groups: heads that share a head of keys
    int queries, keys, dim;
    int offset;                        // with CAUSAL, query i sees key j if j <= i + offset
    int query_tiles, key_tiles, band;  // tiles of OWN queries and of STEP keys in a head; heads in a band
    float scale;
};

struct View {
    Element* data;
    long long batch, head, row;  // strides in elements; the columns are contiguous
};

// ------------------------------------------------------------------------------------------------------- shared memory

// Shared memory holds Q and dO [OWN, DIM], and rings of K and of V [STEP, DIM]. A tile of K stays for one step longer
// than a tile of V.
constexpr int OWN_BYTES = OWN * DIM * 2, STEP_BYTES = STEP * DIM * 2;
constexpr int QUERIES = 0, DOUTS = QUERIES + OWN_BYTES, KEYS = DOUTS + OWN_BYTES;
constexpr int VALUES = KEYS + KEY_STAGES * STEP_BYTES;
// "Full" ends a phase when the copy has landed, "empty" when all workers are done with the place.
constexpr int QUERY_FULL = VALUES + VALUE_STAGES * STEP_BYTES, DOUT_FULL = QUERY_FULL + 8;
constexpr int KEY_FULL = DOUT_FULL + 8, KEY_EMPTY = KEY_FULL + 8 * KEY_STAGES;
constexpr int VALUE_FULL = KEY_EMPTY + 8 * KEY_STAGES, VALUE_EMPTY = VALUE_FULL + 8 * VALUE_STAGES;

// -------------------------------------------------------------------------------------------------------------- places

// The work of a block: OWN queries of one head, and the number of tiles of keys that any of them sees.
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
    const int all = problem.batches * problem.heads, tiles = problem.query_tiles;
    const int band = index / (problem.band * tiles), within = index - band * problem.band * tiles;
    const int width = smaller_of(problem.band, all - band * problem.band);
    const int pair = band * problem.band + within % width, first_query = (tiles - 1 - within / width) * OWN;
    const int seen = seen_before(problem, first_query + OWN);
    return {first_query, pair % problem.heads, pair / problem.heads, (seen + STEP - 1) / STEP};
}

// ------------------------------------------------------------------------------------------------------------ producer

struct Producer {
    Address memory;
    Walk<KEY_STAGES> key;
    Walk<VALUE_STAGES> value;

    // Fetches a tile [LENGTH, DIM].
    template <int LENGTH>
    DEVICE void fetch(int to, const TensorMap& tensor, int full, int row, int head, int batch) const {
        barrier_arrive_expecting(memory + full, LENGTH * DIM * 2);
        UNROLL
        for (int panel = 0; panel < PANELS; ++panel)
            copy_box(memory + to + panel * LENGTH * ROW_BYTES, tensor, memory + full, panel * PANEL, row, head, batch);
    }

    // Fetches all that the workers need, in the order of its use. The last keys come first, so the first tile is the
    // one that the mask cuts.
    DEVICE void produce(const TensorMap& query, const TensorMap& keys, const TensorMap& values, const TensorMap& dout,
                        const Problem& problem, const Work& work) {
        const int head = work.head / problem.groups;
        ROLLED
        for (int tile = work.visits - 1; tile >= 0; --tile) {
            const bool first = tile == work.visits - 1;
            if (first) fetch<OWN>(QUERIES, query, QUERY_FULL, work.first_query, work.head, work.batch);
            barrier_wait(memory + KEY_EMPTY + 8 * key.place(), key.parity() ^ 1);
            fetch<STEP>(KEYS + key.place() * STEP_BYTES, keys, KEY_FULL + 8 * key.place(), tile * STEP, head,
                        work.batch);
            key.next();
            if (first) fetch<OWN>(DOUTS, dout, DOUT_FULL, work.first_query, work.head, work.batch);
            barrier_wait(memory + VALUE_EMPTY + 8 * value.place(), value.parity() ^ 1);
            fetch<STEP>(VALUES + value.place() * STEP_BYTES, values, VALUE_FULL + 8 * value.place(), tile * STEP, head,
                        work.batch);
            value.next();
        }
    }
};

// -------------------------------------------------------------------------------------------------------------- worker

// The thread's share of the worker's matrices.
struct Registers {
    float dq[DIM / 2];       // [64, DIM]
    float s[STEP / 2];       // the scores [64, STEP], then the weights
    float dp[STEP / 2];      // dP [64, STEP], then dS
    unsigned ds[STEP / 4];   // the rounded dS of the previous tile: the left operand of dS K
    float lse[2], delta[2];  // of the thread's two rows
};

struct Worker {
    Address memory;
    int index;  // 0 to WORKERS - 1
    Walk<KEY_STAGES> key;
    Walk<VALUE_STAGES> value;
    int before = 0;  // the place of the previous tile of keys

    // The first of the thread's two rows among the worker's 64 (the other one is row() + 8), and the first of its two
    // columns among eight.
    static DEVICE int row() { return thread_again() % 128 / 32 * 16 + thread_again() % 32 / 4; }
    static DEVICE int column() { return thread_again() % 4 * 2; }

    DEVICE void release(int empty) const {
        if (thread_again() % 32 == 0) barrier_arrive(memory + empty);
    }

    // Issues s = own step^T, with the worker's 64 rows of Q or dO, and the tile's rows of K or V.
    DEVICE void issue_scores(float (&s)[STEP / 2], int own, int step) const {
        const Matrix a = matrix(memory + own + index * ROWS * ROW_BYTES), b = matrix(memory + step);
        UNROLL
        for (int column = 0; column < DIM; column += 16) {
            const int panel = column / PANEL, bytes = column % PANEL * 2;
            const Matrix left = ahead(a, panel * OWN * ROW_BYTES + bytes);
            const Matrix right = ahead(b, panel * STEP * ROW_BYTES + bytes);
            Product<STEP>::template shared<0, 0>(s, left, right, column > 0);
        }
        products_end();
    }
    // Issues dq += dS K of the previous tile.
    DEVICE void issue_dquery(float (&dq)[DIM / 2], const unsigned (&ds)[STEP / 4]) const {
        const Matrix k = matrix(memory + KEYS + before * STEP_BYTES, STEP * ROW_BYTES);
        UNROLL
        for (int row = 0; row < STEP; row += 16)
            Product<DIM>::template registers<1>(dq, ds + row / 4, ahead(k, row * ROW_BYTES));
        products_end();
    }

    // P = exp(scale s - L), as in fa3_backward.cu.
    static DEVICE float weight_of(float score, float lse, const Problem& problem) {
        return exp2_of(smaller_or_nan(__fmaf_rn(score, problem.scale, -lse), 0.0f) * 1.44269504088896340736f);
    }

    // Sets the elements to 0 that the mask hides, and those of keys past the end.
    static DEVICE void hide(float (&s)[STEP / 2], const Problem& problem, int first_query, int tile) {
        UNROLL
        for (int r = 0; r < 2; ++r) {
            const int seen = first_query + row() + 8 * r + problem.offset + 1;
            // The number of the tile's columns that the row sees, minus the thread's first column.
            const int visible = (CAUSAL ? smaller_of(problem.keys, seen) : problem.keys) - tile * STEP - column();
            UNROLL
            for (int e = 2 * r; e < STEP / 2; e += e % 2 ? 3 : 1) {
                if (e / 4 * 8 + e % 2 >= visible) s[e] = 0.0f;
            }
        }
    }

    // Processes one tile of keys. It starts with dS of the previous tile, adds its product with K to dQ, and leaves dS
    // of this tile. FIRST: there is no previous tile.
    template <bool FIRST>
    DEVICE void advance(Registers& x, const Problem& problem, int first_query, int tile, bool masked) {
        memory = again(memory);
        barrier_wait(memory + KEY_FULL + 8 * key.place(), key.parity());
        pin(x.dq);
        products_begin();
        issue_scores(x.s, QUERIES, KEYS + key.place() * STEP_BYTES);
        barrier_wait(memory + VALUE_FULL + 8 * value.place(), value.parity());
        products_begin();
        issue_scores(x.dp, DOUTS, VALUES + value.place() * STEP_BYTES);
        if constexpr (!FIRST) {
            products_begin();
            issue_dquery(x.dq, x.ds);
        }
        products_wait<FIRST ? 1 : 2>();  // the scores
        pin(x.s);
        UNROLL
        for (int e = 0; e < STEP / 2; ++e) x.s[e] = weight_of(x.s[e], x.lse[e / 2 % 2], problem);
        if (masked) hide(x.s, problem, first_query, tile);
        pin(x.s);
        products_wait<FIRST ? 0 : 1>();  // dP
        pin(x.dp);
        release(VALUE_EMPTY + 8 * value.place());
        UNROLL
        for (int e = 0; e < STEP / 2; ++e) x.dp[e] = x.s[e] * (x.dp[e] - x.delta[e / 2 % 2]);
        if (masked) hide(x.dp, problem, first_query, tile);  // dP may be infinite, and 0 inf is not 0
        pin(x.dp);
        if constexpr (!FIRST) {
            products_wait<0>();  // dQ
            pin(x.dq);
            release(KEY_EMPTY + 8 * before);
        }
        UNROLL
        for (int i = 0; i < STEP / 4; ++i) x.ds[i] = pack(x.dp[2 * i], x.dp[2 * i + 1]);
        before = key.place();
        key.next();
        value.next();
    }

    // Reads L and delta of the thread's rows. fa3_backward.cu describes the statistics. A row past the end has L = inf.
    static DEVICE void read_statistics(Registers& x, const Problem& problem, const Work& work, int first_query,
                                       Global<const float> statistics) {
        const long long pair = static_cast<long long>(work.batch) * problem.heads + work.head;
        const int tiles = (problem.queries + PREPARED - 1) / PREPARED;
        UNROLL
        for (int r = 0; r < 2; ++r) {
            const int query = first_query + row() + 8 * r, within = query % PREPARED;
            const bool inside = query < problem.queries;
            const Global<const float> from = statistics + (pair * tiles + query / PREPARED) * 2 * PREPARED;
            x.lse[r] = inside ? from[within] : INFINITY;
            x.delta[r] = inside ? from[PREPARED + within] : 0.0f;
        }
    }

    // Computes and stores dQ of the worker's 64 queries.
    DEVICE void attend(const Problem& problem, const Work& work, Global<const float> statistics, const View& dquery) {
        const int first_query = work.first_query + index * ROWS;
        const int whole = seen_before(problem, first_query + 1) / STEP;  // tiles of keys that all queries see
        Registers x;
        UNROLL
        for (int e = 0; e < DIM / 2; ++e) x.dq[e] = 0.0f;
        if (work.visits > 0) {
            read_statistics(x, problem, work, first_query, statistics);
            barrier_wait(memory + QUERY_FULL, 0);
            barrier_wait(memory + DOUT_FULL, 0);
            int tile = work.visits - 1;
            advance<true>(x, problem, first_query, tile, tile >= whole);
            ROLLED
            while (--tile >= 0) advance<false>(x, problem, first_query, tile, tile >= whole);
            products_begin();
            issue_dquery(x.dq, x.ds);
            products_wait<0>();
            pin(x.dq);
        }
        UNROLL
        for (int r = 0; r < 2; ++r) {
            const int query = first_query + row() + 8 * r;
            Element* const to = dquery.data + work.batch * dquery.batch + work.head * dquery.head + query * dquery.row;
            store_row(to, x.dq, r, problem.scale, query < problem.queries ? problem.dim : 0);
        }
    }
};

// -------------------------------------------------------------------------------------------------------------- kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    dquery(const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap key,
           const __grid_constant__ TensorMap value, const __grid_constant__ TensorMap dout,
           Global<const float> statistics, const __grid_constant__ View gradient,
           const __grid_constant__ Problem problem) {
    char* const shared = shared_memory();
    const Address memory = static_cast<Address>(__cvta_generic_to_shared(shared));
    const int warpgroup = __shfl_sync(ALL, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        barrier_create(memory + QUERY_FULL, 1);
        barrier_create(memory + DOUT_FULL, 1);
        for (int i = 0; i < KEY_STAGES; ++i) {
            barrier_create(memory + KEY_FULL + 8 * i, 1);
            barrier_create(memory + KEY_EMPTY + 8 * i, 4 * WORKERS);
        }
        for (int i = 0; i < VALUE_STAGES; ++i) {
            barrier_create(memory + VALUE_FULL + 8 * i, 1);
            barrier_create(memory + VALUE_EMPTY + 8 * i, 4 * WORKERS);
        }
        barriers_created();
    }
    __syncthreads();
    // Each piece of work has a block. The longest come first, and the hardware gives the next block to the first free
    // multiprocessor.
    const Work work = work_of(problem, blockIdx.x);
    if (warpgroup == 0) {
        registers_reduce<24>();
        if (threadIdx.x == 0) Producer{memory}.produce(query, key, value, dout, problem, work);
    } else {
        registers_increase<240>();
        Worker{memory, warpgroup - 1}.attend(problem, work, statistics, gradient);
    }
}
EXPORT(dquery)

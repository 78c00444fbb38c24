// FlashAttention-3, backward, in CUDA C++ for Hopper. It consists of three kernels:
//   prepare   computes delta = rowsum(dO o O), copies the LSE beside it, pads both to whole tiles, and sets the sums of
//             dQ to 0
//   backward  computes dK and dV, and adds up dQ in float32
//   finish    rounds dQ and stores it in its usual order
// If ATOMIC is 0, `backward` computes only dK and dV, and the kernel of fa3_dquery.cu takes the place of `finish`.
//
// A block of `backward` owns 128 keys of a head and loops over the queries. Each of its two workers has 64 of the keys.
// Scores are transposed here, [keys, queries]. With P = exp(S - L) and dS = P o (dP - delta):
//   S^T = K Q^T   dP^T = V dO^T   dV += P^T dO   dK += dS^T Q   dQ^T = K^T dS^T
// The registers of S^T and dP^T become those of P^T and dS^T, which are left operands of the next products. The sum of
// dQ runs over keys, so over both workers. They write dS^T to shared memory, and each worker computes half of the tile
// of dQ. Atomic additions add it to the sums in device memory. Their order varies, so the last bits of dQ vary from run
// to run. dK and dV have the same bits in every run.
//
//   worker, tile i:   dQ(i - 1), S(i) issued | dQ(i - 1) added to memory | dP(i) issued | P | dS | dV(i), dK(i) issued
// dQ is one tile late. So neither worker waits for the other one, and one multiplies while the other computes P and dS.
//
// At head dim 256 (WIDE) the sums of 64 keys do not fit in the registers of a warpgroup. There a block owns 64 keys.
// Each worker computes the scores of half of the tile's queries, and both write P^T and dS^T to shared memory. Then
// each worker computes half of the columns of dV and dK. ATOMIC is 0.
//
// The loader defines BF16, DIM (64, 128 or 256), STEP (queries of a tile), STAGES (tiles of Q and of dO in shared
// memory), ATOMIC, CAUSAL, and the kernel: PREPARE, BACKWARD or FINISH.
#include "hopper.cuh"

constexpr int ROWS = 64;  // keys of a worker
constexpr bool WIDE = DIM == 256;
// Columns of dQ^T [DIM, STEP] that a worker computes, 64 rows at a time: half of the queries at head dim 64, else all.
constexpr int PART = DIM == 64 ? STEP / 2 : STEP;
constexpr int TILE = STEP * DIM;  // numbers in a tile of dQ
static_assert(!(WIDE && ATOMIC), "head dim 256 has a kernel of its own for dQ");

struct Problem {
    int batches, heads, groups;  // groups: heads that share a head of keys
    int queries, keys, dim;
    int offset;                        // with CAUSAL, query i sees key j if j <= i + offset
    int query_tiles, key_tiles, band;  // tiles of STEP queries and of OWN keys in a head; key heads in a band
    float scale;
};

struct View {
    Element* data;
    long long batch, head, row;  // strides in elements; the columns are contiguous
};

// The statistics of a tile of queries are STEP numbers L (the LSE), then STEP numbers delta. A row that sees no key, or
// that is past the end, has L = inf, so its weights are 0.
// The sums of dQ for a tile of queries have the shape [part][PART / 8][thread][4], in the order in which the threads of
// the workers hold them. The four numbers are dQ^T[row, column], [row, column + 1], [row + 8, column] and [row + 8,
// column + 1]. Row and column are those of the thread (Product in hopper.cuh). A part is 64 rows, or at head dim 64
// half of the columns.

#ifdef PREPARE

extern "C" __global__ void __launch_bounds__(256)
    prepare(const __grid_constant__ View out, const __grid_constant__ View dout, Global<const float> lse,
            Global<float> statistics, Global<float4> sums, const __grid_constant__ Problem problem) {
    const int tile = blockIdx.x % problem.query_tiles, pair = blockIdx.x / problem.query_tiles;
    const int head = pair % problem.heads, batch = pair / problem.heads;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Global<float> to = statistics + static_cast<long long>(blockIdx.x) * 2 * STEP;
    const Global<float4> clear = sums + static_cast<long long>(blockIdx.x) * (TILE / 4);
    for (int i = threadIdx.x; ATOMIC && i < TILE / 4; i += 256) clear[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const Element* const o = out.data + batch * out.batch + head * out.head;
    const Element* const d = dout.data + batch * dout.batch + head * dout.head;
    // A warp takes eight rows at a time, with four lanes for each. A lane reads eight columns at once.
    for (int base = warp * 8; base < STEP; base += 64) {
        const int row = base + lane / 4, query = tile * STEP + row;
        if (row >= STEP) continue;
        float sum = 0.0f;
        if (query < problem.queries) {
            UNROLL
            for (int part = 0; part < DIM / 32; ++part) {
                const int column = 32 * part + 8 * (lane % 4);
                if (column >= problem.dim) continue;
                const uint4 a = load_eight(o + query * out.row + column);
                const uint4 b = load_eight(d + query * dout.row + column);
                const unsigned as[4] = {a.x, a.y, a.z, a.w}, bs[4] = {b.x, b.y, b.z, b.w};
                UNROLL
                for (int i = 0; i < 4; ++i) {
                    sum = __fmaf_rn(low_of(as[i]), low_of(bs[i]), sum);
                    sum = __fmaf_rn(high_of(as[i]), high_of(bs[i]), sum);
                }
            }
        }
        sum += __shfl_xor_sync(ALL, sum, 1);
        sum += __shfl_xor_sync(ALL, sum, 2);
        if (lane % 4 == 0) {
            const bool inside = query < problem.queries;
            const float l = inside ? lse[static_cast<long long>(pair) * problem.queries + query] : -INFINITY;
            to[row] = l == -INFINITY ? INFINITY : l;
            to[STEP + row] = sum;
        }
    }
}
EXPORT(prepare)

#endif

#ifdef FINISH

// Rounds scale times the sums of a tile of dQ. They pass through shared memory [STEP, DIM + 8], whose rows are padded
// by 8 numbers.
extern "C" __global__ void __launch_bounds__(256)
    finish(Global<const float4> sums, const __grid_constant__ View dquery, const __grid_constant__ Problem problem) {
    __shared__ __align__(16) unsigned short rounded[STEP][DIM + 8];
    const int tile = blockIdx.x % problem.query_tiles, pair = blockIdx.x / problem.query_tiles;
    const int head = pair % problem.heads, batch = pair / problem.heads;
    const Global<const float4> from = sums + static_cast<long long>(blockIdx.x) * (TILE / 4);
    for (int i = threadIdx.x; i < TILE / 4; i += 256) {
        const float4 four = from[i];
        const int thread = i % 128, j = i / 128 % (PART / 8), part = i / 128 / (PART / 8);
        const int row = thread / 32 * 16 + thread % 32 / 4 + (DIM == 64 ? 0 : ROWS * part);
        const int column = 8 * j + thread % 4 * 2 + (DIM == 64 ? PART * part : 0);
        const unsigned low = pack(four.x * problem.scale, four.y * problem.scale);
        const unsigned high = pack(four.z * problem.scale, four.w * problem.scale);
        rounded[column][row] = low & 0xffff;
        rounded[column + 1][row] = low >> 16;
        rounded[column][row + 8] = high & 0xffff;
        rounded[column + 1][row + 8] = high >> 16;
    }
    __syncthreads();
    Element* const to = dquery.data + batch * dquery.batch + head * dquery.head;
    for (int i = threadIdx.x; i < TILE / 8; i += 256) {
        const int row = i / (DIM / 8), column = i % (DIM / 8) * 8, query = tile * STEP + row;
        if (query >= problem.queries || column >= problem.dim) continue;
        const uint4 eight = *reinterpret_cast<const uint4*>(&rounded[row][column]);
        store_eight(to + query * dquery.row + column, eight);
    }
}
EXPORT(finish)

#endif

#ifdef BACKWARD

constexpr int WORKERS = 2;
constexpr int OWN = WIDE ? ROWS : WORKERS * ROWS;  // keys of a block
constexpr int WIDTH = WIDE ? DIM / 2 : DIM;        // columns of dK and dV that a worker sums
constexpr int COLUMNS = WIDE ? STEP / 2 : STEP;    // queries whose scores a worker computes
constexpr int PANELS = DIM / PANEL;
constexpr int THREADS = 128 * (WORKERS + 1);

// ------------------------------------------------------------------------------------------------------- shared memory

// Shared memory holds K and V [OWN, DIM]; rings of Q and of dO [STEP, DIM]; if the workers exchange scores, two places
// for dS^T [OWN, STEP] in panels of 64 queries (WIDE: for P^T and dS^T); and a ring of the statistics of the queries.
constexpr int OWN_BYTES = OWN * DIM * 2, STEP_BYTES = STEP * DIM * 2, STATISTICS_BYTES = STEP * 8;
constexpr int SCORE_PANELS = (STEP + PANEL - 1) / PANEL;
constexpr int SCORE_BYTES = OWN * ROW_BYTES * SCORE_PANELS * (WIDE ? 2 : ATOMIC);
constexpr int KEYS = 0, VALUES = KEYS + OWN_BYTES, QUERIES = VALUES + OWN_BYTES;
constexpr int DOUTS = QUERIES + STAGES * STEP_BYTES, SCORES = DOUTS + STAGES * STEP_BYTES;
constexpr int STATISTICS = SCORES + 2 * SCORE_BYTES;
// Each place has two barriers. "Full" ends a phase when the copy has landed, "empty" when both workers are done with
// it.
constexpr int OWN_FULL = STATISTICS + STAGES * STATISTICS_BYTES;
constexpr int QUERY_FULL = OWN_FULL + 8, QUERY_EMPTY = QUERY_FULL + 8 * STAGES;
constexpr int DOUT_FULL = QUERY_EMPTY + 8 * STAGES, DOUT_EMPTY = DOUT_FULL + 8 * STAGES;
constexpr int SCORE_FULL = DOUT_EMPTY + 8 * STAGES;

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

    // Fetches a tile [LENGTH, DIM].
    template <int LENGTH>
    static DEVICE void fetch(Address to, const TensorMap& tensor, Address full, int row, int head, int batch) {
        UNROLL
        for (int panel = 0; panel < PANELS; ++panel)
            copy_box(to + panel * LENGTH * ROW_BYTES, tensor, full, panel * PANEL, row, head, batch);
    }

    // Fetches a tile of queries: Q, the statistics, and dO.
    DEVICE void fetch_step(const TensorMap& query, const TensorMap& dout, const float* statistics,
                           const Problem& problem, int tile, int head, int batch) {
        const Address query_full = memory + QUERY_FULL + 8 * slot.place();
        const Address dout_full = memory + DOUT_FULL + 8 * slot.place();
        barrier_wait(memory + QUERY_EMPTY + 8 * slot.place(), slot.parity() ^ 1);
        barrier_arrive_expecting(query_full, STEP_BYTES + STATISTICS_BYTES);
        fetch<STEP>(memory + QUERIES + slot.place() * STEP_BYTES, query, query_full, tile * STEP, head, batch);
        const long long at = (static_cast<long long>(batch) * problem.heads + head) * problem.query_tiles + tile;
        copy_bytes(memory + STATISTICS + slot.place() * STATISTICS_BYTES, statistics + at * 2 * STEP, STATISTICS_BYTES,
                   query_full);
        barrier_wait(memory + DOUT_EMPTY + 8 * slot.place(), slot.parity() ^ 1);
        barrier_arrive_expecting(dout_full, STEP_BYTES);
        fetch<STEP>(memory + DOUTS + slot.place() * STEP_BYTES, dout, dout_full, tile * STEP, head, batch);
        slot.next();
    }

    DEVICE void produce(const TensorMap& query, const TensorMap& key, const TensorMap& value, const TensorMap& dout,
                        const float* statistics, const Problem& problem, const Work& work) {
        if (work.visits == 0) return;
        ROLLED
        for (int group = 0; group < problem.groups; ++group) {
            const int head = work.head * problem.groups + group;
            ROLLED
            for (int visit = 0; visit < work.visits; ++visit) {
                fetch_step(query, dout, statistics, problem, work.start + visit, head, work.batch);
                if (group + visit > 0) continue;
                barrier_arrive_expecting(memory + OWN_FULL, 2 * OWN_BYTES);
                fetch<OWN>(memory + KEYS, key, memory + OWN_FULL, work.first_key, work.head, work.batch);
                fetch<OWN>(memory + VALUES, value, memory + OWN_FULL, work.first_key, work.head, work.batch);
            }
        }
    }
};

// -------------------------------------------------------------------------------------------------------------- worker

struct Registers {
    float dk[WIDTH / 2], dv[WIDTH / 2];  // [64, WIDTH]
};

struct Worker {
    Address memory;
    int index;
    Walk<STAGES> query, dout;
    Walk<2> score;

    static DEVICE int row(int thread) { return thread % 128 / 32 * 16 + thread % 32 / 4; }
    static DEVICE int column(int thread) { return thread % 4 * 2; }
    DEVICE bool first_lane() const { return thread_again() % 32 == 0; }
    DEVICE void arrive(int barrier) const {
        if (first_lane()) barrier_arrive(memory + barrier);
    }

    // Issues s = own step^T, with the worker's 64 rows of K or V and the tile's rows of Q or dO. WIDE: with all 64 rows
    // of K or V and the worker's half of the tile's rows.
    DEVICE void issue_scores(float (&s)[COLUMNS / 2], int own, int step) const {
        const int first = index * (WIDE ? COLUMNS : ROWS) * ROW_BYTES;
        const Matrix a = matrix(memory + own + (WIDE ? 0 : first)), b = matrix(memory + step + (WIDE ? first : 0));
        UNROLL
        for (int column = 0; column < DIM; column += 16) {
            const int panel = column / PANEL, bytes = column % PANEL * 2;
            const Matrix left = ahead(a, panel * OWN * ROW_BYTES + bytes);
            const Matrix right = ahead(b, panel * STEP * ROW_BYTES + bytes);
            Product<COLUMNS>::template shared<0, 0>(s, left, right, column > 0);
        }
        products_end();
    }
    // Issues sums += p step, with P^T or dS^T [64, STEP] and the tile's rows of dO or Q [STEP, DIM].
    static DEVICE void issue_sums(float (&sums)[WIDTH / 2], const unsigned (&p)[COLUMNS / 4], Address step) {
        const Matrix b = matrix(step, STEP * ROW_BYTES);
        UNROLL
        for (int q = 0; q < STEP; q += 16)
            Product<WIDTH>::template registers<1>(sums, p + q / 4, ahead(b, q * ROW_BYTES));
        products_end();
    }
    // WIDE: the same, with p in shared memory and the worker's half of the columns of dO or Q.
    DEVICE void issue_half_sums(float (&sums)[WIDTH / 2], Address p, Address step) const {
        const Matrix a = matrix(p), b = matrix(step + index * (WIDTH / PANEL) * STEP * ROW_BYTES, STEP * ROW_BYTES);
        UNROLL
        for (int q = 0; q < STEP; q += 16)
            Product<WIDTH>::template shared<0, 1>(sums, ahead(a, q * 2), ahead(b, q * ROW_BYTES), true);
        products_end();
    }
    // Issues the worker's half of dQ^T = K^T dS^T.
    DEVICE void issue_dquery(float (&dq)[PART / 2], Address scores) const {
        const Matrix a = matrix(memory + KEYS + (DIM == 64 ? 0 : index * OWN * ROW_BYTES));
        // The offset of the half's columns in bytes.
        const int half = DIM != 64 ? 0 : PART == 32 ? index * 64 : index * OWN * ROW_BYTES;
        const Matrix b = matrix(scores + half, OWN * ROW_BYTES);
        UNROLL
        for (int key = 0; key < OWN; key += 16)
            Product<PART>::template shared<1, 1>(dq, ahead(a, key * ROW_BYTES), ahead(b, key * ROW_BYTES), key > 0);
        products_end();
    }

    static DEVICE void round_all(unsigned (&p)[COLUMNS / 4], const float (&s)[COLUMNS / 2]) {
        UNROLL
        for (int i = 0; i < COLUMNS / 4; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
    }

    // Writes the worker's dS^T or P^T [64, COLUMNS] to shared memory, for both workers.
    DEVICE void leave(const unsigned (&p)[COLUMNS / 4], Address scores) const {
        const int thread = thread_again(), lane = thread % 32;
        const int row = (WIDE ? 0 : index * ROWS) + thread % 128 / 32 * 16 + lane % 16;
        UNROLL
        for (int q = 0; q < COLUMNS; q += 16) {
            const int piece = q % PANEL / 8 + lane / 16 + (WIDE ? index * COLUMNS / 8 : 0);
            store_matrices(scores + q / PANEL * OWN * ROW_BYTES + row * ROW_BYTES + ((piece ^ row % 8) << 4),
                           p + q / 4);
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
    DEVICE void hide(float (&s)[COLUMNS / 2], const Problem& problem, int first_key, int tile) const {
        const int thread = thread_again(), first_column = column(thread) + (WIDE ? index * COLUMNS : 0);
        UNROLL
        for (int r = 0; r < 2; ++r) {
            const int key = first_key + (WIDE ? 0 : index * ROWS) + row(thread) + 8 * r;
            // The number of the tile's queries that do not see the key, minus the thread's first column.
            int hidden = CAUSAL ? key - problem.offset - tile * STEP - first_column : 0;
            if (key >= problem.keys) hidden = STEP;
            UNROLL
            for (int e = 2 * r; e < COLUMNS / 2; e += e % 2 ? 3 : 1) {
                if (e / 4 * 8 + e % 2 < hidden) s[e] = 0.0f;
            }
        }
    }

    // Waits for the other worker's dS^T of the previous tile, and issues this worker's half of dQ of that tile.
    DEVICE void issue_last_dquery(float (&dq)[PART / 2]) const {
        barrier_wait(memory + SCORE_FULL + 8 * score.place(), score.parity());
        products_begin();
        issue_dquery(dq, memory + SCORES + score.place() * SCORE_BYTES);
    }
    DEVICE void add_dquery(float (&dq)[PART / 2], float* sums) const {
        float* const to = sums + (index * (PART / 8) * 128 + thread_again() % 128) * 4;
        UNROLL
        for (int j = 0; j < PART / 8; ++j) add_to_memory(to + j * 512, dq + 4 * j);
    }

    // Turns S^T into P^T.
    DEVICE void weigh(float (&s)[COLUMNS / 2], Address statistics, const Problem& problem, int first_key, int tile,
                      bool masked) const {
        const Address lses = statistics + 4 * (column(thread_again()) + (WIDE ? index * COLUMNS : 0));
        UNROLL
        for (int j = 0; j < COLUMNS / 8; ++j) {
            const float2 lse = load_two(lses + 32 * j);
            UNROLL
            for (int e = 0; e < 4; ++e) s[4 * j + e] = weight_of(s[4 * j + e], e % 2 ? lse.y : lse.x, problem);
        }
        if (masked) hide(s, problem, first_key, tile);
    }
    // Turns dP^T into dS^T.
    DEVICE void differ(float (&dp)[COLUMNS / 2], const float (&p)[COLUMNS / 2], Address statistics,
                       const Problem& problem, int first_key, int tile, bool masked) const {
        const Address deltas = statistics + 4 * (STEP + column(thread_again()) + (WIDE ? index * COLUMNS : 0));
        UNROLL
        for (int j = 0; j < COLUMNS / 8; ++j) {
            const float2 delta = load_two(deltas + 32 * j);
            UNROLL
            for (int e = 0; e < 4; ++e) dp[4 * j + e] = p[4 * j + e] * (dp[4 * j + e] - (e % 2 ? delta.y : delta.x));
        }
        if (masked) hide(dp, problem, first_key, tile);  // dP may be infinite, and 0 inf is not 0
    }

    // Processes one tile of queries. ADDS: adds dQ of the previous tile to `sums_before`.
    template <bool ADDS>
    DEVICE void advance(Registers& x, const Problem& problem, int first_key, int tile, bool masked,
                        float* sums_before) {
        memory = again(memory);
        const Address q = memory + QUERIES + query.place() * STEP_BYTES, d = memory + DOUTS + dout.place() * STEP_BYTES;
        const Address statistics = memory + STATISTICS + query.place() * STATISTICS_BYTES;
        float s[COLUMNS / 2], dp[COLUMNS / 2], dq[PART / 2];
        unsigned p[COLUMNS / 4], ds[COLUMNS / 4];

        if constexpr (ADDS) issue_last_dquery(dq);
        barrier_wait(memory + QUERY_FULL + 8 * query.place(), query.parity());
        products_begin();
        issue_scores(s, KEYS, QUERIES + query.place() * STEP_BYTES);
        if constexpr (ADDS) {
            products_wait<1>();  // dQ
            pin(dq);
            add_dquery(dq, sums_before);
            score.next();
        }
        barrier_wait(memory + DOUT_FULL + 8 * dout.place(), dout.parity());
        products_begin();
        issue_scores(dp, VALUES, DOUTS + dout.place() * STEP_BYTES);
        products_wait<1>();  // the scores
        pin(s);
        weigh(s, statistics, problem, first_key, tile, masked);
        pin(s);
        products_wait<0>();  // dP
        pin(dp);
        differ(dp, s, statistics, problem, first_key, tile, masked);
        round_all(ds, dp);
        if constexpr (ATOMIC) {
            leave(ds, memory + SCORES + score.place() * SCORE_BYTES);
            arrive(SCORE_FULL + 8 * score.place());
        }
        round_all(p, s);
        products_begin();
        issue_sums(x.dv, p, d);
        products_begin();
        issue_sums(x.dk, ds, q);
        products_wait<0>();
        pin(x.dk);
        pin(x.dv);
        arrive(QUERY_EMPTY + 8 * query.place());
        arrive(DOUT_EMPTY + 8 * dout.place());
        dout.next();
        query.next();
    }

    // WIDE: processes one tile of queries. The workers exchange P^T and dS^T, and each computes half of the columns of
    // dV and dK.
    DEVICE void advance_wide(Registers& x, const Problem& problem, int first_key, int tile, bool masked) {
        memory = again(memory);
        const Address q = memory + QUERIES + query.place() * STEP_BYTES, d = memory + DOUTS + dout.place() * STEP_BYTES;
        const Address statistics = memory + STATISTICS + query.place() * STATISTICS_BYTES;
        const Address weights = memory + SCORES + score.place() * SCORE_BYTES, scores = weights + SCORE_BYTES / 2;
        float s[COLUMNS / 2], dp[COLUMNS / 2];
        unsigned p[COLUMNS / 4], ds[COLUMNS / 4];
        barrier_wait(memory + QUERY_FULL + 8 * query.place(), query.parity());
        products_begin();
        issue_scores(s, KEYS, QUERIES + query.place() * STEP_BYTES);
        barrier_wait(memory + DOUT_FULL + 8 * dout.place(), dout.parity());
        products_begin();
        issue_scores(dp, VALUES, DOUTS + dout.place() * STEP_BYTES);
        products_wait<1>();  // the scores
        pin(s);
        weigh(s, statistics, problem, first_key, tile, masked);
        round_all(p, s);
        leave(p, weights);
        pin(s);
        products_wait<0>();  // dP
        pin(dp);
        differ(dp, s, statistics, problem, first_key, tile, masked);
        round_all(ds, dp);
        leave(ds, scores);
        arrive(SCORE_FULL + 8 * score.place());
        barrier_wait(memory + SCORE_FULL + 8 * score.place(), score.parity());
        score.next();
        products_begin();
        issue_half_sums(x.dv, weights, d);
        issue_half_sums(x.dk, scores, q);
        products_wait<0>();
        pin(x.dv);
        pin(x.dk);
        arrive(DOUT_EMPTY + 8 * dout.place());
        arrive(QUERY_EMPTY + 8 * query.place());
        dout.next();
        query.next();
    }

    DEVICE void attend(const Problem& problem, const Work& work, const View& dkey, const View& dvalue, float* sums) {
        Registers x;
        UNROLL
        for (int e = 0; e < WIDTH / 2; ++e) x.dk[e] = x.dv[e] = 0.0f;
        if (work.visits > 0) {
            barrier_wait(memory + OWN_FULL, 0);
            // Tiles of queries before `cut` need a mask. These are all tiles if some of the block's keys are past the
            // end.
            const int all_see = CAUSAL ? larger_of(work.first_key + OWN - 1 - problem.offset, 0) : 0;
            const int cut = work.first_key + OWN > problem.keys ? problem.query_tiles : (all_see + STEP - 1) / STEP;
            int tile = work.start;
            const int first_head = work.batch * problem.heads + work.head * problem.groups;
            int position = first_head * problem.query_tiles + tile;  // of the tile among all tiles
            if constexpr (ATOMIC) advance<false>(x, problem, work.first_key, tile, tile < cut, sums);
            ROLLED
            for (int visit = problem.groups * work.visits - ATOMIC; visit > 0; --visit) {
                float* const at = sums + static_cast<long long>(position) * TILE;
                if constexpr (WIDE) advance_wide(x, problem, work.first_key, tile, tile < cut);
                if constexpr (!WIDE && !ATOMIC) advance<false>(x, problem, work.first_key, tile, tile < cut, at);
                ++position;
                if (++tile == problem.query_tiles) {
                    tile = work.start;
                    position += work.start;
                }
                if constexpr (ATOMIC) advance<true>(x, problem, work.first_key, tile, tile < cut, at);
            }
            if constexpr (ATOMIC) {
                float dq[PART / 2];
                issue_last_dquery(dq);
                products_wait<0>();
                pin(dq);
                add_dquery(dq, sums + static_cast<long long>(position) * TILE);
            }
        }
        const int first_key = work.first_key + (WIDE ? 0 : index * ROWS) + row(thread_again());
        const int first_column = WIDE ? index * WIDTH : 0;
        store(problem, work, dkey, first_key, first_column, x.dk, problem.scale);
        store(problem, work, dvalue, first_key, first_column, x.dv, 1.0f);
    }

    static DEVICE void store(const Problem& problem, const Work& work, const View& out, int first_row, int first_column,
                             const float (&sums)[WIDTH / 2], float factor) {
        UNROLL
        for (int r = 0; r < 2; ++r) {
            const int row = first_row + 8 * r;
            Element* const to = out.data + work.batch * out.batch + work.head * out.head + row * out.row + first_column;
            store_row(to, sums, r, factor, row < problem.keys ? problem.dim - first_column : 0);
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
            barrier_create(memory + QUERY_FULL + 8 * i, 1);
            barrier_create(memory + QUERY_EMPTY + 8 * i, 4 * WORKERS);
            barrier_create(memory + DOUT_FULL + 8 * i, 1);
            barrier_create(memory + DOUT_EMPTY + 8 * i, 4 * WORKERS);
        }
        for (int i = 0; i < 2; ++i) barrier_create(memory + SCORE_FULL + 8 * i, 4 * WORKERS);
        barriers_created();
    }
    __syncthreads();
    // Each piece of work has a block. The longest come first, and the hardware gives the next block to the first free
    // multiprocessor.
    const Work work = work_of(problem, blockIdx.x);
    if (warpgroup == 0) {
        registers_reduce<24>();
        if (threadIdx.x == 0) Producer{memory}.produce(query, key, value, dout, statistics, problem, work);
    } else {
        registers_increase<240>();
        Worker{memory, warpgroup - 1}.attend(problem, work, dkey, dvalue, sums);
    }
}
EXPORT(backward)

#endif

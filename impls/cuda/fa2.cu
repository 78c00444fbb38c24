// FlashAttention-2 in CUDA C++ (Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work
// Partitioning", ICLR 2024; Algorithms 1 and 2).
//
// What changes against FlashAttention-1:
// - The loops are exchanged. One block owns a tile of queries and loops over the keys. So the output, the running
//   maximum m and the running sum l stay in registers. The block divides the output by l once, at the end, and writes
//   it once.
// - The warps of a block share out the rows, and not the keys. So no warp waits for the numbers of another warp.
// - Of the statistics, only the LSE L = m + log l is stored.
// - The backward has no atomics, so it is deterministic. One kernel owns a tile of keys and sums dK and dV over the
//   queries. A second kernel owns a tile of queries and sums dQ over the keys. Both recompute the weights
//   P = exp(S - L), and both read delta = rowsum(dO o O), which a third, small kernel computes first.
// - With HAND_OVER, the second kernel recomputes nothing. The first one leaves dS of a chunk of keys in device memory,
//   and `dquery_of_scores` multiplies it with these keys. So there are five products and not seven. The chunk has a
//   fixed length, so the memory is linear in the lengths.
//
// Each loop has two tiles in shared memory for each operand. While the block computes with one tile, the next one is
// copied asynchronously (cp.async). P and dS stay in registers: the result of one product has the layout of the left
// operand of the next product. Only where two warps share rows of dK and dV, they also pass P and dS to each other
// through shared memory.
//
// A warp has 16 or 32 rows. With 32 rows, a fragment of the right operand serves twice as many products, but the sums
// leave few registers for the rest (`Parked`).
//
// Arithmetic. A weight is 2^((s - m) c) with s = q k, m the largest s so far, and c = |scale| log2 e. The kernel
// subtracts first and then multiplies, so equal scores weigh exactly 1, however large they are. A fused multiply-add
// for 2^(s c - m c) would leave a residue of half an ulp of m c. In the backward, S - L is one explicit fma. The
// compiler does not fuse anything itself. L is a float32, and half an ulp of L is a relative error of every weight in
// the backward. It is 0.004 for scores of 1e5, and 0.5 for scores of 1e7. This error belongs to the algorithm, and the
// bound allows it. FlashAttention-1 stores m and l, and does not have this error.
//
// The loader compiles one kernel at a time for a GPU, and defines FORWARD, DELTA, DKEY_DVALUE, DQUERY or
// DQUERY_OF_SCORES. The CPU twin gets all others at once. For the last kernel, and for the DKEY_DVALUE before it, the
// loader defines HAND_OVER as 1, and the twin gets each of the two alone. tiles.cuh lists what else is defined.
#include "tiles.cuh"

// --------------------------------------------------------------------------------------------------------------- masks

// The mask says which keys a query sees, and which tiles a loop visits. For another kind of mask, define another struct
// with these members (block_sparse.cu).
#ifndef MASK
struct Mask {
    int offset;  // with CAUSAL, query i sees key j if j <= i + offset

    // With CAUSAL: the key after the last one that the query sees, and the first query that sees the key.
    DEVICE int end_of_keys(int query) const { return query + offset + 1; }
    DEVICE int first_query(int key) const { return key - offset; }

    // The tiles that a loop visits: their number `count`, the first row of each, and whether a tile needs a mask. A
    // tile needs a mask if the causal mask hides some of its scores, or if it extends past the end of the tensor.
    struct Visits {
        int start, count, clear_from, clear_to;  // tiles clear_from to clear_to - 1 need no mask

        DEVICE int first(int visit) const { return start + visit * STEP; }
        DEVICE bool masked(int visit) const { return visit < clear_from || visit >= clear_to; }
    };

    // The tiles of keys that the `length` queries from `first_query` on see. First come the tiles that all these
    // queries see whole, then those that the diagonal or the end of the keys cuts.
    DEVICE Visits keys_of(int, int, int first_query, int length, int keys) const {
        const int seen_by_all = CAUSAL ? smaller_of(keys, larger_of(first_query + offset + 1, 0)) : keys;
        const int seen_by_any = CAUSAL ? smaller_of(keys, larger_of(first_query + offset + length, 0)) : keys;
        return {0, (seen_by_any + STEP - 1) / STEP, 0, seen_by_all / STEP};
    }

    // The tiles of queries that see any of the `length` keys from `first_key` on. First come the tiles that the
    // diagonal cuts, then whole tiles, and then perhaps a tile that the end of the queries cuts.
    DEVICE Visits queries_of(int, int, int first_key, int length, int queries) const {
        const int start = CAUSAL ? larger_of(first_key - offset, 0) / STEP * STEP : 0;
        const int all_see = CAUSAL ? larger_of(first_key + length - 1 - offset, 0) : 0;
        return {start, larger_of(queries - start + STEP - 1, 0) / STEP, larger_of(all_see - start + STEP - 1, 0) / STEP,
                (queries - start) / STEP};
    }
};
#endif

// -------------------------------------------------------------------------------------------------------------- places

// The place of a block: its batch entry, its head and its tile of OWN rows. If `last_first`, the last tile comes first.
// It is set for tiles of queries, because with a causal mask the last queries see the most keys.
constexpr int OWN = WARPS / SPLIT * ROWS;
static_assert(OWN % 32 == 0, "the rows after OWN rows of a tile are a tile");

struct Place {
    int first, head, batch;

    Place() = default;
    DEVICE Place(int block, int rows, int heads, bool last_first) {
        const int tiles = (rows + OWN - 1) / OWN, tile = block % tiles;
        first = (last_first ? tiles - 1 - tile : tile) * OWN;
        head = block / tiles % heads;
        batch = block / tiles / heads;
    }
};

// The first of the warp's ROWS rows in the block's tile.
DEVICE int warp_row() { return warp_index() / SPLIT * ROWS; }

// Each loop has a second body, without a mask, for tiles that need none. With dropout, or with copies of one number at
// a time, there is only the body with a mask. The mask costs little then, and two bodies would need too many registers
// and twice as much time to compile.
#define ONE_BODY (DROPOUT || !VECTOR)

// What a loop needs only once in a step. It waits in one register of each lane of a warp, because the other registers
// are full of sums: lane i holds word i.
struct Parked {
    // The words where each thing begins: the visits, the heads that the loop copies from, the index of their first row
    // in the LSE, the number of query heads for a key head, the block's place, and the warp's first piece of dS.
    enum { VISITS = 0, FIRST = 4, SECOND = 6, ROW = 8, GROUPS = 10, PLACE = 11, PIECE = 14 };
    unsigned word = 0;

    template <class T>
    DEVICE void put(int first, const T& value) {
        unsigned words[sizeof(T) / 4];
        memcpy(words, &value, sizeof(T));
        UNROLL
        for (int i = 0; i < static_cast<int>(sizeof(T)) / 4; ++i)
            if (lane_index_again() == first + i) word = words[i];
    }
    template <class T>
    DEVICE T get(int first) const {
        union {
            unsigned words[sizeof(T) / 4];
            T value;
        };
        UNROLL
        for (int i = 0; i < static_cast<int>(sizeof(T)) / 4; ++i) words[i] = from_lane(word, first + i);
        return value;
    }
    DEVICE Mask::Visits visits() const { return get<Mask::Visits>(VISITS); }
    DEVICE Place place() const { return get<Place>(PLACE); }
    // The head that is parked at FIRST or SECOND.
    DEVICE Head<const Element> head(int first, const View<const Element>& view, int rows, int dim) const {
        return {get<Global<const Element>>(first), view.row, view.column, rows, dim};
    }
};
static_assert(sizeof(Mask::Visits) == 16 && sizeof(Place) == 12, "each thing has room");

// Whether a score [query, key] is hidden, for the lane's scores of a tile of WIDTH keys.
template <bool MASKED, int WIDTH>
struct Hidden {
    using Scores = Sums<ROWS, WIDTH>;
    Registers<int, ROWS / 8> end;  // the row sees no key from this one on, counted from the lane's first key

    DEVICE Hidden(const Problem& problem, const Mask& mask, const Parked& parked, int visit) {
        if (!MASKED) return;
        const int first_key = parked.visits().first(visit) + Scores::first_column();
        const int seen = mask.end_of_keys(parked.place().first + warp_row() + Scores::first_row()) - first_key;
        UNROLL
        for (int r = 0; r < ROWS / 8; ++r) {
            end[r] = problem.keys - first_key;
            if (CAUSAL) end[r] = smaller_of(end[r], seen + 8 * r);
        }
    }
    DEVICE bool operator()(int m, int n, int i) const { return Scores::across(n, i) >= end[Scores::slot(m, i)]; }
};

// The index of a head's first row in the LSE and in delta [batch, heads, queries].
DEVICE long long first_row_of(const Problem& problem, int batch, int head) {
    return (static_cast<long long>(batch) * problem.heads + head) * problem.queries;
}

// ------------------------------------------------------------------------------------------------------------- forward

#ifdef FORWARD

// The running state of a warp's queries. A lane holds a quarter of each of ROWS / 8 rows.
struct Running {
    Sums<ROWS, DIM> out;  // the output, before the division by the sum of the weights
    // The largest score of the row so far (all lanes of a quad hold the same number), and the sum of the weights in
    // this lane's columns.
    Registers<float, ROWS / 8> maximum, total;
};

// Adds a tile of STEP keys to the running output, maximum and sum. MASKED: some keys may be hidden or past the end.
template <bool MASKED, class Query>
DEVICE void attend(Running& row, const Query& q, Tile<DIM> k, Tile<DIM> v, const Drawn<ROWS, STEP>& drawn,
                   const Problem& problem, const Mask& mask, const Parked& parked, int visit) {
    Sums<ROWS, STEP> scores;
    scores.clear();
    rows_by_rows(scores, q, k);

    Registers<float, ROWS / 8> largest;
    UNROLL
    for (int r = 0; r < ROWS / 8; ++r) largest[r] = row.maximum[r];
    const Hidden<MASKED, STEP> hidden(problem, mask, parked, visit);
    scores.each([&](float& score, int m, int n, int i) {
        if (MASKED && hidden(m, n, i)) score = -INFINITY;
        largest[scores.slot(m, i)] = maximum_of(largest[scores.slot(m, i)], score);
    });
    Registers<float, ROWS / 8> rescale;
    bool changed = false;  // whether any maximum changed
    UNROLL
    for (int r = 0; r < ROWS / 8; ++r) {
        const float maximum = quad_maximum(largest[r]);
        // The maximum is -inf if the row has seen no key yet, or only scores of -inf. It stays -inf, but the kernel
        // subtracts 0 in its place: -inf - -inf would be NaN.
        largest[r] = maximum == -INFINITY ? 0.0f : maximum;
        rescale[r] = exp2_of((row.maximum[r] - largest[r]) * problem.exponent_scale);
        changed |= row.maximum[r] != maximum;
        row.maximum[r] = maximum;
        row.total[r] *= rescale[r];
    }
    scores.each([&](float& score, int m, int n, int i) {
        const int r = scores.slot(m, i);
        score = exp2_of((score - largest[r]) * problem.exponent_scale);  // a weight from here on
        row.total[r] += score;
        if (DROPOUT && drawn.drops(m, n, i)) score = 0.0f;
    });
    if (changed) row.out.each([&](float& sum, int m, int, int i) { sum *= rescale[row.out.slot(m, i)]; });
    rows_by_columns(row.out, Weights<ROWS, STEP>(scores), v);
}

// Computes the output and the LSE of one tile of OWN queries of one head. lse [batch, heads, queries] is contiguous.
KERNEL(forward)(View<const Element> query, View<const Element> key, View<const Element> value, View<Element> out,
                Global<float> lse, Problem problem, Mask mask) {
    const Place place(block_index(), problem.queries, problem.heads, true);
    const auto keys = head_of(key, place.batch, place.head / problem.groups(), problem.keys, problem.dim);
    const auto values = head_of(value, place.batch, place.head / problem.groups(), problem.keys, problem.dim);
    Arena arena;
    const Tile<DIM> q = arena.tile<DIM>(OWN);
    const Pair<STEP> k = arena.pair(), v = arena.pair();
    const auto visits = mask.keys_of(place.batch, place.head, place.first, OWN, problem.keys);

    Running row;
    row.out.clear();
    UNROLL
    for (int r = 0; r < ROWS / 8; ++r) {
        row.maximum[r] = -INFINITY;
        row.total[r] = 0.0f;
    }
    copy_tile<OWN>(q, head_of(query, place.batch, place.head, problem.queries, problem.dim), place.first);
    const auto fetch = [&](const Head<const Element>& keys, const Head<const Element>& values, int first_key, int to) {
        copy_tile<STEP>(k[to], keys, first_key);
        copy_tile<STEP>(v[to], values, first_key);
    };
    bool more = visits.count > 0;
    if (more) fetch(keys, values, visits.first(0), 0);
    Parked parked;
    parked.put(Parked::VISITS, visits);
    parked.put(Parked::FIRST, keys.data);
    parked.put(Parked::SECOND, values.data);
    parked.put(Parked::PLACE, place);
    Operand<ROWS, HOLD> held(q, warp_row());
    for (int visit = 0; more; ++visit) {
        const int now = visit % 2;
        copies_wait();
        barrier();  // all threads see this tile now, and no warp reads the previous one any more
        if (visit == 0) {
            times_sign<OWN>(q, problem.scale);
            held.hold();
        }
        more = visit + 1 < parked.visits().count;
        if (more)
            fetch(parked.head(Parked::FIRST, key, problem.keys, problem.dim),
                  parked.head(Parked::SECOND, value, problem.keys, problem.dim), parked.visits().first(visit + 1),
                  1 - now);
        Drawn<ROWS, STEP> drawn;
        if (DROPOUT) {
            const Place place = parked.place();
            const int first_key = parked.visits().first(visit);
            drawn.draw([&](int row, int column) {
                return kept(problem.seed, problem.last_dropped, place.batch, place.head, place.first + warp_row() + row,
                            first_key + column);
            });
        }
        if (ONE_BODY || parked.visits().masked(visit))
            attend<true>(row, held, k[now], v[now], drawn, problem, mask, parked, visit);
        else
            attend<false>(row, held, k[now], v[now], drawn, problem, mask, parked, visit);
    }

    // A row that sees no key has maximum -inf and total 0. The formulas below then give LSE -inf and output 0.
    const Place again(block_index_again(), problem.queries, problem.heads, true);
    const Global<float> row_lse = lse + first_row_of(problem, again.batch, again.head);
    Registers<float, ROWS / 8> factors;
    UNROLL
    for (int r = 0; r < ROWS / 8; ++r) {
        const float total = quad_sum(row.total[r]);
        const int at = again.first + warp_index_again() / SPLIT * ROWS + row.out.first_row() + 8 * r;
        if (lane_index() % 4 == 0 && at < problem.queries)
            row_lse[at] = multiply_add(row.maximum[r], problem.magnitude, log_of(total));
        factors[r] = problem.kept_scale / (total == 0.0f ? 1.0f : total);
    }
    store_rows(head_of(out, again.batch, again.head, problem.queries, problem.dim), row.out, factors,
               again.first + warp_index_again() / SPLIT * ROWS);
}
EXPORT(forward)

#endif

// ------------------------------------------------------------------------------------------------------------ backward

#ifdef DELTA

// delta = rowsum(dO o O) in float32. LANES lanes share a row, each with 16 bytes at a time. dO may have other strides
// than O. delta [batch, heads, queries] is contiguous.
KERNEL(delta)(View<const Element> out, View<const Element> dout, Global<float> delta, int heads, int queries, int dim) {
    constexpr int LANES = DIM / CHUNK < 32 ? DIM / CHUNK : 32, AT_ONCE = 32 * WARPS / LANES;
    const int tiles = (queries + AT_ONCE - 1) / AT_ONCE;
    const int row = block_index() % tiles * AT_ONCE + thread_index() / LANES, head = block_index() / tiles % heads,
              batch = block_index() / tiles / heads;
    const auto o = head_of(out, batch, head, queries, dim), d = head_of(dout, batch, head, queries, dim);
    float sum = 0.0f;
    for (int column = thread_index() % LANES * CHUNK; row < queries && column < dim; column += LANES * CHUNK) {
        alignas(16) Element some_o[CHUNK] = {}, some_d[CHUNK] = {};
        if (VECTOR) {
            read_sixteen(some_o, Global<const Element>(o.at(row, column)));
            read_sixteen(some_d, Global<const Element>(d.at(row, column)));
        } else {
            for (int i = 0; i < smaller_of(CHUNK, dim - column); ++i) {
                some_o[i] = o.at(row, column + i)[0];
                some_d[i] = d.at(row, column + i)[0];
            }
        }
        UNROLL
        for (int i = 0; i < CHUNK; ++i) sum = multiply_add(to_float(some_o[i]), to_float(some_d[i]), sum);
    }
    sum = sum_of_lanes<LANES>(sum);
    if (row < queries && thread_index() % LANES == 0)
        delta[(static_cast<long long>(batch) * heads + head) * queries + row] = sum;
}
EXPORT(delta)

#endif

#if defined(DKEY_DVALUE) || defined(DQUERY)

// P = exp(scale score - lse). An lse of -inf means that the row sees no key; then all its weights are 0. The exact
// weight is at most 1. For huge scores, the rounding error of the stored LSE could make it larger or even infinite
// (half an ulp of 1e10 is 512), so the exponent is at most 0. NaN stays NaN.
DEVICE float weight_of(float score, float lse, float scale) {
    const float exponent = multiply_add(score, scale, lse == -INFINITY ? -INFINITY : -lse);
    return exp2_of((exponent > 0.0f ? 0.0f : exponent) * LOG2_E);
}

#endif

#ifndef HAND_OVER
#define HAND_OVER 0
#endif

// dS of all queries with a chunk of keys, in device memory, in pieces of 32 queries and 32 keys: [batch, heads, rows,
// columns] pieces. A piece is the left operand of dK, so it is transposed. It has four fragments, and lane i has 16
// bytes of each, from byte 16 i on.
//
// `dkey_dvalue` writes the pieces that its loop visits, and `dquery_of_scores` reads no other ones.
struct Handed {
    Global<unsigned> pieces;
    Global<float> sums;     // dQ / scale over the chunks before: the sums of each warp, as its lanes hold them
    int first_key, length;  // of the chunk; the length is a multiple of 128
    int rows, columns;      // of pieces
    int own, step;          // OWN and STEP of dkey_dvalue

    static constexpr int SIDE = 32, FRAGMENT = 4 * 32, PIECE = 4 * FRAGMENT;

    // The first piece of a row of pieces.
    DEVICE Global<unsigned> row_of(int batch_head, int row) const {
        return pieces + (static_cast<long long>(batch_head) * rows + row) * columns * PIECE;
    }
    // The first query that dkey_dvalue visits for a piece of keys.
    DEVICE int first_query(const Mask& mask, int key) const {
        return CAUSAL ? larger_of(mask.first_query(key / own * own), 0) / step * step : 0;
    }
};

#ifdef DKEY_DVALUE

// SPLIT warps own the same ROWS keys. Each sums PART columns of dK and dV over all queries of a tile. With tensor
// cores, each computes the weights of SHARE of these queries, and leaves them in shared memory for the others
// (EXCHANGE). With float32 inputs or short steps, each computes the weights of all queries.
constexpr bool EXCHANGE = TENSOR_CORES && SPLIT > 1 && STEP % (16 * SPLIT) == 0;
constexpr int PART = DIM / SPLIT, SHARE = EXCHANGE ? STEP / SPLIT : STEP;
static_assert(!EXCHANGE || WARPS / SPLIT <= 15, "the warps that own the same keys have a barrier of their own");

// Adds the share of a tile of STEP queries to dK / scale and to dV / kept_scale. Scores are transposed here, [keys,
// queries], so that P^T and dS^T are left operands. `shared` has room for both operands of each warp. MASKED: some
// queries may be before the diagonal or past the end. Keys past the end need no mask: each has a row of its own, which
// is finite and never stored.
//
// The values lie OWN rows below the keys `k`. A hidden weight is -0. No other weight is, so it also tells that the
// score is hidden.
template <bool MASKED>
DEVICE void add_gradients(Sums<ROWS, PART>& dk, Sums<ROWS, PART>& dv, Tile<DIM> k, Tile<DIM> q, Tile<DIM> d,
                          const float* lse, const float* delta, char* shared, const Drawn<ROWS, SHARE>& drawn,
                          const Problem& problem, const Mask& mask, const Handed& handed, const Parked& parked,
                          int visit) {
    using Scores = Sums<ROWS, SHARE>;
    const int warp = warp_index_again(), member = warp % SPLIT, first_column = member * PART;
    const int mine = EXCHANGE ? member * SHARE : 0;  // the first of the tile's queries that the warp computes

    Scores p;  // first the scores, then the weights
    p.clear();
    rows_by_rows(p, Operand<ROWS, false>(k, warp_row()), q.from(mine));
    const float* const lane_lse = lse + mine + Scores::first_column();
    // Counted from the lane's first query: the end of the queries, and the first one that sees the lane's first key.
    int end = 0, start = 0;
    if (MASKED) {
        const int lane_query = parked.visits().first(visit) + mine + Scores::first_column();
        end = problem.queries - lane_query;
        start = mask.first_query(parked.place().first + warp / SPLIT * ROWS + Scores::first_row()) - lane_query;
    }
    p.each([&](float& score, int m, int n, int i) {
        const int query = p.across(n, i);
        score = weight_of(score, read(lane_lse + query), problem.scale);
        if (MASKED && (query >= end || (CAUSAL && query - 8 * p.slot(m, i) < start))) score = -0.0f;
    });
    Scores ds;  // first dP, then dS
    ds.clear();
    rows_by_rows(ds, Operand<ROWS, false>(k, warp_row(), OWN), d.from(mine));
    const float* const lane_delta = delta + mine + Scores::first_column();
    ds.each([&](float& dp, int m, int n, int i) {
        const float weight = p.at[m][n][i];
        if (DROPOUT) dp = drawn.drops(m, n, i) ? 0.0f : dp * problem.kept_scale;
        dp = weight * (dp - read(lane_delta + p.across(n, i)));
        // A hidden value may make dP infinite, and 0 inf is not 0.
        if (MASKED && is_negative_zero(weight)) dp = 0.0f;
    });
    if (DROPOUT) {
        p.each([&](float& weight, int m, int n, int i) {
            if (drawn.drops(m, n, i)) weight = 0.0f;
        });
    }
    using Operands = Left<ROWS, SHARE>;
    const auto left_p = [&](int of) { return Operands{shared + 2 * of * Operands::BYTES}; };
    const auto left_ds = [&](int of) { return Operands{shared + (2 * of + 1) * Operands::BYTES}; };
    const Weights<ROWS, SHARE> my_p(p);
    if constexpr (EXCHANGE) left_p(warp).put(my_p);
    rows_by_columns(dv, my_p, d.from(mine), first_column);
    const Weights<ROWS, SHARE> my_ds(ds);
    if constexpr (EXCHANGE) left_ds(warp).put(my_ds);
    if constexpr (HAND_OVER) {
        static_assert(!HAND_OVER || (ROWS == Handed::SIDE && SHARE == Handed::SIDE), "a warp computes a piece");
        const int row = (parked.visits().first(visit) + mine) / Handed::SIDE;
        const Global<unsigned> piece = parked.get<Global<unsigned>>(Parked::PIECE) +
                                       (row * handed.columns * Handed::PIECE + 4 * lane_index_again());
        UNROLL
        for (int k = 0; k < SHARE / 16; ++k) {
            UNROLL
            for (int m = 0; m < ROWS / 16; ++m) write_sixteen(piece + (2 * k + m) * Handed::FRAGMENT, my_ds.at[k][m]);
        }
    }
    rows_by_columns(dk, my_ds, q.from(mine), first_column);
    if constexpr (EXCHANGE) {
        // The warps that own the same keys see each other's weights now. They write the next weights after the next
        // barrier of the block, so after all of them have read these.
        barrier_of<32 * SPLIT>(1 + warp / SPLIT);
        UNROLL
        for (int next = 1; next < SPLIT; ++next) {
            const int other = (member + next) % SPLIT, theirs = warp - member + other;
            rows_by_columns(dv, left_p(theirs), d.from(other * SHARE), first_column);
            rows_by_columns(dk, left_ds(theirs), q.from(other * SHARE), first_column);
        }
    }
}

// Computes dK and dV of one tile of OWN keys of one key head. The sums run over the queries of all query heads that
// share this key head.
KERNEL(dkey_dvalue)(View<const Element> query, View<const Element> key, View<const Element> value,
                    View<const Element> dout, Global<const float> lse, Global<const float> delta, View<Element> dkey,
                    View<Element> dvalue, Problem problem, Mask mask, Handed handed) {
    Arena arena;
    const Tile<DIM> k = arena.tile<DIM>(2 * OWN), v = k.from(OWN);
    const Pair<STEP> q = arena.pair(), d = arena.pair();
    // The LSE and delta of two tiles of queries.
    float *const row_lse = arena.numbers(2 * STEP), *const row_delta = arena.numbers(2 * STEP);
    char* const shared = arena.next;

    next_may_start();  // `dquery` reads nothing that this kernel writes, and `dquery_of_scores` waits for its end
    const int keys = HAND_OVER ? smaller_of(handed.length, problem.keys - handed.first_key) : problem.keys;
    Place place(block_index(), keys, problem.kv_heads, false);
    if (HAND_OVER) place.first += handed.first_key;
    Parked parked;
    parked.put(Parked::PLACE, place);
    parked.put(Parked::GROUPS, problem.groups());
    Sums<ROWS, PART> dk, dv;
    dk.clear();
    dv.clear();
    copy_tile<OWN>(k, head_of(key, place.batch, place.head, problem.keys, problem.dim), place.first);
    copy_tile<OWN>(v, head_of(value, place.batch, place.head, problem.keys, problem.dim), place.first);
    for (int number = 0; number < parked.get<int>(Parked::GROUPS); ++number) {
        const Place place = parked.place();
        const int head = place.head * parked.get<int>(Parked::GROUPS) + number;
        const auto queries = head_of(query, place.batch, head, problem.queries, problem.dim);
        const auto douts = head_of(dout, place.batch, head, problem.queries, problem.dim);
        const long long first_row = first_row_of(problem, place.batch, head);
        const auto visits = mask.queries_of(place.batch, head, place.first, OWN, problem.queries);
        const auto fetch = [&](const Head<const Element>& queries, const Head<const Element>& douts,
                               long long first_row, int first_query, int to) {
            copy_tile<STEP>(q[to], queries, first_query);
            copy_tile<STEP>(d[to], douts, first_query);
            copy_numbers<STEP>(row_lse + to * STEP, lse + first_row, first_query, problem.queries);
            copy_numbers<STEP>(row_delta + to * STEP, delta + first_row, first_query, problem.queries);
        };
        barrier();  // no warp reads the tiles of the previous head any more
        bool more = visits.count > 0;
        if (more) fetch(queries, douts, first_row, visits.first(0), 0);
        parked.put(Parked::VISITS, visits);
        parked.put(Parked::FIRST, queries.data);
        parked.put(Parked::SECOND, douts.data);
        parked.put(Parked::ROW, first_row);
        if (HAND_OVER)
            parked.put(Parked::PIECE,
                       handed.row_of(place.batch * problem.heads + head, 0) +
                           ((place.first - handed.first_key + warp_row()) / Handed::SIDE) * Handed::PIECE);
        for (int visit = 0; more; ++visit) {
            const int now = visit % 2;
            copies_wait();
            barrier();  // all threads see this tile now, and no warp reads the previous one any more
            more = visit + 1 < parked.visits().count;
            if (more)
                fetch(parked.head(Parked::FIRST, query, problem.queries, problem.dim),
                      parked.head(Parked::SECOND, dout, problem.queries, problem.dim),
                      parked.get<long long>(Parked::ROW), parked.visits().first(visit + 1), 1 - now);
            Drawn<ROWS, SHARE> drawn;
            if (DROPOUT) {
                const Place place = parked.place();
                const int head = place.head * parked.get<int>(Parked::GROUPS) + number;
                const int first = parked.visits().first(visit) + (EXCHANGE ? warp_index() % SPLIT * SHARE : 0);
                drawn.draw([&](int row, int column) {
                    return kept(problem.seed, problem.last_dropped, place.batch, head, first + column,
                                place.first + warp_row() + row);
                });
            }
            if (ONE_BODY || parked.visits().masked(visit))
                add_gradients<true>(dk, dv, k, q[now], d[now], row_lse + now * STEP, row_delta + now * STEP, shared,
                                    drawn, problem, mask, handed, parked, visit);
            else
                add_gradients<false>(dk, dv, k, q[now], d[now], row_lse + now * STEP, row_delta + now * STEP, shared,
                                     drawn, problem, mask, handed, parked, visit);
        }
    }
    const Place again = parked.place();
    const int warp = warp_index_again(), first_key = again.first + warp / SPLIT * ROWS,
              first_column = warp % SPLIT * PART;
    store_rows(head_of(dkey, again.batch, again.head, problem.keys, problem.dim), dk, all<ROWS / 8>(problem.scale),
               first_key, first_column);
    store_rows(head_of(dvalue, again.batch, again.head, problem.keys, problem.dim), dv,
               all<ROWS / 8>(problem.kept_scale), first_key, first_column);
}
EXPORT(dkey_dvalue)

#endif

#ifdef DQUERY

// Adds the share of a tile of STEP keys to dQ / scale. MASKED: some keys may be hidden or past the end. A key past the
// end is loaded as 0, so its score is 0. This is far above an LSE of -100, for example. So zeros in the key are not
// enough, and the kernel also sets dS to 0.
template <bool MASKED>
DEVICE void add_gradients(Sums<ROWS, DIM>& dq, const Operand<ROWS, false>& q, const Operand<ROWS, false>& d,
                          Tile<DIM> k, Tile<DIM> v, const Registers<float, ROWS / 8>& lse,
                          const Registers<float, ROWS / 8>& delta, const Drawn<ROWS, STEP>& drawn,
                          const Problem& problem, const Mask& mask, const Parked& parked, int visit) {
    Sums<ROWS, STEP> p;  // first the scores, then the weights
    p.clear();
    rows_by_rows(p, q, k);
    p.each([&](float& score, int m, int, int i) { score = weight_of(score, lse[p.slot(m, i)], problem.scale); });
    Sums<ROWS, STEP> ds;  // first dP, then dS
    ds.clear();
    rows_by_rows(ds, d, v);
    const Hidden<MASKED, STEP> hidden(problem, mask, parked, visit);
    ds.each([&](float& dp, int m, int n, int i) {
        if (DROPOUT) dp = drawn.drops(m, n, i) ? 0.0f : dp * problem.kept_scale;
        dp = p.at[m][n][i] * (dp - delta[p.slot(m, i)]);
        if (MASKED && hidden(m, n, i)) dp = 0.0f;
    });
    rows_by_columns(dq, Weights<ROWS, STEP>(ds), k);
}

// Computes dQ of one tile of OWN queries of one head. The loop visits the same tiles of keys as in the forward.
KERNEL(dquery)(View<const Element> query, View<const Element> key, View<const Element> value, View<const Element> dout,
               Global<const float> lse, Global<const float> delta, View<Element> dquery, Problem problem, Mask mask) {
    const Place place(block_index(), problem.queries, problem.heads, true);
    const auto keys = head_of(key, place.batch, place.head / problem.groups(), problem.keys, problem.dim);
    const auto values = head_of(value, place.batch, place.head / problem.groups(), problem.keys, problem.dim);
    Arena arena;
    const Tile<DIM> q = arena.tile<DIM>(2 * OWN), d = q.from(OWN);
    const Pair<STEP> k = arena.pair(), v = arena.pair();
    const auto visits = mask.keys_of(place.batch, place.head, place.first, OWN, problem.keys);

    Sums<ROWS, DIM> dq;
    dq.clear();
    copy_tile<OWN>(q, head_of(query, place.batch, place.head, problem.queries, problem.dim), place.first);
    copy_tile<OWN>(d, head_of(dout, place.batch, place.head, problem.queries, problem.dim), place.first);
    const auto fetch = [&](const Head<const Element>& keys, const Head<const Element>& values, int first_key, int to) {
        copy_tile<STEP>(k[to], keys, first_key);
        copy_tile<STEP>(v[to], values, first_key);
    };
    bool more = visits.count > 0;
    if (more) fetch(keys, values, visits.first(0), 0);
    Parked parked;
    parked.put(Parked::VISITS, visits);
    parked.put(Parked::FIRST, keys.data);
    parked.put(Parked::SECOND, values.data);
    parked.put(Parked::PLACE, place);
    const long long first_row = first_row_of(problem, place.batch, place.head);
    Registers<float, ROWS / 8> row_lse, row_delta;
    UNROLL
    for (int r = 0; r < ROWS / 8; ++r) {
        const int row = place.first + warp_row() + dq.row(r / 2, 2 * (r % 2));
        row_lse[r] = row < problem.queries ? lse[first_row + row] : INFINITY;
        row_delta[r] = row < problem.queries ? delta[first_row + row] : 0.0f;
    }
    for (int visit = 0; more; ++visit) {
        const int now = visit % 2;
        copies_wait();
        barrier();  // all threads see this tile now, and no warp reads the previous one any more
        more = visit + 1 < parked.visits().count;
        if (more)
            fetch(parked.head(Parked::FIRST, key, problem.keys, problem.dim),
                  parked.head(Parked::SECOND, value, problem.keys, problem.dim), parked.visits().first(visit + 1),
                  1 - now);
        const Operand<ROWS, false> queries(q, warp_row()), douts(q, warp_row(), OWN);
        Drawn<ROWS, STEP> drawn;
        if (DROPOUT) {
            const Place place = parked.place();
            const int first_key = parked.visits().first(visit);
            drawn.draw([&](int row, int column) {
                return kept(problem.seed, problem.last_dropped, place.batch, place.head, place.first + warp_row() + row,
                            first_key + column);
            });
        }
        if (ONE_BODY || parked.visits().masked(visit))
            add_gradients<true>(dq, queries, douts, k[now], v[now], row_lse, row_delta, drawn, problem, mask, parked,
                                visit);
        else
            add_gradients<false>(dq, queries, douts, k[now], v[now], row_lse, row_delta, drawn, problem, mask, parked,
                                 visit);
    }
    previous_has_ended();  // so the end of this kernel is also the end of the kernel before it
    const Place again(block_index_again(), problem.queries, problem.heads, true);
    store_rows(head_of(dquery, again.batch, again.head, problem.queries, problem.dim), dq, all<ROWS / 8>(problem.scale),
               again.first + warp_index_again() / SPLIT * ROWS);
}
EXPORT(dquery)

#endif

#ifdef DQUERY_OF_SCORES

// Adds dQ / scale of one tile of OWN queries of one head over the keys of a chunk, from dS. SPLIT warps own the same
// queries, and each sums PART columns. After the last chunk, it fills dQ.
KERNEL(dquery_of_scores)(View<const Element> key, View<Element> dquery, Problem problem, Mask mask, Handed handed) {
    static_assert(ROWS == Handed::SIDE && STEP % Handed::SIDE == 0, "a warp reads whole pieces");
    constexpr int PART = DIM / SPLIT, PIECES = STEP / Handed::SIDE;
    using Sum = Sums<ROWS, PART>;
    using Fragments = Registers<unsigned, 4>[PIECES][2][2];
    const Place place(block_index(), problem.queries, problem.heads, true);
    const auto keys = head_of(key, place.batch, place.head / problem.groups(), problem.keys, problem.dim);
    Arena arena;
    const Pair<STEP> k = arena.pair();
    const auto visits = mask.keys_of(place.batch, place.head, place.first, OWN, problem.keys);
    const int end = smaller_of(visits.count, (handed.first_key + handed.length) / STEP);
    const int count = larger_of(end - handed.first_key / STEP, 0);
    const bool first = handed.first_key == 0, last = handed.first_key + handed.length >= problem.keys;
    if (count > 0) copy_tile<STEP>(k[0], keys, handed.first_key);
    previous_has_ended();  // dS is there now
    if (count == 0 && !first && !last) return;

    const int first_query = place.first + warp_row(), first_column = warp_index() % SPLIT * PART;
    const Global<float> sums =
        handed.sums + (static_cast<long long>(block_index()) * WARPS + warp_index()) * (ROWS * PART) + 4 * lane_index();
    Sum dq;
    dq.clear();
    if (!first) {
        UNROLL
        for (int i = 0; i < Sum::M * Sum::N; ++i) {
            alignas(16) float four[4];
            read_sixteen(four, Global<const float>(sums + 32 * 4 * i));
            UNROLL
            for (int j = 0; j < 4; ++j) dq.at[i / Sum::N][i % Sum::N][j] = four[j];
        }
    }
    const Global<unsigned> pieces =
        handed.row_of(place.batch * problem.heads + place.head, first_query / Handed::SIDE) + 4 * lane_index();
    // Reads the pieces of a step. A piece that was not written is hidden, or past the end: it counts as zeros.
    Fragments next;
    const auto read_pieces = [&](int visit) {
        UNROLL
        for (int piece = 0; piece < PIECES; ++piece) {
            const int at = visit * PIECES + piece, first_key = handed.first_key + at * Handed::SIDE;
            const bool written = first_query < problem.queries && first_key < problem.keys &&
                                 first_query >= handed.first_query(mask, first_key);
            UNROLL
            for (int i = 0; i < 4; ++i) {
                alignas(16) unsigned four[4] = {};
                if (written)
                    read_sixteen(four, Global<const unsigned>(pieces + at * Handed::PIECE + i * Handed::FRAGMENT));
                // The dS of keys past the end may be infinite, and inf 0 is NaN.
                if (first_key + Handed::SIDE > problem.keys) {
                    const int row = first_key + 16 * (i % 2) + lane_index() / 4;
                    if (row >= problem.keys) four[0] = four[2] = 0;
                    if (row + 8 >= problem.keys) four[1] = four[3] = 0;
                }
                UNROLL
                for (int j = 0; j < 4; ++j) next[piece][i / 2][i % 2][j] = four[j];
            }
        }
    };
    if (count > 0) read_pieces(0);
    for (int visit = 0; visit < count; ++visit) {
        copies_wait();
        barrier();      // all threads see this tile now, and no warp reads the previous one any more
        Fragments now;  // [pieces, halves of the keys, halves of the queries]
        UNROLL
        for (int piece = 0; piece < PIECES; ++piece) {
            UNROLL
            for (int i = 0; i < 4; ++i) {
                const Registers<unsigned, 4>& from = next[piece][i / 2][i % 2];
                Registers<unsigned, 4>& to = now[piece][i % 2][i / 2];
                UNROLL
                for (int j = 0; j < 4; ++j) to[j] = transposed(from[j / 2 + 2 * (j % 2)]);
            }
        }
        if (visit + 1 < count) {
            copy_tile<STEP>(k[(visit + 1) % 2], keys, handed.first_key + (visit + 1) * STEP);
            read_pieces(visit + 1);
        }
        const Tile<DIM> right = k[visit % 2];
        const Spot row = right.spot(lane_index() % 16, lane_index() / 16);
        UNROLL
        for (int step = 0; step < STEP / 16; ++step)
            add_sixteen(dq, now[step / 2][step % 2], right, row, 16 * step, first_column);
    }
    if (last) {
        store_rows(head_of(dquery, place.batch, place.head, problem.queries, problem.dim), dq,
                   all<ROWS / 8>(problem.scale), first_query, first_column);
        return;
    }
    UNROLL
    for (int i = 0; i < Sum::M * Sum::N; ++i) write_sixteen(sums + 32 * 4 * i, dq.at[i / Sum::N][i % Sum::N]);
}
EXPORT(dquery_of_scores)

#endif

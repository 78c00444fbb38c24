// FlashAttention-2 in CUDA C++ (Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", ICLR 2024; Algorithms 1 and 2).
//
// What changed against FlashAttention-1: the loops are exchanged. One block owns a tile of queries and runs over the keys, so the output, the running maximum m
// and the running sum l stay in registers; the output is divided by l once, at the end, and written once. Inside a block the rows are split between the warps
// and the keys are not, so no warp waits for another's numbers. Of the statistics only L = m + log l, the LSE, is stored. The backward has no atomics, so it is
// deterministic: one kernel owns a tile of keys and sums dK and dV over the queries, another owns a tile of queries and sums dQ over the keys; both
// recompute the weights P = exp(S - L), and read delta = rowsum(dO o O) from a third, small one.
//
// Each loop has two tiles in shared memory for each operand: while one is computed with, the next is on its way (cp.async). P and dS never leave the registers:
// as they come out of one product they are the left operand of the next.
//
// Arithmetic. A weight is 2^((s - m) c) with s = q k, m the largest s, and c = |scale| log2 e: subtract, then multiply. Equal scores then weigh exactly 1 however
// large they are; 2^(s c - m c), fused into one fma, leaves a residue of half an ulp of m c. In the backward S - L is one explicit fma. The compiler fuses
// nothing by itself. L is a float32: where scores are 1e5 its half ulp, 0.004, is what every weight of the backward is off by, relatively, and at 1e7 it is 0.5.
// That is the algorithm's, and the bound allows it; FlashAttention-1, which keeps m and l, has no such error.
//
// Compiled for one kernel at a time: FORWARD, DELTA, DKEY_DVALUE or DQUERY is defined. tiles.cuh says what else the loader defines.
#include "tiles.cuh"

// --------------------------------------------------------------------------------------------------------------------------------- masks

// What is visible, and which tiles a loop therefore visits. Another mask is another struct of this shape (block_sparse.cu).
#ifndef MASK
struct Mask {
    int offset;  // with CAUSAL, query i sees key j when j <= i + offset

    DEVICE bool sees(int query, int key) const { return !CAUSAL || key <= query + offset; }

    // The tiles of a loop: `count` of them, the first row of each, and whether some of its scores may be hidden or lie past the end.
    struct Visits {
        int start, count, clear_from, clear_to;  // the tiles from clear_from up to clear_to are seen whole

        DEVICE int first(int visit) const { return start + visit * STEP; }
        DEVICE bool masked(int visit) const { return visit < clear_from || visit >= clear_to; }
    };

    // The keys that the `length` queries from `first_query` on see: whole tiles that every one of them sees, then those that the diagonal or the end cuts.
    DEVICE Visits keys_of(int, int, int first_query, int length, int keys) const {
        const int seen_by_all = CAUSAL ? smaller_of(keys, larger_of(first_query + offset + 1, 0)) : keys;
        const int seen_by_any = CAUSAL ? smaller_of(keys, larger_of(first_query + offset + length, 0)) : keys;
        return {0, (seen_by_any + STEP - 1) / STEP, 0, seen_by_all / STEP};
    }

    // The queries that see any of the `length` keys from `first_key` on: first tiles that the diagonal cuts, then whole ones, then perhaps a ragged one.
    DEVICE Visits queries_of(int, int, int first_key, int length, int queries) const {
        const int start = CAUSAL ? larger_of(first_key - offset, 0) / STEP * STEP : 0;
        const int all_see = CAUSAL ? larger_of(first_key + length - 1 - offset, 0) : 0;
        return {start, larger_of(queries - start + STEP - 1, 0) / STEP, larger_of(all_see - start + STEP - 1, 0) / STEP, (queries - start) / STEP};
    }
};
#endif

// ------------------------------------------------------------------------------------------------------------------------------- places

// A block's place: its tile of OWN rows and its head. The last tile of queries comes first: with a causal mask it has the most to do.
constexpr int OWN = WARPS / SPLIT * ROWS;

struct Place {
    int first, head, batch;

    DEVICE Place(int rows, int heads, bool last_first) {
        const int tiles = (rows + OWN - 1) / OWN, tile = block_index() % tiles;
        first = (last_first ? tiles - 1 - tile : tile) * OWN;
        head = block_index() / tiles % heads;
        batch = block_index() / tiles / heads;
    }
};

// The first of the warp's ROWS rows in the block's tile.
DEVICE int warp_row() { return warp_index() / SPLIT * ROWS; }

// A tile that is seen whole has a body of its own in each loop, which spares it the mask. Beside dropout's draws, or copies of one number at a time, the mask is
// little, and two bodies would take more registers than there are and twice as long to compile.
#define ONE_BODY (DROPOUT || !VECTOR)

DEVICE long long first_row_of(const Problem& problem, int batch, int head) { return (static_cast<long long>(batch) * problem.heads + head) * problem.queries; }

// ------------------------------------------------------------------------------------------------------------------------------- forward

#ifdef FORWARD

// What a warp knows of its queries so far. A lane holds ROWS / 8 of the rows, a quarter of each.
struct Running {
    Sums<ROWS, DIM> out;  // undivided
    Registers<float, ROWS / 8> maximum, total;  // the largest score of the row, in all its lanes; the sum of this lane's weights
};

// Takes a tile of STEP keys into the running output, maximum and sum. MASKED: some of them may be hidden, or lie past the end.
template <bool MASKED, class Query>
DEVICE void attend(Running& row, const Query& q, Tile<DIM> k, Tile<DIM> v, const Drawn<ROWS, STEP>& drawn, const Problem& problem, const Mask& mask,
                   const Place& place, int first_key) {
    const int first_query = place.first + warp_row();
    Sums<ROWS, STEP> scores;
    scores.clear();
    rows_by_rows(scores, q, k);

    Registers<float, ROWS / 8> largest;
    UNROLL
    for (int r = 0; r < ROWS / 8; ++r) largest[r] = row.maximum[r];
    scores.each([&](float& score, int m, int n, int i) {
        score = with_sign(score);
        if (MASKED) {
            const int key = first_key + scores.column(n, i);
            if (key >= problem.keys || !mask.sees(first_query + scores.row(m, i), key)) score = -INFINITY;
        }
        largest[scores.slot(m, i)] = maximum_of(largest[scores.slot(m, i)], score);
    });
    Registers<float, ROWS / 8> rescale;
    UNROLL
    for (int r = 0; r < ROWS / 8; ++r) {
        const float maximum = quad_maximum(largest[r]);
        // A row that has seen no key yet, or none whose score is above -inf: -inf stays its maximum, but is not subtracted from -inf.
        largest[r] = maximum == -INFINITY ? 0.0f : maximum;
        rescale[r] = exp2_of((row.maximum[r] - largest[r]) * problem.exponent_scale);
        row.maximum[r] = maximum;
        row.total[r] *= rescale[r];
    }
    scores.each([&](float& score, int m, int n, int i) {
        const int r = scores.slot(m, i);
        score = exp2_of((score - largest[r]) * problem.exponent_scale);  // a weight from here on
        row.total[r] += score;
        if (DROPOUT && drawn.drops(m, n, i)) score = 0.0f;
    });
    row.out.each([&](float& sum, int m, int, int i) { sum *= rescale[row.out.slot(m, i)]; });
    rows_by_columns(row.out, Weights<ROWS, STEP>(scores), v);
}

// One tile of OWN queries of one head: its output and LSE.
KERNEL(forward)(View<const Element> query, View<const Element> key, View<const Element> value, View<Element> out, Global<float> lse, Problem problem, Mask mask) {
    const Place place(problem.queries, problem.heads, true);
    const auto queries = head_of(query, place.batch, place.head, problem.queries, problem.dim);
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
    copy_tile<OWN>(q, queries, place.first);
    const auto fetch = [&](int first_key, int to) {
        copy_tile<STEP>(k[to], keys, first_key);
        copy_tile<STEP>(v[to], values, first_key);
    };
    int next_key = 0;
    if (visits.count > 0) fetch(next_key = visits.first(0), 0);
    Operand<ROWS, HOLD> held(q, warp_row());
    for (int visit = 0; visit < visits.count; ++visit) {
        const int now = visit % 2, first_key = next_key;
        copies_wait();
        barrier();  // this tile is there for all, and the one before is no longer read
        if (visit == 0) held.hold();
        if (visit + 1 < visits.count) fetch(next_key = visits.first(visit + 1), 1 - now);
        Drawn<ROWS, STEP> drawn;
        if (DROPOUT) {
            drawn.draw([&](int row, int column) {
                return kept(problem.seed, problem.last_dropped, place.batch, place.head, place.first + warp_row() + row, first_key + column);
            });
        }
        if (ONE_BODY || visits.masked(visit))
            attend<true>(row, held, k[now], v[now], drawn, problem, mask, place, first_key);
        else
            attend<false>(row, held, k[now], v[now], drawn, problem, mask, place, first_key);
    }

    // A row that saw no key has maximum -inf and total 0: its LSE is -inf by itself, and its output 0.
    const Global<float> row_lse = lse + first_row_of(problem, place.batch, place.head);
    Registers<float, ROWS / 8> factors;
    UNROLL
    for (int r = 0; r < ROWS / 8; ++r) {
        const float total = quad_sum(row.total[r]);
        const int at = place.first + warp_row() + row.out.row(r / 2, 2 * (r % 2));
        if (lane_index() % 4 == 0 && at < problem.queries) row_lse[at] = multiply_add(row.maximum[r], problem.magnitude, log_of(total));
        factors[r] = problem.kept_scale / (total == 0.0f ? 1.0f : total);
    }
    store_rows(head_of(out, place.batch, place.head, problem.queries, problem.dim), row.out, factors, place.first + warp_row());
}
EXPORT(forward)

#endif

// ------------------------------------------------------------------------------------------------------------------------------ backward

#ifdef DELTA

// delta = rowsum(dO o O) in float32, one warp to a row. dO has strides of its own.
KERNEL(delta)(View<const Element> out, View<const Element> dout, Global<float> delta, int heads, int queries, int dim) {
    const int tiles = (queries + WARPS - 1) / WARPS;
    const int row = block_index() % tiles * WARPS + warp_index(), head = block_index() / tiles % heads, batch = block_index() / tiles / heads;
    const auto o = head_of(out, batch, head, queries, dim), d = head_of(dout, batch, head, queries, dim);
    float sum = 0.0f;
    if (row < queries) {
        for (int column = lane_index(); column < dim; column += 32) sum = multiply_add(to_float(o.at(row, column)[0]), to_float(d.at(row, column)[0]), sum);
    }
    sum = warp_sum(sum);
    if (row < queries && lane_index() == 0) delta[(static_cast<long long>(batch) * heads + head) * queries + row] = sum;
}
EXPORT(delta)

#endif

#if defined(DKEY_DVALUE) || defined(DQUERY)

// P = exp(magnitude score - lse), in which an lse of -inf means an empty row, all of whose weights are 0.
// No weight is above 1. For huge scores the rounding of the stored LSE may say otherwise (half an ulp of 1e10 is 512): it is kept from overflowing. NaN stays NaN.
DEVICE float weight_of(float score, float lse, float magnitude) {
    const float exponent = multiply_add(score, magnitude, lse == -INFINITY ? -INFINITY : -lse);
    return exp2_of((exponent > 0.0f ? 0.0f : exponent) * LOG2_E);
}

#endif

#ifdef DKEY_DVALUE

constexpr int PART = DIM / SPLIT;  // columns of dK and dV that a warp sums

// Adds what a tile of STEP queries gives to dK / scale and to dV / kept_scale. Scores stand transposed here, [keys, queries]: P^T and dS^T are left operands.
// MASKED: some queries may lie before the diagonal, or past the end. Keys past the end need no mask: they have rows of their own, finite and never stored.
template <bool MASKED>
DEVICE void add_gradients(Sums<ROWS, PART>& dk, Sums<ROWS, PART>& dv, Tile<DIM> k, Tile<DIM> v, Tile<DIM> q, Tile<DIM> d, const float* lse, const float* delta,
                          const Drawn<ROWS, STEP>& drawn, const Problem& problem, const Mask& mask, const Place& place, int first_query) {
    const int first_key = place.first + warp_row(), first_column = warp_index() % SPLIT * PART;
    const auto hidden = [&](int m, int n, int i) {
        const int query = first_query + Sums<ROWS, STEP>::column(n, i);
        return query >= problem.queries || !mask.sees(query, first_key + Sums<ROWS, STEP>::row(m, i));
    };
    Sums<ROWS, STEP> p;  // scores first
    p.clear();
    rows_by_rows(p, Operand<ROWS, false>(k, warp_row()), q);
    p.each([&](float& score, int m, int n, int i) {
        score = weight_of(with_sign(score), read(lse + p.column(n, i)), problem.magnitude);
        if (MASKED && hidden(m, n, i)) score = 0.0f;
    });
    if (DROPOUT) {
        Sums<ROWS, STEP> remaining = p;
        remaining.each([&](float& weight, int m, int n, int i) { if (drawn.drops(m, n, i)) weight = 0.0f; });
        rows_by_columns(dv, Weights<ROWS, STEP>(remaining), d, first_column);
    } else {
        rows_by_columns(dv, Weights<ROWS, STEP>(p), d, first_column);
    }
    Sums<ROWS, STEP> ds;  // dP first
    ds.clear();
    rows_by_rows(ds, Operand<ROWS, false>(v, warp_row()), d);
    ds.each([&](float& dp, int m, int n, int i) {
        const float weight = p.at[m][n][i];
        if (DROPOUT) dp = drawn.drops(m, n, i) ? 0.0f : dp * problem.kept_scale;
        dp = magnitude_of(weight) * (dp - read(delta + p.column(n, i)));
        if (MASKED && hidden(m, n, i)) dp = 0.0f;  // where a hidden value is so large that dP is infinite, 0 inf is not 0
    });
    rows_by_columns(dk, Weights<ROWS, STEP>(ds), q, first_column);
}

// dK and dV of one tile of OWN keys of one key head, summed over the queries of all query heads that share it.
KERNEL(dkey_dvalue)(View<const Element> query, View<const Element> key, View<const Element> value, View<const Element> dout, Global<const float> lse,
                    Global<const float> delta, View<Element> dkey, View<Element> dvalue, Problem problem, Mask mask) {
    const Place place(problem.keys, problem.kv_heads, false);
    Arena arena;
    const Tile<DIM> k = arena.tile<DIM>(OWN), v = arena.tile<DIM>(OWN);
    const Pair<STEP> q = arena.pair(), d = arena.pair();
    float *const row_lse = arena.numbers(2 * STEP), *const row_delta = arena.numbers(2 * STEP);  // pairs too

    Sums<ROWS, PART> dk, dv;
    dk.clear();
    dv.clear();
    copy_tile<OWN>(k, head_of(key, place.batch, place.head, problem.keys, problem.dim), place.first);
    copy_tile<OWN>(v, head_of(value, place.batch, place.head, problem.keys, problem.dim), place.first);
    for (int head = place.head * problem.groups(); head < (place.head + 1) * problem.groups(); ++head) {
        const auto queries = head_of(query, place.batch, head, problem.queries, problem.dim);
        const auto douts = head_of(dout, place.batch, head, problem.queries, problem.dim);
        const long long first_row = first_row_of(problem, place.batch, head);
        const auto visits = mask.queries_of(place.batch, head, place.first, OWN, problem.queries);
        const auto fetch = [&](int first_query, int to) {
            copy_tile<STEP>(q[to], queries, first_query);
            copy_tile<STEP>(d[to], douts, first_query);
            copy_numbers<STEP>(row_lse + to * STEP, lse + first_row, first_query, problem.queries);
            copy_numbers<STEP>(row_delta + to * STEP, delta + first_row, first_query, problem.queries);
        };
        barrier();  // the head before is no longer read
        int next_query = 0;
        if (visits.count > 0) fetch(next_query = visits.first(0), 0);
        for (int visit = 0; visit < visits.count; ++visit) {
            const int now = visit % 2, first_query = next_query;
            copies_wait();
            barrier();  // this tile is there for all, and the one before is no longer read
            if (visit + 1 < visits.count) fetch(next_query = visits.first(visit + 1), 1 - now);
            Drawn<ROWS, STEP> drawn;
            if (DROPOUT) {
                drawn.draw([&](int row, int column) {
                    return kept(problem.seed, problem.last_dropped, place.batch, head, first_query + column, place.first + warp_row() + row);
                });
            }
            if (ONE_BODY || visits.masked(visit))
                add_gradients<true>(dk, dv, k, v, q[now], d[now], row_lse + now * STEP, row_delta + now * STEP, drawn, problem, mask, place, first_query);
            else
                add_gradients<false>(dk, dv, k, v, q[now], d[now], row_lse + now * STEP, row_delta + now * STEP, drawn, problem, mask, place, first_query);
        }
    }
    const int first_key = place.first + warp_row(), first_column = warp_index() % SPLIT * PART;
    store_rows(head_of(dkey, place.batch, place.head, problem.keys, problem.dim), dk, all<ROWS / 8>(problem.scale), first_key, first_column);
    store_rows(head_of(dvalue, place.batch, place.head, problem.keys, problem.dim), dv, all<ROWS / 8>(problem.kept_scale), first_key, first_column);
}
EXPORT(dkey_dvalue)

#endif

#ifdef DQUERY

// Adds what a tile of STEP keys gives to dQ / scale. MASKED: some of them may be hidden, or lie past the end.
// A key past the end is loaded as 0 and would score 0, which is far above an LSE of -100: its weight has to be masked, not only its key.
template <bool MASKED>
DEVICE void add_gradients(Sums<ROWS, DIM>& dq, const Operand<ROWS, false>& q, const Operand<ROWS, false>& d, Tile<DIM> k, Tile<DIM> v,
                          const Registers<float, ROWS / 8>& lse, const Registers<float, ROWS / 8>& delta, const Drawn<ROWS, STEP>& drawn,
                          const Problem& problem, const Mask& mask, const Place& place, int first_key) {
    const int first_query = place.first + warp_row();
    Sums<ROWS, STEP> p;  // scores first
    p.clear();
    rows_by_rows(p, q, k);
    p.each([&](float& score, int m, int, int i) { score = weight_of(with_sign(score), lse[p.slot(m, i)], problem.magnitude); });
    Sums<ROWS, STEP> ds;  // dP first
    ds.clear();
    rows_by_rows(ds, d, v);
    ds.each([&](float& dp, int m, int n, int i) {
        const int query = first_query + p.row(m, i), key = first_key + p.column(n, i);
        if (DROPOUT) dp = drawn.drops(m, n, i) ? 0.0f : dp * problem.kept_scale;
        dp = p.at[m][n][i] * (dp - delta[p.slot(m, i)]);
        if (MASKED && (key >= problem.keys || !mask.sees(query, key))) dp = 0.0f;
    });
    rows_by_columns(dq, Weights<ROWS, STEP>(ds), k);
}

// dQ of one tile of OWN queries of one head; the loop is the forward's.
KERNEL(dquery)(View<const Element> query, View<const Element> key, View<const Element> value, View<const Element> dout, Global<const float> lse,
               Global<const float> delta, View<Element> dquery, Problem problem, Mask mask) {
    const Place place(problem.queries, problem.heads, true);
    const auto keys = head_of(key, place.batch, place.head / problem.groups(), problem.keys, problem.dim);
    const auto values = head_of(value, place.batch, place.head / problem.groups(), problem.keys, problem.dim);
    Arena arena;
    const Tile<DIM> q = arena.tile<DIM>(OWN), d = arena.tile<DIM>(OWN);
    const Pair<STEP> k = arena.pair(), v = arena.pair();
    const auto visits = mask.keys_of(place.batch, place.head, place.first, OWN, problem.keys);

    Sums<ROWS, DIM> dq;
    dq.clear();
    copy_tile<OWN>(q, head_of(query, place.batch, place.head, problem.queries, problem.dim), place.first);
    copy_tile<OWN>(d, head_of(dout, place.batch, place.head, problem.queries, problem.dim), place.first);
    const auto fetch = [&](int first_key, int to) {
        copy_tile<STEP>(k[to], keys, first_key);
        copy_tile<STEP>(v[to], values, first_key);
    };
    int next_key = 0;
    if (visits.count > 0) fetch(next_key = visits.first(0), 0);
    const long long first_row = first_row_of(problem, place.batch, place.head);
    Registers<float, ROWS / 8> row_lse, row_delta;
    UNROLL
    for (int r = 0; r < ROWS / 8; ++r) {
        const int row = place.first + warp_row() + dq.row(r / 2, 2 * (r % 2));
        row_lse[r] = row < problem.queries ? lse[first_row + row] : INFINITY;
        row_delta[r] = row < problem.queries ? delta[first_row + row] : 0.0f;
    }
    for (int visit = 0; visit < visits.count; ++visit) {
        const int now = visit % 2, first_key = next_key;
        copies_wait();
        barrier();  // this tile is there for all, and the one before is no longer read
        if (visit + 1 < visits.count) fetch(next_key = visits.first(visit + 1), 1 - now);
        const Operand<ROWS, false> queries(q, warp_row()), douts(d, warp_row());
        Drawn<ROWS, STEP> drawn;
        if (DROPOUT) {
            drawn.draw([&](int row, int column) {
                return kept(problem.seed, problem.last_dropped, place.batch, place.head, place.first + warp_row() + row, first_key + column);
            });
        }
        if (ONE_BODY || visits.masked(visit))
            add_gradients<true>(dq, queries, douts, k[now], v[now], row_lse, row_delta, drawn, problem, mask, place, first_key);
        else
            add_gradients<false>(dq, queries, douts, k[now], v[now], row_lse, row_delta, drawn, problem, mask, place, first_key);
    }
    store_rows(head_of(dquery, place.batch, place.head, problem.queries, problem.dim), dq, all<ROWS / 8>(problem.scale), place.first + warp_row());
}
EXPORT(dquery)

#endif

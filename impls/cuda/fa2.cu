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
//
// Each loop has two tiles in shared memory for each operand. While the block computes with one tile, the next one is
// copied asynchronously (cp.async). P and dS stay in registers: the result of one product has the layout of the left
// operand of the next product.
//
// Arithmetic. A weight is 2^((s - m) c) with s = q k, m the largest s so far, and c = |scale| log2 e. The kernel
// subtracts first and then multiplies, so equal scores weigh exactly 1, however large they are. A fused multiply-add
// for 2^(s c - m c) would leave a residue of half an ulp of m c. In the backward, S - L is one explicit fma. The
// compiler does not fuse anything itself. L is a float32, and half an ulp of L is a relative error of every weight in
// the backward. It is 0.004 for scores of 1e5, and 0.5 for scores of 1e7. This error belongs to the algorithm, and the
// bound allows it. FlashAttention-1 stores m and l, and does not have this error.
//
// The loader compiles one kernel at a time for a GPU, and defines FORWARD, DELTA, DKEY_DVALUE or DQUERY. The CPU twin
// gets all kernels at once. tiles.cuh lists what else the loader defines.
#include "tiles.cuh"

// --------------------------------------------------------------------------------------------------------------- masks

// The mask says which keys a query sees, and which tiles a loop visits. For another kind of mask, define another struct
// with these members (block_sparse.cu).
#ifndef MASK
struct Mask {
    int offset;  // with CAUSAL, query i sees key j if j <= i + offset

    DEVICE bool sees(int query, int key) const { return !CAUSAL || key <= query + offset; }

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

// Each loop has a second body, without a mask, for tiles that need none. With dropout, or with copies of one number at
// a time, there is only the body with a mask. The mask costs little then, and two bodies would need too many registers
// and twice as much time to compile.
#define ONE_BODY (DROPOUT || !VECTOR)

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
                   const Problem& problem, const Mask& mask, const Place& place, int first_key) {
    const int first_query = place.first + warp_row();
    Sums<ROWS, STEP> scores;
    scores.clear();
    rows_by_rows(scores, q, k);

    Registers<float, ROWS / 8> largest;
    UNROLL
    for (int r = 0; r < ROWS / 8; ++r) largest[r] = row.maximum[r];
    scores.each([&](float& score, int m, int n, int i) {
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
        // The maximum is -inf if the row has seen no key yet, or only scores of -inf. It stays -inf, but the kernel
        // subtracts 0 in its place: -inf - -inf would be NaN.
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

// Computes the output and the LSE of one tile of OWN queries of one head. lse [batch, heads, queries] is contiguous.
KERNEL(forward)(View<const Element> query, View<const Element> key, View<const Element> value, View<Element> out,
                Global<float> lse, Problem problem, Mask mask) {
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
        barrier();  // all threads see this tile now, and no warp reads the previous one any more
        if (visit == 0) {
            times_sign<OWN>(q, problem.scale);
            held.hold();
        }
        if (visit + 1 < visits.count) fetch(next_key = visits.first(visit + 1), 1 - now);
        Drawn<ROWS, STEP> drawn;
        if (DROPOUT) {
            drawn.draw([&](int row, int column) {
                return kept(problem.seed, problem.last_dropped, place.batch, place.head, place.first + warp_row() + row,
                            first_key + column);
            });
        }
        if (ONE_BODY || visits.masked(visit))
            attend<true>(row, held, k[now], v[now], drawn, problem, mask, place, first_key);
        else
            attend<false>(row, held, k[now], v[now], drawn, problem, mask, place, first_key);
    }

    // A row that sees no key has maximum -inf and total 0. The formulas below then give LSE -inf and output 0.
    const Global<float> row_lse = lse + first_row_of(problem, place.batch, place.head);
    Registers<float, ROWS / 8> factors;
    UNROLL
    for (int r = 0; r < ROWS / 8; ++r) {
        const float total = quad_sum(row.total[r]);
        const int at = place.first + warp_row() + row.out.row(r / 2, 2 * (r % 2));
        if (lane_index() % 4 == 0 && at < problem.queries)
            row_lse[at] = multiply_add(row.maximum[r], problem.magnitude, log_of(total));
        factors[r] = problem.kept_scale / (total == 0.0f ? 1.0f : total);
    }
    store_rows(head_of(out, place.batch, place.head, problem.queries, problem.dim), row.out, factors,
               place.first + warp_row());
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

#ifdef DKEY_DVALUE

constexpr int PART = DIM / SPLIT;  // columns of dK and dV that a warp sums

// Adds the share of a tile of STEP queries to dK / scale and to dV / kept_scale. Scores are transposed here, [keys,
// queries], so that P^T and dS^T are left operands. MASKED: some queries may be before the diagonal or past the end.
// Keys past the end need no mask: each has a row of its own, which is finite and never stored.
template <bool MASKED>
DEVICE void add_gradients(Sums<ROWS, PART>& dk, Sums<ROWS, PART>& dv, Tile<DIM> k, Tile<DIM> v, Tile<DIM> q,
                          Tile<DIM> d, const float* lse, const float* delta, const Drawn<ROWS, STEP>& drawn,
                          const Problem& problem, const Mask& mask, const Place& place, int first_query) {
    const int first_key = place.first + warp_row(), first_column = warp_index() % SPLIT * PART;
    const auto hidden = [&](int m, int n, int i) {
        const int query = first_query + Sums<ROWS, STEP>::column(n, i);
        return query >= problem.queries || !mask.sees(query, first_key + Sums<ROWS, STEP>::row(m, i));
    };
    Sums<ROWS, STEP> p;  // first the scores, then the weights
    p.clear();
    rows_by_rows(p, Operand<ROWS, false>(k, warp_row()), q);
    p.each([&](float& score, int m, int n, int i) {
        score = weight_of(score, read(lse + p.column(n, i)), problem.scale);
        if (MASKED && hidden(m, n, i)) score = 0.0f;
    });
    if (DROPOUT) {
        Sums<ROWS, STEP> remaining = p;
        remaining.each([&](float& weight, int m, int n, int i) {
            if (drawn.drops(m, n, i)) weight = 0.0f;
        });
        rows_by_columns(dv, Weights<ROWS, STEP>(remaining), d, first_column);
    } else {
        rows_by_columns(dv, Weights<ROWS, STEP>(p), d, first_column);
    }
    Sums<ROWS, STEP> ds;  // first dP, then dS
    ds.clear();
    rows_by_rows(ds, Operand<ROWS, false>(v, warp_row()), d);
    ds.each([&](float& dp, int m, int n, int i) {
        const float weight = p.at[m][n][i];
        if (DROPOUT) dp = drawn.drops(m, n, i) ? 0.0f : dp * problem.kept_scale;
        dp = magnitude_of(weight) * (dp - read(delta + p.column(n, i)));
        if (MASKED && hidden(m, n, i)) dp = 0.0f;  // a hidden value may make dP infinite, and 0 inf is not 0
    });
    rows_by_columns(dk, Weights<ROWS, STEP>(ds), q, first_column);
}

// Computes dK and dV of one tile of OWN keys of one key head. The sums run over the queries of all query heads that
// share this key head.
KERNEL(dkey_dvalue)(View<const Element> query, View<const Element> key, View<const Element> value,
                    View<const Element> dout, Global<const float> lse, Global<const float> delta, View<Element> dkey,
                    View<Element> dvalue, Problem problem, Mask mask) {
    const Place place(problem.keys, problem.kv_heads, false);
    Arena arena;
    const Tile<DIM> k = arena.tile<DIM>(OWN), v = arena.tile<DIM>(OWN);
    const Pair<STEP> q = arena.pair(), d = arena.pair();
    // The LSE and delta of two tiles of queries.
    float *const row_lse = arena.numbers(2 * STEP), *const row_delta = arena.numbers(2 * STEP);

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
        barrier();  // no warp reads the tiles of the previous head any more
        int next_query = 0;
        if (visits.count > 0) fetch(next_query = visits.first(0), 0);
        for (int visit = 0; visit < visits.count; ++visit) {
            const int now = visit % 2, first_query = next_query;
            copies_wait();
            barrier();  // all threads see this tile now, and no warp reads the previous one any more
            if (visit + 1 < visits.count) fetch(next_query = visits.first(visit + 1), 1 - now);
            Drawn<ROWS, STEP> drawn;
            if (DROPOUT) {
                drawn.draw([&](int row, int column) {
                    return kept(problem.seed, problem.last_dropped, place.batch, head, first_query + column,
                                place.first + warp_row() + row);
                });
            }
            if (ONE_BODY || visits.masked(visit))
                add_gradients<true>(dk, dv, k, v, q[now], d[now], row_lse + now * STEP, row_delta + now * STEP, drawn,
                                    problem, mask, place, first_query);
            else
                add_gradients<false>(dk, dv, k, v, q[now], d[now], row_lse + now * STEP, row_delta + now * STEP, drawn,
                                     problem, mask, place, first_query);
        }
    }
    const int first_key = place.first + warp_row(), first_column = warp_index() % SPLIT * PART;
    store_rows(head_of(dkey, place.batch, place.head, problem.keys, problem.dim), dk, all<ROWS / 8>(problem.scale),
               first_key, first_column);
    store_rows(head_of(dvalue, place.batch, place.head, problem.keys, problem.dim), dv,
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
                          const Problem& problem, const Mask& mask, const Place& place, int first_key) {
    const int first_query = place.first + warp_row();
    Sums<ROWS, STEP> p;  // first the scores, then the weights
    p.clear();
    rows_by_rows(p, q, k);
    p.each([&](float& score, int m, int, int i) { score = weight_of(score, lse[p.slot(m, i)], problem.scale); });
    Sums<ROWS, STEP> ds;  // first dP, then dS
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

// Computes dQ of one tile of OWN queries of one head. The loop visits the same tiles of keys as in the forward.
KERNEL(dquery)(View<const Element> query, View<const Element> key, View<const Element> value, View<const Element> dout,
               Global<const float> lse, Global<const float> delta, View<Element> dquery, Problem problem, Mask mask) {
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
        barrier();  // all threads see this tile now, and no warp reads the previous one any more
        if (visit + 1 < visits.count) fetch(next_key = visits.first(visit + 1), 1 - now);
        const Operand<ROWS, false> queries(q, warp_row()), douts(d, warp_row());
        Drawn<ROWS, STEP> drawn;
        if (DROPOUT) {
            drawn.draw([&](int row, int column) {
                return kept(problem.seed, problem.last_dropped, place.batch, place.head, place.first + warp_row() + row,
                            first_key + column);
            });
        }
        if (ONE_BODY || visits.masked(visit))
            add_gradients<true>(dq, queries, douts, k[now], v[now], row_lse, row_delta, drawn, problem, mask, place,
                                first_key);
        else
            add_gradients<false>(dq, queries, douts, k[now], v[now], row_lse, row_delta, drawn, problem, mask, place,
                                 first_key);
    }
    store_rows(head_of(dquery, place.batch, place.head, problem.queries, problem.dim), dq, all<ROWS / 8>(problem.scale),
               place.first + warp_row());
}
EXPORT(dquery)

#endif

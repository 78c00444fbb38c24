// FlashAttention-1 in CUDA C++ (Dao, Fu, Ermon, Rudra, Ré, "FlashAttention: Fast and Memory-Efficient Exact Attention
// with IO-Awareness", NeurIPS 2022; Algorithms 1 and 4).
//
// The paper asks how to compute attention without writing the matrix of scores [queries, keys] to device memory. This
// file implements its answer:
//
// - One block of threads owns one (batch, head). Its outer loop copies a tile of keys and a tile of values on chip. Its
//   inner loop passes over all tiles of queries.
// - The softmax is computed tile by tile. The state of a tile of queries is its output O, its running maximum m and its
//   running sum l. This state lives in device memory. Each step reads it, rescales it, adds the share of one tile of
//   keys and writes it back. Each step also normalises O, so O is always the weighted average of the values seen so
//   far.
// - The backward recomputes the weights from m and l, with the same order of loops. It accumulates dK and dV of the
//   outer tile on chip. Each step reads dQ, adds to it and writes it back.
//
// So the output is read from device memory and written back once for each tile of keys. FlashAttention-2 exchanges the
// loops to avoid this (fa2.cu).
//
// Two things differ from the paper. First, O and dQ are float32 in device memory, also for 16-bit inputs, and they are
// rounded once at the end. Each step rewrites them, so a rounding at each step would add an error for each tile of
// keys. Second, the block that owns a key head sums the gradients of this head over all query heads that share it. So
// the backward needs no atomics, and every run gives the same bits.
//
// Arithmetic. A weight is 2^((s - m) c) with s = q k and c = |scale| log2 e. The kernel subtracts first and then
// multiplies, so equal scores cancel exactly, however large they are. A masked score is -inf, and its weight is exactly
// 0. A row that has seen no key has the maximum -inf. The kernel stores -inf, but it subtracts 0 in its place.
//
// The loader compiles one kernel at a time for a GPU, and defines FORWARD or BACKWARD. The CPU twin gets both kernels
// at once. tiles.cuh lists what else the loader defines. STEP is the number of keys of a tile (B_c in the paper), and
// OWN is the number of queries (B_r).
#include "tiles.cuh"

constexpr int OWN = WARPS * ROWS;

// The first of the warp's ROWS queries in a tile of queries.
DEVICE int warp_row() { return warp_index() * ROWS; }

// The maximum that the kernel subtracts. It is 0 if the maximum is -inf, as in a row that has seen no key: -inf - -inf
// would be NaN, and with 0 all terms of the row stay -inf.
DEVICE float finite(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

DEVICE bool sees(int query, int key, const Problem& problem, int offset) {
    return query < problem.queries && key < problem.keys && (!CAUSAL || key <= query + offset);
}

// The first query of the first tile with a query that sees a key from first_key on. It is a multiple of OWN.
DEVICE int first_seeing(int first_key, int offset) { return CAUSAL ? larger_of(first_key - offset, 0) / OWN * OWN : 0; }

// ------------------------------------------------------------------------------------------------------------- forward

#ifdef FORWARD

// Algorithm 1 for one batch and query head. out [batch, heads, queries, dim], row_max, row_sum and lse [batch, heads,
// queries] are contiguous and float32. The host sets out, row_max and row_sum to 0, -inf and 0.
KERNEL(forward)(View<const Element> query, View<const Element> key, View<const Element> value, Global<float> out,
                Global<float> row_max, Global<float> row_sum, Global<float> lse, Problem problem, int offset) {
    const int head = block_index() % problem.heads, batch = block_index() / problem.heads;
    const long long first_row = static_cast<long long>(block_index()) * problem.queries;
    const auto queries = head_of(query, batch, head, problem.queries, problem.dim);
    const auto keys = head_of(key, batch, head / problem.groups(), problem.keys, problem.dim);
    const auto values = head_of(value, batch, head / problem.groups(), problem.keys, problem.dim);
    Arena arena;
    const Tile<DIM> q = arena.tile<DIM>(OWN), k = arena.tile<DIM>(STEP), v = arena.tile<DIM>(STEP);

    // The number of keys that the last query sees. With a causal mask it sees the most.
    const int seen_keys = CAUSAL ? smaller_of(problem.keys, problem.queries + offset) : problem.keys;
    for (int first_key = 0; first_key < seen_keys; first_key += STEP) {
        barrier();  // no warp reads the previous tiles any more
        copy_tile<STEP>(k, keys, first_key);
        copy_tile<STEP>(v, values, first_key);
        for (int first_query = first_seeing(first_key, offset); first_query < problem.queries; first_query += OWN) {
            barrier();  // no warp reads the previous queries any more
            copy_tile<OWN>(q, queries, first_query);
            const int first = first_query + warp_row();
            Sums<ROWS, STEP> scores;
            Registers<float, ROWS / 8> old_max, old_sum;
            UNROLL
            for (int r = 0; r < ROWS / 8; ++r) {
                const int row = first + scores.row(r / 2, 2 * (r % 2));
                old_max[r] = row < problem.queries ? row_max[first_row + row] : -INFINITY;
                old_sum[r] = row < problem.queries ? row_sum[first_row + row] : 0.0f;
            }
            copies_wait();
            // All threads see the tiles now. The four lanes that share a row have read what one of them will write.
            barrier();
            times_sign<OWN>(q, problem.scale);

            Drawn<ROWS, STEP> drawn;
            if (DROPOUT)
                drawn.draw([&](int row, int column) {
                    return kept(problem.seed, problem.last_dropped, batch, head, first + row, first_key + column);
                });

            // The softmax of this tile, relative to its own maximum.
            scores.clear();
            rows_by_rows(scores, Operand<ROWS, false>(q, warp_row()), k);
            Registers<float, ROWS / 8> tile_max = all<ROWS / 8>(-INFINITY), tile_sum = all<ROWS / 8>(0.0f);
            scores.each([&](float& score, int m, int n, int i) {
                const bool seen = sees(first + scores.row(m, i), first_key + scores.column(n, i), problem, offset);
                if (!seen) score = -INFINITY;
                tile_max[scores.slot(m, i)] = maximum_of(tile_max[scores.slot(m, i)], score);
            });
            UNROLL
            for (int r = 0; r < ROWS / 8; ++r) tile_max[r] = quad_maximum(tile_max[r]);
            scores.each([&](float& score, int m, int n, int i) {
                const int r = scores.slot(m, i);
                score = exp2_of((score - finite(tile_max[r])) * problem.exponent_scale);  // a weight from here on
                tile_sum[r] += score;
                if (DROPOUT && drawn.drops(m, n, i)) score = 0.0f;
            });
            Sums<ROWS, DIM> tile_out;
            tile_out.clear();
            rows_by_columns(tile_out, Weights<ROWS, STEP>(scores), v);

            // Combines this tile with the rows' earlier state.
            Registers<float, ROWS / 8> old_share, tile_share;
            UNROLL
            for (int r = 0; r < ROWS / 8; ++r) {
                const int row = first + scores.row(r / 2, 2 * (r % 2));
                const float new_max = maximum_of(old_max[r], tile_max[r]);
                const float old_part = old_sum[r] * exp2_of((old_max[r] - finite(new_max)) * problem.exponent_scale);
                const float rescale = exp2_of((tile_max[r] - finite(new_max)) * problem.exponent_scale);
                const float new_sum = old_part + quad_sum(tile_sum[r]) * rescale;
                const float divisor = new_sum == 0.0f ? 1.0f : new_sum;  // the output of a row without keys stays 0
                old_share[r] = old_part / divisor;
                tile_share[r] = rescale * problem.kept_scale / divisor;
                if (lane_index() % 4 == 0 && row < problem.queries) {
                    row_max[first_row + row] = new_max;
                    row_sum[first_row + row] = new_sum;
                }
            }
            tile_out.each([&](float sum, int m, int n, int i) {
                const int r = tile_out.slot(m, i), row = first + tile_out.row(m, i), column = tile_out.column(n, i);
                if (row < problem.queries && column < problem.dim) {
                    float& so_far = out[(first_row + row) * problem.dim + column];
                    so_far = so_far * old_share[r] + sum * tile_share[r];
                }
            });
        }
    }
    barrier();  // all threads see the statistics now
    for (int row = thread_index(); row < problem.queries; row += 32 * WARPS)
        lse[first_row + row] =
            multiply_add(row_max[first_row + row], problem.magnitude, log_of(row_sum[first_row + row]));
}
EXPORT(forward)

#endif

// ------------------------------------------------------------------------------------------------------------ backward

#ifdef BACKWARD

// A warp sums KEY_ROWS rows of dK and dV [STEP, DIM]. If there are fewer groups of rows than warps, it sums only PART
// of the columns.
constexpr int KEY_ROWS = STEP / WARPS > 16 ? STEP / WARPS : 16;
constexpr int PART = DIM * STEP / (KEY_ROWS * WARPS);
// The columns of dQ that a warp sums at a time. With more columns, too few registers are left for the rest.
constexpr int COLUMNS = 64;

// Rounds a warp's numbers and writes them into the warp's rows of a tile [OWN, STEP].
DEVICE void write_rows(Tile<STEP> to, Sums<ROWS, STEP>& numbers) {
    numbers.each([&](float number, int m, int n, int i) {
        write(to.at(warp_row() + numbers.row(m, i), numbers.column(n, i)), rounded<Element>(number));
    });
}

// Algorithm 4 for one batch and key head. row_max and row_sum [batch, heads, queries] are contiguous, as the forward
// left them. out is contiguous too, and has the inputs' type. dquery [batch, heads, queries, dim] is contiguous and
// float32, and the host sets it to 0. dkey and dvalue are contiguous.
KERNEL(backward)(View<const Element> query, View<const Element> key, View<const Element> value,
                 View<const Element> dout, View<const Element> out, Global<const float> row_max,
                 Global<const float> row_sum, Global<float> dquery, View<Element> dkey, View<Element> dvalue,
                 Problem problem, int offset) {
    const int kv_head = block_index() % problem.kv_heads, batch = block_index() / problem.kv_heads;
    const auto keys = head_of(key, batch, kv_head, problem.keys, problem.dim),
               values = head_of(value, batch, kv_head, problem.keys, problem.dim);
    Arena arena;
    const Tile<DIM> q = arena.tile<DIM>(OWN), d = arena.tile<DIM>(OWN), k = arena.tile<DIM>(STEP),
                    v = arena.tile<DIM>(STEP);
    const Tile<STEP> shared_p = arena.tile<STEP>(OWN), shared_ds = arena.tile<STEP>(OWN);
    // The first row and the first column of dK and dV that the warp sums.
    const int first_sum = warp_index() * KEY_ROWS % STEP, first_column = warp_index() * KEY_ROWS / STEP * PART;

    for (int first_key = 0; first_key < problem.keys; first_key += STEP) {
        copies_wait();  // if no query saw the previous tiles, no thread has waited for their copies yet
        barrier();      // no warp reads the previous tiles any more
        copy_tile<STEP>(k, keys, first_key);
        copy_tile<STEP>(v, values, first_key);
        Sums<KEY_ROWS, PART> dk, dv;
        dk.clear();
        dv.clear();
        // The loop passes over the query heads that share this key head.
        for (int head = kv_head * problem.groups(); head < (kv_head + 1) * problem.groups(); ++head) {
            const auto queries = head_of(query, batch, head, problem.queries, problem.dim),
                       douts = head_of(dout, batch, head, problem.queries, problem.dim);
            const auto outs = head_of(out, batch, head, problem.queries, problem.dim);
            const long long first_row = (static_cast<long long>(batch) * problem.heads + head) * problem.queries;
            for (int first_query = first_seeing(first_key, offset); first_query < problem.queries; first_query += OWN) {
                barrier();  // no warp reads the previous queries any more
                copy_tile<OWN>(q, queries, first_query);
                copy_tile<OWN>(d, douts, first_query);
                copies_wait();
                barrier();  // all threads see the tiles now
                times_sign<OWN>(q, problem.scale);

                // delta_i = sum_j P_ij dP_ij. It equals sum_d dO_id O_id.
                const int first = first_query + warp_row();
                Sums<ROWS, STEP> p;
                Registers<float, ROWS / 8> maximum, normaliser, delta;
                UNROLL
                for (int r = 0; r < ROWS / 8; ++r) {
                    const int row = p.row(r / 2, 2 * (r % 2));
                    float sum = 0.0f, total = 0.0f;
                    maximum[r] = 0.0f;
                    if (first + row < problem.queries) {
                        maximum[r] = finite(row_max[first_row + first + row]);
                        total = row_sum[first_row + first + row];
                        for (int column = lane_index() % 4; column < problem.dim; column += 4)
                            sum = multiply_add(to_float(read(d.at(warp_row() + row, column))),
                                               to_float(outs.at(first + row, column)[0]), sum);
                    }
                    delta[r] = quad_sum(sum);
                    normaliser[r] = 1.0f / (total == 0.0f ? 1.0f : total);
                }

                // Recomputes the weights P, now normalised.
                p.clear();
                rows_by_rows(p, Operand<ROWS, false>(q, warp_row()), k);
                p.each([&](float& score, int m, int n, int i) {
                    const int r = p.slot(m, i);
                    const bool seen = sees(first + p.row(m, i), first_key + p.column(n, i), problem, offset);
                    score = seen ? exp2_of((score - maximum[r]) * problem.exponent_scale) * normaliser[r] : 0.0f;
                });
                Sums<ROWS, STEP> ds;  // first dP, then dS = P o (dP - delta)
                ds.clear();
                rows_by_rows(ds, Operand<ROWS, false>(d, warp_row()), v);
                Drawn<ROWS, STEP> drawn;
                if (DROPOUT)
                    drawn.draw([&](int row, int column) {
                        return kept(problem.seed, problem.last_dropped, batch, head, first + row, first_key + column);
                    });
                ds.each([&](float& dp, int m, int n, int i) {
                    const int row = first + p.row(m, i), column = first_key + p.column(n, i);
                    float& weight = p.at[m][n][i];
                    const float whole = weight;
                    if (DROPOUT) {
                        const bool keeps = !drawn.drops(m, n, i);
                        weight = keeps ? weight : 0.0f;
                        dp = keeps ? dp * problem.kept_scale : 0.0f;
                    }
                    // A masked element is set to 0, because a masked value may make dP infinite, and 0 inf is not 0.
                    dp = sees(row, column, problem, offset) ? whole * (dp - delta[p.slot(m, i)]) : 0.0f;
                });
                write_rows(shared_p, p);
                write_rows(shared_ds, ds);

                const Weights<ROWS, STEP> weights(ds);
                ROLLED
                for (int column = 0; column < DIM; column += COLUMNS) {
                    Sums<ROWS, COLUMNS> dq;
                    dq.clear();
                    rows_by_columns(dq, weights, k, column);
                    dq.each([&](float sum, int m, int n, int i) {
                        const int row = first + dq.row(m, i), place = column + dq.column(n, i);
                        if (row < problem.queries && place < problem.dim) {
                            float& so_far = dquery[(first_row + row) * problem.dim + place];
                            so_far = multiply_add(problem.scale, sum, so_far);
                        }
                    });
                }

                barrier();  // all threads see P and dS of all queries of the tile now
                columns_by_columns<OWN>(dv, shared_p, first_sum, d, first_column);
                columns_by_columns<OWN>(dk, shared_ds, first_sum, q, first_column);
            }
        }
        const int first = first_key + first_sum;
        store_rows(head_of(dkey, batch, kv_head, problem.keys, problem.dim), dk, all<KEY_ROWS / 8>(problem.magnitude),
                   first, first_column);
        store_rows(head_of(dvalue, batch, kv_head, problem.keys, problem.dim), dv,
                   all<KEY_ROWS / 8>(problem.kept_scale), first, first_column);
    }
}
EXPORT(backward)

#endif

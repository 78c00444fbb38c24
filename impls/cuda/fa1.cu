// FlashAttention-1 in CUDA C++ (Dao, Fu, Ermon, Rudra, Ré, "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", NeurIPS 2022;
// Algorithms 1 and 4).
//
// The first paper asks how attention can be computed without ever writing the queries x keys matrix to device memory. Its answer, kept here:
//
// - One block of threads owns one (batch, head). Its outer loop takes a tile of keys and values on chip; its inner loop passes over all tiles of queries.
// - The softmax is made piece by piece. What a tile of queries knows so far, its output O, its running maximum m and its running sum l, lives in device memory:
//   each step reads it, rescales it, adds a tile's share and writes it back. O is normalised at every step: a true average of the values seen so far.
// - The backward recomputes the weights from m and l in the same order. dK and dV of the outer tile grow on chip; dQ is read, added to and written back.
//
// So the output crosses to device memory once per key tile. That is what FlashAttention-2 turned around (fa2.cu).
//
// Two things are not the paper's. O and dQ, which are rewritten at each step, are float32 in device memory for 16-bit inputs too and are rounded once at the end:
// rounding them at every step would add an error for each key tile. And the gradients of a grouped key head are summed over its query heads by the one block
// that owns it, so nothing needs atomics and every run is bitwise the same.
//
// Arithmetic. A weight is 2^((s - m) c) with s = q k and c = |scale| log2 e: subtract, then multiply, so that equal scores cancel exactly however large they are. A
// masked score is -inf and its weight exactly 0; a maximum of -inf (nothing seen yet) is replaced by 0 where it is subtracted, and never where it is stored.
//
// Compiled for one kernel at a time: FORWARD or BACKWARD is defined. tiles.cuh says what else the loader defines. STEP are the keys of a tile (B_c of the
// paper), and OWN the queries (B_r).
#include "tiles.cuh"

constexpr int OWN = WARPS * ROWS;

// The first of the warp's ROWS queries in a tile of them.
DEVICE int warp_row() { return warp_index() * ROWS; }

// A maximum that may be subtracted: 0 for a row that has seen nothing, whose terms are all -inf and stay so.
DEVICE float finite(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

DEVICE bool sees(int query, int key, const Problem& problem, int offset) {
    return query < problem.queries && key < problem.keys && (!CAUSAL || key <= query + offset);
}

// The first query, of a whole tile, that sees any key from first_key on.
DEVICE int first_seeing(int first_key, int offset) { return CAUSAL ? larger_of(first_key - offset, 0) / OWN * OWN : 0; }

// ------------------------------------------------------------------------------------------------------------------------------- forward

#ifdef FORWARD

// Algorithm 1 for one batch and query head. out, row_max and row_sum are contiguous and float32; they enter as 0, -inf and 0.
KERNEL(forward)(View<const Element> query, View<const Element> key, View<const Element> value, Global<float> out, Global<float> row_max,
                Global<float> row_sum, Global<float> lse, Problem problem, int offset) {
    const int head = block_index() % problem.heads, batch = block_index() / problem.heads;
    const long long first_row = static_cast<long long>(block_index()) * problem.queries;
    const auto queries = head_of(query, batch, head, problem.queries, problem.dim);
    const auto keys = head_of(key, batch, head / problem.groups(), problem.keys, problem.dim);
    const auto values = head_of(value, batch, head / problem.groups(), problem.keys, problem.dim);
    Arena arena;
    const Tile<DIM> q = arena.tile<DIM>(OWN), k = arena.tile<DIM>(STEP), v = arena.tile<DIM>(STEP);

    const int seen_keys = CAUSAL ? smaller_of(problem.keys, problem.queries + offset) : problem.keys;  // the last query sees the most
    for (int first_key = 0; first_key < seen_keys; first_key += STEP) {
        barrier();  // the tiles before are no longer read
        copy_tile<STEP>(k, keys, first_key);
        copy_tile<STEP>(v, values, first_key);
        for (int first_query = first_seeing(first_key, offset); first_query < problem.queries; first_query += OWN) {
            barrier();  // the queries before are no longer read
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
            barrier();  // the tiles are there for all, and the four lanes that share a row have read what one of them will write

            Drawn<ROWS, STEP> drawn;
            if (DROPOUT)
                drawn.draw([&](int row, int column) { return kept(problem.seed, problem.last_dropped, batch, head, first + row, first_key + column); });

            // This tile's softmax, about its own maximum.
            scores.clear();
            rows_by_rows(scores, Operand<ROWS, false>(q, warp_row()), k);
            Registers<float, ROWS / 8> tile_max = all<ROWS / 8>(-INFINITY), tile_sum = all<ROWS / 8>(0.0f);
            scores.each([&](float& score, int m, int n, int i) {
                score = sees(first + scores.row(m, i), first_key + scores.column(n, i), problem, offset) ? with_sign(score) : -INFINITY;
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

            // Joined with what the rows had before.
            Registers<float, ROWS / 8> old_share, tile_share;
            UNROLL
            for (int r = 0; r < ROWS / 8; ++r) {
                const int row = first + scores.row(r / 2, 2 * (r % 2));
                const float new_max = maximum_of(old_max[r], tile_max[r]);
                const float old_part = old_sum[r] * exp2_of((old_max[r] - finite(new_max)) * problem.exponent_scale);
                const float rescale = exp2_of((tile_max[r] - finite(new_max)) * problem.exponent_scale);
                const float new_sum = old_part + quad_sum(tile_sum[r]) * rescale;
                const float divisor = new_sum == 0.0f ? 1.0f : new_sum;  // a row that has seen no key stays 0
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
    barrier();  // the statistics are there for all
    for (int row = thread_index(); row < problem.queries; row += 32 * WARPS)
        lse[first_row + row] = multiply_add(row_max[first_row + row], problem.magnitude, log_of(row_sum[first_row + row]));
}
EXPORT(forward)

#endif

// ------------------------------------------------------------------------------------------------------------------------------ backward

#ifdef BACKWARD

// Of dK and dV [STEP, DIM] a warp sums KEY_ROWS rows, and where there are more warps than rows for them, PART of the columns.
constexpr int KEY_ROWS = STEP / WARPS > 16 ? STEP / WARPS : 16;
constexpr int PART = DIM * STEP / (KEY_ROWS * WARPS);
constexpr int COLUMNS = 64;  // of dQ that a warp sums at a time: more of them leave the rest too few registers

// Writes a warp's numbers, rounded, into its rows of a tile [OWN, STEP].
DEVICE void write_rows(Tile<STEP> to, Sums<ROWS, STEP>& numbers) {
    numbers.each([&](float number, int m, int n, int i) { write(to.at(warp_row() + numbers.row(m, i), numbers.column(n, i)), rounded<Element>(number)); });
}

// Algorithm 4 for one batch and key head. out, row_max and row_sum are contiguous, as the forward left them, out in the inputs' type; dquery is contiguous and
// float32, and enters as 0; dkey and dvalue are contiguous.
KERNEL(backward)(View<const Element> query, View<const Element> key, View<const Element> value, View<const Element> dout, View<const Element> out,
                 Global<const float> row_max, Global<const float> row_sum, Global<float> dquery, View<Element> dkey, View<Element> dvalue, Problem problem,
                 int offset) {
    const int kv_head = block_index() % problem.kv_heads, batch = block_index() / problem.kv_heads;
    const auto keys = head_of(key, batch, kv_head, problem.keys, problem.dim), values = head_of(value, batch, kv_head, problem.keys, problem.dim);
    Arena arena;
    const Tile<DIM> q = arena.tile<DIM>(OWN), d = arena.tile<DIM>(OWN), k = arena.tile<DIM>(STEP), v = arena.tile<DIM>(STEP);
    const Tile<STEP> shared_p = arena.tile<STEP>(OWN), shared_ds = arena.tile<STEP>(OWN);
    const int first_sum = warp_index() * KEY_ROWS % STEP, first_column = warp_index() * KEY_ROWS / STEP * PART;  // of dK and dV

    for (int first_key = 0; first_key < problem.keys; first_key += STEP) {
        copies_wait();  // where no query saw the tiles before, nobody has waited for them
        barrier();  // they are no longer read
        copy_tile<STEP>(k, keys, first_key);
        copy_tile<STEP>(v, values, first_key);
        Sums<KEY_ROWS, PART> dk, dv;
        dk.clear();
        dv.clear();
        for (int head = kv_head * problem.groups(); head < (kv_head + 1) * problem.groups(); ++head) {  // the query heads that share this key head
            const auto queries = head_of(query, batch, head, problem.queries, problem.dim), douts = head_of(dout, batch, head, problem.queries, problem.dim);
            const auto outs = head_of(out, batch, head, problem.queries, problem.dim);
            const long long first_row = (static_cast<long long>(batch) * problem.heads + head) * problem.queries;
            for (int first_query = first_seeing(first_key, offset); first_query < problem.queries; first_query += OWN) {
                barrier();  // the queries before are no longer read
                copy_tile<OWN>(q, queries, first_query);
                copy_tile<OWN>(d, douts, first_query);
                copies_wait();
                barrier();  // the tiles are there for all

                // delta: sum_j P_ij dP_ij, which is sum_d dO_id O_id.
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
                            sum = multiply_add(to_float(read(d.at(warp_row() + row, column))), to_float(outs.at(first + row, column)[0]), sum);
                    }
                    delta[r] = quad_sum(sum);
                    normaliser[r] = 1.0f / (total == 0.0f ? 1.0f : total);
                }

                // The weights again, now normalised.
                p.clear();
                rows_by_rows(p, Operand<ROWS, false>(q, warp_row()), k);
                p.each([&](float& score, int m, int n, int i) {
                    const int r = p.slot(m, i);
                    const bool seen = sees(first + p.row(m, i), first_key + p.column(n, i), problem, offset);
                    score = seen ? exp2_of((with_sign(score) - maximum[r]) * problem.exponent_scale) * normaliser[r] : 0.0f;
                });
                Sums<ROWS, STEP> ds;  // dP first
                ds.clear();
                rows_by_rows(ds, Operand<ROWS, false>(d, warp_row()), v);
                Drawn<ROWS, STEP> drawn;
                if (DROPOUT)
                    drawn.draw([&](int row, int column) { return kept(problem.seed, problem.last_dropped, batch, head, first + row, first_key + column); });
                ds.each([&](float& dp, int m, int n, int i) {
                    const int row = first + p.row(m, i), column = first_key + p.column(n, i);
                    float& weight = p.at[m][n][i];
                    const float whole = weight;
                    if (DROPOUT) {
                        const bool keeps = !drawn.drops(m, n, i);
                        weight = keeps ? weight : 0.0f;
                        dp = keeps ? dp * problem.kept_scale : 0.0f;
                    }
                    dp = sees(row, column, problem, offset) ? whole * (dp - delta[p.slot(m, i)]) : 0.0f;  // 0 also where a masked value made dP infinite
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

                barrier();  // P and dS of all queries of the tile are there
                columns_by_columns<OWN>(dv, shared_p, first_sum, d, first_column);
                columns_by_columns<OWN>(dk, shared_ds, first_sum, q, first_column);
            }
        }
        const int first = first_key + first_sum;
        store_rows(head_of(dkey, batch, kv_head, problem.keys, problem.dim), dk, all<KEY_ROWS / 8>(problem.scale), first, first_column);
        store_rows(head_of(dvalue, batch, kv_head, problem.keys, problem.dim), dv, all<KEY_ROWS / 8>(problem.kept_scale), first, first_column);
    }
}
EXPORT(backward)

#endif

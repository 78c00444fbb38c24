"""The steps of FlashAttention-2 in Triton (Dao, ICLR 2024, Algorithms 1 and 2).

One step combines one tile of queries with one tile of keys. The kernels decide which tiles meet: `fa2.py` loops over
ranges of keys and queries, `block_sparse.py` loops over lists of blocks. A tensor from which a step loads a tile is
passed as a head, in the form that `head_of` returns.

`masked` says that the tile may reach past the end of the tensor, or that the diagonal may cut it. All other tiles are
computed without masks. It is a number of the run, so that one loop serves both kinds of tiles: a program with two loops
that add to one accumulator makes the compiler wait after each instruction of a product on sm_90. Without a causal mask,
the diagonal is after all keys.

Positions of queries and keys are computed where a mask needs them. Computed once before the loop, they would occupy
registers in every step.

Arithmetic. A weight is 2^((s - m) c), where s = q k is a raw score, m is the largest s of the row so far, and
c = |scale| log2 e. The subtraction comes before the multiplication. A score that is equal to m then has a weight of
exactly 1, however large it is. The form 2^(s c - m c) does not guarantee this: a compiler may fuse it into an fma,
which leaves a residue of half an ulp of m c. In the backward, S - L is one explicit fma.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
import triton.language as tl

from flashproof.impls.triton.primitives import (
    INFINITY,
    LOG2_E,
    device_function,
    dot_of_parts,
    head_dim,
    in_fours,
    kept,
    kernel,
    load_at,
    load_numbers,
    load_rows,
    place,
    rounded,
    seen_keys,
    wide,
)

# -------------------------------------------------------------------------------------------------------------- forward


@device_function
def attend(
    accumulator, maximum, total,  # the state of the tile of queries
    q, first_query, key, value, first_key, keys, offset, exponent_scale, seed, last_dropped, batch, head, masked,
    DROPOUT: tl.constexpr,
    dim, PADDED_DIM: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Adds one tile of keys to the state of a tile of queries, and returns the new state.

    accumulator [QUERIES, PADDED_DIM]: the output so far, not yet divided by the total.
    maximum [QUERIES]: the largest raw score so far.
    total [QUERIES]: the sum of the weights so far.
    q [QUERIES, PADDED_DIM]: the queries, of which the first is at the position first_query.
    """
    k = load_at(key, first_key, keys, dim, KEYS, PADDED_DIM, PADDED)
    scores = dot_of_parts(q, tl.trans(k))  # [QUERIES, KEYS]
    if masked:
        seen = seen_keys(first_query + tl.arange(0, q.shape[0]), keys, offset)
        visible = (first_key + tl.arange(0, KEYS))[None, :] < seen[:, None]
        scores = tl.where(visible, scores, -INFINITY)
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    # The maximum of a row stays -inf if the row has seen no key yet, or only keys with a score of -inf. In that case 0
    # is subtracted instead, because -inf - (-inf) is NaN.
    subtracted = tl.where(new_maximum == -INFINITY, 0.0, new_maximum)
    weights = tl.exp2((scores - subtracted[:, None]) * exponent_scale)
    rescale = tl.exp2((maximum - subtracted) * exponent_scale)
    total = total * rescale + tl.sum(weights, 1)
    if DROPOUT:
        query_at = first_query + tl.arange(0, q.shape[0])
        key_at = first_key + tl.arange(0, KEYS)
        weights = tl.where(kept(seed, last_dropped, batch, head, query_at[:, None], key_at[None, :]), weights, 0.0)
    v = load_at(value, first_key, keys, dim, KEYS, PADDED_DIM, PADDED)
    accumulator = dot_of_parts(rounded(weights, v.dtype), v, accumulator * rescale[:, None])
    return accumulator, new_maximum, total


@device_function
def attended(accumulator, maximum, total, magnitude, kept_scale):
    """Returns the output [QUERIES, PADDED_DIM] and the LSE [QUERIES] of a tile of queries that has seen all its keys.

    The output is divided by l only here. The LSE is L = m + log l, where m is the maximum times the magnitude. A row
    that saw no key has maximum -inf and total 0. Its LSE is then -inf without a special case, and its output is 0 / 1.
    """
    divisor = tl.where(total == 0.0, 1.0, total)
    return tl.div_rn(accumulator, divisor[:, None]) * kept_scale, tl.fma(maximum, magnitude, tl.log(total))


# ------------------------------------------------------------------------------------------------------------- backward


@kernel
def delta_kernel(
    out, dout, delta,
    out_strides, dout_strides,
    heads, queries, dim,
    PADDED_DIM: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Computes delta = rowsum(dO o O) in float32, for QUERIES queries of one head. dO has its own strides."""
    dim = head_dim(dim, PADDED_DIM, PADDED)
    first_query, head, batch = place(queries, heads, QUERIES, False)
    query_at = first_query + tl.arange(0, QUERIES)
    o = load_rows(
        out, out_strides, batch, head, first_query, queries, dim, QUERIES, PADDED_DIM, PADDED, WIDE,
    ).to(tl.float32)  # fmt: skip
    do = load_rows(
        dout, dout_strides, batch, head, first_query, queries, dim, QUERIES, PADDED_DIM, PADDED, WIDE,
    ).to(tl.float32)  # fmt: skip
    delta += (wide(batch) * heads + head) * in_fours(queries)
    tl.store(delta + query_at, tl.sum(o * do, 1), mask=query_at < queries)


@device_function
def exponential(scores, lse, scale):
    """Returns the weights P = exp(scale scores - lse).

    In a row that sees no key, lse is -inf and P may be anything. The caller masks every element of such a row
    afterwards.

    No exact weight is above 1. For huge scores, the rounding of the stored LSE can make the exponent positive (half an
    ulp of 1e10 is 512). The minimum prevents an overflow in this case. A NaN stays NaN.
    """
    return tl.exp2(tl.minimum(tl.fma(scores, scale, -lse), 0.0, propagate_nan=tl.PropagateNan.ALL) * LOG2_E)


@device_function
def gradients_of_keys(
    dk, dv, k, v, first_key, query, dout, lse, delta,
    first_query, queries, offset, scale, seed, last_dropped, kept_scale, batch, head, masked,
    DROPOUT: tl.constexpr, dim, PADDED_DIM: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of one tile of queries to dK / scale and to dV / kept_scale, and returns both sums.

    dk, dv, k, v: [KEYS, PADDED_DIM]. first_key: the position of the first key.
    lse, delta: locations that `numbers_of` returns.

    The scores are transposed here, [KEYS, QUERIES], so that P^T and dS^T are the left operands of the products.

    masked: some queries may be before the diagonal or past the end. Keys past the end need no mask: their gradients are
    in separate rows, which stay finite and are never stored.
    """
    q = load_at(query, first_query, queries, dim, QUERIES, PADDED_DIM, PADDED)
    do = load_at(dout, first_query, queries, dim, QUERIES, PADDED_DIM, PADDED)
    scores = dot_of_parts(k, tl.trans(q))  # [KEYS, QUERIES]
    dp = dot_of_parts(v, tl.trans(do))
    p = exponential(scores, load_numbers(lse, first_query, queries, QUERIES)[None, :], scale)
    if DROPOUT:
        query_at = first_query + tl.arange(0, QUERIES)
        key_at = first_key + tl.arange(0, k.shape[0])
        keeps = kept(seed, last_dropped, batch, head, query_at[None, :], key_at[:, None])
        dp = tl.where(keeps, dp * kept_scale, 0.0)
    difference = dp - load_numbers(delta, first_query, queries, QUERIES)[None, :]
    # One branch masks both factors of dS, before the first product that adds to dV or dK. A later branch would make
    # the compiler wait after each instruction of that product. Masking P is not enough: if a hidden value is so large
    # that dP is infinite, 0 inf is NaN.
    if masked:
        query_at = first_query + tl.arange(0, QUERIES)
        key_at = first_key + tl.arange(0, k.shape[0])
        visible = (key_at[:, None] - offset <= query_at[None, :]) & (query_at < queries)[None, :]
        p = tl.where(visible, p, 0.0)
        difference = tl.where(visible, difference, 0.0)
    weights = tl.where(keeps, p, 0.0) if DROPOUT else p
    dv = dot_of_parts(rounded(weights, do.dtype), do, dv)
    dk = dot_of_parts(rounded(p * difference, q.dtype), q, dk)
    return dk, dv


@device_function
def gradients_of_queries(
    dq, q, do, row_lse, row_delta, first_query, key, value,
    first_key, keys, offset, scale, seed, last_dropped, kept_scale, batch, head, masked,
    DROPOUT: tl.constexpr, dim, PADDED_DIM: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of one tile of keys to dQ / scale, and returns the sum.

    dq, q, do: [QUERIES, PADDED_DIM]. row_lse, row_delta: [QUERIES]. first_query: the position of the first query.

    A key past the end is loaded as 0, so its score would be 0. That is far above an LSE of -100, for example. For this
    reason, the weight of such a key is masked too, not only the key.
    """
    k = load_at(key, first_key, keys, dim, KEYS, PADDED_DIM, PADDED)
    v = load_at(value, first_key, keys, dim, KEYS, PADDED_DIM, PADDED)
    scores = dot_of_parts(q, tl.trans(k))  # [QUERIES, KEYS]
    dp = dot_of_parts(do, tl.trans(v))
    p = exponential(scores, row_lse[:, None], scale)
    if DROPOUT:
        query_at = first_query + tl.arange(0, q.shape[0])
        key_at = first_key + tl.arange(0, KEYS)
        dp = tl.where(kept(seed, last_dropped, batch, head, query_at[:, None], key_at[None, :]), dp * kept_scale, 0.0)
    difference = dp - row_delta[:, None]
    if masked:
        seen = seen_keys(first_query + tl.arange(0, q.shape[0]), keys, offset)
        visible = (first_key + tl.arange(0, KEYS))[None, :] < seen[:, None]
        p = tl.where(visible, p, 0.0)
        difference = tl.where(visible, difference, 0.0)
    return dot_of_parts(rounded(p * difference, k.dtype), k, dq)

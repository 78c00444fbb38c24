"""The steps of FlashAttention-2 in Triton (Dao, ICLR 2024, Algorithms 1 and 2): what one tile of queries and one tile of keys make of each other.

Which tiles meet is decided elsewhere: `fa2.py` loops over ranges of keys and queries, `block_sparse.py` over lists of blocks. Tensors that a step loads a tile
from are heads as `head_of` gives them. MASKED: the tile may reach past the tensor's end, and with CAUSAL the diagonal may cut it; other tiles are computed
without masks.

Arithmetic. A weight is 2^((s - m) c) with s = q k, m the largest s, and c = |scale| log2 e: subtract, then multiply. Equal scores then weigh exactly 1 however
large they are; 2^(s c - m c), which a compiler may fuse into an fma, leaves a residue of half an ulp of m c. In the backward S - L is one explicit fma.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
import triton.language as tl

from flashproof.impls.triton.primitives import INFINITY, LOG2_E, device_function, dot, kept, kernel, load_rows, load_tile, place, rounded, tile_of, wide

# ---------------------------------------------------------------------------------------------------------------------------- forward


@device_function
def attend(
    accumulator, maximum, total,  # [QUERIES, PADDED_DIM], [QUERIES], [QUERIES]: the output so far, undivided; the largest score; the sum of weights
    q, query_at, key, value, first_key, keys, offset, exponent_scale, seed, last_dropped, batch, head,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Takes one tile of keys into the running output, maximum and sum of a tile of queries."""
    k = load_tile(tile_of(key, first_key), first_key, keys, DIM, KEYS, PADDED_DIM, MASKED)
    scores = dot(q, tl.trans(k))  # [QUERIES, KEYS]
    if MASKED:
        key_at = first_key + tl.arange(0, KEYS)
        visible = (key_at < keys)[None, :]
        if CAUSAL:
            visible = visible & (key_at[None, :] <= query_at[:, None] + offset)
        scores = tl.where(visible, scores, -INFINITY)
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    # A row that has seen no key yet, or none whose score is above -inf: -inf stays its maximum, but is not subtracted from -inf.
    subtracted = tl.where(new_maximum == -INFINITY, 0.0, new_maximum)
    weights = tl.exp2((scores - subtracted[:, None]) * exponent_scale)
    rescale = tl.exp2((maximum - subtracted) * exponent_scale)
    total = total * rescale + tl.sum(weights, 1)
    if DROPOUT:
        key_at = first_key + tl.arange(0, KEYS)
        weights = tl.where(kept(seed, last_dropped, batch, head, query_at[:, None], key_at[None, :]), weights, 0.0)
    v = load_tile(tile_of(value, first_key), first_key, keys, DIM, KEYS, PADDED_DIM, MASKED)
    accumulator = dot(rounded(weights, v.dtype), v, accumulator * rescale[:, None])
    return accumulator, new_maximum, total


@device_function
def attended(accumulator, maximum, total, magnitude, kept_scale):
    """The output and the LSE of a tile of queries that has seen all its keys: one division, and L = m + log l.

    A row that saw no key has maximum -inf and total 0: its LSE is -inf by itself, and its output 0 / 1.
    """
    divisor = tl.where(total == 0.0, 1.0, total)
    return tl.div_rn(accumulator, divisor[:, None]) * kept_scale, tl.fma(maximum, magnitude, tl.log(total))


# --------------------------------------------------------------------------------------------------------------------------- backward


@kernel
def delta_kernel(
    out, dout, delta,
    out_strides, dout_strides,
    heads, queries,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO o O) for QUERIES queries of one head, in float32. dO has strides of its own."""
    first_query, head, batch = place(queries, heads, QUERIES, False)
    query_at = first_query + tl.arange(0, QUERIES)
    o = load_rows(out, out_strides, batch, head, first_query, queries, DIM, QUERIES, PADDED_DIM, WIDE, UNIT).to(tl.float32)
    do = load_rows(dout, dout_strides, batch, head, first_query, queries, DIM, QUERIES, PADDED_DIM, WIDE, UNIT).to(tl.float32)
    delta += (wide(batch) * heads + head) * queries
    tl.store(delta + query_at, tl.sum(o * do, 1), mask=query_at < queries)


@device_function
def exponential(scores, lse, scale):
    """P = exp(scale scores - lse). In a row that sees no key, whose lse is -inf, it is anything: all of its places are masked afterwards.

    No weight is above 1. For huge scores the rounding of the stored LSE may say otherwise (half an ulp of 1e10 is 512): the minimum keeps it from overflowing.
    A NaN stays one.
    """
    return tl.exp2(tl.minimum(tl.fma(scores, scale, -lse), 0.0, propagate_nan=tl.PropagateNan.ALL) * LOG2_E)


@device_function
def gradients_of_keys(
    dk, dv, k, v, key_at, query, dout, lse, delta,
    first_query, queries, offset, scale, seed, last_dropped, kept_scale, batch, head,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Adds what one tile of queries gives to dK / scale and to dV / kept_scale. Scores stand transposed here, [KEYS, QUERIES]: P^T and dS^T are left operands.

    MASKED: some queries may lie before the diagonal, or past the end, where lse = inf makes P zero. Keys past the end need no mask: they have rows of
    their own, finite and never stored.
    """
    query_at = first_query + tl.arange(0, QUERIES)
    q = load_tile(tile_of(query, first_query), first_query, queries, DIM, QUERIES, PADDED_DIM, MASKED)
    do = load_tile(tile_of(dout, first_query), first_query, queries, DIM, QUERIES, PADDED_DIM, MASKED)
    if MASKED:
        row_lse = tl.load(lse + query_at, mask=query_at < queries, other=INFINITY)
        row_delta = tl.load(delta + query_at, mask=query_at < queries, other=0.0)
    else:
        row_lse = tl.load(lse + query_at)
        row_delta = tl.load(delta + query_at)

    p = exponential(dot(k, tl.trans(q)), row_lse[None, :], scale)  # [KEYS, QUERIES]
    if MASKED and CAUSAL:
        visible = key_at[:, None] <= query_at[None, :] + offset
        p = tl.where(visible, p, 0.0)
    dp = dot(v, tl.trans(do))
    if DROPOUT:
        keeps = kept(seed, last_dropped, batch, head, query_at[None, :], key_at[:, None])
        dv = dot(rounded(tl.where(keeps, p, 0.0), do.dtype), do, dv)
        dp = tl.where(keeps, dp * kept_scale, 0.0)
    else:
        dv = dot(rounded(p, do.dtype), do, dv)
    ds = p * (dp - row_delta[None, :])
    if MASKED and CAUSAL:
        ds = tl.where(visible, ds, 0.0)  # where a hidden value is so large that dP is infinite, 0 inf is not 0
    dk = dot(rounded(ds, q.dtype), q, dk)
    return dk, dv


@device_function
def gradients_of_queries(
    dq, q, do, row_lse, row_delta, query_at, key, value,
    first_key, keys, offset, scale, seed, last_dropped, kept_scale, batch, head,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Adds what one tile of keys gives to dQ / scale.

    A key past the end is loaded as 0 and would score 0, which is far above an LSE of -100: its weight has to be masked, not only its key.
    """
    k = load_tile(tile_of(key, first_key), first_key, keys, DIM, KEYS, PADDED_DIM, MASKED)
    v = load_tile(tile_of(value, first_key), first_key, keys, DIM, KEYS, PADDED_DIM, MASKED)
    key_at = first_key + tl.arange(0, KEYS)
    p = exponential(dot(q, tl.trans(k)), row_lse[:, None], scale)  # [QUERIES, KEYS]
    if MASKED:
        visible = (key_at < keys)[None, :]
        if CAUSAL:
            visible = visible & (key_at[None, :] <= query_at[:, None] + offset)
        p = tl.where(visible, p, 0.0)
    dp = dot(do, tl.trans(v))
    if DROPOUT:
        dp = tl.where(kept(seed, last_dropped, batch, head, query_at[:, None], key_at[None, :]), dp * kept_scale, 0.0)
    ds = p * (dp - row_delta[:, None])
    if MASKED:
        ds = tl.where(visible, ds, 0.0)
    return dot(rounded(ds, k.dtype), k, dq)

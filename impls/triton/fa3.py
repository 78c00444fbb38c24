"""FlashAttention-3 in Gluon, the lower-level language of Triton, for Hopper GPUs: the forward.

Source: Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision", NeurIPS 2024;
Algorithms 1 and 2.

What changed against `fa2.py`:

- A program has three parts up to head dim 128 (`warp_specialize`). Two consumers, of four warps each, own 64 queries
  each. A producer of one warp copies the tiles of keys and values to shared memory by the chip's copy unit (TMA). Each
  place in shared memory has two mbarriers: one says that its tile is there, the other that both consumers have left it.
- A consumer issues the product S = Q K^T of the next tile, and then O += P V of this one. It waits for S alone, and
  computes the weights of the next tile while O += P V runs. In Triton, a product is waited for at once, wherever the
  compiler decides. In Gluon, the kernel waits by hand (`warpgroup_mma_wait`).
- The keys are visited from the last tile to the first. So the tiles that need a mask come first, and have a loop of
  their own.
- Each thread sums its own weights of a row. The four threads that share a row add their sums after the loop.

Up to head dim 64, a program is one consumer, which also starts the copies, and which waits for both products. Three
programs share a multiprocessor: one computes weights while another multiplies. This measured faster. docs/triton.md has
the figures.

The arithmetic is that of `steps.py`: the weight of a score is 2^((s - m) c), with the subtraction before the product,
and the output is divided by l once, with one rounding. Head dims above 128 have the forward kernel of `fa2.py`, and the
backward is that of `fa2.py`.

The kernels run on Hopper GPUs only, in 16 bit, without dropout. Triton's interpreter does not run Gluon.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashproof.impls.call import Attention, Call, Keys, Queries, Rows, opaque
from flashproof.impls.spec import (
    OWN_KERNELS,
    SIXTEEN_BIT,
    Arithmetic,
    Device,
    Dtype,
    Implementation,
    arithmetic_of_flash,
)
from flashproof.impls.triton import fa2, flash
from flashproof.impls.triton.flash import Choose, Kernels
from flashproof.impls.triton.launching import Launch
from flashproof.impls.triton.primitives import (
    INTERPRETED,
    Scale,
    call_arguments,
    chip_of,
    descriptor_of,
    padded_dim,
    slow,
)

TARGETS = ("sm_90",)

# ---------------------------------------------------------------------------------------------------------------- tiles

ROWS = gl.constexpr(64)  # queries of a consumer: those of one product of a warpgroup
KEYS = gl.constexpr(128)  # keys of a tile
STAGES = gl.constexpr(2)  # places in shared memory for tiles of keys, and as many for tiles of values
WARPS = gl.constexpr(4)  # warps of a consumer
INFINITY = gl.constexpr(float("inf"))
SMALL = gl.constexpr(2.0**-100)
LARGEST_DIM = 128  # a larger head dim needs more registers than two consumers have


def consumers_of(dim: int) -> int:
    """Returns how many consumers a program has."""
    return 1 if dim <= 64 else 2


# --------------------------------------------------------------------------------------------------------------- copies

# A ring is (descriptor, places, ready, empty): where tiles come from, STAGES places in shared memory to which they are
# copied in turn, and two mbarriers of each place. One says that the tile of the place is there, the other that all
# consumers have left it. Queries have places, one for each consumer, and a single mbarrier.

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # of the warps of a part; Triton 3.6: the second


@gluon.jit
def head_in(descriptor, batch, head):
    """Returns the batch entry and the head in a descriptor. If all are in the same memory, the descriptor has one."""
    return gl.minimum(batch, descriptor.shape[0] - 1), gl.minimum(head, descriptor.shape[1] - 1)


@gluon.jit
def load_queries(query, q_places, q_ready, batch, head, first_query, CONSUMERS: gl.constexpr):
    """Starts the copies of the queries of all consumers."""
    batch, head = head_in(query, batch, head)
    mbarrier.expect(q_ready, CONSUMERS * query.block_type.nbytes)
    for member in gl.static_range(CONSUMERS):
        row = first_query + member * ROWS
        tma.async_copy_global_to_shared(query, [batch, head, row, 0], q_ready, q_places.index(member))


@gluon.jit
def load_tile(ring, step, steps, batch, head):
    """Starts the copy of the tile of a step, when all consumers have left its place. Does nothing from `steps` on.

    Step 0 has the last tile of keys. Rows past the end of the tensor and columns past the head dim become 0.
    """
    descriptor, places, ready, empty = ring
    wanted = step < steps
    place = step % STAGES
    batch, head = head_in(descriptor, batch, head)
    row = (steps - 1 - step) * KEYS
    mbarrier.wait(empty.index(place), (step // STAGES & 1) ^ 1, pred=wanted)
    mbarrier.expect(ready.index(place), descriptor.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(
        descriptor, [batch, head, row, 0], ready.index(place), places.index(place), pred=wanted
    )


@gluon.jit
def wait_for(ring, step):
    """Waits for the tile of a step."""
    mbarrier.wait(ring[2].index(step % STAGES), step // STAGES & 1)


@gluon.jit
def tile_of(ring, step, DIM: gl.constexpr):
    """Returns the tile of a step, [KEYS, DIM], in shared memory."""
    return ring[1].index(step % STAGES).reshape([KEYS, DIM])


@gluon.jit
def leave(ring, step):
    """Says that this consumer needs the tile of a step no longer."""
    mbarrier.arrive(ring[3].index(step % STAGES), count=1)


@gluon.jit
def producer(query, q_places, q_ready, k_ring, v_ring, batch, head, kv_head, first_query, steps):
    """Copies all tiles that the two consumers of a program visit."""
    load_queries(query, q_places, q_ready, batch, head, first_query, 2)
    for step in range(steps):
        load_tile(k_ring, step, steps, batch, kv_head)
        load_tile(v_ring, step, steps, batch, kv_head)


# -------------------------------------------------------------------------------------------------------------- weights


@gluon.jit
def sum_by_lane(w):
    """Returns the sum of the weights [ROWS, KEYS] of each thread, [ROWS, 4].

    A product leaves columns 2 i, 2 i + 1, 2 i + 8, 2 i + 9 ... of a row in thread i of the four that share the row.
    """
    return gl.sum(gl.sum(gl.reshape(w, [ROWS, KEYS // 8, 4, 2]), 3), 1)


@gluon.jit
def weigh(s, maximum, total, step, steps, first_query, keys, hidden, exponent_scale, MASKED: gl.constexpr):
    """Returns the weights [ROWS, KEYS] of the raw scores of a tile, with the new maximum, total and factor.

    maximum [ROWS]: the largest raw score so far. total [ROWS, 4]: the sums of the weights so far, by thread.
    The factor [ROWS] is that of everything before.
    """
    layout: gl.constexpr = s.type.layout
    if MASKED:
        query_at = first_query + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        key_at = (steps - 1 - step) * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, layout))
        seen = keys - gl.maximum(hidden - query_at, 0)  # below 0 if the query sees no key
        s = gl.where(key_at[None, :] < seen[:, None], s, -INFINITY)
    new_maximum = gl.maximum(maximum, gl.max(s, 1))
    # The maximum stays -inf if the row has seen no key. Then 0 is subtracted, because -inf - (-inf) is NaN.
    subtracted = gl.where(new_maximum == -INFINITY, 0.0, new_maximum)
    w = gl.exp2((s - subtracted[:, None]) * exponent_scale)
    rescale = gl.exp2((maximum - subtracted) * exponent_scale)
    by_lane = sum_by_lane(w)
    total = total * gl.convert_layout(rescale, gl.SliceLayout(1, by_lane.type.layout))[:, None] + by_lane
    return w, new_maximum, total, rescale


@gluon.jit
def divided(o, divisor):
    """Returns o [ROWS, DIM] / divisor [ROWS], with the bits of `div_rn`. The divisor is at least 1.

    `div_rn` takes 4 % of the kernel for so many quotients. It computes one inverse of a row here. The quotient is the
    product with the inverse, which two steps correct by its rest. The product is at most 2 units of its last place from
    the exact quotient, and the first step leaves less than 1. The second rest is exact then, and by a theorem of
    Markstein (IBM J. Res. Dev. 34, 1990) the sum that it corrects is the rounded quotient, as the inverse is rounded to
    nearest. This needs rests that do not underflow: quotients from 2^-103 on. If an element is smaller, or not finite,
    the tile is divided by `div_rn`.
    """
    zero = gl.zeros_like(o)
    inverse = gl.div_rn(gl.full_like(divisor, 1.0), divisor)[:, None] + zero
    divisors = divisor[:, None] + zero
    quotient = o * inverse
    for _ in gl.static_range(2):
        quotient = gl.fma(gl.fma(-quotient, divisors, o), inverse, quotient)
    size = gl.abs(quotient)
    if gl.max(gl.max(gl.where((size >= SMALL) & (size < INFINITY), 0, 1), 1), 0) == 1:
        quotient = gl.div_rn(o, divisors)
    return quotient


# -------------------------------------------------------------------------------------------------------------- forward


@gluon.jit
def scores(q, k_ring, step, DIM: gl.constexpr, SCORES: gl.constexpr):
    """Issues S = Q K^T with the keys of a step, [ROWS, KEYS]."""
    k = tile_of(k_ring, step, DIM)
    zero = gl.zeros([ROWS, KEYS], gl.float32, layout=SCORES)
    return warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def advance(
    o, p, maximum, total,  # the state of a consumer
    step, steps, q, q_ready, k_ring, v_ring, batch, kv_head, first_query, keys, hidden, exponent_scale,
    MASKED: gl.constexpr, DIM: gl.constexpr, CONSUMERS: gl.constexpr, SCORES: gl.constexpr, OUTPUT: gl.constexpr,
):  # fmt: skip
    """Takes a step from the second on, and returns the new state.

    o [ROWS, DIM]: the output without the tile of the step before, not yet divided by the total.
    p [ROWS, KEYS]: the rounded weights of the tile of the step before.
    """
    wait_for(k_ring, step)
    s = scores(q, k_ring, step, DIM, SCORES)
    wait_for(v_ring, step - 1)
    o = warpgroup_mma(p, tile_of(v_ring, step - 1, DIM), o, is_async=True)  # O += P V
    if CONSUMERS == 1:
        load_tile(k_ring, step + 1, steps, batch, kv_head)
        load_tile(v_ring, step, steps, batch, kv_head)
        s, o, p = warpgroup_mma_wait(0, deps=(s, o, p))
    else:
        s = warpgroup_mma_wait(1, deps=(s,))  # O may still be in flight
    leave(k_ring, step)
    w, maximum, total, rescale = weigh(
        s, maximum, total, step, steps, first_query, keys, hidden, exponent_scale, MASKED
    )
    if CONSUMERS == 2:
        # The first wait is always over. The assembler moves no weights across its loop. Without it, the assembler
        # would wait for the product first, and compute the weights after it.
        mbarrier.wait(q_ready, 0)
        # p is among these because the product reads its registers until it ends.
        o, p = warpgroup_mma_wait(0, deps=(o, p))
    leave(v_ring, step - 1)
    o = o * gl.convert_layout(rescale, gl.SliceLayout(1, OUTPUT))[:, None]
    p = gl.convert_layout(w.to(q.dtype), gl.DotOperandLayout(0, OUTPUT, 2))
    return o, p, maximum, total


@gluon.jit
def consumer(
    query, q_places, q_ready, k_ring, v_ring, out, lse,
    batch, head, heads, kv_head, first_query, steps, queries, keys, hidden, magnitude, exponent_scale,
    MEMBER: gl.constexpr, DIM: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Computes the output and the LSE of ROWS queries.

    MEMBER: which of the consumers this is. first_query: of the program.
    """
    # The layouts of both products. Each warp has 16 rows.
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DIM, 16])

    if CONSUMERS == 1:
        load_queries(query, q_places, q_ready, batch, head, first_query, 1)
        load_tile(k_ring, 0, steps, batch, kv_head)
        load_tile(v_ring, 0, steps, batch, kv_head)
        load_tile(k_ring, 1, steps, batch, kv_head)
    first_query += MEMBER * ROWS
    q = q_places.index(MEMBER).reshape([ROWS, DIM])
    o = gl.zeros([ROWS, DIM], gl.float32, layout=OUTPUT)
    maximum = gl.full([ROWS], -INFINITY, gl.float32, layout=gl.SliceLayout(1, SCORES))
    total = sum_by_lane(gl.zeros([ROWS, KEYS], gl.float32, layout=SCORES))

    # Step 0 has no weights before it.
    mbarrier.wait(q_ready, 0)
    wait_for(k_ring, 0)
    s = warpgroup_mma_wait(0, deps=(scores(q, k_ring, 0, DIM, SCORES),))
    leave(k_ring, 0)
    w, maximum, total, _ = weigh(s, maximum, total, 0, steps, first_query, keys, hidden, exponent_scale, True)
    p = gl.convert_layout(w.to(q.dtype), gl.DotOperandLayout(0, OUTPUT, 2))

    # From step `full` on, every query sees whole tiles. There are two loops, because a branch in one loop would come
    # between a product and its wait.
    full = gl.maximum(steps - gl.maximum(keys - gl.maximum(hidden - first_query, 0), 0) // KEYS, 1)
    for step in range(1, full):
        o, p, maximum, total = advance(
            o, p, maximum, total,
            step, steps, q, q_ready, k_ring, v_ring, batch, kv_head, first_query, keys, hidden, exponent_scale,
            True, DIM, CONSUMERS, SCORES, OUTPUT,
        )  # fmt: skip
    for step in range(full, steps):
        o, p, maximum, total = advance(
            o, p, maximum, total,
            step, steps, q, q_ready, k_ring, v_ring, batch, kv_head, first_query, keys, hidden, exponent_scale,
            False, DIM, CONSUMERS, SCORES, OUTPUT,
        )  # fmt: skip
    wait_for(v_ring, steps - 1)
    o = warpgroup_mma(p, tile_of(v_ring, steps - 1, DIM), o, is_async=True)
    o, p = warpgroup_mma_wait(0, deps=(o, p))

    # As `attended` in steps.py: a row that saw no key has maximum -inf, total 0, LSE -inf and output 0 / 1.
    row_total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, SCORES))
    divisor = gl.convert_layout(gl.where(row_total == 0.0, 1.0, row_total), gl.SliceLayout(1, OUTPUT))
    o = divided(o, divisor)
    # The output leaves through the place of the queries, which this consumer alone has read.
    q.store(o.to(q.dtype))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(out, [batch, head, first_query, 0], q_places.index(MEMBER))
    query_at = first_query + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    scale = gl.full([ROWS], 1.0, gl.float32, layout=gl.SliceLayout(1, SCORES)) * magnitude
    first_row = (batch * heads + head).to(gl.int64) * queries
    gl.store(lse + first_row + query_at, gl.fma(maximum, scale, gl.log(row_total)), mask=query_at < queries)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "groups", "queries", "keys", "offset"])
def forward_kernel(
    query, key, value, out, lse,
    heads, groups, queries, keys, offset,
    magnitude, exponent_scale,  # |scale|, |scale| log2 e
    DIM: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Computes the output and the LSE of one tile of CONSUMERS x ROWS queries of one head.

    query, out [batch, heads, queries, dim], key and value [batch, kv_heads, keys, dim] are descriptors of `loadable`
    tensors, with tiles of ROWS or KEYS rows and DIM columns. lse [batch, heads, queries] is contiguous, in float32.
    """
    # The last query tile runs first, because with a causal mask it has the most work.
    TILE: gl.constexpr = CONSUMERS * ROWS
    tiles = (queries + TILE - 1) // TILE
    program = gl.program_id(0)
    first_query = (tiles - 1 - program % tiles) * TILE
    head = program // tiles % heads
    batch = program // tiles // heads
    kv_head = head // groups
    # Query i sees the keys before keys - max(hidden - i, 0). The sum i + offset might need more than 32 bits.
    hidden = keys - offset - 1
    end = gl.maximum(keys - gl.maximum(hidden - (first_query + TILE - 1), 0), 1)
    steps = (end + KEYS - 1) // KEYS

    q_places = gl.allocate_shared_memory(query.dtype, [CONSUMERS, 1, 1, ROWS, DIM], query.layout)
    k_places = gl.allocate_shared_memory(key.dtype, [STAGES, 1, 1, KEYS, DIM], key.layout)
    v_places = gl.allocate_shared_memory(value.dtype, [STAGES, 1, 1, KEYS, DIM], value.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    for place in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(place), count=1)
        mbarrier.init(v_ready.index(place), count=1)
        mbarrier.init(k_empty.index(place), count=CONSUMERS)
        mbarrier.init(v_empty.index(place), count=CONSUMERS)
    fence_async_shared()
    barrier()
    k_ring = key, k_places, k_ready, k_empty
    v_ring = value, v_places, v_ready, v_empty

    # The arguments of each part are written out, because a tuple that gets a name loses its constants.
    if CONSUMERS == 1:
        consumer(
            query, q_places, q_ready, k_ring, v_ring, out, lse,
            batch, head, heads, kv_head, first_query, steps, queries, keys, hidden, magnitude, exponent_scale,
            0, DIM, CONSUMERS,
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (
                    query, q_places, q_ready, k_ring, v_ring, out, lse,
                    batch, head, heads, kv_head, first_query, steps, queries, keys, hidden, magnitude, exponent_scale,
                    0, DIM, CONSUMERS,
                )),
                (consumer, (
                    query, q_places, q_ready, k_ring, v_ring, out, lse,
                    batch, head, heads, kv_head, first_query, steps, queries, keys, hidden, magnitude, exponent_scale,
                    1, DIM, CONSUMERS,
                )),
                (producer, (
                    query, q_places, q_ready, k_ring, v_ring, batch, head, kv_head, first_query, steps,
                )),
            ],
            [WARPS, 1],  # warps of the second consumer and of the producer
            [240, 24],  # registers of their threads; the first consumer has 240, too
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- the call


def forward_launches(
    kernels: Kernels,
    choose: Choose,
    call: Call,
    *,
    query: Queries,
    key: Keys,
    value: Keys,
    out: Queries,
    lse: Rows,
    seed: int,
) -> Iterator[Launch]:
    """Describes the forward. One program computes one tile of queries of one head. It fills out and lse.

    kernels, choose: of triton.fa2, for head dims above 128. seed: of dropout, for these kernels.
    Raises RuntimeError if the tensors are not on a Hopper GPU.
    """
    if (chip := chip_of(query)) != "hopper":
        raise RuntimeError(
            f"query: on {query.device} ({chip}); triton.fa3 takes tensors on a Hopper GPU (sm_90) without interpreter"
        )
    if call.dim > LARGEST_DIM:
        yield from flash.forward_launches(
            kernels, choose, call, query=query, key=key, value=value, out=out, lse=lse, seed=seed
        )
        return
    dim, consumers, scale = max(64, padded_dim(call.dim)), consumers_of(call.dim), Scale.of(call.scale)
    tiles = {"query": (query, ROWS), "key": (key, KEYS), "value": (value, KEYS), "out": (out, ROWS)}
    sizes = {name: size for name, size in call_arguments(call).items() if name in forward_kernel.arg_names}
    yield Launch(
        forward_kernel,
        (triton.cdiv(call.queries, consumers * ROWS.value) * call.heads * call.batch,),
        {name: _descriptor(tensor, rows.value, dim) for name, (tensor, rows) in tiles.items()}
        | {"lse": lse, "heads": call.heads, "magnitude": scale.magnitude, "exponent_scale": scale.exponent}
        | sizes
        | {"DIM": dim, "CONSUMERS": consumers},
        num_warps=WARPS.value,
        num_stages=1,
        # With one consumer, three programs fit a multiprocessor.
        max_registers=168 if consumers == 1 else None,
    )


def _descriptor(tensor: Tensor, rows: int, dim: int) -> TensorDescriptor:
    """Returns a descriptor whose tiles lie in shared memory as products read them."""
    plain = descriptor_of(tensor, rows, dim)
    dtype = gl.float16 if tensor.dtype == torch.float16 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for(plain.block_shape, dtype)
    return TensorDescriptor(plain.base, plain.shape, plain.strides, plain.block_shape, layout)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        out, lse = flash.forward(fa2.KERNELS, fa2.tiles, call, query, key, value, describe=forward_launches)
        ctx.call = call
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad
        return *flash.backward(fa2.KERNELS, fa2.tiles, ctx.call, needed, dout, *ctx.saved_tensors), None


@Attention
@opaque
def attention(query: Queries, key: Keys, value: Keys, call: Call) -> tuple[Queries, Rows]:
    """FlashAttention-3. Returns (out, lse), with gradients for query, key and value.

    Raises TypeError for float32, NotImplementedError for dropout, ValueError if the scale is beyond float32, and
    RuntimeError if the tensors are not on a Hopper GPU.
    """
    if query.dtype == torch.float32:
        raise TypeError("query: dtype torch.float32 is not taken by triton.fa3; give float16 or bfloat16")
    if call.dropout_p > 0.0:
        raise NotImplementedError(
            f"dropout_p: {call.dropout_p} is not taken by triton.fa3, which has no dropout; give 0.0"
        )
    out, lse = _Attention.apply(query, key, value, call)
    return out, lse


def missing(device: Device) -> str | None:
    """Returns why the kernels cannot run on a device, or None if they can."""
    if device == "cpu" or INTERPRETED.value:
        return "Triton: its interpreter does not run Gluon, and triton.fa3 needs a Hopper GPU (sm_90)"
    if not torch.cuda.is_available():
        return "CUDA: no device"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) == (9, 0):
        return None
    return f"CUDA: {torch.cuda.get_device_name()} is sm_{major}{minor}, and wgmma needs a Hopper GPU (sm_90)"


def arithmetic(dtype: Dtype, device: Device) -> Arithmetic:
    """Returns the claimed arithmetic. The smallest tiles of all head dims and both directions have 64 rows."""
    return replace(arithmetic_of_flash(dtype, device), key_tile=64, query_tile=64)


implementation = Implementation(
    name="triton.fa3",
    attention=attention,
    supports=replace(OWN_KERNELS, dtypes=SIXTEEN_BIT, devices=("cuda",), dropout=False),
    arithmetic=arithmetic,
    missing=missing,
    slow=slow,
    summary=(
        "FlashAttention-3 in Gluon for Hopper: a warp copies tiles by TMA, two warpgroups compute weights "
        "under their products; the backward of triton.fa2."
    ),
)

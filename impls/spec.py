"""The claims of an implementation: what it supports, and its arithmetic.

A claim is data. Every check reads the claims, and no check depends on a name. `Supports` decides which cases an
implementation receives. `Arithmetic` decides how large its error may be: `oracles/bounds.py` computes the bound from
it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from flashproof.impls.fields import check_number, check_types, wrong

Dtype = Literal["float32", "float16", "bfloat16"]
Device = Literal["cpu", "cuda"]
Alignment = Literal["top_left", "bottom_right"]
Slow = Literal["tile", "variant", "shape", "call"]

DTYPES: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")
SIXTEEN_BIT: tuple[Dtype, ...] = ("float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Supports:
    """The inputs that an implementation supports, and its promises about them.

    The defaults describe a modest kernel: full attention, forward and backward, in three dtypes. An implementation
    never receives an input outside its claims. The report shows such inputs as not claimed.
    """

    dtypes: tuple[Dtype, ...] = DTYPES  # the dtypes of query, key and value
    devices: tuple[Device, ...] = ("cpu", "cuda")  # the devices that tensors may be on
    backward: bool = True  # autograd provides the gradients of query, key and value
    # Causal masks. "top_left": query i sees the keys j <= i. "bottom_right": the last query sees the last key.
    causal: tuple[Alignment, ...] = ()
    # "default": always 1 / sqrt(head dim). "positive": any positive scale. "finite": also zero and negative scales.
    scale: Literal["default", "positive", "finite"] = "default"
    grouped_heads: bool = False  # fewer heads in key and value than in query, which they divide
    cross_lengths: bool = False  # queries != keys
    strided: bool = False  # inputs and output gradients have any strides (transposed, sliced, expanded)
    unaligned: bool = False  # tensors and their rows start at any address, not only where vector loads may
    block_mask: bool = False  # a boolean mask in which False hides a block of 128 queries by 128 keys
    dropout: bool = False  # dropout on the weights, with the Philox mask of `oracles.masks.Dropout`
    lse: bool = False  # `return_lse=True` returns (out, lse)
    dims: tuple[int, int] = (1, 256)  # the smallest and the largest head dim
    dim_multiple: int = 1  # head dims are multiples of this number
    masked_nan: bool = False  # a NaN in a masked key or value changes nothing
    deterministic: bool = False  # two runs return the same bits
    batch_invariant: bool = False  # a slice of a batch returns the same bits as the whole batch
    linear_memory: bool = False  # memory beyond inputs and outputs at most doubles when the sequence doubles

    def __post_init__(self) -> None:
        """Raises ValueError for an invalid field."""
        check_types(self, Supports)
        for name, known in (("dtypes", DTYPES), ("devices", get_args(Device))):
            if not getattr(self, name):
                raise wrong(self, name, f"a tuple of at least one of {', '.join(map(repr, known))}")
        (low, high), multiple = self.dims, self.dim_multiple
        if not 1 <= low <= high:
            raise wrong(self, "dims", "the smallest and the largest head dim, both at least 1")
        if multiple < 1 or high // multiple * multiple < low:
            raise wrong(self, "dim_multiple", f"a number that has a multiple from {low} to {high}")


# What the project's own kernels support and promise. The block-sparse kernels also support a block mask.
OWN_KERNELS = Supports(
    causal=("top_left", "bottom_right"),
    scale="finite",
    grouped_heads=True,
    cross_lengths=True,
    strided=True,
    unaligned=True,
    dropout=True,
    lse=True,
    deterministic=True,
    batch_invariant=True,
    linear_memory=True,
)


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """The roundings of an implementation, for one dtype on one kind of device.

    The defaults describe FlashAttention on plain floating-point units. Products are exact, and their sums are float32.
    Weights are cast to the input dtype before the second product. Gradients are summed in float32 and rounded once.
    """

    # What adds up products. "fma": float32, with IEEE rounding. "tensor_core": float32 that is truncated, with twice
    # the unit roundoff. "float64": float64.
    accumulate: Literal["fma", "tensor_core", "float64"] = "fma"
    # With "tensor_core": the most terms that a tensor core adds up before float32 units add the sum to others, rounding
    # to nearest. It adds 16 products at a time and keeps two bits more than float32, as Hopper's does. Of e4m3 numbers
    # it adds 32 products at a time and keeps 13 bits below the largest one. Nothing but products is then added by
    # tensor cores. None: they add up all terms.
    tensor_core_terms: int | None = None
    # Before a product, float32 operands are rounded to nearest in this format. "exact": not at all. "6xbf16": each
    # operand is the sum of three bfloat16 numbers, and the six largest of their nine products are added, small ones
    # first. "input": operands and products are rounded to the input dtype, as under torch.autocast. "e4m3": query, key
    # and value are rounded to nearest in e4m3, an FP8 format. `scale_rows` rows of a head share a scale, the smallest
    # power of two, and at least 2^-126, that brings them into the range of e4m3, up to 448. Only the forward has a
    # bound; a claim of a backward needs other products.
    products: Literal["exact", "6xbf16", "3xtf32", "tf32", "input", "e4m3"] = "exact"
    scale_rows: int = 128  # with products="e4m3": the rows 0 to 127 of each head, 128 to 255 ... share a scale
    # P and dS are cast to this dtype before the second product. "input": to the dtype of query. "e4m3": 2^8 exp(S - m)
    # is cast to e4m3, with m the largest score of the row so far; only with products="e4m3".
    weights: Literal["input", "float32", "e4m3"] = "input"
    # The weights P of the backward's dS = P (dP - delta). "float32": P before its cast. "cast": P after the cast that
    # `weights` describes, so that dS has the errors of two casts.
    dscores_from: Literal["float32", "cast"] = "float32"
    # The forward pass divides its weights by this. "sum": their own sum, so the errors that they share cancel. "lse":
    # exp(lse) with a rounded LSE, as in a second pass over the keys, or when parts of the keys are merged by their
    # LSEs.
    normaliser: Literal["sum", "lse"] = "sum"
    # The dtype in which the contributions to a gradient are summed. "input": the dtype of query. "heads": float32
    # within a query head, and the input dtype over the query heads of a group.
    gradients: Literal["float32", "heads", "input"] = "float32"
    exp_ulps: float = 2.0  # error of the exponential, in units in the last place
    exp_smallest: float = 2.0**-126  # a float32 exponential below this may become 0
    key_tile: int | None = None  # keys per step of the online softmax; None: unknown, the bound assumes the worst case
    # Queries per step of the backward pass, for gradients="input" and for tensor_core_terms.
    query_tile: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for an invalid field."""
        check_types(self, Arithmetic)
        for name, least in (
            ("tensor_core_terms", 1),
            ("scale_rows", 1),
            ("exp_ulps", 0),
            ("exp_smallest", 0),
            ("key_tile", 1),
            ("query_tile", 1),
        ):
            check_number(self, name, least=least)
        if self.weights == "e4m3" and self.products != "e4m3":
            raise wrong(self, "weights", "'input' or 'float32', or also products='e4m3'")


def arithmetic_of_flash(dtype: Dtype, device: Device) -> Arithmetic:
    """FlashAttention's arithmetic: IEEE float32 for float32 inputs, and tensor cores for 16-bit inputs on CUDA."""
    return Arithmetic(accumulate="tensor_core" if device == "cuda" and dtype != "float32" else "fma")


def arithmetic_of_callables(dtype: Dtype, device: Device) -> Arithmetic:
    """The assumed arithmetic of a bare callable: FlashAttention's, with weights normalised and cast in either way.

    Vector code of a CPU for exponentials, such as PyTorch's, makes 2^n as 2 x 2^(n - 1) and answers 0 below 2^-125.5.
    """
    assumed = replace(arithmetic_of_flash(dtype, device), normaliser="lse", dscores_from="cast")
    return replace(assumed, exp_smallest=2.0**-125.5) if device == "cpu" else assumed


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One attention function under verification.

    The function is `attention(query, key, value, *, is_causal=False, scale=None, enable_gqa=False, ...) -> out`. Its
    arguments have the same meaning as in torch. query is [batch, heads, queries, dim], key and value are
    [batch, kv_heads, keys, dim], and out has the shape of query. Autograd provides the gradients. The function receives
    further keywords only if `supports` names them: `causal_alignment`, `block_mask`, `dropout_p` with `dropout_seed`,
    `return_lse`.
    """

    name: str  # the name in the catalogue; a run names an external kernel by the target that loads it
    attention: Callable[..., object]  # the function
    supports: Supports = Supports()  # the inputs that it is verified for
    # The arithmetic that it is judged by, for each dtype and device; FlashAttention's by default. The verifier calls
    # this on any machine, also for devices that the machine does not have.
    arithmetic: Callable[[Dtype, Device], Arithmetic] = arithmetic_of_flash
    summary: str = ""  # one sentence for the report
    # The reason why the kernel cannot run on a device ("CUDA: no device"), or None if it can.
    missing: Callable[[Device], str | None] = lambda device: None
    # What is slow on a device. "tile": each tile, as in an interpreter. "variant": each tile, and the run of another
    # implementation has the same code. "shape": each new shape, because it is compiled. "call": each new kind of call,
    # because it is compiled for many seconds. A run then uses fewer cases, for "tile" and "variant" also smaller ones,
    # and for "variant" and "call" so few that not all pairs of levels meet. It ignores this field of an external
    # kernel.
    slow: Callable[[Device], Slow | None] = lambda device: None
    bare: bool = False  # a bare callable: a refusal with a clear exception is not a failure

    def __post_init__(self) -> None:
        """Raises ValueError for an invalid field."""
        if isinstance(self.arithmetic, Arithmetic):
            raise wrong(self, "arithmetic", "a function, as `lambda dtype, device: Arithmetic(...)`")
        check_types(self, Implementation)

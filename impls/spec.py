"""What an implementation says of itself: what it supports, and the arithmetic it does.

A claim is data. Every check reads it, none asks for a name: `Supports` decides which cases an implementation is given, `Arithmetic`
decides how large its error may be (`oracles/bounds.py` turns it into a bound).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from flashproof.impls.fields import check_number, check_types, wrong

Dtype = Literal["float32", "float16", "bfloat16"]
Device = Literal["cpu", "cuda"]
Alignment = Literal["top_left", "bottom_right"]

DTYPES: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")
SIXTEEN_BIT: tuple[Dtype, ...] = ("float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Supports:
    """The inputs that an implementation takes, and the promises it makes about them.

    The defaults are a modest kernel: full attention, forward and backward, in three dtypes. Inputs outside are never given to it, and the
    report shows them as not claimed.
    """

    dtypes: tuple[Dtype, ...] = DTYPES
    devices: tuple[Device, ...] = ("cpu", "cuda")
    backward: bool = True
    causal: tuple[Alignment, ...] = ()
    scale: Literal["default", "positive", "finite"] = "default"  # "finite" takes zero and negative scales too
    grouped_heads: bool = False
    cross_lengths: bool = False  # queries != keys
    strided: bool = False  # any strides: transposed, sliced, expanded; inputs and output gradients
    unaligned: bool = False  # tensors that begin anywhere, not only at an address that vector loads ask for
    block_mask: bool = False
    dropout: bool = False
    lse: bool = False  # return_lse=True answers (out, lse)
    dims: tuple[int, int] = (1, 256)  # smallest and largest head dim
    dim_multiple: int = 1  # head dims are multiples of this
    masked_nan: bool = False  # NaN inside a masked key or value changes nothing
    deterministic: bool = False  # two runs agree bitwise
    batch_invariant: bool = False  # a slice of a batch agrees bitwise with the batch
    linear_memory: bool = False  # beyond inputs and outputs, memory at most doubles when the sequence doubles

    def __post_init__(self) -> None:
        """Raises ValueError for a field that cannot be read."""
        check_types(self, Supports)
        for name, known in (("dtypes", DTYPES), ("devices", get_args(Device))):
            if not getattr(self, name):
                raise wrong(self, name, f"a tuple of at least one of {', '.join(map(repr, known))}")
        (low, high), multiple = self.dims, self.dim_multiple
        if not 1 <= low <= high:
            raise wrong(self, "dims", "the smallest and the largest head dim, both at least 1")
        if multiple < 1 or high // multiple * multiple < low:
            raise wrong(self, "dim_multiple", f"a number that has a multiple from {low} to {high}")


# What the project's own kernels take and promise. Those over a block mask take that too.
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
    """The roundings that an implementation makes, for one dtype on one kind of device.

    The defaults are FlashAttention's on plain floating-point units: exact products summed in float32, weights cast to the input dtype before
    the second product, gradients summed in float32 and rounded once.
    """

    accumulate: Literal["fma", "tensor_core", "float64"] = "fma"  # tensor cores truncate: twice the unit roundoff
    # What float32 operands are rounded to, to nearest, before they are multiplied. "input": the input dtype, and products too, as under torch.autocast.
    products: Literal["exact", "3xtf32", "tf32", "input"] = "exact"
    weights: Literal["input", "float32"] = "input"  # what P and dS are cast to before the second product
    # What the forward divides its weights by. "sum": their own sum, in which the errors that they share cancel. "lse": exp(lse), of an LSE that was
    # rounded, as in a second pass over the keys, or where parts of them are merged by their LSEs.
    normaliser: Literal["sum", "lse"] = "sum"
    # Where the contributions to a gradient are added up. "heads": each query head's in float32, and those of the heads of a group in the input dtype.
    gradients: Literal["float32", "heads", "input"] = "float32"
    exp_ulps: float = 2.0  # error of the exponential, in units of the last place
    exp_smallest: float = 2.0**-126  # a float32 exponential below this may be answered as 0
    key_tile: int | None = None  # keys per step of the online softmax; None: unknown, taken at its worst
    query_tile: int | None = None  # queries per step of the backward, for gradients="input"

    def __post_init__(self) -> None:
        """Raises ValueError for a field that cannot be read."""
        check_types(self, Arithmetic)
        for name, least in (("exp_ulps", 0), ("exp_smallest", 0), ("key_tile", 1), ("query_tile", 1)):
            check_number(self, name, least=least)


def arithmetic_of_flash(dtype: Dtype, device: Device) -> Arithmetic:
    """FlashAttention's arithmetic: float32 in IEEE arithmetic, 16 bit on tensor cores where there are any."""
    return Arithmetic(accumulate="tensor_core" if device == "cuda" and dtype != "float32" else "fma")


def arithmetic_of_callables(dtype: Dtype, device: Device) -> Arithmetic:
    """What a bare callable is taken to have: FlashAttention's arithmetic, the weights normalised in either way."""
    return replace(arithmetic_of_flash(dtype, device), normaliser="lse")


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One attention function under verification.

    `attention(query, key, value, *, is_causal=False, scale=None, enable_gqa=False, ...) -> out` with torch's meaning: query
    [batch, heads, queries, dim], key and value [batch, kv_heads, keys, dim], out like query, gradients by autograd. Keywords beyond torch's, given only
    where `supports` names them: `causal_alignment`, `block_mask`, `dropout_p` with `dropout_seed`, `return_lse`.
    """

    name: str  # in the catalogue; a run knows what is not of it by the words that load it
    attention: Callable[..., object]
    supports: Supports = Supports()
    arithmetic: Callable[[Dtype, Device], Arithmetic] = arithmetic_of_flash  # asked on any machine, of devices that are not there too
    summary: str = ""  # one sentence for the report
    missing: Callable[[Device], str | None] = lambda device: None  # why it cannot run there ("CUDA: no device"), or None
    # What takes long there: each tile, as in an interpreter, or each new shape, which is compiled. A run gives it fewer cases, and smaller ones if it is each
    # tile. Heeded of the catalogue alone.
    slow: Callable[[Device], Literal["tile", "shape"] | None] = lambda device: None
    bare: bool = False  # a callable taken as it stands: what it refuses with a clear exception is not a failure

    def __post_init__(self) -> None:
        """Raises ValueError for a field that cannot be read."""
        if isinstance(self.arithmetic, Arithmetic):
            raise wrong(self, "arithmetic", "a function, as `lambda dtype, device: Arithmetic(...)`")
        check_types(self, Implementation)

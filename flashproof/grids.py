"""The named grids: which cases a check runs. Each is a function of dtype and device, because ranges and affordable
lengths differ.

A grid names features in combination, not their product: a pair of features that share a code path stands in at least
one line.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache

from hypothesis import strategies as st

from flashproof import search
from flashproof.cases import Case, Family, Layout, Masking, not_claimed
from flashproof.impls.spec import Device, Dtype, Supports

Grid = Callable[[Dtype, Device], list[Case]]


@cache
def _parsed(text: str, dtype: Dtype) -> tuple[Case, ...]:
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return tuple(Case.parse(f"{line} {dtype}") for line in lines if line)


def _lines(text: str, dtype: Dtype) -> list[Case]:
    return list(_parsed(text, dtype))


# Shapes, masks, layouts: what a kernel gets wrong by indexing, whatever its numbers. The lengths leave every remainder
# of 16 somewhere, which a test holds them to.
_SHAPES = """
b2 h1 q128 k128 d64
b1 h1 q257 k257 d64 causal
b1 h2 q71 k149 d40 causal                  # more keys than queries, top left: the last 78 keys are never seen
b1 h1 q73 k151 d64 causal-br
b1 h2 q150 k75 d64 causal-br               # the first 75 rows see no key
b1 h4/2 q65 k65 d64 causal
b1 h7/1 q33 k65 d64 causal-br
b1 h2 q1 k1 d64
b2 h1 q1 k300 d64 causal-br                # decoding: one query, which sees all
b1 h2 q300 k1 d64 causal
b1 h4/2 q20 k1 d16                         # one key, of several heads
b1 h2 q1 k40 d16 causal                    # one query, which sees one key: top left is not decoding
b2 h1 q127 k129 d16 causal-br
b1 h1 q63 k64 d72 causal
b1 h1 q80 k80 d80
b1 h2 q66 k137 d96 causal transposed
b1 h1 q70 k70 d256 causal
b1 h2/1 q20 k200 d256 transposed           # large heads, and several tiles of keys
b1 h1 q20 k700 d128                       # more tiles of keys than a pipeline has stages
b1 h4/1 q20 k300 d128 causal-br            # the usual head dim, with the usual group, over several tiles
b1 h2 q1 k300 d128                         # and its decoding
b1 h8/2 q40 k40 d128 causal
b1 h1 q270 k270 d128 causal                # and tiles below the diagonal's, for each tile of keys
b1 h1 q20 k512 d16
b1 h2/1 q150 k40 d16 causal-br             # a group, and rows of all tiles but the last see no key
b1 h32/1 q16 k20 d16
b1 h1 q31 k17 d1
b2 h2 q97 k97 d64 causal transposed
b2 h2 q65 k81 d32 sliced
b1 h2 q40 k33 d32 causal columns           # a row's elements are a length apart: keys as their transpose is stored
b1 h3 q72 k72 d64 expanded
b2 h2 q20 k40 d32 causal expanded          # with several batch entries, those are one memory, and heads are not
b2 h2/1 q66 k66 d40 causal transposed
b2 h2 q65 k65 d64 causal k.columns v.transposed do.sliced  # strides of their own
b1 h1 q65 k66 d192 causal
b1 h1 q3 k1100 d16                         # many tiles of keys, and of queries: few scores, but every loop is long
b1 h1 q1100 k3 d16 causal
b2 h2/1 q1 k700 d16                        # decoding: many keys, and groups
b1 h1 q700 k900 d16 causal                 # both long
b1 h8/2 q33 k40 d32 causal                 # groups of four, and more heads than any power of two below them
b1 h17 q20 k20 d16
b5 h13/1 q4 k4 d16 causal                  # more than 64 heads of all batch entries
b3 h50 q3 k3 d16 causal                    # more programs than a GPU has processors
b1 h71/1 q4 k20 d64 causal                 # Falcon's: one key head for more query heads than a block holds
b1 h12/1 q3 k40 d16 causal-br              # groups of twelve, and of four
b1 h20/5 q20 k20 d16 causal
b1 h1 q20 k192 d16                         # an odd number of whole tiles
b1 h2/1 q40 k40 d160 causal
b1 h2 q40 k40 d33 causal                   # no multiple of a vector
b1 h1 q300 k20 d16 dropout0.3
b1 h1 q150 k150 d16 causal dropout0.3      # several tiles, each with counters of its own
b1 h4/1 q20 k40 d128 dropout0.3
b1 h2 q300 k140 d64 blocks0.5
b2 h2/1 q257 k257 d32 causal blocks0.6 transposed
b1 h2 q140 k260 d64 causal-br blocks0.3 dropout0.2   # blocks so sparse that whole rows are empty
b1 h1 q140 k140 d128 blocks0.5
b1 h1 q1200 k20 d16 blocks0.5
b1 h1 q40 k1100 d16 dropout0.3             # counters that a byte does not tell apart
"""

# What each dtype rounds in its own way: scales, given or the root of a head dim that is no power of two, dropout's
# gain, and positions that float16 does not hold. Shapes differ here too.
_SCALES = """
b1 h1 q149 k70 d36 causal                  # more queries than keys: the last 79 rows see every key
b1 h3/1 q64 k63 d32
b1 h1 q129 k127 d128 causal
b1 h2 q40 k70 d16 causal-br scale0.3
b1 h1 q130 k130 d64 scale0.3
b1 h1 q74 k74 d64 causal scale-0.2
b1 h1 q75 k77 d64 causal scale0
b1 h4/2 q70 k130 d40 k.columns v.transposed do.sliced
b1 h1 q8 k2300 d16 causal-br               # the end of a long sequence, whose positions float16 does not hold
b1 h1 q1 k8300 d16                         # more keys than any number of splits that is fixed
b1 h1 q46 k43 d112 scale0.2
b1 h2 q45 k46 d200 transposed
b3 h2/1 q20 k40 d96 dropout0.9
b1 h2 q33 k33 d18 causal scale2.5
b1 h1 q20 k20 d16 scale20
b1 h1 q20 k20 d16 causal scale0.004
b1 h2 q66 k66 d32 scale1.0                 # T5's: not the same as none
b1 h2 q128 k128 d64 dropout0.15               # 1 / (1 - p) is far from any number of 16 bit
b1 h6/2 q20 k130 d40 causal-br dropout0.5 transposed
b1 h1 q20 k4200 d16 blocks0.5              # more blocks than a word has bits
"""

# Distributions: what a kernel gets wrong by arithmetic. The length leaves a tail in every tile size.
_FAMILIES = """
b1 h1 q140 k140 d64 causal outliers
b1 h2 q257 k257 d64 causal sharp
b1 h1 q140 k140 d64 v.positive
b1 h1 q140 k140 d64 spike x30
b1 h1 q140 k140 d128 causal spike x8
b1 h1 q140 k140 d64 ties
b1 h1 q140 k140 d64 causal uniform
b1 h1 q140 k140 d64 x0.001
b1 h2 q140 k140 d64 causal x16
b1 h1 q140 k140 d64 x64
b1 h1 q140 k140 d64 causal shift-100        # very negative LSE
b1 h1 q129 k129 d64 shift-300
b1 h1 q70 k150 d64 causal-br shift-100     # the last tile is hidden from some rows, whose scores are far below 0
b1 h1 q140 k300 d64 spike x12               # beside a sink, whole tiles weigh little, and not nothing
b1 h1 q20 k2100 d32 spike x12
b1 h1 q1 k300 d16 spike x16                # and less still, which a threshold may take for nothing
b1 h1 q60 k700 d64 rising x70              # 13 from tile to tile: with a late maximum, weights leave float16
b1 h1 q140 k140 d64 v.positive shift100
b1 h2 q140 k300 d64 blocks0.5 shift-150     # the first tile visited may be hidden: a maximum of 0 loses all
"""

# What a search found, as small as it got: each failed once, of a kernel or of the suite. A new find is pinned here,
# without its dtype.
_FOUND = """
b1 h2/1 q33 k33 d16 causal x4 expanded      # gradients summed in float16 underflow at every step; the bound said once
b1 h1 q18 k18 d16 uniform                   # equal weights, equal gradients of keys: one sample of a bias
"""

_GPU_LENGTHS = """
b2 h8 q1024 k1024 d64 causal
b8 h16 q100 k100 d64 causal
b4 h16 q1024 k300 d64 causal                # more tiles than a persistent kernel has programs
b1 h4/2 q1000 k1500 d128 causal-br
b1 h2 q4096 k4096 d128 v.positive
b1 h2 q2048 k2048 d256 causal outliers
b1 h1 q4100 k4100 d64 causal shift-100
b1 h4 q2048 k2048 d64 causal blocks0.2
"""


def ordinary(dtype: Dtype, device: Device) -> list[Case]:
    """Every feature and every family, small; longer ones where a GPU makes them cheap."""
    return (
        _lines(_SHAPES, dtype)
        + _lines(_SCALES, dtype)
        + _lines(_FAMILIES, dtype)
        + _lines(_FOUND, dtype)
        + (_lines(_GPU_LENGTHS, dtype) if device == "cuda" else [])
    )


def lengths(dtype: Dtype, device: Device) -> list[Case]:
    """One shape over sequence lengths, for the chart of error against length."""
    steps = {"cpu": (1, 16, 64, 128, 256, 384, 1100), "cuda": (16, 64, 256, 1024, 4096, 16384)}[device]
    return [Case(heads=1, queries=length, dim=64, dtype=dtype, mask="causal", seed=1) for length in steps]


def magnitudes(dtype: Dtype, device: Device) -> list[Case]:
    """One shape over the magnitude of the queries, for the chart of error against score magnitude."""
    return [
        Case(heads=1, queries=129, dim=64, dtype=dtype, magnitude=2.0**power, seed=2) for power in (-6, -2, 0, 2, 4, 8)
    ]


# Where exponentials overflow and underflow: float32 above 88.7228, below -87.34 (normal) and -103.97 (subnormal); exp2
# at 128 and 127; float16 above 11.09; the largest float16; and far out, where sentinels and unsubtracted maxima give
# way.
LANDMARKS = (
    -2.5e5,
    -1e4,
    -104.0,
    -103.9,
    -87.4,
    -87.3,
    0.0,
    11.0,
    11.1,
    87.0,
    88.0,
    88.1,
    88.7,
    88.73,
    89.0,
    127.9,
    128.1,
    1e4,
    65504.0,
    2.5e5,
)


# Equal scores so large that half an ulp of one is beyond exp's range: a difference of two roundings is then infinite
# (pytorch#121558). float16 holds no factors of such a product; on a GPU, the kernels that ship are known to have this
# fault.
HUGE = 1e10


def shifted(dtype: Dtype, device: Device) -> list[Case]:
    """Every score moved to a landmark by one common shift: the exact output is that of the unshifted scores, up to
    rounding.
    """
    scores = (*LANDMARKS, HUGE, -HUGE) if device == "cpu" and dtype != "float16" else LANDMARKS
    return [
        Case(heads=1, queries=40, keys=70, dim=32, dtype=dtype, mask="causal", shift=score, seed=3) for score in scores
    ]


def spiked(dtype: Dtype, device: Device) -> list[Case]:
    """One score of each row at a landmark, the others ordinary."""
    return [
        Case(heads=1, queries=40, keys=70, dim=32, dtype=dtype, family="spike", magnitude=score, seed=4)
        for score in LANDMARKS
        if score
    ]


def masked(dtype: Dtype, device: Device) -> list[Case]:
    """Cases in which some keys are hidden from some queries."""
    text = """
    b1 h2 q130 k130 d64 causal
    b1 h1 q70 k140 d64 causal
    b1 h2/1 q66 k130 d40 causal-br
    b1 h1 q130 k70 d64 causal-br
    b1 h2 q260 k130 d32 blocks0.5
    b1 h1 q140 k260 d64 causal blocks0.6
    """
    return _lines(text, dtype)


def bottom_right_pairs(dtype: Dtype, device: Device) -> list[Case]:
    """Bottom-right cases with queries <, =, > keys; a check pairs each with its top-left twin."""
    return _lines("b1 h1 q70 k140 d64 causal-br\nb1 h2 q100 k100 d64 causal-br\nb1 h1 q140 k70 d64 causal-br", dtype)


def empty_rows(dtype: Dtype, device: Device) -> list[Case]:
    """Cases in which some queries see no key at all."""
    text = """
    b1 h2 q140 k70 d64 causal-br
    b2 h1 q130 k1 d40 causal-br
    b1 h2 q260 k140 d32 blocks0.2 seed5
    b1 h1 q130 k130 d64 blocks0 seed6
    """
    return _lines(text, dtype)


def shared_blocks(dtype: Dtype, device: Device) -> list[Case]:
    """Heads and batch entries that differ in their block masks, where they are not shared."""
    return _lines("b2 h2 q140 k300 d16 blocks0.5", dtype)


def layouts(dtype: Dtype, device: Device) -> list[Case]:
    """The same numbers in every layout, with memory between and around the tensors that they do not own."""
    text = "\n".join(
        f"b2 h1 q65 k65 d64 causal {layout} seed8\nb1 h2 q70 k130 d40 {layout} seed8"
        for layout in ("contiguous", "transposed", "sliced", "k.columns v.transposed do.sliced")
    )
    return _lines(text, dtype)


def addresses(dtype: Dtype, device: Device) -> list[Case]:
    """Tensors that begin one element behind an address that vector loads ask for."""
    return _lines("b1 h1 q40 k140 d64 offset\nb1 h1 q40 k40 d40 causal offset", dtype)


def repeated(dtype: Dtype, device: Device) -> list[Case]:
    """Cases for bitwise repeatability and independence of the batch."""
    text = """
    b2 h1 q140 k140 d64 causal
    b3 h2/1 q65 k70 d40
    b2 h1 q70 k70 d64 causal dropout0.2
    b2 h1 q260 k260 d32 blocks0.5
    """
    return _lines(text, dtype) + (
        _lines("b2 h4 q1000 k1000 d128 causal\nb3 h4/2 q700 k700 d64", dtype) if device == "cuda" else []
    )


def small(dtype: Dtype, device: Device) -> list[Case]:
    """Two plain cases for checks of form rather than of figures."""
    return _lines("b2 h2 q65 k65 d64\nb1 h2 q40 k40 d32 causal", dtype)


def trained(dtype: Dtype, device: Device) -> list[Case]:
    """A small case for calls that are made in other ways than one forward and its backward."""
    return _lines("b1 h1 q24 k24 d40\nb1 h1 q24 k24 d40 causal", dtype)


def inferred(dtype: Dtype, device: Device) -> list[Case]:
    """What is asked without gradients: a prompt and decoding, with several tiles of keys; and every option, which a
    path of its own may not be told.
    """
    text = """
    b1 h1 q24 k24 d40 causal
    b1 h4/2 q20 k600 d64
    b2 h2 q1 k150 d64
    b1 h1 q1 k8300 d16
    b1 h1 q20 k40 d16 scale0.3
    b1 h1 q20 k40 d16 causal-br
    b1 h1 q20 k40 d16 dropout0.3
    b1 h1 q20 k400 d16 blocks0.5
    """
    return _lines(text, dtype)


def partly_trained(dtype: Dtype, device: Device) -> list[Case]:
    """Groups, several tiles of keys and of queries, scale and dropout, for some of the three gradients."""
    text = """
    b1 h1 q24 k24 d40 causal
    b1 h2/1 q20 k130 d16
    b1 h1 q130 k20 d16 scale0.3
    b1 h1 q130 k20 d16
    b1 h1 q24 k24 d16 dropout0.3
    """
    return _lines(text, dtype)


def general_position(dtype: Dtype, device: Device) -> list[Case]:
    """Cases whose errors are independent of one another, so that their mean square is known; each brings out another
    rounding.
    """
    sixteen_bit = """
    b1 h1 q32 k4000 d16           # many tiles of keys: what is summed in 16 bit between them
    b1 h1 q4000 k20 d16           # many tiles of queries
    b1 h1 q32 k700 d128           # the same of the usual head dim
    b1 h1 q700 k32 d128
    b1 h1 q1300 k1300 d8 causal   # and of causal kernels
    b1 h8/1 q64 k64 d32           # many heads to a key head: what is summed in 16 bit between them
    b1 h1 q140 k140 d64 causal sharp
    b1 h1 q140 k140 d64 v.positive
    b1 h1 q140 k140 d64 v.positive do.positive  # what cancels in dP - delta: dP that is rounded before
    """
    single = """
    b1 h2 q500 k2 d8 x0.25        # two keys: hardly anything but the exponential rounds
    b1 h2 q128 k16 d16 x0.25
    b1 h1 q140 k140 d8 sharp      # scores, and the digits of what they are products of
    b1 h1 q140 k140 d64 causal
    b1 h1 q140 k140 d64 v.positive
    """
    lengths = "b1 h2 q1000 k1000 d128\nb2 h2 q700 k1300 d64" if device == "cuda" else ""
    return _lines((single if dtype == "float32" else sixteen_bit) + lengths, dtype)


def uniform(dtype: Dtype, device: Device) -> list[Case]:
    """Keys that are few or not a whole tile, so that one key too many or too few is far outside the bound of their
    mean.
    """
    return _lines("b1 h4/2 q20 k16 d32\nb1 h1 q40 k64 d64\nb1 h1 q70 k70 d40 causal", dtype)


def one_hot(dtype: Dtype, device: Device) -> list[Case]:
    """Head dims that have codes enough, far enough apart."""
    return _lines("b2 h1 q70 k70 d64\nb1 h4/2 q40 k66 d64\nb1 h1 q70 k70 d64 causal", dtype)


def zeros(dtype: Dtype, device: Device) -> list[Case]:
    """Plain cases, of which tensors are made zero."""
    return _lines("b1 h2 q40 k70 d64\nb1 h1 q66 k66 d40 causal", dtype)


def unity(dtype: Dtype, device: Device) -> list[Case]:
    """Ordinary rows; rows with a sink, one score above the others by 8; and scores so large that every rounding of a
    maximum shows, in several tiles.
    """
    text = """
    b1 h2/1 q64 k80 d32
    b1 h1 q140 k140 d64 causal
    b1 h1 q70 k140 d64 spike x8
    b1 h1 q128 k319 d64 x16 shift60000
    """
    return _lines(text, dtype)


def scaled_values(dtype: Dtype, device: Device) -> list[Case]:
    """Plain cases: numbers that powers of two leave in the range of the dtype."""
    return _lines("b1 h2/1 q40 k70 d64\nb1 h1 q66 k66 d40 causal", dtype)


def ordered(dtype: Dtype, device: Device) -> list[Case]:
    """More keys than a tile holds, for their order to matter."""
    return _lines("b1 h2/1 q40 k150 d32", dtype)


def batches(dtype: Dtype, device: Device) -> list[Case]:
    """Several batch entries, heads and groups."""
    return _lines("b2 h4/2 q40 k40 d32 causal", dtype)


def allocated(dtype: Dtype, device: Device) -> list[Case]:
    """Small tensors: an allocator hands small blocks out again. Lengths leave tails to be padded; a split of keys may
    have none that a query sees.
    """
    return _lines("b1 h2 q65 k65 d64 causal\nb1 h1 q20 k70 d40\nb1 h1 q20 k300 d16 causal", dtype)


def summed(dtype: Dtype, device: Device) -> list[Case]:
    """Columns enough for a statistic of sums."""
    return _lines("b1 h1 q140 k140 d64\nb1 h4/2 q50 k70 d32", dtype)


def memory(dtype: Dtype, device: Device) -> list[Case]:
    """Doubling lengths of one head. One dtype stands for the others: what is held is the same tensors."""
    if dtype != ("float32" if device == "cpu" else "float16"):
        return []
    return [
        Case(heads=1, queries=length, dim=64, dtype=dtype, seed=9) for length in (512, 1024, 2048, 4096, 8192, 16384)
    ]


# -------------------------------------------------------------------------------------------------------------- dealing


def dealt(grid: Grid, cases: Sequence[Case], dtype: Dtype, among: Sequence[Dtype]) -> list[Case]:
    """What one of several dtypes is given of a grid's cases, where all of them run one code (`Implementation.one_code`)
    and are verified in one run.

    A shape of the ordinary grid runs in one of them, by its place in the list; all else, which rounding may fail too,
    runs in each.
    """
    if grid is not ordinary or len(among) < 2:
        return list(cases)
    place = {case: number for number, case in enumerate(_lines(_SHAPES, dtype))}
    return [case for case in cases if case not in place or among[place[case] % len(among)] == dtype]


def turned(grid: Grid, cases: Sequence[Case], turn: int) -> list[Case]:
    """The cases in the order in which one of several implementations takes them: of the ordinary grid each begins
    elsewhere, the first at its beginning.

    Processes that verify them side by side then enclose different cases, and find what the others have enclosed.
    """
    start = (
        round(len(cases) * (turn * 0.618 % 1)) if grid is ordinary else 0
    )  # by the golden ratio: however many there are, they begin far apart
    return [*cases[start:], *cases[:start]]


# --------------------------------------------------------------------------------------------------------------- search

_EDGES = [edge + step for edge in (16, 32, 64, 128) for step in (-1, 0, 1)]
_LENGTHS = st.one_of(st.integers(1, 40), st.sampled_from(_EDGES), st.integers(41, 140))
_LONGER = st.one_of(
    _LENGTHS,
    st.sampled_from([length + step for length in (192, 256, 320, 384) for step in (-1, 0, 1)]),
    st.integers(141, 300),
)
_SEVERAL_BLOCKS = st.sampled_from(
    [130, 257, 128, 300]
)  # of 128 x 128 scores, so that whole tiles, and runs of them, are hidden
_MAGNITUDES = st.sampled_from([0, -2, 2, 4, 6, -10]).map(lambda power: 2.0**power)
_SHIFTS = st.sampled_from([0.0, -100.0, -300.0, 88.0, 100.0, 1e4, *LANDMARKS])
# What a family's magnitude is, other than a factor of the queries: the lift of one score, the rise of all from first to
# last.
_LIFTS: dict[Family, tuple[float, ...]] = {
    "spike": (8.0, 30.0, 3.0, 12.0, -100.0, 1e4),
    "rising": (12.0, 3.0, 30.0, -12.0, 100.0, 1e3),
}


def _dims(supports: Supports) -> list[int]:
    """The head dims to draw from: the usual ones that are claimed, or the smallest claimed."""
    smallest, largest = supports.dims
    usual = [dim for dim in (16, 40, 64, 128) if smallest <= dim <= largest and dim % supports.dim_multiple == 0]
    return usual or [smallest]


@st.composite
def drawn(draw: st.DrawFn, supports: Supports, dtype: Dtype) -> Case:
    """A case that the claims cover. Small values first, so that a failure shrinks towards a small shape and an ordinary
    magnitude.
    """

    def one_of(values: Iterable[object]) -> object:
        return draw(st.sampled_from(list(values)))

    groups = draw(st.sampled_from([1, 2, 3])) if supports.grouped_heads else 1
    kv_heads = draw(st.integers(1, 2))
    blocks = one_of((None, None, None, 0.5, 0.2, 0.8)) if supports.block_mask else None
    lengths = (
        _LENGTHS if not search.is_thorough() else _LONGER if blocks is None else st.one_of(_SEVERAL_BLOCKS, _LONGER)
    )
    queries = draw(lengths)
    keys = draw(st.one_of(st.just(queries), lengths)) if supports.cross_lengths else queries
    maskings: list[Masking] = ["full"]
    maskings += ["causal"] if "top_left" in supports.causal else []
    maskings += ["causal-br"] if "bottom_right" in supports.causal else []
    families: list[Family] = ["normal", "sharp", "outliers", "ties", "uniform", "spike", "rising"]
    layout_names: list[Layout] = ["contiguous", "transposed", "sliced", "expanded", "columns"]
    layouts = [one_of(layout_names) for _ in range(4)] if supports.strided else ["contiguous"] * 4
    family: Family = one_of(families)  # type: ignore[assignment]
    case = Case(
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * groups,
        kv_heads=kv_heads,
        queries=queries,
        keys=keys,
        dim=one_of(_dims(supports)),  # type: ignore[arg-type]
        dtype=dtype,
        mask=one_of(maskings),  # type: ignore[arg-type]
        blocks=blocks,  # type: ignore[arg-type]
        family=family,
        magnitude=draw(st.sampled_from(_LIFTS[family])) if family in _LIFTS else draw(_MAGNITUDES),
        shift=draw(_SHIFTS),
        scale=one_of((None, None, 0.3, *((-0.3, 0.0) if supports.scale == "finite" else ())))
        if supports.scale != "default"
        else None,  # type: ignore[arg-type]
        dropout=one_of((0.0, 0.0, 0.25)) if supports.dropout else 0.0,  # type: ignore[arg-type]
        values=one_of(("normal", "positive")),  # type: ignore[arg-type]
        layouts=tuple(layouts),  # type: ignore[arg-type]
        seed=draw(st.integers(0, 99)),
    )
    assert not_claimed(case, supports) is None, f"the strategy drew a case that is not claimed: {case}"
    return case

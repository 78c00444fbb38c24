"""Records: what a run found, one JSON object a line, appended while the run goes, so that nothing is lost when it dies."""

import gzip
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

Tensor = Literal["out", "lse", "dq", "dk", "dv"]
Certainty = Literal["certified", "bounded", "sampled", "exact"]
Status = Literal["passed", "failed", "refused", "known defect"]

# The layers of checks, in the order in which each assumes the ones before it. A check is called "layer/what it asks".
LAYERS = ("contract", "accuracy", "gradients", "stability", "masks", "properties", "memory", "determinism")


class Environment(msgspec.Struct, tag="environment", kw_only=True, frozen=True):
    """Where and when a run took place. The first record of a run."""

    run: str  # joins the records of one run
    date: str  # ISO 8601, UTC
    commit: str  # of flashproof, when it ran from a clone of its own; ends in "+" when the tree had changes
    project_commit: str = ""  # of the repository that the run was started in
    whole: bool = False  # whether the run left out nothing of what its implementations claim
    device: str  # "NVIDIA H200" or the CPU's name
    kind: Literal["cpu", "cuda"]
    versions: dict[str, str]  # {"python": ..., "torch": ..., "triton": ..., "cuda": ..., "driver": ...}, what is there
    command: str


class Covered(msgspec.Struct, kw_only=True, frozen=True):
    """What the cases of a run hold of the space of cases, on one device."""

    cases: int
    pairs: int  # of levels that stand together in some case
    possible_pairs: int  # that are claimed and have room
    triples: int
    possible_triples: int
    forbidden: int  # pairs that the claims forbid
    no_room: int  # pairs that are claimed, and too large for the run


class Claim(msgspec.Struct, tag="claim", kw_only=True, frozen=True):
    """What an implementation said of itself in a run."""

    run: str
    implementation: str
    summary: str
    supports: dict[str, str | int | float | bool | list[str | int]]  # the fields of flashproof.impls.spec.Supports
    arithmetic: dict[str, dict[str, str | int | float | None]]  # "float16 on cuda" -> the fields of flashproof.impls.spec.Arithmetic
    bare: bool
    ended: bool = True  # whether the run came to its end: nobody broke it off
    covered: dict[str, Covered] = {}  # by device; empty where cases or checks were chosen


class Element(msgspec.Struct, kw_only=True, frozen=True):
    """The element with the largest error over its bound."""

    index: tuple[int, ...]
    got: float | str  # "nan", "inf", "-inf" as text: JSON has no such numbers
    exact: float | str
    error: float | str
    bound: float | str
    note: str = ""  # "the query sees 518 keys; the largest weight is 99.8 %"


class Judgement(msgspec.Struct, tag="judgement", kw_only=True, frozen=True):
    """One tensor of one case, judged. A fault of the kernel (exception, hang, crash) is a judgement without figures and with its message.

    Also one yes-or-no property (bitwise repeatability, non-interference): then `rho` is None and `message` says what differed.
    """

    run: str
    implementation: str
    check: str  # "accuracy/forward"
    case: str  # the line that repeats it
    dtype: str
    device: Literal["cpu", "cuda"]
    status: Status
    tensor: Tensor | None = None
    rho: float | str | None = None  # error over the deterministic bound
    rho_statistical: float | str | None = None  # error over the probabilistic bound, where it gates (float32 on FMA units)
    bias: float | None = None  # in output ulps (16 bit), or over the bound (float32); mean signed error less that of the rounded exact result
    bias_error: float | None = None  # its standard error
    bias_allowance: float | None = None
    rms: float | str | None = None  # root mean square of the errors, over what is expected of the claimed arithmetic
    rms_error: float | None = None  # standard error of its square
    certainty: Certainty | None = None
    worst: Element | None = None
    seconds: float = 0.0
    message: str = ""  # of a failure, a refusal or a known defect: a sentence that the figures do not say
    link: str = ""  # of a known defect: where it is reported
    of_every_call: bool = False  # of a failure or a refusal: every call ends like this, whatever the case
    axes: dict[str, float] = {}  # where the case stands in a sweep: {"queries": 1024, "magnitude": 8.0, "score": 88.5}


class Absence(msgspec.Struct, tag="absence", kw_only=True, frozen=True):
    """Why something was not judged: the claim leaves it out, or this machine cannot run it. An empty check or dtype stands for all of them."""

    run: str
    implementation: str
    device: Literal["cpu", "cuda"]
    reason: Literal["not claimed", "not possible here"]
    check: str = ""
    dtype: str = ""
    message: str = ""  # "CUDA: no device", "block mask"


class Memory(msgspec.Struct, tag="memory", kw_only=True, frozen=True):
    """Memory beyond inputs and outputs, at one sequence length."""

    run: str
    implementation: str
    device: Literal["cpu", "cuda"]
    dtype: str
    direction: Literal["forward", "backward"]
    length: int  # queries = keys
    heads: int  # batch times heads
    dim: int
    matrix_bytes: int  # of the full attention matrix in this dtype
    measured_bytes: int
    method: Literal["allocator", "counted"]


class Traffic(msgspec.Struct, tag="traffic", kw_only=True, frozen=True):
    """Bytes that a kernel reads and writes, counted, beside the paper's formula."""

    run: str
    implementation: str
    dtype: str
    direction: Literal["forward", "backward"]
    length: int
    dim: int
    query_tile: int
    key_tile: int
    read_bytes: int
    written_bytes: int
    formula: str  # the formula in words, with its source
    formula_read_bytes: int
    formula_written_bytes: int


class Curve(msgspec.Struct, tag="curve", kw_only=True, frozen=True):
    """A named curve of a chart that no judgement draws, such as the naive softmax that overflows at 88.72."""

    run: str
    chart: str  # "overflow"
    series: str  # "naive, no maximum"
    device: Literal["cpu", "cuda"]
    x: list[float]
    y: list[float | None]  # None where the value is not finite
    x_title: str
    y_title: str


class Resources(msgspec.Struct, tag="resources", kw_only=True, frozen=True):
    """What the compiler said of a GPU kernel, with no GPU."""

    run: str
    implementation: str
    kernel: str
    target: str  # "sm_90"
    dtype: str
    dim: int
    causal: bool
    registers: int
    spilled_bytes: int
    shared_bytes: int
    shipped: bool  # at the tile sizes that are shipped


class Specimen(msgspec.Struct, tag="specimen", kw_only=True, frozen=True):
    """What the suite itself was tried on: a mutant, which it must reject, or a kernel that is right."""

    run: str
    name: str
    kind: Literal["mutant", "variant", "kernel"]
    fault: str = ""  # a mutant's class: "masks"
    origin: str = ""  # a real fault of the same kind
    says: str  # what is wrong, or done differently
    of: str = ""  # the implementation that it is made of
    patch: str = ""  # the text taken out and the text put in
    check: str = ""  # that must reject it
    survives: str = ""  # why no check rejects it; it is then not counted


class Judge(msgspec.Struct, tag="judge", kw_only=True, frozen=True):
    """What a specimen is tried by: a check of the suite, or a rule in use elsewhere over one set of inputs."""

    run: str
    name: str  # "accuracy/forward", "allclose 1e-2"
    kind: Literal["check", "rule"]
    inputs: Literal["ours", "theirs"] = "ours"  # of a rule: the suite's grid, or ordinary inputs as the suites that use it have them
    says: str = ""
    source: str = ""


class Trial(msgspec.Struct, tag="trial", kw_only=True, frozen=True):
    """What one judge said of one specimen in one dtype. What the specimen does not claim is not tried."""

    run: str
    specimen: str
    judge: str
    inputs: Literal["ours", "theirs"] = "ours"
    dtype: str
    rejected: bool
    case: str = ""  # the first on which it was rejected
    said: str = ""


class Combined(msgspec.Struct, tag="combined", kw_only=True, frozen=True):
    """How many combination mutants the checks reject: kernels that are wrong where properties of a call meet.

    Of one kind, or of those whose condition names one property.
    """

    run: str
    suite: str  # which checks: "default", "thorough", "before": those of the suite before its cases were an array
    kind: str = ""  # "pairs", "triples", "thresholds"
    about: str = ""  # a property: "head dim"
    rejected: int
    tried: int


Record = Environment | Claim | Judgement | Absence | Memory | Traffic | Curve | Resources | Specimen | Judge | Trial | Combined

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def figure(value: float) -> float | str:
    """A number as a record holds it: "nan", "inf" and "-inf" as text, which float() reads back."""
    return float(value) if math.isfinite(value) else str(float(value))


def append(path: Path, record: Record) -> None:
    """Adds one record as a line. A line is written whole, so a crash between two leaves every earlier one readable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write(_encoder.encode(record) + b"\n")


def read(path: Path) -> Iterator[Record]:
    """The records of a file, in order; one that ends in .gz is unpacked.

    Raises OSError for what is no file, and ValueError naming the file, and the line, that cannot be read; a torn last line is passed over.
    """
    if not path.is_file():
        raise OSError(f"{path}: {'is a directory; name the record files in it' if path.is_dir() else 'no such file'}")
    content = path.read_bytes()
    try:
        lines = (gzip.decompress(content) if path.suffix == ".gz" else content).split(b"\n")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:  # the first where it was cut off
        raise ValueError(f"{path}: cannot be unpacked ({error})") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _decoder.decode(line)
        except msgspec.MsgspecError as error:
            if number == len(lines):  # no newline behind it: the writer died in the middle of the line
                return
            raise ValueError(f"{path}, line {number}: not a record of flashproof ({error})") from error

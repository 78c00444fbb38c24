"""The records of what a run found.

A record is one JSON object on one line. A run appends its records as it goes, so nothing is lost when it dies.

Python's garbage collector does not track the records of which a run has many (`gc=False`). They contain no cycles, and
are read a quarter faster.
"""

import gzip
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

TensorName = Literal["out", "lse", "dq", "dk", "dv"]
Certainty = Literal["certified", "bounded", "sampled"]
Status = Literal["passed", "failed", "refused", "known defect"]

# The layers of checks, in order: each layer assumes the layers before it. The name of a check is "layer/question".
LAYERS = ("contract", "accuracy", "gradients", "stability", "masks", "properties", "memory", "determinism", "training")


class Environment(msgspec.Struct, tag="environment", kw_only=True, frozen=True):
    """Where and when a run took place. It is the first record of a run."""

    run: str  # the same in all records of one run
    date: str  # ISO 8601, UTC
    commit: str  # of flashproof, if it ran from its own clone; ends in "+" if the tree had changes
    project_commit: str = ""  # of the repository in which the run was started
    whole: bool = False  # whether the run left out nothing that its implementations claim, on the CPU and on a GPU
    whole_on: list[Literal["cpu", "cuda"]] = []  # the devices on which it left out nothing
    device: str  # "NVIDIA H200" or the CPU's name
    kind: Literal["cpu", "cuda"]
    # Of what is there: {"python": ..., "torch": ..., "triton": ..., "cuda": ..., "driver": ...}
    versions: dict[str, str]
    command: str


class Covered(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """How much of the space of cases the cases of a run cover, on one device."""

    cases: int
    pairs: int  # pairs of levels that stand together in some case
    possible_pairs: int  # pairs that are claimed and fit the run
    triples: int  # triples of levels that stand together in some case
    possible_triples: int
    forbidden: int  # pairs that the claims forbid
    no_room: int  # pairs that are claimed and are too large for the run


class Claim(msgspec.Struct, tag="claim", kw_only=True, frozen=True):
    """What an implementation said about itself in a run."""

    run: str
    implementation: str
    summary: str
    supports: dict[str, str | int | float | bool | list[str | int]]  # the fields of flashproof.impls.spec.Supports
    # "float16 on cuda" -> the fields of flashproof.impls.spec.Arithmetic
    arithmetic: dict[str, dict[str, str | int | float | None]]
    bare: bool  # whether the implementation is a bare callable, whose signature is its claim
    # By device: what is slow there ("tile", "shape" or "call"), so that a run has fewer cases. "" if nothing is slow.
    slow: dict[str, str] = {}
    ended: bool = True  # whether the run came to its end and was not interrupted
    covered: dict[str, Covered] = {}  # by device; empty if the user chose cases or checks
    verdict: str = ""  # of the run on all its implementations: its last line


class Element(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """The element with the largest ratio of error to bound."""

    index: tuple[int, ...]  # [batch, head, row, dim], or [batch, head, query] of the LSE
    # What the kernel answered. In all four numbers, "nan", "inf" and "-inf" are text, because JSON has no such numbers.
    got: float | str
    exact: float | str  # the exact result
    error: float | str  # the absolute difference of the two
    bound: float | str  # the largest error that the claimed arithmetic allows
    note: str = ""  # the properties of its row: "the query sees 518 keys; the largest weight is 99.8 %"


class Grid(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """Where in a tensor the errors lie: the largest rho in each part, over all batch entries and heads.

    The rows (queries or keys) and the columns (dims) are cut into at most 16 equal parts each.
    """

    rows: int  # of the tensor
    columns: int
    rho: list[list[float | str]]


class Elements(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """How many elements of a tensor have an error of so many units in the last place, each at its own exact number.

    The first number counts errors below 2^FIRST_POWER, the next ones those below twice as much each, and the last one
    all larger errors.
    """

    counts: list[int]
    floor: list[int]  # the same for the correctly rounded exact result


FIRST_POWER, LAST_POWER = -4, 12  # of two: the edges of the counts of `Elements`


class Judgement(msgspec.Struct, tag="judgement", kw_only=True, frozen=True, gc=False):
    """The judgement of one tensor of one case.

    A fault of the kernel (exception, hang, crash) is a judgement with a message and without figures. A yes-or-no
    property (bitwise repeatability, non-interference) is also a judgement: `rho` is None, and `message` says what
    differed.
    """

    run: str  # the name of the run, the same in all of its records
    implementation: str  # the name of the implementation
    check: str  # the name of the check, "accuracy/forward"
    case: str  # the line that rebuilds the case
    dtype: str  # of query, key and value: "float16"
    device: Literal["cpu", "cuda"]  # where the kernel ran
    status: Status  # the result of the case
    tensor: TensorName | None = None  # the tensor that was judged. None if it was a property or a fault of the kernel
    # The largest error / deterministic bound. "nan" and "inf" are text; `float` reads them.
    rho: float | str | None = None
    # The largest error / probabilistic bound, where that bound gates (float32 on FMA units).
    rho_statistical: float | str | None = None
    # The mean signed error minus that of the correctly rounded exact result. Its unit is the mean of u_o |exact|
    # (16 bit; the report calls it ulp) or the mean bound (float32). `oracles.verdict.Bias` defines it.
    bias: float | None = None
    bias_error: float | None = None  # the standard error of bias
    bias_allowance: float | None = None  # the largest |bias| - 4 bias_error that passes
    rms: float | str | None = None  # root mean square of the errors / its expectation for the claimed arithmetic
    rms_error: float | None = None  # the standard error of the square of rms
    # The largest error, in units in the last place of the largest exact number of the tensor. None for the LSE, and if
    # the bound reaches that number, as it does where the whole tensor cancels to nearly 0.
    ulps: float | str | None = None
    # How the exact value is known. "certified": it is enclosed in a ball. "bounded": it was computed in float64, with a
    # bound on its error. "sampled": the same, and rows were compared with balls.
    certainty: Certainty | None = None
    worst: Element | None = None  # the element with the largest rho
    grid: Grid | None = None  # of a failure with a rho
    elements: Elements | None = None  # on normal inputs of growing length
    seconds: float = 0.0  # how long the call took, with its backward
    message: str = ""  # the words of a failure, refusal or known defect, beside its figures
    # The other question that a failed answer fits: "this is the answer without the causal mask".
    question: str = ""
    link: str = ""  # the address of the report of a known defect
    of_every_call: bool = False  # whether every call for every case ends with this failure or refusal
    axes: dict[str, float] = {}  # the place of the case in a sweep: {"queries": 1024, "magnitude": 8.0, "score": 88.5}


class Absence(msgspec.Struct, tag="absence", kw_only=True, frozen=True, gc=False):
    """The reason why something was not judged: the claim leaves it out, or this machine cannot run it.

    An empty check stands for all checks, and an empty dtype for all dtypes.
    """

    run: str
    implementation: str
    device: Literal["cpu", "cuda"]
    reason: Literal["not claimed", "not possible here"]
    check: str = ""
    dtype: str = ""
    message: str = ""  # "CUDA: no device", "block mask"


class Memory(msgspec.Struct, tag="memory", kw_only=True, frozen=True):
    """The memory in bytes beyond inputs and outputs, at one sequence length."""

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
    """The counted bytes that a kernel reads and writes, beside the formula of the paper."""

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
    """A named curve of a chart that does not come from judgements.

    An example is the error of the naive softmax, which overflows at 88.72.
    """

    run: str
    chart: str  # "overflow"
    series: str  # "naive, no maximum"
    device: Literal["cpu", "cuda"]
    x: list[float]
    y: list[float | None]  # None for a value that is not finite
    x_title: str
    y_title: str


class Resources(msgspec.Struct, tag="resources", kw_only=True, frozen=True):
    """What the compiler reports about a GPU kernel. This needs no GPU."""

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
    shipped: bool  # whether the kernel was compiled as it is shipped, tile sizes included


class Specimen(msgspec.Struct, tag="specimen", kw_only=True, frozen=True):
    """A kernel that the suite itself was tried on: a mutant, which it must reject, or a correct kernel.

    kind: a mutant, a variant (a correct kernel that is made differently), or a kernel of the catalogue.
    """

    run: str
    name: str
    kind: Literal["mutant", "variant", "kernel"]
    fault: str = ""  # the class of the fault of a mutant: "masks"
    origin: str = ""  # a real fault of the same kind
    says: str  # what is wrong or done differently
    of: str = ""  # the implementation that it is made from
    patch: str = ""  # the text that is removed and the text that is inserted
    check: str = ""  # the check that must reject it
    survives: str = ""  # why no check rejects it; such a mutant is not counted


class Judge(msgspec.Struct, tag="judge", kw_only=True, frozen=True):
    """What judges a specimen: a check of the suite, or a rule that is in use elsewhere with one set of inputs."""

    run: str
    name: str  # "accuracy/forward", "allclose 1e-2"
    kind: Literal["check", "rule"]
    # Of a rule. "ours": the grid of this suite. "theirs": ordinary inputs, as in the suites that use the rule.
    inputs: Literal["ours", "theirs"] = "ours"
    says: str = ""
    source: str = ""


class Trial(msgspec.Struct, tag="trial", kw_only=True, frozen=True):
    """The result of one judge on one specimen in one dtype.

    There is no trial for what the specimen does not claim.
    """

    run: str
    specimen: str
    judge: str
    inputs: Literal["ours", "theirs"] = "ours"
    dtype: str
    rejected: bool
    case: str = ""  # the first case on which it was rejected
    said: str = ""


class Combined(msgspec.Struct, tag="combined", kw_only=True, frozen=True):
    """How many combination mutants the checks reject.

    A combination mutant is wrong only where properties of a call meet. A record counts the mutants of one kind, or
    those whose condition names one property.
    """

    run: str
    suite: str  # the set of checks: "default", "thorough", or "before" (before the cases were a covering array)
    kind: str = ""  # "pairs", "triples", "thresholds"
    about: str = ""  # a property: "head dim"
    rejected: int
    tried: int


Asked = Literal["quick", "default", "thorough", "given"]  # given: only the cases of --case


class Manifest(msgspec.Struct, tag="manifest", kw_only=True, frozen=True):
    """The seal of a run. It is the last record of the run, and all lines since the seal before it belong to the run."""

    run: str
    case_set: int  # the version of the list of cases (`flashproof.space.CASE_SET`); 0 if unknown
    effort: Asked  # which cases of the list the run asked for
    dtypes: list[str]  # the dtypes that the run asked for; the list of cases depends on them
    lines: int  # the number of lines that are sealed
    marks: str  # four hexadecimal digits for each line, the first of its SHA-256: they say which line was edited
    checksum: str = ""  # the SHA-256 of all lines, and of this record without its checksum


Record = (
    Environment
    | Claim
    | Judgement
    | Absence
    | Memory
    | Traffic
    | Curve
    | Resources
    | Specimen
    | Judge
    | Trial
    | Combined
    | Manifest
)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def figure(value: float) -> float | str:
    """A number as a record holds it. It is text for "nan", "inf" and "-inf", which float() reads back."""
    return float(value) if math.isfinite(value) else str(float(value))


def append(path: Path, record: Record) -> None:
    """Appends one record as a line, and makes the folder if needed.

    One write holds the whole line, so a crash between two writes leaves every earlier line readable.
    """
    try:
        file = path.open("ab", buffering=0)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab", buffering=0)
    with file:
        file.write(encode(record) + b"\n")


def read(path: Path) -> Iterator[Record]:
    """The records of a file, in order. A file whose name ends in .gz is unpacked.

    An incomplete last line is skipped. Raises OSError if the path is not a file. Raises ValueError, which names the
    file and the line, for a file that cannot be unpacked to its end and for a line that is not a record.
    """
    found = lines(path)
    for number, line in enumerate(found, start=1):
        if not line.strip():
            continue
        try:
            record = decode(line, path, number)
        except ValueError:
            if number == len(found):  # no newline follows: the writer died in the middle of the line
                return
            raise
        yield record


def lines(path: Path) -> list[bytes]:
    """The lines of a file, without their newlines. The last one is empty if the file ends as it should.

    Raises as `read` does for a file that is missing or cannot be unpacked.
    """
    if not path.is_file():
        raise OSError(f"{path}: {'is a directory; name the record files in it' if path.is_dir() else 'no such file'}")
    content = path.read_bytes()
    try:
        return (gzip.decompress(content) if path.suffix == ".gz" else content).split(b"\n")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:  # EOFError if the file was cut off
        intact = _unpacked(content).count(b"\n")
        raise ValueError(f"{path}, line {intact + 1}: cannot be unpacked any further ({error})") from error


def decode(line: bytes, path: Path, number: int) -> Record:
    """The record on a line. Raises ValueError, which names the file and the line, if it is none."""
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}, line {number}: not a record of flashproof ({error})") from error


def encode(record: Record) -> bytes:
    """The line of a record, without its newline."""
    return _encoder.encode(record)


def _unpacked(content: bytes) -> bytes:
    """As much of a damaged gzip file as can be unpacked."""
    unpacking = zlib.decompressobj(wbits=31)
    whole = b""
    try:
        for start in range(0, len(content), 4096):
            whole += unpacking.decompress(content[start : start + 4096])
    except zlib.error:
        pass
    return whole

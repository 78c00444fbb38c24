"""Records made by hand: a CPU run and a GPU run. Together they hold every type of record and every status.

Every call returns the same records.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from flashproof.cases import Case
from flashproof.reports.record import (
    Absence,
    Claim,
    Combined,
    Curve,
    Element,
    Environment,
    Judge,
    Judgement,
    Memory,
    Record,
    Resources,
    Specimen,
    Traffic,
    Trial,
    append,
    figure,
)
from flashproof.tests.bench import settings

CPU, GPU = "cpu run", "gpu run"
HOSTILE = "<script>alert(1)</script>.py:\"attention'"
SDPA = "torch.nn.functional:scaled_dot_product_attention"
ISSUE = "https://github.com/pytorch/pytorch/issues/1"

SUPPORTS: dict[str, Any] = {
    "dtypes": ["float32", "float16", "bfloat16"],
    "devices": ["cpu", "cuda"],
    "backward": True,
    "causal": ["top_left", "bottom_right"],
    "scale": "finite",
    "lse": True,
    "dims": [1, 256],
    "dim_multiple": 1,
    "masked_nan": False,
}
ARITHMETIC: dict[str, Any] = {
    "float32 on cpu": {"accumulate": "fma", "exp_ulps": 2.0, "key_tile": 64, "query_tile": None}
}


def environment(run: str = CPU, **fields: Any) -> Environment:
    kind = "cuda" if run == GPU else "cpu"
    defaults: dict[str, Any] = {
        "date": "2026-03-02T10:00:00Z" if kind == "cpu" else "2026-03-03T10:00:00Z",
        "commit": "0123456789ab",
        "device": "NVIDIA H200" if kind == "cuda" else "AMD EPYC, 2 cores",
        "kind": kind,
        "versions": {"python": "3.11.7", "torch": "2.13.0", "triton": "3.7.1"},
        "command": "pytest --impl '*'",
    }
    return Environment(run=run, **(defaults | fields))


def claim(implementation: str = "triton.fa2", run: str = CPU, **fields: Any) -> Claim:
    defaults: dict[str, Any] = {
        "summary": "FlashAttention-2.",
        "supports": SUPPORTS,
        "arithmetic": ARITHMETIC,
        "bare": False,
    }
    return Claim(run=run, implementation=implementation, **(defaults | fields))


def judgement(implementation: str = "triton.fa2", run: str = CPU, **fields: Any) -> Judgement:
    """Returns a judgement of the output in float32, which passes. fields: what differs from it."""
    dtype = fields.get("dtype", "float32")
    defaults: dict[str, Any] = {
        "check": "accuracy/forward",
        "case": f"b1 h2 q128 k128 d64 {dtype} causal normal seed0",
        "dtype": dtype,
        "device": "cuda" if run == GPU else "cpu",
        "status": "passed",
        "tensor": "out",
        "rho": 0.5,
        "certainty": "certified",
        "seconds": 0.25,
    }
    return Judgement(run=run, implementation=implementation, **(defaults | fields))


def worst(rho: float, **fields: Any) -> Element:
    defaults: dict[str, Any] = {
        "index": (0, 3, 517, 12),
        "got": 0.4121,
        "exact": 0.4434,
        "error": 0.0313,
        "bound": 0.0313 / rho,
        "note": "the query sees 518 keys; the largest weight is 99.8 %",
    }
    return Element(**(defaults | fields))


def property_(check: str, holds: bool, run: str = CPU, **fields: Any) -> Judgement:
    """Returns a judgement of a yes-or-no property."""
    message = "" if holds else "two runs differ in 3 of 16384 elements"
    defaults: dict[str, Any] = {
        "tensor": None,
        "rho": None,
        "certainty": None,
        "status": "passed" if holds else "failed",
        "message": message,
    }
    return judgement(run=run, check=check, **(defaults | fields))


def swept(implementation: str, run: str, dtype: str, onset: float | None = None) -> Iterator[Record]:
    """Yields judgements over lengths, magnitudes and scores. The output fails from magnitude `onset` on."""
    level = {"float32": 0.05, "float16": 0.5, "bfloat16": 0.6}[dtype]
    for step, tensor in enumerate(("out", "lse", "dq", "dk", "dv")):
        layer = "accuracy/forward" if tensor in ("out", "lse") else "gradients/backward"
        common: dict[str, Any] = {"implementation": implementation, "run": run, "dtype": dtype, "tensor": tensor}
        for power in range(5, 14 if run == GPU else 10):
            rho = level * (1 - step / 8) * (1 + power / 30)
            yield judgement(
                **common,
                check=f"{layer}_over_lengths",
                case=f"b1 h1 q{2**power} k{2**power} d64 {dtype} causal normal seed1",
                rho=rho,
                bias=0.02 * (step - 2),
                bias_error=0.004,
                bias_allowance=0.25,
                certainty="certified" if power < 8 else "bounded" if power < 11 else "sampled",
                worst=worst(rho),
                axes={"queries": 2**power},
            )
        for power in range(-4, 9, 2):
            failing = onset is not None and 2.0**power >= onset and tensor == "out"
            rho = level * (1 - step / 8) * (16 if failing else 1)
            yield judgement(
                **common,
                check=f"{layer}_over_magnitudes",
                case=f"b1 h1 q150 k150 d64 {dtype} full normal x{2.0**power:g} seed2",
                rho=rho,
                worst=worst(rho),
                status="failed" if failing else "passed",
                axes={"magnitude": 2.0**power},
            )
    for score in (-250000.0, -10000.0, -104.0, -87.3, 0.0, 11.1, 87.0, 88.7, 88.73, 89.0, 128.0, 65504.0):
        yield judgement(
            implementation,
            run,
            dtype=dtype,
            check="stability/shifted",
            case=f"b1 h1 q100 k140 d32 {dtype} causal normal shift{score:g} seed3",
            axes={"score": score},
        )


def measured(implementation: str, run: str, growth: int = 1) -> Iterator[Record]:
    for direction, per_token in (("forward", 512), ("backward", 2048)):
        for length in (512, 1024, 2048, 4096, 8192, 16384):
            yield Memory(
                run=run,
                implementation=implementation,
                device="cuda" if run == GPU else "cpu",
                dtype="float16",
                direction=direction,  # type: ignore[arg-type]
                length=length,
                heads=2,
                dim=64,
                matrix_bytes=2 * 2 * length**2,
                measured_bytes=per_token * length**growth,
                method="allocator" if run == GPU else "counted",
            )


def cpu_run() -> list[Record]:
    """Returns a run on a machine without a GPU, with every type of record and every status."""
    records: list[Record] = [environment(CPU)]
    for name in ("tiled.fa2", "triton.fa2"):
        records.append(claim(name))
        for dtype in ("float32", "float16", "bfloat16"):
            records += swept(name, CPU, dtype, onset=16.0 if (name, dtype) == ("triton.fa2", "bfloat16") else None)
        records.append(property_("determinism/runs", name == "tiled.fa2", implementation=name))
        records += measured(name, CPU)
    records += [
        Traffic(
            run=CPU,
            implementation="triton.fa2",
            dtype="float16",
            direction="forward",
            length=length,
            dim=64,
            query_tile=64,
            key_tile=64,
            read_bytes=256 * length + 4 * length**2,
            written_bytes=132 * length,
            formula="FlashAttention-2, section 3.1: each query tile reads all keys and values",
            formula_read_bytes=256 * length + 4 * length**2,
            formula_written_bytes=128 * length,
        )
        for length in (128, 256)
    ]
    records += [
        Resources(
            run=CPU,
            implementation="triton.fa2",
            kernel="forward",
            target=target,
            dtype="float16",
            dim=128,
            causal=True,
            registers=168,
            spilled_bytes=spilled,
            shared_bytes=65536,
            shipped=not spilled,
        )
        for target, spilled in (("sm_80", 0), ("sm_90", 0), ("sm_100", 48))
    ]
    records += [
        claim(SDPA, bare=True, summary="", supports=SUPPORTS | {"dtypes": ["float32", "bfloat16"]}),
        judgement(SDPA, rho=0.04),
        judgement(
            SDPA,
            check="gradients/backward",
            tensor="dv",
            dtype="bfloat16",
            status="known defect",
            rho=1.35,
            worst=worst(1.35),
            message="16-bit sums.",
            link=ISSUE,
        ),
        judgement(
            SDPA,
            check="masks/empty_rows",
            status="refused",
            tensor=None,
            rho=None,
            certainty=None,
            message="RuntimeError: scale must be positive",
        ),
        claim("cuda.fa1", supports=SUPPORTS | {"devices": ["cuda"]}),
        Absence(
            run=CPU, implementation="cuda.fa1", device="cuda", reason="not possible here", message="CUDA: no device"
        ),
        Absence(
            run=CPU, implementation="triton.fa2", device="cuda", reason="not possible here", message="CUDA: no device"
        ),
        Absence(
            run=CPU,
            implementation=SDPA,
            device="cpu",
            reason="not claimed",
            check="determinism/runs",
            message="deterministic",
        ),
        claim(HOSTILE, bare=True, summary="<img src=x onerror=alert(2)>"),
        judgement(
            HOSTILE,
            case="b1 <b>bold</b> 'quoted'",
            status="failed",
            rho=figure(float("nan")),
            worst=worst(1.0, got="nan", error="nan", note="</pre><script>alert(3)</script>"),
            message='"><script src="https://example.invalid/x.js"></script>',
            link="javascript:alert(4)",
        ),
        curve("naive, no maximum", [1e30, 3e38, None, None, None]),
        curve("tiled.fa2 <script>", [0.1, 0.1, 0.2, 0.1, 0.0]),
        *mutation(),
    ]
    return records


def mutation(run: str = CPU) -> list[Record]:
    """Returns the trials of two checks and a rule on three mutants, one of which survives, and on two right kernels."""

    def specimen(name: str, kind: str, **fields: Any) -> Specimen:
        return Specimen(run=run, name=name, kind=kind, says=f"{name} in words", **fields)  # type: ignore[arg-type]

    def trial(name: str, judge: str, rejected: bool, dtype: str = "float32", inputs: Any = "ours") -> Trial:
        said = {"case": f"b1 h2 q128 k128 d64 {dtype}", "said": "out rho 7.3"} if rejected else {}
        return Trial(run=run, specimen=name, judge=judge, dtype=dtype, inputs=inputs, rejected=rejected, **said)

    about = {"origin": "BUGS A1", "of": "tiled.fa2", "patch": "impls/tiled/fa2.py\n- <b>old</b>\n+ new"}
    return [
        Judge(run=run, name="accuracy/forward", kind="check", says="Every feature."),
        Judge(run=run, name="gradients/backward", kind="check", says="Every gradient."),
        Judge(run=run, name="allclose 1e-2", kind="rule", inputs="theirs", says="Close.", source="A tutorial"),
        specimen("tail-unmasked", "mutant", fault="masks", check="accuracy/forward", **about),
        specimen("delta-omitted", "mutant", fault="backward", check="gradients/backward", **about),
        specimen("delta-rounded", "mutant", fault="backward", survives="inside the bound", **about),
        specimen("two-passes", "variant"),
        specimen("tiled.fa2", "kernel"),
        trial("tail-unmasked", "accuracy/forward", True),
        trial("tail-unmasked", "accuracy/forward", True, "float16"),
        trial("tail-unmasked", "gradients/backward", True),
        trial("tail-unmasked", "gradients/backward", False, "float16"),
        trial("tail-unmasked", "allclose 1e-2", False, inputs="theirs"),
        trial("delta-omitted", "accuracy/forward", False),
        trial("delta-omitted", "gradients/backward", True),
        trial("delta-omitted", "allclose 1e-2", True, inputs="theirs"),
        trial("delta-rounded", "gradients/backward", False),
        trial("two-passes", "accuracy/forward", False),
        trial("two-passes", "allclose 1e-2", True, inputs="theirs"),
        trial("tiled.fa2", "accuracy/forward", False),
        trial("tiled.fa2", "gradients/backward", False),
        Combined(run=run, suite="default", kind="pairs", rejected=299, tried=300),
        Combined(run=run, suite="default", about="head dim", rejected=33, tried=34),
    ]


def curve(series: str, y: list[float | None], run: str = CPU) -> Curve:
    return Curve(
        run=run,
        chart="overflow",
        series=series,
        device="cuda" if run == GPU else "cpu",
        x=[87.0, 88.7, 88.73, 89.0, 90.0],
        y=y,
        x_title="largest score",
        y_title="error / bound",
    )


def gpu_run() -> list[Record]:
    """Returns a run of triton.fa2 on a GPU."""
    records: list[Record] = [environment(GPU), claim("triton.fa2", GPU)]
    for dtype in ("float32", "float16", "bfloat16"):
        records += swept("triton.fa2", GPU, dtype)
    return [
        *records,
        *measured("triton.fa2", GPU),
        property_("determinism/runs", True, GPU),
        curve("triton.fa2", [0.1] * 5, GPU),
    ]


def write(path: Path, records: list[Record]) -> Path:
    for record in records:
        append(path, record)
    return path


GPU_NAMES = (
    *("triton.fa1", "triton.fa2", "triton.block_sparse", "cuda.fa1", "cuda.fa2", "cuda.fa3"),
    *("cuda.fa3_fp8", "cuda.fa3_float32", "cuda.block_sparse"),
    *("sdpa.math", "sdpa.flash", "sdpa.efficient", "sdpa.cudnn", "flex"),
)
WHERE_FLOAT32: dict[str, tuple[bool, ...]] = {
    **dict.fromkeys(("cuda.fa3", "cuda.fa3_fp8", "sdpa.flash", "sdpa.cudnn", "flex"), (False,)),
    "cuda.fa3_float32": (True,),
}
WITH_BLOCKS = ("triton.block_sparse", "cuda.block_sparse", "flex")


def benchmarks(names: Sequence[str] = GPU_NAMES) -> dict[str, Any]:
    """Returns the JSON of a thorough run of the benchmarks on a GPU. Each name claims all settings of its dtypes."""
    found = []
    plan = settings.THOROUGH["cuda"]
    for place, name in enumerate(names):
        for words, dtypes in plan.usual:
            case = Case.parse(words)
            if case.blocks is not None and name not in WITH_BLOCKS:
                continue
            operations = 4 * case.batch * case.heads * case.queries * case.keys * case.dim * (case.blocks or 1.0)
            claimed = [dtype for dtype in dtypes if (dtype == "float32") in WHERE_FLOAT32.get(name, (True, False))]
            for dtype, direction in product(claimed, ("forward", "backward")):
                tflops = (60.0 + 40 * place) * (0.15 if dtype == "float32" else 1.0) * (case.queries / 16384) ** 0.2
                found.append(
                    {
                        "params": {"name": name, "dtype": dtype, "direction": direction, "line": words},
                        "extra_info": {
                            "implementation": name,
                            "device": "NVIDIA H200",
                            "tflops": tflops,
                            "ratio": 0.5,
                            "baseline": "sdpa.cudnn",
                            "peak_memory": case.batch * case.heads * case.queries * 4,
                        },
                        "stats": {"median": operations / tflops / 1e12},
                    }
                )
    return {"datetime": "2026-02-01T10:00:00+00:00", "benchmarks": found}

"""The worked example of the page that explains rho."""

import math
from typing import Any

from flashproof.reports import charts, overview, wording
from flashproof.reports.evidence import Evidence, size

EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}  # the ulp of 1


def values(evidence: Evidence) -> dict[str, Any]:
    """The worked example: the gravest failure by `overview.gravity`, or the gravest judgement if nothing failed."""
    known = [
        judged
        for kernel in evidence.kernels
        for judged in kernel.judged
        if judged.judgement.worst
        and judged.judgement.dtype in EPSILON
        and judged.judgement.rho is not None
        and judged.judgement.rho == judged.rho
        and 0 < size(judged.judgement.worst.exact) < math.inf
        and 0.05 < size(judged.judgement.rho) < 30
        and 0.01 < size(judged.judgement.worst.exact) < 2
    ]
    failed = [judged for judged in known if judged.judgement.status == "failed"]
    if not known:
        return {"example": None, "picture": None}
    judged = max(failed or known, key=overview.gravity)
    one = judged.judgement
    assert one.worst is not None
    exact, got, bound = float(one.worst.exact), float(one.worst.got), float(one.worst.bound)
    ulp = EPSILON[one.dtype] * 2.0 ** math.floor(math.log2(abs(exact)))
    label = f"exact {exact:.6g}, answer {got:.6g}, allowed error {bound:.2g}: rho {wording.rho(one.rho)}"
    figures = {
        "exact": f"{exact:.6g}",
        "got": f"{got:.6g}",
        "error": wording.scientific(one.worst.error),
        "bound": wording.scientific(bound),
    }
    loose = charts.ALLCLOSE / bound
    return {
        "example": judged,
        "figures": figures,
        "loose": loose,
        "ulp": wording.scientific(ulp),
        "picture": charts.number_line(exact, got, bound, ulp, label),
    }

"""Sums that are known without an oracle: over the keys, P sums to 1 and dS sums to 0.

It follows that the columns of dV have the same sums as the columns of dO, and that the columns of dK sum to 0. If the
first coordinate of every key is 1, the first coordinate of dQ is the row sum of dS.

Independent errors add by their squares (`oracles.spread`). So the error of a sum is far smaller than the sum of the
errors that its elements may have. The sum shows lost mass, or a delta that is off by a hundredth, where no single
element shows it.
"""

from dataclasses import replace

import torch

from flashproof import grids
from flashproof.oracles import spread, verdict
from flashproof.registry import check
from flashproof.subject import Subject
from flashproof.tensors import inputs
from flashproof.tests.properties.probing import answer_to, expect_rms, in_float64, over_groups
from flashproof.tests.properties.test_spread import in_general_position

COLUMNS = "b1 h1 q140 k140 d64\nb1 h4/2 q50 k70 d32"  # enough columns for a statistic of their sums


@check("properties", grid=grids.lines(COLUMNS), claims=("backward",), every=False)  # as `test_spread`
def test_sums(subject: Subject) -> None:
    """The columns of dV have the same sums as the columns of dO. The columns of dK and the rows of dS sum to 0.

    The output gradients are made positive, so that their sum is large compared with its rounding error.
    """
    arithmetic = subject.implementation.arithmetic(subject.dtype, subject.device)
    for case in subject.cases:
        if not in_general_position(case, arithmetic) or case.mask == "causal-br" or case.blocks is not None:
            continue  # some rows may see no key, and P sums to 0 in these
        given = inputs(case, subject.device)
        key = given.key.clone()
        key[..., 0] = 1.0
        given = replace(given, key=key, dout=given.dout.abs())
        problem = given.problem(case)
        answer = answer_to(subject, case, given)
        if answer is None or "dv" not in answer:
            continue
        variances = spread.variances(problem, arithmetic)
        douts = over_groups(in_float64(given.dout), case).sum(dim=2)
        sums = (
            ("dv", in_float64(answer["dv"]).sum(dim=2), douts, variances.dv_sums, "the column sums of dV"),
            (
                "dk",
                in_float64(answer["dk"]).sum(dim=2),
                torch.zeros_like(douts),
                variances.dk_sums,
                "the column sums of dK, which are 0,",
            ),
            (
                "dq",
                in_float64(answer["dq"])[..., 0],
                torch.zeros_like(variances.elements.dq[..., 0]),
                variances.elements.dq[..., 0],
                "the row sums of dS",
            ),
        )
        for name, got, exact, variance, what in sums:
            expect_rms(
                subject,
                case,
                name,  # type: ignore[arg-type]
                verdict.rms(got.flatten(), exact.flatten(), variance.flatten()),
                what,
            )

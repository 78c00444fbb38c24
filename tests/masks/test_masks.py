"""Masks: what a query does not see changes no bit of its answer. The two causal alignments are different masks."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from flashproof import grids
from flashproof.cases import Case
from flashproof.registry import check
from flashproof.subject import FORWARD, Subject
from flashproof.tensors import Inputs, inputs, laid_out_as


def _hides_keys(case: Case) -> bool:
    return case.mask != "full" or case.blocks is not None


@check("masks", grid=grids.where(_hides_keys, most=8), every=False)
def test_hidden_keys_change_nothing(subject: Subject) -> None:
    """Large finite values in hidden keys and values change no bit of the output, the LSE and the visible gradients."""
    _replace_hidden(subject, large=True)


@check("masks", grid=grids.where(_hides_keys, most=8), claims=("masked_nan",), every=False)
def test_hidden_nan_changes_nothing(subject: Subject) -> None:
    """NaN in hidden keys and values changes no bit of the output, the LSE and dQ.

    dK and dV are not compared, since queries that see the NaN contribute to them.
    """
    _replace_hidden(subject, large=False)


def _replace_hidden(subject: Subject, *, large: bool) -> None:
    """Replaces every key and value that no query of the first half sees, and compares the answers to that half.

    In e4m3, a hidden key shares its scale with visible ones. Then both answers must be inside their bounds.

    The output gradients of all other queries are set to zero. So dK and dV of the keys that are not replaced depend on
    the first half only.

    large: whether the replacements are large finite values; otherwise they are NaN.
    """
    backward = subject.implementation.supports.backward
    for case in subject.cases:
        given = inputs(case, subject.device)
        rows = torch.arange(max(1, case.queries // 2), device=given.query.device)
        seen = _seen_keys(case, given, rows)
        if bool(seen.all()):
            continue
        dout = given.dout.clone()
        dout[:, :, len(rows) :] = 0.0
        plain = replace_tensors(given, given.key, given.value, dout)
        hidden = ~seen[..., None]
        magnitude = 100.0 if large else math.nan
        key, value = torch.where(hidden, magnitude, given.key), torch.where(hidden, -30.0 * magnitude, given.value)
        other = replace_tensors(given, laid_out_as(given.key, key), laid_out_as(given.value, value), dout)
        first = subject.attend(case, backward=backward, given=plain)
        second = subject.attend(case, backward=backward, given=other)
        if first is None or second is None:
            continue
        subject.judge_answer(first, case, subject.tensors, given=plain)
        if subject.implementation.arithmetic(subject.dtype, subject.device).products == "e4m3":
            subject.judge_answer(second, case, subject.tensors, given=other)
            continue
        what = "large values" if large else "NaN"
        message = f"{what} in hidden keys and values changed the answer of queries that do not see them"
        for name in subject.tensors if large else (*FORWARD, "dq"):
            if name not in first:
                continue
            if not torch.equal(first[name], second[name]) and subject.varies(
                case, name, (plain, first[name]), (other, second[name])
            ):
                subject.judge_answer(second, case, (name,), given=other)
                continue
            one, two = first[name], second[name]
            if name in ("dk", "dv"):
                one, two = torch.where(hidden, 0.0, one), torch.where(hidden, 0.0, two)
            else:
                one, two = one[:, :, : len(rows)], two[:, :, : len(rows)]
            subject.expect_equal(one, two, case, name, message)


def _seen_keys(case: Case, given: Inputs, rows: Tensor) -> Tensor:
    """Boolean [batch, kv_heads, keys]: whether one of these rows, in any query head of the group, sees the key."""
    mask = given.problem(case).mask
    seen = torch.zeros((case.batch, case.kv_heads, case.keys), dtype=torch.bool, device=rows.device)
    groups = case.heads // case.kv_heads
    for batch in range(case.batch):
        for head in range(case.heads):
            seen[batch, head // groups] |= mask.visible(batch, head, rows).any(dim=0)
    return seen


def replace_tensors(given: Inputs, key: Tensor, value: Tensor, dout: Tensor) -> Inputs:
    """The same inputs with other keys, values and output gradients."""
    return replace(given, key=key, value=value, dout=dout)


@check("masks", grid=grids.where(lambda case: case.layouts != Case().layouts, most=6))
def test_memory_outside_changes_nothing(subject: Subject) -> None:
    """NaN around the tensors and between their rows changes no bit of any result."""
    backward = subject.implementation.supports.backward
    for case in subject.cases:
        zeros, nan = (inputs(case, subject.device, outside) for outside in (0.0, math.nan))
        clean, poisoned = (subject.attend(case, backward=backward, given=given) for given in (zeros, nan))
        if clean is None or poisoned is None:
            continue
        subject.judge_answer(poisoned, case, subject.tensors)
        for name in clean.tensors:
            one, two = clean[name], poisoned[name]
            if not torch.equal(one, two) and subject.varies(case, name, (zeros, one), (nan, two)):
                continue
            subject.expect_equal(one, two, case, name, "NaN in memory outside the tensors changed the result")


@check("masks", grid=grids.lines("b2 h2 q140 k300 d16 blocks0.5"), claims=("block_mask",))
def test_shared_blocks(subject: Subject) -> None:
    """A block mask may be given once for all heads, for all batch entries, or for both."""
    for case in subject.cases:
        given = inputs(case, subject.device)
        if given.block_mask is None:
            continue  # a case from the command line may have no block mask
        for mask, whose in (
            (given.block_mask[:, :1], "heads"),
            (given.block_mask[:1], "batch entries"),
            (given.block_mask[:1, :1], "heads and batch entries"),
        ):
            shared = replace(given, block_mask=mask)
            answer = subject.attend(case, backward=subject.implementation.supports.backward, given=shared)
            if answer is not None:
                note = f"one block mask for all {whose}"
                subject.judge_answer(answer, case, subject.tensors, given=shared, note=note)


# The diagonal cuts the end of a tile of 16, 32, 64 or 128 keys: its first query misses two keys, one or none.
TWINS = """
b1 h1 q70 k195 d64 causal-br
b1 h1 q70 k196 d64 causal-br
b1 h1 q70 k197 d64 causal-br
b1 h2 q100 k100 d64 causal-br
b1 h1 q140 k70 d64 causal-br
"""


# Fewer of them, for kernels with slow tiles. The last one has two tiles of queries, as a known fault needs.
SLOW_TWINS = """
b1 h1 q70 k195 d64 causal-br
b1 h1 q70 k196 d64 causal-br
b1 h1 q100 k100 d64 causal-br
"""


@check("masks", grid=grids.lines(TWINS, slow=SLOW_TWINS))
def test_alignments(subject: Subject) -> None:
    """Top-left and bottom-right masks give the same bits where queries == keys, and different answers elsewhere."""
    for case in subject.cases:
        twin = replace(case, mask="causal")
        if case.mask != "causal-br" or "top_left" not in subject.implementation.supports.causal:
            continue
        given = inputs(case, subject.device)
        first, second = (subject.attend(one, backward=False, given=given) for one in (case, twin))
        if first is None or second is None:
            continue
        subject.judge_answer(first, case, FORWARD)
        subject.judge_answer(second, twin, FORWARD)
        one, two = first["out"], second["out"]
        if case.queries == case.keys:
            if torch.equal(one, two) or not subject.varies(case, "out", (given, one)):
                message = "where queries == keys both alignments are the same mask, but the answers differ"
                subject.expect_equal(one, two, case, "out", message)
        else:
            message = "where queries != keys the alignments are two masks, but the answers are the same"
            subject.expect(not torch.equal(one, two), case, message)

"""The tests of a run: a check becomes one test for each target that claims it; tests are chosen, ordered and marked."""

import pytest

from flashproof.registry import check_of
from flashproof.reports.record import Absence
from flashproof.session import Session, target_of

NOTHING_SELECTED = "no implementation is selected; pytest --impl TARGET runs the check over one"


def parameters(session: Session, metafunc: pytest.Metafunc) -> list[object]:
    """The targets that a check is run for. What is not claimed is recorded, and makes no test."""
    check = check_of(metafunc.function)
    if check is None:
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: a test that takes `subject` needs @flashproof.check(...)"
        )
    selection = session.selection
    if not (session.asked or session.is_clone or session.role == "worker"):
        return [pytest.param(None, id="none", marks=pytest.mark.skip(reason=NOTHING_SELECTED))]
    targets = [target for target in selection.targets if selection.covers(check, target)]
    for target in selection.targets:
        if target in targets or target.implementation is None or selection.cases or selection.quick:
            continue
        if not selection.includes(check):
            continue
        if check.claims or check.grid(selection.space_of(target, is_sketch=True), target.dtype):
            session.absences.append(
                Absence(
                    run=session.run,
                    implementation=target.name,
                    device=target.device,
                    dtype=target.dtype,
                    check=check.name,
                    reason="not claimed",
                )
            )
    return [
        pytest.param(target, id=str(target), marks=[pytest.mark.gpu] if target.device == "cuda" else [])
        for target in targets
    ]


def arrange(session: Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the checks alone in a verification, puts the items in order, and marks those that cannot pass.

    Where paths are given, the tests of a project that stand there stay.
    """
    if session.asked and not session.times and (session.is_clone or not session.has_paths):
        chosen = [item for item in items if target_of(item) is not None]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
    session.others = {item.nodeid for item in items if target_of(item) is None}
    session.chosen = len(items)
    for item in items:
        if found := check_of(getattr(item, "function", None)):
            item.extra_keyword_matches.add(found.name)  # for -k
    if session.orders:
        items.sort(key=session.weight)
    for item in items:
        target, check = target_of(item), check_of(getattr(item, "function", None))
        if target is None or check is None:
            continue
        if target.missing:
            item.add_marker(pytest.mark.skip(reason=target.missing))
        elif defect := session.defect(check, target):
            # A check calls pytest.fail for a failure of the kernel. Any other exception is a fault of the check itself.
            words, raised = f"{defect.seen} ({defect.link})", pytest.fail.Exception
            item.add_marker(pytest.mark.xfail(reason=words, raises=raised, strict=True))


def check_keyword(session: Session, left: int) -> None:
    """Raises pytest.UsageError if -k matches no check. left: the tests that it left."""
    if left or not session.asked or session.chosen == 0 or not (keyword := session.config.option.keyword):
        return
    raise pytest.UsageError(
        f"-k: {keyword!r} matches no check of this run; `flashproof list --checks` lists the names, such as "
        "accuracy/forward"
    )

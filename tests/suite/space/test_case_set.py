"""The list of cases has a version, which bundles name. It changes with the list, and with the tensors of a case."""

import hashlib
from dataclasses import replace

import pytest

from flashproof.cases import Case
from flashproof.impls.spec import DTYPES, OWN_KERNELS, Device, Implementation, Slow
from flashproof.registry import checks
from flashproof.space import CASE_SET, space_of
from flashproof.tensors import inputs, tensors_of

SMALL = 2**13  # numbers of a case whose tensors are compared
LISTS: dict[tuple[Device, Slow | None], str] = {
    ("cpu", None): "1a0bc977eca78ef2",
    ("cpu", "tile"): "bd3e56d24509f5ca",
    ("cuda", "call"): "5faa6a367369763e",
}
TENSORS = "1c7848d41ba1203a"


def the_list(device: Device, slow: Slow | None) -> list[Case]:
    supports = replace(OWN_KERNELS, block_mask=True)
    implementation = Implementation(name="any", attention=lambda: None, supports=supports, slow=lambda device: slow)
    space = space_of(implementation, DTYPES, device)
    return [
        case for check in checks().values() for dtype in DTYPES for case in check.cases(implementation, dtype, space)
    ]


def advice(of: str) -> str:
    return (
        f"{of} are not those of case set {CASE_SET}. If that is meant, put the new digest here, and raise CASE_SET in "
        "flashproof/space.py: old bundles have the old list"
    )


@pytest.mark.parametrize(("device", "slow"), LISTS)
def test_the_list_is_that_of_its_version(device: Device, slow: Slow | None) -> None:
    lines = "\n".join(map(str, the_list(device, slow)))
    assert hashlib.sha256(lines.encode()).hexdigest()[:16] == LISTS[device, slow], advice(f"the cases on {device}")


def test_the_tensors_are_those_of_their_version() -> None:
    found = hashlib.sha256()
    cases = [case for case in dict.fromkeys(the_list("cuda", "call")) if case.numbers <= SMALL]
    for case in cases:
        for tensor in tensors_of(inputs(case)):
            found.update(tensor.double().contiguous().numpy().tobytes())
    assert len(cases) > 50
    assert found.hexdigest()[:16] == TENSORS, advice("the tensors of the cases")

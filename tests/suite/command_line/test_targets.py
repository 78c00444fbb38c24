"""Targets: every form of a name is loaded, or refused with words that help."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from flashproof import targets
from flashproof.impls.spec import Arithmetic, Implementation, Supports

SIBLING = "FACTOR = 1.0\n"
MINE = """
import torch
from flashproof.impls.spec import Implementation, Supports
from sibling import FACTOR

def attention(query, key, value, *, is_causal=False, scale=None):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale) * FACTOR

class Holder:
    inner = staticmethod(attention)

nameless = Implementation(name="", attention=attention, supports=Supports(dims=(8, 64)))
named = Implementation(name="triton.fa2", attention=attention)
number = 3
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A user's file, with a sibling that it imports."""
    (tmp_path / "sibling.py").write_text(SIBLING)
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_a_function_of_a_file(mine: Path) -> None:
    """A path loads, twice if need be, its siblings are importable while it runs, and what comes out computes."""
    searched = list(sys.path)
    for _ in range(2):
        implementation = targets.load(f"{mine}:attention")
        assert implementation.bare
        assert implementation.name == f"{mine}:attention"
        x = torch.ones(1, 1, 2, 4)
        assert torch.equal(torch.as_tensor(implementation.attention(x, x, x)), x)
    assert sys.path == searched
    assert targets.load(f"{mine}:Holder.inner").supports.causal == ("top_left",)


def test_an_implementation_of_a_file(mine: Path) -> None:
    """An `Implementation` is taken as it is; one without a name takes the one it was asked for by."""
    assert targets.load(f"{mine}:named").name == "triton.fa2"
    nameless = targets.load(f"{mine}:nameless")
    assert nameless.name == f"{mine}:nameless"
    assert nameless.supports == Supports(dims=(8, 64))
    assert not nameless.bare


def test_a_run_goes_by_the_name_it_was_given(mine: Path) -> None:
    """Records and the command that repeats a case carry a name that `--impl` takes, whatever an `Implementation` calls itself: even as one of the targets."""
    loaded = targets.load_selected([f"{mine}:named"])[0]
    assert loaded.missing is None
    assert loaded.implementation is not None
    assert loaded.implementation.name == f"{mine}:named"


def test_a_file_has_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However its path is spelled; what is no file keeps its name."""
    monkeypatch.chdir(tmp_path)
    assert {targets.spelled(f"{path}:attention") for path in ("mine.py", "./mine.py", "kernels/../mine.py", tmp_path / "mine.py")} == {"mine.py:attention"}
    assert targets.spelled("../mine.py:attention") == f"{tmp_path.parent}/mine.py:attention"
    for name in ("tiled.*", "mine.py", "torch.nn.functional:scaled_dot_product_attention"):
        assert targets.spelled(name) == name


def test_a_module() -> None:
    """torch's own function is a builtin, whose parameters stand in its docstring: dropout without a seed is no claim."""
    implementation = targets.load("torch.nn.functional:scaled_dot_product_attention")
    assert implementation.bare
    assert implementation.supports == Supports(causal=("top_left",), scale="positive", grouped_heads=True, cross_lengths=True, strided=True, unaligned=True)


BARE = Supports(cross_lengths=True, strided=True, unaligned=True)


def three(query: object, key: object, value: object) -> object:
    """The least that is an attention function."""
    return (query, key, value)


def everything(
    q: object,
    k: object,
    v: object,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    block_mask: object = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    return_lse: bool = False,
) -> object:
    """Names every keyword of the call."""
    return (q, k, v, is_causal, causal_alignment, scale, enable_gqa, block_mask, dropout_p, dropout_seed, return_lse)


def anything(*tensors: object, **keywords: object) -> object:
    """Takes all and says nothing."""
    return (tensors, keywords)


def unseeded(query: object, key: object, value: object, dropout_p: float = 0.0, causal_alignment: str = "top_left") -> object:
    """Half of two pairs."""
    return (query, key, value, dropout_p, causal_alignment)


class Layer(torch.nn.Module):
    """An attention layer without parameters."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """The query, scaled: only the signature matters here."""
        return query * scale


@pytest.mark.parametrize(
    ("attention", "claims"),
    [
        (three, BARE),
        (
            everything,
            Supports(
                causal=("top_left", "bottom_right"),
                scale="positive",
                grouped_heads=True,
                cross_lengths=True,
                strided=True,
                unaligned=True,
                block_mask=True,
                dropout=True,
                lse=True,
            ),
        ),
        (anything, BARE),
        (unseeded, BARE),
        (Layer(), Supports(scale="positive", cross_lengths=True, strided=True, unaligned=True)),
    ],
    ids=["three", "everything", "anything", "unseeded", "layer"],
)
def test_a_signature_is_a_claim(attention: Callable[..., object], claims: Supports) -> None:
    """A bare callable claims what its parameters name, and never what a check asks on a promise alone."""
    implementation = targets.of_callable(attention, "here")
    assert implementation.supports == claims
    assert implementation.bare
    promises = (claims.masked_nan, claims.deterministic, claims.batch_invariant, claims.linear_memory)
    assert not any(promises)


def two(query: object, key: object) -> object:
    """One argument too few."""
    return (query, key)


def greedy(query: object, key: object, value: object, mask: object, *, window: int) -> object:
    """Needs more than an attention call gives."""
    return (query, key, value, mask, window)


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        (two, "takes 2 positional arguments; .*takes three"),
        (greedy, "needs mask, window beside"),
        (3, "3 is not an attention function; give a function"),
        (Layer, "not an attention function"),
        (dict.fromkeys, "takes|cannot be read"),
    ],
    ids=["two", "greedy", "number", "class", "fromkeys"],
)
def test_what_is_no_attention(attention: object, words: str) -> None:
    """The error says what is wrong with it and what would do."""
    with pytest.raises(TypeError, match=f"^here: .*({words})"):
        targets.of_callable(attention, "here")


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("tiled.fa", ValueError, r"no implementation .* close: .*tiled\.fa1.*give a name"),
        ("nonsense", ValueError, "no implementation of the catalogue.*give a name"),
        ("mine.py", ValueError, "which attribute of it.*file.py:attribute"),
        ("torch.nn.functional:", ValueError, "which attribute"),
        (":attention", ValueError, "which attribute"),
        ("nowhere/mine.py:attention", FileNotFoundError, r"there is no file .*nowhere/mine\.py"),
        ("no_such_package.kernels:attention", ImportError, "no module 'no_such_package'"),
        ("torch.nn.functionals:attention", ImportError, r"no module 'torch\.nn\.functionals'"),
        ("torch.nn.functional:scaled_dot_attention", AttributeError, "has no attribute 'scaled_dot_attention'; close: scaled_dot_product_attention"),
        ("math:pi", TypeError, r"3\.14.* is not an attention function"),
    ],
)
def test_errors_name_what_was_given(name: str, kind: type[Exception], words: str) -> None:
    """Every error begins with the name as it was given."""
    with pytest.raises(kind, match=words) as raised:
        targets.load(name)
    assert str(raised.value).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": 3}, "name: 3 is no str"),
        ({"attention": None}, "attention: None cannot be called"),
        ({"supports": {"lse": True}}, "supports: {'lse': True} is no Supports"),
        ({"supports": Supports(causal=("topleft",))}, "supports.causal: 'topleft' is none of 'top_left', 'bottom_right'"),  # type: ignore[arg-type]
        ({"supports": Supports(causal="top_left")}, "supports.causal: 'top_left' will not do; give a tuple with any of 'top_left'"),  # type: ignore[arg-type]
        ({"supports": Supports(dtypes=())}, "supports.dtypes: is empty; give any of 'float32'"),
        ({"supports": Supports(dtypes=("float8",))}, "supports.dtypes: 'float8' is none of 'float32'"),  # type: ignore[arg-type]
        ({"supports": Supports(devices=("gpu",))}, "supports.devices: 'gpu' is none of 'cpu', 'cuda'"),  # type: ignore[arg-type]
        ({"supports": Supports(backward="yes")}, "supports.backward: 'yes' is no bool"),  # type: ignore[arg-type]
        ({"supports": Supports(dims=64)}, "supports.dims: 64 will not do; give a tuple with int, int"),  # type: ignore[arg-type]
        ({"supports": Supports(dims=(64, 8))}, "supports.dims: (64, 8) is no range"),
        ({"supports": Supports(dims=(1, 7), dim_multiple=8)}, "supports.dim_multiple: 8 has no multiple from 1 to 7"),
        ({"missing": "CUDA"}, "missing: 'CUDA' cannot be called"),
        ({"missing": lambda: None}, "missing: cannot be asked of a device"),
        ({"arithmetic": Arithmetic()}, "arithmetic: Arithmetic("),
        ({"arithmetic": lambda: None}, "arithmetic('float32', 'cpu'): raised TypeError"),
        ({"arithmetic": lambda dtype, device: None if dtype == "float16" else Arithmetic()}, "arithmetic('float16', 'cpu'): None is no Arithmetic"),
        (
            {"arithmetic": lambda dtype, device: Arithmetic(weights=cast(Any, "float64"))},
            "arithmetic('float32', 'cpu').weights: 'float64' is none of 'input', 'float32'",
        ),
        ({"arithmetic": lambda dtype, device: Arithmetic(exp_ulps=-3)}, "arithmetic('float32', 'cpu').exp_ulps: -3 will not do"),
        ({"arithmetic": lambda dtype, device: Arithmetic(key_tile=cast(Any, 1.5))}, "arithmetic('float32', 'cpu').key_tile: 1.5 is no int | None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_claim_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], words: str) -> None:
    """The error names the implementation, the field, its value and what would do."""
    claimed: dict[str, Any] = {"name": "mine", "attention": three} | fields
    monkeypatch.setattr(sys.modules[__name__], "exported", Implementation(**claimed), raising=False)
    name = f"{__name__}:exported"
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}: {words}')}"):
        targets.load(name)


def test_a_file_without_an_attribute(tmp_path: Path) -> None:
    """The error says what the file has to offer."""
    file = tmp_path / "mine.py"
    file.write_text("import math\n\ndef attention(query, key, value):\n    return query\n\nimplementation = None\n")
    with pytest.raises(ValueError, match=r"mine\.py: which attribute of it\? It defines attention, implementation; give"):
        targets.load(str(file))


def test_a_file_that_fails(tmp_path: Path) -> None:
    """What went wrong, and where; a broken file is not taken for a missing backend, a missing backend is named."""
    broken, needy, misspelt = tmp_path / "broken.py", tmp_path / "needy.py", tmp_path / "misspelt.py"
    misspelt.write_text("def attention(query, key, value)\n    return query\n")
    broken.write_text("\nlimit = 1 / 0\n")
    needy.write_text("import no_such_package.kernels\n")
    with pytest.raises(ValueError, match=r"ZeroDivisionError: .*broken\.py, line 2"):
        targets.load(f"{broken}:attention")
    with pytest.raises(ValueError, match=r"SyntaxError: expected ':' \(misspelt\.py, line 1\)$"):
        targets.load(f"{misspelt}:attention")
    with pytest.raises(ImportError, match=r"needy\.py needs 'no_such_package', which is not installed") as raised:
        targets.load(f"{needy}:attention")
    assert raised.value.name == "no_such_package"

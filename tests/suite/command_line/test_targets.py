"""Targets: every form of a name loads an implementation, or raises an error that says what to give instead."""

import functools
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from flashproof import loading, signatures, targets
from flashproof.impls.spec import Arithmetic, Implementation, Supports

ROOT = Path(__file__).resolve().parents[3]
SIBLING = "FACTOR = 1.0\n"
MINE = """
import torch
from flashproof.impls.spec import Implementation, Supports
from sibling import FACTOR

def attention(query, key, value, *, is_causal=False, scale=None):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale) \
* FACTOR

class Holder:
    inner = staticmethod(attention)

nameless = Implementation(name="", attention=attention, supports=Supports(dims=(8, 64)))
named = Implementation(name="triton.fa2", attention=attention)
number = 3
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A file of a user, which imports another file of the same folder."""
    (tmp_path / "sibling.py").write_text(SIBLING)
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_a_function_of_a_file(mine: Path) -> None:
    """A path loads a function that computes, also when it is loaded twice.

    The folder of the file is importable: before all others while the file loads, and after all others later.
    """
    searched = list(sys.path)
    for _ in range(2):
        implementation = loading.load(f"{mine}:attention")
        assert implementation.bare
        assert implementation.name == f"{mine}:attention"
        x = torch.ones(1, 1, 2, 4)
        assert torch.equal(torch.as_tensor(implementation.attention(x, x, x)), x)
    assert sys.path == [*searched, str(mine.parent)]
    assert loading.load(f"{mine}:Holder.inner").supports.causal == ("top_left",)


def test_an_implementation_of_a_file(mine: Path) -> None:
    """An `Implementation` is used as it is. If it has no name, it gets the name that was asked for."""
    assert loading.load(f"{mine}:named").name == "triton.fa2"
    nameless = loading.load(f"{mine}:nameless")
    assert nameless.name == f"{mine}:nameless"
    assert nameless.supports == Supports(dims=(8, 64))
    assert not nameless.bare


def test_a_run_goes_by_the_name_it_was_given(mine: Path) -> None:
    """A run uses the name that `--impl` was given, whatever name an `Implementation` gives itself.

    Records and the command that repeats a case carry this name, so `--impl` accepts it. This holds even if an
    `Implementation` gives itself the name of a kernel in the catalogue.
    """
    loaded = targets.load_selected([f"{mine}:named"])[0]
    assert loaded.missing is None
    assert loaded.implementation is not None
    assert loaded.implementation.name == f"{mine}:named"


def test_a_file_has_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All spellings of the path of a file give one name. A name that is not a file stays as it is."""
    monkeypatch.chdir(tmp_path)
    assert {
        loading.spelled(f"{path}:attention")
        for path in ("mine.py", "./mine.py", "kernels/../mine.py", tmp_path / "mine.py")
    } == {"mine.py:attention"}
    assert loading.spelled("../mine.py:attention") == f"{tmp_path.parent}/mine.py:attention"
    for name in ("tiled.*", "mine.py", "torch.nn.functional:scaled_dot_product_attention"):
        assert loading.spelled(name) == name


def test_a_module() -> None:
    """The parameters of torch's function, a builtin, are read from its docstring.

    Its dropout has no seed, so the function does not claim dropout.
    """
    for name in (
        "torch.nn.functional:scaled_dot_product_attention",
        "torch.nn.functional.scaled_dot_product_attention",
    ):
        implementation = loading.load(name)
        assert implementation.bare
        assert implementation.supports == SDPA


BARE = Supports(cross_lengths=True, strided=True, unaligned=True)


def three(query: object, key: object, value: object) -> object:
    """Has the fewest parameters that an attention function can have."""
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
    """Takes any arguments and names none."""
    return (tensors, keywords)


def swallowing(query: object, key: object, value: object, **keywords: object) -> object:
    """Takes any keyword and does not say which ones it uses."""
    return (query, key, value, keywords)


def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool = False) -> torch.Tensor:
    """Names one keyword."""
    return query


class Straight(torch.autograd.Function):
    """A function that is called through `apply`, which takes no keywords."""

    @staticmethod
    def forward(context: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float = 1.0) -> Any:
        return query


def unseeded(
    query: object, key: object, value: object, dropout_p: float = 0.0, causal_alignment: str = "top_left"
) -> object:
    """Names one keyword of each of two pairs: dropout without a seed, alignment without `is_causal`."""
    return (query, key, value, dropout_p, causal_alignment)


class Layer(torch.nn.Module):
    """An attention layer without parameters."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Returns the scaled query, because only the signature matters here."""
        return query * scale


SCALED = Supports(scale="positive", cross_lengths=True, strided=True, unaligned=True)
MASKED = Supports(causal=("top_left",), cross_lengths=True, strided=True, unaligned=True)
SDPA = Supports(
    causal=("top_left",), scale="positive", grouped_heads=True, cross_lengths=True, strided=True, unaligned=True
)


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
        (swallowing, BARE),
        (unseeded, BARE),
        (Layer(), SCALED),
        (Layer().forward, SCALED),
        (functools.partial(masked, is_causal=False), MASKED),
        (functools.partial(torch.nn.functional.scaled_dot_product_attention, dropout_p=0.0), SDPA),
        (functools.partial(functools.partial(Layer(), scale=1.0)), SCALED),
        (Straight.apply, BARE),
        (torch.ops.aten.scaled_dot_product_attention, SDPA),
        (torch.ops.aten.scaled_dot_product_attention.default, SDPA),
        (torch._C._nn.scaled_dot_product_attention, SDPA),
    ],
    ids=[
        "three",
        "everything",
        "swallowing",
        "unseeded",
        "layer",
        "method",
        "partial",
        "sdpa",
        "partials",
        "apply",
        "packet",
        "overload",
        "builtin",
    ],
)
def test_a_signature_is_a_claim(attention: Callable[..., object], claims: Supports) -> None:
    """A bare callable claims what its parameters name. It never claims a property that no parameter can name."""
    implementation = signatures.of_callable(attention, "here")
    assert implementation.supports == claims
    assert implementation.bare
    promises = (claims.masked_nan, claims.deterministic, claims.batch_invariant, claims.linear_memory)
    assert not any(promises)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_and_scripted() -> None:
    """A compiled or scripted function claims what the original function claims."""
    compiled = torch.compile(backend="eager")
    for make in (compiled, torch.jit.script):
        assert signatures.of_callable(make(masked), "here").supports == MASKED
        assert signatures.of_callable(make(Layer()), "here").supports == SCALED
    operator = torch.library.custom_op("flashproof_test::masked", masked, mutates_args=())
    assert signatures.of_callable(operator, "here").supports == MASKED


def two(query: object, key: object) -> object:
    """Takes one argument too few."""
    return (query, key)


def behind(settings: object, q: object, k: object, v: object) -> object:
    """Takes another argument before the three tensors."""
    return (settings, q, k, v)


class Named(torch.autograd.Function):
    """Requires `causal`, as the function of Triton's tutorial does."""

    @staticmethod
    def forward(context: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> Any:
        return query


def greedy(query: object, key: object, value: object, mask: object, *, window: int) -> object:
    """Requires arguments that an attention call does not give."""
    return (query, key, value, mask, window)


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        (two, "takes 2 positional arguments; .*takes three"),
        (
            greedy,
            r"needs mask, window beside [\s\S]*in place of each None: mask, window\.\n"
            r"    return here\(query, key, value, None, window=None\)$",
        ),
        (behind, r"needs settings beside [\s\S]*return here\(None, query, key, value\)$"),
        (
            Named.apply,
            r"needs causal beside [\s\S]*is_causal=False\):\n    return here\(query, key, value, is_causal\)$",
        ),
        (functools.partial(cast(Any, masked), window=3), r"partial of a function that does not take \(window=\.\.\.\)"),
        (Layer.forward, "is a method of a class; give that of an instance"),
        (anything, r"takes \*args, .*say what it takes: [\s\S]*Implementation\([\s\S]*supports=Supports\("),
        (3, "3 is not an attention function; give a function"),
        (math, "math is a module, not an attention function; name an attribute"),
        (Layer, "Layer is a class, not an attention function; an instance"),
        (Straight, r"Straight is a class, .*Straight\.apply"),
        (dict.fromkeys, "takes|cannot be read"),
        (min, r"takes \*args|cannot be read"),
        (torch.ops.aten.add, "takes 2 positional arguments"),
        (torch.ops.aten.softmax, "has the overloads .*; give one of them"),
        (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
            r"returns 2 values \(output, logsumexp\), not [\s\S]*"
            r"return here\(query, key, value, is_causal=is_causal, scale=scale\)\[0\]$",
        ),
    ],
    ids=[
        *("two", "greedy", "behind", "apply", "partial", "method", "anything", "number", "module", "class", "function"),
        *("fromkeys", "min", "operator", "overloads", "pair"),
    ],
)
def test_what_is_no_attention(attention: object, words: str) -> None:
    """The error says what is wrong with the object and what to give instead."""
    with pytest.raises(TypeError, match=f"^here: .*({words})"):
        signatures.of_callable(attention, "here")


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("tiled.fa", ValueError, r"has no implementation .* close: .*tiled\.fa1.*give a name"),
        ("nonsense", ValueError, "the catalogue has no implementation.*give a name"),
        ("mine.py", FileNotFoundError, r"there is no file .*mine\.py; give"),
        ("no_such_package", ValueError, "the catalogue has no implementation"),
        ("torch.nn", ValueError, "names no attribute.*it holds the modules .*give"),
        (
            "torch.nn.functional.scaled_dot_atention",
            ValueError,
            "no attribute 'scaled_dot_atention'; close: scaled_dot_prod",
        ),
        ("torch.nn:attention_of", AttributeError, r"has no attribute 'attention_of'.*give|close: "),
        ("torch.nn.functional:", ValueError, "names no attribute.*give"),
        (":attention", ValueError, "there is no module or file before the colon; give"),
        ("nowhere/mine.py:attention", FileNotFoundError, r"there is no file .*nowhere/mine\.py"),
        ("no_such_package.kernels:attention", ImportError, "no module 'no_such_package'"),
        ("torch.nn.functionals:attention", ImportError, r"no module 'torch\.nn\.functionals'"),
        (
            "torch.nn.functional:scaled_dot_attention",
            AttributeError,
            "has no attribute 'scaled_dot_attention'; close: scaled_dot_product_attention",
        ),
        ("sys:nothing_like_it", AttributeError, r"has no attribute 'nothing_like_it'; give"),
        ("math:pi", TypeError, r"3\.14.* is not an attention function"),
    ],
)
def test_errors_name_what_was_given(name: str, kind: type[Exception], words: str) -> None:
    """Every error begins with the name that was given."""
    with pytest.raises(kind, match=words) as raised:
        loading.load(name)
    assert str(raised.value).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        (
            Supports,
            {"causal": ("topleft",)},
            "causal: ('topleft',) will not do; give a tuple of any of 'top_left', 'bottom_right'",
        ),
        (Supports, {"causal": "top_left"}, "causal: 'top_left' will not do; give a tuple of any of 'top_left'"),
        (Supports, {"dtypes": ()}, "dtypes: () will not do; give a tuple of at least one of 'float32'"),
        (Supports, {"dtypes": ("float8",)}, "dtypes: ('float8',) will not do; give a tuple of any of 'float32'"),
        (Supports, {"devices": ("gpu",)}, "devices: ('gpu',) will not do; give a tuple of any of 'cpu', 'cuda'"),
        (Supports, {"backward": "yes"}, "backward: 'yes' will not do; give True or False"),
        (Supports, {"dims": 64}, "dims: 64 will not do; give a tuple of int, int"),
        (Supports, {"dims": (64, 8)}, "dims: (64, 8) will not do; give the smallest and the largest head dim"),
        (
            Supports,
            {"dims": (1, 7), "dim_multiple": 8},
            "dim_multiple: 8 will not do; give a number that has a multiple from 1 to 7",
        ),
        (Arithmetic, {"weights": "banana"}, "weights: 'banana' will not do; give 'input' or 'float32'"),
        (Arithmetic, {"products": ["tf32"]}, "products: ['tf32'] will not do; give 'exact' or"),
        (Arithmetic, {"exp_ulps": -3}, "exp_ulps: -3 will not do; give a finite number of at least 0"),
        (Arithmetic, {"exp_ulps": math.nan}, "exp_ulps: nan will not do; give a finite number of at least 0"),
        (Arithmetic, {"exp_ulps": "2"}, "exp_ulps: '2' will not do; give a number"),
        (Arithmetic, {"key_tile": -3}, "key_tile: -3 will not do; give a finite number of at least 1"),
        (Arithmetic, {"key_tile": True}, "key_tile: True will not do; give a whole number or None"),
        (Arithmetic, {"query_tile": 1.5}, "query_tile: 1.5 will not do; give a whole number or None"),
        (Implementation, {"name": 3}, "name: 3 will not do; give a str"),
        (Implementation, {"attention": None}, "attention: None will not do; give a function"),
        (
            Implementation,
            {"supports": {"lse": True}},
            "supports: {'lse': True} will not do; give a flashproof.Supports",
        ),
        (Implementation, {"missing": "CUDA"}, "missing: 'CUDA' will not do; give a function"),
        (Implementation, {"arithmetic": Arithmetic()}, "arithmetic: Arithmetic("),
    ],
    ids=lambda value: value.partition(" will")[0] if isinstance(value, str) else "",
)
def test_a_field_that_cannot_be_read(kind: Callable[..., object], fields: dict[str, Any], words: str) -> None:
    """The constructor raises an error that names the class, the field and its value, and says what to give instead."""
    claimed = {"name": "mine", "attention": three} | fields if kind is Implementation else fields
    with pytest.raises(ValueError, match=f"^{re.escape(f'{kind.__name__}.{words}')}"):
        kind(**claimed)


def test_numbers_of_both_kinds() -> None:
    """An int is accepted where a float is expected. A float is never accepted as a tile size."""
    assert Arithmetic(exp_ulps=1, key_tile=64, query_tile=None).key_tile == 64
    with pytest.raises(ValueError, match=r"key_tile: 64\.0 will not do"):
        Arithmetic(key_tile=cast(Any, 64.0))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"missing": lambda: None}, "missing('cpu'): raised TypeError"),
        ({"missing": lambda device: 1 / 0}, "missing('cpu'): raised ZeroDivisionError"),
        ({"missing": lambda device: False}, "missing('cpu'): returned False; return None"),
        ({"arithmetic": lambda: None}, "arithmetic('float32', 'cpu'): raised TypeError"),
        (
            {"arithmetic": lambda dtype, device: None if dtype == "float16" else Arithmetic()},
            "arithmetic('float16', 'cpu'): returned None; return a flashproof.Arithmetic",
        ),
        (
            {"arithmetic": lambda dtype, device: Arithmetic(exp_ulps=-3)},
            "arithmetic('float32', 'cpu'): Arithmetic.exp_ulps: -3 will not do",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_claim_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], words: str) -> None:
    """The error names the implementation, the call and its result, and says what to return instead."""
    claimed: dict[str, Any] = {"name": "mine", "attention": three} | fields
    monkeypatch.setattr(sys.modules[__name__], "exported", Implementation(**claimed), raising=False)
    name = f"{__name__}:exported"
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}: {words}')}"):
        loading.load(name)


def test_a_file_without_an_attribute(tmp_path: Path) -> None:
    """The error says which names the file defines."""
    file = tmp_path / "mine.py"
    file.write_text("import math\n\ndef attention(query, key, value):\n    return query\n\nimplementation = None\n")
    with pytest.raises(ValueError, match=r"mine\.py: names no attribute\. It defines attention, implementation; give"):
        loading.load(str(file))
    with pytest.raises(
        ValueError, match=r"is a directory; name a file in it and an attribute, such as '.*/mine\.py:attention'"
    ):
        loading.load(str(tmp_path))


def test_a_file_that_fails(tmp_path: Path) -> None:
    """The error says what went wrong and where.

    A broken file does not count as a missing backend. If a backend is missing, the error names it.
    """
    broken, needy, misspelt = tmp_path / "broken.py", tmp_path / "needy.py", tmp_path / "misspelt.py"
    leaving, alone, kernel, claiming = (
        tmp_path / name for name in ("leaving.py", "alone.py", "kernel.cu", "claiming.py")
    )
    claiming.write_text("from flashproof import Arithmetic\n\nclaim = Arithmetic(weights='banana')\n")
    leaving.write_text("raise SystemExit(3)\n")
    alone.write_text("from . import sibling\n")
    kernel.write_text("__global__ void attention() {}\n")
    misspelt.write_text("def attention(query, key, value)\n    return query\n")
    broken.write_text("\nlimit = 1 / 0\n")
    needy.write_text("import no_such_package.kernels\n")
    with pytest.raises(ValueError, match=r"ZeroDivisionError: .*broken\.py, line 2"):
        loading.load(f"{broken}:attention")
    with pytest.raises(
        ValueError,
        match=r"claiming\.py:attention: Arithmetic\.weights: 'banana' will not .* \(.*claiming\.py, line 3\)$",
    ):
        loading.load(f"{claiming}:attention")
    with pytest.raises(ValueError, match=r"SyntaxError: expected ':' \(misspelt\.py, line 1\)$"):
        loading.load(f"{misspelt}:attention")
    with pytest.raises(ImportError, match=r"needy\.py needs 'no_such_package', which is not installed") as raised:
        loading.load(f"{needy}:attention")
    assert raised.value.name == "no_such_package"
    with pytest.raises(ValueError, match=r"failed with SystemExit: 3 \(.*leaving\.py, line 1\); move the code of t"):
        loading.load(f"{leaving}:attention")
    with pytest.raises(ValueError, match=r"no known parent package .*; give each folder of its package an __init__"):
        loading.load(f"{alone}:attention")
    with pytest.raises(ValueError, match=r"kernel\.cu is not a Python file; give the Python function that calls"):
        loading.load(f"{kernel}:attention")


def test_a_file_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a package is loaded as a module of that package, however it is named first, and runs only once."""
    runs = tmp_path / "runs"
    for folder in ("vehicles", "vehicles/fast"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "vehicles" / "parts.py").write_text("FACTOR = 1.0\n")
    kernel = tmp_path / "vehicles" / "fast" / "kernel.py"
    kernel.write_text(
        f"""
from ..parts import FACTOR

with open({str(runs)!r}, "a") as file:
    print(__name__, file=file)

def attention(query, key, value):
    return query * FACTOR
"""
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    names = ("vehicles/fast/kernel.py:attention", "vehicles.fast.kernel:attention", "vehicles.fast.kernel.attention")
    found = [loading.load(name).attention for name in (*names, f"{kernel}:attention")]
    assert all(each is found[0] for each in found)
    assert runs.read_text() == "vehicles.fast.kernel\n"


@pytest.mark.parametrize("order", [1, -1])
def test_a_file_of_a_folder_without_init(order: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file runs once, whether its path or its module is named first."""
    folder = f"loose{order % 3}"
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "attn.py").write_text(
        "with open('runs', 'a') as runs:\n    runs.write('.')\ndef f(query, key, value):\n    return query\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    first, *others = (
        loading.load(name).attention
        for name in [f"{folder}/attn.py:f", f"{folder}.attn:f", f"{folder}.attn.f"][::order]
    )
    assert all(other is first for other in others)
    assert (tmp_path / "runs").read_text() == "."


def test_a_module_below_src(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how to make a module below src/ importable. It gives no such advice for other modules."""
    (tmp_path / "src" / "layered").mkdir(parents=True)
    (tmp_path / "src" / "layered" / "attn.py").write_text("def f(query, key, value):\n    return query\n")
    (tmp_path / "needy_bench.py").write_text("from layered.attn import f\n")
    monkeypatch.chdir(tmp_path)
    importable = r"; src/layered is not importable yet; run `pip install -e \.`, or set PYTHONPATH=src$"
    for name in ("layered.attn:f", "needy_bench.py:f"):
        with pytest.raises(ImportError, match=importable):
            loading.load(name)
    with pytest.raises(ValueError, match=r"no implementation .*; src/layered/attn\.py is not importable yet; run `pip"):
        loading.load("layered.attn.f")
    with pytest.raises(ImportError, match=r"there is no module 'unlayered'.*; give a name"):
        loading.load("unlayered.attn:f")


def test_a_package_of_another_place(tmp_path: Path) -> None:
    """One process cannot import two packages of the same name. The error says which one is imported already."""
    for place in ("first", "second"):
        package = tmp_path / place / "twins"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "kernel.py").write_text("def attention(query, key, value):\n    return query\n")
    loading.load(f"{tmp_path}/first/twins/kernel.py:attention")
    with pytest.raises(
        ImportError, match=r"its package 'twins' in .*second cannot be imported, .*first/twins.*; rename the package"
    ):
        loading.load(f"{tmp_path}/second/twins/kernel.py:attention")


def test_a_file_with_the_name_of_a_module(tmp_path: Path) -> None:
    """A file that has the name of a module is loaded, and the module of that name does not change."""
    (tmp_path / "math.py").write_text("def attention(query, key, value):\n    return query\n")
    assert loading.load(f"{tmp_path}/math.py:attention").bare
    assert sys.modules["math"] is math


def test_a_file_of_this_package() -> None:
    """The folders of flashproof are links. A path to one of their files still loads the module of the package."""
    folder = Path(loading.__file__).resolve().parents[1] / "impls" / "peers"
    from flashproof.impls.peers import sdpa

    assert loading.load(f"{folder}/sdpa.py:math").attention is sdpa.math.attention


def test_a_subclass_of_an_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subclass of `Implementation` may add fields, whose types are not checked."""

    @dataclass(frozen=True, kw_only=True)
    class Mine(Implementation):
        extra: "no_such_type" = None  # type: ignore[name-defined]  # noqa: F821

    monkeypatch.setattr(sys.modules[__name__], "exported", Mine(name="mine", attention=three), raising=False)
    assert loading.load(f"{__name__}:exported").name == "mine"


# -------------------------------------------------------------------------------------------------- what a run says

ONCE = """
import torch

def pair(query, key, value):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value), None

def arrays(query, key, value):
    return query.astype("float32")

def gives_an_array(query, key, value):
    return query.detach().float().numpy()

def of_cuda(query, key, value):
    assert query.is_cuda and key.is_cuda
    return query

def of_triton(query, key, value):
    raise RuntimeError("0 active drivers ([]). There should only be one.")

def by_driver(query, key, value):
    raise RuntimeError("Found no NVIDIA driver on your system. Please check that you have one.")
"""


SAID_ONCE = {
    "pair": r"out is a tuple (Tensor, None), not a tensor; add this to *mine.py:verified_attention",
    "arrays": r"it works on NumPy arrays, and was given tensors: AttributeError: *mine.py:8)",
    "gives_an_array": r"out is ndarray, not a tensor; add this to *mine.py:verified_attention",
    "of_cuda": r"(CUDA: no device; AssertionError: assert query.is_cuda and key.is_cuda (*mine.py:14))",
    "of_triton": r"(CUDA: no device; RuntimeError: 0 active drivers ([]); TRITON_INTERPRET=1 runs",
    "by_driver": r"(CUDA: no device; RuntimeError: Found no NVIDIA driver on your system)",
}
FAULTS = ("pair", "arrays", "gives_an_array")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize("processes", ["-n0", "-n2"])
def test_said_once(tmp_path: Path, processes: str) -> None:
    """If every call of a kernel must end in the same way, the run says so once, in one failure or one line.

    It runs no other check of that kernel, in any dtype.
    """
    (tmp_path / "mine.py").write_text(ONCE)
    named = [f"--impl={tmp_path}/mine.py:{kernel}" for kernel in SAID_ONCE]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/contract/test_call.py",
        *named,
        processes,
        "-q",
        "-p",
        "no:cacheprovider",
        "--assert=plain",
    ]
    command += ["-k", "test_answers or test_calls_agree", f"--records={tmp_path}/records.jsonl"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    said = ended.stdout + ended.stderr
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, said
    assert f"{len(FAULTS)} failed, {6 * len(SAID_ONCE) - len(FAULTS)} skipped" in said
    for kernel, words in SAID_ONCE.items():
        assert re.search(".*".join(map(re.escape, words.split("*"))), said), f"{kernel}: {said}"
        assert len(re.findall(rf"^not verified: \S+:{kernel} ", said, re.MULTILINE)) == 1, said
        assert len(re.findall(rf"^FAILED .*:{kernel}-", said, re.MULTILINE)) == (kernel in FAULTS), said
    assert not re.search("^refused: ", said, re.MULTILINE), said

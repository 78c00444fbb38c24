"""The code that an error suggests: it runs as it is printed, and the wrapper claims what the kernel takes."""

import functools
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from flashproof import diagnosis, judging, loading
from flashproof.calling import Fault, Refused, attend
from flashproof.cases import Case, not_claimed
from flashproof.impls.spec import Implementation
from flashproof.signatures import never_given, of_callable, renaming
from flashproof.tensors import inputs
from flashproof.wrapping import VERIFIED

ROOT = Path(__file__).resolve().parents[3]
KERNELS = """
import math
import numpy
import torch
from flashproof.tests.suite.sandbox.kernels import attention as right

def pair(query, key, value, is_causal=False, *, scale=None, window=None):
    return right(query, key, value, is_causal, scale), None

def arrays(query, key, value, causal=False, scale=None):
    scores = (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale) * (query @ numpy.swapaxes(key, -1, -2))
    if causal:
        scores = numpy.where(numpy.tril(numpy.ones_like(scores, dtype=bool)), scores, -numpy.inf)
    weights = numpy.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)) @ value.astype("float32")

def to_array(query, key, value, *, is_causal=False, scale=None):
    return right(query, key, value, is_causal, scale).detach().float().numpy()

def required(q, k, v, causal, sm_scale):
    assert isinstance(sm_scale, float)
    return right(q, k, v, causal, sm_scale)

def last(settings, query, key, value, *, is_causal, scale=None):
    assert settings is None
    return right(query, key, value, is_causal, scale)

def verified_too(*tensors, is_causal=False, scale=None):
    return right(*tensors, is_causal, scale)

class Tutorial(torch.autograd.Function):
    @staticmethod
    def forward(context, q, k, v, causal, sm_scale):
        return right(q, k, v, causal, sm_scale)

operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""
NAMES = ("pair", "arrays", "to_array", "required", "last", "verified_too", "Tutorial.apply", "operator")
CASES = [
    Case.parse(f"b2 h2 q33 k33 d16 {words}") for words in ("float32", "float32 causal scale0.3", "bfloat16 causal")
]


def message(name: str) -> str:
    """Returns the error of loading a kernel, or of its first call."""
    try:
        implementation = loading.load(name)
        attend(implementation, CASES[0], inputs(CASES[0]), backward=False)
    except (TypeError, Fault) as error:
        return str(error)
    raise AssertionError(f"{name} was taken")


@pytest.mark.parametrize("kernel", NAMES)
def test_the_code_runs_as_printed(tmp_path: Path, kernel: str) -> None:
    """The suggested code is added to the kernel's file, as the message says.

    The wrapper that it defines takes the parameters of the kernel, and its answers are right.
    """
    (tmp_path / "before.py").write_text(KERNELS)
    text, after = message(f"{tmp_path}/before.py:{kernel}"), tmp_path / "after.py"
    advice, _, code = text.partition(":\n\n")
    assert (
        advice.endswith(f"; add this to {tmp_path}/before.py, and give '{tmp_path}/before.py:{VERIFIED}'")
        or "*args" in advice
    )
    after.write_text(f"{KERNELS}\n{code}\n")
    implementation = loading.load(f"{after}:{VERIFIED}")
    for case in CASES:
        assert not_claimed(case, implementation.supports) is None, case
        answer = attend(implementation, case, inputs(case), backward=False)
        claim = implementation.arithmetic(case.dtype, "cpu")
        assert all(judged.passed for judged in judging.judge(answer, case, claim, ("out",))), case


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (functional.multi_head_attention_forward, "torch.nn.functional:multi_head_attention_forward"),
        (functional.multi_head_attention_forward, "torch.nn.functional.multi_head_attention_forward"),
        (math.hypot, "math:hypot"),
    ],
)
def test_a_function_of_a_module_is_imported(function: object, name: str) -> None:
    with pytest.raises(TypeError) as raised:
        of_callable(function, name)
    made: dict[str, Any] = {}
    exec(str(raised.value).partition(":\n\n")[2], made)
    assert VERIFIED in made
    root = name.rpartition(":")[2].partition(".")[0]
    assert root in made


# -------------------------------------------------------------------------------------- parameters that no call gives


def plain(query: object, key: object, value: object, *, is_causal: bool = False, **others: object) -> object:
    """Has only parameters that flashproof gives."""
    return query


def renamed(
    query: object, key: object, value: object, causal: bool = False, sm_scale: float = 1.0, window: int = 0
) -> object:
    """Has the parameter names of other libraries."""
    return query


def seedless(query: object, key: object, value: object, mask: object = None, dropout_p: float = 0.0) -> object:
    """Has dropout without a seed, which cannot be verified."""
    return query


@pytest.mark.parametrize(
    ("function", "never", "words"),
    [
        (plain, [], ""),
        (
            renamed,
            ["causal", "sm_scale", "window"],
            "; rename causal to is_causal and sm_scale to scale to have this verified",
        ),
        (seedless, ["mask", "dropout_p"], ""),
        (torch.nn.functional.scaled_dot_product_attention, ["attn_mask", "dropout_p"], ""),
    ],
)
def test_parameters_that_are_never_given(function: Callable[..., object], never: list[str], words: str) -> None:
    assert never_given(of_callable(function, "here")) == never
    assert renaming(never) == words
    claimed = Implementation(name="here", attention=renamed, supports=of_callable(plain, "here").supports)
    assert not never_given(claimed)


# ------------------------------------------------------------------------------------------------ the line of an error

FAULTY = """
import torch

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(context, out):
        return out.clone()

    @staticmethod
    def backward(context, dout):
        raise KeyError("backward")

def inside(table):
    return table["key"]

def forward(query, key, value):
    return inside({})

def of_torch(query, key, value):
    return torch.cat([query, key[..., :1]])

def backward(query, key, value):
    return Backward.apply(query * 1.0)
"""


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ("forward", "forward raised KeyError: 'key' (faulty.py:14)"),
        ("of_torch", "Sizes of tensors must match"),
        ("backward", "backward raised KeyError: 'backward' (faulty.py:11)"),
    ],
)
def test_an_exception_has_the_line_of_the_users_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, words: str
) -> None:
    """An error shows the innermost line of the user's file, and no line of PyTorch."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "faulty.py").write_text(FAULTY)
    with pytest.raises((Fault, Refused)) as raised:
        attend(loading.load("faulty.py:" + kernel), CASES[0], inputs(CASES[0]), backward=True)
    assert words in str(raised.value)
    assert str(raised.value).count("faulty.py:") == 1
    assert "faulty.py:20)" in str(raised.value) or kernel != "of_torch"


def test_an_exception_of_no_user_has_no_line() -> None:
    assert diagnosis.told(RuntimeError("no frame")) == "RuntimeError: no frame"


def test_a_run_names_them_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from flashproof.tests.suite.sandbox.kernels import attention as right\n"
        "def attention(query, key, value, causal=False, *, scale=None):\n"
        "    return right(query, key, value, causal, scale)\n"
    )
    target = f"{tmp_path}/mine.py:attention"
    command = [
        sys.executable,
        "-m",
        "pytest",
        f"--impl={target}",
        "-k",
        "contract and answers",
        "--dtype=float32",
        "-n0",
    ]
    command += [f"--records={tmp_path}/records.jsonl", "-p", "no:cacheprovider"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    words = f"never given: causal (parameters of {target}); rename causal to is_causal to have this verified"
    assert ended.stdout.splitlines().count(words) == 1, ended.stdout + ended.stderr
    assert re.search("^not claimed: .* is_causal, .* dropout_p and dropout_seed, ", ended.stdout, re.MULTILINE)


def test_a_mask_that_is_bound_is_not_the_only_one() -> None:
    """If a function is causal by default, a call without a mask gives it `is_causal=False`."""
    causal = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    implementation = of_callable(causal, "causal")
    case = Case.parse("b1 h1 q5 k5 d16")
    out = attend(implementation, case, inputs(case), backward=False)["out"]
    given = inputs(case)
    assert torch.equal(out, torch.nn.functional.scaled_dot_product_attention(given.query, given.key, given.value))

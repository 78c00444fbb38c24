"""What `flashproof list` shows: the catalogue with what can run here, and the checks.

The catalogue is listed without importing a kernel, PyTorch or Triton. What a kernel needs stands here, and a test holds
it to what the kernel itself says.
"""

import ast
import ctypes
import shutil
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flashproof.impls.catalogue import CATALOGUE
from flashproof.impls.spec import Device

PACKAGE = Path(__file__).parent
Needs = dict[Device, tuple[str, ...]]  # by device: modules, "device" for a CUDA device, "compiler" for one of C++
NEEDS: dict[str, Needs] = {
    "tiled.*": {"cpu": (), "cuda": ("device",)},
    "triton.fa3": {"cuda": ("triton", "device")},
    "triton.*": {"cpu": ("triton", "no device"), "cuda": ("triton", "device")},
    "cuda.fa3_fp8": {"cuda": ("cuda.core", "cuda.bindings", "device")},
    "cuda.*": {"cpu": ("compiler",), "cuda": ("cuda.core", "cuda.bindings", "device")},
    "sdpa.math": {"cpu": (), "cuda": ("device",)},
    "sdpa.flash_cpu": {"cpu": ()},
    "sdpa.*": {"cuda": ("device",)},
    "flex": {"cuda": ("device",)},
}
WORDS = {
    "device": "no CUDA device",
    "no device": "interpreted only where there is no CUDA device",
    "compiler": "no C++ compiler",
}


def missing(name: str, device: Device) -> str | None:
    """Why an implementation of the catalogue cannot run on a device here, or None if it can."""
    needs = next((needs for pattern, needs in NEEDS.items() if fnmatchcase(name, pattern)), {})
    if device not in needs:
        return f"not for {device}"
    lacking = [need for need in needs[device] if not _is_there(need)]
    return WORDS.get(lacking[0], f"{lacking[0]} is not installed") if lacking else None


@cache
def _is_there(need: str) -> bool:
    if need == "device":
        return _has_device()
    if need == "no device":
        return not _has_device()
    if need == "compiler":
        return any(map(shutil.which, ("c++", "g++", "clang++")))
    try:
        return find_spec(need) is not None
    except ImportError:
        return False


@cache
def _has_device() -> bool:
    """Whether the driver knows a CUDA device that this process may use."""
    try:
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return False
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def summary(name: str) -> str:
    """The sentence that an implementation says of itself, read from its source."""
    module = CATALOGUE[name].partition(":")[0]
    tree = ast.parse(PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text(encoding="utf-8"))
    said: list[tuple[str, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            words = {word.arg: word.value.value for word in node.keywords if isinstance(word.value, ast.Constant)}
            if "name" in words and "summary" in words:
                said.append((str(words["name"]), str(words["summary"])))
    return next((words for of, words in said if of == name), "")


def show_catalogue() -> None:
    """Prints the catalogue."""
    table = Table(box=None, pad_edge=False)
    for column in ("name", "runs here on", "what it is"):
        table.add_column(column)
    for name in CATALOGUE:
        reasons = {device: missing(name, device) for device in ("cpu", "cuda")}
        able = [device for device, reason in reasons.items() if reason is None]
        why = next((reason for reason in reasons.values() if reason and not reason.startswith("not for")), "")
        table.add_row(name, ", ".join(able) or f"[dim]{why}[/]", summary(name))
    console = Console(highlight=False)
    console.print(table)
    console.print("\nflashproof NAME verifies one of them. Globs select several: flashproof 'tiled.*'", markup=False)


def show_checks() -> None:
    """Prints the checks, by layer."""
    from flashproof.registry import checks

    console, layer = Console(highlight=False), ""
    for name, check in checks().items():
        if check.layer != layer:
            layer = check.layer
            console.print(f"[bold]{layer}[/]")
        first = check.says.partition(". ")[0].rstrip(".")
        console.print(f"  {name}: {first}.", markup=False, soft_wrap=True)

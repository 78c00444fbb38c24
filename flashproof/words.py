"""Words of the command line that can be read without PyTorch: dtypes, devices, processes, seconds."""

from collections.abc import Sequence
from typing import get_args

from flashproof.impls.catalogue import close
from flashproof.impls.spec import DTYPES, Device, Dtype

ALIASES: dict[str, Dtype] = {
    "fp32": "float32",
    "f32": "float32",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
}


def parse_dtypes(words: Sequence[str]) -> list[Dtype]:
    """Dtypes by name, or by a usual short form. Raises ValueError for other words."""
    found: list[Dtype] = []
    for word in words:
        name = ALIASES.get(word, word.removeprefix("torch."))
        if name not in DTYPES:
            raise ValueError(f"{word!r} is unknown{close(word, [*DTYPES, *ALIASES])}; give {', '.join(DTYPES)}")
        found.append(next(dtype for dtype in DTYPES if dtype == name))
    return list(dict.fromkeys(found)) or list(DTYPES)


def check_processes(word: str | int) -> None:
    """Raises ValueError unless this is a number of processes, or "auto"."""
    if str(word) != "auto" and not str(word).isdecimal():
        raise ValueError(f"{word!r} is not a number of processes; give 0, 1, 2 ... or auto")


def check_seconds(seconds: float | None) -> None:
    """Raises ValueError unless this is a time, or None."""
    if seconds is not None and not seconds > 0.0:  # NaN neither
        raise ValueError(f"{seconds:g} is not a time; give a number of seconds above 0")


def parse_device(word: str | None) -> Device | None:
    """A kind of device. Raises ValueError for other words."""
    found: Device | None = next((device for device in get_args(Device) if device == word), None)
    if word and not found:
        raise ValueError(f"{word!r} is unknown; give {' or '.join(get_args(Device))}")
    return found

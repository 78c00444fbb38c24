"""The memory that the machine has left, in bytes."""

import re
from contextlib import suppress
from pathlib import Path


def available_memory() -> int:
    """The bytes that the machine or the control group of this process has left, whichever is less.

    The result is never below 1 GiB.
    """
    found = re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())
    left = [int(found[1]) * 1024] if found else []
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # there is no such group, or its limit is "max"
        left.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(min(left, default=0), 2**30)


def held_data() -> int:
    """The bytes of data that this process holds."""
    found = re.search(r"VmData:\s*(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0

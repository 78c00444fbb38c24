"""A worker: a process that runs the checks of external kernels, one at a time, and reports everything to the pool.

It sends each record at once, and each case before a kernel receives it. So nothing is lost when the worker dies.
"""

import ctypes
import faulthandler
import os
import resource
import signal
from multiprocessing.connection import Connection
from typing import Any, Literal

import pytest
import torch

from flashproof.cases import Case
from flashproof.sandbox.journal import SPOILT
from flashproof.sandbox.memory import held_data

# Constants of malloc.h and sys/prctl.h.
M_MMAP_THRESHOLD, M_PERTURB, PR_SET_PDEATHSIG = -3, -6, 1

Kind = Literal["record", "given", "returned", "report", "done"]


class Worker:
    """The worker's side of its connection to the pool. It observes the calls of its process."""

    def __init__(self, connection: Connection, log: int, *, memory: int | None = None, share: float = 1.0) -> None:
        """log: a file for the stack of a crash or a hang.

        memory: the bytes that the process may take beside those that it already has. share: the share of a GPU's
        memory.
        """
        self.connection = connection
        self.after = -1  # the current check continues after this case of its list
        self.log = os.fdopen(log, "wb", buffering=0)
        faulthandler.enable(file=self.log, all_threads=False)
        faulthandler.register(signal.SIGUSR1, file=self.log, all_threads=False)
        libc = ctypes.CDLL(None)
        # Memory from malloc, and memory returned to it, holds no zeros. This reveals a kernel that reads memory before
        # it writes it. Large blocks come from malloc's heap too, since new pages of the system hold zeros.
        libc.mallopt(M_MMAP_THRESHOLD, 2**25)
        libc.mallopt(M_PERTURB, 0x01)  # bytes of 0xfe: -1.7e38 in float32 and bfloat16, NaN in float16
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a worker does not outlive its run
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (held_data() + memory, resource.RLIM_INFINITY))
        if torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(share)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C

    @classmethod
    def spawned(cls, words: str) -> "Worker":
        """A worker that was started as a new pytest process. words: the value of the option --worker."""
        connection, log, share = words.split(",")[:3]
        return cls(Connection(int(connection)), int(log), share=float(share))

    def record(self, line: str) -> None:
        """Sends a record, as JSON."""
        self._send("record", line)

    def report(self, report: dict[str, Any] | None) -> None:
        """Sends pytest's report of a phase of the current check."""
        self._send("report", report)

    def given(self, case: Case) -> None:
        """Sends that a kernel is called for a case."""
        self._send("given", str(case))

    def returned(self) -> None:
        """Sends that the kernel returned."""
        self._send("returned")

    def spoilt(self) -> None:
        """Ends the process; the pool starts another worker."""
        os._exit(SPOILT)

    def serve(self, session: pytest.Session) -> None:
        """Runs checks until the pool closes the connection."""
        for unheard in ("PytestUnraisableExceptionWarning", "PytestUnhandledThreadExceptionWarning"):
            # These warnings come from an object that a kernel left to the garbage collector, or from a kernel's thread.
            # They appear in any later check, and are no answer to a case.
            session.config.addinivalue_line("filterwarnings", f"ignore::pytest.{unheard}")
        items = {item.nodeid: item for item in session.items}
        while True:
            try:
                name, self.after = self.connection.recv()
            except EOFError:
                return
            item = items[name]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            self._send("done", _has_lost_its_device())

    def _send(self, kind: Kind, content: object = None) -> None:
        self.connection.send((kind, content))


def _has_lost_its_device() -> bool:
    """Whether the CUDA device now answers with errors. A kernel may cause this after its call returned."""
    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False

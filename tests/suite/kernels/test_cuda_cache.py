"""Tests the cache of compiled kernels, and how kernels are loaded on a GPU.

The tests show what the file names depend on, what happens to damaged files, and where the cache is. The driver of the
GPU is simulated.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

from flashproof.impls import catalogue
from flashproof.impls.cuda import launching
from flashproof.impls.cuda.launching import CudaError, Launch
from flashproof.reports.record import Resources
from flashproof.tests.suite.kernels import compiling, said

ROOT = Path(__file__).resolve().parents[3]
KERNEL = {
    "implementation": "triton.fa2",
    "kernel": "forward_kernel",
    "target": "sm_80",
    "dtype": "float16",
    "dim": 64,
    "causal": True,
}
RESOURCES = Resources(
    run="",
    **KERNEL,  # type: ignore[arg-type]
    registers=128,
    spilled_bytes=0,
    shared_bytes=1024,
    shipped=True,
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provides an empty cache. Functions forget what they remember of another cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    remembered = (launching.cache_folder, launching._twin, launching._kernel_on_gpu)
    for function in remembered:
        function.cache_clear()
    yield tmp_path / "cache" / "flashproof"
    for function in remembered:
        function.cache_clear()


# ---------------------------------------------------------------------------------------------------- any compiled file


def write(text: bytes) -> Callable[[Path], None]:
    """Returns a compiler that writes this text."""

    def compiler(path: Path) -> None:
        path.write_bytes(text)

    return compiler


def never(path: Path) -> None:
    """A compiler that must not be called."""
    pytest.fail(f"{path} is compiled again")


def test_what_the_assembler_said_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The assembler is asked again for another target, and after a change of a source."""
    monkeypatch.setattr(launching, "nvrtc_version", lambda: "13")
    compile_cubin = mock.Mock(side_effect=lambda *about: (b"code", " ".join(map(str, about))))
    monkeypatch.setattr(launching, "compile_cubin", compile_cubin)
    said = [launching.said_of("fa2.cu", "forward", (("DIM", 64),), target) for target in ("sm_80", "sm_80", "sm_90a")]
    assert said == ["fa2.cu forward {'DIM': 64} sm_80"] * 2 + ["fa2.cu forward {'DIM': 64} sm_90a"]
    assert compile_cubin.call_count == 2
    monkeypatch.setattr(launching, "_sources", lambda source, twin: "changed")
    launching.said_of("fa2.cu", "forward", (("DIM", 64),), "sm_80")
    assert compile_cubin.call_count == 3


def test_the_twin_is_no_source_of_a_kernel_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change of the twin, only the libraries of the twin are compiled again."""
    shutil.copytree(launching.FOLDER, tmp_path / "cuda")
    monkeypatch.setattr(launching, "FOLDER", tmp_path / "cuda")
    sources = ("fa2.cu", "fa3.cu")
    before = [launching._name(source, twin=twin) for source in sources for twin in (False, True)]
    for file in ("twin.h", "twin_hopper.h"):
        (tmp_path / "cuda" / file).write_text("changed")
    after = [launching._name(source, twin=twin) for source in sources for twin in (False, True)]
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False] * 2


def test_lines_for_the_twin_are_no_source_of_a_kernel_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's compiler reads nothing from these lines: it has no TWIN, and EXPORT is empty."""
    shutil.copytree(launching.FOLDER, tmp_path / "cuda")
    monkeypatch.setattr(launching, "FOLDER", tmp_path / "cuda")
    before = [launching._name("fa3_fp8.cu", twin=twin) for twin in (False, True)]
    found = []
    for path in (tmp_path / "cuda").glob("*.cu*"):
        text = path.read_bytes()
        found += launching.FOR_THE_TWIN.findall(text)
        path.write_bytes(launching.FOR_THE_TWIN.sub(b"", text))
    assert found
    assert {line.split(b"  //")[0] for line in found} <= {b"#ifndef TWIN", b"#endif", b"EXPORT(quantise)"}
    after = [launching._name("fa3_fp8.cu", twin=twin) for twin in (False, True)]
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False]


def test_what_triton_says_is_asked_for_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gates of the Triton kernels ask only once, too."""
    jobs = [compiling.Job("triton.fa2", target, "float16", 64, causal=True) for target in ("sm_80", "sm_90")]

    def answer(asked: list[compiling.Job]) -> list[list[Resources]]:
        return [[msgspec.structs.replace(RESOURCES, target=job.target)] for job in asked]

    asked = mock.Mock(side_effect=answer)
    monkeypatch.setattr(compiling, "_compiled", asked)
    monkeypatch.setattr(said, "PLACE", folder / "nothing is kept")
    for run in ("first", "second"):
        found = compiling.resources(jobs, run)
        assert [(record.run, record.target) for record in found] == [(run, "sm_80"), (run, "sm_90")]
    assert [call.args[0] for call in asked.call_args_list] == [jobs, []]
    for path in folder.glob("*.resources"):
        path.write_bytes(path.read_bytes()[:-3])
    compiling.resources(jobs[:1], "damaged")
    key = compiling._key
    monkeypatch.setattr(compiling, "_key", lambda job: "c" + key(job))
    compiling.resources(jobs[:1], "changed")
    assert [call.args[0] for call in asked.call_args_list[2:]] == [jobs[:1], jobs[:1]]


def test_a_file_is_compiled_once(folder: Path) -> None:
    place, code = launching._compiled(".so", write(b"code"), "fa2.cu", 1)
    assert place.parent == folder
    assert (place, code) == launching._compiled(".so", never, "fa2.cu", 1)
    assert code == b"code"
    assert launching._compiled(".so", write(b"other"), "fa2.cu", 2)[1] == b"other"
    assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".lock", ".so", ".so"]


def empty(place: Path) -> None:
    place.write_bytes(b"")


def garbage(place: Path) -> None:
    place.write_bytes(b"x" * 5000)


def half(place: Path) -> None:
    place.write_bytes(place.read_bytes()[: place.stat().st_size // 2])


def flipped(place: Path) -> None:
    code = bytearray(place.read_bytes())
    code[100] ^= 1
    place.write_bytes(code)


def longer(place: Path) -> None:
    place.write_bytes(place.read_bytes() + b"\0")


def directory(place: Path) -> None:
    place.unlink()
    place.mkdir()
    (place / "file").touch()


DAMAGES = (empty, garbage, half, flipped, longer, directory)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_compiled_anew(damage: Callable[[Path], None]) -> None:
    code = bytes(range(256)) * 9
    place, _ = launching._compiled(".so", write(code), "fa2.cu")
    damage(place)
    assert launching._compiled(".so", write(code), "fa2.cu") == (place, code)
    assert launching._compiled(".so", never, "fa2.cu") == (place, code)


def test_the_name_depends_on_a_source_elsewhere(tmp_path: Path) -> None:
    """The name depends on the text of a source file, even if the file is outside the folder of the kernels."""
    source = tmp_path / "mine.cu"
    source.write_text("one")
    first, _ = launching._compiled(".cubin", write(b"1"), str(source))
    source.write_text("two")
    second, code = launching._compiled(".cubin", write(b"2"), str(source))
    assert first != second
    assert code == b"2"


def test_a_folder_that_has_gone(folder: Path) -> None:
    """A cache folder that was removed is made again."""
    launching.cache_folder()
    shutil.rmtree(folder.parent)
    assert launching._compiled(".so", write(b"code"), "fa2.cu")[1] == b"code"


def test_a_disk_that_is_full(folder: Path) -> None:
    """A file that cannot be written raises CudaError. The message says what would help, and no file is left behind."""

    def full(path: Path) -> None:
        path.write_bytes(b"some")
        raise OSError(28, "No space left on device")

    with pytest.raises(CudaError, match=r"cache: .*No space left on device; with XDG_CACHE_HOME it can be put"):
        launching._compiled(".so", full, "fa2.cu")
    assert [path.suffix for path in folder.iterdir()] == [".lock"]


FOLDER_OF = (
    "from flashproof.impls.cuda import launching; folder = launching.cache_folder();"
    " assert folder.is_dir(); print(folder)"
)


def python(code: str, **environment: str) -> str:
    """Returns what a process prints. It has these environment variables and no HOME."""
    without = {name: value for name, value in os.environ.items() if name not in {"HOME", "XDG_CACHE_HOME"}}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=without | environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_temporary_folder_goes_with_its_process(tmp_path: Path) -> None:
    """A temporary cache folder is removed when its process ends. A forked child that ends does not remove it."""
    place = python(FOLDER_OF, XDG_CACHE_HOME="/dev/null", TMPDIR=str(tmp_path))
    assert Path(place).parent == tmp_path
    assert not Path(place).exists()
    fork = "import os, sys\nif os.fork() == 0: sys.exit()\nos.wait(); assert folder.is_dir()"
    python(f"{FOLDER_OF}\n{fork}", XDG_CACHE_HOME="/dev/null", TMPDIR=str(tmp_path))
    assert list(tmp_path.glob("flashproof-*")) == []


def test_a_user_without_a_home(tmp_path: Path) -> None:
    """If HOME is unset and the system does not know the user, Path.home raises RuntimeError."""
    lost = (
        "import pathlib\n"
        "def home(): raise RuntimeError('Could not determine home directory.')\n"
        "pathlib.Path.home = home\n"
    )
    assert Path(python(lost + FOLDER_OF, TMPDIR=str(tmp_path))).parent == tmp_path


# ------------------------------------------------------------------------------------------------------------- the twin


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_twin_is_compiled_anew(tmp_path: Path, folder: Path, damage: Callable[[Path], None]) -> None:
    """To load half a library would end the process."""
    if reason := launching.missing("cpu"):
        pytest.skip(reason)
    source = tmp_path / "one.cu"
    source.write_text(
        '#include "primitives.cuh"\nKERNEL(one)(Global<float> x) { x[thread_index()] = 1.0f; }\nEXPORT(one)\n'
    )
    for _ in range(2):
        x = torch.zeros(32)
        launching._twin.cache_clear()
        Launch(str(source), "one", 1, 1, 0, {}, (x,), (ctypes.c_void_p(x.data_ptr()),)).run()
        assert x.eq(1.0).all()
        (library,) = folder.glob("*.so")
        copy = folder / "copy"  # so that the file that this process has loaded is not changed
        copy.write_bytes(library.read_bytes())
        copy.replace(library)
        damage(library)


# ---------------------------------------------------------------------------------------------------------------- a GPU


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Provides a launch on a simulated H100. Only what torch and the driver say of the GPU is simulated.

    A test may simulate more.
    """
    if reason := launching.no_nvrtc():
        pytest.skip(reason)
    found: list[Launch] = []
    x = torch.zeros(1, 1, 8, 8, dtype=torch.float16)
    gpu(monkeypatch, "NVIDIA H100", (9, 0), 232448)
    with (
        mock.patch.object(Launch, "run", autospec=True, side_effect=found.append),
        mock.patch.object(launching, "on_twin", return_value=False),
    ):
        catalogue.load("cuda.fa2").attention(x, x, x)
    return found[0]


def gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], shared_bytes: int) -> None:
    """Simulates what torch and the driver say of a GPU."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr("cuda.bindings.driver.cuDeviceGetAttribute", lambda *_: (0, shared_bytes))


def load(launch: Launch) -> Any:
    launching._kernel_on_gpu.cache_clear()
    return launching._kernel_on_gpu(
        launch.source, launch.kernel, tuple(launch.constants.items()), launch.shared_bytes, 0
    )


def refuse(code: bytes) -> Any:
    """A driver that refuses to load. Its error contains a hash of the code."""
    raise RuntimeError(f"CUDA_ERROR_INVALID_IMAGE: {hashlib.sha256(code).hexdigest()}")


def test_a_kernel_that_the_driver_refuses(launch: Launch, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuda.core.ObjectCode", SimpleNamespace(from_cubin=refuse))
    with pytest.raises(
        CudaError, match=rf"CUDA: fa2\.cu forward cannot be loaded from {folder}/\w+\.cubin: CUDA_ERROR_INVALID_IMAGE"
    ):
        load(launch)


def test_a_damaged_cubin_is_compiled_anew(launch: Launch, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver always gets the code that NVRTC made."""
    monkeypatch.setattr(launching, "compile_cubin", lambda *_: (bytes(range(256)) * 9, ""))
    monkeypatch.setattr("cuda.core.ObjectCode", SimpleNamespace(from_cubin=refuse))
    said = set()
    for damage in DAMAGES:
        with pytest.raises(CudaError) as error:
            load(launch)
        said.add(str(error.value))
        (cubin,) = folder.glob("*.cubin")
        damage(cubin)
    assert len(said) == 1


@pytest.mark.parametrize("change", ["fma", "std", "ptxas_options", "package"])
def test_the_name_depends_on_the_options_and_the_version(
    launch: Launch, folder: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """A kernel gets another name with other options, or with another NVRTC of the same minor version."""
    monkeypatch.setattr("cuda.core.ObjectCode", SimpleNamespace(from_cubin=refuse))
    monkeypatch.setattr(launching, "compile_cubin", lambda *_: (b"code", ""))
    others: dict[str, object] = {"fma": True, "std": "c++20", "ptxas_options": ["-v", "-O1"]}
    for count in (1, 2):
        with pytest.raises(CudaError):
            load(launch)
        assert len(list(folder.glob("*.cubin"))) == count
        if change == "package":
            monkeypatch.setattr("importlib.metadata.version", lambda package: f"0 of {package}")
        else:
            monkeypatch.setitem(launching.OPTIONS, change, others[change])


def test_every_option_of_the_compiler_is_in_the_name(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC gets the target, the constants, the kernel's name, the path of the folder and OPTIONS, and nothing else.

    All of these are in the name of the file, except the path of the folder.
    """
    given: dict[str, Any] = {}

    def options(**named: Any) -> None:
        given.update(named)
        raise RuntimeError

    monkeypatch.setattr("cuda.core.ProgramOptions", options)
    with pytest.raises(RuntimeError):
        launching.compile_cubin(launch.source, launch.kernel, launch.constants, "sm_90")
    assert given.keys() == {"arch", "define_macro", "include_path", *launching.OPTIONS}


def test_a_chip_with_less_shared_memory(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """sm_86, sm_89 and sm_120 give a block 99 KiB. A kernel that needs more is refused before it is compiled."""
    gpu(monkeypatch, "NVIDIA RTX A6000", (8, 6), 1024)
    words = (
        rf"CUDA: fa2\.cu forward needs {launch.shared_bytes} bytes of shared memory for a block,"
        r" and NVIDIA RTX A6000 gives 1024; a smaller head dim"
    )
    with pytest.raises(CudaError, match=words):
        load(launch)


def test_a_chip_that_is_too_old(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, "NVIDIA T4", (7, 5), 65536)
    with pytest.raises(CudaError, match="CUDA: NVIDIA T4 is sm_75, and the kernels need sm_80 or later"):
        load(launch)


def test_too_many_blocks(launch: Launch) -> None:
    """A launch with too many blocks is refused.

    On a GPU, the driver would only say that a value is wrong. The twin would count the blocks in 32 bits.
    """
    many = Launch(
        launch.source, launch.kernel, 2**31, launch.warps, 0, launch.constants, launch.tensors, launch.arguments
    )
    with pytest.raises(
        CudaError,
        match=r"CUDA: 2147483648 blocks, where a launch has at most 2\^31 - 1.*fa2\.cu forward <<<2147483648, ",
    ):
        many.run()


@pytest.mark.parametrize(
    ("status", "current", "made"),
    [("CUDA_SUCCESS", 1, False), ("CUDA_SUCCESS", 0, True), ("CUDA_ERROR_INVALID_CONTEXT", 0, True)],
)
def test_a_thread_gets_the_context_that_it_lacks(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, status: str, current: int, made: bool
) -> None:
    """A new thread has no context, and another library may have left the context of another device."""
    from cuda.bindings import driver

    done: list[int] = []
    monkeypatch.setattr(driver, "cuCtxGetDevice", lambda: (getattr(driver.CUresult, status), current))
    monkeypatch.setattr("cuda.core.Device", lambda device: SimpleNamespace(set_current=lambda: done.append(device)))
    launching._make_current(1)
    assert done == ([1] if made else [])


def test_a_context_that_cannot_be_had(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver

    monkeypatch.setattr(driver, "cuCtxGetDevice", lambda: (driver.CUresult.CUDA_ERROR_DEINITIALIZED, 0))
    with pytest.raises(CudaError, match="CUDA: CUDA_ERROR_DEINITIALIZED when asking for the thread's device"):
        launching._make_current(0)
    monkeypatch.setattr(driver, "cuCtxGetDevice", lambda: (driver.CUresult.CUDA_ERROR_INVALID_CONTEXT, 0))

    def lost(_: int) -> None:
        raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr("cuda.core.Device", lost)
    with pytest.raises(CudaError, match="CUDA: device 0 cannot be made the thread's own: CUDA_ERROR_OUT_OF_MEMORY"):
        launching._make_current(0)

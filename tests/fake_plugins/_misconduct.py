"""Builds and calls that harm more than their own result: the process, its streams, its neighbours, the next point."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing.resource_tracker
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.interface import Layer, Problem

from ._base import RightLayer
from ._wrong_layers import Make, Spoiled

#: Where the test looks for what is left, and what stands in for the kernel's count of processes ended for memory.
FOLDER = "MOEBENCH_TEST_FOLDER"
#: How the names of the shared memory begin that is left behind.
SHARED = "MOEBENCH_TEST_SHARED"
#: How long a stranger sleeps, by which the test knows it.
NAP = "MOEBENCH_TEST_NAP"


def building(act: Callable[[], object]) -> Make:
    """Acts while it is built, and is right where it comes back."""

    def make(problem: Problem) -> Layer:
        act()
        return RightLayer(problem)

    return make


def forward(act: Callable[[], object]) -> Make:
    """Acts in each forward."""

    def spoil(output: Tensor) -> Tensor:
        act()
        return output

    return lambda problem: Spoiled(problem, output=spoil)


def backward(act: Callable[[], object]) -> Make:
    """Acts in each backward."""

    def spoil(grad: Tensor) -> Tensor:
        act()
        return grad

    return lambda problem: Spoiled(problem, grad_output=spoil)


def raises(error: BaseException, cause: BaseException | None = None) -> Callable[[], None]:
    def act() -> None:
        raise error from cause

    return act


class _Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message either")


def hangs() -> None:
    """Deaf to every signal that can be ignored, and with the interpreter's lock in its hands."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.PyDLL(None).sleep(3600)


def killed_for_memory() -> None:
    Path(os.environ[FOLDER], "oom-kill").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def closes_descriptors() -> None:
    os.closerange(3, 256)


def writes_everywhere() -> None:
    """Into every pipe that it can find, the harness's among them."""
    for descriptor in range(3, 256):
        with contextlib.suppress(OSError):
            if "pipe" in os.readlink(f"/proc/self/fd/{descriptor}"):
                os.write(descriptor, b"\xff\x00 not an event\n")


def prints(times: int) -> None:
    """Megabytes without a line's end, among them what is no text."""
    garbage = bytes(range(11, 256)).replace(b"\n", b"") * 4096
    for _ in range(times):
        os.write(1, garbage)
        os.write(2, b"\x1b[31mred\x1b[0m" + garbage)


def leaves_family() -> None:
    """A child, and a grandchild in a session of its own that has the worker's output open and no living parent."""
    subprocess.Popen(["sleep", "3600"])
    subprocess.run(["sh", "-c", "setsid sleep 3600 & exit 0"], check=True)


def leaves_stranger() -> None:
    """A child that has nothing of the worker's, neither session nor environment."""
    subprocess.Popen(["sleep", os.environ[NAP]], start_new_session=True, env={})


def leaves_fork() -> None:
    """A process that has all of the worker's descriptors."""
    if os.fork() == 0:
        time.sleep(3600)
        os._exit(0)


def forgets_that_it_forked() -> None:
    """The child goes on as the worker would."""
    if os.fork() == 0:
        raise RuntimeError("the child comes here too")


def leaves_files() -> None:
    folder = tempfile.mkdtemp()
    Path(folder, "part").write_text("of a cache")
    with tempfile.NamedTemporaryFile(delete=False) as file:
        file.write(b"more")


def leaves_shared_memory() -> None:
    SharedMemory(f"{os.environ[SHARED]}-{os.getpid()}", create=True, size=4096)
    # Its tracker starts in the background.
    multiprocessing.resource_tracker.ensure_running()


def dies_when_idle() -> None:
    """Not before the worker waits for its next job."""

    def wait() -> None:
        main = threading.main_thread().ident
        assert main is not None
        while sys._current_frames()[main].f_code.co_name != "main":
            time.sleep(0.002)
        os._exit(7)

    threading.Thread(target=wait).start()


def imports_slowly() -> None:
    folder = tempfile.mkdtemp()
    Path(folder, "moebench_slow_module.py").write_text("import time\ntime.sleep(0.3)\n")
    sys.path.insert(0, folder)
    importlib.import_module("moebench_slow_module")


def imports_what_is_broken() -> None:
    folder = tempfile.mkdtemp()
    Path(folder, "moebench_broken_module.py").write_text("def (\n")
    sys.path.insert(0, folder)
    importlib.import_module("moebench_broken_module")


def reads_answers() -> None:
    assert sys.stdin.read() == ""
    assert os.read(0, 1) == b""


def with_notes(notes: Any) -> Make:
    def make(problem: Problem) -> Layer:
        layer = RightLayer(problem)
        layer.notes = notes
        return layer

    return make


def also(*acts: Callable[[], object]) -> Callable[[], None]:
    def act() -> None:
        for one in acts:
            one()

    return act


def _text(error: str) -> BaseException:
    return RuntimeError(error)


MISCONDUCT: dict[str, Make] = {
    # What is raised.
    "exit_in_forward": forward(raises(SystemExit(0))),
    "interrupt_in_backward": backward(raises(KeyboardInterrupt())),
    "mute_error": building(raises(_Mute())),
    "unprintable_error": building(raises(_text("colours \x1b[31mred\x1b[0m, halves \ud800\udfff and bells \x07\x00"))),
    "error_in_build": building(raises(_text("no layout for these weights\nsecond line"))),
    "error_in_backward": backward(raises(ValueError("no backward kernel for this shape"))),
    "build_returns_none": lambda problem: None,  # type: ignore[dict-item,return-value]
    "odd_notes": with_notes("one sentence \ud800, not a list of them"),
    "memory_error": forward(raises(MemoryError())),
    "torch_out_of_memory": backward(raises(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 TiB. On"))),
    "driver_out_of_memory": building(raises(_text("Triton Error [CUDA]: out of memory"))),
    "caused_by_memory": building(raises(_text("no workspace"), MemoryError("a buffer"))),
    "missing_package": building(lambda: importlib.import_module("moebench_no_such_package.kernels")),
    "missing_part": building(lambda: importlib.import_module("torch.no_such_part")),
    "missing_name": building(raises(ImportError("cannot import name 'fast' from 'package'"))),
    "broken_module": building(imports_what_is_broken),
    "slow_import": building(imports_slowly),
    # How the process ends.
    "null_pointer": forward(lambda: ctypes.string_at(0)),
    "silent_exit": forward(lambda: os._exit(0)),
    "abort": backward(os.abort),
    "killed": building(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "killed_for_memory": building(killed_for_memory),
    "hang_in_forward": forward(hangs),
    "hang_in_backward": backward(hangs),
    "closes_descriptors": building(closes_descriptors),
    "writes_everywhere": building(writes_everywhere),
    "dies_when_idle": building(dies_when_idle),
    # Its streams.
    "prints": building(lambda: prints(5)),
    "prints_and_dies": building(also(lambda: prints(1), os.abort)),
    "closes_streams": building(also(lambda: sys.stdout.close(), lambda: sys.stderr.close())),
    "closes_streams_and_raises": building(also(lambda: sys.stderr.close(), raises(_text("unheard")))),
    "reads_answers": building(reads_answers),
    # What it leaves.
    "leaves_family": building(leaves_family),
    "leaves_family_and_dies": building(also(leaves_family, os.abort)),
    "leaves_stranger": building(also(leaves_stranger, raises(MemoryError()))),
    "leaves_fork_and_dies": building(also(leaves_fork, os.abort)),
    "forgets_that_it_forked": building(forgets_that_it_forked),
    "leaves_thread": building(lambda: threading.Thread(target=time.sleep, args=(3600,)).start()),
    "leaves_files": building(leaves_files),
    "leaves_files_and_dies": building(also(leaves_files, os.abort)),
    "leaves_shared_memory_and_dies": building(also(leaves_shared_memory, os.abort)),
    # Ended by its parent, with the tracker that removes it right behind.
    "leaves_shared_memory_and_is_ended": building(also(leaves_shared_memory, raises(MemoryError()))),
    # What it changes for its process.
    "default_dtype": building(lambda: torch.set_default_dtype(torch.float16)),
    "default_device": building(lambda: torch.set_default_device("meta")),
    "gradients_off": building(lambda: torch.set_grad_enabled(False)),
    "autocast": building(lambda: torch.autocast("cpu", torch.bfloat16).__enter__()),
    "deterministic": building(lambda: torch.use_deterministic_algorithms(True)),
    "anomalies": building(lambda: torch.autograd.set_detect_anomaly(True)),
    "threads": building(lambda: torch.set_num_threads(3)),
    "directory": building(lambda: os.chdir("/")),
    "directory_gone": building(also(lambda: os.chdir(tempfile.mkdtemp()), lambda: os.rmdir(os.getcwd()))),
    "seeds": forward(also(lambda: torch.manual_seed(0), lambda: os.environ.update(OMP_NUM_THREADS="64"))),
}

"""Shared helpers: points and problems on the CPU, a right layer to spoil, the command line in and out of process."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from harness.interface import Layer, LayerSpec, Point, Problem, RoutingSpec
from harness.problem import make_problem
from harness.routing import router_scores
from harness.shapes import MoEShape

if TYPE_CHECKING:
    from fake_conformance import StubWorker
    from fake_gate import Gate

    from harness.process import WorkerProcess

ROOT = Path(__file__).resolve().parent.parent
FAKE_PLUGINS = Path(__file__).resolve().parent / "fake_plugins"
MARK = "MOEBENCH_TEST_MARK"

# Triton decides when a kernel is defined whether it will be compiled or interpreted, so one process tests one of both.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = ["test_triton_compile_*.py"] if INTERPRETED else ["interpreter"]


@pytest.fixture(autouse=True, scope="module")
def _quick_figures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Much of a figure's time goes into its pixels, which no test looks at."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if request.module.__name__.startswith(("test_plots", "test_session", "test_cli")):
            from plots import style

            monkeypatch.setattr(style, "PNG_DPI", 40)
        yield


def point_of(
    shape: str,
    dtype: str = "float32",
    distribution: str = "uniform",
    convention: str = "topk_softmax",
    seed: int = 0,
    operation: str = "moe_layer",
    variant: str = "",
    name: str = "test",
) -> Point:
    """A point on the CPU."""
    return Point(
        operation,
        name,
        MoEShape.parse(shape),
        dtype,
        LayerSpec(router_convention=convention),
        RoutingSpec(distribution=distribution, seed=seed),
        variant,
        "cpu",
    )


def problem_of(shape: str, *args: str, **kwargs: object) -> Problem:
    return make_problem(point_of(shape, *args, **kwargs), "cpu")  # type: ignore[arg-type]


class RightLayer(Layer):
    """Every expert sees every token, masked by its weight: slow, plain, and easy to spoil one step at a time."""

    def __init__(self, problem: Problem) -> None:
        self.k = problem.shape.K
        self.convention = problem.point.layer.router_convention
        weights = (problem.gate, problem.up, problem.down, problem.router)
        self.gate, self.up, self.down, self.router = (w.detach().requires_grad_() for w in weights)

    def parameters(self) -> Sequence[Tensor]:
        return [self.gate, self.up, self.down, self.router]

    def logits(self, x: Tensor) -> Tensor:
        return (x @ self.router.T).float()

    def choose(self, logits: Tensor) -> Tensor:
        return torch.topk(logits, self.k, dim=-1).indices

    def scores(self, logits: Tensor, indices: Tensor) -> Tensor:
        return router_scores(logits, indices, self.convention)

    def expert(self, e: int, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.logits(x)
        indices = self.choose(logits)
        weights = torch.zeros_like(logits).scatter_add(1, indices, self.scores(logits, indices))
        out = torch.zeros_like(x, dtype=torch.float32)
        experts = zip(self.gate.unbind(), self.up.unbind(), self.down.unbind(), strict=True)
        for e, (gate, up, down) in enumerate(experts):
            out = out + weights[:, e, None] * self.expert(e, x, gate, up, down)
        return out.to(x.dtype)

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(("grad_gate", "grad_up", "grad_down", "grad_router"), gradients, strict=True))


def marked_processes(mark: str) -> list[tuple[int, str]]:
    """Living processes (id, command line) that carry a mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if f"{MARK}={mark}".encode() not in (entry / "environ").read_bytes():
                continue
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if state != "Z":
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append((int(entry.name), command))
        except OSError:
            continue
    return found


def wait_for_no_process(mark: str, seconds: float = 15.0) -> list[tuple[int, str]]:
    """What is still alive of the marked processes after that time at most."""
    end = time.monotonic() + seconds
    while (left := marked_processes(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def heed_signals() -> None:
    """In a child, before its program: a shell without job control has its background jobs ignore SIGINT, ``nohup``
    SIGHUP, and both are handed on."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class MoeBench:
    """The command line in a process of its own, with the fake plugins, marked so that leftovers can be found.

    Args:
        warm: its workers are forked (`warm_moebench`), which saves each of them the seconds that importing torch takes.
    """

    def __init__(self, mark: str, warm: bool = False) -> None:
        self.mark = mark
        self._program = [str(Path(__file__).with_name("warm_moebench.py"))] if warm else ["-m", "harness.cli"]
        self.environment = {
            **os.environ,
            "MOEBENCH_PLUGINS": str(FAKE_PLUGINS),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
            "MPLBACKEND": "Agg",
            MARK: mark,
        }

    def command(self, *arguments: object) -> list[str]:
        return [sys.executable, *self._program, *map(str, arguments)]

    def start(
        self, *arguments: object, stdout: int = subprocess.DEVNULL, stderr: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command(*arguments),
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=heed_signals,
        )

    def __call__(self, *arguments: object, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=timeout
        )


@pytest.fixture(scope="module")
def moebench() -> Iterator[MoeBench]:
    bench = MoeBench(uuid.uuid4().hex)
    yield bench
    assert not wait_for_no_process(bench.mark)


@pytest.fixture(scope="module")
def warm_moebench() -> Iterator[MoeBench]:
    bench = MoeBench(uuid.uuid4().hex, warm=True)
    yield bench
    assert not wait_for_no_process(bench.mark)


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that this process starts are forked from it (`warm_moebench`), which has imported what they need. It has
    one thread for computing, so that forking is safe; what a test has patched in it they have too."""
    import warm_moebench

    monkeypatch.setattr(subprocess, "Popen", warm_moebench.Popen)


@pytest.fixture(scope="module")
def one_worker() -> Iterator[WorkerProcess]:
    """A worker process for all runs of a module, which end theirs: a start takes seconds. Whoever wants it puts it in
    the place of `runner.WorkerProcess`."""
    from harness.process import WorkerProcess

    worker = WorkerProcess()
    close = worker.close
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(worker, "close", lambda patience_s=0.0: None)
        yield worker
    close(patience_s=1.0)


@pytest.fixture
def command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process, with the fake plugins: (exit code, standard output, standard error)."""
    from harness import cli

    def run(*arguments: object, width: int = 200) -> tuple[int, str, str]:
        monkeypatch.setenv("MOEBENCH_PLUGINS", str(FAKE_PLUGINS))
        monkeypatch.setattr(cli, "out", Console(width=width))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setattr(sys, "argv", ["moebench", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(autouse=True, scope="module")
def _what_was_imported_stays() -> None:
    """Some tests ask for many collections, each of which would look through all of torch's modules again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """The tests run side by side on few cores."""
    torch.set_num_threads(1)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not started by torchrun, whatever the tests themselves were started by."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """The regression gate with a fake GPU and without a baseline."""
    from fake_gate import Gate

    return Gate(tmp_path, monkeypatch)


@pytest.fixture
def gated(bare: Gate) -> Gate:
    """The same with the baseline of an ordinary run."""
    assert bare.run(update=True)[0] == 0
    return bare


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> type[StubWorker]:
    """The conformance suite's workers do as they are told, and well unless they are."""
    from fake_conformance import StubWorker

    from harness.conformance import suite

    StubWorker.started = []
    monkeypatch.setattr(StubWorker, "does", staticmethod(lambda job: {}), raising=False)
    monkeypatch.setattr(suite, "WorkerProcess", StubWorker)
    return StubWorker

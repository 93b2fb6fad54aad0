"""Several GPUs of one machine, on the CPU: made-up GPUs, real workers that know theirs by CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, MoeBench, heed_signals, point_of, wait_for_no_process
from rich.console import Console

from harness import devices, session
from harness.devices import Gpu, HandOut, SeveralGpus, chosen_gpus, visible_gpus
from harness.environment import GpuMonitor, environment
from harness.errors import UserError
from harness.process import WorkerProcess, WorkerStopped
from harness.registry import load_registry
from harness.runner import Job, Runner, Work
from harness.timing import TimingSettings

TWO = [Gpu(0, "GPU-aaaa", "NVIDIA H200"), Gpu(1, "GPU-bbbb", "NVIDIA H200")]
Run = Callable[..., tuple[int, str, str]]

#: Notes when and on which GPU each point is built and called. Points of 8 and 16 tokens wait for each other.
PLUGIN = """
import json, os, signal, time
from pathlib import Path

from harness.interface import Implementation
from implementations._template import _TemplateLayer

FOLDER = Path(__file__).parent

def note(tokens, event):
    gpu = os.environ["CUDA_VISIBLE_DEVICES"]
    with (FOLDER / "log").open("a") as file:
        file.write(json.dumps([gpu, tokens, event, time.monotonic()]) + "\\n")

class Noted(_TemplateLayer):
    def forward(self, x):
        note(self.tokens, "call")
        try:
            return super().forward(x)
        finally:
            note(self.tokens, "called")

class Noting(Implementation):
    name, label, upstream, licence = "noting", "Noting", "none", "none"
    devices, dtypes = ("cpu",), ("float32",)

    def build(self, problem):
        tokens = problem.shape.T
        note(tokens, "build")
        if tokens in (8, 16):
            (FOLDER / str(tokens)).touch()
            while not (FOLDER / str(24 - tokens)).exists():
                time.sleep(0.01)
        if tokens == 24:
            os.kill(os.getpid(), signal.SIGSEGV)
        if tokens == 32:
            time.sleep(3600)
        layer = Noted(problem)
        layer.tokens = tokens
        return layer
"""
SWEEP = """
[sweep]
name = "noted"
description = "A test's"

[defaults]
device = "cpu"
dtype = "float32"
passes = ["forward", "backward"]
time_limit_s = {limit}
min_samples = 6
max_samples = 6
sampling_s = 0.05

[[points]]
implementations = ["noting"]
shapes = {shapes}
"""


def write(folder: Path, tokens: Iterable[int], limit: int) -> Path:
    """A folder with the plugin and a sweep over these numbers of tokens; returns the sweep."""
    (folder / "plugins").mkdir()
    (folder / "plugins" / "noting.py").write_text(PLUGIN)
    shapes = json.dumps([f"{count},16,8,4,2" for count in tokens])
    path = folder / "noted.toml"
    path.write_text(SWEEP.format(limit=limit, shapes=shapes))
    return path


def log(folder: Path) -> list[tuple[str, int, str, float]]:
    return [tuple(json.loads(line)) for line in (folder / "plugins" / "log").read_text().splitlines()]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs; their points, which are timed on the CPU here, run side by side all the same."""
    monkeypatch.setattr(devices, "visible_gpus", lambda: TWO)
    monkeypatch.setattr(devices, "timed_on_cpu", lambda job: False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.usefixtures("two_gpus", "forked_workers")
def test_two_gpus_measure_side_by_side_and_one_point_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = (8, 16, 24, 40, 48)
    sweep = write(tmp_path, tokens, limit=60)
    monkeypatch.setenv("MOEBENCH_PLUGINS", str(tmp_path / "plugins"))
    out = Console(file=io.StringIO(), width=200)
    output = tmp_path / "rows"
    with session.chosen_place(gpus="all", ray="") as place:
        failed = session.run_sweeps(out, [str(sweep)], (), (), (), output=output, place=place)
    found = rows(output / "noted.jsonl")

    # Every point once, the failed one too; that 8 and 16 are ok shows that both were built at the same time.
    assert Counter((row["shape"]["T"], row["pass"]) for row in found) == Counter(
        (count, pass_) for count in tokens for pass_ in ("forward", "backward")
    )
    statuses = {row["shape"]["T"]: row["status"] for row in found}
    assert statuses == {count: "crashed" if count == 24 else "ok" for count in tokens}
    assert failed == 2

    # On one GPU, one point at a time.
    events = log(tmp_path)
    assert {gpu for gpu, *_ in events} == {gpu.uuid for gpu in TWO}
    where = {count: {gpu for gpu, other, *_ in events if other == count} for count in tokens}
    assert all(len(gpus) == 1 for gpus in where.values())
    for gpu in TWO:
        order = [count for uuid, count, *_ in sorted(events, key=lambda event: event[3]) if uuid == gpu.uuid]
        changes = [count for index, count in enumerate(order) if index == 0 or order[index - 1] != count]
        assert len(changes) == len(set(changes)), changes

    again = Console(file=io.StringIO(), width=200)
    with session.chosen_place(gpus="1", ray="") as place:
        session.run_sweeps(again, [str(sweep)], (), (), (), output=output, resume=True, dry_run=True, place=place)
    assert "1 jobs, 8 rows there already" in again.file.getvalue()  # type: ignore[attr-defined]


def test_a_signal_ends_all_workers_in_order(moebench: MoeBench, tmp_path: Path) -> None:
    sweep = write(tmp_path, (8, 16, 32, 40), limit=600)
    faked = (
        "from harness import devices; "
        f"devices.visible_gpus = lambda: {TWO!r}; devices.timed_on_cpu = lambda job: False; "
        "from harness import cli; cli.main()"
    ).replace("Gpu(", "devices.Gpu(")
    process = subprocess.Popen(
        [sys.executable, "-c", faked, "run", str(sweep), "--output", str(tmp_path), "--gpus", "0,1"],
        cwd=ROOT,
        env={**moebench.environment, "MOEBENCH_PLUGINS": str(tmp_path / "plugins")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=heed_signals,
    )
    # One GPU hangs at 32 tokens; the other one goes on without it.
    path = tmp_path / "noted.jsonl"
    end = time.monotonic() + 90
    while time.monotonic() < end and not (path.exists() and path.read_bytes().count(b"\n") == 6):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert err == b"moebench: interrupted; every finished row is stored, continue with --resume\n"
    assert wait_for_no_process(moebench.mark) == []
    found = rows(path)
    assert {row["shape"]["T"] for row in found} == {8, 16, 40} and {row["status"] for row in found} == {"ok"}
    assert len(found) == 6


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_row_without_numbers_names_the_gpu_of_its_job(tmp_path: Path, device: str) -> None:
    point = replace(point_of("8,16,8,4,2", name="torch_loop"), device=device)
    path = tmp_path / "rows.jsonl"
    runner = Runner(
        "t",
        [Work("point", point, ("forward",))],
        load_registry(),
        path,
        settings=TimingSettings(),
        time_limit_s=5,
        resume=False,
        place=SeveralGpus(TWO),
    )
    (job,) = runner.jobs
    job.refusal = ("unsupported", "a test")
    runner.serve(HandOut([job]).to(TWO[1]))
    (row,) = rows(path)
    named = {key: row["environment"].get(key) for key in ("gpu_index", "gpu_uuid")}
    assert named == ({"gpu_index": 1, "gpu_uuid": "GPU-bbbb"} if device == "cuda" else dict.fromkeys(named))


# Which GPUs.


class FakeNvml(types.ModuleType):
    """Three GPUs, the last one of another model."""

    names = ("NVIDIA H200", "NVIDIA H200", "NVIDIA H100 80GB HBM3")
    uuids = ("GPU-aaaa", "GPU-bbbb", "GPU-cccc")

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= len(self.names):
            raise RuntimeError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return self.uuids.index(uuid)

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return self.uuids[handle].encode()

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.names[handle]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("pynvml"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("nvml")
@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, [0, 1, 2]), ("1", [1]), ("2,0", [2, 0]), ("GPU-bbbb,0", [1, 0]), ("1,-1,0", [1]), ("", []), ("-1", [])],
)
def test_the_visible_gpus_in_their_order(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, indices: list[int]
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = visible_gpus()
    assert [gpu.index for gpu in found] == indices
    assert [gpu.uuid for gpu in found] == [FakeNvml.uuids[index] for index in indices]
    first = GpuMonitor()
    assert (first.index, first.name) == ((indices[0], FakeNvml.names[indices[0]]) if indices else (None, None))
    if not indices:
        assert first.reason is not None and "CUDA_VISIBLE_DEVICES hides every GPU" in first.reason
    machine = environment("cuda", initialise_cuda=False)
    assert (machine["gpu_index"], machine["gpu_uuid"]) == (first.index, first.uuid)


@pytest.mark.usefixtures("nvml")
def test_gpus_are_chosen_among_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [gpu.uuid for gpu in chosen_gpus("1, 0")] == ["GPU-bbbb", "GPU-aaaa"]
    refused = {
        "all": "GPUs of several models (NVIDIA H200, NVIDIA H100 80GB HBM3)",
        "0,3": "no GPU 3; this machine shows GPUs 0 to 2",
        "1,1": "names a GPU twice",
        "one": "expected all, or whole numbers such as 0,1",
        "0,": "expected all, or whole numbers such as 0,1",
    }
    for text, reason in refused.items():
        with pytest.raises(UserError) as caught:
            chosen_gpus(text)
        assert reason in str(caught.value) and str(caught.value).startswith(f"--gpus {text}: ")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    chosen = chosen_gpus("all")
    assert [gpu.uuid for gpu in chosen] == ["GPU-bbbb", "GPU-aaaa"]
    with devices.only(chosen[1:]):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-aaaa" and GpuMonitor().index == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    with pytest.raises(UserError, match="no GPU 1; this machine shows GPU 0 only"):
        chosen_gpus("1")


def test_without_a_gpu_one_line_says_so(command_line: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "visible_gpus", list)
    code, _, err = command_line("run", "smoke", "--gpus", "all")
    assert code == 2 and err.count("\n") == 1
    assert err.startswith("moebench: --gpus all: this machine has no NVIDIA GPU")


# Who gets which job.


def jobs(*names: str, device: str = "cuda") -> list[Job]:
    points = [replace(point_of("8,16,8,4,2", name=name), device=device) for name in names]
    return [Job(Work("point", point, ("forward",)), {"forward": {"number": i}}) for i, point in enumerate(points)]


def test_a_gpu_stays_with_its_group_then_takes_a_free_one_then_helps() -> None:
    hand_out = HandOut(jobs("a", "b", "a", "b", "b", "c", "b"))
    first, second = hand_out.to(TWO[0]), hand_out.to(TWO[1])
    taken = [(next(lane).work.point.implementation) for lane in (first, second, first, first, second, first)]
    # The first one goes from a, which is done, to c, at which nobody is, and then joins the second one at b.
    assert taken == ["a", "b", "a", "c", "b", "b"]
    assert [job.gpu["gpu_index"] for job in second] == [1]
    assert list(first) == []


def test_no_job_is_lost_or_handed_out_twice() -> None:
    every = jobs(*[name for name in "abcde" for _ in range(60)])
    hand_out = HandOut(every)
    taken: list[Job] = []

    def take(gpu: Gpu) -> None:
        for job in hand_out.to(gpu):
            taken.append(job)
            time.sleep(0)

    threads = [threading.Thread(target=take, args=(Gpu(index, f"GPU-{index}", "x"),)) for index in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(map(id, taken)) == sorted(map(id, every))


class FakeRunner:
    """Keeps who served what, as (thread's name, number of the job)."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.served: list[tuple[str, int]] = []

    def serve(self, jobs: Iterable[Job], start_worker: Any = None) -> None:
        for job in jobs:
            self.served.append((threading.current_thread().name, job.bases["forward"]["number"]))
            self.measure(job, start_worker)

    def measure(self, job: Job, start_worker: Any) -> None:
        pass


class BreakingRunner(FakeRunner):
    """Fails at the implementation b; with all others it waits for its worker, until the run ends."""

    def measure(self, job: Job, start_worker: Any) -> None:
        if job.work.point.implementation == "b":
            raise UserError("the disk is full")
        _, stop = start_worker.args
        assert stop.wait(60)
        raise WorkerStopped


def test_what_is_timed_on_the_cpu_comes_last_and_alone() -> None:
    on_cpu, on_gpu = jobs("a", "a", "b", device="cpu"), jobs("a", "b")
    for number, job in enumerate([*on_cpu, *on_gpu]):
        job.bases["forward"]["number"] = number
    runner = FakeRunner([*on_cpu, *on_gpu])
    SeveralGpus(TWO).run(runner)  # type: ignore[arg-type]
    assert [number for _, number in runner.served[2:]] == [0, 1, 2]
    assert {name for name, _ in runner.served[2:]} == {threading.current_thread().name}
    assert {number for _, number in runner.served[:2]} == {3, 4}
    assert all(name.startswith("worker") for name, _ in runner.served[:2])


def test_what_ends_one_thread_ends_all_and_is_told() -> None:
    runner = BreakingRunner(jobs("a", "b", "c", "d"))
    with pytest.raises(UserError, match="the disk is full"):
        SeveralGpus(TWO).run(runner)  # type: ignore[arg-type]
    assert {number for _, number in runner.served} == {0, 1}


def test_a_wait_for_a_worker_ends_with_the_run() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(WorkerStopped):
        WorkerProcess({}, stop)

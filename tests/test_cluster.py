"""Sweeps on Ray: a cluster of this machine's CPUs, real tasks; and what Ray gives up, made up."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import MoeBench, point_of
from rich.console import Console

from harness import cluster, session
from harness.cluster import Task
from harness.environment import gpu_name
from harness.errors import UserError
from harness.runner import Job, Work
from harness.timing import TimingSettings

Run = Callable[..., tuple[int, str, str]]

#: A plugin that is right; at 24 tokens it crashes, at 16 it takes the Ray worker along, once.
PLUGIN = """
import os, signal, time
from pathlib import Path

from harness.interface import Implementation
from implementations._template import _TemplateLayer

class Killing(Implementation):
    name, label, upstream, licence = "killing", "Killing", "none", "none"
    devices, dtypes = ("cpu",), ("float32",)

    def build(self, problem):
        once = Path(__file__).with_name("killed")
        if problem.shape.T == 16 and not once.exists():
            once.touch()
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
        if problem.shape.T == 24:
            os.kill(os.getpid(), signal.SIGSEGV)
        return _TemplateLayer(problem)

    def restriction(self, point):
        return "no more than 32 tokens" if point.shape.T > 32 else None
"""
SWEEP = """
[sweep]
name = "spread"
description = "A test's"

[defaults]
device = "cpu"
dtype = "float32"
passes = ["forward", "backward"]
time_limit_s = 60
min_samples = 6
max_samples = 6
sampling_s = 0.05

[[points]]
implementations = ["killing"]
shapes = ["16,16,8,4,2", "8,16,8,4,2", "24,16,8,4,2", "64,16,8,4,2"]
"""


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """Where Ray keeps its logs and sockets, whose paths must be short."""
    folder = tempfile.mkdtemp(prefix="ray")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_rows_of_a_ray_cluster_are_those_of_the_plain_runner(
    moebench: MoeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_folder: str
) -> None:
    pytest.importorskip("ray")
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "killing.py").write_text(PLUGIN)
    sweep = tmp_path / "spread.toml"
    sweep.write_text(SWEEP)
    given = {"MOEBENCH_PLUGINS": str(tmp_path / "plugins"), "RAY_TMPDIR": ray_folder}
    monkeypatch.setattr(moebench, "environment", {**moebench.environment, **given})
    ended = moebench("run", sweep, "--output", tmp_path / "ray", "--ray", "local")
    assert ended.returncode == 3 and ended.stderr == "", ended.stdout + ended.stderr
    assert "8 rows in" in ended.stdout and "2 failed" in ended.stdout
    found = rows(tmp_path / "ray" / "spread.jsonl")

    # Every row once; the task whose Ray worker was killed was started again by Ray, and measured.
    assert (tmp_path / "plugins" / "killed").exists()
    passes = ("forward", "backward")
    assert Counter((row["shape"]["T"], row["pass"]) for row in found) == Counter(
        (tokens, pass_) for tokens in (8, 16, 24, 64) for pass_ in passes
    )
    status = {8: "ok", 16: "ok", 24: "crashed", 64: "unsupported"}
    assert all(row["status"] == status[row["shape"]["T"]] for row in found)
    crash = next(row for row in found if row["status"] == "crashed")
    assert crash["reason"].startswith("the worker died while in build (ended by signal SIGSEGV)")
    assert len({row["run_id"] for row in found}) == 1

    # The plain runner's rows have the same keys, and it finds nothing left to do but the crash.
    monkeypatch.setenv("MOEBENCH_PLUGINS", given["MOEBENCH_PLUGINS"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = Console(file=io.StringIO(), width=200)
    shapes = ("8,16,8,4,2", "24,16,8,4,2", "64,16,8,4,2")
    session.run_sweeps(out, [str(sweep)], (), (), shapes, output=tmp_path / "plain")
    plain = {(row["shape"]["T"], row["pass"]): row for row in rows(tmp_path / "plain" / "spread.jsonl")}
    assert len(plain) == 6
    for row in found:
        other = plain.get((row["shape"]["T"], row["pass"]))
        if other is not None:
            assert set(row) == set(other) and row["resume_key"] == other["resume_key"]
            assert set(row["environment"]) == set(other["environment"])
    session.run_sweeps(out, [str(sweep)], (), (), (), output=tmp_path / "ray", resume=True, dry_run=True)
    assert "1 jobs, 6 rows there already" in out.file.getvalue()  # type: ignore[attr-defined]


def test_without_ray_or_a_cluster_one_line_says_so(command_line: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = command_line("run", "smoke", "--ray", "auto", "--gpus", "0")
    assert code == 2 and err.startswith("moebench: --gpus and --ray: leave one of both out") and err.count("\n") == 1

    with monkeypatch.context() as without:
        without.setitem(sys.modules, "ray", None)
        code, _, err = command_line("run", "smoke", "--ray", "auto")
    assert code == 2 and err.startswith("moebench: --ray needs the package ray: pip install -e '.[ray]'")
    assert err.count("\n") == 1

    ray = pytest.importorskip("ray")

    def no_cluster(**options: Any) -> None:
        assert options["address"] == "10.0.0.1:6379" and "include_dashboard" not in options
        raise ConnectionError("nothing\nanswers there")

    monkeypatch.setattr(ray, "init", no_cluster)
    monkeypatch.setattr(cluster, "_check_answers", lambda address: None)
    code, _, err = command_line("run", "smoke", "--ray", "10.0.0.1:6379")
    assert (code, err) == (2, "moebench: --ray 10.0.0.1:6379: no Ray cluster: nothing answers there\n")


def test_an_address_where_nothing_listens_is_refused_before_ray_tries_for_minutes(
    command_line: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("asked Ray"))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        for address in (where, f"ray://{where}"):
            code, _, err = command_line("run", "smoke", "--ray", address)
            assert (code, err) == (2, f"moebench: --ray {address}: no Ray cluster: {where}: Connection refused\n")
        monkeypatch.setenv("RAY_ADDRESS", where)
        code, _, err = command_line("run", "smoke", "--ray", "auto")
        assert (code, err) == (2, f"moebench: --ray auto: no Ray cluster: {where}: Connection refused\n")
    code, _, err = command_line("run", "smoke", "--ray", "127.0.0.1:99999")
    assert code == 2 and err.startswith("moebench: --ray 127.0.0.1:99999: Port out of range") and err.count("\n") == 1


def test_an_address_where_something_listens_is_left_to_ray() -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:
        cluster._check_answers(f"127.0.0.1:{server.getsockname()[1]}")
    for word in ("local", "somewhere"):
        cluster._check_answers(word)


# What Ray is told, and what it gives up.


def job(device: str = "cuda", name: str = "torch_loop") -> Job:
    return Job(Work("point", replace(point_of("8,16,8,4,2", name=name), device=device), ("forward",)), {"forward": {}})


def test_a_task_has_a_whole_gpu_or_none() -> None:
    assert cluster.options(job())["num_gpus"] == 1
    assert cluster.options(job("cpu"))["num_gpus"] == 0
    assert all(cluster.options(job(device))["max_retries"] == 2 for device in ("cuda", "cpu"))


def test_what_ray_gives_up_is_typed() -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    cause = RuntimeError("this node has\nanother version")
    told = cluster.failure_of(exceptions.RayTaskError("measure", "Traceback\n…", cause))
    assert told == ("crashed", "the Ray task failed: RuntimeError: this node has another version")
    status, reason = cluster.failure_of(exceptions.WorkerCrashedError())
    assert status == "crashed" and reason.startswith("Ray gave up after 2 retries: WorkerCrashedError: ")
    status, reason = cluster.failure_of(exceptions.OutOfMemoryError("the node ran out of memory"))
    assert status == "out_of_memory" and "\n" not in reason
    assert cluster.failure_of(exceptions.NodeDiedError("a node went"))[0] == "crashed"


class FakeRay:
    """Answers each task at once, with a row or with an exception."""

    def __init__(self, answers: dict[str, Any]) -> None:
        from ray import exceptions

        self.exceptions, self.answers = exceptions, answers
        self.asked: list[tuple[Task, dict[str, Any]]] = []
        self.cancelled: list[tuple[Any, bool]] = []

    def remote(self, **given: Any) -> Callable[[Any], Any]:
        return lambda function: self

    def options(self, **given: Any) -> Any:
        class Bound:
            @staticmethod
            def remote(task: Task) -> tuple[int, str]:
                self.asked.append((task, given))
                return len(self.asked), task.job.work.point.implementation

        return Bound

    def wait(self, references: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return references[-1:], references[:-1]

    def get(self, reference: tuple[int, str]) -> Any:
        answer = self.answers[reference[1]]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def cancel(self, reference: tuple[int, str], force: bool = False) -> None:
        self.cancelled.append((reference[1], force))


class Stored:
    """A runner that keeps what it is told."""

    settings, time_limit_s = TimingSettings(), 5.0

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs, self.rows, self.refused, self.done = jobs, [], [], []  # type: ignore[var-annotated]

    def serve(self, jobs: list[Job]) -> None:
        self.refused += [(one.work.point.implementation, *(one.refusal or ())) for one in jobs]

    def store(self, row: Any) -> None:
        self.rows.append(row)

    def spent(self, phases: Any) -> None:
        assert phases == {"build": 1.0}

    def ended(self, one: Job) -> None:
        self.done.append(one.work.point.implementation)


def test_every_job_ends_in_rows_whatever_ray_says(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from ray.exceptions import WorkerCrashedError

    answers = {"torch_loop": cluster.Answer([{"n": 1}, {"n": 2}], {"build": 1.0}), "gone": WorkerCrashedError()}
    fake = FakeRay(answers)
    monkeypatch.setitem(sys.modules, "ray", fake)
    refused = job(name="refused")
    refused.refusal = ("unsupported", "too wide")
    runner = Stored([job(), job(name="gone"), refused, job("cpu", name="torch_loop")])
    cluster.RayCluster("NVIDIA H200").run(runner)  # type: ignore[arg-type]
    assert runner.rows == [{"n": 1}, {"n": 2}] * 2 and runner.done == ["torch_loop"] * 2
    assert [one[:2] for one in runner.refused] == [("refused", "unsupported"), ("gone", "crashed")]
    # Jobs without a GPU are planned without one; rows written here name the cluster's.
    assert [task.gpu for task, _ in fake.asked] == ["NVIDIA H200", "NVIDIA H200", None]
    assert runner.jobs[2].gpu == {"gpu": "NVIDIA H200"} and runner.jobs[3].gpu == {}


def test_what_ends_the_run_cancels_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    fake = FakeRay({"torch_loop": UserError("the disk is full")})
    monkeypatch.setitem(sys.modules, "ray", fake)
    with pytest.raises(UserError, match="the disk is full"):
        cluster.RayCluster(None).run(Stored([job(name="first"), job(name="second"), job()]))  # type: ignore[arg-type]
    # The two that are left: an interrupt first, then by force those that it did not end.
    assert fake.cancelled == [("first", False), ("second", False), ("first", True)]


def task(**changed: Any) -> Task:
    one = job("cpu")
    return replace(Task(one, TimingSettings(), 5.0, None, cluster._code(one), {}), **changed)


def test_a_node_with_other_code_or_another_gpu_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(RuntimeError, match="another version of the harness or of the plugin"):
        cluster.measure(task(code=("0123",)))
    monkeypatch.setattr(cluster, "visible_gpus", list)
    with pytest.raises(RuntimeError, match="planned for NVIDIA H200, and Ray gave this task no GPU"):
        cluster.measure(task(gpu="NVIDIA H200"))


def test_the_clusters_gpus_must_be_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    nodes: list[dict[str, Any]] = [{"Alive": True, "Resources": {"CPU": 8.0}}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert cluster._gpu_model("auto") is None
    for model in ("H100", "H200"):
        nodes.append({"Alive": True, "Resources": {"GPU": 8.0, f"accelerator_type:{model}": 1.0}})
    with pytest.raises(UserError, match=r"--ray auto: GPUs of several models \(H100, H200\)"):
        cluster._gpu_model("auto")
    nodes[1]["Alive"] = False
    asked: list[Any] = []

    class Remote:
        def remote(self) -> Any:
            return "reference"

    def remote(**options: Any) -> Callable[[Any], Remote]:
        return lambda function: (asked.append((function, options)), Remote())[1]

    monkeypatch.setattr(ray, "remote", remote)
    monkeypatch.setattr(ray, "get", lambda reference: "NVIDIA H200")
    assert cluster._gpu_model("auto") == "NVIDIA H200"
    assert asked == [(gpu_name, {"num_gpus": 1})]

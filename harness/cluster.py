"""A sweep on a Ray cluster: each job is a Ray task that takes a whole GPU. Ray schedules, retries and carries the rows
back; this process alone writes them."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness.devices import visible_gpus
from harness.environment import COMMIT_VARIABLE, VISIBLE, gpu_name
from harness.errors import UserError, describe
from harness.process import WAIT_SLICE_S, WorkerProcess
from harness.registry import PLUGINS_VARIABLE, Registry, code_hash, harness_hash, load_registry
from harness.runner import Job, Runner
from harness.timing import TimingSettings

#: How often Ray starts a task again whose node or Ray worker was lost. A plugin that crashes takes neither along: it
#: runs in a process below the Ray worker, and its row comes back like any other.
RETRIES = 2
#: Seconds that cancelled tasks get to end their workers, before Ray ends theirs.
PATIENCE_S = 5.0
#: Seconds in which an address must take a connection. Ray itself tries for minutes.
CONNECT_S = 10.0
_HANDED_ON = (PLUGINS_VARIABLE, COMMIT_VARIABLE)


@dataclass(frozen=True)
class Task:
    """A job with all that a node needs to run it.

    Attributes:
        gpu: the model on which the job was planned; None for jobs without one.
        code: of the plugins and of the harness, which must be the same there.
        variables: of this process's environment.
    """

    job: Job
    settings: TimingSettings
    time_limit_s: float
    gpu: str | None
    code: tuple[str, ...]
    variables: Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    """The rows of a job, and the seconds of its phases."""

    rows: list[dict[str, Any]]
    phases: dict[str, float]


class _Rows(Runner):
    """Runs a planned job where Ray sent it, and keeps its rows for the way back."""

    def __init__(self, task: Task) -> None:
        super().__init__(
            "", [], Registry({}), Path(), settings=task.settings, time_limit_s=task.time_limit_s, resume=False
        )
        self.rows: list[dict[str, Any]] = []

    def store(self, row: dict[str, Any], samples: Any = ()) -> None:
        self.rows.append(row)


def measure(task: Task) -> Answer:
    """Run a job on this node, within Ray. The Ray worker never touches CUDA, the harness' own worker below it does.

    Raises:
        RuntimeError: the node has other code than the plan was made with, or a GPU of another model.
    """
    os.environ.update(task.variables)
    if _code(task.job) != task.code:
        raise RuntimeError("this node has another version of the harness or of the plugin; give all nodes the same one")
    variables = {}
    if task.gpu is not None:
        gpu = next(iter(visible_gpus()), None)
        if gpu is None or gpu.name != task.gpu:
            there = "no GPU" if gpu is None else f"a GPU {gpu.name}"
            raise RuntimeError(f"the sweep was planned for {task.gpu}, and Ray gave this task {there}")
        task.job.gpu |= {"gpu_index": gpu.index, "gpu_uuid": gpu.uuid}
        variables[VISIBLE] = gpu.uuid
    runner = _Rows(task)
    runner.serve([task.job], partial(WorkerProcess, variables))
    return Answer(runner.rows, dict(runner.summary.phases))


def _code(job: Job) -> tuple[str, ...]:
    registry = _registry(os.environ.get(PLUGINS_VARIABLE, ""))
    found = [name for name in job.work.implementations if name in registry]
    return (harness_hash(), *(code_hash(registry.get(name)) for name in found))


@cache
def _registry(folders: str) -> Registry:
    """Once for each value of the variable that names more folders with plugins."""
    return load_registry()


class RayCluster:
    """Runs a sweep's jobs as tasks of the cluster that this process is connected to.

    Attributes:
        gpu: the name of the cluster's GPUs; None where it has none.
    """

    def __init__(self, gpu: str | None) -> None:
        self.gpu = gpu

    def run(self, runner: Runner) -> None:
        """Hand every job to Ray at once, and store rows as tasks end. What Ray gives up is a typed row.

        The first exception (Ctrl-C, a full disk) cancels every task, and is raised here.
        """
        import ray

        # Ray would end a worker with each task that has a GPU, since it might hold one; ours never does.
        remote = ray.remote(max_calls=0)(measure)
        variables = {name: os.environ[name] for name in _HANDED_ON if name in os.environ}
        pending: dict[Any, Job] = {}
        try:
            for job in runner.jobs:
                on_gpu = job.work.point.device == "cuda"
                if on_gpu:
                    # Of rows that are written here, where there may be another GPU, or none.
                    job.gpu = {"gpu": self.gpu}
                if job.refusal:
                    runner.serve([job])
                    continue
                task = Task(
                    job, runner.settings, runner.time_limit_s, self.gpu if on_gpu else None, _code(job), variables
                )
                pending[remote.options(**options(job)).remote(task)] = job
            while pending:
                # In slices: a signal's handler runs only between two of them.
                ended, _ = ray.wait(list(pending), num_returns=1, timeout=WAIT_SLICE_S)
                for reference in ended:
                    self._take(runner, pending.pop(reference), reference)
        except BaseException:
            _cancel(list(pending))
            raise

    @staticmethod
    def _take(runner: Runner, job: Job, reference: Any) -> None:
        import ray

        try:
            answer: Answer = ray.get(reference)
        except ray.exceptions.RayError as error:
            job.refusal = failure_of(error)
            runner.serve([job])
            return
        for row in answer.rows:
            runner.store(row)
        runner.spent(answer.phases)
        runner.ended(job)


def options(job: Job) -> dict[str, Any]:
    """What Ray is told of a job's task: one CPU, and a whole GPU where the job needs one, so that no GPU ever serves
    two timings."""
    return {
        "num_cpus": 1,
        "num_gpus": 1 if job.work.point.device == "cuda" else 0,
        "max_retries": RETRIES,
        "name": job.work.title,
    }


def failure_of(error: Exception) -> tuple[str, str]:
    """Status and reason of a job whose task Ray gave up."""
    from ray import exceptions

    cause = error.cause if isinstance(error, exceptions.RayTaskError) else error
    if isinstance(error, exceptions.RayTaskError):
        return "crashed", f"the Ray task failed: {describe(cause)}"
    status = "out_of_memory" if isinstance(error, exceptions.OutOfMemoryError) else "crashed"
    return status, f"Ray gave up after {RETRIES} retries: {describe(error)}"


def _cancel(references: list[Any]) -> None:
    """End tasks: those at work by an interrupt, on which they end their workers; what is left then by force."""
    import ray

    if not references:
        return
    for reference in references:
        ray.cancel(reference)
    _, left = ray.wait(references, num_returns=len(references), timeout=PATIENCE_S)
    for reference in left:
        ray.cancel(reference, force=True)


@contextmanager
def connect(address: str) -> Iterator[RayCluster]:
    """Connect to a cluster, and disconnect at the end.

    Args:
        address: ``local`` starts a cluster on this machine, which ends with this process; ``auto`` finds the one that
            runs here; or the address of a cluster.

    Raises:
        UserError: Ray is not installed, there is no cluster at this address, or its GPUs are of several models.
    """
    # Ray reports its use to its makers unless told not to, and looks for a service of metrics that only its larger
    # package has. Both are read when it is imported.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_enable_metrics_collection", "0")
    try:
        import ray
    except ImportError as error:
        raise UserError(f"--ray needs the package ray: pip install -e '.[ray]' ({error})") from error
    _check_answers(address)
    # Ray installs a handler of its own, and the command line's is to stay.
    handler = signal.getsignal(signal.SIGTERM)
    new: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **new)
    except Exception as error:
        reason = str(error).strip()[:300] or type(error).__name__
        raise UserError(f"--ray {address}: no Ray cluster: {reason}") from error
    finally:
        signal.signal(signal.SIGTERM, handler)
    try:
        yield RayCluster(_gpu_model(address))
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """`UserError` where nothing takes a connection at an address, ``host:port`` or ``ray://host:port``; with ``auto``
    at the one in RAY_ADDRESS. Any other word is Ray's to judge."""
    import ray

    asked = (os.environ.get("RAY_ADDRESS") or address) if address == "auto" else address
    try:
        parts = urlsplit(asked if "://" in asked else f"//{asked}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UserError(f"--ray {address}: {error}") from error
    if host is None or port is None:
        return
    # Ray takes a loopback address for the node's own, and may listen at that one alone.
    loopback = host == "localhost" or host.startswith("127.") or host == "::1"
    hosts = [host, ray.util.get_node_ip_address()] if loopback else [host]
    for number, each in enumerate(hosts):
        try:
            socket.create_connection((each, port), CONNECT_S).close()
        except OSError as error:
            if number == len(hosts) - 1:
                reason = error.strerror or str(error)
                raise UserError(f"--ray {address}: no Ray cluster: {host}:{port}: {reason}") from error
        else:
            return


def _gpu_model(address: str) -> str | None:
    """The name of the cluster's GPUs, asked on a node that has some."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) >= 1]
    if not nodes:
        return None
    models = sorted({key.split(":", 1)[1] for node in nodes for key in node if key.startswith("accelerator_type:")})
    if len(models) > 1:
        raise UserError(f"--ray {address}: GPUs of several models ({', '.join(models)}); run the sweep on each apart")
    name: str | None = ray.get(ray.remote(num_gpus=1)(gpu_name).remote())
    return name

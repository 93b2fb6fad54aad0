"""A sweep over several GPUs of one machine: one worker process for each, jobs handed out as GPUs become free."""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from harness.environment import VISIBLE, GpuMonitor, visible_devices
from harness.errors import UserError
from harness.process import WorkerProcess, side_by_side
from harness.runner import Job, Runner


@dataclass(frozen=True)
class Gpu:
    """A GPU: its index as nvidia-smi counts, its UUID, its name."""

    index: int | None
    uuid: str
    name: str


def visible_gpus() -> list[Gpu]:
    """The machine's GPUs that CUDA_VISIBLE_DEVICES does not hide, in its order; from NVML, CUDA stays untouched."""
    try:
        import pynvml

        pynvml.nvmlInit()
        named = visible_devices()
        if named is None:
            named = [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = [_uuid(pynvml, name) for name in named]
    except Exception:  # no NVML, or none of its devices
        return []
    monitors = [GpuMonitor(uuid) for uuid in uuids]
    return [Gpu(one.index, one.uuid, one.name) for one in monitors if one.uuid is not None and one.name is not None]


def _uuid(nvml: object, name: str) -> str:
    if not name.isdigit():
        return name
    found = nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(int(name)))  # type: ignore[attr-defined]
    return found.decode() if isinstance(found, bytes) else str(found)


def chosen_gpus(text: str) -> list[Gpu]:
    """The GPUs that ``--gpus`` names.

    Args:
        text: ``all``, or places among the visible GPUs, counted from 0, with commas between them.

    Raises:
        UserError: no GPU, a place that there is not or that is named twice, or GPUs of several models, whose times
            must not be mixed in one file.
    """
    found = visible_gpus()
    if not found:
        raise UserError(f"--gpus {text}: this machine has no NVIDIA GPU, or CUDA_VISIBLE_DEVICES hides it")
    if text == "all":
        chosen = found
    else:
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isdecimal() for part in parts):
            raise UserError(f"--gpus {text}: expected all, or whole numbers such as 0,1")
        places = [int(part) for part in parts]
        for place in places:
            if place >= len(found):
                there = "GPU 0 only" if len(found) == 1 else f"GPUs 0 to {len(found) - 1}"
                raise UserError(f"--gpus {text}: no GPU {place}; this machine shows {there}")
        if len(set(places)) < len(places):
            raise UserError(f"--gpus {text}: names a GPU twice")
        chosen = [found[place] for place in places]
    models = list(dict.fromkeys(gpu.name for gpu in chosen))
    if len(models) > 1:
        raise UserError(
            f"--gpus {text}: GPUs of several models ({', '.join(models)}); run the sweep on each model apart"
        )
    return chosen


class HandOut:
    """Jobs for several GPUs, handed out one by one; each job goes to one GPU.

    A GPU stays with a group of jobs, which share a worker process, until none of it is left. Then it takes the next
    group that no GPU is at, and after those joins the one with the most work left for each of its GPUs.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._lock = threading.Lock()
        self._left: dict[tuple[str, ...], deque[Job]] = {}
        self._at: Counter[tuple[str, ...]] = Counter()
        for job in jobs:
            self._left.setdefault(job.work.group, deque()).append(job)

    def to(self, gpu: Gpu) -> Iterator[Job]:
        """The jobs of one GPU, each chosen when it is asked for."""
        group: tuple[str, ...] | None = None
        while True:
            with self._lock:
                if group is None or not self._left[group]:
                    if group is not None:
                        self._at[group] -= 1
                    group = self._next_group()
                    if group is None:
                        return
                    self._at[group] += 1
                job = self._left[group].popleft()
            job.gpu = {"gpu_index": gpu.index, "gpu_uuid": gpu.uuid}
            yield job

    def _next_group(self) -> tuple[str, ...] | None:
        groups = [group for group, jobs in self._left.items() if jobs]
        alone = next((group for group in groups if not self._at[group]), None)
        return alone or max(groups, key=self._share, default=None)

    def _share(self, group: tuple[str, ...]) -> float:
        """Seconds of work that each GPU would have with one more at this group."""
        return sum(job.seconds for job in self._left[group]) / (self._at[group] + 1)


class SeveralGpus:
    """Runs a sweep's jobs on several GPUs of this machine, never two at once on one of them."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self.gpus = list(gpus)

    @property
    def gpu(self) -> str | None:
        return self.gpus[0].name

    def run(self, runner: Runner) -> None:
        """One thread and one worker process for each GPU; what is timed on the CPU comes last, job by job, since such
        jobs would disturb each other.

        The first exception (Ctrl-C, a full disk) ends every worker, and is raised here.
        """
        on_gpus = [job for job in runner.jobs if not timed_on_cpu(job)]
        hand_out = HandOut(on_gpus)
        stop = threading.Event()

        def serve(gpu: Gpu) -> None:
            # By its UUID: CUDA and NVML may count in another order.
            start: Callable[[], WorkerProcess] = partial(WorkerProcess, {VISIBLE: gpu.uuid}, stop)
            runner.serve(hand_out.to(gpu), start)

        side_by_side([partial(serve, gpu) for gpu in self.gpus], len(self.gpus), stop)
        runner.serve(job for job in runner.jobs if timed_on_cpu(job))


def timed_on_cpu(job: Job) -> bool:
    """Whether a job's times are of the CPU, which all GPUs' workers share."""
    return job.work.kind == "point" and job.work.point.device == "cpu" and job.refusal is None


@contextmanager
def only(gpus: Sequence[Gpu]) -> Iterator[None]:
    """Let this process and its children see these GPUs alone, the first of them first."""
    before = os.environ.get(VISIBLE)
    os.environ[VISIBLE] = ",".join(gpu.uuid for gpu in gpus)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VISIBLE]
        else:
            os.environ[VISIBLE] = before

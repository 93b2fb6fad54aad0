"""Steps under the profiler, after those that count: what the GPU is busy with, which the wall clock does not say.

Of one process the busy time of a step; of several the share of communication. There NCCL's kernels wait for the other
processes, and a busy time would count their waiting.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from harness.compilation import CompilationCounter
from harness.errors import one_line
from harness.profiling import communication_shares, kernels_in_windows, profile, union_ns, window
from harness.training.processes import Place

if TYPE_CHECKING:
    from harness.training.loop import Trainer

#: Steps whose busy time is taken.
STEPS = 3
_ENDED = "the corpus could not be read any further"


def sees_busy(place: Place) -> bool:
    """Whether a busy time is the step's own work: on a GPU, where no other process was started."""
    return place.device.type == "cuda" and dist.get_world_size() == 1


def busy_ms(trainer: Trainer, number: int) -> list[float]:
    """`STEPS` more steps under the profiler: in how many milliseconds of each some kernel runs. Empty where that says
    nothing (`sees_busy`), and with a note where the corpus has ended, a step failed, or the profiler lost something.

    Args:
        number: of the first of them.
    """
    if not sees_busy(trainer.place):
        return []
    batches = read_ahead(trainer, number, STEPS)
    if batches is None:
        trainer.times.notes.append(f"busy times were not measured: {_ENDED}")
        return []
    order: list[str] = []

    def steps() -> None:
        for i, its in enumerate(batches):
            with window(f"step {i}", order):
                trainer.step(number + i, counts=False, batches=its)

    compilations = CompilationCounter()
    try:
        found = kernels_in_windows(profile(steps), order)
        if compiled := compilations.since_start():
            raise RuntimeError(f"{compiled} compilations happened meanwhile")
        busy = [union_ns(found[name]) / 1e6 for name in order]
        if not all(busy):
            raise RuntimeError("the profiler recorded no kernel of a step")
    except Exception as error:
        # The steps that count are done, and stand: running out of memory under the profiler takes nothing from them.
        trainer.times.notes.append(without_busy(error))
        return []
    return busy


def without_busy(error: Exception) -> str:
    """A row's note in place of a busy time."""
    return f"busy times were not measured: {one_line(str(error))[:200]}"


def without_communication(why: object) -> str:
    """A row's note in place of the share of communication."""
    return f"communication was not measured: {one_line(str(why))[:200]}"


def communicates(place: Place) -> bool:
    """Whether a profiler sees communication: of several processes on GPUs."""
    return place.world > 1 and place.device.type == "cuda"


def communication(trainer: Trainer, number: int) -> tuple[float, float] | None:
    """Two more steps under the profiler: the second's share with communication and with exposed communication
    (`communication_shares`), mean over the processes, each of which calls it. None where there is none to measure
    (`communicates`), and with a note where the corpus has ended, a step failed on every process, or a profiler lost
    something.

    Args:
        number: of the first of them.
    """
    place, order = trainer.place, list[str]()
    if not communicates(place):
        return None
    batches = read_ahead(trainer, number, 2)
    if batches is None:
        trainer.times.notes.append(without_communication(_ENDED))
        return None

    def steps() -> None:
        # The profilers of the processes begin at different times: in the first step one waits for the other.
        trainer.step(number, counts=False, batches=batches[0])
        with window("step", order):
            trainer.step(number + 1, counts=False, batches=batches[1])

    try:
        shares = communication_shares(kernels_in_windows(profile(steps), order)["step"])
    except Exception as error:
        # As with busy times the steps that count stand. Running out of memory strikes all processes alike; one that
        # fails alone is lost to the others, which wait for it.
        shares = None
        trainer.times.notes.append(without_communication(error))
    # Not a number, where one process has none, is none of all.
    sums = torch.tensor(shares or (math.nan, math.nan), device=place.device, dtype=torch.float64)
    dist.all_reduce(sums, group=place.group)
    share, exposed = (sums / place.world).tolist()
    return None if math.isnan(share) else (share, exposed)


def read_ahead(trainer: Trainer, number: int, steps: int) -> list[list[Tensor]] | None:
    """This process' micro-batches of so many steps from ``number`` on; None on every process, each of which calls it,
    where one cannot read them: a stream may end, and its connection break, once the run itself is done."""
    try:
        found = [list(trainer.corpus.batches(number + i)) for i in range(steps)]
    except Exception:
        found = []
    lacking = torch.tensor(float(not found), device=trainer.place.device)
    dist.all_reduce(lacking, op=dist.ReduceOp.MAX, group=trainer.place.group)
    return None if lacking else found

"""Two kinds of training step side by side: what one is faster by.

Rows of two runs say little about a difference of a few per cent, since the card's clock moves between them. Here both
train in one process, in rounds: each round builds one model, takes a few steps, frees it, and does the same with the
other, in random order; a round gives one ratio of two medians that lie a minute apart. (Steps of two models in turn
would lie closer, but two models of a size worth training do not fit into one GPU's memory.)

The two are steps of two implementations, or of two routings; or, where several processes train, of each process alone
and of all together, with the same micro-batches on each GPU. Alone, all processes compute at the same time and none
waits for another. A round's time is that of the slowest process, for which a step together waits. So time alone / time
together is the efficiency of scaling: 1 where communication and waiting cost nothing.

Steps of small kernels are bound by the host that launches them, and then the wall clock says nothing of what the GPU
does. So one process on a GPU takes a few more rounds under the profiler (`harness/training/profiled.py`), and the busy
times of the two sides give a second ratio. They come when all that is timed is over: where a profiler has run, launches
may take longer from then on.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console

from harness.compilation import watch_triton
from harness.errors import UserError
from harness.interface import Implementation, RoutingSpec
from harness.record import utc_now
from harness.registry import load_registry
from harness.statistics import ratio_interval
from harness.timing import pair_order
from harness.training import profiled, rows
from harness.training.config import Config
from harness.training.data import open_corpus
from harness.training.experts import point_of
from harness.training.loop import WARM_UP, Times, Trainer, failures, say_communication
from harness.training.processes import Place, environment_rank, process_group

#: Of a round, after the warm-up.
STEPS = 8
#: Rounds for busy times.
BUSY_ROUNDS = 3
_Taken = TypeVar("_Taken")


@dataclass(frozen=True)
class Side:
    """What takes turns with another.

    Attributes:
        place: of the processes that train together, which may be fewer than were started.
        dealt: the configuration whose micro-batches this process takes, by its place among all of them.
    """

    name: str
    config: Config
    plugin: Implementation
    place: Place
    dealt: Config


def compare(
    out: Console,
    config: Config,
    other: Config | None,
    *,
    device: str,
    rows_folder: Path,
    rounds: int,
    timeout_s: float,
) -> None:
    """Write a ratio row, time of ``other``'s step over ``config``'s (above 1: ``config`` is faster), and a measurement
    row of each; a second ratio row of busy times, where every turn gave them. The two may differ in implementation and
    routing.

    Args:
        other: None: ``config``'s, on each process alone, so that the ratio is the efficiency of scaling.

    Raises:
        UserError: what stands in the way, and what to change.
    """
    registry = load_registry()
    config = replace(config, steps=WARM_UP + STEPS)
    plugin = registry.get(config.implementation)
    point_of(plugin, config, device, config.routing)
    rival = None if other is None else registry.get(other.implementation)
    if other is not None and rival is not None:
        other = replace(other, steps=WARM_UP + STEPS)
        point_of(rival, other, device, other.routing)
    watch_triton()
    with process_group(device, timeout_s, config.shard) as place:
        together = Side(plugin.label, config, plugin, place, config)
        if other is not None and rival is not None:
            sides = Side(rival.label, other, rival, place, other), together
            if other.routing != config.routing:
                named = (replace(side, name=f"{side.name} by {side.config.routing}") for side in sides)
                sides = next(named), next(named)
        else:
            sides = _alone(together, timeout_s), replace(together, name=f"{place.world} processes together")
        bases = [rows.base_row(side.config, side.plugin, side.place.world, device) for side in sides]
        measured: list[dict[str, Any]] = [{}, {}]
        pairs: list[tuple[float, float]] = []
        times = Times(), Times()
        guards = [partial(failures, base, rows_folder, place) for base in bases]
        for turn, first in enumerate(pair_order(rounds, config.seed)):
            medians = [0.0, 0.0]
            for i in (first, 1 - first):
                with guards[i]():
                    medians[i], measured[i] = _turn(sides[i], bases[i], times[i], place)
            pairs.append((medians[0], medians[1]))
            if environment_rank() == 0:
                said = " against ".join(f"{side.name} {ms:,.1f} ms" for side, ms in zip(sides, medians, strict=True))
                out.print(f"round {turn + 1}/{rounds}: {said}", highlight=False)
        busy_pairs = _profile(sides, times, measured, place, config.seed)
        if environment_rank() == 0:
            for row in measured:
                rows.append(rows_folder, row)
            configs = sides[0].config, sides[1].config
            row = _ratio_row(measured, configs, pairs)
            low, high = row["ci95"]
            path = rows.append(rows_folder, row)
            what = f"efficiency of {place.world} processes " if other is None else ""
            said = f"{what}{_number(row)}{say_communication(measured[1])}"
            if busy_pairs:
                row = _ratio_row(measured, configs, busy_pairs, busy=True)
                rows.append(rows_folder, row)
                shares = [f"{100 * share:.0f} %" for share in map(rows.busy_share, measured) if share is not None]
                said += f"; busy times of the GPU {_number(row)}, busy {' and '.join(shares)} of the step"
            out.print(f"{said}; rows in {path}", highlight=False, soft_wrap=True)
            doubt = _doubt(config, other, low, high)
            if doubt:
                out.print(f"[yellow]{doubt}[/]", highlight=False, soft_wrap=True)


def _number(row: Mapping[str, Any]) -> str:
    low, high = row["ci95"]
    return f"{row['value']:.3f} [{low:.3f}, {high:.3f}]"


def _doubt(config: Config, other: Config | None, low: float, high: float) -> str:
    """What to think of an interval of steps against their own like that leaves out 1; empty where it is none."""
    if other is None or low <= 1 <= high:
        return ""
    if (other.implementation, other.routing, other.m_tile) != (config.implementation, config.routing, config.m_tile):
        return ""
    return (
        "the same steps on both sides, and 1 lies outside: so do five in a hundred such intervals on a quiet machine. "
        "Measure again, and call nothing faster that differs by as little"
    )


def _alone(together: Side, timeout_s: float) -> Side:
    """Each process by itself, with the micro-batches that it has in a step of all.

    Raises:
        UserError: there is one process.
    """
    config, world = together.config, together.place.world
    if world == 1:
        raise UserError(
            "--against alone: needs several processes: torchrun --nproc-per-node 2 -m harness.cli train ..."
        )
    # What does not divide evenly is refused where the corpus of all is opened.
    own = replace(config, batch=max(config.micro_batches // world, 1) * config.micro_batch, shard=0)
    return replace(together, name="each process alone", config=own, place=together.place.alone(timeout_s))


def _turn(side: Side, base: Mapping[str, Any], times: Times, everyone: Place) -> tuple[float, dict[str, Any]]:
    """Build one side's model and take its steps, on every process at the same time.

    Args:
        times: of the earlier rounds; the slowest process' steps are added.

    Returns:
        The slowest process' median step in ms, and the row of all rounds so far.
    """
    cuda = everyone.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(side.config, side.plugin, side.place, open_corpus(side.dealt, everyone.rank, everyone.world))
    dist.barrier()
    lines = [trainer.step(number, counts=number >= WARM_UP) for number in range(WARM_UP + STEPS)]
    own: dict[str, Any] = {"times": trainer.times, "loss": lines[-1]["loss"], "peak": trainer.peak_bytes()}
    every: list[Any] = [None] * everyone.world
    dist.all_gather_object(every, own)
    slowest = max(every, key=lambda its: statistics.median(its["times"].step_ms))
    times.step_ms += slowest["times"].step_ms
    times.states += slowest["times"].states
    times.compiled += sum(its["times"].compiled for its in every)
    trainer.times = times
    peak = max(its["peak"] for its in every) if cuda else None
    row = trainer.row(base, slowest["loss"], None, peak)
    del trainer
    free(everyone)
    return statistics.median(slowest["times"].step_ms), row


def free(place: Place) -> None:
    """Give back what the model before held: two do not fit into one GPU's memory."""
    gc.collect()
    if place.device.type == "cuda":
        torch.cuda.empty_cache()


def _profile(
    sides: tuple[Side, Side],
    times: tuple[Times, Times],
    measured: list[dict[str, Any]],
    everyone: Place,
    seed: int,
) -> list[tuple[float, float]]:
    """More rounds, which nothing is timed in: busy times, or the share of communication, are added to the rows.

    Returns:
        Each round's two median busy times in ms; none where a turn gave no busy time.
    """
    if not profiled.sees_busy(everyone):
        for row, side, its in zip(measured, sides, times, strict=True):
            if profiled.communicates(side.place):
                shares = _profiled_turn(side, its, everyone, profiled.communication, profiled.without_communication)
                rows.add_profiled(row, shares, (), its.notes)
        return []
    pairs = []
    for first in pair_order(BUSY_ROUNDS, seed):
        busy: list[list[float]] = [[], []]
        for i in (first, 1 - first):
            busy[i] = _profiled_turn(sides[i], times[i], everyone, profiled.busy_ms, profiled.without_busy) or []
            times[i].busy_ms += busy[i]
        if all(busy):
            pairs.append((statistics.median(busy[0]), statistics.median(busy[1])))
    for row, its in zip(measured, times, strict=True):
        rows.add_profiled(row, None, its.busy_ms, its.notes)
    return pairs if len(pairs) == BUSY_ROUNDS else []


def _profiled_turn(
    side: Side,
    times: Times,
    everyone: Place,
    take: Callable[[Trainer, int], _Taken],
    note: Callable[[Exception], str],
) -> _Taken | None:
    """What ``take`` makes of one side's steps; None, with a note, where something goes wrong: the steps that count are
    done, and stand."""
    try:
        return _more_steps(side, times, everyone, take)
    except Exception as error:
        times.notes.append(note(error))
    # Only here: the traceback held the model. A GPU after an error refuses this too, and the next turn says so.
    with suppress(RuntimeError):
        free(everyone)
    return None


def _more_steps(side: Side, times: Times, everyone: Place, take: Callable[[Trainer, int], _Taken]) -> _Taken:
    """What ``take`` makes of a model after its warm-up, given the number of its next step."""
    trainer = Trainer(side.config, side.plugin, side.place, open_corpus(side.dealt, everyone.rank, everyone.world))
    trainer.times = times
    for number in range(WARM_UP):
        trainer.step(number, counts=False)
    found = take(trainer, WARM_UP)
    del trainer
    free(everyone)
    return found


def _ratio_row(
    measured: list[dict[str, Any]], sides: tuple[Config, Config], pairs: list[tuple[float, float]], busy: bool = False
) -> dict[str, Any]:
    """The ratio of the two sides' rows; what it shares with them is the numerator's.

    Args:
        pairs: of each round the two times, of ``busy`` ones or by the wall clock.
    """
    only = ("implementation", "label", "latency_ms", "busy_ms", "training", "memory_bytes", "reason", "status", "notes")
    row: dict[str, Any] = {key: value for key, value in measured[0].items() if key not in only}
    for name, side in zip(("numerator", "denominator"), measured, strict=True):
        row |= {name: side["implementation"], f"{name}_label": side["label"]}
    if sides[0].routing != sides[1].routing:
        spec = RoutingSpec(sides[1].routing, seed=sides[1].seed, m_tile=sides[1].m_tile)
        row["denominator_routing"] = spec.as_dict()
    if measured[0]["variant"] != measured[1]["variant"]:
        row["denominator_variant"] = measured[1]["variant"]
    row["environment"] = _both(measured)
    row |= {"record": "ratio", "time_kind": "host", "timestamp": utc_now(), "status": "ok", "reason": ""}
    if busy:
        row |= {"time_kind": "busy", "basis": "busy", "basis_reason": "a whole training step is no graph"}
        # Clocks were read in the rounds before.
        row["environment"] = {key: value for key, value in row["environment"].items() if key != "during_samples"}
    reasons = [side["reason"] for side in measured if side["status"] != "ok"]
    if reasons:
        row |= {"status": "unstable", "reason": "; ".join(dict.fromkeys(reasons))}
    return {**row, **ratio_interval(pairs)}


def _both(measured: list[dict[str, Any]]) -> Mapping[str, Any]:
    """The environment, with the packages of both."""
    machine = dict(measured[0]["environment"])
    return {**machine, "packages": {**machine["packages"], **measured[1]["environment"]["packages"]}}

"""Two implementations' training steps side by side: what one is faster by.

Rows of two runs say little about a difference of a few per cent, since the card's clock moves between them. Here both
train in one process, in rounds: each round builds one model, takes a few steps, frees it, and does the same with the
other, in random order; a round gives one ratio of two medians that lie a minute apart. (Steps of two models in turn
would lie closer, but two models of a size worth training do not fit into one GPU's memory.)
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from harness.compilation import watch_triton
from harness.interface import RoutingSpec
from harness.record import utc_now
from harness.registry import load_registry
from harness.statistics import ratio_interval
from harness.timing import pair_order
from harness.training import rows
from harness.training.config import Config
from harness.training.experts import point_of
from harness.training.loop import WARM_UP, Times, Trainer, failures
from harness.training.processes import environment_rank, process_group

#: Of a round, after the warm-up.
STEPS = 8


def compare(
    out: Console,
    config: Config,
    other: Config,
    *,
    device: str,
    rows_folder: Path,
    rounds: int,
    timeout_s: float,
) -> None:
    """Write a ratio row, time of ``other``'s step over ``config``'s (above 1: ``config`` is faster), and a measurement
    row of each. The two may differ in implementation and routing.

    Raises:
        UserError: what stands in the way, and what to change.
    """
    registry = load_registry()
    sides = replace(other, steps=WARM_UP + STEPS), replace(config, steps=WARM_UP + STEPS)
    plugins = [registry.get(side.implementation) for side in sides]
    for side, plugin in zip(sides, plugins, strict=True):
        point_of(plugin, side, device, side.routing)
    watch_triton()
    pairs = []
    with process_group(device, timeout_s) as place:
        bases = [rows.base_row(side, plugin, place.world, device) for side, plugin in zip(sides, plugins, strict=True)]
        measured: list[dict[str, Any]] = [{}, {}]
        times = Times(), Times()
        for turn, first in enumerate(pair_order(rounds, config.seed)):
            medians = [0.0, 0.0]
            for i in (first, 1 - first):
                with failures(bases[i], rows_folder, place):
                    if device == "cuda":
                        torch.cuda.reset_peak_memory_stats()
                    trainer = Trainer(sides[i], plugins[i], place)
                    trainer.times = times[i]
                    lines = [trainer.step(number, counts=number >= WARM_UP) for number in range(WARM_UP + STEPS)]
                    medians[i] = statistics.median(times[i].step_ms[-STEPS:])
                    measured[i] = trainer.row(bases[i], lines[-1]["loss"], None, trainer.peak_bytes())
                    del trainer
                    gc.collect()
                    if device == "cuda":
                        torch.cuda.empty_cache()
            pairs.append((medians[0], medians[1]))
            if environment_rank() == 0:
                said = " against ".join(
                    f"{plugin.label} {ms:,.1f} ms" for plugin, ms in zip(plugins, medians, strict=True)
                )
                out.print(f"round {turn + 1}/{rounds}: {said}", highlight=False)
        if environment_rank() == 0:
            for row in measured:
                rows.append(rows_folder, row)
            row = _ratio_row(measured, sides, pairs)
            low, high = row["ci95"]
            path = rows.append(rows_folder, row)
            out.print(f"{row['value']:.3f} [{low:.3f}, {high:.3f}]; rows in {path}", highlight=False, soft_wrap=True)


def _ratio_row(
    measured: list[dict[str, Any]], sides: tuple[Config, Config], pairs: list[tuple[float, float]]
) -> dict[str, Any]:
    """The ratio of the two sides' rows; what it shares with them is the numerator's."""
    only = ("implementation", "label", "latency_ms", "training", "memory_bytes", "reason", "status", "notes")
    row: dict[str, Any] = {key: value for key, value in measured[0].items() if key not in only}
    for name, side in zip(("numerator", "denominator"), measured, strict=True):
        row |= {name: side["implementation"], f"{name}_label": side["label"]}
    if sides[0].routing != sides[1].routing:
        spec = RoutingSpec(sides[1].routing, seed=sides[1].seed, m_tile=sides[1].m_tile)
        row["denominator_routing"] = asdict(spec)
    row["environment"] = _both(measured)
    row |= {"record": "ratio", "time_kind": "host", "timestamp": utc_now(), "status": "ok", "reason": ""}
    reasons = [side["reason"] for side in measured if side["status"] != "ok"]
    if reasons:
        row |= {"status": "unstable", "reason": "; ".join(dict.fromkeys(reasons))}
    return {**row, **ratio_interval(pairs)}


def _both(measured: list[dict[str, Any]]) -> Mapping[str, Any]:
    """The environment, with the packages of both."""
    machine = dict(measured[0]["environment"])
    return {**machine, "packages": {**machine["packages"], **measured[1]["environment"]["packages"]}}

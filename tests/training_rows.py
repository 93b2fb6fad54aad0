"""Rows of training steps as `moebench train` writes them, with made-up times and a made-up machine."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

from harness.record import validate
from harness.registry import load_registry
from harness.training import pairs, rows
from harness.training.config import Config, load_config

GPU = "NVIDIA H200"
#: Seconds of one block and of the rest, for a micro-batch of 7B: made up, and of no implementation.
BLOCK, REST = 0.024, 0.06
_clock = itertools.count()


@functools.cache
def _base(config: Config, world: int) -> dict[str, Any]:
    return rows.base_row(config, load_registry().get(config.implementation), world, "cpu")


def step(
    configuration: str = "7B",
    slower: float = 1.0,
    world: int = 1,
    gpu: str = GPU,
    unstable: str = "",
    peak: int = 100 * 2**30,
    communication: tuple[float, float] | None = None,
    validation_loss: float | None = None,
    busy: float | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """A measured step, ``slower`` times as long as ours, of which the GPU is ``busy`` for that share; with a
    ``validation_loss`` a run for its losses alone."""
    config = load_config(configuration, {"steps": 11, **changes})
    # A row of a test's own: one that changes it changes no other.
    base = {**copy.deepcopy(_base(config, world)), "measured_on": "cuda"}
    base["environment"] = {**base["environment"], "gpu": gpu, "measured_on": "cuda"}
    micro_batch = (BLOCK * (4 / 3 if config.recompute else 1) * config.layers + REST) * slower
    median = 1e3 * micro_batch * config.micro_batches / world
    times = [median * (1 + 0.002 * (i - 4)) for i in range(9)]
    losses = 5.4321, validation_loss
    its = None if validation_loss else times
    at_work = [] if busy is None else [busy * median * (1 + 0.01 * i) for i in (-1, 0, 1)]
    return _checked(
        rows.measured_row(base, config, world, its, *losses, peak, [], None, unstable, communication, at_work)
    )


def failed(status: str, reason: str, configuration: str = "7B", **changes: Any) -> dict[str, Any]:
    measured = step(configuration, **changes)
    numbers = ("latency_ms", "busy_ms", "training", "memory_bytes", "notes")
    row = {key: value for key, value in measured.items() if key not in numbers}
    return _checked(rows.failed_row(row, status, reason))


def in_turns(
    numerator: dict[str, Any], denominator: dict[str, Any], value: float, apart: float = 0.004, busy: bool = False
) -> dict[str, Any]:
    """The ratio row of two steps' rows, by the wall clock or of ``busy`` times."""
    config = load_config("7B")
    sides = [config, config]
    for i, row in enumerate((numerator, denominator)):
        sides[i] = load_config("7B", {"routing": row["routing"]["method"]})
    times = [(value * (1 + apart * (i - 2.5)), 1.0) for i in range(6)]
    return _checked(pairs._ratio_row([numerator, denominator], (sides[0], sides[1]), times, busy))


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    n = next(_clock)
    row = {**row, "timestamp": f"2030-01-01T{n // 3600 % 24:02d}:{n // 60 % 60:02d}:{n % 60:02d}+00:00"}
    assert validate(row) == []
    return row


def session() -> list[dict[str, Any]]:
    """What an afternoon on one GPU leaves: 7B whole and recomputing against three others, 7B with fewer layers, sparse
    1.4B with token rounding against top-K; each comparison leaves both sides' rows and their ratio."""
    found: list[dict[str, Any]] = []
    whole = {"layers": 43, "batch": 24, "recompute": True}
    for name, slower in (("scattermoe", 1.41), ("sonicmoe_official", 1.04), ("torch_grouped_mm", 1.52)):
        ours, other = step(**whole), step(slower=slower, implementation=name, **whole)
        found += [other, ours, in_turns(other, ours, slower * 1.003)]
    for layers in (20, 24):
        found.append(step(layers=layers, batch=24))
    found.append(failed("out_of_memory", "torch.OutOfMemoryError: CUDA out of memory", layers=24, batch=24,
                        implementation="scattermoe"))  # fmt: skip
    top_k, nearest = step("1.4B-sparse", 0.6), step("1.4B-sparse", 0.57, routing="nearest")
    return [*found, top_k, nearest, in_turns(top_k, nearest, 1.05)]

"""A training step as a row of the store: operation ``training_step``."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import store
from harness.environment import environment
from harness.interface import Implementation, LayerSpec, RoutingSpec
from harness.record import SCHEMA_VERSION, utc_now
from harness.registry import code_hash
from harness.statistics import interval_only, summarise
from harness.training.config import Config, sharded_over
from harness.training.costs import utilisation

FILE = "training.jsonl"
OPERATION = "training_step"
#: How steps are timed: one after the other.
SUSTAINED = "sustained"


def variant(config: Config, world: int) -> str:
    """What else tells one training step from another: ``7B, 20 layers, 384 sequences, 50 steps, 16 processes, sharded
    over 8, recomputing``; sharded over all of them and computing nothing again go without saying."""
    plural = "es" if world > 1 else ""
    parts = [config.name, f"{config.layers} layers", f"{config.batch} sequences", f"{config.steps} steps"]
    parts += [f"{world} process{plural}"]
    over = sharded_over(config.shard, world)
    parts += [f"sharded over {over}"] if over < world else []
    return ", ".join([*parts, "recomputing"] if config.recompute else parts)


@dataclass(frozen=True)
class Asked:
    """What a `variant` says: configuration, layers and processes (0: nothing of them), the configuration's ``shard``,
    and the rest in words, ``shard`` too, without the run's number of steps."""

    configuration: str
    layers: int
    processes: int
    shard: int
    rest: str


def asked(text: str) -> Asked:
    """A variant taken apart; any text has one."""
    name, *parts = text.split(", ")
    numbers = {"layers": 0, "process": 0, "steps": 0}
    shard, rest = 0, []
    for part in parts:
        found = re.fullmatch(r"(\d{1,18}) (layers|process|steps)(?:es)?", part, re.ASCII)
        if found:
            numbers[found[2]] = int(found[1])
            continue
        rest.append(part)
        over = re.fullmatch(r"sharded over (\d{1,18})", part, re.ASCII)
        shard = int(over[1]) if over else shard
    return Asked(name, numbers["layers"], numbers["process"], shard, ", ".join(rest))


def base_row(
    config: Config, plugin: Implementation, world: int, device: str, losses_only: bool = False
) -> dict[str, Any]:
    """Everything but what came of it. ``shape.T`` is the tokens of a micro-batch on one process. A run that keeps no
    times has no ``mode``: what became of it takes the place of no timed step, nor does a timed one's failure of it."""
    machine = environment(device, plugin.distributions)
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    code = code_hash(plugin) + hashlib.sha256(sources).hexdigest()
    asked = {"operation": OPERATION, "config": config.as_dict(), "world_size": world}
    key = store.resume_key(asked, code, machine["packages"], machine["gpu"] or machine["cpu"] or "")
    return {
        "schema": SCHEMA_VERSION,
        "record": "measurement",
        "run_id": f"{utc_now()[:19].replace(':', '').replace('-', '')}-{uuid.uuid4().hex[:6]}",
        "timestamp": utc_now(),
        "sweep": "training",
        "operation": OPERATION,
        "variant": variant(config, world),
        "pass": "forward_backward",
        "implementation": plugin.name,
        "label": plugin.label,
        "shape": config.shape.as_dict(),
        "dtype": config.dtype,
        "layer": asdict(LayerSpec()),
        "routing": RoutingSpec(config.routing, seed=config.seed, m_tile=config.m_tile).as_dict(),
        "resume_key": key,
        "measured_on": device,
        "environment": machine,
        **({} if losses_only else {"mode": SUSTAINED}),
    }


def measured_row(
    base: Mapping[str, Any],
    config: Config,
    world: int,
    step_ms: Sequence[float] | None,
    loss: float,
    validation_loss: float | None,
    peak_bytes: int | None,
    notes: Sequence[str],
    during: Mapping[str, Any] | None,
    unstable: str = "",
    communication: tuple[float, float] | None = None,
    busy_ms: Sequence[float] = (),
) -> dict[str, Any]:
    """The row of a run's steps.

    Args:
        step_ms: whole steps, wall clock, warm; None: the GPU was shared, and the row has losses alone.
        loss: of the last step, nats a token.
        validation_loss: after it, with top-K; None where there was none.
        peak_bytes: the most that any process' GPU had allocated; None on a CPU.
        during: the GPU's clock and power meanwhile.
        unstable: why the numbers are not to be trusted, if so.
        communication: the step's share with communication, and with nothing else; None: not profiled.
        busy_ms: of profiled steps; empty: none were.
    """
    machine = dict(base["environment"])
    row = {**base, "timestamp": utc_now(), "status": "ok", "reason": "", "notes": list(notes)}
    row.pop("mode", None)
    tokens_per_s = None
    if step_ms is None:
        row["notes"].append("no times: the GPU was shared with other runs")
    else:
        times = {**summarise(step_ms), "mode": SUSTAINED}
        tokens_per_s = config.step_tokens / times["median"] * 1e3
        row["latency_ms"] = times
    training: dict[str, Any] = {
        "tokens_per_s": tokens_per_s,
        "tokens_per_day_per_gpu": tokens_per_s and tokens_per_s * 86_400 / world,
        "mfu": tokens_per_s and utilisation(config, tokens_per_s, world, machine["gpu"]),
        "world_size": world,
        "layers": config.layers,
        "steps": config.steps,
        "loss": loss,
        "validation_loss": validation_loss,
    }
    row["training"] = training
    if peak_bytes is not None:
        row["memory_bytes"] = {"peak": peak_bytes}
    if during is not None:
        row["environment"] = {**machine, "during_samples": dict(during)}
    if unstable:
        row |= {"status": "unstable", "reason": unstable}
    add_profiled(row, communication, busy_ms)
    return row


def add_profiled(
    row: dict[str, Any], communication: tuple[float, float] | None, busy_ms: Sequence[float], notes: Sequence[str] = ()
) -> None:
    """What further steps under the profiler came to. Arguments as of `measured_row`; ``notes``: those that are new."""
    if communication is not None:
        row["training"]["communication"], row["training"]["exposed_communication"] = communication
    if busy_ms and "latency_ms" in row:
        row["busy_ms"] = interval_only(busy_ms)
    row["notes"] += [note for note in dict.fromkeys(notes) if note not in row["notes"]]


def busy_share(row: Mapping[str, Any]) -> float | None:
    """The GPU's busy time of a profiled step over the wall clock of one that was not; None where it was not measured.
    A little above 1 is possible: kernels may take longer under the profiler."""
    busy, latency = row.get("busy_ms"), row.get("latency_ms")
    return float(busy["median"] / latency["median"]) if busy and latency else None


def failed_row(base: Mapping[str, Any], status: str, reason: str) -> dict[str, Any]:
    """The row of a run that gave no numbers."""
    return {**base, "timestamp": utc_now(), "status": status, "reason": reason}


def append(folder: Path, row: Mapping[str, Any]) -> Path:
    """Add the row to the folder's file of training steps; returns it."""
    store.append(folder / FILE, row)
    return folder / FILE

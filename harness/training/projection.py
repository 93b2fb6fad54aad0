"""From the steps of few GPUs to tokens a day on many: a model of FSDP-2's communication, with its assumptions.

    python -m harness.training.projection results/nvidia_h200/training.jsonl --implementation sonicmoe_triton

For each micro-batch and block, FSDP-2 gathers the weights twice (for the forward, and again for the backward, since it
frees them in between) and sums and scatters the gradients once. A ring moves (W - 1) / W of a tensor through each GPU's
link. Communication runs beside computation: the next block's weights arrive while this one computes. So

    forward  = L · max(compute, gather) + gather
    backward = L · max(compute, gather + scatter) + scatter

with what cannot hide, the first gather and the last scatter, added once. Recomputing moves a forward's work into the
backward and gathers nothing more: a block's forward runs again while its weights are there for the backward. Embedding,
norms and head are gathered once a micro-batch, and their gradients scattered once, unhidden. The time of clipping and
of the optimiser falls as 1 / W.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness import store
from harness.errors import UserError, refusals
from harness.gpus import rates_of
from harness.training import costs
from harness.training import rows as rows_module
from harness.training.config import Config, load_config

#: The paper's: GPUs (H100) -> whose kernels trained its 7B model there, and tokens a day.
PAPER = {64: ("SonicMoE", 213e9), 96: ("ScatterMoE", 225e9)}
#: AdamW reads gradient, weight and two moments and writes three of them; clipping before reads the gradient twice and
#: writes it: fp32 bytes a parameter.
OPTIMISER_BYTES = 28 + 12
#: Of a table of projections (`cells`).
COLUMNS = ("GPUs", "B tokens/day", "nothing hidden – all hidden", "paper, H100", "a GPU", "exposed", "sequences a step",
           "state GiB")  # fmt: skip


@dataclass(frozen=True)
class Links:
    """What the GPUs are connected by: bytes a second in one direction for each GPU, and the share of it that
    collectives reach.

    Attributes:
        inside: NVLink within a machine (H100 and H200: 900 GB/s in both directions together).
        between: the network (one port of 400 Gb/s for each GPU, as in DGX H100).
        gpus: of one machine.
        efficiency: assumed; of a ring over many machines it is what is known least.
    """

    inside: float = 450e9
    between: float = 50e9
    gpus: int = 8
    efficiency: float = 0.8

    def bytes_per_s(self, world: int) -> float:
        """Of a ring over ``world`` GPUs: its slowest link. Eight GPUs of a machine have a port each, so a collective
        over many machines has all their ports."""
        return (self.inside if world <= self.gpus else self.between) * self.efficiency


@dataclass(frozen=True)
class Compute:
    """Seconds of one micro-batch on one GPU without communication.

    Attributes:
        block: forward and backward of one block.
        rest: of embedding, head and loss.
        forward_share: the forward's part of a block's time.
        how: where the numbers come from.
    """

    block: float
    rest: float
    forward_share: float
    how: str


@dataclass(frozen=True)
class Projection:
    """Of a number of GPUs.

    Attributes:
        tokens_per_day: with the overlap of the model above.
        bounds: nothing hidden, everything hidden.
        exposed: the share of a step that waits for communication.
        state_bytes: weights, gradients and optimiser's state on each GPU.
        sequences: of a step. The configuration's, where its micro-batches divide among the GPUs.
    """

    gpus: int
    tokens_per_day: float
    bounds: tuple[float, float]
    exposed: float
    state_bytes: float
    sequences: int


def steps_of(rows: Iterable[Mapping[str, Any]], config: Config, implementation: str) -> list[Mapping[str, Any]]:
    """The rows of an implementation's training steps, routed by top-K, that tell what the configuration computes: on
    GPUs, with its name and layer shape, recomputing if it does; with any number of layers, GPUs and micro-batches."""
    return [
        row
        for row in rows
        if (row["record"], row["operation"], row["status"]) == ("measurement", rows_module.OPERATION, "ok")
        and row["measured_on"] == "cuda"
        and row["implementation"] == implementation
        and row["shape"] == config.shape.as_dict()
        and row["routing"]["method"] == "top_k"
        and row["variant"].split(", ")[0] == config.name
        and ("recomputing" in row["variant"].split(", ")) == config.recompute
        and row["training"]["tokens_per_s"] is not None
    ]


def compute_of(rows: Sequence[Mapping[str, Any]], config: Config, gpu: str) -> Compute:
    """What a micro-batch computes, from rows of steps on one GPU (`steps_of`).

    With two or more numbers of layers the time is fitted as a line; with one it is divided by FLOPs. The time of
    clipping and of the optimiser, by the memory's rate, is taken off. Only steps of one batch are used, since what else
    a step costs weighs the more the fewer micro-batches it has: those of the configuration's number of layers, else of
    the most numbers of layers, else of the most micro-batches. Of equal steps the median counts.

    Raises:
        UserError: no such row, or a GPU whose rates are not recorded.
    """
    rates = rates_of(gpu)
    if rates is None:
        raise UserError(f"no rates are recorded for {gpu} (harness/gpus.py)")
    batches: dict[int, dict[int, list[float]]] = {}
    for row in rows:
        if row["training"]["world_size"] == 1:
            own = _as_measured(config, row)
            optimiser = costs.parameters(own) * OPTIMISER_BYTES / rates.bytes_per_s
            micro_batch = (row["latency_ms"]["median"] / 1e3 - optimiser) / own.micro_batches
            batches.setdefault(own.micro_batches, {}).setdefault(own.layers, []).append(micro_batch)
    if not batches:
        raise UserError("no row of a step on one GPU: moebench train 7B --layers N")
    micro_batches, found = max(batches.items(), key=lambda batch: (config.layers in batch[1], len(batch[1]), batch[0]))
    seconds = {layers: statistics.median(its) for layers, its in found.items()}
    # A block's forward is a third of its FLOPs, a quarter where the backward computes it again.
    forward = 1 / 4 if config.recompute else 1 / 3
    batch = f"and {micro_batches} micro-batch{'es' * (micro_batches > 1)}"
    beyond = "" if config.layers in seconds else f", carried on to {config.layers} by the time of one layer"
    if len(seconds) > 1:
        slope, rest = np.polyfit(list(seconds), list(seconds.values()), 1)
        numbers = ", ".join(map(str, sorted(seconds)))
        if slope <= 0 or rest < 0:
            raise UserError(f"steps with {numbers} layers lie on no rising line: measure them again")
        return Compute(
            float(slope), float(rest), forward, f"a line through steps with {numbers} layers {batch}{beyond}"
        )
    ((layers, total),) = seconds.items()
    head = 6 * config.vocabulary * config.d
    # What is computed again are no model FLOPs, and none of it is the head's.
    again = 4 / 3 if config.recompute else 1.0
    share = head / (head + again * (costs.model_flops(replace(config, layers=layers)) - head))
    how = f"a step with {layers} layers {batch}, divided by FLOPs{beyond}"
    return Compute(total * (1 - share) / layers, total * share, forward, how)


def _as_measured(config: Config, row: Mapping[str, Any]) -> Config:
    """The configuration with the layers and the batch of a row's step."""
    tokens = row["latency_ms"]["median"] / 1e3 * row["training"]["tokens_per_s"]
    micro_batches = max(round(tokens / config.shape.T), 1)
    return replace(config, layers=int(row["training"]["layers"]), batch=micro_batches * config.micro_batch)


def check(rows: Sequence[Mapping[str, Any]], config: Config, gpu: str, links: Links) -> list[str]:
    """What the projection says of the steps on several GPUs among the rows, beside what they took, a line each.

    It goes by rows of one process with the same layers and as many micro-batches for each GPU, where there are any:
    then communication is all that is projected. Otherwise by all rows of one process.

    Raises:
        UserError: as `compute_of`.
    """
    steps = [(row, _as_measured(config, row), int(row["training"]["world_size"])) for row in rows]
    lines = []
    for row, own, world in steps:
        if world == 1:
            continue
        same = own.layers, own.micro_batches // world
        alike = [one for one, its, alone in steps if alone == 1 and (its.layers, its.micro_batches) == same]
        its = project(own, compute_of(alike or rows, own, gpu), world, gpu, links)
        ratio = its.tokens_per_day / (row["training"]["tokens_per_day_per_gpu"] * world)
        measured = row["training"].get("exposed_communication")
        exposed = "not measured" if measured is None else f"{measured:.1%} measured"
        lines.append(
            f"check: {row['variant']}: projected / measured = {ratio:.3f}; exposed communication {its.exposed:.1%} "
            f"projected, {exposed}"
        )
    return lines


def project(config: Config, compute: Compute, gpus: int, gpu: str, links: Links | None = None) -> Projection:
    """Tokens a day of the configuration on so many GPUs, each with at least one micro-batch a step.

    Raises:
        UserError: a GPU whose rates are not recorded.
    """
    links, rates = links or Links(), rates_of(gpu)
    if rates is None:
        raise UserError(f"no rates are recorded for {gpu} (harness/gpus.py)")
    every, layers = costs.parameters(config), config.layers
    block = (costs.parameters(replace(config, layers=layers + 1)) - every) * 1.0
    root = every - layers * block
    per_byte = (gpus - 1) / gpus / links.bytes_per_s(gpus)
    gather, scatter = 2 * block * per_byte, 4 * block * per_byte
    root_time = (2 + 4) * root * per_byte
    forward = compute.forward_share * compute.block
    backward = compute.block - forward
    computing = layers * compute.block + compute.rest
    communicating = layers * (2 * gather + scatter) + root_time
    overlapped = layers * (max(forward, gather) + max(backward, gather + scatter)) + compute.rest
    if gpus > 1:
        overlapped += gather + scatter + root_time
    own = max(config.micro_batches // gpus, 1)
    optimiser = every * OPTIMISER_BYTES / rates.bytes_per_s / gpus

    def rate(micro_batch: float) -> float:
        return 86_400 * gpus * own * config.shape.T / (own * micro_batch + optimiser)

    return Projection(
        gpus,
        rate(overlapped),
        (rate(computing + communicating), rate(max(computing, communicating))),
        (overlapped - computing) * own / (own * overlapped + optimiser),
        16 * every / gpus,
        gpus * own * config.micro_batch,
    )


def cells(its: Projection, configuration: str) -> tuple[tuple[float | None, str], ...]:
    """A line under `COLUMNS`: numbers, and what they read. The paper's are of its 7B."""
    billions, (low, high) = its.tokens_per_day / 1e9, (bound / 1e9 for bound in its.bounds)
    who, paper = PAPER.get(its.gpus, ("", None)) if configuration == "7B" else ("", None)
    return (
        (its.gpus, str(its.gpus)),
        (billions, f"{billions:.1f}"),
        (low, f"{low:.1f} – {high:.1f}"),
        (paper, f"{paper / 1e9:.0f} ({who})" if paper else "–"),
        (billions / its.gpus, f"{billions / its.gpus:.2f}"),
        (its.exposed, f"{100 * its.exposed:.1f} %"),
        (its.sequences, str(its.sequences)),
        (its.state_bytes, f"{its.state_bytes / 2**30:.1f}"),
    )


def assumptions(config: Config, links: Links) -> list[str]:
    """What a projection takes for granted, in sentences."""
    return [
        "A micro-batch's computation is that of one GPU.",
        f"{config.layers} layers, {config.batch} sequences a step, {config.micro_batch} a micro-batch, of which each "
        "GPU has at least one: where they do not divide among the GPUs, a step has other sequences.",
        "Each GPU has the memory for a micro-batch's activations beside its share of weights, gradients and AdamW's "
        "state.",
        f"Collectives reach {links.efficiency:.0%} of {links.inside / 1e9:.0f} GB/s within a machine of {links.gpus} "
        f"GPUs, and of {links.between / 1e9:.0f} GB/s for each GPU between machines.",
        "Communication slows no kernel down that computes beside it, and no GPU waits for a slower one.",
        "The paper's numbers are of H100, whose own configuration (layers, batch, sequence) it does not give.",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the projection of a file of rows."""
    parser = argparse.ArgumentParser(description="Tokens a day on many GPUs, from training steps on few.")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--implementation", required=True)
    parser.add_argument("--configuration", default="7B")
    parser.add_argument("--gpus", type=int, nargs="+", default=list(PAPER))
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--efficiency", type=float, default=Links.efficiency)
    given = parser.parse_args(arguments)
    with refusals("projection"):
        if min(given.gpus) < 1:
            raise UserError(f"--gpus {min(given.gpus)}: must be at least 1")
        if not 0 < given.efficiency <= 1:
            raise UserError(f"--efficiency {given.efficiency:g}: must be greater than 0 and at most 1")
        config = load_config(given.configuration, {"recompute": given.recompute or None})
        links = Links(efficiency=given.efficiency)
        found = steps_of(store.latest(store.read(given.rows)[0]), config, given.implementation)
        gpu = found[0]["environment"]["gpu"] if found else None
        if not gpu:
            raise UserError(f"{given.rows}: no training step of {given.implementation} on a GPU at {config.shape}")
        compute = compute_of(found, config, gpu)
        lines = [cells(project(config, compute, gpus, gpu, links), config.name) for gpus in given.gpus]
        texts = [COLUMNS, *([text for _, text in line] for line in lines)]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        for line in texts:
            print("   ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
        print("\n".join([*check(found, config, gpu, links), f"From {compute.how}.", *assumptions(config, links)]))


if __name__ == "__main__":
    main()

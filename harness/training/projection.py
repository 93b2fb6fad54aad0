"""From the steps of few GPUs to tokens a day on many: a model of FSDP-2's communication, with its assumptions.

    python -m harness.training.projection results/nvidia_h200/training.jsonl --implementation sonicmoe_triton

W GPUs hold R copies of the model, each sharded over N of them: N = W is FSDP, N = 8 hybrid sharding (HSDP) with a copy
on each machine. For each micro-batch and block, FSDP-2 gathers the weights twice (for the forward, and again for the
backward, since it frees them in between) and sums and scatters the gradients once. A ring moves (N - 1) / N of a tensor
through its slowest place (`Links`). Once a step, in the last micro-batch, each GPU's part of the gradients is summed
over the copies (reduce): a ring over each N-th GPU moves 2 (R - 1) / R of it. With p parameters in a block, gathered in
2 bytes and summed in 4,

    gather = 2p (N - 1) / N / rate(N),   scatter = 4p (N - 1) / N / rate(N),   reduce = 4p / N · 2 (R - 1) / R / rate(R)

Communication runs beside computation: the next block's weights arrive while this one computes. So of L blocks

    forward       = L · max(compute, gather) + gather
    backward      = L · max(compute, gather + scatter) + scatter
    last backward = L · max(compute, gather + scatter + reduce) + scatter + reduce

with what cannot hide, the first gather, the last scatter and the last reduce, added once, and no more than if nothing
ran beside anything. That a reduce goes beside gathers, where it has a link of its own, is not counted on. Recomputing
moves a forward's work into the backward and gathers nothing more: a block's forward runs again while its weights are
there for the backward. Embedding, norms and head are gathered once a micro-batch, their gradients scattered once, and
reduced once a step, unhidden. The time of clipping and of the optimiser falls as 1 / N, and so do 16 bytes a parameter
of weights, gradients and state.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness import store
from harness.errors import UserError, refusals
from harness.gpus import rates_of
from harness.shapes import MOST
from harness.training import costs
from harness.training import rows as rows_module
from harness.training.config import Config, load_config, sharded_over

#: The paper's: GPUs (H100) -> whose kernels trained its 7B model there, and tokens a day.
PAPER = {64: ("SonicMoE", 213e9), 96: ("ScatterMoE", 225e9)}
#: AdamW reads gradient, weight and two moments and writes three of them; clipping before reads the gradient twice and
#: writes it: fp32 bytes a parameter.
OPTIMISER_BYTES = 28 + 12
#: Of a table of projections (`cells`).
COLUMNS = ("GPUs", "sharded over", "B tokens/day", "nothing hidden – all hidden", "paper, H100", "a GPU", "exposed",
           "sequences a step", "state GiB")  # fmt: skip


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

    def bytes_per_s(self, gpus: int, every: int = 1) -> float:
        """What crosses the slowest place of a ring over ``gpus`` GPUs, each ``every``-th of those that train.

        A tensor enters and leaves a machine once, by the ports of all the ring's GPUs there, each of which carries its
        part (NCCL's rings leave by different ports): a collective over whole machines has all their ports, one with a
        single GPU on each machine that one's.
        """
        if gpus * every <= self.gpus:
            return self.inside * self.efficiency
        return min(self.inside, self.between * max(self.gpus // every, 1)) * self.efficiency


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
        over: GPUs that one copy of the model is sharded over.
        tokens_per_day: with the overlap of the model above.
        bounds: nothing hidden, everything hidden.
        exposed: the share of a step that waits for communication.
        state_bytes: weights, gradients and optimiser's state on each GPU.
        sequences: of a step. The configuration's, where its micro-batches divide among the GPUs.
    """

    gpus: int
    over: int
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
    """The configuration with the layers, the batch and the sharding of a row's step."""
    tokens = row["latency_ms"]["median"] / 1e3 * row["training"]["tokens_per_s"]
    # A row may claim any rate.
    micro_batches = max(round(min(tokens / config.shape.T, MOST // config.micro_batch)), 1)
    layers, shard = int(row["training"]["layers"]), rows_module.asked(row["variant"]).shard
    return replace(config, layers=layers, batch=micro_batches * config.micro_batch, shard=shard)


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
    """Tokens a day of the configuration, sharded as it says, on so many GPUs: each has at least one micro-batch a step.

    Raises:
        UserError: a GPU whose rates are not recorded, or a number that ``config.shard`` does not divide.
    """
    links, rates = links or Links(), rates_of(gpu)
    if rates is None:
        raise UserError(f"no rates are recorded for {gpu} (harness/gpus.py)")
    over = sharded_over(config.shard, gpus)
    copies = gpus // over
    every, layers = costs.parameters(config), config.layers
    block = (costs.parameters(replace(config, layers=layers + 1)) - every) * 1.0
    root = every - layers * block
    # Seconds a byte of the gathered tensor.
    within = (over - 1) / over / links.bytes_per_s(over)
    between = 2 * (copies - 1) / copies / over / links.bytes_per_s(copies, over)
    gather, scatter, reduce = 2 * block * within, 4 * block * within, 4 * block * between
    root_time = (2 + 4) * root * within
    forward = compute.forward_share * compute.block
    backward = compute.block - forward
    own = max(config.micro_batches // gpus, 1)
    # Of a step, but for the optimiser.
    computing = own * (layers * compute.block + compute.rest)
    communicating = own * (layers * (2 * gather + scatter) + root_time) + 4 * every * between
    plain, last = (max(backward, gather + scatter + more) for more in (0, reduce))
    overlapped = own * (layers * (max(forward, gather) + plain) + compute.rest + gather + scatter + root_time)
    overlapped += layers * (last - plain) + reduce + 4 * root * between
    overlapped = min(overlapped, computing + communicating)
    optimiser = every * OPTIMISER_BYTES / rates.bytes_per_s / over

    def rate(step: float) -> float:
        return 86_400 * gpus * own * config.shape.T / (step + optimiser)

    return Projection(
        gpus,
        over,
        rate(overlapped),
        (rate(computing + communicating), rate(max(computing, communicating))),
        (overlapped - computing) / (overlapped + optimiser),
        16 * every / over,
        gpus * own * config.micro_batch,
    )


def cells(its: Projection, configuration: str) -> tuple[tuple[float | None, str], ...]:
    """A line under `COLUMNS`: numbers, and what they read. The paper's are of its 7B."""
    billions, (low, high) = its.tokens_per_day / 1e9, (bound / 1e9 for bound in its.bounds)
    who, paper = PAPER.get(its.gpus, ("", None)) if configuration == "7B" else ("", None)
    return (
        (its.gpus, str(its.gpus)),
        (its.over, "all" if its.over == its.gpus else str(its.over)),
        (billions, f"{billions:.1f}"),
        (low, f"{low:.1f} – {high:.1f}"),
        (paper, f"{paper / 1e9:.0f} ({who})" if paper else "–"),
        (billions / its.gpus, f"{billions / its.gpus:.2f}"),
        (its.exposed, f"{100 * its.exposed:.1f} %"),
        (its.sequences, str(its.sequences)),
        (its.state_bytes, f"{its.state_bytes / 2**30:.1f}"),
    )


def shardings(
    config: Config, compute: Compute, gpus: Iterable[int], shard: int, gpu: str, links: Links
) -> list[tuple[tuple[float | None, str], ...]]:
    """`cells` of each number of GPUs, sharded over ``shard`` of them, where they are more, and over all.

    Raises:
        UserError: as `project`.
    """
    return [
        cells(project(replace(config, shard=over), compute, number, gpu, links), config.name)
        for number in gpus
        for over in ([shard, 0] if 0 < shard < number else [0])
    ]


def projectable(
    rows: Sequence[Mapping[str, Any]], configuration: str, implementation: str
) -> Iterator[tuple[Config, list[Mapping[str, Any]]]]:
    """The configuration recomputing and not, as far as there are steps of one process, with all rows of its steps."""
    for recompute in (True, False):
        config = load_config(configuration, {"recompute": recompute})
        found = steps_of(rows, config, implementation)
        if any(row["training"]["world_size"] == 1 for row in found):
            yield config, found


def assumptions(config: Config, links: Links) -> list[str]:
    """What a projection takes for granted, in sentences."""
    return [
        "A micro-batch's computation is that of one GPU.",
        f"{config.layers} layers, {config.batch} sequences a step, {config.micro_batch} a micro-batch, of which each "
        "GPU has at least one: where they do not divide among the GPUs, a step has other sequences.",
        "Sharded over fewer GPUs than there are, each so many hold a copy of weights, gradients and AdamW's state, and "
        "the copies sum their gradients once a step.",
        "Each GPU has the memory for a micro-batch's activations beside its share of these.",
        f"Collectives reach {links.efficiency:.0%} of {links.inside / 1e9:.0f} GB/s within a machine of {links.gpus} "
        f"GPUs, and of {links.between / 1e9:.0f} GB/s between machines for each of a machine's GPUs that takes part.",
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
    parser.add_argument("--shard", type=int, default=Links.gpus, help="hybrid sharding's; 0: over all GPUs alone")
    parser.add_argument("--efficiency", type=float, default=Links.efficiency)
    given = parser.parse_args(arguments)
    with refusals("projection"):
        for option, least, numbers in (("--gpus", 1, given.gpus), ("--shard", 0, [given.shard])):
            for number in numbers:
                if not least <= number <= MOST:
                    raise UserError(f"{option} {number}: must be at least {least} and at most {MOST}")
        if not 0 < given.efficiency <= 1:
            raise UserError(f"--efficiency {given.efficiency:g}: must be greater than 0 and at most 1")
        links = Links(efficiency=given.efficiency)
        texts: list[Sequence[str]] = [("recomputing", *COLUMNS)]
        notes: list[str] = []
        rows = store.latest(store.read(given.rows)[0])
        for config, found in projectable(rows, given.configuration, given.implementation):
            gpu, word = found[0]["environment"]["gpu"], "yes" if config.recompute else "no"
            compute = compute_of(found, config, gpu)
            lines = shardings(config, compute, given.gpus, given.shard, gpu, links)
            texts += [(word, *(text for _, text in line)) for line in lines]
            notes += [*check(found, config, gpu, links), f"Recomputing, {word}: from {compute.how}."]
        config = load_config(given.configuration)
        if not notes:
            raise UserError(f"{given.rows}: no training step of {given.implementation} on one GPU at {config.shape}")
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        for line in texts:
            print("   ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
        print("\n".join([*notes, *assumptions(config, links)]))


if __name__ == "__main__":
    main()

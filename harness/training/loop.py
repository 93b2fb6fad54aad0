"""The training loop: what `moebench train` runs in each process."""

from __future__ import annotations

import math
import re
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

from harness.compilation import CompilationCounter, watch_triton
from harness.environment import GpuMonitor
from harness.errors import UserError
from harness.interface import Implementation
from harness.registry import load_registry
from harness.timing import clock_fields
from harness.training import checkpoints, rows
from harness.training.config import Config
from harness.training.costs import utilisation
from harness.training.data import Corpus, open_corpus
from harness.training.experts import point_of
from harness.training.log import Log
from harness.training.model import Transformer
from harness.training.processes import Place, Sharding, environment_rank, lost_process, process_group
from harness.worker import describe, no_host_memory

#: Steps that do not count for times: kernels compile, the allocator grows.
WARM_UP = 3


@dataclass
class Run:
    """What a run has come to.

    Attributes:
        step_ms: of the steps that count.
        states: the GPU's clock and power after each of them.
        compiled: compilations meanwhile.
    """

    loss: float = math.nan
    step_ms: list[float] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    compiled: int = 0


def train(
    out: Console,
    config: Config,
    *,
    device: str,
    run_folder: Path,
    rows_folder: Path,
    resume: bool = False,
    timeout_s: float = 600.0,
) -> Run:
    """Train, write the curves and checkpoints to ``run_folder``, and a row to ``rows_folder``.

    Args:
        device: ``cuda`` or ``cpu``.
        resume: continue from the folder's newest whole checkpoint, where there is one.
        timeout_s: after which a process that keeps the others waiting counts as lost.

    Raises:
        UserError: what stands in the way, and what to change.
    """
    first, latest = environment_rank() == 0, None
    plugin = load_registry().get(config.implementation)
    point_of(plugin, config, device, config.routing)
    existing = checkpoints.complete(run_folder / "checkpoints")
    if existing and not resume:
        raise UserError(f"{run_folder} holds a run: continue it with --resume, or name another folder with --folder")
    if existing:
        latest = existing[-1]
        checkpoints.check_configuration(latest, config)
    watch_triton()
    with process_group(device, timeout_s) as place:
        base = rows.base_row(config, plugin, place.world, device)
        with _failures(base, rows_folder, place):
            corpus = open_corpus(config, place.rank, place.world)
            sharding = Sharding(place, config.dtype)
            model = Transformer(config, plugin, place.device, wrap=sharding)
            sharding(model)
            optimiser = make_optimiser(model, config)
            done = 0
            if latest is not None:
                done = checkpoints.load(latest, config, model, optimiser, corpus)
            log = Log(run_folder, done) if first else None
            run = Run()
            if first and done >= config.steps:
                out.print(f"all {config.steps} steps are done already, see {run_folder}", soft_wrap=True)
            for step in range(done, config.steps):
                train_step(step, config, plugin, place, model, optimiser, corpus, run, log, step - done >= WARM_UP)
                if first:
                    _say(out, config, place, step + 1, run)
                ended = step + 1 == config.steps
                if ended or (config.validate_every and (step + 1) % config.validate_every == 0):
                    loss = validate(model, corpus, place)
                    if log is not None:
                        log.write(step=step + 1, validation_loss=loss)
                        out.print(f"step {step + 1}: validation loss {loss:.4f}", highlight=False)
                if config.checkpoint_every and (ended or (step + 1) % config.checkpoint_every == 0):
                    checkpoints.save(run_folder / "checkpoints", step + 1, config, model, optimiser, corpus)
            if log is not None:
                log.close()
            peak = _peak_bytes(place)
            if first and run.step_ms:
                _store(out, base, config, plugin, place, model, run, peak, rows_folder)
            return run


def train_step(
    step: int,
    config: Config,
    plugin: Implementation,
    place: Place,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    corpus: Corpus,
    run: Run,
    log: Log | None,
    counts: bool,
) -> None:
    """One step: data, forward and backward of each micro-batch, clipping, update.

    Args:
        step: from 0.
        counts: whether its time goes into the row.
    """
    compilations = CompilationCounter()
    started = _now(place)
    rate = learning_rate(config, step)
    for group in optimiser.param_groups:
        group["lr"] = rate
    own = config.micro_batches // place.world
    sums = torch.zeros(2, device=place.device)
    model.train()
    for number, batch in enumerate(corpus.batches(step)):
        # What routing draws depends on seed, step and micro-batch alone: nothing to save, on any number of processes.
        torch.manual_seed(zlib.crc32(f"{config.seed} {step} {number * place.world + place.rank}".encode()))
        batch = batch.to(place.device)
        loss, balance = model(batch[:, :-1], batch[:, 1:])
        # FSDP-2 takes the mean over processes.
        ((loss + config.balance * balance) / own).backward()
        sums += torch.stack([loss.detach(), balance.detach()])
    _check_gradients(model, plugin)
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    dist.all_reduce(sums)
    run.loss, balance_loss = (sums / config.micro_batches).tolist()
    seconds = _now(place) - started
    if not math.isfinite(run.loss):
        raise UserError(f"the loss is {run.loss} at step {step + 1}: lower learning_rate, or lengthen warmup")
    if counts:
        run.step_ms.append(seconds * 1e3)
        run.compiled += compilations.since_start()
        if place.device.type == "cuda":
            run.states.append(_monitor(place).sample())
    full = getattr(norm, "full_tensor", lambda: norm)()
    if log is not None:
        log.write(
            step=step + 1,
            loss=run.loss,
            balance=balance_loss,
            gradient_norm=float(full),
            learning_rate=rate,
            seconds=round(seconds, 6),
            tokens=(step + 1) * config.step_tokens,
        )


@torch.no_grad()
def validate(model: nn.Module, corpus: Corpus, place: Place) -> float:
    """Mean loss of the validation set in nats a token; routing by top-K, whatever the training's."""
    model.eval()
    sums = torch.zeros(2, device=place.device)
    for batch, weight in corpus.validation():
        batch = batch.to(place.device)
        loss, _ = model(batch[:, :-1], batch[:, 1:])
        sums += torch.stack([loss * weight, torch.tensor(weight, device=place.device)])
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def learning_rate(config: Config, step: int) -> float:
    """Rises linearly over the warm-up, then falls as half a cosine to its final share at the last step."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    passed = (step - config.warmup) / max(config.steps - 1 - config.warmup, 1)
    share = config.final_share + (1 - config.final_share) * 0.5 * (1 + math.cos(math.pi * min(passed, 1.0)))
    return config.learning_rate * share


def make_optimiser(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW; norms do not decay."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    # Fused needs no temporaries, of which the others make as much as there are parameters.
    on_gpu = next(model.parameters()).device.type == "cuda"
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=on_gpu or None)


def _check_gradients(model: nn.Module, plugin: Implementation) -> None:
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    if without:
        raise UserError(f"{plugin.label} cannot be trained: its layer gives no gradient for {without[0]}")


@contextmanager
def _failures(base: dict[str, Any], rows_folder: Path, place: Place) -> Iterator[None]:
    """What goes wrong becomes a row, where it is about the implementation on this machine, and one line."""
    who = f"process {place.rank} of {place.world}: " if place.world > 1 else ""
    try:
        yield
    except UserError as error:
        raise UserError(f"{who}{error}") from error
    except Exception as error:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or no_host_memory(error):
            said = re.split(r" GPU \d+ has", describe(error))[0].rstrip(". ")
            rows.append(rows_folder, rows.failed_row(base, "out_of_memory", said))
            raise UserError(
                f"{who}out of memory ({said}): train fewer layers (--layers), recompute activations (--recompute), or "
                "make --micro-batch smaller"
            ) from error
        if place.world > 1 and lost_process(error):
            raise UserError(
                f"{who}another process has ended, or kept the others waiting for too long; what it printed says why. "
                "Continue from the last checkpoint with --resume"
            ) from error
        rows.append(rows_folder, rows.failed_row(base, "crashed", describe(error)))
        raise


def _now(place: Place) -> float:
    """Seconds, when everything launched so far is done."""
    if place.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


_monitors: dict[torch.device, GpuMonitor] = {}


def _monitor(place: Place) -> GpuMonitor:
    if place.device not in _monitors:
        uuid = getattr(torch.cuda.get_device_properties(place.device), "uuid", None)
        _monitors[place.device] = GpuMonitor(None if uuid is None else str(uuid))
    return _monitors[place.device]


def _peak_bytes(place: Place) -> int | None:
    """The most that any process' GPU had allocated; every process calls it."""
    if place.device.type != "cuda":
        return None
    most = torch.tensor(torch.cuda.max_memory_allocated(), device=place.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def _say(out: Console, config: Config, place: Place, step: int, run: Run) -> None:
    """A line of progress: each step on a terminal, in place; else every tenth part of the run."""
    if not (out.is_terminal or step == config.steps or step % max(config.steps // 10, 1) == 0):
        return
    parts = [f"step {step}/{config.steps}", f"loss {run.loss:.4f}"]
    if run.step_ms:
        tokens_per_s = config.step_tokens / run.step_ms[-1] * 1e3
        parts += [f"{tokens_per_s:,.0f} tokens/s"]
        if place.device.type == "cuda":
            parts += [f"{tokens_per_s * 86_400 / place.world / 1e9:.3g} B tokens/day/GPU"]
            share = utilisation(config, tokens_per_s, place.world, torch.cuda.get_device_name(place.device))
            parts += [f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"]
            parts += [] if share is None else [f"MFU {share:.1%}"]
    out.print(", ".join(parts), highlight=False, end="\r" if out.is_terminal and step < config.steps else "\n")


def _store(
    out: Console,
    base: dict[str, Any],
    config: Config,
    plugin: Implementation,
    place: Place,
    model: Transformer,
    run: Run,
    peak: int | None,
    rows_folder: Path,
) -> None:
    during = clock_fields(run.states) if run.states else None
    unstable = f"{run.compiled} compilations happened while timing" if run.compiled else ""
    notes = [*model.notes, f"corpus {config.corpus}"]
    row = rows.measured_row(base, config, place.world, run.step_ms, run.loss, peak, notes, during, unstable)
    path = rows.append(rows_folder, row)
    numbers = row["training"]
    said = f"{plugin.label}: {numbers['tokens_per_s']:,.0f} tokens/s"
    if place.device.type == "cuda":
        said += f", {numbers['tokens_per_day_per_gpu'] / 1e9:.3g} B tokens/day/GPU"
    out.print(f"{said}; row in {path}", highlight=False, soft_wrap=True)

"""The training loop: what `moebench train` runs in each process."""

from __future__ import annotations

import math
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from harness import store
from harness.compilation import CompilationCounter, watch_triton
from harness.environment import GpuMonitor
from harness.errors import UserError
from harness.interface import Implementation
from harness.registry import load_registry
from harness.timing import clock_fields
from harness.training import checkpoints, profiled, rows
from harness.training import log as curves
from harness.training.config import Config, difference
from harness.training.costs import utilisation
from harness.training.data import Corpus, open_corpus
from harness.training.experts import point_of
from harness.training.log import Log
from harness.training.model import Transformer
from harness.training.processes import Place, Sharding, environment_rank, lost_process, process_group
from harness.worker import describe, no_memory

#: Steps that do not count for times: kernels compile, the allocator grows.
WARM_UP = 3
#: What to do where numbers are no longer finite.
_CALMER = "lower learning_rate, or lengthen warmup"


@dataclass
class Times:
    """Of the steps that count.

    Attributes:
        step_ms: wall clock.
        states: the GPU's clock and power after each of them.
        compiled: compilations meanwhile.
        busy_ms: the GPU's busy time of further steps, under the profiler.
        notes: what could not be measured.
    """

    step_ms: list[float] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    compiled: int = 0
    busy_ms: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Trainer:
    """A model in training on this process.

    Raises:
        UserError: the implementation cannot be trained so, or the corpus does not serve.
    """

    def __init__(
        self,
        config: Config,
        plugin: Implementation,
        place: Place,
        corpus: Corpus | None = None,
        losses_only: bool = False,
    ) -> None:
        """
        Args:
            corpus: where this process takes its micro-batches from; None: its part of the configuration's.
            losses_only: the GPU is shared with other runs: a step's time says nothing, and none is kept.
        """
        self.config, self.plugin, self.place, self.losses_only = config, plugin, place, losses_only
        self.corpus: Corpus = corpus or open_corpus(config, place.rank, place.world)
        sharding = Sharding(place, config.dtype)
        self.model = Transformer(config, plugin, place.device, wrap=sharding)
        sharding(self.model)
        self.optimiser = make_optimiser(self.model, config)
        self.times = Times()
        self.notes = [*self.model.notes, f"corpus {config.corpus}"]

    def step(self, number: int, counts: bool = True, batches: Iterable[Tensor] | None = None) -> dict[str, Any]:
        """One step: data, forward and backward of each micro-batch, clipping, update.

        Args:
            number: of the step, from 0.
            counts: whether its time does; with `losses_only` none does.
            batches: its micro-batches on this process, where they have been read already.

        Returns:
            A line of the run's log.

        Raises:
            UserError: the loss or the gradient's norm is no number, or a weight gets no gradient.
        """
        config, place, model = self.config, self.place, self.model
        compilations = CompilationCounter()
        started = _now(place)
        rate = learning_rate(config, number)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        own = config.micro_batches // place.world
        sums = torch.zeros(2, device=place.device)
        model.train()
        for i, batch in enumerate(self.corpus.batches(number) if batches is None else batches):
            # What routing draws depends on seed, step and micro-batch alone: there is no state to save.
            torch.manual_seed(zlib.crc32(f"{config.seed} {number} {i * place.world + place.rank}".encode()))
            batch = batch.to(place.device)
            loss, balance = model(batch[:, :-1], batch[:, 1:])
            # Copies of the parameters sum their gradients once a step; until then each has its own.
            cast(FSDPModule, model).set_requires_all_reduce(i + 1 == own)
            # FSDP-2 takes the mean over processes.
            ((loss + config.balance * balance) / own).backward()
            sums += torch.stack([loss.detach(), balance.detach()])
        self._check_gradients()
        gradient = nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        dist.all_reduce(sums, group=place.group)
        mean_loss, mean_balance = (sums / config.micro_batches).tolist()
        seconds = _now(place) - started
        norm = float(gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)
        # Neither would be of use any more: the gradient has gone into every weight.
        for name, value in (("loss", mean_loss), ("gradient's norm", norm)):
            if not math.isfinite(value):
                raise UserError(f"the {name} is {value} at step {number + 1}: {_CALMER}")
        if counts and not self.losses_only:
            self.times.step_ms.append(seconds * 1e3)
            self.times.compiled += compilations.since_start()
            if place.device.type == "cuda":
                self.times.states.append(_monitor(place).sample())
        line = {
            "step": number + 1,
            "loss": mean_loss,
            "balance": mean_balance,
            "gradient_norm": norm,
            "learning_rate": rate,
            "tokens": (number + 1) * config.step_tokens,
        }
        return line if self.losses_only else {**line, "seconds": round(seconds, 6)}

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss of the validation set in nats a token; routing by top-K, whatever the training's.

        Raises:
            UserError: it is no number.
        """
        device = self.place.device
        self.model.eval()
        sums = torch.zeros(2, device=device)
        for batch, weight in self.corpus.validation():
            batch = batch.to(device)
            loss, _ = self.model(batch[:, :-1], batch[:, 1:])
            sums += torch.stack([loss * weight, torch.tensor(weight, device=device)])
        dist.all_reduce(sums, group=self.place.group)
        loss = float(sums[0] / sums[1])
        if not math.isfinite(loss):
            raise UserError(f"the validation loss is {loss}: {_CALMER}")
        return loss

    def peak_bytes(self) -> int | None:
        """The most that any process' GPU had allocated; every process calls it."""
        if self.place.device.type != "cuda":
            return None
        most = torch.tensor(torch.cuda.max_memory_allocated(), device=self.place.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.place.group)
        return int(most)

    def row(
        self,
        base: Mapping[str, Any],
        loss: float,
        validation_loss: float | None,
        peak_bytes: int | None,
        communication: tuple[float, float] | None = None,
    ) -> dict[str, Any]:
        """The row of the steps that counted so far."""
        times = self.times
        during = clock_fields(times.states) if times.states else None
        unstable = f"{times.compiled} compilations happened while timing" if times.compiled else ""
        return rows.measured_row(
            base,
            self.config,
            self.place.world,
            None if self.losses_only else times.step_ms,
            loss,
            validation_loss,
            peak_bytes,
            [*self.notes, *dict.fromkeys(times.notes)],
            during,
            unstable,
            communication,
            times.busy_ms,
        )

    def _check_gradients(self) -> None:
        without = [name for name, parameter in self.model.named_parameters() if parameter.grad is None]
        if without:
            raise UserError(f"{self.plugin.label} cannot be trained: its layer gives no gradient for {without[0]}")


def train(
    out: Console,
    config: Config,
    *,
    device: str,
    run_folder: Path,
    rows_folder: Path,
    resume: bool = False,
    losses_only: bool = False,
    timeout_s: float = 600.0,
) -> None:
    """Train, write the curves and checkpoints to ``run_folder``, and a row to ``rows_folder``.

    Args:
        device: ``cuda`` or ``cpu``.
        resume: continue from the folder's newest whole checkpoint, where there is one.
        losses_only: see `Trainer`.
        timeout_s: after which a process that keeps the others waiting counts as lost.

    Raises:
        UserError: what stands in the way, and what to change.
    """
    first = environment_rank() == 0
    plugin = load_registry().get(config.implementation)
    point_of(plugin, config, device, config.routing)
    checkpoint_folder = run_folder / "checkpoints"
    latest = max(checkpoints.complete(checkpoint_folder), key=lambda checkpoint: checkpoint.step, default=None)
    if latest is not None:
        if not resume:
            raise UserError(
                f"{run_folder} holds a run: continue it with --resume, or name another folder with --folder"
            )
        checkpoints.check_configuration(latest, config)
    elif _ended_without_checkpoint(run_folder, config, resume):
        if first:
            out.print(f"all {config.steps} steps are done already, see {run_folder}", soft_wrap=True)
        return
    watch_triton()
    with process_group(device, timeout_s, config.shard) as place:
        base = rows.base_row(config, plugin, place.world, device, losses_only)
        with failures(base, rows_folder, place):
            checkpoints.check_shared(latest, place.device)
            trainer = Trainer(config, plugin, place, losses_only=losses_only)
            state = config, trainer.model, trainer.optimiser, trainer.corpus
            done = 0 if latest is None else checkpoints.load(latest, *state)
            log = Log(run_folder, done, config.as_dict()) if first else None
            if first and done >= config.steps:
                out.print(f"all {config.steps} steps are done already, see {run_folder}", soft_wrap=True)
            line: dict[str, Any] = {}
            validation_loss = None
            for number in range(done, config.steps):
                if number - done == WARM_UP and device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                line = trainer.step(number, counts=number - done >= WARM_UP)
                if log is not None:
                    log.write(**line)
                    _say(out, trainer, line)
                ended = number + 1 == config.steps
                if ended or (config.validate_every and (number + 1) % config.validate_every == 0):
                    validation_loss = trainer.validate()
                    if log is not None:
                        log.write(step=number + 1, validation_loss=validation_loss)
                        out.print(f"step {number + 1}: validation loss {validation_loss:.4f}", highlight=False)
                if config.checkpoint_every and (ended or (number + 1) % config.checkpoint_every == 0):
                    checkpoints.save(checkpoint_folder, number + 1, *state)
            if log is not None:
                log.close()
            peak = trainer.peak_bytes()
            # The model is saved by now, and these steps are in no curve.
            timed = trainer.times.step_ms and not losses_only
            communication = profiled.communication(trainer, config.steps) if timed else None
            trainer.times.busy_ms = profiled.busy_ms(trainer, config.steps) if timed else []
            if first and (timed or (losses_only and line)):
                row = trainer.row(base, line["loss"], validation_loss, peak, communication)
                out.print(
                    f"{_rates(row, place)}; row in {rows.append(rows_folder, row)}", highlight=False, soft_wrap=True
                )
            elif first and line:
                out.print(f"no row: the first {WARM_UP} steps are warm-up, and none came after them", soft_wrap=True)


def _ended_without_checkpoint(run_folder: Path, config: Config, resume: bool) -> bool:
    """Whether the folder holds the curves of this run, whole. Those of a run that was stopped before its first
    checkpoint make way with ``resume``.

    Raises:
        UserError: curves would be lost.
    """
    lines = curves.read(run_folder)
    if lines and not resume:
        raise UserError(
            f"{run_folder} holds the curves of a run without a checkpoint: begin it anew with --resume, or name "
            "another folder with --folder"
        )
    saved = curves.read_config(run_folder) if lines else {}
    if not lines or "validation_loss" not in lines[-1] or lines[-1]["step"] != saved["steps"]:
        return False
    other = difference(saved, config)
    if other is not None:
        raise UserError(f"{run_folder} holds the curves of another run: {other}; name another folder with --folder")
    return True


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


@contextmanager
def failures(base: Mapping[str, Any], rows_folder: Path, place: Place) -> Iterator[None]:
    """What goes wrong becomes a row, where it is about the implementation on this machine, and one line."""
    who = f"process {place.rank} of {place.world}: " if place.world > 1 else ""
    try:
        yield
    except UserError as error:
        raise UserError(f"{who}{error}") from error
    except Exception as error:
        if no_memory(error):
            said = re.split(r" GPU \d+ has", describe(error))[0].rstrip(". ")
            rows.append(rows_folder, rows.failed_row(base, "out_of_memory", said))
            raise UserError(
                f"{who}out of memory ({said}): train fewer layers (--layers), recompute activations (--recompute), or "
                "make --micro-batch smaller"
            ) from error
        if place.world > 1 and lost_process(error):
            raise UserError(
                f"{who}another process has ended, or kept the others waiting for too long; what it printed says why. "
                f"Continue from the last checkpoint with --resume ({describe(error)[:120]})"
            ) from error
        # A full disk under a cache of compiled kernels, say, is not the implementation's doing.
        if not (isinstance(error, OSError) and error.errno in store.NO_ROOM):
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


def _say(out: Console, trainer: Trainer, line: Mapping[str, Any]) -> None:
    """A line of progress: each step on a terminal, in place; else every tenth part of the run."""
    config, place, step = trainer.config, trainer.place, line["step"]
    if not (out.is_terminal or step == config.steps or step % max(config.steps // 10, 1) == 0):
        return
    parts = [f"step {step}/{config.steps}", f"loss {line['loss']:.4f}"]
    on_gpu = place.device.type == "cuda"
    if not trainer.losses_only:
        tokens_per_s = config.step_tokens / line["seconds"]
        parts += [f"{tokens_per_s:,.0f} tokens/s"]
        if on_gpu:
            share = utilisation(config, tokens_per_s, place.world, torch.cuda.get_device_name(place.device))
            parts += [f"{tokens_per_s * 86_400 / place.world / 1e9:.3g} B tokens/day/GPU"]
            parts += [] if share is None else [f"MFU {share:.1%}"]
    parts += [f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"] if on_gpu else []
    out.print(", ".join(parts), highlight=False, end="\r" if out.is_terminal and step < config.steps else "\n")


def _rates(row: Mapping[str, Any], place: Place) -> str:
    """A row's numbers for people."""
    numbers = row["training"]
    if numbers["tokens_per_s"] is None:
        return f"{row['label']}: no times"
    said = f"{row['label']}: {numbers['tokens_per_s']:,.0f} tokens/s"
    if place.device.type == "cuda":
        said += f", {numbers['tokens_per_day_per_gpu'] / 1e9:.3g} B tokens/day/GPU"
    busy = rows.busy_share(row)
    said += "" if busy is None else f", GPU busy {100 * busy:.0f} % of the step"
    return said + say_communication(row)


def say_communication(row: Mapping[str, Any]) -> str:
    """``, communication 12.0 % of the step, 3.1 % exposed``; empty where it was not measured."""
    numbers = row["training"]
    if numbers.get("communication") is None:
        return ""
    shares = numbers["communication"] * 100, numbers["exposed_communication"] * 100
    return f", communication {shares[0]:.1f} % of the step, {shares[1]:.1f} % exposed"

"""Checkpoints that are whole or not there, and from which a run continues exactly.

A checkpoint is written into a folder ``….partial`` by all processes (`torch.distributed.checkpoint`); when everything
is on the disk, a marker with the size of every file is written, and the folder gets its name. Where several machines
train, the folder must be one that all of them see.

Weights and the optimiser's state are in the plugin's own layout, so a checkpoint belongs to one implementation. Data
position and random numbers follow from the step, but for a stream's position, which is saved.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from harness import store
from harness.errors import UserError
from harness.training.config import Config, difference
from harness.training.data import Corpus

MARKER = "complete.json"
_PARTIAL = ".partial"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: its folder, how many steps were done, and the configuration that made it."""

    folder: Path
    step: int
    config: dict[str, Any]


def complete(folder: Path) -> list[Checkpoint]:
    """The whole checkpoints in a folder, oldest first. One that lacks its marker, or a file, or a part of a file, is
    passed over."""
    found = []
    for path in sorted(folder.glob("step-*")) if folder.is_dir() else []:
        try:
            marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
            whole = all((path / name).stat().st_size == size for name, size in marker["files"].items())
            if whole and path.suffix != _PARTIAL:
                found.append(Checkpoint(path, int(marker["step"]), dict(marker["config"])))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def save(
    folder: Path,
    step: int,
    config: Config,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    corpus: Corpus,
) -> None:
    """Write a checkpoint after ``step`` steps, and remove all but the last ``config.keep``. Every process calls it.

    Raises:
        WriteError: the folder cannot be written; earlier checkpoints stay.
    """
    rank = dist.get_rank()
    name = f"step-{step:08d}"
    partial = folder / (name + _PARTIAL)
    with store.write_refusals(folder / name, "--folder"), _taken_back(partial):
        if rank == 0:
            _remove(partial)
            partial.mkdir(parents=True)
        dist.barrier()
        weights, state = get_state_dict(model, optimiser)
        try:
            dcp.save({"model": weights, "optimiser": state}, storage_writer=_Writer(partial))
        except dcp.CheckpointException as error:
            raise _first(error) from None
        (partial / f"corpus-{rank}.json").write_text(json.dumps(corpus.state()), encoding="utf-8")
        dist.barrier()
        if rank == 0:
            files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
            marker = {"step": step, "config": config.as_dict(), "world_size": dist.get_world_size(), "files": files}
            with open(partial / MARKER, "w", encoding="utf-8") as file:
                json.dump(marker, file, indent=1)
            for path in [*partial.iterdir(), partial]:
                _to_disk(path)
            _remove(folder / name)
            os.rename(partial, folder / name)
            _to_disk(folder)
            for old in complete(folder)[: -config.keep]:
                _remove(old.folder)
        dist.barrier()


class _Writer(dcp.FileSystemWriter):
    """torch's. Where a file refuses what is written, torch complains about the archive that lacks it, in words without
    the reason; here the reason stays."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _first(error: dcp.CheckpointException) -> BaseException:
    """What went wrong on the first process where something did: torch's own exception is no `Exception`, and its text
    is that of tracebacks."""
    return error.failures[min(error.failures)][0]


@contextmanager
def _taken_back(partial: Path) -> Iterator[None]:
    """What the disk did not take whole makes room again."""
    try:
        yield
    except OSError:
        if dist.get_rank() == 0:
            with suppress(OSError):
                _remove(partial)
        raise


def load(
    checkpoint: Checkpoint,
    config: Config,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    corpus: Corpus,
) -> int:
    """Continue from a checkpoint: the number of steps done. Every process calls it; with the same numbers on any number
    of processes, up to the order of sums, but for a stream's position.

    Raises:
        UserError: it is of another configuration, or cannot be read.
    """
    check_configuration(checkpoint, config)
    weights, state = get_state_dict(model, optimiser)
    content: dict[str, Any] = {"model": weights, "optimiser": state}
    try:
        dcp.load(content, checkpoint_id=checkpoint.folder)
    except (dcp.CheckpointException, OSError, RuntimeError) as error:
        said = " ".join(str(error).split())[:200]
        raise UserError(f"{checkpoint.folder}: cannot be read ({said}); remove it to continue from an older one") from (
            error
        )
    set_state_dict(model, optimiser, model_state_dict=content["model"], optim_state_dict=content["optimiser"])
    position = checkpoint.folder / f"corpus-{dist.get_rank()}.json"
    if position.is_file():
        corpus.restore(json.loads(position.read_text(encoding="utf-8")))
    return checkpoint.step


def check_shared(checkpoint: Checkpoint | None, device: torch.device) -> None:
    """Raises `UserError` where the processes, which all call it, have found different checkpoints."""
    step = -1 if checkpoint is None else checkpoint.step
    ends = torch.tensor([step, -step], device=device)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    if int(ends[0]) != -int(ends[1]):
        raise UserError("the machines see different checkpoints: --folder must lie where all of them see it")


def check_configuration(checkpoint: Checkpoint, config: Config) -> None:
    """Raises `UserError`, which names the field, where the checkpoint is another run's."""
    other = difference(checkpoint.config, config)
    if other:
        raise UserError(
            f"{checkpoint.folder} is of another configuration: {other}; change it back, or name another folder with "
            "--folder"
        )


def _remove(folder: Path) -> None:
    """Its marker first: what is half removed is no checkpoint."""
    if folder.is_dir():
        (folder / MARKER).unlink(missing_ok=True)
        shutil.rmtree(folder)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

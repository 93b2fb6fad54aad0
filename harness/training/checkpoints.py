"""Checkpoints that are whole or not there, and from which a run continues exactly.

A checkpoint is written into a folder ``….partial`` by all processes (`torch.distributed.checkpoint`); when everything
is on the disk, a marker with size and checksum of every file is written, and the folder gets its name. Where several
machines train, the folder must be one that all of them see.

Weights and the optimiser's state are in the plugin's own layout, so a checkpoint belongs to one implementation. Data
position and random numbers follow from the step, but for a stream's position, which is saved.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from harness import store
from harness.errors import UserError, describe
from harness.training.config import Config, difference
from harness.training.data import Corpus
from harness.training.processes import lost_process
from harness.worker import no_memory

MARKER = "complete.json"
_PARTIAL = ".partial"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint.

    Attributes:
        step: how many were done.
        config: the configuration that made it.
        checksums: CRC-32 of each file, by name; empty where it was written before there were any.
    """

    folder: Path
    step: int
    config: dict[str, Any]
    checksums: Mapping[str, int] = field(default_factory=dict)


def complete(folder: Path) -> list[Checkpoint]:
    """The whole checkpoints in a folder, oldest first. One that lacks its marker, or a file, or a part of a file, as a
    kill leaves it, is passed over. What the files hold is not looked at before `load`."""
    found = []
    for path in sorted(folder.glob("step-*")) if folder.is_dir() else []:
        try:
            marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
            whole = all((path / name).stat().st_size == size for name, size in marker["files"].items())
            step, config, checksums = int(marker["step"]), dict(marker["config"]), dict(marker.get("checksums", {}))
            if whole and path.name == _name(step):
                found.append(Checkpoint(path, step, config, checksums))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
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
    name = _name(step)
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
        checksums = _checksums(partial, sorted(path.name for path in partial.iterdir()))
        if rank == 0:
            marker = {"step": step, "config": config.as_dict(), "world_size": dist.get_world_size()}
            marker["files"] = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
            marker["checksums"] = checksums
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
        UserError: it is of another configuration, damaged, or cannot be read.
    """
    check_configuration(checkpoint, config)
    with _read(checkpoint):
        found = _checksums(checkpoint.folder, checkpoint.checksums)
    for name in sorted(found):
        if found[name] != checkpoint.checksums[name]:
            raise UserError(f"{checkpoint.folder / name}: damaged, not what was written; {_without(checkpoint)}")
    weights, state = get_state_dict(model, optimiser)
    content: dict[str, Any] = {"model": weights, "optimiser": state}
    with _read(checkpoint):
        try:
            dcp.load(content, checkpoint_id=checkpoint.folder)
        except dcp.CheckpointException as error:
            raise _first(error) from None
        set_state_dict(model, optimiser, model_state_dict=content["model"], optim_state_dict=content["optimiser"])
    position = checkpoint.folder / f"corpus-{dist.get_rank()}.json"
    if position.is_file():
        with _read(checkpoint, position.name):
            corpus.restore(json.loads(position.read_text(encoding="utf-8")))
    return checkpoint.step


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _checksums(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """CRC-32 of files of a checkpoint, by name. Every process calls it, with the same names: each reads the files that
    it wrote, which bear its rank, or as many as there are for each process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = {}
    for name in names:
        number = re.search(r"\d+", name)
        if (int(number[0]) if number else 0) % world == rank:
            own[name] = _checksum(folder / name)
    every: list[Any] = [None] * world
    dist.all_gather_object(every, own)
    return {name: checksum for its in every for name, checksum in its.items()}


def _checksum(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value


@contextmanager
def _read(checkpoint: Checkpoint, name: str = "") -> Iterator[None]:
    """What cannot be read of the checkpoint, or of its file of that name, or does not fit (without checksums damage
    shows only so), in one line that says what to do."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if no_memory(error) or lost_process(error):
            raise
        place = checkpoint.folder / name
        raise UserError(f"{place}: cannot be read ({describe(error)}); {_without(checkpoint)}") from error


def _without(checkpoint: Checkpoint) -> str:
    return f"remove the folder {checkpoint.folder} to continue from an older checkpoint, or else from the beginning"


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

"""Training runs for tests: in this process, or in several that are forked from one that has imported everything."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from harness.errors import UserError
from harness.registry import default_registry
from harness.training import command, loop, profiled
from harness.training.config import load_config
from harness.training.processes import process_group

#: Steps of the runs that are compared, and between their checkpoints.
STEPS, EVERY = 60, 16
HANG_S = 240.0


def train(
    folder: Path,
    configuration: str = "tiny",
    resume: bool = False,
    device: str = "cpu",
    against: str = "",
    rounds: int = 2,
    **changes: Any,
) -> None:
    """One run, in this process; rows and curves go into the folder."""
    torch.set_num_threads(1)
    changes = {"steps": STEPS, "checkpoint_every": EVERY, **changes}
    out, run = Console(file=io.StringIO()), folder / "run"
    command.train(out, configuration, changes, device, run, folder, resume, 60.0, against, rounds)


def train_and_count(folder: Path, **changes: Any) -> None:
    """`train`; the first process writes how often it summed gradients with other copies of its part of the weights."""
    all_reduce, sums = dist.all_reduce, 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal sums
        sums += named.get("group") is not None  # all others are sums of all processes
        return all_reduce(*arguments, **named)

    dist.all_reduce = counted
    train(folder, **changes)
    if os.environ["RANK"] == "0":
        (folder / "sums").write_text(str(sums))


def read_past_the_end(folder: Path) -> None:
    """Two processes, of which the second one's corpus ends with the third step; each writes what it can read ahead from
    the first and from the second step on."""
    config = load_config("tiny")
    with process_group("cpu", 30.0) as place:
        trainer = loop.Trainer(config, default_registry().get(config.implementation), place)
        batches = trainer.corpus.batches

        def ends(step: int) -> Iterator[Tensor]:
            if place.rank == 1 and step > 2:
                raise UserError("ended")
            return batches(step)

        trainer.corpus.batches = ends  # type: ignore[method-assign]
        found = [profiled.read_ahead(trainer, number, 2) for number in (1, 2)]
        (folder / f"read-{place.rank}").write_text(repr([its and [len(step) for step in its] for its in found]))


def first_step_alone(folder: Path) -> None:
    """Of two processes the first one takes a step alone, and writes its loss; the other takes none."""
    torch.set_num_threads(1)
    config = load_config("tiny")
    with process_group("cpu", 30.0) as place:
        alone = place.alone(30.0)
        if place.rank == 0:
            trainer = loop.Trainer(config, default_registry().get(config.implementation), alone)
            (folder / "loss").write_text(str(trainer.step(0)["loss"]))


def _process(
    rank: int, world: int, port: int, kill: int | None, said: Any, run: Callable[..., None], folder: Path, changes: Any
) -> None:
    os.environ.update(
        GLOO_SOCKET_IFNAME="lo",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if kill is not None and rank == world - 1:
        step = loop.Trainer.step

        def dies(self: loop.Trainer, number: int, counts: bool = True) -> dict[str, Any]:
            if number == kill:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(self, number, counts)

        loop.Trainer.step = dies  # type: ignore[method-assign]
    try:
        run(folder, **changes)
    except Exception as error:
        said.put((rank, type(error).__name__, str(error)))
        sys.exit(2)


def flipped(path: Path, place: float, number: int = 64) -> None:
    """So many bytes changed, at a share of the file, whose size stays."""
    content = bytearray(path.read_bytes())
    start = int(place * (len(content) - 1))
    for i in range(start, min(start + number, len(content))):
        content[i] ^= 0xFF
    path.write_bytes(content)


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["harness.training.loop"])
    return context


def train_until(folder: Path, sight: str, **changes: Any) -> int | None:
    """`train` in a process of its own, which is killed as soon as something in the folder fits the pattern; its exit
    code."""
    process = _context().Process(target=train, args=(folder,), kwargs=changes)
    process.start()
    end = time.monotonic() + HANG_S
    while process.is_alive() and not any(folder.glob(sight)) and time.monotonic() < end:
        time.sleep(0.001)
    process.kill()
    process.join()
    return process.exitcode


def train_together(
    folder: Path, world: int = 2, kill: int | None = None, run: Callable[..., None] = train, **changes: Any
) -> tuple[list[int | None], list[tuple[int, str, str]]]:
    """Several processes train (or ``run``); with ``kill``, the last one is killed when it comes to this step (from 0).

    Returns:
        Exit codes by rank, and what the processes raised: (rank, exception's name, message).
    """
    context = _context()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = context.Queue()
    processes = [
        context.Process(target=_process, args=(rank, world, port, kill, said, run, folder, changes))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(HANG_S)
            assert process.exitcode is not None, "a process hangs"
    finally:
        for process in processes:
            process.kill()
    messages = []
    while not said.empty():
        messages.append(said.get())
    return [process.exitcode for process in processes], sorted(messages)

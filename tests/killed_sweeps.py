"""Kills sweeps many times and says what it found, as JSON: a program of its own, since it forks for every try.

It imports torch once; each try is a fork of it that runs the command line, and the worker process is a fork again.
Everything runs as it does in earnest, but for the function that measures a point, which makes a row without measuring,
and for the registry, which is the one loaded here. The store's system calls are real as well; only that each may be the
last, and that most lines are written in parts, with a chance of the end between any two.

What counts as finished: a row whose key came through a pipe, into which it is written once `append` has returned.

    python killed_sweeps.py FOLDER KILLS SEED
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import random
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import warm_moebench

from harness import cli, registry, session, store, worker
from harness.environment import environment
from harness.points import row_fields

SHAPES = 600
SWEEP = """
[sweep]
name = "killed"
description = "Cheap points"

[defaults]
device = "cpu"
dtype = "float32"
passes = ["forward"]

[[points]]
implementations = ["torch_loop"]
shapes = [{shapes}]
"""
#: Seconds until a process that should have ended counts as left behind.
PATIENCE_S = 60.0


def cheap_rows(
    point: Any, passes: Sequence[str], implementation: Any, bases: dict[str, Any], context: Any, allow_graph: bool
) -> Iterator[dict[str, Any]]:
    """In place of `harness.measure.measure_point`."""
    context.phase("timing")
    for pass_ in passes:
        yield {
            **bases[pass_],
            **row_fields(point),
            "timestamp": "2026-01-31T12:00:00+00:00",
            "status": "ok",
            "reason": "",
            "measured_on": "cpu",
            "environment": environment("cpu"),
            # Longer than a page, as rows of real layers are.
            "notes": ["what was substituted " * 250],
        }


class Calls:
    """In place of the module `os`, for `harness.store`: at the ``last`` system call of those that matter, before it or
    after, the process is sent ``number``; lines are written in parts."""

    def __init__(self, randoms: random.Random, last: int, number: int) -> None:
        self.randoms = randoms
        self.left = last
        self.number = number

    def _step(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.number)

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in ("open", "write", "fsync", "ftruncate", "close", "fstat", "pread", "stat"):
            return real

        def called(*arguments: Any, **options: Any) -> Any:
            self._step()
            if name == "write" and self.randoms.random() < 0.7:
                descriptor, line = arguments
                arguments = descriptor, line[: self.randoms.randint(1, len(line))]
            found = real(*arguments, **options)
            self._step()
            return found

        return called


def sweep_file(folder: Path) -> Path:
    path = folder / "killed.toml"
    shapes = ", ".join(f'"{tokens},16,8,4,2"' for tokens in range(1, SHAPES + 1))
    path.write_text(SWEEP.format(shapes=shapes))
    return path


def run_command_line(folder: Path, sweep: Path, told: int, errors: int, calls: Any) -> None:
    """The child's life: ``moebench run … --resume``; the key of each row goes into the pipe ``told`` once `append` has
    returned."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(errors, 2)
        append = store.append

        def telling(path: Path, row: dict[str, Any]) -> None:
            append(path, row)
            os.write(told, f"{row['resume_key']}\n".encode())

        store.os = calls
        store.append = telling
        sys.argv = ["moebench", "run", str(sweep), "--output", str(folder / "rows"), "--resume"]
        cli.main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class Try:
    """A sweep that runs in a fork."""

    def __init__(self, folder: Path, sweep: Path, calls: Any = os, most_bytes: int | None = None) -> None:
        self._told, tell = os.pipe()
        self._errors, error = os.pipe()
        self._keys = b""
        # A signal that comes before the child is ready for it waits.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._told)
            os.close(self._errors)
            if most_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
            run_command_line(folder, sweep, tell, error, calls)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.close(tell)
        os.close(error)

    def listen(self, until: float, enough: int = sys.maxsize) -> bool:
        """Take what comes through the pipe, until that moment or until there are ``enough`` keys; whether it closed."""
        while self._keys.count(b"\n") < enough and (left := until - time.monotonic()) > 0:
            if select.select([self._told], [], [], left)[0]:
                chunk = os.read(self._told, 1 << 16)
                if not chunk:
                    return True
                self._keys += chunk
        return False

    def kill(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self, alone: bool = True) -> dict[str, Any]:
        """What came of it, once it has ended and, with no other try beside it, everything that it left."""
        stuck = not self.listen(time.monotonic() + PATIENCE_S)
        if stuck:
            self.kill(signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        found = {
            "code": None if stuck else os.waitstatus_to_exitcode(status),
            "keys": self._keys.decode().split(),
            "nobody_left": not alone or children_end(),
            "error": os.read(self._errors, 1 << 16).decode(),
        }
        os.close(self._told)
        os.close(self._errors)
        return found


def children_end() -> bool:
    """Whether every process that was left to this one ends soon."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.001)
        except ChildProcessError:
            return True
    return False


def killed_try(folder: Path, sweep: Path, randoms: random.Random, number: int) -> dict[str, Any]:
    """Half of the kills come from outside, while it starts or some time after a few rows; half at a system call of the
    store."""
    if randoms.random() < 0.5:
        found = Try(folder, sweep, Calls(randoms, randoms.randint(1, 100), number)).end()
        return {**found, "where": "store"}
    one = Try(folder, sweep, Calls(randoms, 0, number))
    closed = randoms.random() < 0.7 and one.listen(time.monotonic() + PATIENCE_S, enough=randoms.randint(1, 6))
    if not closed and not one.listen(time.monotonic() + randoms.uniform(0.0, 0.02)):
        one.kill(number)
    return {**one.end(), "where": "outside"}


class Campaign:
    """One results file, and what is known of it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.path = folder / "rows" / "killed.jsonl"
        self.sweep = sweep_file(folder)
        self.randoms = random.Random(seed)
        self.tries: list[dict[str, Any]] = []
        self.finished: set[str] = set()
        self.faults: list[str] = []

    def look(self, found: dict[str, Any], what: str, number: int = 0) -> None:
        """Note what came of a try, and every row that is lost or doubled after it."""
        self.finished |= set(found.pop("keys"))
        rows, problems = store.read(self.path) if self.path.exists() else ([], [])
        counts = Counter(row["resume_key"] for row in rows)
        name = f"try {len(self.tries)}, {what} {number or ''}".strip()
        if lost := self.finished - set(counts):
            self.faults.append(f"{name}: {len(lost)} finished rows lost")
        if doubled := [key for key, times in counts.items() if times > 1]:
            self.faults.append(f"{name}: {len(doubled)} rows doubled")
        if len(problems) > 1:
            self.faults.append(f"{name}: {len(problems)} broken lines")
        if not found["nobody_left"]:
            self.faults.append(f"{name}: a process was left behind")
        self.tries.append({**found, "what": what, "number": number, "rows": len(rows), "broken": len(problems)})

    def two_at_once(self) -> None:
        """A second sweep into the same file is refused while the first runs, and taken once it has been killed."""
        first = Try(self.folder, self.sweep)
        first.listen(time.monotonic() + PATIENCE_S, enough=3)
        # It must not run out of points while the second one waits.
        first.kill(signal.SIGSTOP)
        self.look(Try(self.folder, self.sweep).end(alone=False), "second")
        first.kill(signal.SIGKILL)
        self.look(first.end(), "first", signal.SIGKILL)
        third = Try(self.folder, self.sweep)
        third.listen(time.monotonic() + PATIENCE_S, enough=3)
        third.kill(signal.SIGTERM)
        self.look(third.end(), "third", signal.SIGTERM)

    def full_disk(self) -> None:
        size = self.path.stat().st_size
        self.look(Try(self.folder, self.sweep, most_bytes=size + 20_000).end(), "full")

    def kills(self, times: int) -> None:
        numbers = (signal.SIGKILL, signal.SIGINT, signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP)
        for turn in range(times):
            number = numbers[turn % len(numbers)]
            found = killed_try(self.folder, self.sweep, self.randoms, number)
            self.look(found, found.pop("where"), number)

    def to_the_end(self) -> None:
        self.look(Try(self.folder, self.sweep).end(), "whole")
        self.look(Try(self.folder, self.sweep).end(), "again")


def main() -> None:
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    # Orphans come to this process, which so sees every one of them.
    ctypes.CDLL(None).prctl(36, 1)
    plugins = registry.load_registry()
    session.load_registry = lambda: plugins
    worker.load_registry = lambda: plugins
    worker.measure_point = cheap_rows
    subprocess.Popen = warm_moebench.Popen  # type: ignore[misc]
    campaign = Campaign(folder, seed)
    # What the command line imports when it is first used; and no try looks through all of torch's objects again.
    sys.argv = ["moebench", "run", str(campaign.sweep), "--output", str(folder / "rows"), "--dry-run"]
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.suppress(SystemExit):
        cli.main()
    environment("cpu")
    gc.collect()
    gc.freeze()
    campaign.two_at_once()
    campaign.full_disk()
    campaign.kills(kills)
    campaign.to_the_end()
    print(json.dumps({
        "tries": campaign.tries, "finished": len(campaign.finished), "faults": campaign.faults, "rows": SHAPES
    }))  # fmt: skip


if __name__ == "__main__":
    main()

"""Everything that a worker has started, wherever it has gone: found in /proc, and ended with it.

A plugin's child may leave the worker's process group and session, and its parent may end before it. What it keeps is
the environment that it was started with, which carries the worker's mark.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

#: Environment variable that holds a worker's mark.
MARK_VARIABLE = "MOEBENCH_WORKER"
#: Seconds that processes get which tidy up behind one that has died (trackers of shared memory, say).
GRACE_S = 0.5
_PROC = Path("/proc")
_ROUNDS = 50

#: A process: its id, and when it started, since ids are used again.
Process = tuple[int, int]


def temporary_prefix(mark: str) -> str:
    """How the names of temporary files begin that the worker of this mark makes by `tempfile`."""
    return f"moebench-{mark}-"


def _alive() -> dict[int, tuple[int, int, int]]:
    """Id of each living process -> its parent, its session, and when it started."""
    found = {}
    for entry in os.listdir(_PROC) if _PROC.is_dir() else ():
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            # The name, in brackets, may hold anything.
            fields = (_PROC / entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] not in "ZX":
                found[int(entry)] = (int(fields[1]), int(fields[3]), int(fields[19]))
    return found


def _is_marked(pid: int, mark: str) -> bool:
    with contextlib.suppress(OSError):
        return f"{MARK_VARIABLE}={mark}".encode() in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    return False


def find(leader: int, mark: str, known: set[Process] | None = None) -> set[Process]:
    """The living processes that a worker has started: in its session, below it, marked by it, or already ``known``.

    Args:
        leader: the worker's own id, which is its session's too; it is not among them.
    """
    alive = _alive()
    ours = {pid for pid, (_, _, start) in alive.items() if (pid, start) in (known or set())}
    ours |= {pid for pid, (_, session, _) in alive.items() if session == leader}
    ours |= {pid for pid in alive if pid not in ours and pid != os.getpid() and _is_marked(pid, mark)}
    grown = True
    while grown:
        below = {pid for pid, (parent, _, _) in alive.items() if parent in ours or parent == leader} - ours
        ours |= below
        grown = bool(below)
    return {(pid, alive[pid][2]) for pid in ours if pid not in (leader, os.getpid())}


def end(leader: int, mark: str, known: set[Process]) -> None:
    """End what a worker, itself dead by now, has started; remove the temporary files that it left."""
    soon = time.monotonic() + GRACE_S
    while (left := find(leader, mark, known)) and time.monotonic() < soon:
        time.sleep(0.02)
    for _ in range(_ROUNDS):
        if not left:
            break
        for pid, _start in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        left = find(leader, mark, left)
    for path in Path(tempfile.gettempdir()).glob(f"{temporary_prefix(mark)}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()

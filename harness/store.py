"""Rows in append-only JSON Lines files: a row is written whole or not at all, and a broken line costs only itself."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from harness.errors import UserError, one_line
from harness.interface import Point
from harness.record import MODES, REQUIRED, RecordError, Row, check, clean, validate

#: A row with one of these statuses needs no second run; every other failure is worth another try.
FINAL_STATUSES = ("ok", "unsupported")
#: Seconds that a single row waits for another process to end its writing; and that a sweep waits for one that was
#: killed just now, which takes a moment to let go.
PATIENCE_S, HOLD_PATIENCE_S = 30.0, 1.0
_IDENTIFYING = frozenset(REQUIRED["measurement"] + REQUIRED["ratio"]) | {
    "resume_key",
    "denominator_variant",
    "denominator_routing",
    "numerator_label",
    "denominator_label",
    "mode",
}
#: How the names of files end whose rows are of a layer that is slow on purpose.
PLANTED = "_planted"
#: How every line begins that `append` writes.
_START = b'{"schema":'
#: Where there is no room, or a limit is reached: what a disk or a quota says of itself, and of nothing that runs here.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: By error; ``{}``: the option that names another folder.
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room there, or name another folder by {}"),
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or name another folder by {}",
    **dict.fromkeys((errno.ENOLCK, errno.EOPNOTSUPP), "name a folder by {} whose file system has locks"),
}


@dataclass(frozen=True)
class ReadProblem:
    """A line that could not be used: where it stands (from 1; 0 for the file itself) and why."""

    file: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}" if self.line else f"{self.file}: {self.message}"


class WriteError(UserError):
    """Rows, or what a run keeps beside them, cannot be written there. The message says why, and what to do."""


class _Held:
    """A results file that this process has open and locked, ``users`` times over."""

    def __init__(self, descriptor: int, made: bool) -> None:
        self.descriptor = descriptor
        self.made = made
        self.users = 0


#: By real path; and what lets one thread write at a time.
_held: dict[str, _Held] = {}
_writing = threading.RLock()


@contextlib.contextmanager
def hold(path: Path | str) -> Iterator[None]:
    """Let nobody but this process add rows to a file until the block ends. Blocks of one file may be nested.

    The file and its folder are made where they are missing, so that a place that cannot be written to shows before
    anything is measured; a file that is still empty at the end is taken away again.

    Raises:
        WriteError: the file cannot be written, or another process holds it.
    """
    path = Path(path)
    name = os.path.realpath(path)
    with _writing:
        if name not in _held:
            with write_refusals(path):
                _held[name] = _Held(*_locked(path, HOLD_PATIENCE_S))
        _held[name].users += 1
    try:
        yield
    finally:
        with _writing:
            held = _held[name]
            held.users -= 1
            if not held.users:
                del _held[name]
                with contextlib.suppress(OSError):
                    if held.made and not os.fstat(held.descriptor).st_size and _is_at(held.descriptor, path):
                        path.unlink()
                os.close(held.descriptor)


@contextlib.contextmanager
def additions(path: Path | str) -> Iterator[list[Row]]:
    """`hold`, and a list that has the rows which the block has added to the file once it ends."""
    rows: list[Row] = []
    with hold(path):
        before = len(read(path)[0])
        yield rows
        rows += read(path)[0][before:]


def append(path: Path | str, row: Mapping[str, Any]) -> None:
    """Validate ``row`` and add it as one line, flushed to the disk, under an exclusive lock on the file.

    What a killed writer left of a line is cut off first; a last line that only lacks its end is given it. Where the
    disk refuses the whole line, or something else cuts the writing short, none of it stays.

    Raises:
        RecordError: the row breaks a rule; nothing is written.
        WriteError: the file cannot be written, or another process holds it (`hold`).
    """
    path = Path(path)
    checked = check(clean(row))
    # First, so that the start of every line tells whose it is.
    ordered = {"schema": checked["schema"], **checked}
    line = json.dumps(ordered, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    name = os.path.realpath(path)
    with _writing, write_refusals(path):
        held = _held.get(name)
        if held is not None:
            if not _is_at(held.descriptor, path):
                # Somebody moved it away, or took it away: rows written on would be lost.
                descriptor, held.made = _locked(path, HOLD_PATIENCE_S)
                held.descriptor, descriptor = descriptor, held.descriptor
                os.close(descriptor)
            _add(held.descriptor, line)
            return
        descriptor, _ = _locked(path, PATIENCE_S)
        try:
            _add(descriptor, line)
        finally:
            # Closing releases the lock.
            os.close(descriptor)


def keep(path: Path | str, row: Mapping[str, Any]) -> dict[str, Any]:
    """`append` a row, or, where it breaks the rules (by a plugin's NaN, say), what identifies it with the status
    ``crashed``: that fails its point and must not end the run. Returns what was stored."""
    try:
        append(path, row)
        return dict(row)
    except RecordError as error:
        kept = {key: value for key, value in row.items() if key in _IDENTIFYING}
        times = row.get("latency_ms")
        mode = times.get("mode") if isinstance(times, Mapping) else None
        if mode in MODES and mode != "burst":
            # Else it would take the place of the same point in a burst.
            kept["mode"] = mode
        kept |= {"status": "crashed", "reason": f"the row breaks the rules of the record: {error}"}
        append(path, kept)
        return kept


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at that place."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _locked(path: Path, patience_s: float) -> tuple[int, bool]:
    """The file, open for reading and adding, with an exclusive lock; and whether it was made here."""
    end = time.monotonic() + patience_s
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        made = not path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise WriteError(f"{path}: cannot be written: not a file; move it, or name another folder by --output")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last holder may have taken it away while it was opened here.
            if _is_at(descriptor, path):
                return descriptor, made
        except BlockingIOError:
            if time.monotonic() >= end:
                os.close(descriptor)
                raise WriteError(
                    f"{path}: another run is writing rows there; wait until it ends, or name another folder by --output"
                ) from None
            time.sleep(0.01)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


@contextlib.contextmanager
def write_refusals(path: Path, option: str = "--output") -> Iterator[None]:
    """What the operating system refuses, as a `WriteError`; ``option`` names another folder."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "name another folder by {}").format(option)
        raise WriteError(f"{path}: cannot be written: {error.strerror or error}; {advice}") from error


def _add(descriptor: int, line: bytes) -> None:
    """Add a line to an open and locked file, whole or not at all."""
    size, before = _mend(descriptor)
    write_whole(descriptor, size, before + line)
    os.fsync(descriptor)


def write_whole(descriptor: int, size: int, line: bytes) -> None:
    """Add a line to a file of so many bytes that is open for adding, whole or not at all."""
    written = 0
    try:
        while written < len(line):
            written += os.write(descriptor, line[written:])
    except BaseException:
        # The disk is full, or a signal ends the run.
        if written < len(line):
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, size)
        raise


def _mend(descriptor: int) -> tuple[int, bytes]:
    """Cut off what a killed writer left of a line; the size then, and what must stand before the next line."""
    size = os.fstat(descriptor).st_size
    if not size or os.pread(descriptor, 1, size - 1) == b"\n":
        return size, b""
    start = size
    while start:
        chunk = os.pread(descriptor, min(start, 1 << 16), max(start - (1 << 16), 0))
        newline = chunk.rfind(b"\n")
        if newline >= 0:
            start += newline + 1 - len(chunk)
            break
        start -= len(chunk)
    last = os.pread(descriptor, size - start, start)
    # A machine that goes down may leave zeros in place of what was written last.
    text = last.rstrip(b"\0")
    if not (text.startswith(_START) or _START.startswith(text)):
        return size, b"\n"  # not of a row: whoever wrote it may want it
    whole = False
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(text.decode())
        whole = True
    keep = start + len(text) if whole else start
    if keep < size:
        os.ftruncate(descriptor, keep)
    return keep, b"\n" if whole else b""


def read(path: Path | str) -> tuple[list[Row], list[ReadProblem]]:
    """Every good row of a file, in order, and a problem for each line that is none.

    Raises:
        UserError: the file does not exist or cannot be read.
    """
    numbered, problems = read_numbered(path)
    return [row for _, row in numbered], problems


def read_numbered(path: Path | str) -> tuple[list[tuple[int, Row]], list[ReadProblem]]:
    """`read` with each row's line, counted from 1."""
    path = Path(path)
    try:
        # Of a pipe or a device there may be no end.
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: cannot be read: not a file")
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    rows: list[tuple[int, Row]] = []
    problems: list[ReadProblem] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            cut = " (the writer was interrupted)" if number == len(lines) else ""
            message = f"{error.msg} (character {error.pos})" if isinstance(error, json.JSONDecodeError) else str(error)
            if b"\0" in line:
                message, cut = "it holds zeros", " (the machine went down while it was written)"
            problems.append(ReadProblem(path, number, one_line(f"not a JSON object: {message}{cut}")))
            continue
        faults = validate(row)
        if faults:
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            problems.append(ReadProblem(path, number, one_line(faults[0]) + more))
        else:
            rows.append((number, cast(Row, row)))
    return rows, problems


def row_files(folder: Path) -> list[Path]:
    """Every ``*.jsonl`` file in and below a folder, in the order of their names, but for those of layers that are slow
    on purpose (`PLANTED`): they are of no implementation, and belong into no figure, table or claim."""
    return sorted(file for file in folder.rglob("*.jsonl") if file.is_file() and not file.stem.endswith(PLANTED))


def read_folder(folder: Path | str) -> tuple[list[Row], list[ReadProblem]]:
    """`read` over a folder's `row_files`; a folder without any gives two empty lists. Raises `UserError` where the
    folder does not exist."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    rows: list[Row] = []
    problems: list[ReadProblem] = []
    for path in row_files(folder):
        try:
            more_rows, more_problems = read(path)
        except UserError as error:
            # One of many: the others still say something.
            problems.append(ReadProblem(path, 0, str(error).removeprefix(f"{path}: ")))
            continue
        rows += more_rows
        problems += more_problems
    return rows, problems


def point_inputs(point: Point, pass_name: str = "", **options: Any) -> dict[str, Any]:
    """Everything that tells one measurement from another, for `resume_key`: the point's fields, the pass (each pass
    has its own row and so its own key) and the options that change what is measured, e.g. ``mode="burst"``."""
    # `asdict` of the whole point, but that a trace's place is left out, at half the time: a sweep may have thousands.
    parts = {"shape": point.shape.as_dict(), "layer": asdict(point.layer), "routing": point.routing.as_dict()}
    return {**vars(point), **parts, "pass": pass_name, "options": options}


def resume_key(point_inputs: Mapping[str, Any], plugin_hash: str, packages: Mapping[str, Any], gpu: str) -> str:
    """The identity of a measurement: it is repeated as soon as anything here changes.

    Args:
        point_inputs: see `point_inputs`; JSON types only.
        plugin_hash: of the plugin's code and of the measuring code (`Registry.code_hash`).
        packages: distribution -> version, of the plugin's packages and of torch and triton.
        gpu: the GPU's name, or the CPU's where there is none.

    Returns:
        64 hexadecimal digits.
    """
    inputs = {"point": point_inputs, "code": plugin_hash, "packages": packages, "gpu": gpu}
    canonical = json.dumps(inputs, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def resume_keys(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    """Keys of the measurements that need no second run: their row is ``ok`` or ``unsupported`` and carries a key."""
    return {row["resume_key"] for row in rows if row.get("resume_key") and row.get("status") in FINAL_STATUSES}


def latest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each measurement, in the order of their first appearance.

    A retried point leaves its earlier rows in the file. Two rows are of one measurement where everything asked for
    agrees (the sweep's name aside) and the GPU is the same; which of them counts, `precedence` says."""
    newest: dict[str, Row] = {}
    for row in rows:
        environment = row.get("environment") or {}
        key = identity(row, environment.get("gpu") if row.get("measured_on") == "cuda" else environment.get("cpu"))
        if key not in newest or precedence(row) >= precedence(newest[key]):
            newest[key] = row
    return list(newest.values())


class Known:
    """The measurements of which rows say what came of them, whatever the code and packages that they were made with.

    Where a GPU is named, a GPU's rows count if they are of that model; rows of CPUs always do.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self._found: dict[str, set[str | None]] = {}
        for row in rows:
            if row.get("status") in FINAL_STATUSES:
                self._found.setdefault(identity(row, None), set()).add(_gpu_of(row))

    def has(self, row: Mapping[str, Any], gpu: str | None) -> bool:
        """Whether there is one of the same measurement as ``row``, which need say no more than what is asked for.

        Args:
            gpu: the model on which it would be measured; None: any.
        """
        found = self._found.get(identity(cast(Row, row), None), set())
        return bool(found) and (gpu is None or row.get("measured_on") != "cuda" or gpu in found)


def _gpu_of(row: Row) -> str | None:
    return (row.get("environment") or {}).get("gpu") if row.get("measured_on") == "cuda" else None


def precedence(row: Row) -> tuple[bool, str]:
    """Of one measurement's rows that one counts whose precedence is highest, of equals the one that stands last: the
    latest. That a package was missing once takes nothing back, though, that was found out with it."""
    return row.get("status") != "not_installed", str(row.get("timestamp"))


def identity(row: Row, machine: str | None) -> str:
    """Equal for two rows of one measurement on one machine: everything asked for agrees, the sweep's name aside."""
    routing = row.get("routing") or {}
    asked: list[Any] = [row.get(key) for key in _IDENTITY]
    asked.append({key: routing.get(key) for key in ("method", "distribution", "seed", "m_tile")})
    asked.append((row.get("denominator_routing") or {}).get("method"))
    asked.append((row.get("latency_ms") or {}).get("mode") or row.get("mode") or "burst")
    return json.dumps([*asked, machine], sort_keys=True)


_IDENTITY = (
    "record",
    "operation",
    "variant",
    "pass",
    "implementation",
    "numerator",
    "denominator",
    "denominator_variant",
    "time_kind",
    "shape",
    "dtype",
    "layer",
    "measured_on",
)

"""Rows in append-only JSON Lines files: a row is written whole or not at all, and a broken line costs only itself."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from harness.errors import UserError
from harness.interface import Point
from harness.record import Row, check, clean, validate

#: A row with one of these statuses needs no second run; every other failure is worth another try.
FINAL_STATUSES = ("ok", "unsupported")


@dataclass(frozen=True)
class ReadProblem:
    """A line that could not be used: where it stands (from 1; 0 for the file itself) and why."""

    file: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}" if self.line else f"{self.file}: {self.message}"


def append(path: Path | str, row: Mapping[str, Any]) -> None:
    """Validate ``row`` and add it as one line, flushed to the disk, under an exclusive lock on the file.

    A partial last line (its writer was killed) is ended first, so that it does not swallow this row. Where the disk
    refuses the whole line, none of it stays.

    Raises:
        RecordError: the row breaks a rule; nothing is written.
        UserError: the file cannot be written.
    """
    path = Path(path)
    checked = check(clean(row))
    line = json.dumps(checked, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line
            try:
                written = 0
                while written < len(line):
                    written += os.write(descriptor, line[written:])
            except OSError:
                os.ftruncate(descriptor, size)
                raise
            os.fsync(descriptor)
        finally:
            # Closing releases the lock.
            os.close(descriptor)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


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
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    rows: list[tuple[int, Row]] = []
    problems: list[ReadProblem] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            cut = " (the writer was interrupted)" if number == len(lines) else ""
            message = f"{error.msg} (character {error.pos})" if isinstance(error, json.JSONDecodeError) else str(error)
            problems.append(ReadProblem(path, number, f"not a JSON object: {message}{cut}"))
            continue
        faults = validate(row)
        if faults:
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            problems.append(ReadProblem(path, number, faults[0] + more))
        else:
            rows.append((number, cast(Row, row)))
    return rows, problems


def read_folder(folder: Path | str) -> tuple[list[Row], list[ReadProblem]]:
    """`read` over every ``*.jsonl`` file in and below a folder, in the order of their names; a folder without any
    gives two empty lists. Raises `UserError` where the folder does not exist."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    rows: list[Row] = []
    problems: list[ReadProblem] = []
    for path in sorted(folder.rglob("*.jsonl")):
        more_rows, more_problems = read(path)
        rows += more_rows
        problems += more_problems
    return rows, problems


def point_inputs(point: Point, pass_name: str = "", **options: Any) -> dict[str, Any]:
    """Everything that tells one measurement from another, for `resume_key`: the point's fields, the pass (each pass
    has its own row and so its own key) and the options that change what is measured, e.g. ``mode="burst"``."""
    return {**asdict(point), "pass": pass_name, "options": options}


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
    agrees (the sweep's name aside) and the GPU is the same."""
    newest: dict[str, Row] = {}
    for row in rows:
        environment = row.get("environment") or {}
        key = identity(row, environment.get("gpu") if row.get("measured_on") == "cuda" else environment.get("cpu"))
        if key not in newest or str(row.get("timestamp")) >= str(newest[key].get("timestamp")):
            newest[key] = row
    return list(newest.values())


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

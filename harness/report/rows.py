"""Rows with the place where each stands, and what tells one point from another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import store
from harness.errors import UserError
from harness.record import Row
from harness.report.text import plain
from harness.token_rounding import ROUNDINGS
from harness.training.rows import OPERATION

#: What stands in place of a GPU's name where a row was not measured on a GPU, or does not name it.
TRACED, UNNAMED = "fake tensors", "unnamed GPU"


@dataclass(frozen=True)
class Stored:
    """A row and where it stands.

    Attributes:
        row: as stored.
        file: path below the results folder, with ``/``.
        line: counted from 1.
        machine: the GPU's name; for other rows ``CPU`` with the processor's name, or ``fake tensors``.
    """

    row: Row
    file: str
    line: int
    machine: str

    @property
    def on_gpu(self) -> bool:
        return self.row["measured_on"] == "cuda"

    def get(self, *path: str) -> Any:
        """A nested field, None where it is absent."""
        value: Any = self.row
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def text(self, *path: str) -> str:
        return plain(self.get(*path))

    @property
    def shape(self) -> str:
        return ",".join(str(self.row["shape"][size]) for size in ("T", "d", "n", "E", "K"))

    @property
    def routing(self) -> str:
        """``top_k, uniform``, with the tile where a method rounds to it; without the distribution where a model in
        training decides."""
        method = self.text("routing", "method")
        tile = f" to {self.text('routing', 'm_tile')}" if method in ROUNDINGS else ""
        drawn = "" if self.row["operation"] == OPERATION else f", {self.text('routing', 'distribution')}"
        return f"{method}{tile}{drawn}"

    @property
    def mode(self) -> str:
        return self.text("latency_ms", "mode") or self.text("mode") or "burst"


def _machine(row: Row, gpu: str) -> str:
    environment = row["environment"]
    if row["measured_on"] == "cuda":
        return plain(environment.get("gpu")) or gpu or UNNAMED
    if row["measured_on"] == "fake":
        return TRACED
    cpu = plain(environment.get("cpu"))
    return f"CPU ({cpu})" if cpu else "CPU"


def _sentences(problems: Iterable[store.ReadProblem], base: Path) -> list[str]:
    """One sentence for each message of a file: a file of a newer schema has as many problems as lines."""
    found: dict[tuple[Path, str], list[int]] = {}
    for problem in problems:
        found.setdefault((problem.file, problem.message), []).append(problem.line)
    sentences = []
    for (file, message), lines in found.items():
        where = f"line {lines[0]}" if len(lines) == 1 else f"{len(lines)} lines, the first is {lines[0]}"
        sentences.append(plain(f"{_below(file, base)}, {where}: {message}"))
    return sentences


def _below(file: Path, base: Path) -> str:
    return file.relative_to(base).as_posix()


def read(path: Path, option: str = "--results") -> tuple[list[Stored], list[str]]:
    """Every good row of a file, or of a folder's files (`store.row_files`), and a sentence for what is none.

    A row for a GPU that does not name it (written for a worker that died, say) takes the name from its neighbours in
    the folder where they agree. `UserError` where ``path`` is missing; ``option`` is what the message calls it.
    """
    if path.is_dir():
        files, base = store.row_files(path), path
    elif path.is_file():
        files, base = [path], path.parent
    else:
        raise UserError(f"{option} {path}: no such file or folder")
    stored: list[Stored] = []
    sentences: list[str] = []
    names: dict[Path, set[str]] = {}
    contents = []
    for file in files:
        try:
            rows, problems = store.read_numbered(file)
        except UserError as error:
            if file == path:
                raise
            # One of many: the others still say something.
            sentences.append(plain(error))
            continue
        sentences += _sentences(problems, base)
        contents.append((file, rows))
        here = names.setdefault(file.parent, set())
        here |= {plain(row["environment"].get("gpu")) for _, row in rows if row["measured_on"] == "cuda"} - {""}
    for file, rows in contents:
        here = names[file.parent]
        gpu = next(iter(here)) if len(here) == 1 else ""
        where = _below(file, base)
        stored += [Stored(row, where, line, _machine(row, gpu)) for line, row in rows]
    return stored, sentences


def point_key(stored: Stored) -> str:
    """Equal for two rows of one point on one machine."""
    return store.identity(stored.row, stored.machine)


def sweep_point_key(stored: Stored) -> str:
    """Equal for two rows of one point of one sweep."""
    return json.dumps([stored.get("sweep"), point_key(stored)])


def latest(rows: Iterable[Stored], key: Callable[[Stored], str] = point_key) -> list[Stored]:
    """The last row of each point (`harness.store.precedence`), in the order of their first appearance."""
    newest: dict[str, Stored] = {}
    for stored in rows:
        name = key(stored)
        if name not in newest or store.precedence(stored.row) >= store.precedence(newest[name].row):
            newest[name] = stored
    return list(newest.values())


def times(stored: Stored) -> dict[str, tuple[float, float, float]]:
    """The row's times in ms by kind: the median with its interval. Device times of different basis are two kinds:
    a graph's replay holds the gaps between kernels, their busy time does not. A training step's is the wall clock:
    what else is in it than kernels belongs to it."""
    found = {}
    for kind, field in (("device", "device_ms"), ("busy", "busy_ms"), ("host", "latency_ms")):
        summary = stored.get(field)
        if summary and (kind == "host" or stored.row["operation"] != OPERATION):
            name = f"device, {summary['basis']}" if kind == "device" else kind
            low, high = summary["ci95"]
            found[name] = (float(summary["median"]), float(low), float(high))
    return found

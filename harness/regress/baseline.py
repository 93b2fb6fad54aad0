"""Baselines: one JSON file for each GPU with the times that later runs are compared with."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast

from harness.documents import load_json, save
from harness.errors import UserError
from harness.record import BASES

SCHEMA = 1
#: What of a row's environment a baseline names.
ENVIRONMENT = ("gpu", "driver", "cuda", "torch", "triton", "python", "platform", "host", "commit")
_THRESHOLD = re.compile(r"median:([0-9]{1,4}(?:\.[0-9]{1,4})?)%")
_MOST_PERCENT = 1000.0
#: The times of a row that a point can be judged by.
DEVICE, BUSY = "device_ms", "busy_ms"
#: What a row gives as the basis of a ratio of busy times.
BUSY_BASIS = "busy"
#: With fewer measurements of a point nothing is known of how well its times repeat.
LEAST_REPEATED = 3


@dataclass(frozen=True)
class Threshold:
    """How much slower a median may be before it counts, in percent; written ``median:5%``."""

    percent: float

    @property
    def fraction(self) -> float:
        return self.percent / 100.0

    def __str__(self) -> str:
        return f"median:{f'{self.percent:.4f}'.rstrip('0').rstrip('.')}%"


DEFAULT_THRESHOLD = Threshold(5.0)


def parse_threshold(text: str, where: str = "--threshold") -> Threshold:
    """``median:5%`` or ``median:2.5%``: above 0 % and at most 1000 %, with at most four decimals.

    Raises:
        UserError: anything else; the message begins with ``where``.
    """
    match = _THRESHOLD.fullmatch(text)
    if match is None or not 0.0 < float(match[1]) <= _MOST_PERCENT:
        shown = " ".join(text.split())[:60]
        raise UserError(f"{where} {shown!r}: write median:5%, with a number above 0 and at most {_MOST_PERCENT:g}")
    return Threshold(float(match[1]))


@dataclass(frozen=True)
class Interval:
    """A median and its 95 % interval, in whatever unit its owner says."""

    median: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Relative: 0.02 where its ends lie 2 % of the median apart."""
        return (self.high - self.low) / self.median


@dataclass(frozen=True)
class Reference:
    """A point's time / its bound's time, both alternating in one process; ``basis``, as in rows: graph or busy."""

    ratio: Interval
    basis: str


@dataclass(frozen=True)
class BaselinePoint:
    """One point and pass of a baseline.

    Attributes:
        what: its name for people.
        key: `harness.store.identity` of its row, for no particular machine.
        fields: what the row says of the point, for whoever reads the file.
        time: the GPU's own time in ms; ``basis`` as in rows.
        kernels: microseconds of one call by role, or by name where a kernel has no role.
        threshold: its own, in place of the baseline's.
        reference: its ratio over the bound, of the times by which it is judged (an older baseline's: of replays).
        busy: its kernels' busy time in ms; None where the baseline was not repeated `LEAST_REPEATED` times.

    Intervals hold those of all repetitions, so that their widths say how well each number repeated.
    """

    what: str
    key: str
    fields: dict[str, Any]
    basis: str
    time: Interval
    kernels: dict[str, float] = field(default_factory=dict)
    threshold: Threshold | None = None
    reference: Reference | None = None
    busy: Interval | None = None

    @property
    def by(self) -> str:
        """The time by which it is judged: of `DEVICE` and `BUSY` the one that repeated better.

        Replays of a short layer follow each other until the power cap takes a part of the clock, sooner in one run and
        later in another; the few calls under the profiler end before. A long layer's calls there are too few for a
        clock that the cap moves from call to call, while its replays average over it."""
        return BUSY if self.busy is not None and self.busy.width < self.time.width else DEVICE

    @property
    def judged(self) -> Interval:
        """The time by which it is judged, in ms."""
        return self.busy if self.busy is not None and self.by == BUSY else self.time

    @property
    def settling(self) -> Reference | None:
        """The ratio over the bound where it settles a suspicion; None where the point is measured again by itself.

        A ratio of replays says nothing where replays were found to repeat worse than the busy time. And over GEMMs
        alone a ratio depends on the clock at which it was taken: it says less than the time where it repeated worse
        than that."""
        if self.reference is None or self.busy is None:
            return self.reference
        basis = BUSY_BASIS if self.by == BUSY else self.basis
        repeated = self.reference.ratio.width <= self.judged.width
        return self.reference if self.reference.basis == basis and repeated else None


@dataclass(frozen=True)
class Baseline:
    """A file of `results/baselines/`. ``made`` is the time (UTC) of its newest row."""

    gpu: str
    environment: dict[str, Any]
    made: str
    threshold: Threshold
    points: tuple[BaselinePoint, ...]

    def as_dict(self) -> dict[str, Any]:
        """As it stands in the file: points sorted by name, kernels the longest first."""
        return {
            "schema": SCHEMA,
            "gpu": self.gpu,
            "made": self.made,
            "environment": self.environment,
            "threshold": str(self.threshold),
            "points": [_point_as_dict(point) for point in sorted(self.points, key=lambda point: point.what)],
        }


def _point_as_dict(point: BaselinePoint) -> dict[str, Any]:
    found: dict[str, Any] = {"what": point.what, **point.fields}
    time = {"basis": point.basis, "median": point.time.median, "ci95": [point.time.low, point.time.high]}
    found[DEVICE] = time
    if point.busy is not None:
        found[BUSY] = {"median": point.busy.median, "ci95": [point.busy.low, point.busy.high]}
    if point.threshold is not None:
        found["threshold"] = str(point.threshold)
    found["kernels"] = dict(sorted(point.kernels.items(), key=lambda item: (-item[1], item[0])))
    if point.reference is not None:
        ratio = point.reference.ratio
        found["reference"] = {
            "basis": point.reference.basis,
            "value": ratio.median,
            "ci95": [ratio.low, ratio.high],
        }
    return {**found, "key": point.key}


def write(path: Path, baseline: Baseline) -> None:
    """Write the file whole or not at all. Raises `UserError` where it cannot be written."""
    save(path, json.dumps(baseline.as_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read(path: Path) -> Baseline:
    """Read a baseline.

    Raises:
        UserError: the file cannot be read, is none, or is of a newer harness; the message names file and key.
    """
    return _Reader(path).baseline(load_json(path))


class _Reader:
    """Every error it raises names the file and the key."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fail(self, where: str, message: str) -> NoReturn:
        raise UserError(f"{self.path}: {where}: {message}")

    def baseline(self, data: Any) -> Baseline:
        if not isinstance(data, dict):
            raise UserError(f"{self.path}: not a baseline: must be a JSON object")
        schema = data.get("schema")
        if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
            self.fail("schema", f"missing or unknown; this harness writes {SCHEMA}")
        if schema > SCHEMA:
            self.fail("schema", f"{schema} is newer than this harness reads ({SCHEMA}); update the harness")
        points = data.get("points")
        if not isinstance(points, list) or not points:
            self.fail("points", "missing or empty")
        read_points = tuple(self.point(point, f"points[{number}]") for number, point in enumerate(points, start=1))
        keys = [point.key for point in read_points]
        for number, key in enumerate(keys, start=1):
            if key in keys[: number - 1]:
                self.fail(f"points[{number}].key", "stands there twice")
        return Baseline(
            self.text(data, "gpu", ""),
            self.table(data, "environment", ""),
            self.text(data, "made", ""),
            self.threshold(data.get("threshold"), "threshold"),
            read_points,
        )

    def point(self, data: Any, where: str) -> BaselinePoint:
        if not isinstance(data, dict):
            self.fail(where, "must be an object")
        known = ("what", "key", DEVICE, BUSY, "kernels", "threshold", "reference")
        time = self.table(data, DEVICE, where)
        busy = None
        if data.get(BUSY) is not None:
            busy = self.interval(self.table(data, BUSY, where), "median", f"{where}.{BUSY}")
        kernels = self.table(data, "kernels", where) if "kernels" in data else {}
        for name, us in kernels.items():
            if not _is_number(us) or us < 0:
                self.fail(f"{where}.kernels", f"{name[:60]!r} must be microseconds")
        reference = None
        if data.get("reference") is not None:
            table = self.table(data, "reference", where)
            its = f"{where}.reference"
            reference = Reference(self.interval(table, "value", its), self.basis(table, its))
        return BaselinePoint(
            self.text(data, "what", where),
            self.text(data, "key", where),
            {key: value for key, value in data.items() if key not in known},
            self.basis(time, f"{where}.{DEVICE}"),
            self.interval(time, "median", f"{where}.{DEVICE}"),
            {name: float(us) for name, us in kernels.items()},
            self.threshold(data["threshold"], f"{where}.threshold") if data.get("threshold") is not None else None,
            reference,
            busy,
        )

    def text(self, data: Mapping[str, Any], key: str, where: str) -> str:
        value = data.get(key)
        if not isinstance(value, str) or not value:
            self.fail(f"{where}.{key}".lstrip("."), "missing or not a text")
        return value

    def table(self, data: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
        value = data.get(key)
        if not isinstance(value, dict):
            self.fail(f"{where}.{key}".lstrip("."), "missing or not an object")
        return value

    def threshold(self, value: Any, where: str) -> Threshold:
        if not isinstance(value, str):
            self.fail(where, "missing or not a text such as median:5%")
        return parse_threshold(value, f"{self.path}: {where}")

    def basis(self, table: Mapping[str, Any], where: str) -> str:
        if table.get("basis") not in BASES:
            self.fail(f"{where}.basis", f"must be one of {', '.join(BASES)}")
        return cast(str, table["basis"])

    def interval(self, table: Mapping[str, Any], centre: str, where: str) -> Interval:
        median: Any = table.get(centre)
        ends: Any = table.get("ci95")
        if not _is_number(median) or median <= 0:
            self.fail(f"{where}.{centre}", "must be a number greater than zero")
        if not (isinstance(ends, list) and len(ends) == 2 and all(map(_is_number, ends))):
            self.fail(f"{where}.ci95", "must be [low, high]")
        low, high = float(ends[0]), float(ends[1])
        if not 0 < low <= median <= high:
            self.fail(f"{where}.ci95", f"must be ordered, above zero, and contain the {centre}")
        return Interval(float(median), low, high)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def environment_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a baseline says of where its rows were measured; they were so within one run, so the first tells."""
    found = rows[0]["environment"]
    return {key: found.get(key) for key in ENVIRONMENT}

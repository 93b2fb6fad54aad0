"""What the gate's sweep asks for, point by point, with the identities that the rows will have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from harness import store
from harness.interface import Point
from harness.record import Row, point_fields
from harness.regress.baseline import BUSY, DEVICE, BaselinePoint
from harness.session import works_of
from harness.sweep import RatioPoint, Sweep

#: What a ratio's row calls the times by which a point is judged.
TIME_KIND = {DEVICE: "device", BUSY: "busy"}


@dataclass(frozen=True)
class OverBound:
    """A point's ratio over the bound; ``key`` is the identity of its row."""

    ratio: RatioPoint
    key: str

    @property
    def what(self) -> str:
        """What it is over, for people."""
        of = ", of busy times" if self.ratio.time_kind == TIME_KIND[BUSY] else ""
        return f"{self.ratio.denominator} {self.ratio.bound}{of}"


@dataclass(frozen=True)
class Asked:
    """One point and pass of the sweep.

    Attributes:
        key: the identity of its row.
        what: its name for people.
        ratios: over the bound, by the time of which they are; empty where the sweep has none for this point.
    """

    point: Point
    pass_: str
    key: str
    what: str
    ratios: Mapping[str, OverBound] = field(default_factory=dict)

    def settling(self, point: BaselinePoint) -> OverBound | None:
        """The ratio that settles a suspicion of this point of a baseline; None: it is measured again by itself."""
        return None if point.settling is None else self.ratios.get(point.by)


def asked_of(sweep: Sweep) -> list[Asked]:
    """Every point and pass of the sweep, each with its ratios over a bound."""
    ratios = {ratio.point: ratio for ratio in sweep.ratios if ratio.bound}
    found = []
    for work in works_of(replace(sweep, ratios=[])):
        point = work.point
        for pass_ in work.passes:
            ratio = ratios.get(point)
            key = _key(sweep, {"record": "measurement", **point_fields(point)}, point, pass_)
            over = {}
            if ratio is not None and pass_ in ratio.passes:
                over = {by: _over_bound(sweep, replace(ratio, time_kind=kind), pass_) for by, kind in TIME_KIND.items()}
            found.append(Asked(point, pass_, key, _what(point, pass_), over))
    return found


def together(wanted: Iterable[tuple[OverBound, str]]) -> list[RatioPoint]:
    """Ratios to measure, each once with all passes that are wanted of it."""
    passes: dict[RatioPoint, list[str]] = defaultdict(list)
    for over, pass_ in wanted:
        passes[over.ratio].append(pass_)
    return [replace(ratio, passes=tuple(its)) for ratio, its in passes.items()]


def itself(sweep: Sweep, ratios: Iterable[RatioPoint]) -> list[RatioPoint]:
    """The method against itself, which belongs to every run that rests on ratios, by the times of those."""
    kinds = dict.fromkeys(ratio.time_kind for ratio in ratios)
    return [replace(ratio, time_kind=kind) for kind in kinds for ratio in sweep.ratios if ratio.is_a_a]


def _over_bound(sweep: Sweep, ratio: RatioPoint, pass_: str) -> OverBound:
    asked = {
        **point_fields(ratio.point),
        "record": "ratio",
        "implementation": None,
        "numerator": ratio.numerator,
        "denominator": ratio.denominator,
        "denominator_variant": ratio.bound,
        "time_kind": ratio.time_kind,
    }
    return OverBound(ratio, _key(sweep, asked, ratio.point, pass_))


def _key(sweep: Sweep, fields: Mapping[str, Any], point: Point, pass_: str) -> str:
    """The identity that the row will have, for no particular machine."""
    row = {**fields, "pass": pass_, "measured_on": point.device, "mode": sweep.options.mode}
    return store.identity(cast(Row, row), None)


def _what(point: Point, pass_: str) -> str:
    routing = point.routing
    parts = [point.implementation, point.operation, point.variant, str(point.shape), point.dtype]
    parts += [routing.method if routing.method != "top_k" else ""]
    parts += [routing.distribution if routing.distribution != "uniform" else "", pass_.replace("_", " + ")]
    return " ".join(part for part in parts if part)


def is_a_a(row: Mapping[str, Any]) -> bool:
    """Whether a ratio row is of an implementation against itself."""
    return row["numerator"] == row["denominator"] and not row.get("denominator_variant")

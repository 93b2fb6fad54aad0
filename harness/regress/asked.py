"""What the gate's sweep asks for, point by point, with the identities that the rows will have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from harness import store
from harness.interface import Point
from harness.record import Row, point_fields
from harness.session import works_of
from harness.sweep import RatioPoint, Sweep


@dataclass(frozen=True)
class Asked:
    """One point and pass of the sweep.

    Attributes:
        key: the identity of its row; ``ratio_key`` of its ratio's.
        what: its name for people.
        ratio: over the bound; None where the sweep has none for this point.
    """

    point: Point
    pass_: str
    key: str
    what: str
    ratio: RatioPoint | None = None
    ratio_key: str = ""


def asked_of(sweep: Sweep) -> list[Asked]:
    """Every point and pass of the sweep, each with its ratio over a bound."""
    ratios = {ratio.point: ratio for ratio in sweep.ratios if ratio.bound}
    found = []
    for work in works_of(replace(sweep, ratios=[])):
        point = work.point
        for pass_ in work.passes:
            ratio = ratios.get(point)
            if ratio is not None and pass_ not in ratio.passes:
                ratio = None
            key = _key(sweep, {"record": "measurement", **point_fields(point)}, point, pass_)
            ratio_key = ""
            if ratio is not None:
                asked = {
                    **point_fields(point),
                    "record": "ratio",
                    "implementation": None,
                    "numerator": ratio.numerator,
                    "denominator": ratio.denominator,
                    "denominator_variant": ratio.bound,
                    "time_kind": "device",
                }
                ratio_key = _key(sweep, asked, point, pass_)
            found.append(Asked(point, pass_, key, _what(point, pass_), ratio, ratio_key))
    return found


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

"""A new baseline from the rows of a run, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.errors import UserError
from harness.record import Row, point_fields
from harness.regress.asked import Asked, is_a_a, together
from harness.regress.baseline import (
    BUSY,
    DEFAULT_THRESHOLD,
    LEAST_REPEATED,
    Baseline,
    BaselinePoint,
    Interval,
    Reference,
    Threshold,
    environment_of,
)
from harness.regress.judge import Now, combine, ratio_of
from harness.sweep import RatioPoint


def ratios_to_measure(asked: Sequence[Asked], rows: Mapping[str, Sequence[Row]]) -> list[RatioPoint]:
    """Of each point the ratio over the bound by the time that will judge it.

    Args:
        rows: of the points, as `new_baseline` takes them.

    Raises:
        UserError: a point that failed, is unstable or missing.
    """
    judged = ((one.ratios.get(_point(one, rows, None).by), one.pass_) for one in asked)
    return together((over, pass_) for over, pass_ in judged if over is not None)


def new_baseline(
    asked: Sequence[Asked],
    rows: Mapping[str, Sequence[Row]],
    known: Baseline | None,
    given: Threshold | None,
    gpu: str,
) -> Baseline:
    """The baseline of a run of the whole sweep; points of the old one keep their own thresholds.

    Args:
        rows: by identity; of each point and ratio as many as the run repeated it.
        known: the old baseline.
        given: the default threshold, in place of the old one's.
        gpu: the GPU's name.

    Raises:
        UserError: a point or a ratio that failed, is unstable or missing, rows from a dirty tree or of two commits, or
            a ratio of a kernel with itself that is beyond the threshold.
    """
    default = given or (known.threshold if known else DEFAULT_THRESHOLD)
    own = {point.key: point.threshold for point in known.points} if known else {}
    _check_method(rows, default)
    points = []
    used: list[Row] = []
    for one in asked:
        point = _point(one, rows, own.get(one.key))
        used += rows[one.key]
        over = one.ratios.get(point.by)
        if over is not None:
            found = rows.get(over.key, ())
            point = replace(point, reference=_reference(one, found))
            used += found
        points.append(point)
    for row in used:
        check_clean(row["environment"])
    commits = sorted({str(row["environment"]["commit"]) for row in used})
    if len(commits) > 1:
        raise UserError(f"no baseline written: the commit changed while measuring ({', '.join(commits)}); run it again")
    return Baseline(
        str(used[0]["environment"].get("gpu") or gpu),
        environment_of(used),
        max(row["timestamp"] for row in used),
        default,
        tuple(points),
    )


def check_clean(machine: Mapping[str, Any]) -> None:
    """Refuse an environment whose numbers nobody could measure again from a commit."""
    if not machine.get("commit") or machine.get("dirty") is None:
        raise UserError("--update: the commit is not known here, and a baseline must name it; set MOEBENCH_COMMIT")
    if machine["dirty"]:
        raise UserError("--update: the tree has uncommitted changes, and a baseline must name a commit; commit first")


def _check_method(rows: Mapping[str, Sequence[Row]], threshold: Threshold) -> None:
    """Refuse a run whose ratio of a kernel with itself is farther from 1 than what the gate shall find."""
    for row in (row for found in rows.values() for row in found):
        if row["record"] != "ratio" or not is_a_a(row):
            continue
        if row["status"] != "ok":
            raise UserError(f"no baseline written: {row['numerator']} against itself: {row['status']}: {row['reason']}")
        if abs(row["value"] - 1.0) > threshold.fraction:
            text = f"{row['numerator']} against itself is {row['value']:.3f}, beyond the threshold {threshold}"
            raise UserError(f"no baseline written: {text}; is something else on the GPU?")


def _point(one: Asked, rows: Mapping[str, Sequence[Row]], own: Threshold | None) -> BaselinePoint:
    """All but its ratio over the bound."""
    now = combine(rows.get(one.key, ()))
    if not isinstance(now, Now):
        raise UserError(f"no baseline written: {one.what}: {': '.join(now)}")
    if now.unstable:
        raise UserError(f"no baseline written: {one.what}: unstable: {' '.join(now.unstable.split())}")
    # Of a single measurement nobody knows which of its times repeats.
    again = combine(rows[one.key], BUSY) if len(rows[one.key]) >= LEAST_REPEATED else None
    fields = {**point_fields(one.point), "shape": str(one.point.shape), "pass": one.pass_}
    shown = ("implementation", "operation", "variant", "shape", "dtype", "pass")
    return BaselinePoint(
        one.what,
        one.key,
        {key: fields[key] for key in shown},
        now.basis,
        now.time,
        {name: round(us, 3) for name, us in now.kernels.items()},
        own,
        busy=again.time if isinstance(again, Now) else None,
    )


def _reference(one: Asked, rows: Sequence[Row]) -> Reference:
    ratio = ratio_of(rows)
    if not isinstance(ratio, Interval):
        reason = " ".join(": ".join(ratio).split())
        raise UserError(f"no baseline written: ratio over the bound of {one.what}: {reason}")
    return Reference(ratio, rows[0]["basis"])

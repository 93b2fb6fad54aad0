"""What a measurement means beside its baseline: nothing, a suspicion, or a regression; and which kernel grew."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from harness.record import MEASURED_STATUSES
from harness.regress.baseline import DEVICE, BaselinePoint, Interval, Threshold

#: Outcomes of a point. The first four let the gate fail.
REGRESSION, FAILED, MISSING, INCOMPARABLE = "regression", "failed", "missing", "cannot compare"
#: The others: slower but not by the ratio over the bound; slower, but the intervals overlap; not in the baseline.
DRIFT, OVERLAP, NEW, FASTER, SAME = "drift", "intervals overlap", "new", "faster", "ok"
FAILING = (REGRESSION, FAILED, MISSING, INCOMPARABLE)
#: A kernel that the baseline lacks is named where it takes at least this share of the baseline's time.
_NEW_KERNEL_SHARE = 0.01


@dataclass(frozen=True)
class Now:
    """What this run measured of a point, all repetitions taken together (`combine`).

    Attributes:
        time: ms, of the kind that was asked for; ``basis`` is that of the device time.
        kernels: microseconds of one call by role, or by name where a kernel has no role.
        names: the kernels of each role, the longest first.
        unstable: why the number is not to be trusted by itself; empty where it is.
    """

    time: Interval
    basis: str
    kernels: dict[str, float]
    names: dict[str, list[str]]
    unstable: str = ""


@dataclass(frozen=True)
class Grown:
    """A kernel that takes longer, in microseconds of one call; ``before`` is None where the baseline lacks it."""

    name: str
    before: float | None
    now: float


@dataclass(frozen=True)
class SecondLook:
    """A suspicious point measured again; ``how`` says against what. Ratios, or ms where the point has no reference."""

    how: str
    before: Interval
    now: Interval


@dataclass
class Finding:
    """What came of one point and pass; ``by`` is the time that ``before`` and ``now`` are of, as a row names it."""

    what: str
    key: str
    outcome: str
    reason: str = ""
    threshold: Threshold | None = None
    before: Interval | None = None
    now: Interval | None = None
    second: SecondLook | None = None
    kernels: list[Grown] = field(default_factory=list)
    by: str = DEVICE

    @property
    def failing(self) -> bool:
        return self.outcome in FAILING


def change(now: Interval, before: Interval) -> float:
    """0.1: now's median is 10 % above the baseline's."""
    return now.median / before.median - 1.0


def compared(now: Interval, before: Interval, threshold: Threshold) -> str:
    """`REGRESSION` (so far a suspicion only), `OVERLAP`, `FASTER` or `SAME`.

    A regression is a median worse by more than the threshold whose *whole* interval lies above the baseline's. That is
    stricter than a median above the baseline's interval: both medians are uncertain, and on a clock that wanders a lone
    median leaves a narrow baseline interval every few runs. A slowdown that is real comes out of both intervals as soon
    as there are samples enough; until then it is shown as `OVERLAP`.
    """
    worse = change(now, before)
    if worse > threshold.fraction:
        return REGRESSION if now.low > before.high else OVERLAP
    # As far down as the threshold reaches up, by factors: 5 % slower and back is the same.
    if 1.0 / (1.0 + worse) - 1.0 > threshold.fraction and now.high < before.low:
        return FASTER
    return SAME


def kernels_of(row: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, list[str]]]:
    """Microseconds of one call by role (by name without one), and the names of each, the longest first."""
    us: dict[str, float] = defaultdict(float)
    names: dict[str, list[str]] = defaultdict(list)
    for kernel in sorted(row.get("kernels") or (), key=lambda kernel: -kernel["us"]):
        key = kernel.get("role") or kernel["name"]
        us[key] += kernel["us"]
        names[key].append(kernel["name"])
    return {key: round(value, 3) for key, value in us.items()}, dict(names)


def combine(rows: Sequence[Mapping[str, Any]], by: str = DEVICE) -> Now | tuple[str, str]:
    """All rows of one point in this run as one: the median of the medians within the union of their intervals.

    Args:
        by: which of a row's times.

    The union is as wide as the repetitions lie apart, so that what happens to one of them alone cannot fail the gate.

    Returns:
        The numbers, or (outcome, reason) of a point that has none: one repetition that fails, fails the point.
    """
    if not rows:
        return MISSING, "no row of this point in this run"
    bad = next((row for row in rows if row["status"] not in MEASURED_STATUSES), None)
    if bad is not None:
        return FAILED, f"{bad['status']}: {bad.get('reason') or 'no reason given'}"
    for name, kind in ((DEVICE, "device"), (by, "busy")):
        if not all(row.get(name) for row in rows):
            return FAILED, f"the row has no {kind} time"
    bases = sorted({row[DEVICE]["basis"] for row in rows})
    if len(bases) > 1:
        return INCOMPARABLE, f"its repetitions give times of several kinds: {', '.join(bases)}"
    kernels: dict[str, list[float]] = defaultdict(list)
    names: dict[str, list[str]] = {}
    for row in rows:
        us, its_names = kernels_of(row)
        for name, value in us.items():
            kernels[name].append(value)
        names = {**its_names, **names}
    unstable = next((str(row.get("reason") or "unstable") for row in rows if row["status"] == "unstable"), "")
    return Now(
        union([Interval(row[by]["median"], *row[by]["ci95"]) for row in rows]),
        bases[0],
        {name: median(values) for name, values in kernels.items()},
        names,
        unstable,
    )


def union(intervals: Sequence[Interval]) -> Interval:
    """The median of medians, from the lowest to the highest end."""
    return Interval(
        median(one.median for one in intervals),
        min(one.low for one in intervals),
        max(one.high for one in intervals),
    )


def grown(now: Now, before: BaselinePoint, threshold: Threshold) -> list[Grown]:
    """Kernels that take longer by more than the threshold, those that lost the most microseconds first."""
    found = []
    for key, us in now.kernels.items():
        base = before.kernels.get(key)
        if base is None and us < _NEW_KERNEL_SHARE * before.time.median * 1e3:
            continue
        if base is None or us > base * (1.0 + threshold.fraction):
            found.append(Grown(_kernel_name(key, now.names.get(key, [])), base, us))
    return sorted(found, key=lambda kernel: -(kernel.now - (kernel.before or 0.0)))


def _kernel_name(key: str, names: Sequence[str]) -> str:
    """``dH (hidden_gradient_kernel)``; of a role with several kernels the longest one."""
    if not names or names[0] == key:
        return key
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{key} ({names[0]}{more})"


def first_look(before: BaselinePoint, rows: Sequence[Mapping[str, Any]], threshold: Threshold) -> Finding:
    """What this run's rows say of a baseline's point. `REGRESSION` is a suspicion that `second_look` settles; so is an
    unstable row, whose number alone says nothing either way."""
    found = Finding(before.what, before.key, SAME, threshold=threshold, before=before.judged, by=before.by)
    now = combine(rows, before.by)
    if not isinstance(now, Now):
        found.outcome, found.reason = now
        return found
    found.now = now.time
    if now.basis != before.basis:
        found.outcome = INCOMPARABLE
        found.reason = f"the baseline's time is of kind {before.basis}, this run's of kind {now.basis}"
        return found
    found.outcome = compared(now.time, before.judged, threshold)
    if now.unstable:
        found.outcome, found.reason = REGRESSION, f"unstable: {now.unstable}"
    if found.outcome in (REGRESSION, OVERLAP):
        found.kernels = grown(now, before, threshold)
    return found


def second_look(found: Finding, before: BaselinePoint, rows: Sequence[Mapping[str, Any]], ratio: str) -> None:
    """Settle a suspicion by the rows of the second look.

    Args:
        rows: ratio rows over the bound where ``ratio`` is not empty, else measurements of the point.
        ratio: what the ratio is over.
    """
    if ratio and before.reference is not None:
        now = ratio_of(rows, before.reference.basis)
        how, base = f"ratio over {ratio}", before.reference.ratio
    else:
        again = combine(rows, before.by)
        how, base = "measured again", before.judged
        if isinstance(again, Now) and again.unstable:
            again = (FAILED, f"unstable: {again.unstable}")
        if isinstance(again, Now) and again.basis != before.basis:
            again = (INCOMPARABLE, f"the baseline's time is of kind {before.basis}, this run's of kind {again.basis}")
        now = again.time if isinstance(again, Now) else again
    if not isinstance(now, Interval):
        found.outcome, found.reason = now[0], f"second look ({how}): {now[1]}"
        return
    assert found.threshold is not None
    found.second = SecondLook(how, base, now)
    verdict = compared(now, base, found.threshold)
    if verdict == REGRESSION:
        found.outcome = REGRESSION
        return
    why = {OVERLAP: "its intervals overlap"}.get(verdict, "it stayed within the threshold")
    found.outcome = DRIFT
    found.reason = "; ".join(part for part in (found.reason, f"not confirmed, {how}: {why}") if part)


def ratio_of(rows: Sequence[Mapping[str, Any]], basis: str = "") -> Interval | tuple[str, str]:
    """All rows of one ratio in this run as one, as `combine` does; ``basis``: of which kind its times must be."""
    if not rows:
        return MISSING, "no row of this ratio in this run"
    bad = next((row for row in rows if row["status"] != "ok"), None)
    if bad is not None:
        return FAILED, f"{bad['status']}: {bad.get('reason') or 'no reason given'}"
    kinds = sorted({str(row.get("basis")) for row in rows} | ({basis} if basis else set()))
    if len(kinds) > 1:
        return INCOMPARABLE, f"its times are of several kinds: {', '.join(kinds)}"
    return union([Interval(row["value"], *row["ci95"]) for row in rows])

"""Token rounding: from rows to series over the number of experts, for the figure in `token_rounding`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from plots import rows as table
from plots import style

TOP_K = "top_k"
#: Order of drawing, label, colour and marker of the routing methods; blue and sky are left to implementations.
METHODS: dict[str, tuple[str, str, str]] = {
    TOP_K: ("top-K", style.INK, "o"),
    "nearest": ("nearest tile", style.GREEN, "s"),
    "up": ("up", style.ORANGE, "^"),
    "down": ("down", style.VERMILLION, "v"),
    "stochastic": ("stochastic", style.PURPLE, "D"),
    "balanced": ("balanced", style.YELLOW, "P"),
    "expert_choice": ("expert choice", "#9A9A9A", "X"),
    "token_drop": ("token drop", "#8A3D00", "h"),
}
#: The experts alone with their routing given, and the layer, the rounding itself included.
OPERATIONS = ("routed_experts", "moe_layer")


@dataclass(frozen=True)
class Family:
    """Shapes that differ in the number of experts only, and the M tile to which their rows are padded."""

    T: int
    d: int
    n: int
    K: int
    m_tile: str
    experts: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, int, int, int, str]:
        return self.T, self.d, self.n, self.K, self.m_tile

    @property
    def title(self) -> str:
        tile = f", M tile of {self.m_tile} rows" if self.m_tile else ""
        return f"T = {self.T}, d = {self.d}, n = {self.n}, K = {self.K}{tile}"

    def of(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The rows of this family."""
        same = rows["m_tile"] == self.m_tile
        for name, size in zip(("T", "d", "n", "K"), self.sizes, strict=False):
            same &= rows[name] == size
        return rows[same]


@dataclass(frozen=True)
class Point:
    """One number of a series over E; ``failed``: there is none and a footnote says why."""

    experts: int
    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    unstable: bool = False
    failed: bool = False


@dataclass(frozen=True)
class Moved:
    """Rows added and dropped at one E, in % of T·K."""

    experts: int
    added: float = math.nan
    dropped: float = math.nan
    unstable: bool = False
    failed: bool = False


Notes = style.Footnotes


def method_label(method: str) -> str:
    return METHODS[method][0] if method in METHODS else method


def in_order(found: Iterable[str], order: Iterable[str]) -> list[str]:
    """What was found: first the known ones in their order, then the others."""
    known, present = list(order), set(found)
    return [name for name in known if name in present] + sorted(present - set(known))


def accounts(rows: pd.DataFrame) -> pd.DataFrame:
    """Accounts of routings, oldest first: what came of a method, counted without a layer."""
    chosen = rows[(rows["record"] == "measurement") & (rows["operation"] == "token_rounding") & (rows["method"] != "")]
    return table.by_precedence(chosen)


def _on_gpu(rows: pd.DataFrame) -> pd.DataFrame:
    chosen = (rows["measured_on"] == "cuda") & rows["dtype"].isin(["bfloat16", ""])
    return table.by_precedence(rows[chosen])


def measurements(rows: pd.DataFrame) -> pd.DataFrame:
    """Measurements on a GPU of the experts alone with the routing given, oldest first."""
    gpu = _on_gpu(rows)
    return gpu[(gpu["record"] == "measurement") & (gpu["operation"] == "routed_experts")]


def comparisons(rows: pd.DataFrame) -> pd.DataFrame:
    """Ratio rows of one implementation's device time with top-K over its own with another method, oldest first."""
    gpu = _on_gpu(rows)
    return gpu[
        (gpu["record"] == "ratio")
        & gpu["operation"].isin(OPERATIONS)
        & (gpu["numerator"] == gpu["denominator"])
        & (gpu["method"] == TOP_K)
        & ~gpu["denominator_method"].isin(["", TOP_K])
        & (gpu["time_kind"] == "device")
    ]


@dataclass(frozen=True)
class Rounded:
    """All rows that a routing's numbers come from."""

    accounts: pd.DataFrame
    measurements: pd.DataFrame
    comparisons: pd.DataFrame

    @classmethod
    def among(cls, rows: pd.DataFrame) -> Rounded:
        return cls(accounts(rows), measurements(rows), comparisons(rows))


def families(rows: pd.DataFrame) -> list[Family]:
    """The families among rows, those with the most numbers of experts first."""
    found: dict[tuple[int, int, int, int, str], set[int]] = {}
    for T, d, n, K, m_tile, E in zip(*(rows[c] for c in ("T", "d", "n", "K", "m_tile", "E")), strict=True):
        found.setdefault((int(T), int(d), int(n), int(K), str(m_tile)), set()).add(int(E))
    every = [Family(*sizes, tuple(sorted(experts))) for sizes, experts in found.items()]
    return sorted(every, key=lambda family: (-len(family.experts), family.sizes))


def choose(counted: pd.DataFrame, gpu: pd.DataFrame) -> tuple[Family | None, Family | None, list[Family]]:
    """The family to draw of the accounts and of the rows of a GPU (the same where it can be), and those left out.
    Of accounts with equally many points those come first that a GPU has measured as well. Without tokens there are no
    shares to draw."""
    on_gpu = families(gpu)
    measured = {family.sizes for family in on_gpu}
    every = sorted(families(counted), key=lambda f: (-len(f.experts), f.sizes not in measured))
    first = next((family for family in every if family.T), None)
    same = [family for family in on_gpu if first is not None and family.sizes == first.sizes]
    second = next((family for family in [*same, *on_gpu] if family.T), None)
    drawn = {family.sizes for family in (first, second) if family is not None}
    left: dict[tuple[int, int, int, int, str], Family] = {}
    for family in [*every, *on_gpu]:
        if family.sizes not in drawn:
            left.setdefault(family.sizes, family)
    return first, second, list(left.values())


def _of(rows: pd.DataFrame, experts: int, method: str, distribution: str) -> pd.DataFrame:
    return rows[(rows["E"] == experts) & (rows["method"] == method) & (rows["distribution"] == distribution)]


def _failed(row: pd.Series | None) -> bool:
    return row is not None and row["status"] not in table.NUMBERS_ALLOWED


def _note(row: pd.Series, who: str, method: str, notes: Notes) -> None:
    notes.mark(who, row["status"], row["reason"], f"{method_label(method)}, E = {int(row['E'])}")


def _timed(
    here: pd.DataFrame, direction: str, column: str, label: str, method: str, notes: Notes
) -> tuple[pd.Series | None, bool]:
    """The row of a pass that has a number in ``column``, and whether one failed in its place, which is then noted.

    Args:
        here: rows of one implementation, method and number of experts.
        label: the column that holds the implementation's label.
    """
    # A point that failed before its passes were timed may have one row for all of them.
    here = here[(here["pass"] == direction) | ~here["status"].isin(table.NUMBERS_ALLOWED)]
    row = table.best_row(here, column)
    if row is not None and _failed(row):
        name = row["implementation" if label == "label" else "numerator"]
        _note(row, style.label(name, {name: row[label]}), method, notes)
        return None, True
    return row, False


def wasted(counted: pd.DataFrame, family: Family, method: str, distribution: str, notes: Notes) -> list[Point]:
    """Share of the multiplied rows that no token is in, 1 − routed / padded, in %, by E."""
    points = []
    for experts in family.experts:
        row = table.best_row(_of(family.of(counted), experts, method, distribution), "padded_rows")
        value = math.nan
        if row is not None and _failed(row):
            _note(row, "Routing", method, notes)
        elif row is not None and row["padded_rows"] > 0:
            value = 100 * (1 - row["routed_rows"] / row["padded_rows"])
        unstable = row is not None and row["status"] == "unstable"
        points.append(Point(experts, value, unstable=unstable, failed=_failed(row)))
    return points


def moved(counted: pd.DataFrame, family: Family, method: str, distribution: str) -> list[Moved]:
    """Rows that a method adds to top-K's and drops from them, in % of T·K, by E. (`wasted` notes the failures.)"""
    share = 100 / (family.T * family.K)
    points = []
    for experts in family.experts:
        row = table.best_row(_of(family.of(counted), experts, method, distribution), "rows_added")
        if row is None or _failed(row):
            points.append(Moved(experts, failed=_failed(row)))
        else:
            unstable = row["status"] == "unstable"
            points.append(Moved(experts, share * row["rows_added"], share * row["rows_dropped"], unstable))
    return points


def throughput(
    gpu: pd.DataFrame, family: Family, implementation: str, method: str, distribution: str, direction: str,
    notes: Notes,
) -> tuple[list[Point], list[Point]]:  # fmt: skip
    """Model and hardware TFLOPS over the busy time, by E: FLOPs of the routed and of the padded rows."""
    model, hardware = [], []
    own = family.of(gpu)
    own = own[own["implementation"] == implementation]
    for experts in family.experts:
        here = _of(own, experts, method, distribution)
        row, failed = _timed(here, direction, "tflops", "label", method, notes)
        if row is None:
            model.append(Point(experts, failed=failed))
            hardware.append(Point(experts))
            continue
        unstable = row["status"] == "unstable"
        model.append(Point(experts, row["tflops"], row["tflops_low"], row["tflops_high"], unstable))
        # `hardware` is stored over `device_ms`; both lines share the busy time.
        hardware.append(Point(experts, row["tflops_hardware"] * row["device_ms"] / row["busy_ms"], unstable=unstable))
    return model, hardware


def counts(found: Rounded, family: Family, experts: int, method: str, distribution: str) -> tuple[float, float]:
    """(routed rows, padded rows) of a method: of the routing that a GPU ran, else of an account; NaN if unknown."""
    for source in (found.measurements, found.comparisons, found.accounts):
        own = _of(family.of(source), experts, method, distribution)
        row = table.best_row(own, "routed_rows")
        if row is not None and not _failed(row):
            return float(row["routed_rows"]), float(row["padded_rows"])
    return math.nan, math.nan


def speedups(
    found: Rounded, family: Family, implementation: str, operation: str, method: str, distribution: str,
    direction: str, notes: Notes,
) -> list[Point]:  # fmt: skip
    """Speed-up per routed row over top-K, by E: time with top-K / time with the method, times the method's rows / those
    of top-K."""
    own = family.of(found.comparisons)
    own = own[
        (own["numerator"] == implementation)
        & (own["operation"] == operation)
        & (own["denominator_method"] == method)
    ]  # fmt: skip
    points = []
    for experts in family.experts:
        here = _of(own, experts, TOP_K, distribution)
        row, failed = _timed(here, direction, "value", "numerator_label", method, notes)
        if row is None:
            points.append(Point(experts, failed=failed))
            continue
        before, after = row["routed_rows"], row["denominator_rows"]
        if math.isnan(before):
            before, _ = counts(found, family, experts, TOP_K, distribution)
        if math.isnan(after):
            after, _ = counts(found, family, experts, method, distribution)
        if not (before > 0 and after > 0):
            who = style.label(implementation, {implementation: row["numerator_label"]})
            notes.mark(who, "no speed-up per row", "the rows that were routed are not known",
                       f"{method_label(method)}, E = {experts}")  # fmt: skip
            points.append(Point(experts, failed=True))
            continue
        scale = after / before
        value, low, high = (float(row[name]) * scale for name in ("value", "value_low", "value_high"))
        points.append(Point(experts, value, low, high, row["status"] == "unstable"))
    return points


def paying(points: Iterable[Point], k: int) -> str:
    """At which sparsities E / K a speed-up's whole interval lies above 1, such as ``8 to 64``: runs of neighbours among
    the measured ones. A point without a number ends a run."""
    runs: list[list[int]] = []
    goes_on = False
    for point in points:
        pays = point.low > 1.0
        if pays and goes_on:
            runs[-1].append(point.experts)
        elif pays:
            runs.append([point.experts])
        goes_on = pays
    texts = [" to ".join(f"{e / k:g}" for e in dict.fromkeys((run[0], run[-1]))) for run in runs]
    return ", ".join(texts) or "nowhere"


def found_choices(found: Rounded, family: Family) -> dict[str, list[int]]:
    """Implementation -> at which numbers of experts a number of (c) or (d) has tiles that were found on the machine."""
    where: dict[str, set[int]] = {}
    kind = ["operation", "E", "method", "denominator_method", "distribution", "pass"]
    for rows, who in ((found.measurements, "implementation"), (found.comparisons, "numerator")):
        own = family.of(rows)
        own = own[own["status"].isin(table.NUMBERS_ALLOWED)].drop_duplicates([who, *kind], keep="last")
        for name, experts in own.loc[own["found_choices"] > 0, [who, "E"]].itertuples(index=False):
            where.setdefault(name, set()).add(int(experts))
    return {name: sorted(its) for name, its in where.items()}


#: Share of a pass' FLOPs in GEMMs whose tiles lie over rows: all but the weight gradients, which contract over rows in
#: steps shorter than the tile; that padding, about half as much, is left out, so the prediction is on the low side. Of
#: 3, 6 and 9 GEMMs of n·d for each row these are 3, 3 and 6 (`harness.costs`).
PADDED_SHARE = {"forward": 1.0, "backward": 1 / 2, "forward_backward": 2 / 3}


def prediction(found: Rounded, family: Family, distribution: str, direction: str) -> list[Point]:
    """By E: the speed-up per routed row if time went with the FLOPs, those of top-K's padded rows where tiles lie over
    rows, and rounding left no padding: 1 + share · (padded / routed rows − 1)."""
    points = []
    for experts in family.experts:
        routed, padded = counts(found, family, experts, TOP_K, distribution)
        gain = padded / routed - 1 if routed > 0 else math.nan
        points.append(Point(experts, 1 + PADDED_SHARE.get(direction, math.nan) * gain))
    return points

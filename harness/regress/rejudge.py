"""Rounds of the gate's sweep that were stored, judged again without a GPU: how often the gate would cry, how far each
time of each point wanders, and what a slowdown would come to if it made every time longer by the same share."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness import regress as gate
from harness import store
from harness.errors import UserError
from harness.record import MODES, Row, gpu_slug
from harness.regress import baseline as baselines
from harness.regress.asked import Asked
from harness.regress.baseline import BUSY, DEVICE, LEAST_REPEATED, Baseline, BaselinePoint, Interval, Threshold
from harness.regress.judge import REGRESSION, Now, combine, compared, second_look
from harness.report.text import NONE, count
from harness.sweep import Sweep

#: The rule of `BaselinePoint.by`, beside judging every point by one and the same time.
BEST = "what repeated best"
#: The rows of one gate's first look, by identity.
Round = dict[str, list[Mapping[str, Any]]]


@dataclass
class Block:
    """Gates and the second looks that followed: rows of each ratio over the bound, in order, by identity."""

    rounds: list[Round] = field(default_factory=list)
    looks: dict[str, list[Row]] = field(default_factory=lambda: defaultdict(list))


def asked_in_any_mode(sweep: Sweep, known: Baseline) -> list[Asked]:
    """The sweep's points that a baseline has, in whichever mode it was measured."""
    modes = [replace(sweep, options=replace(sweep.options, mode=mode)) for mode in MODES]
    keys = {point.key for point in known.points}
    return [one for each in modes for one in gate.asked_of(each) if one.key in keys]


def blocks_of(rows: Sequence[Row], asked: Sequence[Asked]) -> list[Block]:
    """Gates in a file of rows, in its order.

    A run that measures every point and no ratio is one of gates: a round ends where a point comes again. A run with
    both made a baseline and is left out, with the ratios that follow it; so is a run of a part of the points, and a
    round that was cut off.
    """
    points, ratios = {one.key for one in asked}, {over.key for one in asked for over in one.ratios.values()}
    found = [Block()]
    for _, group in groupby(rows, key=lambda row: row["run_id"]):
        of_run = [(store.identity(row, None), row) for row in group]
        measured = [(key, row) for key, row in of_run if key in points]
        looked = [(key, row) for key, row in of_run if key in ratios]
        if points <= {key for key, _ in measured}:
            if any(row["record"] == "ratio" for _, row in of_run):
                found.append(Block())
                continue
            if found[-1].looks:
                found.append(Block())
            found[-1].rounds += (each for each in _rounds(measured) if len(each) == len(points))
        else:
            for key, row in looked:
                found[-1].looks[key].append(row)
    return [block for block in found if block.rounds]


def _rounds(measured: Sequence[tuple[str, Row]]) -> Iterator[Round]:
    found: Round = {}
    for key, row in measured:
        if key in found:
            yield found
            found = {}
        found[key] = [row]
    yield found


@dataclass(frozen=True)
class Verdicts:
    """What stored gates come to at one threshold.

    Attributes:
        suspicious: gates in which some point looks slower.
        settled: gates whose every suspicion has a second look among the rows, those without any included.
        failing: those of the settled ones that fail.
        caught: by point, in how many gates it looks slower once it is made slower by the share asked for.
    """

    threshold: Threshold
    gates: int
    suspicious: int
    settled: int
    failing: int
    caught: dict[str, int]


def verdicts(
    blocks: Sequence[Block], known: Baseline, asked: Sequence[Asked], thresholds: Sequence[Threshold], slowdown: float
) -> list[Verdicts]:
    """Every stored gate judged by a baseline, at each threshold (which counts for every point).

    Args:
        slowdown: 0.055: every time of a point is made longer by 5.5 %, one point after another.
    """
    looks = [looks_of(block, known, asked, thresholds) for block in blocks]
    found = []
    for threshold in thresholds:
        suspicious = settled = failing = 0
        caught: Counter[str] = Counter()
        for block, of_block in zip(blocks, looks, strict=True):
            for index, rows in enumerate(block.rounds):
                findings, suspicions = gate.first_looks(asked, known, threshold, rows)
                suspicious += bool(suspicions)
                if _settle(suspicions, of_block[index] if index < len(of_block) else {}):
                    settled += 1
                    failing += any(one.failing for one in findings)
                slowed = {key: [slower(row, slowdown) for row in its] for key, its in rows.items()}
                for one in gate.first_looks(asked, known, threshold, slowed)[0]:
                    caught[one.what] += one.outcome == REGRESSION
        gates = sum(len(block.rounds) for block in blocks)
        found.append(Verdicts(threshold, gates, suspicious, settled, failing, dict(caught)))
    return found


def _settle(suspicions: Sequence[gate.Suspicion], looks: Mapping[str, Row]) -> bool:
    """Whether all suspicions of a gate could be settled by the second looks stored for it."""
    for found, point, one in suspicions:
        over = one.settling(point)
        if over is None or over.key not in looks:
            return False
        second_look(found, point, [looks[over.key]], over.what)
    return True


def looks_of(
    block: Block, known: Baseline, asked: Sequence[Asked], thresholds: Sequence[Threshold]
) -> list[dict[str, Row]]:
    """Of each gate, as far as there are any, the ratio rows of its second look, by identity.

    Rows do not say which gate they are of. But each suspicion asked for one, gate by gate: so they are handed out to
    the first so many gates where, at one of the thresholds, exactly these suspicions would have asked for exactly these
    rows. Where they fit nowhere, none are handed out.
    """
    stored = {key: len(rows) for key, rows in block.looks.items()}
    for threshold in thresholds:
        wanted = [
            [
                over.key
                for _, point, one in gate.first_looks(asked, known, threshold, rows)[1]
                if (over := one.settling(point)) is not None
            ]
            for rows in block.rounds
        ]
        for gates in range(len(wanted), 0, -1):
            if stored and Counter(key for keys in wanted[:gates] for key in keys) == stored:
                left = {key: iter(rows) for key, rows in block.looks.items()}
                return [{key: next(left[key]) for key in keys} for keys in wanted[:gates]]
    return []


def slower(row: Mapping[str, Any], slowdown: float) -> Mapping[str, Any]:
    """The row with each of its device times longer by so much (0.055: 5.5 %)."""
    found = dict(row)
    for name in (DEVICE, BUSY):
        time = row.get(name)
        if time:
            scaled = {"median": time["median"] * (1 + slowdown), "ci95": [end * (1 + slowdown) for end in time["ci95"]]}
            found[name] = {**time, **scaled}
    return found


@dataclass(frozen=True)
class Spread:
    """How far one time of a point wandered over the rounds: its medians over the median of them."""

    least: float
    largest: float
    deviation: float


def spreads(rounds: Sequence[Round]) -> dict[str, dict[str, Spread]]:
    """By identity and time; what was not measured in two rounds is absent."""
    found: dict[str, dict[str, Spread]] = defaultdict(dict)
    for key in dict.fromkeys(key for each in rounds for key in each):
        for name in (DEVICE, BUSY):
            times = [row[name]["median"] for each in rounds for row in each.get(key, ()) if row.get(name)]
            if len(times) > 1:
                centre = median(times)
                found[key][name] = Spread(min(times) / centre, max(times) / centre, stdev(times) / mean(times))
    return found


@dataclass
class Crossed:
    """What a rule comes to where some rounds make the baseline and others are judged by it, all such pairs together.

    Attributes:
        gates: so many were judged; ``points``: their points.
        suspicious: gates in which some point looked slower, though nothing was changed.
        caught: by point, how often it looked slower with the slowdown.
    """

    gates: int = 0
    suspicious: int = 0
    caught: Counter[str] = field(default_factory=Counter)

    def share(self, key: str = "") -> float:
        """Caught slowdowns over tries, of one point or of all."""
        if key:
            return self.caught[key] / self.gates
        return sum(self.caught.values()) / (self.gates * len(self.caught))


def crossed(rounds: Sequence[Round], threshold: Threshold, slowdown: float, repeat: int) -> dict[str, Crossed]:
    """First looks by three rules, each cross-validated: any ``repeat`` neighbouring rounds of one half make a baseline,
    and all rounds of the other half are judged by it. By rule: `DEVICE` alone, `BUSY` alone, and `BEST`.

    Rounds in which a point lacks one of the times are left out. A half of fewer than ``repeat`` makes no baseline.
    """
    rounds = [each for each in rounds if all(isinstance(combine(its, BUSY), Now) for its in each.values())]
    half = len(rounds) // 2
    found = {rule: Crossed() for rule in (DEVICE, BUSY, BEST)}
    for making, judged in ((rounds[:half], rounds[half:]), (rounds[half:], rounds[:half])):
        for start in range(len(making) - repeat + 1):
            points = list(_points(making[start : start + repeat]))
            for rows in judged:
                cries: Counter[str] = Counter()
                for point in points:
                    slow = _by_rule(point, rows[point.key][0], 0.0, threshold)
                    caught = _by_rule(point, rows[point.key][0], slowdown, threshold)
                    for rule in found:
                        cries[rule] += slow[rule]
                        found[rule].caught[point.key] += caught[rule]
                for rule, its in found.items():
                    its.gates += 1
                    its.suspicious += cries[rule] > 0
    return found


def _points(rounds: Sequence[Round]) -> Iterator[BaselinePoint]:
    """What of a baseline of these rounds judges a first look."""
    for key in rounds[0]:
        rows = [row for each in rounds for row in each[key]]
        device, busy = combine(rows), combine(rows, BUSY)
        if isinstance(device, Now) and isinstance(busy, Now):
            yield BaselinePoint("", key, {}, device.basis, device.time, busy=busy.time)


def rejudge(
    out: Console, path: Path, baseline: Path | None, threshold: Threshold, slowdown: float, sweep: Sweep
) -> None:
    """Judge the gates in a file of rows again, and print what came of it.

    Args:
        baseline: default: the one of the rows' GPU.
        threshold: is taken beside the baseline's own.

    Raises:
        UserError: the file or the baseline cannot be read, or holds no round of the other's points.
    """
    if not path.is_file():
        raise UserError(f"--rows {path}: no such file")
    rows, problems = store.read(path)
    for problem in problems:
        out.print(f"[yellow]ignored[/] {escape(str(problem))}", highlight=False, soft_wrap=True)
    if baseline is None:
        gpu = next((row["environment"]["gpu"] for row in rows if row["environment"].get("gpu")), None)
        if gpu is None:
            raise UserError(f"--rows {path}: no row of a GPU; name the baseline by --baseline")
        baseline = gate.BASELINES / f"{gpu_slug(gpu)}.json"
    known = gate.of_all_points(baselines.read(baseline), None)
    asked = asked_in_any_mode(sweep, known)
    blocks = blocks_of(rows, asked) if asked else []
    rounds = [each for block in blocks for each in block.rounds]
    if not rounds:
        raise UserError(f"--rows {path}: no round of {sweep.name} with every point of {baseline}")
    thresholds = list(dict.fromkeys([threshold, known.threshold]))
    _print_verdicts(out, verdicts(blocks, known, asked, thresholds, slowdown), baseline, known, slowdown)
    names = {one.key: one.what for one in asked}
    _print_spreads(out, spreads(rounds), names)
    for its in thresholds:
        _print_crossed(out, crossed(rounds, its, slowdown, LEAST_REPEATED), names, its, slowdown)


def _print(out: Console, title: str, head: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(head):
        table.add_column(column, overflow="fold", justify="right" if index else "left")
    for line in lines:
        table.add_row(*map(escape, line))
    out.print(table, highlight=False)


def _print_verdicts(out: Console, found: Sequence[Verdicts], path: Path, known: Baseline, slowdown: float) -> None:
    _print(
        out,
        f"{count(found[0].gates, 'gate')} without a change, by {path.name} of {known.made}",
        ("threshold", "look slower", "second looks known of", "of these fail"),
        [(str(one.threshold), str(one.suspicious), str(one.settled), str(one.failing)) for one in found],
    )
    _print(
        out,
        f"First looks that find a point slower by {slowdown:.1%}, if all its times are",
        ("point", *(str(one.threshold) for one in found)),
        [(what, *(f"{one.caught[what]} of {one.gates}" for one in found)) for what in found[0].caught],
    )


def _print_spreads(out: Console, found: Mapping[str, Mapping[str, Spread]], names: Mapping[str, str]) -> None:
    def cell(its: Mapping[str, Spread], name: str) -> str:
        one = its.get(name)
        return NONE if one is None else f"{one.least:.3f} to {one.largest:.3f}, sd {one.deviation:.1%}"

    lines = [(names[key], *(cell(its, name) for name in (DEVICE, BUSY))) for key, its in found.items()]
    _print(out, "Medians of the rounds over the median of them", ("point", DEVICE, BUSY), lines)


def _print_crossed(
    out: Console, found: Mapping[str, Crossed], names: Mapping[str, str], threshold: Threshold, slowdown: float
) -> None:
    gates = found[BEST].gates
    if not gates:
        out.print(f"Too few rounds to make a baseline of {LEAST_REPEATED} of one half and judge the other by it")
        return
    title = f"{LEAST_REPEATED} neighbouring rounds of one half as the baseline, the other half judged at {threshold}"
    lines = [("without a change, gates that look slower", *(f"{its.suspicious / gates:.1%}" for its in found.values()))]
    lines += [
        (f"{names[key]}, {slowdown:.1%} slower", *(f"{its.share(key):.0%}" for its in found.values())) for key in names
    ]
    lines.append((f"all points, {slowdown:.1%} slower", *(f"{its.share():.0%}" for its in found.values())))
    _print(out, title, ("first looks", *found), lines)


def _by_rule(point: BaselinePoint, row: Mapping[str, Any], slowdown: float, threshold: Threshold) -> dict[str, bool]:
    """Whether the row looks slower than the baseline's point, by each rule."""
    slowed = slower(row, slowdown)
    assert point.busy is not None
    now = {by: Interval(slowed[by]["median"], *slowed[by]["ci95"]) for by in (DEVICE, BUSY)}
    before = {DEVICE: point.time, BUSY: point.busy}
    found = {by: compared(now[by], before[by], threshold) == REGRESSION for by in now}
    return {**found, BEST: found[point.by]}

"""How far the gate can be trusted, tried on a GPU: how often it cries without a change, how often it sees a real one.

    python -m harness.regress.trial                    # 20 gates without a change, 10 with a planted slowdown
    python -m harness.regress.trial --gates 0 --tries 10 --slowdown 5.5
    python -m harness.regress.trial --rows FILE        # no GPU: judge again what was measured (`rejudge.py`)

Gates without a change are the sweep's points measured again and again, each round judged by itself as `moebench
regress` judges it, second look included. The slowdown is real work: a part of the down-projection's tiles is multiplied
twice (`planted/slowed_down_projection.py`). How many of them is set by what the slowed layer was measured to take
beside ours, call by call in one process; and only where that lies as near to the slowdown asked for as `WITHIN` is
anything tried.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from harness import regress as gate
from harness import store
from harness.documents import save
from harness.errors import UserError, refusals
from harness.interface import Point
from harness.record import Row, gpu_slug
from harness.registry import PLUGINS_VARIABLE
from harness.regress import baseline as baselines
from harness.regress import output as outputs
from harness.regress.baseline import LEAST_REPEATED, Baseline, BaselinePoint, Interval, Threshold, parse_threshold
from harness.regress.judge import REGRESSION, Finding, change, ratio_of
from harness.regress.rejudge import rejudge
from harness.session import RESULTS, results_folder
from harness.sweep import RatioPoint, Sweep

PLANTED = Path(__file__).parent / "planted"
#: As `planted/slowed_down_projection.py` reads it, which cannot be imported without an effect.
PERMILLE = "MOEBENCH_PLANTED_PERMILLE"
#: The slowed layer's name, the role of the kernel that is slowed down, and the pass that has it.
SLOWED, ROLE, PASS = "slowed_down_projection", "down", "forward"
#: How far the slowdown as measured may lie from the one that was asked for, as a share of the median.
WITHIN = 0.005
#: How often the planted work is set anew by what was measured, and how many ratio rows say that each time.
SETTINGS, RATIO_ROWS = 3, 3


@dataclass(frozen=True)
class Trial:
    """What a trial measures with.

    Attributes:
        known: the baseline, with the thresholds that count.
        asked: the sweep's points and passes.
    """

    run: gate.Run
    sweep: Sweep
    asked: Sequence[gate.Asked]
    known: Baseline

    def gates(self, number: int, workers: int = 1) -> list[list[Finding]]:
        """The findings of each of so many gates.

        First looks come out of so many worker processes, neighbouring ones out of the same, and all second looks of one
        kind out of another: starting and building takes longer than a look."""
        rounds = []
        for share in shares(number, workers):
            rows = self.run.measure(replace(self.sweep, points=self.sweep.points * share, ratios=[]))
            rounds += [_round(rows, index) for index in range(share)]
        return gate.judged(self.run, self.sweep, self.asked, self.known, None, rounds)

    def slowed(self, run: gate.Run) -> Trial:
        """The same with the slowed layer in place of ours, judged by our layer's baseline."""

        def its(point: Point) -> Point:
            return replace(point, implementation=SLOWED)

        ratios = [
            replace(ratio, point=its(ratio.point), denominator=SLOWED if ratio.is_a_a else ratio.denominator)
            for ratio in self.sweep.ratios
        ]
        sweep = replace(self.sweep, points=[its(point) for point in self.sweep.points], ratios=ratios)
        asked = gate.asked_of(sweep)
        new = {ours.key: one for ours, one in zip(self.asked, asked, strict=True)}
        points = tuple(
            replace(point, key=new[point.key].key, what=new[point.key].what)
            for point in self.known.points
            if point.key in new
        )
        return Trial(run, sweep, asked, replace(self.known, points=points))

    def slowdown(self, slowed: Trial) -> Interval | tuple[str, str]:
        """What the slowed layer takes over ours, both alternating call by call in one process; or (outcome, reason).
        Both trials are of one shape."""
        (ours,), (theirs,) = self.sweep.points, slowed.sweep.points
        ratio = RatioPoint(theirs, ours.implementation, (PASS,))
        rows = slowed.run.measure(replace(slowed.sweep, points=[], ratios=[ratio] * RATIO_ROWS))
        return ratio_of([row for found in rows.values() for row in found])

    def only(self, shape: str) -> Trial:
        """The same with the points of one shape."""
        asked = [one for one in self.asked if str(one.point.shape) == shape]
        keys = {one.key for one in asked}
        return replace(
            self,
            sweep=replace(self.sweep, points=[point for point in self.sweep.points if str(point.shape) == shape]),
            asked=asked,
            known=replace(self.known, points=tuple(point for point in self.known.points if point.key in keys)),
        )


def _round(rows: Mapping[str, Sequence[Row]], index: int) -> dict[str, list[Row]]:
    """The rows of one round; a point without one there has none."""
    found: dict[str, list[Row]] = defaultdict(list)
    for key, of_point in rows.items():
        found[key] = [of_point[index]] if index < len(of_point) else []
    return found


def shares(number: int, parts: int) -> list[int]:
    """``number`` in at most so many parts of nearly the same size, the larger ones first: (7, 3) -> [3, 2, 2]."""
    whole, left = divmod(number, parts)
    return [size for size in (whole + (index < left) for index in range(parts)) if size]


def permille(point: BaselinePoint, slowdown: float) -> int:
    """Of the down-projection's tiles, how many in a thousand to multiply twice for a point to be slower by so much
    (0.055: 5.5 %), by what the baseline says of that kernel.

    Raises:
        UserError: the baseline does not say what that kernel takes, or twice the kernel would not be enough.
    """
    took = point.kernels.get(ROLE, 0.0)
    share = slowdown * point.time.median * 1e3 / took if took else 0.0
    if not 0.0 < share <= 1.0:
        raise UserError(f"{point.what}: its kernel {ROLE} takes {took:.1f} µs, which cannot give {slowdown:.1%} more")
    return round(1000 * share)


def set_by_measuring(
    ours: Trial, slowed: Trial, point: BaselinePoint, slowdown: float
) -> tuple[int, Interval | tuple[str, str]]:
    """How many tiles in a thousand give the slowdown, and what they were last measured to give (`Trial.slowdown`).

    The extra work is a launch of its own, whose cost and last wave no baseline tells. So the first number, from the
    baseline, is corrected by what it gave."""
    number = permille(point, slowdown)
    for left in reversed(range(SETTINGS)):
        with planted(number):
            found = ours.slowdown(slowed)
        if not isinstance(found, Interval) or given(found, slowdown) or not left:
            break
        missing = slowdown - (found.median - 1.0)
        number = min(max(number + round(1000 * missing * point.time.median * 1e3 / point.kernels[ROLE]), 1), 1000)
    return number, found


def given(ratio: Interval, slowdown: float) -> bool:
    """Whether a slowed layer that takes this ratio over ours is as slow as it was asked to be."""
    return abs(ratio.median - 1.0 - slowdown) <= WITHIN


@contextmanager
def planted(number: int) -> Iterator[None]:
    """Worker processes that start within are slowed down; see `permille`."""
    before = {name: os.environ.get(name) for name in (PLUGINS_VARIABLE, PERMILLE)}
    folders = [before[PLUGINS_VARIABLE] or "", str(PLANTED)]
    os.environ |= {PLUGINS_VARIABLE: os.pathsep.join(filter(None, folders)), PERMILLE: str(number)}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _told(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """What a gate found of each point, as its JSON says it."""
    return [outputs.as_dict(found) for found in findings]


def trial(
    known: Trial, slow: gate.Run, gates: int, tries: int, slowdown: float, shape: str, workers: int
) -> Iterator[dict[str, Any]]:
    """Both halves, each as soon as it is over: what the second one takes does not lose the first.

    Args:
        slow: measures the slowed layer.
        slowdown: a share of the median, such as 0.055, of the forward pass at ``shape``.
        workers: processes that the gates without a change are spread over.

    Yields:
        JSON types: every gate's findings; ``false_alarms``, gates of the first half that failed; of the second
        ``slowdown``, what the slowed layer took over ours, and ``caught``, the tries in which the slowed point was a
        regression. There are none where the slowdown is not the one that was asked for: ``reason`` says why.
    """
    target = next((one.key for one in known.asked if (str(one.point.shape), one.pass_) == (shape, PASS)), None)
    point = next((point for point in known.known.points if point.key == target), None)
    if tries and point is None:
        raise UserError(f"--shape {shape}: the baseline has no such point")
    if tries and point is not None:
        # Before the gates without a change are measured, which takes minutes: the baseline may refuse the slowdown.
        permille(point, slowdown)
    quiet = [_told(findings) for findings in known.gates(gates, workers)]
    found: dict[str, Any] = {
        "threshold": str(known.known.threshold),
        "workers": len(shares(gates, workers)),
        "unchanged": {"gates": quiet, "false_alarms": sum(any(one["failing"] for one in each) for each in quiet)},
    }
    yield found
    if tries and point is not None:
        ours = known.only(shape)
        slowed = ours.slowed(slow)
        number, measured = set_by_measuring(ours, slowed, point, slowdown)
        its: dict[str, Any] = {"what": point.what, "asked_for": slowdown, "permille": number}
        if isinstance(measured, Interval):
            its["slowdown"] = {"value": measured.median - 1, "ci95": [measured.low - 1, measured.high - 1]}
        if isinstance(measured, Interval) and given(measured, slowdown):
            with planted(number):
                seen = slowed.gates(tries)
            (key,) = (one.key for one in slowed.asked if one.pass_ == PASS)
            of_point = [_of(findings, key) for findings in seen]
            its |= {
                "change": [change(one.now, one.before) if one.now and one.before else None for one in of_point],
                "gates": [_told(findings) for findings in seen],
                "caught": sum(one.outcome == REGRESSION for one in of_point),
            }
        else:
            why = "the slowdown as measured is another" if isinstance(measured, Interval) else ": ".join(measured)
            its |= {"reason": why, "change": [], "gates": [], "caught": 0}
        found["planted"] = its
        yield found


def _of(findings: Sequence[Finding], key: str) -> Finding:
    return next(found for found in findings if found.key == key)


def main(
    gates: Annotated[int, typer.Option(help="Gates without a change.")] = 20,
    tries: Annotated[int, typer.Option(help="Gates with the slowdown.")] = 10,
    slowdown: Annotated[float, typer.Option(help="Of the point's median, in per cent.")] = 5.5,
    shape: Annotated[str, typer.Option(help="T,d,n,E,K of the point that is slowed down.")] = "24576,1536,256,128,8",
    threshold: Annotated[str, typer.Option(help="For every point.")] = "median:3%",
    workers: Annotated[int, typer.Option(help="Processes that the gates without a change are spread over.")] = 3,
    rows: Annotated[
        Path | None, typer.Option(help="Measure nothing: judge the gates in this file of rows again, without a GPU.")
    ] = None,
    baseline: Annotated[Path | None, typer.Option(help="Default: results/baselines/<gpu>.json.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the rows.")] = None,
    file: Annotated[Path | None, typer.Option(help="Default: results/<gpu>/regress_trial.json.")] = None,
) -> None:
    """Try the gate, and write what it found."""
    with refusals("trial"):
        given_threshold = parse_threshold(threshold)
        check_slowdown(slowdown)
        if rows is not None:
            sweep = gate.load_sweep(gate.SWEEP, gate.load_registry())
            rejudge(Console(), rows, baseline, given_threshold, slowdown / 100, sweep)
            return
        found = _main(gates, tries, slowdown, shape, given_threshold, workers, baseline, output, file)
    unchanged = found["unchanged"]
    typer.echo(f"{unchanged['false_alarms']} false alarms in {len(unchanged['gates'])} gates without a change")
    if "planted" in found:
        typer.echo(_planted_told(found["planted"]))


def _planted_told(its: dict[str, Any]) -> str:
    measured = its.get("slowdown")
    shown = "not known"
    if measured is not None:
        low, high = measured["ci95"]
        shown = f"{measured['value']:+.2%} [{low:+.2%}, {high:+.2%}]"
    if "reason" in its:
        asked_for = f"{its['asked_for'] - WITHIN:.1%} to {its['asked_for'] + WITHIN:.1%}"
        return f"no slowdown tried: {its['reason']}; measured: {shown}, asked for: {asked_for}"
    return f"{its['caught']} of {len(its['gates'])} slowdowns caught; measured: {shown}"


def check_slowdown(percent: float) -> None:
    """Raises `UserError` for what is no slowdown."""
    if not 0.0 < percent <= 100.0:
        raise UserError(f"--slowdown {percent:g}: must be more than 0 and at most 100 per cent")


def _main(
    gates: int, tries: int, slowdown: float, shape: str, threshold: Threshold, workers: int, baseline: Path | None,
    output: Path | None, file: Path | None,
) -> dict[str, Any]:  # fmt: skip
    for option, value, least in (("--gates", gates, 0), ("--tries", tries, 0), ("--workers", workers, 1)):
        if value < least:
            raise UserError(f"{option} {value}: must be at least {least}")
    check_slowdown(slowdown)
    gpu = gate.gpu_name()
    if gpu is None:
        raise UserError("the gate measures on a GPU, and this machine has none")
    path = baseline or gate.BASELINES / f"{gpu_slug(gpu)}.json"
    known = gate.of_all_points(baselines.read(path), threshold)
    out = Console(stderr=True)
    if all(point.busy is None for point in known.points):
        text = f"{path} was measured fewer than {LEAST_REPEATED} times: every point is judged by its replays"
        out.print(f"[yellow]warning[/] {escape(text)}; moebench regress --update makes a new one", soft_wrap=True)
    target = file or RESULTS / gpu_slug(gpu) / "regress_trial.json"
    outputs.check_writable("--file", target)
    registry = gate.load_registry()
    sweep = gate.load_sweep(gate.SWEEP, registry)
    folder = results_folder(output)
    run = gate.Run(out, registry, folder / f"{gate.SWEEP}.jsonl")
    # Rows of a layer that is slow on purpose stand in a file of their own.
    with planted(0):
        slow = gate.Run(out, gate.load_registry(), folder / f"{gate.SWEEP}{store.PLANTED}.jsonl")
    # A CUDA context here would lie beside those of the workers for the whole trial.
    where = gate.environment("cuda", initialise_cuda=False)
    made = {"gpu": gpu, "baseline": {"made": known.made, "environment": known.environment}}
    made["environment"] = {key: where.get(key) for key in (*baselines.ENVIRONMENT, "dirty")}
    found: dict[str, Any] = {}
    with store.hold(run.path), store.hold(slow.path):
        known_trial = Trial(run, sweep, gate.asked_of(sweep), known)
        for found in trial(known_trial, slow, gates, tries, slowdown / 100, shape, workers):
            save(target, json.dumps(made | found, indent=1) + "\n")
            out.print(f"wrote {target}", highlight=False, soft_wrap=True, markup=False)
    return found


if __name__ == "__main__":
    typer.run(main)

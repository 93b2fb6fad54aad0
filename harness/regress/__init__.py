"""The regression gate: measure the sweep `ci`, compare with this GPU's baseline, look twice before a point counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from harness import store
from harness.environment import environment, gpu_name
from harness.errors import UserError
from harness.interface import Point
from harness.record import MEASURED_STATUSES, Row, gpu_slug
from harness.registry import ROOT, Registry, load_registry
from harness.regress import baseline as baselines
from harness.regress import output as outputs
from harness.regress.asked import Asked, OverBound, asked_of, is_a_a, itself, together
from harness.regress.baseline import Baseline, BaselinePoint, Threshold, parse_threshold
from harness.regress.judge import MISSING, NEW, REGRESSION, Finding, Now, combine, first_look, second_look
from harness.regress.update import check_clean, new_baseline, ratios_to_measure
from harness.report.text import count, plain
from harness.session import RESULTS, results_folder, run_sweep
from harness.sweep import RatioPoint, Sweep, load_sweep

SWEEP = "ci"
BASELINES = RESULTS / "baselines"
MOST_REPEAT = 1000
#: How often a new baseline measures each point and ratio, where nothing else is asked for.
BASELINE_REPEAT = baselines.LEAST_REPEATED
#: What of the environment moves times without any change of ours; another value is a warning.
_WARNED = ("gpu", "driver", "cuda", "torch", "triton")


def regress(
    out: Console,
    *,
    threshold: str = "",
    repeat: int | None = None,
    update: bool = False,
    baseline: Path | None = None,
    output: Path | None = None,
    json_file: Path | None = None,
    junit_file: Path | None = None,
    markdown_file: Path | None = None,
) -> int:
    """Run the gate, or write a new baseline.

    Args:
        threshold: in place of every threshold of the baseline, of single points too; with ``update`` the new default.
        repeat: how often each point is measured, and with ``update`` each ratio; default: once, with ``update``
            `BASELINE_REPEAT` times. All repetitions run one after another through the shapes in one worker
            process: kernels are compiled and tuned at the first and come from that process's cache afterwards, while
            inputs, weights and the correctness check, which cost seconds, are made anew each time. The median of the
            medians counts, within the union of their intervals.
        update: measure points and ratios and write the baseline; nothing is compared.
        baseline: default ``results/baselines/<gpu>.json``.
        output: folder for the rows, which go to ``ci.jsonl`` there.
        json_file, junit_file, markdown_file: what came of it, in these forms.

    Returns:
        0, or 1 where a point is a regression, failed, is missing or cannot be compared.

    Raises:
        UserError: bad input, no GPU, no baseline or none that can be read; an update from a dirty tree or of a point
            that failed.
    """
    given = parse_threshold(threshold) if threshold else None
    repeat = (BASELINE_REPEAT if update else 1) if repeat is None else repeat
    if not 1 <= repeat <= MOST_REPEAT:
        raise UserError(f"--repeat {repeat}: must be at least 1 and at most {MOST_REPEAT}")
    files = {"--json": json_file, "--junit": junit_file, "--markdown": markdown_file}
    for option, file in files.items():
        if file is not None:
            if update:
                raise UserError(f"{option}: --update compares nothing; leave one of both out")
            outputs.check_writable(option, file)
    gpu = gpu_name()
    if gpu is None:
        raise UserError("regress measures on a GPU, and this machine has none")
    path = baseline or BASELINES / f"{gpu_slug(gpu)}.json"
    if update:
        outputs.check_writable("--baseline", path)
        check_clean(environment("fake"))
    elif not path.exists():
        raise UserError(f"{path}: no baseline for {gpu}; moebench regress --update makes one")
    known = baselines.read(path) if path.exists() else None
    registry = load_registry()
    sweep = load_sweep(SWEEP, registry)
    asked = asked_of(sweep)
    run = Run(out, registry, results_folder(output) / f"{SWEEP}.jsonl")
    if update:
        made = new_baseline(asked, _measured_for_baseline(run, sweep, asked, repeat), known, given, gpu)
        baselines.write(path, made)
        for warning in run.warnings:
            out.print(f"[yellow]warning[/] {escape(plain(warning))}", highlight=False, soft_wrap=True)
        out.print(f"wrote {path}: {count(len(made.points), 'point')}", highlight=False, soft_wrap=True, markup=False)
        return 0
    assert known is not None
    # Until the second look is over, which another run must not keep this one from.
    with store.hold(run.path):
        rows = run.measure(replace(sweep, points=sweep.points * repeat, ratios=[]))
        (findings,) = judged(run, sweep, asked, known, given, [rows])
    report = outputs.Report(
        gpu=gpu,
        path=_shown(path),
        baseline=known,
        environment=_environment(rows),
        warnings=tuple(dict.fromkeys([*_warnings(known, gpu, rows), *run.warnings])),
        repeat=repeat,
        findings=tuple(findings),
    )
    outputs.terminal(out, report)
    for file, form in ((json_file, outputs.as_json), (junit_file, outputs.junit), (markdown_file, outputs.markdown)):
        if file is not None:
            outputs.write(out, file, form(report))
    return report.exit_code


def of_all_points(known: Baseline, threshold: Threshold | None) -> Baseline:
    """The baseline with one threshold (None: its own default) for every point, those with their own too."""
    points = tuple(replace(point, threshold=None) for point in known.points)
    return replace(known, threshold=threshold or known.threshold, points=points)


def _shown(path: Path) -> str:
    """The file's path, from the repository's root where it lies below it."""
    whole = path.resolve()
    return str(whole.relative_to(ROOT)) if whole.is_relative_to(ROOT) else str(path)


class Run:
    """Measures sweeps made in code into one file and hands back the rows of each."""

    def __init__(self, out: Console, registry: Registry, path: Path) -> None:
        self.out = out
        self.registry = registry
        self.path = path
        self.warnings: list[str] = []

    def measure(self, sweep: Sweep) -> dict[str, list[Row]]:
        """By identity, every new row, in order."""
        with store.additions(self.path) as rows:
            run_sweep(self.out, sweep, self.registry, self.path, resume=False, dry_run=False)
        found: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            if row["status"] not in MEASURED_STATUSES and row["measured_on"] == "cpu":
                # A row that says why there are no numbers, where the GPU could not be reached.
                row["measured_on"] = "cuda"
            found[store.identity(row, None)].append(row)
            if row["record"] == "ratio" and is_a_a(row) and row["status"] == "ok":
                low, high = row["ci95"]
                if not low <= 1.0 <= high:
                    text = (
                        f"{row['numerator']} against itself, {row['pass']}: {row['value']:.3f} [{low:.3f}, {high:.3f}]"
                    )
                    self.warnings.append(f"{text} should include 1: trust no smaller difference than this")
        return dict(found)


def _measured_for_baseline(run: Run, sweep: Sweep, asked: Sequence[Asked], repeat: int) -> dict[str, list[Row]]:
    """Points first, and the method against itself: by which time a point is judged, and so of which its ratio over the
    bound must be, only follows from how they repeated. By identity, as `Run.measure`."""
    against_itself = [ratio for ratio in sweep.ratios if ratio.is_a_a]
    with store.hold(run.path):
        rows = run.measure(replace(sweep, points=sweep.points * repeat, ratios=against_itself * repeat))
        ratios = ratios_to_measure(asked, rows)
        ratios += [ratio for ratio in itself(sweep, ratios) if ratio not in against_itself]
        if ratios:
            rows |= run.measure(replace(sweep, points=[], ratios=ratios * repeat))
    return rows


#: A point that looks slower, with what is needed to look again.
Suspicion = tuple[Finding, BaselinePoint, Asked]


def judged(
    run: Run,
    sweep: Sweep,
    asked: Sequence[Asked],
    known: Baseline,
    given: Threshold | None,
    rounds: Sequence[Mapping[str, Sequence[Row]]],
) -> list[list[Finding]]:
    """What each of several gates finds, judged by itself: a finding for each point of the baseline and of the sweep.
    What looks slower is measured again first, for all gates in one sweep.

    Args:
        rounds: of each gate the rows of its first look.
    """
    looks = [first_looks(asked, known, given, rows) for rows in rounds]
    suspicious = [found for _, found in looks]
    if any(suspicious):
        _look_again(run, sweep, suspicious)
    return [findings for findings, _ in looks]


def first_looks(
    asked: Sequence[Asked],
    known: Baseline,
    given: Threshold | None,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
) -> tuple[list[Finding], list[Suspicion]]:
    """All findings of one gate, and those of them that a second look must settle."""
    by_key = {one.key: one for one in asked}
    findings: list[Finding] = []
    suspicious: list[Suspicion] = []
    for point in known.points:
        threshold = given or point.threshold or known.threshold
        one = by_key.get(point.key)
        if one is None:
            reason = f"the sweep {SWEEP} no longer asks for it; moebench regress --update forgets it"
            findings.append(Finding(point.what, point.key, MISSING, reason, threshold, point.time))
            continue
        found = first_look(point, rows.get(point.key, ()), threshold)
        findings.append(found)
        if found.outcome == REGRESSION:
            suspicious.append((found, point, one))
    in_baseline = {point.key for point in known.points}
    for one in asked:
        if one.key not in in_baseline:
            now = combine(rows.get(one.key, ()))
            if isinstance(now, Now):
                reason = "the baseline lacks it; moebench regress --update adds it"
                findings.append(Finding(one.what, one.key, NEW, reason, now=now.time))
            else:
                findings.append(Finding(one.what, one.key, *now))
    return findings, suspicious


def _look_again(run: Run, sweep: Sweep, suspicious: Sequence[Sequence[Suspicion]]) -> None:
    """Measure the suspicious points of all gates in one sweep: beside the bound, call by call, where the baseline's
    ratio settles them, the others by themselves."""
    number = sum(map(len, suspicious))
    run.out.print(f"slower or unstable: {count(number, 'point')}; measuring again", highlight=False)
    beside: list[tuple[Suspicion, OverBound]] = []
    ratios: list[RatioPoint] = []
    alone: list[tuple[Suspicion, int]] = []
    points: list[Point] = []
    for of_gate in suspicious:
        wanted: list[tuple[OverBound, str]] = []
        # A point gives a row of each pass, whichever of them is suspicious: how many of the same one come before.
        places: dict[Point, int] = {}
        for suspicion in of_gate:
            _, point, one = suspicion
            over = one.settling(point)
            if over is not None:
                wanted.append((over, one.pass_))
                beside.append((suspicion, over))
            else:
                alone.append((suspicion, places.setdefault(one.point, points.count(one.point))))
        ratios += together(wanted)
        points += places
    ratios += itself(sweep, ratios)
    rows = run.measure(replace(sweep, description="What looks slower, once more", points=points, ratios=ratios))
    for (found, point, one), place in alone:
        second_look(found, point, rows.get(one.key, ())[place : place + 1], "")
    # Each suspicion asked for one row of its ratio, gate by gate.
    left = {key: iter(found) for key, found in rows.items()}
    for (found, point, _), over in beside:
        row = next(left.get(over.key, iter(())), None)
        second_look(found, point, [] if row is None else [row], over.what)


def _measured(rows: Mapping[str, Sequence[Row]]) -> Iterable[Row]:
    return (row for found in rows.values() for row in found if row["environment"].get("gpu"))


def _environment(rows: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """Where this run measured; of a row with numbers, since a row without them knows less."""
    found = sorted(_measured(rows), key=lambda row: row["status"] != "ok")
    return baselines.environment_of(found) | {"dirty": found[0]["environment"].get("dirty")} if found else {}


def _warnings(known: Baseline, gpu: str, rows: Mapping[str, Sequence[Row]]) -> list[str]:
    """A sentence for each part of the environment that is another than the baseline's: times may differ for it."""
    now = {"gpu": gpu, **{key: value for key, value in _environment(rows).items() if value is not None}}
    before = {**known.environment, "gpu": known.gpu}
    found = []
    for key in _WARNED:
        if key in now and before.get(key) != now[key]:
            names = {"gpu": "GPU", "cuda": "CUDA"}
            found.append(f"{names.get(key, key)} is {now[key]}, the baseline's was {before.get(key) or 'not named'}")
    return found


__all__ = ["BASELINES", "SWEEP", "Asked", "asked_of", "regress"]

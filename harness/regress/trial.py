"""How far the gate can be trusted, tried on a GPU: how often it cries without a change, how often it sees a real one.

    python -m harness.regress.trial                    # 20 gates without a change, 10 with a planted slowdown
    python -m harness.regress.trial --gates 0 --tries 10 --slowdown 5.5

Gates without a change are the sweep's points measured again and again, each round judged by itself as `moebench
regress` judges it, second look included. The slowdown is real work: a part of the down-projection's tiles is multiplied
twice (`planted/slowed_down_projection.py`), as many as make the point that is tried slower by the given share of its
median, by what the baseline says of that kernel.
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

from harness import regress as gate
from harness import store
from harness.documents import save
from harness.errors import UserError, refusals
from harness.record import Row, gpu_slug
from harness.registry import PLUGINS_VARIABLE
from harness.regress import baseline as baselines
from harness.regress import output as outputs
from harness.regress.baseline import Baseline, BaselinePoint, Threshold, parse_threshold
from harness.regress.judge import REGRESSION, Finding, change
from harness.session import RESULTS, results_folder
from harness.sweep import Sweep

PLANTED = Path(__file__).parent / "planted"
#: As `planted/slowed_down_projection.py` reads it, which cannot be imported without an effect.
PERMILLE = "MOEBENCH_PLANTED_PERMILLE"
#: The role of the kernel that is slowed down, and the pass that has it.
ROLE, PASS = "down", "forward"


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

    def gates(self, number: int) -> list[list[Finding]]:
        """The findings of each of so many gates. All first looks come out of one worker process, and all second ones
        out of another, since starting one takes longer than a look."""
        rows = self.run.measure(replace(self.sweep, points=self.sweep.points * number, ratios=[])) if number else {}
        rounds = [_round(rows, index) for index in range(number)]
        return gate.judged(self.run, self.sweep, self.asked, self.known, None, rounds)

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


def permille(point: BaselinePoint, slowdown: float) -> int:
    """Of the down-projection's tiles, how many in a thousand to multiply twice for a point to be slower by so much
    (0.055: 5.5 %).

    Raises:
        UserError: the baseline does not say what that kernel takes, or twice the kernel would not be enough.
    """
    took = point.kernels.get(ROLE, 0.0)
    share = slowdown * point.time.median * 1e3 / took if took else 0.0
    if not 0.0 < share <= 1.0:
        raise UserError(f"{point.what}: its kernel {ROLE} takes {took:.1f} µs, which cannot give {slowdown:.1%} more")
    return round(1000 * share)


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


def trial(known: Trial, gates: int, tries: int, slowdown: float, shape: str) -> Iterator[dict[str, Any]]:
    """Both halves, each as soon as it is over: what the second one takes does not lose the first.

    Args:
        slowdown: a share of the median, such as 0.055, of the forward pass at ``shape``.

    Yields:
        JSON types: every gate's findings; ``false_alarms``, gates of the first half that failed; ``caught``, those of
        the second in which the slowed point was a regression.
    """
    target = next((one.key for one in known.asked if (str(one.point.shape), one.pass_) == (shape, PASS)), None)
    point = next((point for point in known.known.points if point.key == target), None)
    if tries and point is None:
        raise UserError(f"--shape {shape}: the baseline has no such point")
    # Before the gates without a change are measured, which takes minutes: the baseline may refuse the slowdown.
    number = permille(point, slowdown) if tries and point is not None else 0
    quiet = [_told(findings) for findings in known.gates(gates)]
    found: dict[str, Any] = {
        "threshold": str(known.known.threshold),
        "unchanged": {"gates": quiet, "false_alarms": sum(any(one["failing"] for one in each) for each in quiet)},
    }
    yield found
    if tries and point is not None:
        with planted(number):
            slowed = [(_told(findings), _of(findings, point.key)) for findings in known.only(shape).gates(tries)]
        found["planted"] = {
            "what": point.what,
            "asked_for": slowdown,
            "permille": number,
            "change": [change(its.now, its.before) if its.now and its.before else None for _, its in slowed],
            "gates": [told for told, _ in slowed],
            "caught": sum(its.outcome == REGRESSION for _, its in slowed),
        }
        yield found


def _of(findings: Sequence[Finding], key: str) -> Finding:
    return next(found for found in findings if found.key == key)


def main(
    gates: Annotated[int, typer.Option(help="Gates without a change.")] = 20,
    tries: Annotated[int, typer.Option(help="Gates with the slowdown.")] = 10,
    slowdown: Annotated[float, typer.Option(help="Of the point's median, in per cent.")] = 5.5,
    shape: Annotated[str, typer.Option(help="T,d,n,E,K of the point that is slowed down.")] = "24576,1536,256,128,8",
    threshold: Annotated[str, typer.Option(help="For every point.")] = "median:3%",
    baseline: Annotated[Path | None, typer.Option(help="Default: results/baselines/<gpu>.json.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the rows.")] = None,
    file: Annotated[Path | None, typer.Option(help="Default: results/<gpu>/regress_trial.json.")] = None,
) -> None:
    """Try the gate, and write what it found."""
    with refusals("trial"):
        found = _main(gates, tries, slowdown, shape, parse_threshold(threshold), baseline, output, file)
    unchanged = found["unchanged"]
    typer.echo(f"{unchanged['false_alarms']} false alarms in {len(unchanged['gates'])} gates without a change")
    if "planted" in found:
        its = found["planted"]
        typer.echo(f"{its['caught']} of {len(its['gates'])} slowdowns of {its['asked_for']:.1%} caught")


def _main(
    gates: int, tries: int, slowdown: float, shape: str, threshold: Threshold, baseline: Path | None,
    output: Path | None, file: Path | None,
) -> dict[str, Any]:  # fmt: skip
    for option, value in (("--gates", gates), ("--tries", tries)):
        if value < 0:
            raise UserError(f"{option} {value}: must be at least 0")
    if not 0.0 < slowdown <= 100.0:
        raise UserError(f"--slowdown {slowdown:g}: must be more than 0 and at most 100 per cent")
    gpu = gate.gpu_name()
    if gpu is None:
        raise UserError("the gate measures on a GPU, and this machine has none")
    path = baseline or gate.BASELINES / f"{gpu_slug(gpu)}.json"
    read = baselines.read(path)
    # The threshold counts for every point, those with their own too.
    known = replace(read, threshold=threshold, points=tuple(replace(point, threshold=None) for point in read.points))
    target = file or RESULTS / gpu_slug(gpu) / "regress_trial.json"
    outputs.check_writable("--file", target)
    registry = gate.load_registry()
    sweep = gate.load_sweep(gate.SWEEP, registry)
    out = Console(stderr=True)
    run = gate.Run(out, registry, results_folder(output) / f"{gate.SWEEP}.jsonl")
    # A CUDA context here would lie beside those of the workers for the whole trial.
    where = gate.environment("cuda", initialise_cuda=False)
    made = {"gpu": gpu, "baseline": {"made": known.made, "environment": known.environment}}
    made["environment"] = {key: where.get(key) for key in (*baselines.ENVIRONMENT, "dirty")}
    found: dict[str, Any] = {}
    with store.hold(run.path):
        for found in trial(Trial(run, sweep, gate.asked_of(sweep), known), gates, tries, slowdown / 100, shape):
            save(target, json.dumps(made | found, indent=1) + "\n")
            out.print(f"wrote {target}", highlight=False, soft_wrap=True, markup=False)
    return found


if __name__ == "__main__":
    typer.run(main)

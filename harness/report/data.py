"""One data model of the report, built from rows, claims and figures; every form renders it and reads nothing else."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from harness.claims import VERDICTS, ClaimResult, Finding
from harness.errors import UserError
from harness.report import conformance, paper, tables, training
from harness.report.figures import Figure
from harness.report.rows import Stored, latest, read, sweep_point_key
from harness.report.tables import Place, Table, commit_text
from harness.report.text import count, plain, with_interval

TITLE = "SonicMoE, reproduced: report"
#: Who a finding is about, in words.
SUBJECTS = {"official": "SonicMoE (official)", "ours": "ours (Triton)"}
#: GPUs stand before CPUs, and these before what was traced.
_ORDER = {"cuda": 0, "cpu": 1, "fake": 2}
#: The GPU of the paper's own measurements.
PAPER_GPU = "H100"

METHOD = (
    "Every point is first checked, output and all gradients, against an fp32 reference; only then it is timed. Device "
    "time is the GPU's own: the replay of a CUDA graph or, where the layer cannot be captured, the time in which its "
    "kernels run; L2 is cold, inputs are random and of ordinary size. Each median has a 95 % confidence interval from "
    "order statistics, which says how well it is known on that machine and day. “Faster than” rests on ratio rows "
    "only: two implementations in one process, taking turns on the same data. The card's power limit is the operating "
    "point, so absolute times of two runs differ. The paper's values were read off its figures and were measured by "
    "its authors on H100."
)
GLOSSARY = (
    ("shape T,d,n,E,K", "tokens, embedding width, intermediate width of one expert, experts, experts per token"),
    ("granularity", "d / n: how fine the experts are"),
    ("model FLOPs", "6·R·n·d forward, 12·R·n·d backward, R = routed rows (T·K under top-K); padding does not count"),
    ("device ms", "the GPU's own time; basis graph: replay of a CUDA graph; busy: union of the kernels' intervals"),
    ("host ms", "what a host sees that launches the calls one by one"),
    ("memory", "allocated after the forward pass, weights and input included (the paper's Figure 13)"),
    ("ratio", "the numerator's time over the denominator's; above 1, the denominator is faster"),
    ("[low, high]", "95 % confidence interval of the median"),
    ("ok", "checked against the reference, gradients included, and measured"),
    ("unstable", "measured, but the clock drifted or something compiled meanwhile; claims ignore it"),
    ("unsupported, not_installed", "the implementation cannot do this point; its package is missing"),
    ("wrong_result", "the check against the reference failed, so nothing was timed"),
    ("out_of_memory, timeout, crashed", "as named; a crash brings the last lines of its error output"),
    ("CPU, fake tensors", "measured on a processor; memory traced without computing anything"),
    ("reproduced, better", "the claim's number is reached; the interval lies beyond it"),
    ("predicted", "from a model, for a GPU that nobody has measured here; never a measurement"),
)


@dataclass(frozen=True)
class Machine:
    """What was measured on one GPU (or on a CPU, or traced), and with what.

    Attributes:
        facts: (what, values): driver, torch, triton, commit, sweeps; those without a value left out.
        first, last: dates of the oldest and newest row.
        rows: rows stored, earlier rows of repeated points included.
        statuses: (status, points) of the latest rows, ok first.
    """

    name: str
    facts: tuple[tuple[str, tuple[str, ...]], ...]
    first: str
    last: str
    rows: int
    statuses: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Report:
    """Everything that a form shows.

    Attributes:
        summary: sentences for the head.
        missing: what is not there, one sentence each.
        problems: lines of the rows' files that could not be used, figures that could not be drawn.
        layers, layer_gpus: the paper's layers and the GPUs that have rows of them.
        tables: the tables in their order; `table` finds one.
        paired: (GPU, shape) -> official / ours, forward + backward, from ratio rows.
        base: from the report's folder to the results folder, for links.
        in_table: places of the rows that stand in the tables of measurements and ratios, training's included.
    """

    summary: tuple[str, ...]
    machines: tuple[Machine, ...]
    missing: tuple[str, ...]
    problems: tuple[str, ...]
    claims: tuple[ClaimResult, ...]
    layers: tuple[paper.Layer, ...]
    layer_gpus: tuple[str, ...]
    tables: tuple[Table, ...]
    paired: dict[tuple[str, str], str]
    base: str
    figures: tuple[Figure, ...] = ()
    in_table: frozenset[Place] = field(default_factory=frozenset)

    def table(self, name: str) -> Table | None:
        return next((table for table in self.tables if table.name == name), None)

    def href(self, place: Place) -> str:
        """A link to a row's place: the line is for viewers that know ``#L12``."""
        return f"{self.file_href(place.file)}#L{place.line}"

    def file_href(self, file: str) -> str:
        return f"{self.base}/{quote(os.fsencode(file))}"


def verdict_counts(claims: Sequence[ClaimResult]) -> list[tuple[str, str, dict[str, int]]]:
    """(GPU, subject, verdict -> claims), in the order in which they are met."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for result in claims:
        for finding in result.findings:
            found.setdefault((finding.gpu, finding.subject), Counter())[finding.verdict] += 1
    return [
        (gpu, subject, {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]})
        for (gpu, subject), counts in found.items()
    ]


def finding_parts(finding: Finding) -> tuple[tuple[str, float, tuple[float, float] | None], ...]:
    """A finding's parts, where they say more than its value does."""
    return finding.parts if len(finding.parts) > 1 else ()


def build(results: Path, output: Path, against: Path | None = None) -> Report:
    """The data of the report, figures apart.

    Args:
        results: folder with the rows; may be empty.
        output: folder that the report will stand in; links start there.
        against: an earlier set of rows, a folder or a file.

    Raises:
        UserError: a folder or file is missing or cannot be read.
    """
    from harness import claims as claims_of

    everything, problems = read(results)
    # Rows of the suite say whether, and never how fast: they have tables of their own.
    of_suite, stored = conformance.split(everything)
    of_suite.sort(key=lambda one: _ORDER[one.row["measured_on"]])
    newest = sorted(latest(stored, sweep_point_key), key=lambda one: _ORDER[one.row["measured_on"]])
    claims = claims_of.judge(claims_of.lines_of(stored))
    layers, gpus = paper.layers(results)
    # Steps of whole models have tables of their own beside those of layers and kernels.
    steps, others = training.of(newest, claims), training.split(newest)[1]
    found = [tables.measurements(others), tables.ratios(others)]
    in_table = {cell for table in [*found, *steps] for row in table.rows for cell in row if isinstance(cell, Place)}
    parts = [paper.as_table(layers, gpus), tables.across(training.split(stored)[1]), *steps]
    if against is not None:
        earlier, more = read(against, "--against")
        problems += [f"against {plain(against)}: {problem}" for problem in more]
        if not earlier:
            raise UserError(f"--against {against}: no rows there")
        parts.append(tables.against(stored, conformance.split(earlier)[1], plain(against.name or against)))
    parts += [tables.repeated(stored), *found, tables.failures(newest)]
    if of_suite:
        parts += [conformance.summary(of_suite), conformance.table(of_suite), conformance.reasons(of_suite)]
    parts += [_implementations(newest), tables.runs(everything)]
    machines = _machines(stored, newest)
    return Report(
        summary=_summary(stored, newest, machines),
        machines=machines,
        missing=_missing(stored, claims, layers, gpus),
        problems=tuple(dict.fromkeys(problems)),
        claims=tuple(claims),
        layers=tuple(layers),
        layer_gpus=tuple(gpus),
        tables=tuple(table for table in parts if table is not None),
        paired=_paired(newest),
        base=quote(os.fsencode(os.path.relpath(results.resolve(), output.resolve()).replace(os.sep, "/"))),
        in_table=frozenset(in_table),
    )


def _paired(newest: Sequence[Stored]) -> dict[tuple[str, str], str]:
    """By GPU and shape: time of the official layer over ours, forward + backward, as the paper routes."""
    found = {}
    for stored in newest:
        asked = [stored.text(name) for name in ("operation", "numerator", "denominator", "pass", "time_kind", "status")]
        if asked == ["moe_layer", "sonicmoe_official", "sonicmoe_triton", "forward_backward", "device", "ok"]:
            low, high = stored.row["ci95"]
            if stored.routing == "top_k, uniform" and stored.mode == "burst" and stored.row["dtype"] == "bfloat16":
                found[stored.machine, stored.shape] = with_interval(stored.row["value"], low, high, 3)
    return found


def _statuses(rows: Sequence[Stored]) -> tuple[tuple[str, int], ...]:
    counts = Counter(stored.text("status") for stored in rows)
    return tuple(sorted(counts.items(), key=lambda item: (item[0] != "ok", item[0])))


def _machines(stored: Sequence[Stored], newest: Sequence[Stored]) -> tuple[Machine, ...]:
    """GPUs first, then CPUs, then what was traced."""
    names = sorted({(_ORDER[one.row["measured_on"]], one.machine) for one in stored})
    machines = []
    for _, name in names:
        rows = [one for one in stored if one.machine == name]
        facts = []
        for what, of in (
            ("driver", lambda one: one.text("environment", "driver")),
            ("torch", lambda one: one.text("environment", "torch")),
            ("triton", lambda one: one.text("environment", "triton")),
            ("commit", commit_text),
            ("sweep", lambda one: one.text("sweep")),
        ):
            values = tuple(dict.fromkeys(value for one in rows if (value := of(one))))
            if values:
                facts.append((what, values))
        dates = sorted(one.text("timestamp")[:10] for one in rows)
        statuses = _statuses([one for one in newest if one.machine == name])
        machines.append(Machine(name, tuple(facts), dates[0], dates[-1], len(rows), statuses))
    return tuple(machines)


def _summary(stored: Sequence[Stored], newest: Sequence[Stored], machines: Sequence[Machine]) -> tuple[str, ...]:
    if not stored:
        return ("No rows here yet: moebench run measures a sweep. What follows are the paper's own values.",)
    gpus = Counter(one.machine for one in stored if one.on_gpu)
    others = Counter({"cpu": "on a CPU", "fake": "traced"}.get(one.row["measured_on"], "") for one in stored)
    parts = [f"{number:,} of {gpu}" for gpu, number in sorted(gpus.items())]
    parts += [f"{others[text]:,} {text}" for text in ("on a CPU", "traced") if others[text]]
    where = ", ".join(parts) if gpus else f"{', '.join(parts)}; nothing measured on a GPU yet"
    statuses = ", ".join(f"{number:,} {status}" for status, number in _statuses(newest))
    dates = f"{min(machine.first for machine in machines)} to {max(machine.last for machine in machines)}"
    return (
        f"{count(len(stored), 'row')}: {where}; {dates}.",
        f"Latest row of each of {count(len(newest), 'point')}: {statuses}.",
    )


def _missing(
    stored: Sequence[Stored], claims: Sequence[ClaimResult], layers: Sequence[paper.Layer], gpus: Sequence[str]
) -> tuple[str, ...]:
    from harness.session import GPU_SWEEPS

    lines = []
    if not any(PAPER_GPU in gpu for gpu in gpus):
        lines.append(
            f"No rows of an {PAPER_GPU}, the paper's own GPU: what is said of it here is the paper's or predicted."
        )
    for gpu in gpus:
        sweeps = {one.text("sweep") for one in stored if one.on_gpu and one.machine == gpu}
        absent = [sweep for sweep in GPU_SWEEPS if sweep not in sweeps]
        if absent:
            lines.append(f"{gpu}: no rows of the sweeps {', '.join(absent)}.")
        wanted: dict[str, list[bool]] = {}
        for line in layers:
            if line.quantity == "forward TFLOPS" and line.paper == line.paper:
                found = line.measured.get(gpu)
                wanted.setdefault(line.label, []).append(bool(found and found.status == "ok"))
        short = [
            label if not any(done) else f"{label} (measured at {sum(done)} of {len(done)} layers)"
            for label, done in wanted.items()
            if not all(done)
        ]
        if short:
            lines.append(f"{gpu}: in the paper's figures, but not measured here: {', '.join(short)}.")
    for gpu, subject, verdicts in verdict_counts(claims):
        if verdicts.get("not measured"):
            number = verdicts["not measured"]
            lines.append(f"{plain(gpu)}, {SUBJECTS.get(subject, subject)}: {count(number, 'claim')} not measured.")
    return tuple(lines)


def _implementations(newest: Sequence[Stored]) -> Table:
    """Every plugin, and every implementation that rows name without one."""
    from harness.registry import load_registry

    registry = load_registry()
    rows: dict[str, Counter[str]] = {}
    for stored in newest:
        if stored.row["record"] == "measurement":
            rows.setdefault(stored.text("implementation"), Counter())[stored.text("status")] += 1
    lines: list[tuple[tables.Cell, ...]] = []

    def line(name: str, label: str, upstream: str, licence: str) -> None:
        counts = rows.pop(name, Counter())
        numbers = [tables.Number(value, str(value)) for value in (counts.total(), counts["ok"])]
        lines.append((name, label, *numbers, licence, upstream))

    for plugin in registry.all():
        line(plain(plugin.name), plain(plugin.label), plain(plugin.upstream), plain(plugin.licence))
    for broken in registry.broken:
        line(plain(broken.name), "broken plugin", plain(broken.reason), "")
    for name in sorted(rows):
        line(name, "no plugin of this name here", "", "")
    return Table(
        "implementations", "Implementations", "Plugins of this checkout, with the points that they have rows of.",
        (tables.Column("name"), tables.Column("label"), tables.Column("points", "number"),
         tables.Column("ok", "number"), tables.Column("licence"), tables.Column("upstream", wide=True)),
        tuple(lines), "No plugins.",
    )  # fmt: skip

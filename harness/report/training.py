"""Training steps in the report: their rates, ratios of steps in turns, and the projection to many GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from harness.claims import ClaimResult
from harness.errors import UserError
from harness.record import Row
from harness.report import tables, text
from harness.report.rows import Stored
from harness.report.tables import Cell, Column, Number, Table
from harness.report.text import NONE
from harness.training import projection
from harness.training.config import load_config
from harness.training.rows import OPERATION, asked, busy_share

#: Anchors of the tables.
NAME, RATIOS, PROJECTION = "training", "training-ratios", "training-projection"
#: On a terminal: columns that many lines share and that stand above them, and those of each line.
TERMINAL = {
    NAME: (
        ("GPU", "configuration", "layers", "a step", "GPUs"),
        ("implementation", "routing", "B/day a GPU", "MFU", "busy", "peak GiB"),
    ),
    RATIOS: (
        ("GPU", "configuration", "layers", "a step", "GPUs"),
        ("numerator / denominator", "routing", "ratio", "paper, H100", "status"),
    ),
    PROJECTION: (
        ("GPU", "implementation", "recomputing", "computation from"),
        ("GPUs", "sharded over", "B tokens/day", "nothing hidden – all hidden", "paper, H100", "exposed"),
    ),
}
#: What a ratio's times are.
WALL, BUSY = "wall clock", "GPU busy"
#: Of a column above the lines whose cell does not speak for itself, what it reads.
_SAID = {
    "layers": "{} layers",
    "GPUs": "GPUs: {}",
    "recomputing": "recomputing: {}",
    "computation from": "computation from {}",
}
#: Whose steps are projected to many GPUs: those of the paper's runs, and ours.
PROJECTED = ("sonicmoe_triton", "sonicmoe_official", "scattermoe")
#: The configuration of the paper's training runs.
CONFIGURATION = "7B"


def split(rows: Sequence[Stored]) -> tuple[list[Stored], list[Stored]]:
    """Rows of training steps, and all others."""
    steps = [stored for stored in rows if stored.row["operation"] == OPERATION]
    return steps, [stored for stored in rows if stored.row["operation"] != OPERATION]


def of(newest: Sequence[Stored], claims: Sequence[ClaimResult]) -> list[Table]:
    """The tables of the latest row of each training step; none without such rows.

    Args:
        claims: whose numbers stand beside the ratios that they rest on.
    """
    steps = sorted(split(newest)[0], key=_order)
    measured = [stored for stored in steps if stored.row["record"] == "measurement"]
    return [rates(measured), ratios(steps, claims), projected(measured)] if steps else []


def _order(stored: Stored) -> tuple[bool, str, str, int, int, str, float]:
    """Of equal steps the fastest first."""
    what, rate = asked(stored.text("variant")), stored.get("training", "tokens_per_s") or 0.0
    return not stored.on_gpu, stored.machine, what.configuration, -what.layers, what.processes, what.rest, -rate


#: What is trained, the first columns of a line of one row; their cells are `_what`.
_WHAT = (
    Column("GPU", filter=True), Column("configuration", filter=True), Column("layers", "number"), Column("a step"),
)  # fmt: skip


def _what(stored: Stored) -> tuple[Cell, Cell, Cell, Cell]:
    """Machine, configuration, layers, and how a step is made."""
    what = asked(stored.text("variant"))
    return stored.machine, what.configuration, _whole(what.layers), what.rest


def _sides(stored: Stored) -> tuple[Cell, ...]:
    """Of a ratio the same and the GPUs; of both sides where they differ."""
    machine, configuration, layers, step = _what(stored)
    gpus, other = _gpus(stored), asked(stored.text("denominator_variant"))
    if other.configuration:
        step = f"{step} / {other.rest}"
        gpus = Number(gpus.value, f"{gpus.text} / {other.processes if stored.on_gpu else NONE}")
    return machine, configuration, layers, step, gpus


def _whole(number: int) -> Number:
    return Number(number or None, str(number) if number else NONE)


def _gpus(stored: Stored) -> Number:
    return _whole(asked(stored.text("variant")).processes if stored.on_gpu else 0)


def _rate(stored: Stored) -> Number:
    """Billion tokens a day on each GPU, with the interval of the step's time."""
    rate, times = stored.get("training", "tokens_per_day_per_gpu"), stored.get("latency_ms")
    if rate is None or not times or not stored.on_gpu:
        return Number(None, NONE)
    low, high = (rate * times["median"] / end / 1e9 for end in reversed(times["ci95"]))
    return Number(rate / 1e9, text.with_interval(rate / 1e9, low, high, 3))


def rates(measured: Sequence[Stored]) -> Table:
    """A line for each step."""
    lines: list[tuple[Cell, ...]] = []
    for stored in measured:
        mfu, rate, validation = (stored.get("training", name) for name in ("mfu", "tokens_per_s", "validation_loss"))
        busy, exposed = (stored.get("training", name) for name in ("communication", "exposed_communication"))
        at_work = busy_share(stored.row)
        peak, seed = stored.get("memory_bytes", "peak"), stored.get("routing", "seed")
        lines.append((
            *_what(stored), stored.text("implementation"), stored.routing,
            Number(rate, NONE if rate is None else f"{rate:,.0f}"), _rate(stored),
            Number(mfu, NONE if mfu is None else f"{100 * mfu:.1f} %"),
            Number(at_work, NONE if at_work is None else f"{100 * at_work:.0f} %"),
            Number(peak, NONE if peak is None else f"{peak / tables.GIB:.1f}"), _gpus(stored),
            Number(exposed, NONE if exposed is None else f"{100 * busy:.1f} % ({100 * exposed:.1f} %)"),
            stored.text("status"), Number(seed, text.plain(seed)), Number(validation, text.number(validation)),
            *tables.origin(stored),
        ))  # fmt: skip
    return Table(
        NAME, "Training",
        "Whole steps of a model, wall clock: data, forward, backward, clipping, optimiser; the latest row of each, "
        "with the 95 % interval of the median. B/day: billion tokens a day. MFU: model FLOPs over the datasheet's "
        "peak; recomputation does not count. Busy: the share of a step in which some kernel runs on the GPU, by the "
        "profiler; in the rest the GPU waits for the host. Peak: the most allocated on any GPU, weights and optimiser "
        "included. Communication: the share of a step in which it runs, and in which nothing else does. Two rows are "
        "of two moments: how much faster one is than the other, the ratios below say.",
        (*_WHAT, Column("implementation", filter=True), Column("routing", filter=True),
         Column("tokens/s", "number"), Column("B/day a GPU", "number"), Column("MFU", "number"),
         Column("busy", "number"), Column("peak GiB", "number"), Column("GPUs", "number"),
         Column("communication (exposed)", "number"),
         Column("status", filter=True), Column("seed", "number"), Column("validation loss", "number"),
         *tables.ORIGIN),
        tuple(lines), "No training steps by themselves.",
    )  # fmt: skip


def grouped(table: Table, rows: Sequence[Sequence[Cell]]) -> dict[str, list[list[str]]]:
    """Lines of a table as a terminal has them: what several share, and their other cells (see `TERMINAL`)."""
    above, each = TERMINAL[table.name]
    found: dict[str, list[list[str]]] = {}
    for row in rows:
        cells = dict(zip((column.title for column in table.columns), map(tables.cell_text, row), strict=True))
        by = f", {BUSY}" if cells.get("time") == BUSY else ""
        cells["numerator / denominator"] = f"{cells.get('numerator')} / {cells.get('denominator')}{by}"
        if table.name == NAME and cells["status"] not in ("", "ok"):
            # Words in the place of a number that is not there need no column of their own.
            rate = cells["B/day a GPU"]
            cells["B/day a GPU"] = cells["status"] if rate == NONE else f"{rate} {cells['status']}"
        parts = [_SAID.get(title, "{}").format(cells[title]) for title in above if cells[title] not in ("", NONE)]
        found.setdefault(", ".join(parts), []).append([cells[title] for title in each])
    return found


def losses_alone(table: Table, row: Sequence[Cell]) -> bool:
    """Whether a line is of a run that shared its GPU, without a rate."""
    cells = dict(zip((column.title for column in table.columns), map(tables.cell_text, row), strict=True))
    return table.name == NAME and (cells["tokens/s"], cells["status"]) == (NONE, "ok")


def ratios(steps: Sequence[Stored], claims: Sequence[ClaimResult]) -> Table:
    """Steps in turns, each beside the number of the claim that rests on it."""
    paper = {
        (ref.file, ref.line): result.claim
        for result in claims for finding in result.findings for ref in finding.rows
        if result.claim.paper is not None and finding.value is not None
    }  # fmt: skip
    lines: list[tuple[Cell, ...]] = []
    for stored in steps:
        if stored.row["record"] != "ratio":
            continue
        claim = paper.get((stored.file, stored.line))
        other = stored.text("denominator_routing", "method")
        routing = f"{stored.routing} / {other}" if other else stored.routing
        value, samples, (low, high) = stored.get("value"), stored.get("samples"), stored.get("ci95") or (None, None)
        lines.append((
            *_sides(stored), stored.text("numerator"), stored.text("denominator"), routing,
            BUSY if stored.text("time_kind") == "busy" else WALL,
            Number(value, text.with_interval(value, low, high)),
            Number(claim.paper, text.in_unit(claim.paper, claim.unit)) if claim else Number(None, NONE),
            stored.text("status"), Number(samples, text.plain(samples) or NONE), *tables.origin(stored),
        ))  # fmt: skip
    return Table(
        RATIOS, "Training: ratios",
        "The numerator's time of a step over the denominator's: above 1 the denominator is faster. Both train in one "
        "process, in rounds: some steps of the one, then of the other, in random order. Of one GPU over several, each "
        "with as many micro-batches, it is the efficiency of scaling. Time: the wall clock, which is what training "
        "takes, or the time in which the GPU is busy, of the rounds after those. Beside it the paper's number, where "
        "one of its claims rests on the row.",
        (*_WHAT, Column("GPUs", "number"), Column("numerator", filter=True), Column("denominator", filter=True),
         Column("routing"), Column("time", filter=True), Column("ratio", "number"), Column("paper, H100", "number"),
         Column("status", filter=True), Column("rounds", "number"), *tables.ORIGIN),
        tuple(lines), "Nothing was compared in turns: moebench train 7B --against scattermoe",
    )  # fmt: skip


def projected(measured: Sequence[Stored]) -> Table:
    """What the paper's training runs would be with the implementations `PROJECTED`, recomputing or not, as far as steps
    on one GPU tell."""
    links = projection.Links()
    groups: dict[tuple[str, str], list[Row]] = {}
    for stored in measured:
        if stored.text("implementation") in PROJECTED:
            groups.setdefault((stored.machine, stored.text("implementation")), []).append(stored.row)
    lines: list[tuple[Cell, ...]] = []
    checks: list[str] = []
    for (machine, name), rows in groups.items():
        for config, found in projection.projectable(rows, CONFIGURATION, name):
            what = machine, name, "yes" if config.recompute else "no"
            try:
                compute = projection.compute_of(found, config, machine)
                for its in projection.shardings(config, compute, projection.PAPER, links.gpus, machine, links):
                    lines.append((*what, *(Number(*cell) for cell in its), compute.how))
                checks += [f"{name}, {line}." for line in projection.check(found, config, machine, links)]
            except UserError as error:
                lines.append((*what, *(Number(None, NONE) for _ in projection.COLUMNS), str(error)))
    about = [
        f"What {CONFIGURATION} would train on many GPUs, projected from steps on one: a model, not a measurement.",
        "Of other implementations: python -m harness.training.projection.",
    ]
    return Table(
        PROJECTION, "Training: many GPUs",
        " ".join([*about, *projection.assumptions(load_config(CONFIGURATION), links), *checks]),
        (Column("GPU", filter=True), Column("implementation", filter=True), Column("recomputing", filter=True),
         *(Column(title, "number") for title in projection.COLUMNS), Column("computation from", wide=True)),
        tuple(lines), f"No step of {CONFIGURATION} on one GPU.",
    )  # fmt: skip

"""What the commands do: run sweeps with a progress bar and a summary, draw figures, reproduce the paper."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from harness import store
from harness.deadline import Deadline
from harness.environment import environment, gpu_name
from harness.errors import UserError, one_line
from harness.interface import SHORT_DTYPES, Point
from harness.operations import get_operation
from harness.record import MODES, gpu_slug
from harness.registry import ROOT, Registry, load_registry
from harness.runner import FAILED, Job, Place, Runner, Summary, Work
from harness.sweep import Sweep, load_sweep
from harness.timing import TimingSettings

RESULTS = ROOT / "results"
#: What `reproduce` runs with a GPU and without one.
GPU_SWEEPS = (
    "paper_layers",
    "granularity",
    "sparsity",
    "token_rounding",
    "kernels",
    "ablations",
    "open_models",
)
CPU_SWEEPS = ("cpu", "token_rounding")


def works_of(sweep: Sweep) -> list[Work]:
    """Points, then ratios, then fake-tensor traces, then accounts of routings; of the passes those that there are."""
    works = [Work("point", point, _passes(point, sweep.options.passes)) for point in sweep.points]
    works += [
        Work(
            "ratio",
            ratio.point,
            _passes(ratio.point, ratio.passes),
            ratio.denominator,
            ratio.denominator_point,
            ratio.time_kind,
        )
        for ratio in sweep.ratios
    ]
    works = [work for work in works if work.passes]
    works += [Work("fake", point, ("forward_backward",)) for point in sweep.fakes]
    works += [Work("account", point, ("forward",)) for point in sweep.accounts]
    return works


def _passes(point: Point, wanted: Sequence[str]) -> tuple[str, ...]:
    return tuple(pass_ for pass_ in wanted if pass_ in get_operation(point.operation).passes)


def results_folder(output: Path | None, place: Place | None = None) -> Path:
    """Where rows go: the folder asked for, else one that git ignores, named after the GPU (or ``cpu``)."""
    if output is not None:
        if output.exists() and not output.is_dir():
            raise UserError(f"--output {output}: is a file; name a folder")
        return output
    name = gpu_name() if place is None else place.gpu
    return RESULTS / "local" / (gpu_slug(name) if name else "cpu")


def run_sweeps(
    out: Console,
    names: Sequence[str],
    only: Sequence[str],
    skip: Sequence[str],
    shapes: Sequence[str],
    *,
    operations: Sequence[str] = (),
    resume: bool = False,
    missing_in: Path | None = None,
    deadline: Deadline | None = None,
    dry_run: bool = False,
    output: Path | None = None,
    mode: str = "",
    figures: bool = True,
    place: Place | None = None,
) -> int:
    """Run sweeps one after another, then draw the figures that they name; returns how many rows failed.

    Args:
        only, skip, shapes, operations: filters (`Sweep.filter`).
        missing_in: measure only what no row in this folder, or file, says (`store.Known`).
        deadline: begin no job that would not end before it.
        figures: with False, nothing is drawn.
        place: where jobs run (`chosen_place`).
    """
    if mode and mode not in MODES:
        raise UserError(f"--mode {mode}: choose from {', '.join(MODES)}")
    registry = load_registry()
    # All of them are read before the first one runs: a typing error must not surface after an hour.
    whole = [load_sweep(name, registry) for name in names]
    loaded = [sweep.filter(only, skip, shapes, operations) for sweep in whole]
    known = known_rows(out, missing_in)
    folder = results_folder(output, place)
    drawn = list(dict.fromkeys(sweep.figure for sweep in loaded if sweep.figure)) if figures and not dry_run else []
    target = folder / "figures"
    if not dry_run:
        _check_gpu(whole, loaded, gpu_name() if place is None else place.gpu)
    if drawn and target.exists() and not target.is_dir():
        raise UserError(f"{target}: is not a folder, but figures go there; move it, or name another folder by --output")
    # A commit that is named wrongly must not turn every row into a failure.
    environment("fake")
    failed = 0
    paths = [folder / f"{sweep.name}.jsonl" for sweep in loaded]
    with contextlib.ExitStack() as held:
        if not dry_run:
            # Before the first one runs: that rows cannot be stored must not surface after an hour either.
            for path in paths:
                held.enter_context(store.hold(path))
        try:
            for sweep, path in zip(loaded, paths, strict=True):
                failed += run_sweep(out, sweep, registry, path, resume, dry_run, mode, place, deadline, known)
        except store.WriteError as error:
            raise UserError(f"{error}. Every finished row is stored: continue with --resume") from error
    for name in drawn:
        # The rows are what counts: they are stored, and a figure can be drawn again.
        try:
            _draw(out, folder, target, [name], folder.glob("*.jsonl"))
        except Exception as error:
            kind = "" if isinstance(error, (UserError, OSError)) else f"{type(error).__name__}: "
            reason = one_line(f"{kind}{error}")
            out.print(f"[yellow]not drawn[/] {name}: {escape(reason)}", highlight=False, soft_wrap=True)
    return failed


def known_rows(out: Console, place: Path | None) -> store.Known | None:
    """What the option ``--missing-in`` names, a folder or a file of rows; None where it is not given."""
    if place is None:
        return None
    if not place.exists():
        raise UserError(f"--missing-in {place}: no such folder or file")
    rows, problems = store.read_folder(place) if place.is_dir() else store.read(place)
    for problem in problems:
        out.print(f"[yellow]ignored[/] {escape(str(problem))}", highlight=False, soft_wrap=True)
    return store.Known(rows)


@contextlib.contextmanager
def chosen_place(gpus: str, ray: str) -> Iterator[Place | None]:
    """Where jobs run; None: one after another on this machine's first GPU.

    Args:
        gpus: these GPUs of this machine side by side (see `harness.devices.chosen_gpus`).
        ray: this Ray cluster (see `harness.cluster.connect`).
    """
    if gpus and ray:
        raise UserError("--gpus and --ray: leave one of both out; Ray hands out its cluster's GPUs by itself")
    if gpus:
        from harness import devices

        chosen = devices.chosen_gpus(gpus)
        with devices.only(chosen):
            yield devices.SeveralGpus(chosen)
    elif ray:
        from harness import cluster

        with cluster.connect(ray) as connected:
            yield connected
    else:
        yield None


def _check_gpu(whole: Sequence[Sweep], loaded: Sequence[Sweep], gpu: str | None) -> None:
    """Refuse sweeps of which nothing can run here. ``whole``: the same sweeps before the filters."""
    if gpu is not None:
        return

    def needs_gpu(sweep: Sweep) -> bool:
        return all(work.point.device == "cuda" for work in works_of(sweep))

    for unfiltered, sweep in zip(whole, loaded, strict=True):
        if needs_gpu(unfiltered):
            raise UserError(
                f"sweep {sweep.name} needs an NVIDIA GPU and this machine has none; try the sweeps cpu or smoke"
            )
        if needs_gpu(sweep):
            raise UserError(
                f"what the filters leave of sweep {sweep.name} needs an NVIDIA GPU and this machine has none; "
                "filter less, or try the sweeps cpu or smoke"
            )


def run_sweep(
    out: Console,
    sweep: Sweep,
    registry: Registry,
    path: Path,
    resume: bool,
    dry_run: bool,
    mode: str = "",
    place: Place | None = None,
    deadline: Deadline | None = None,
    known: store.Known | None = None,
) -> int:
    """Run one sweep into ``path``, which the caller holds (`store.hold`) unless it is a dry run; returns how many rows
    failed.

    Raises:
        WriteError: rows cannot be written there; those before are stored.
    """
    options = replace(sweep.options, mode=mode) if mode else sweep.options
    if resume and path.exists():
        _, problems = store.read(path)
        for problem in problems:
            out.print(f"[yellow]ignored[/] {escape(str(problem))}", highlight=False)
    runner = Runner(
        sweep.name,
        works_of(sweep),
        registry,
        path,
        settings=TimingSettings(**options.settings()),
        time_limit_s=options.time_limit_s,
        resume=resume,
        place=place,
        deadline=deadline,
        known=known,
    )
    if dry_run:
        _print_plan(out, sweep, runner)
        return 0
    out.print(f"[bold]{sweep.name}[/]: {escape(sweep.description)}", highlight=False)
    out.print(f"rows -> {path}", highlight=False, soft_wrap=True)
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[jobs]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=out,
        transient=True,
    ) as progress:
        total = sum(job.seconds for job in runner.jobs)
        task = progress.add_task("starting", total=max(total, 1e-9), jobs=f"0/{len(runner.jobs)}")
        finished = 0

        def report(event: str, job: Job, text: str) -> None:
            nonlocal finished
            if event in ("done", "late"):
                finished += 1
                progress.update(task, advance=job.seconds, jobs=f"{finished}/{len(runner.jobs)}")
            else:
                phase = f" · {text}" if text else ""
                index = job.gpu.get("gpu_index")
                where = "" if index is None else f"GPU {index} · "
                progress.update(task, description=escape(f"{where}{job.work.title}{phase}"))

        runner.on_event(report)
        summary = runner.run()
    _print_summary(out, summary, path)
    if summary.late:
        out.print(
            f"[yellow]left out[/] {summary.late} of {len(runner.jobs)} jobs, which would not have ended in time: "
            + ("run it again to continue" if resume else "continue with --resume"),
            highlight=False,
            soft_wrap=True,
        )
    return summary.failed


def _planned(work: Work) -> str:
    """What a line of the plan calls a work's implementations, told apart from others of the same ones."""
    names = work.implementations
    details = [work.point.variant] if work.point.variant else []
    if work.bound:
        details.append(f"bound {work.bound}")
    other = work.denominator_routing
    if other:
        details.append(f"{work.point.routing.method} / {other.method}")
        names = tuple(dict.fromkeys(names))
    return " / ".join(names) + (f" ({', '.join(details)})" if details else "")


def _print_plan(out: Console, sweep: Sweep, runner: Runner) -> None:
    """The jobs, a line each; what is the same for all of them stands once."""
    titles = ("kind", "implementation", "shape", "dtype", "routing", "rows", "time")
    lines = []
    for job in runner.jobs:
        work = job.work
        what = f"{_planned(work)} ({job.refusal[0]})" if job.refusal else _planned(work)
        estimate = "–" if job.refusal else f"{job.seconds:.0f} s"
        routing = work.point.routing.distribution
        if work.point.routing.method != "top_k":
            routing = f"{work.point.routing.method}, {routing}"
        dtype, passes = SHORT_DTYPES[work.point.dtype], str(len(job.bases))
        lines.append((work.kind, what, str(work.point.shape), dtype, routing, passes, estimate))
    shared = [i for i in (0, 3, 4) if len({line[i] for line in lines}) == 1]
    out.print(f"{sweep.name}: {escape(sweep.description)}", highlight=False)
    if shared:
        out.print(f"all: {', '.join(f'{titles[i]} {lines[0][i]}' for i in shared)}", highlight=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0) if out.width >= 100 else 0)
    shown = [i for i in range(len(titles)) if i not in shared]
    for i in shown:
        # Where room lacks, the implementations' names are broken, between words.
        table.add_column(titles[i], overflow="fold", no_wrap=i != 1, justify="right" if i > 4 else "left")
    for line in lines:
        table.add_row(*(escape(line[i]) for i in shown))
    out.print(table)
    seconds = sum(job.seconds for job in runner.jobs)
    skipped = f", {runner.summary.skipped} rows there already" if runner.summary.skipped else ""
    out.print(f"{len(runner.jobs)} jobs{skipped}; about {_duration(seconds)}, building and tuning apart")


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def _print_summary(out: Console, summary: Summary, path: Path) -> None:
    table = Table()
    statuses = sorted(summary.statuses, key=lambda status: (status != "ok", status))
    table.add_column("implementation")
    for status in statuses:
        table.add_column(status, justify="right")
    for name, counts in summary.by_implementation.items():
        table.add_row(name, *(str(counts[status] or "") for status in statuses))
    if statuses:
        out.print("Rows by implementation and status")
        out.print(table)
    for title, status, reason in summary.failures:
        first = reason.splitlines()[0] if reason else ""
        colour = "red" if status in FAILED else "yellow"
        out.print(f"[{colour}]{status}[/] {escape(title)}: {escape(first)}", highlight=False, soft_wrap=True)
    if summary.overhead:
        parts = [f"{shape}: {sum(s) / len(s):.1f} s" for shape, s in summary.overhead.items()]
        out.print(
            "harness overhead a point (inputs, reference, memory, share of process start): " + "; ".join(parts),
            highlight=False,
        )
    phases = [
        f"{name} {seconds:.0f} s"
        for name, seconds in sorted(summary.phases.items(), key=lambda item: -item[1])
        if seconds >= 0.5
    ]
    if phases:
        out.print(f"time by phase: {', '.join(phases)}", highlight=False)
    done = sum(summary.statuses.values())
    skipped = f", {summary.skipped} were there already" if summary.skipped else ""
    built = f", of which building and tuning {_duration(summary.build_s)}" if summary.build_s >= 1 else ""
    failed = f"; {summary.failed} failed" if summary.failed else ""
    out.print(f"{done} rows in {_duration(summary.seconds)}{built}{skipped}{failed}. Rows: {path}", highlight=False)


def draw_figures(out: Console, results: Path | None, output: Path | None, figures: Sequence[str]) -> list[Path]:
    """Draw figures from every row below ``results`` (default: the committed and the local ones)."""
    if results is not None and not results.is_dir():
        raise UserError(f"--results {results}: no such folder")
    if output is not None and output.exists() and not output.is_dir():
        raise UserError(f"--output {output}: is a file; name a folder")
    import plots

    known = [*plots.FIGURES, *plots.RUN_FIGURES]
    for name in figures:
        if name not in known:
            raise UserError(f"unknown figure {name!r}; choose from {', '.join(known)}")
    return _draw(out, results or RESULTS, output or RESULTS / "figures", figures)


def _draw(
    out: Console, results: Path, target: Path, figures: Sequence[str], own: Iterable[Path] | None = None
) -> list[Path]:
    """Draw figures (none named: all) and say what was written, and which lines of the rows' files (``own``: of these
    only) could not be read."""
    import plots

    try:
        written, problems = plots.draw(results, target, figures or None)
    except OSError as error:
        raise UserError(f"{error.filename or target}: cannot be written: {error.strerror or error}") from error
    if own is not None:
        starts = tuple(f"{path}:" for path in own)
        problems = [problem for problem in problems if problem.startswith(starts)]
    for problem in problems:
        out.print(f"[yellow]ignored[/] {escape(problem)}", highlight=False, soft_wrap=True)
    for path in written:
        out.print(f"wrote {path}", highlight=False, soft_wrap=True)
    if figures and not written:
        out.print(f"nothing drawn: no rows here of {', '.join(figures)}", highlight=False, soft_wrap=True)
    return written


def reproduce(out: Console, deadline: Deadline | None = None) -> None:
    """The paper's sweeps where there is a GPU, else everything that a CPU can show; then every figure.

    Args:
        deadline: begin no job that would not end before it.
    """
    names = GPU_SWEEPS if gpu_name() else CPU_SWEEPS
    if names is CPU_SWEEPS:
        out.print("No NVIDIA GPU here: measuring at CPU scale; figures come from the committed rows of real GPUs.")
    failed = run_sweeps(out, names, (), (), (), resume=True, deadline=deadline, figures=False)
    if failed:
        out.print(f"[yellow]{failed} rows failed; the figures mark them[/]")
    draw_figures(out, None, None, [])
    from harness.report import report

    # The figures have just been drawn; `moebench report` puts them into a page.
    report(out, form="terminal")
    out.print("moebench report writes this with all figures and rows as one HTML page", highlight=False)

"""The command line: ``moebench list | doctor | check | conformance | run | compare | profile | regress | train | plot |
report | reproduce``.

Bad input, and a place where rows cannot be stored, get one line on standard error and exit code 2. A command that a
signal ends has exit code 128 + its number, a sweep in which points failed, or a point that could not be profiled, 3, a
regression, or a case of the conformance suite that one of our own implementations fails, 1.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.errors import UserError, one_line

if TYPE_CHECKING:
    from harness.interface import Implementation

app = typer.Typer(
    name="moebench",
    help="Benchmarks of MoE kernels: correctness first, then time and memory, every outcome a row.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class _Output(Console):
    """Standard output. Where nobody reads it any more (``moebench list | head``), the command ends as a signal ends it:
    exit code 141, and no word unless rows were being stored."""

    def on_broken_pipe(self) -> None:
        # Nothing else may go there, at the interpreter's end neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _signals.append(signal.SIGPIPE)
        raise _Ended


out = _Output()
EXIT_NOT_CONFORMING = 1
EXIT_USER_ERROR = 2
EXIT_FAILED_POINTS = 3

Only = Annotated[list[str] | None, typer.Option("--only", help="Only this implementation (repeatable).")]
Skip = Annotated[list[str] | None, typer.Option("--skip", help="Not this implementation (repeatable).")]
ShapeOption = Annotated[
    list[str] | None, typer.Option("--shape", help="Only this shape, T,d,n,E,K, or a named group (repeatable).")
]

OperationOption = Annotated[list[str] | None, typer.Option("--operation", help="Only this operation (repeatable).")]
MissingIn = Annotated[
    Path | None,
    typer.Option(
        "--missing-in", help="Only what no row in this folder, or file, has as ok or unsupported, whatever its commit."
    ),
]
Within = Annotated[
    str,
    typer.Option("--within", help="Such as 25m: begin nothing that would not end in this time, and leave it out."),
]
RowsFolder = Annotated[
    Path | None,
    typer.Option("--output", help="Folder for the rows; default: results/local/<gpu>, which git ignores."),
]


#: Columns of short cells, which are never broken; others give way on a narrow terminal.
_WHOLE = ("operation", "installed")


def _table(title: str, *columns: str) -> Table:
    """A table whose first column, the name, is never broken either."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=index == 0 or column in _WHOLE, overflow="fold")
    return table


def _operations_of(plugin: Implementation) -> str:
    """For a narrow column: one a line, single kernels as a number where they are many."""
    from harness.interface import KERNELS

    others = [operation for operation in plugin.operations if operation not in KERNELS]
    kernels = [operation for operation in plugin.operations if operation in KERNELS]
    return "\n".join([*others, *(kernels if len(kernels) < 2 else [f"{len(kernels)} kernels"])])


@app.command("list")
def list_() -> None:
    """List implementations, operations and sweeps."""
    from harness.interface import SHORT_DTYPES
    from harness.operations import OPERATIONS
    from harness.registry import installed_reason, load_registry
    from harness.sweep import load_sweep, sweep_names

    registry = load_registry()
    table = _table("Implementations", "name", "operation", "devices", "dtypes", "installed")
    for plugin in registry.all():
        installed = "no" if installed_reason(plugin) else "yes"
        dtypes = " ".join(SHORT_DTYPES[dtype] for dtype in plugin.dtypes)
        cells = (_operations_of(plugin), " ".join(plugin.devices), dtypes)
        # Two columns, the name as figures have it included, would leave a narrow terminal too little for whole words.
        table.add_row(f"{escape(plugin.name)}\n[dim]  {escape(plugin.label)}[/]", *cells, installed)
    out.print(table)
    for broken in registry.broken:
        out.print(f"broken: {escape(broken.name)}: {escape(broken.reason)}")
    out.print(f"Operations: {', '.join(OPERATIONS)}")
    table = _table("Sweeps", "name", "points", "ratios", "fake", "counted", "what")
    for name in sweep_names():
        sweep = load_sweep(name, registry)
        counts = (len(sweep.points), len(sweep.ratios), len(sweep.fakes), len(sweep.accounts))
        table.add_row(name, *(str(c) for c in counts), sweep.description)
    out.print(table)


@app.command()
def doctor() -> None:
    """Say what is installed, what is missing and how to get it."""
    from harness.environment import GpuMonitor, environment
    from harness.registry import installed_reason, load_registry

    registry = load_registry()
    machine = environment("fake")
    monitor = GpuMonitor()
    gpu = monitor.name or f"none ({monitor.reason})"
    out.print(f"Python {machine['python']}, torch {machine['torch']}, triton {machine['triton'] or 'missing'}")
    out.print(f"GPU: {escape(gpu)}", highlight=False)
    table = _table("", "implementation", "state", "what to do")
    for plugin in registry.all():
        reason = installed_reason(plugin)
        if reason:
            table.add_row(plugin.name, "not installed", escape(reason))
        elif "cpu" not in plugin.devices and not monitor.name:
            table.add_row(plugin.name, "installed", "needs a GPU to run")
        else:
            table.add_row(plugin.name, "ready", "")
    for broken in registry.broken:
        table.add_row(broken.name, "broken", escape(f"{broken.reason} ({broken.source})"))
    out.print(table)


@app.command()
def check(
    implementations: Annotated[list[str] | None, typer.Argument(help="Implementations; default: all.")] = None,
    shape: Annotated[str, typer.Option(help="T,d,n,E,K")] = "256,128,64,16,4",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32; default: the first that fits.")] = "",
    device: Annotated[str, typer.Option(help="cuda or cpu; default: cuda where there is a GPU.")] = "",
    distribution: Annotated[
        list[str] | None, typer.Option(help="Routing distribution, or trace:FILE (repeatable); default: all four.")
    ] = None,
) -> None:
    """Check output and all gradients against the fp32 reference, without timing."""
    from harness.check import check_implementations

    failed = check_implementations(out, implementations or [], shape, dtype, device, distribution or [])
    if failed:
        raise typer.Exit(EXIT_FAILED_POINTS)


@app.command()
def conformance(
    implementations: Annotated[
        list[str] | None, typer.Argument(help="Implementations; default: all with a layer for the device.")
    ] = None,
    case: Annotated[list[str] | None, typer.Option("--case", help="Only this case (repeatable).")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu; default: cuda where there is a GPU.")] = "",
    output: RowsFolder = None,
    jobs: Annotated[int, typer.Option(help="Worker processes side by side; they share a GPU, nothing is timed.")] = 1,
    time_limit: Annotated[
        float,
        typer.Option(help="Seconds that a case may take, building included; four times as many where tuners choose."),
    ] = 60.0,
    missing_in: MissingIn = None,
    within: Within = "",
) -> None:
    """Meet the public bug reports of MoE kernels; exit code 1 where one of our own implementations fails."""
    from harness.conformance.command import conformance as run_suite
    from harness.deadline import Deadline

    deadline = Deadline.of("--within", within)
    global _kept
    _kept = "; every finished row is stored"
    if run_suite(out, implementations or [], case or [], device, output, jobs, time_limit, missing_in, deadline):
        raise typer.Exit(EXIT_NOT_CONFORMING)


@app.command()
def run(
    sweeps: Annotated[list[str], typer.Argument(help="Sweeps by name or TOML file.")],
    only: Only = None,
    skip: Skip = None,
    shape: ShapeOption = None,
    operation: OperationOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Skip rows that are there already.")] = False,
    missing_in: MissingIn = None,
    within: Within = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the points with a time estimate.")] = False,
    output: RowsFolder = None,
    mode: Annotated[str, typer.Option(help="burst, sustained or paced; default: the sweep's.")] = "",
    gpus: Annotated[
        str, typer.Option(help="all, or such as 0,1: one worker for each of these GPUs; default: the first GPU.")
    ] = "",
    ray: Annotated[
        str, typer.Option(help="Run on a Ray cluster: its address, auto for the one here, local to start one.")
    ] = "",
) -> None:
    """Measure sweeps; every outcome is a row in <output>/<sweep>.jsonl."""
    from harness.deadline import Deadline
    from harness.session import chosen_place, run_sweeps

    deadline = Deadline.of("--within", within)
    if deadline and ray:
        raise UserError("--within and --ray: leave one of both out; a cluster is handed every job at once")
    global _kept
    _kept = "" if dry_run else "; every finished row is stored, continue with --resume"
    with chosen_place(gpus, ray) as place:
        failed = run_sweeps(
            out,
            sweeps,
            only or [],
            skip or [],
            shape or [],
            operations=operation or [],
            resume=resume,
            missing_in=missing_in,
            deadline=deadline,
            dry_run=dry_run,
            output=output,
            mode=mode,
            place=place,
        )
    if failed:
        raise typer.Exit(EXIT_FAILED_POINTS)


@app.command()
def warm(
    sweeps: Annotated[list[str], typer.Argument(help="Sweeps by name or TOML file.")],
    only: Only = None,
    skip: Skip = None,
    shape: ShapeOption = None,
    operation: OperationOption = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Processes side by side, each with a layer on the GPU; default: half of the cores."),
    ] = None,
    missing_in: MissingIn = None,
    within: Within = "",
) -> None:
    """Compile what sweeps need, side by side, before they are run: on a fresh machine, most of their time."""
    from harness.deadline import Deadline
    from harness.warm import default_jobs
    from harness.warm import warm as warm_sweeps

    deadline = Deadline.of("--within", within)
    filters = only or [], skip or [], shape or [], operation or []
    warm_sweeps(
        out, sweeps, *filters, jobs=default_jobs() if jobs is None else jobs, missing_in=missing_in, deadline=deadline
    )


@app.command()
def compare(
    first: Annotated[str, typer.Argument(help="An implementation, or a file or folder of earlier rows.")],
    second: Annotated[str, typer.Argument(help="Another implementation, or a file or folder of later rows.")],
    shape: Annotated[str, typer.Option(help="T,d,n,E,K; default: the paper's headline layer.")] = "",
    operation: Annotated[str, typer.Option(help="See moebench list.")] = "moe_layer",
    variant: Annotated[str, typer.Option(help="Of the operation; default: the first.")] = "",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32; default: the first that both take.")] = "",
    output: RowsFolder = None,
) -> None:
    """Compare two implementations live (time of the first / time of the second), or two sets of rows."""
    from harness import compare as comparing

    if comparing.are_rows(first, second):
        comparing.compare_rows(out, Path(first), Path(second))
        return
    global _kept
    _kept = "; every finished row is stored"
    if comparing.compare(out, (first, second), shape, operation, variant, dtype, output):
        raise typer.Exit(EXIT_FAILED_POINTS)


@app.command()
def profile(
    implementation: Annotated[str, typer.Argument(help="See moebench list.")],
    shape: Annotated[
        str, typer.Option(help="T,d,n,E,K; default: the paper's headline layer, on a CPU a small one.")
    ] = "",
    operation: Annotated[str, typer.Option(help="See moebench list; default: the implementation's first.")] = "",
    variant: Annotated[str, typer.Option(help="Of the operation; default: the first.")] = "",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32; default: the first that fits.")] = "",
    device: Annotated[str, typer.Option(help="cuda or cpu; default: cuda where there is a GPU.")] = "",
    pass_: Annotated[
        str, typer.Option("--pass", help="forward, backward or forward_backward; default: as much as there is.")
    ] = "",
    routing: Annotated[str, typer.Option(help="Routing method; default: top_k.")] = "",
    distribution: Annotated[str, typer.Option(help="Routing distribution, or trace:FILE; default: uniform.")] = "",
    chrome_trace: Annotated[
        Path | None, typer.Option("--chrome-trace", help="Write a Chrome trace of one call to this file.")
    ] = None,
    ncu: Annotated[
        bool, typer.Option("--ncu", help="Print a command line for Nsight Compute, and run nothing.")
    ] = False,
    time_limit: Annotated[float, typer.Option(help="Seconds that it may take, building included.")] = 600.0,
) -> None:
    """Show the kernels of one point under torch.profiler; no row is written."""
    from harness.profile import profile as show_profile

    options = {
        "shape": shape,
        "operation": operation,
        "variant": variant,
        "dtype": dtype,
        "device": device,
        "pass_": pass_,
        "routing": routing,
        "distribution": distribution,
    }
    if not show_profile(out, implementation, options, chrome_trace, ncu, time_limit):
        raise typer.Exit(EXIT_FAILED_POINTS)


@app.command()
def regress(
    threshold: Annotated[
        str,
        typer.Option(help="Such as median:5%, for every point; default: the baseline's, which points may override."),
    ] = "",
    repeat: Annotated[
        int | None, typer.Option(help="Measure each point this often [default: 1; 3 with --update].")
    ] = None,
    update: Annotated[bool, typer.Option("--update", help="Write a new baseline; refused from a dirty tree.")] = False,
    baseline: Annotated[Path | None, typer.Option(help="Default: results/baselines/<gpu>.json.")] = None,
    output: RowsFolder = None,
    json: Annotated[Path | None, typer.Option(help="Write what was found to this file, for programs.")] = None,
    junit: Annotated[
        Path | None, typer.Option(help="Write JUnit XML to this file: a test case for each point.")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a summary for a pull request to this file.")] = None,
) -> None:
    """Measure the sweep ci and compare with this GPU's baseline; exit code 1 where something got slower or failed."""
    from harness.regress import regress as run_gate

    global _kept
    _kept = "; every finished row is stored"
    code = run_gate(
        out,
        threshold=threshold,
        repeat=repeat,
        update=update,
        baseline=baseline,
        output=output,
        json_file=json,
        junit_file=junit,
        markdown_file=markdown,
    )
    if code:
        raise typer.Exit(code)


@app.command()
def train(
    configuration: Annotated[str, typer.Argument(help="tiny, quality, 1.4B, 7B, ..., or a TOML file.")],
    implementation: Annotated[str | None, typer.Option(help="Of the MoE layers; see moebench list.")] = None,
    routing: Annotated[str | None, typer.Option(help="top_k, nearest, expert_choice, ...; validation: top_k.")] = None,
    m_tile: Annotated[int | None, typer.Option(help="A token rounding's tile.")] = None,
    layers: Annotated[int | None, typer.Option(help="Train fewer, or more, layers.")] = None,
    steps: Annotated[int | None, typer.Option(help="Of the whole run.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences of a step, over all processes.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Sequences of one forward.")] = None,
    recompute: Annotated[
        bool | None, typer.Option("--recompute/--no-recompute", help="Activation checkpointing.")
    ] = None,
    shard: Annotated[
        int | None, typer.Option(help="Processes that hold one copy of the weights between them; 0: all.")
    ] = None,
    corpus: Annotated[str | None, typer.Option(help="python, or a data set of the Hugging Face Hub.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights and data.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints; 0: none.")] = None,
    validate_every: Annotated[int | None, typer.Option(help="Steps between validations; 0: at the end.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest whole checkpoint.")] = False,
    device: Annotated[str, typer.Option(help="cuda or cpu; default: cuda where there is a GPU.")] = "",
    run_folder: Annotated[
        Path | None, typer.Option("--folder", help="Folder for curves and checkpoints; default: below the rows'.")
    ] = None,
    output: RowsFolder = None,
    against: Annotated[
        str,
        typer.Option(
            help="NAME, NAME:ROUTING, or alone (each process by itself): steps in turns, time of that / of this one."
        ),
    ] = "",
    rounds: Annotated[int, typer.Option(help="Of --against.")] = 6,
    losses_only: Annotated[
        bool, typer.Option("--losses-only", help="Keep no times: the GPU is shared with other runs.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds after which a silent process counts as lost.")] = 600.0,
) -> None:
    """Train an MoE language model; under torchrun one process for each GPU (torchrun ... -m harness.cli train ...)."""
    # With 16 bytes a parameter a large model leaves no room for fragments. torch reads either name, when it is imported
    # or first allocates; what the user has set stays, under both.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    from harness.training.command import train as run_training

    global _kept
    _kept = "; continue from its last checkpoint, if it wrote any, with --resume"
    changes = {
        "implementation": implementation,
        "routing": routing,
        "m_tile": m_tile,
        "layers": layers,
        "steps": steps,
        "batch": batch,
        "micro_batch": micro_batch,
        "recompute": recompute,
        "shard": shard,
        "corpus": corpus,
        "seed": seed,
        "checkpoint_every": checkpoint_every,
        "validate_every": validate_every,
    }
    run_training(out, configuration, changes, device, run_folder, output, resume, timeout, against, rounds, losses_only)


@app.command()
def plot(
    results: Annotated[Path | None, typer.Option(help="Folder with rows; default: results/.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the figures; default: results/figures.")] = None,
    figure: Annotated[list[str] | None, typer.Option(help="Only this figure (repeatable).")] = None,
) -> None:
    """Draw the figures from the rows, beside the paper's values."""
    from harness.session import draw_figures

    draw_figures(out, results, output, figure or [])


@app.command()
def report(
    results: Annotated[Path | None, typer.Option(help="Folder with rows; default: results/.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the files; default: results/local/report, which git ignores.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Earlier rows, a folder or a file: say what got slower or faster.")
    ] = None,
    form: Annotated[str, typer.Option("--format", help="terminal, markdown, html or all.")] = "all",
) -> None:
    """Claims, figures and tables from the rows: on the terminal, as Markdown, and as one HTML page."""
    from harness.report import report as make_report

    make_report(out, results, output, against, form)


@app.command()
def reproduce(within: Within = "") -> None:
    """Measure what this machine can (the paper's sweeps on a GPU, else CPU scale) and draw every figure."""
    from harness.deadline import Deadline
    from harness.session import reproduce as run_everything

    deadline = Deadline.of("--within", within)
    global _kept
    _kept = "; every finished row is stored, run it again to continue"
    run_everything(out, deadline)


class _Ended(BaseException):
    """Ctrl-C, a scheduler or a closing terminal asks to stop. Typer would turn a KeyboardInterrupt into an exit
    without a word."""


#: The signals that asked to stop; what becomes of the rows, where a command is at work that stores some.
_signals: list[int] = []
_kept = ""


def _end(number: int, _frame: object) -> None:
    # A second one ends the process at once; its workers die with it.
    signal.signal(number, signal.SIG_DFL)
    _signals.append(number)
    raise _Ended


def main() -> None:
    """Entry point: turns every `UserError` into one line and exit code 2, and ends tidily when told to."""
    for stream in (sys.stdout, sys.stderr):
        # Names of files and reasons may hold what a terminal's encoding does not.
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):  # closed, or put in another's place
                stream.reconfigure(errors="backslashreplace")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        # Under nohup, say, it is ignored and stays so (None: not Python's to change).
        if handler not in (signal.SIG_IGN, None):
            signal.signal(number, _end)
    try:
        app()
    except UserError as error:
        print(f"moebench: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    except OSError as error:
        # A path that is too long, or lies where nobody may look: found by whoever looks first.
        if _signals or error.errno is None:
            raise
        where = error.filename or "standard output or a file"
        print(one_line(f"moebench: {where}: {error.strerror}{_kept}"), file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    except BaseException:
        # An import that a signal cut off may end in any exception.
        if not _signals:
            raise
        with contextlib.suppress(OSError):  # a terminal that has gone
            if _kept or _signals[0] != signal.SIGPIPE:
                print(f"moebench: interrupted{_kept}", file=sys.stderr)
        sys.exit(128 + _signals[0])
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


if __name__ == "__main__":
    main()

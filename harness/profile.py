"""One point under torch.profiler: its kernels by time, and the command line that shows them to Nsight Compute."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness import documents
from harness.check import ask, asked_routing, device_for
from harness.compare import SHAPE
from harness.environment import gpu_name
from harness.errors import UserError, printable
from harness.interface import DTYPES, Implementation, Point, RoutingSpec
from harness.operations import OPERATIONS, get_operation, variants_of
from harness.points import point_to_dict
from harness.process import WorkerProcess, WorkerStartError
from harness.record import PASSES
from harness.registry import Registry, choices, installed_reason, load_registry, refusal
from harness.shapes import MoEShape
from harness.token_rounding import METHODS

#: Without a GPU the headline's layer would take minutes.
CPU_SHAPE = "256,128,64,16,4"
#: Characters of a kernel's name; lines of the table, of which a CPU's many small operators would need a hundred.
_NAME, _LINES = 48, 32


def profile(
    out: Console, name: str, options: Mapping[str, str], timeline: Path | None, ncu: bool, time_limit_s: float
) -> bool:
    """Print the kernels of one call (on a CPU the operators); with ``ncu`` the command line for Nsight Compute in their
    place. No row is written.

    Args:
        options: see `asked_point`.
        timeline: the file for a Chrome trace of one call.
        time_limit_s: seconds that building, checking and profiling may take.

    Returns:
        Whether there is anything to show: the point is refused, or its layer fails, in one line.

    Raises:
        UserError: bad input, or a file that cannot be written.
    """
    if not time_limit_s > 0:
        raise UserError(f"--time-limit {time_limit_s:g}: must be more than 0 seconds")
    if ncu and timeline is not None:
        raise UserError("--ncu and --chrome-trace: leave one of both out; --ncu runs nothing")
    registry = load_registry()
    point, pass_ = asked_point(registry, name, **options)
    title = " ".join(part for part in (name, point.operation, point.variant) if part)
    what = f"{title}, {pass_.replace('_', ' + ')}, {point.shape}, {point.dtype}, {point.device}"
    failed = refused(registry.get(name), point)
    if not failed and ncu:
        out.print(ncu_line(point, pass_, options), highlight=False, soft_wrap=True, markup=False)
        if point.device == "cpu":
            out.print("Nsight Compute sees a GPU's kernels only: on a CPU it will find none.", highlight=False)
        return True
    found: dict[str, Any] = {}
    if not failed:
        with _beside(timeline) as file:
            status = out.status(escape(what)) if out.is_terminal else contextlib.nullcontext()
            with status:
                found = _answer(point, pass_, file, time_limit_s)
            if found["event"] == "failed":
                failed = found["status"], found["reason"]
                if file is not None:
                    file.unlink(missing_ok=True)
    if failed:
        out.print(f"[red]{failed[0]}[/] {escape(f'{what}: {printable(failed[1])}')}", highlight=False, soft_wrap=True)
        return False
    _print(out, what, found, point.device)
    if timeline is not None:
        out.print(f"wrote {timeline}: one more call, for Perfetto", highlight=False, soft_wrap=True, markup=False)
    out.print("No row is written: moebench run measures.", highlight=False)
    return True


def asked_point(
    registry: Registry,
    implementation: str,
    *,
    shape: str,
    operation: str,
    variant: str,
    dtype: str,
    device: str,
    pass_: str,
    routing: str,
    distribution: str,
) -> tuple[Point, str]:
    """The point and the pass that a user asks for by these texts; an empty one stands for its default: the paper's
    headline layer (without a GPU a small one), the first operation and variant of the implementation, its first dtype
    (without a GPU preferably float32), a GPU where there is one, all passes at once, top_k and uniform.

    Raises:
        UserError: an unknown name or size, an operation or variant that the implementation does not offer, no GPU.
    """
    plugin = registry.get(implementation)
    has_gpu = gpu_name() is not None
    _known("--device", device, ("cuda", "cpu"))
    if device == "cuda" and not has_gpu:
        raise UserError("--device cuda: this machine has no NVIDIA GPU")
    device = device or device_for(plugin, has_gpu)
    _known("--operation", operation, OPERATIONS)
    _known("--operation", operation, plugin.operations, f"{plugin.name} does not offer it; ")
    operation = operation or plugin.operations[0]
    offered = variants_of(plugin, operation)
    if variant and offered == ("",):
        raise UserError(f"--variant {variant}: {operation} has no variants")
    _known("--variant", variant, offered)
    _known("--dtype", dtype, DTYPES)
    first = "float32" if device == "cpu" and "float32" in plugin.dtypes else plugin.dtypes[0]
    passes = get_operation(operation).passes
    _known("--pass", pass_, PASSES)
    _known("--pass", pass_, passes, f"{operation} has no such pass; ")
    _known("--routing", routing, METHODS)
    size = MoEShape.parse(shape or (SHAPE if device == "cuda" else CPU_SHAPE))
    asked = asked_routing(distribution or RoutingSpec().distribution, size)
    point = Point(
        operation,
        plugin.name,
        size,
        dtype or first,
        routing=replace(asked, method=routing or asked.method),
        variant=variant or offered[0],
        device=device,
    )
    return point, pass_ or passes[-1]


def _known(option: str, given: str, valid: Sequence[str] | Mapping[str, Any], why: str = "") -> None:
    if given and given not in valid:
        raise UserError(f"{option} {given}: {why}{choices(given, list(valid))}")


def refused(plugin: Implementation, point: Point) -> tuple[str, str] | None:
    """Why the point cannot run here, as (status, reason)."""
    impossible = get_operation(point.operation).unsupported_reason(point)
    if impossible:
        return "unsupported", impossible
    if reason := refusal(plugin, point):
        return reason
    missing = installed_reason(plugin)
    return ("not_installed", missing) if missing else None


def ncu_line(point: Point, pass_: str, options: Mapping[str, str]) -> str:
    """A command line for Nsight Compute: the kernels of this call alone, in a process that has warmed up."""
    asked = {
        **options,
        "shape": str(point.shape),
        "operation": point.operation,
        "variant": point.variant,
        "dtype": point.dtype,
        "device": point.device,
        "pass": pass_,
    }
    asked.pop("pass_", None)
    words = ["ncu", "--profile-from-start", "off", "--set", "full", "--export", f"{point.implementation}-{pass_}"]
    words += [sys.executable, "-m", "harness.one_call", point.implementation]
    for option, value in asked.items():
        words += [f"--{option}", value] if value else []
    return shlex.join(words)


def _answer(point: Point, pass_: str, file: Path | None, time_limit_s: float) -> dict[str, Any]:
    job = {
        "kind": "profile",
        "point": point_to_dict(point),
        "pass": pass_,
        # The worker may stand elsewhere by then.
        "timeline": str(file.resolve()) if file else "",
        "passes": [],
        "bases": {},
        "settings": {},
    }
    try:
        worker = WorkerProcess()
    except WorkerStartError as error:
        return {"event": "failed", "status": "crashed", "reason": str(error)}
    keep = False
    try:
        keep, found = ask(worker, job, "profiled", time_limit_s)
        return found
    finally:
        worker.close(patience_s=1.0 if keep else 0.0)


@contextlib.contextmanager
def _beside(path: Path | None) -> Iterator[Path | None]:
    """A file beside ``path`` that becomes it once it is whole; what is left of it goes. That it cannot be written must
    not surface after a compilation."""
    if path is None:
        yield None
        return
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(documents.beside(path))
            file.touch()
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error
        yield file


def _short(name: str) -> str:
    """A kernel's name without what many have in common, its middle left out where it is long."""
    text = printable(name).removeprefix("void ")
    for common in ("(anonymous namespace)::", "at::native::", "autograd::engine::"):
        text = text.replace(common, "")
    return text if len(text) <= _NAME else f"{text[: _NAME * 2 // 3]}…{text[1 - _NAME // 3 :]}"


def _print(out: Console, what: str, found: Mapping[str, Any], device: str) -> None:
    kernels = found["kernels"]
    total = sum(kernel["us"] for kernel in kernels)
    on_gpu = device == "cuda"
    table = Table(title=escape(what), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("kernel" if on_gpu else "operator", overflow="fold")
    for column in ("calls", "µs" if on_gpu else "µs of its own"):
        table.add_column(column, justify="right", no_wrap=True)
    if on_gpu:
        table.add_column("role", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    rest = kernels[_LINES:] if len(kernels) > _LINES + 1 else []
    if rest:
        others = {"name": f"{len(rest)} others", "role": None}
        others |= {key: sum(kernel[key] for kernel in rest) for key in ("calls", "us")}
        kernels = [*kernels[:_LINES], others]
    for kernel in kernels:
        cells = [escape(_short(kernel["name"])), f"{kernel['calls']:g}", f"{kernel['us']:,.1f}"]
        cells += [escape(kernel["role"] or "–")] if on_gpu else []
        table.add_row(*cells, f"{kernel['us'] / total:.1%}" if total else "–")
    out.print(table)
    if not on_gpu:
        out.print(
            f"Sum {total:,.1f} µs of one call, mean of a few; a CPU's times say nothing of a GPU.", highlight=False
        )
        return
    unclaimed = sum(kernel["us"] for kernel in found["kernels"] if kernel["role"] is None)
    share = unclaimed / total if total else 0.0
    out.print(
        f"Sum {total:,.1f} µs of one call, of which {share:.1%} has no role; overlapping kernels count twice in it. "
        f"Some kernel runs for {found['busy_us']:,.1f} µs.",
        highlight=False,
    )

"""What the layer costs beside the GPU's own time, on the GPU at hand:

    python -m implementations.sonicmoe_triton.launch_cost                      # the headline's layer
    python -m implementations.sonicmoe_triton.launch_cost --shape 24576,1536,256,128,8

Two things. A process' first call, which compiles every kernel (``cold``) or finds them in Triton's cache (``warm``).
And calls in a row: whether the host, which launches every kernel from Python, stays ahead of the GPU, by what the same
kernels take in a replayed CUDA graph. The official package runs beside where it is installed. Both go to a file beside
the GPU's results.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from harness.environment import environment
from harness.errors import UserError
from harness.interface import Implementation, Layer, Point, Problem
from harness.problem import make_problem
from harness.process import describe_exit
from harness.record import gpu_slug
from harness.registry import ROOT, installed_reason, load_registry
from harness.shapes import MoEShape
from harness.statistics import summarise
from harness.timing import GraphCalls, GraphCapturedError, L2Eviction

OURS, OFFICIAL = "sonicmoe_triton", "sonicmoe_official"
DEVICE = "cuda"
FILE = "sonicmoe_triton_launch_cost.json"
#: Forward + backward calls in a row, for each number of a turn.
CALLS = 20
#: Turns of each layer that count, after one that does not.
ROUNDS = 7
#: What `summary` tells of a layer, the first four in milliseconds for each call (see `turn`).
NUMBERS = ("host_ms", "enqueue_ms", "graph_ms", "idle_ms", "host_over_graph")
#: A first call compiles every kernel, which takes a minute at most.
CHILD_LIMIT_S = 600.0
#: Its first lines are a user's; what this module imports is the tool's own and told apart.
CHILD = """
import sys, time
began = time.perf_counter()
import torch
import implementations.sonicmoe_triton.function
imported = time.perf_counter()
from implementations.sonicmoe_triton.launch_cost import first_call
first_call(sys.argv[1], imported - began, time.perf_counter() - imported)
"""


# The first call of a process.


def first_call(shape_text: str, import_s: float, tool_import_s: float) -> None:
    """In the child: make the layer's tensors, call it once, and print a JSON line of seconds and kernels.

    ``import_s`` (torch and the layer) and ``tool_import_s`` (this module) come from the child's first lines;
    ``context_s``: the CUDA context and the tensors; ``first_call_s``: forward + backward until the GPU is done, with
    whatever torch imports late. ``kernels_compiled`` and ``kernels_loaded`` from Triton's cache come from its listener:
    `jit_post_compile_hook` is called for both alike.
    """
    from triton import knobs

    from implementations.sonicmoe_triton.function import moe_layer

    kernels = {"kernels_compiled": 0, "kernels_loaded": 0}

    def noted(*, cache_hit: bool, **_: Any) -> None:
        kernels["kernels_loaded" if cache_hit else "kernels_compiled"] += 1

    knobs.compilation.listener = noted
    shape = MoEShape.parse(shape_text)

    def normal(*size: int, width: int = 1) -> Tensor:
        return (width**-0.5 * torch.randn(size, device=DEVICE, dtype=torch.bfloat16)).requires_grad_()

    began = time.perf_counter()
    x, router = normal(shape.T, shape.d), normal(shape.E, shape.d, width=shape.d)
    w1 = normal(shape.E, 2 * shape.n, shape.d, width=shape.d)
    w2 = normal(shape.E, shape.d, shape.n, width=shape.n)
    grad_out = normal(shape.T, shape.d).detach()
    torch.cuda.synchronize()
    made = time.perf_counter()
    torch.autograd.grad(moe_layer(x, w1, w2, router, shape.K), [x, w1, w2, router], grad_out)
    torch.cuda.synchronize()
    called = time.perf_counter()
    seconds = {"import_s": import_s, "tool_import_s": tool_import_s, "context_s": made - began}
    seconds |= {"first_call_s": called - made}
    print(json.dumps({key: round(value, 3) for key, value in seconds.items()} | kernels), flush=True)


def run_child(command: Sequence[str], cache: Path) -> dict[str, Any]:
    """What a child reported in its last line, and ``wall_s``, its whole time as its parent sees it.

    Raises:
        RuntimeError: it failed or reported nothing; the message ends with the last line of its standard error.
    """
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
            capture_output=True,
            text=True,
            timeout=CHILD_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the first call's process was not done after {CHILD_LIMIT_S:.0f} s") from None
    wall_s = time.perf_counter() - began
    told = done.stderr.strip().splitlines() or ["nothing on standard error"]
    if done.returncode:
        raise RuntimeError(f"the first call's process failed ({describe_exit(done.returncode)}): {told[-1]}")
    try:
        report = dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except (IndexError, TypeError, ValueError):
        raise RuntimeError(f"the first call's process reported nothing: {told[-1]}") from None
    return report | {"wall_s": round(wall_s, 3)}


def first_calls(shape: MoEShape) -> dict[str, dict[str, Any]]:
    """Two processes one after the other: one with an empty cache of Triton's, one with what that left behind."""
    with tempfile.TemporaryDirectory(prefix="launch_cost_") as cache:
        return {name: run_child([sys.executable, "-c", CHILD, str(shape)], Path(cache)) for name in ("cold", "warm")}


# Calls in a row.


@dataclass(frozen=True)
class Calls:
    """One layer's forward + backward, results dropped: launched from Python, and replayed; ``no_graph`` says why it
    cannot be replayed."""

    launch: Callable[[], None]
    replay: Callable[[], None] | None
    no_graph: str | None = None


def prepare(layer: Layer, problem: Problem, no_graph: str | None) -> Calls:
    """Both kinds of calls of a layer.

    Args:
        no_graph: why not to try a CUDA graph, where that is known.
    """
    x = problem.x.detach().requires_grad_()
    leaves = [x, *layer.parameters()]

    def launch() -> None:
        torch.autograd.grad(layer.forward(x), leaves, problem.grad_output, allow_unused=True)

    if no_graph:
        return Calls(launch, None, no_graph)
    try:
        graphs = GraphCalls(layer, [problem], L2Eviction())
    except GraphCapturedError as error:
        return Calls(launch, None, f"cannot be captured in a CUDA graph: {error}")

    # Not by calling `graphs`, which evicts the L2 cache and waits: here calls follow each other as they do in training.
    def replay() -> None:
        graphs.forward_graph.replay()
        graphs.backward_graph.replay()

    return Calls(launch, replay)


def timed(call: Callable[[], None], calls: int) -> tuple[float, float]:
    """Milliseconds of one of so many calls in a row from an idle GPU: between events around all of them, and of the
    host until it had launched the last."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    launched_s = time.perf_counter() - began
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls, 1e3 * launched_s / calls


def turn(calls: Calls) -> dict[str, float]:
    """One turn of a layer, milliseconds for each forward + backward: ``host_ms`` launched from Python in a row, seen by
    the GPU; ``enqueue_ms`` what the host needed to launch them, waiting included where the GPU's queue is full, so that
    it says little beside an equal ``host_ms``; ``graph_ms`` replayed in a row; ``idle_ms`` one call on an idle GPU."""
    host_ms, enqueue_ms = timed(calls.launch, CALLS)
    found = {"host_ms": host_ms, "enqueue_ms": enqueue_ms}
    if calls.replay is not None:
        found["graph_ms"], _ = timed(calls.replay, CALLS)
    found["idle_ms"], _ = timed(calls.launch, 1)
    return {key: round(value, 5) for key, value in found.items()}


def summary(rounds: Sequence[Mapping[str, float]], no_graph: str | None = None) -> dict[str, Any]:
    """Medians over the turns with their 95 % intervals, and the turns themselves. ``host_over_graph`` is paired turn by
    turn, so that a drifting clock cancels: 1 where the host keeps up. Without a graph it is null, as ``graph_ms``."""
    values = {key: [row[key] for row in rounds] for key in rounds[0]}
    if "graph_ms" in values:
        values["host_over_graph"] = [row["host_ms"] / row["graph_ms"] for row in rounds]
    found: dict[str, Any] = dict.fromkeys(NUMBERS) | {"no_graph": no_graph}
    for key, samples in values.items():
        whole = summarise(samples)
        found[key] = {name: whole[name] for name in ("median", "ci95", "samples")}
    return found | {"rounds": [dict(row) for row in rounds]}


def in_a_row(implementations: Sequence[Implementation], problem: Problem) -> dict[str, dict[str, Any]]:
    """`summary` of each layer by name, all on the same data, taking turns."""
    ready = {i.name: prepare(i.build(problem), problem, i.no_graph_reason) for i in implementations}
    # What building left is looked through at every collection, which would be the host's time, but not the layer's.
    gc.collect()
    gc.freeze()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ready}
    for number in range(ROUNDS + 1):
        for name, calls in ready.items():
            found = turn(calls)
            if number:
                rounds[name].append(found)
    return {name: summary(rounds[name], ready[name].no_graph) for name in ready}


# The command.


def tables(first: Mapping[str, Mapping[str, Any]], row: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """The numbers for a terminal; medians with their intervals."""

    def table(title: str, columns: Mapping[str, Mapping[str, Any]], keys: Sequence[str]) -> Table:
        made = Table("", *columns, title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for key in keys:
            made.add_row(key, *(text(values[key]) for values in columns.values()))
        return made

    def text(value: Any) -> str:
        if not isinstance(value, Mapping):
            return "–" if value is None else str(value)
        return "{:.3f} ({:.3f} to {:.3f})".format(value["median"], *value["ci95"])

    return [
        table("First call of a process", first, list(first["cold"])),
        table(f"{CALLS} forward + backward calls in a row", row, NUMBERS),
    ]


def main(
    shape: Annotated[str, typer.Option(help="T,d,n,E,K")] = "24576,1536,256,128,8",
    rows: Annotated[Path | None, typer.Option(help="Where the measurements go.")] = None,
) -> None:
    """Measure the first call of a process and calls in a row."""
    registry = load_registry()
    try:
        size = MoEShape.parse(shape)
        points = {name: Point("moe_layer", name, size, device=DEVICE) for name in (OURS, OFFICIAL)}
        if reason := registry.get(OURS).unsupported_reason(points[OURS]):
            raise UserError(reason)
        official = registry.get(OFFICIAL)
    except UserError as error:
        raise typer.BadParameter(str(error)) from error
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise typer.BadParameter("launch costs need a Hopper GPU (compute capability 9.0)")
    used, left_out = [registry.get(OURS)], {}
    if reason := installed_reason(official) or official.unsupported_reason(points[OFFICIAL]):
        left_out[OFFICIAL] = reason
    else:
        used.append(official)
    # Named and writable before anything is measured.
    rows = rows or ROOT / "results" / gpu_slug(torch.cuda.get_device_name()) / "tuning" / FILE
    try:
        rows.parent.mkdir(parents=True, exist_ok=True)
        rows.open("a").close()
    except OSError as error:
        raise typer.BadParameter(f"--rows {rows}: cannot be written: {error.strerror or error}") from error
    # Before the children, so that byte-code and libraries lie ready for the first of them as for the second.
    row = in_a_row(used, make_problem(points[OURS], DEVICE))
    packages = dict.fromkeys(name for implementation in used for name in implementation.distributions)
    where = environment("cuda", packages)
    about = {key: where[key] for key in ("gpu", "driver", "torch", "triton", "commit", "dirty", "packages")}
    measured = about | {"shape": str(size), "in_a_row": {"calls": CALLS, "layers": row, "left_out": left_out}}
    # A child that fails must not take this along.
    rows.write_text(json.dumps(measured, indent=1) + "\n")
    first = first_calls(size)
    rows.write_text(json.dumps(measured | {"first_call": first}, indent=1) + "\n")
    console = Console()
    for table in tables(first, row):
        console.print(table)
    print(*(f"without {name}: {reason}" for name, reason in left_out.items()), f"-> {rows}", sep="\n")


if __name__ == "__main__":
    typer.run(main)

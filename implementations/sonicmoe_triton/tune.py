"""Tune the kernels for Hopper on the GPU at hand and rewrite the table of choices:

    python -m implementations.sonicmoe_triton.tune                       # the paper's twelve layers
    python -m implementations.sonicmoe_triton.tune --shape 24576,1536,256,128,8

Every candidate is compiled first (in parallel), then checked against the plain twin and timed: all candidates of a
kernel take turns, each turn a CUDA graph of several launches. A candidate takes the place of what the kernel chooses
itself only where it is faster by more than `MARGIN`. The activation is swiglu: entries of the up-projection and of dH
hold for gated activations (see `kernels`). What was measured goes to a file beside the GPU's results.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from harness.documents import save
from harness.environment import environment
from harness.record import gpu_slug
from harness.registry import ROOT, load_registry
from harness.shapes import MoEShape
from harness.sweep import load_sweep
from implementations.sonicmoe_triton import tiles, tuned
from implementations.sonicmoe_triton.tuned import PLAIN, TABLE, bucket

#: A choice must be worth an entry.
MARGIN = 0.01
ROUNDS = 7
#: Elements that are compared at once.
_PIECE = 1 << 27
#: How far a candidate may be from the plain twin (see `difference`).
AGREES = 1e-2
#: Of one turn, milliseconds.
TURN_MS = 8.0
#: What the kernel chooses itself.
DEFAULT = None
Candidate = Mapping[str, Any] | None
#: For each kernel: `DEFAULT`, keyword arguments of its options, and `PLAIN`, the twin with its own choice of tile.
_CONTIGUOUS: list[Candidate] = [
    DEFAULT,
    {"by_expert": False},
    {"by_expert": True},
    {"by_expert": True, "slices": 4, "buffers": 2},
    {"slices": 4, "buffers": 2},
    {"stages": 5, "slices": 2, "buffers": 2},
    {"by_expert": True, "stages": 5, "slices": 2, "buffers": 2},
    {"by_expert": True, "stages": 5, "slices": 2},
    PLAIN,
]
_GATHERED_COLUMNS = {"gathered": 256, "dense": 128, "gathered_rows": False}
_WEIGHTS: list[Candidate] = [
    DEFAULT,
    _GATHERED_COLUMNS | {"slice_columns": 64, "buffers": 2},
    _GATHERED_COLUMNS | {"slice_columns": 128, "buffers": 1},
    PLAIN,
]
CANDIDATES: dict[str, list[Candidate]] = {
    tiles.UP_PROJECTION: [
        DEFAULT,
        {"block_n": 256, "ragged": True},
        {"block_n": 256, "ragged": False, "by_expert": True},
        {"block_n": 256, "ragged": True, "by_expert": True},
        PLAIN,
    ],
    tiles.DOWN_PROJECTION: _CONTIGUOUS,
    tiles.HIDDEN_GRADIENT: [
        DEFAULT,
        {"block_n": 256, "ragged": False},
        {"block_n": 256, "ragged": True, "by_expert": True},
        PLAIN,
    ],
    tiles.INPUT_GRADIENT: _CONTIGUOUS,
    tiles.UP_WEIGHT_GRADIENT: _WEIGHTS,
    tiles.DOWN_WEIGHT_GRADIENT: _WEIGHTS,
}
#: Of the aggregation, which has no twin; see `aggregation.Options`.
AGGREGATIONS: list[Candidate] = [
    DEFAULT,
    *({"warps": warps, "rows": rows} for warps in (4, 8) for rows in (1, 2, 4, 8)),
]
Launch = Callable[[Candidate], Sequence[Tensor]]


def candidates_of(kernel: str) -> list[Candidate]:
    return AGGREGATIONS if kernel == tiles.AGGREGATION else CANDIDATES[kernel]


class Layer:
    """Every kernel's operands at a layer's size: bf16, random tokens, uniform routing."""

    def __init__(self, shape: MoEShape, tokens: int) -> None:
        from implementations.sonicmoe_triton.metadata import route
        from implementations.sonicmoe_triton.router import top_k

        self.shape = shape
        generator = torch.Generator(device="cuda").manual_seed(0)

        def normal(*size: int, scale: float = 1.0) -> Tensor:
            return scale * torch.randn(*size, device="cuda", dtype=torch.bfloat16, generator=generator)

        self.x, self.grad_out = normal(tokens, shape.d), normal(tokens, shape.d)
        self.w1 = normal(shape.E, 2 * shape.n, shape.d, scale=shape.d**-0.5)
        self.w2 = normal(shape.E, shape.d, shape.n, scale=shape.n**-0.5)
        scores, experts = top_k(normal(tokens, shape.E), shape.K)
        self.routing, self.row_scores = route(scores, experts, shape.E)
        self.rows = self.routing.rows
        # Real values: what a multiplication costs depends on its operands' bits.
        self.h = self.a = self.grad_h = self.scaled_a = self.x
        self.h, self.a = self.launches()[tiles.UP_PROJECTION](PLAIN)
        self.grad_h, self.scaled_a, _ = self.launches()[tiles.HIDDEN_GRADIENT](PLAIN)
        self._y: Tensor | None = None

    def _aggregate(self, candidate: Candidate) -> Sequence[Tensor]:
        from implementations.sonicmoe_triton.aggregation import Options, aggregate, configuration

        if self._y is None:
            (self._y,) = self.launches()[tiles.DOWN_PROJECTION](PLAIN)
        if candidate is not DEFAULT:
            options = Options(**candidate)
            if options.warps and configuration(self.shape.K, self.shape.d, 2, options)[0]["ROWS"] != options.rows:
                raise ValueError(f"a token has {self.shape.K} rows")
            return [aggregate(self._y, self.routing, weights=self.row_scores, options=options)]
        return [aggregate(self._y, self.routing, weights=self.row_scores)]

    def launches(self) -> dict[str, Launch]:
        """Each kernel as a function of the candidate."""
        from implementations.sonicmoe_triton import contiguous_gemm, gluon_contiguous, gluon_gathered, weight_gradient
        from implementations.sonicmoe_triton import gluon_weight_gradient as gluon_weights
        from implementations.sonicmoe_triton.gluon_hidden_gradient import hidden_gradient as gluon_hidden_gradient
        from implementations.sonicmoe_triton.gluon_up_projection import up_projection as gluon_up_projection
        from implementations.sonicmoe_triton.hidden_gradient import hidden_gradient
        from implementations.sonicmoe_triton.up_projection import up_projection

        r = self.routing

        def choose(
            plain: Callable[..., Any], gluon: Callable[..., Any], make: Callable[..., Any], *operands: Any
        ) -> Launch:
            def launch(candidate: Candidate) -> Sequence[Tensor]:
                if candidate == PLAIN:
                    found = plain(*operands)
                else:
                    found = gluon(*operands, options=None if candidate is DEFAULT else make(**candidate))
                return [found] if isinstance(found, Tensor) else found

            return launch

        gathered = gluon_gathered.make_options
        contiguous, weights = gluon_contiguous.Options, gluon_weights.Options
        return {
            tiles.UP_PROJECTION: choose(
                up_projection, gluon_up_projection, gathered, self.x, self.w1, r, "swiglu"
            ),
            tiles.DOWN_PROJECTION: choose(
                contiguous_gemm.down_projection, gluon_contiguous.down_projection, contiguous, self.a, self.w2, r
            ),
            tiles.HIDDEN_GRADIENT: choose(
                hidden_gradient, gluon_hidden_gradient, gathered,
                self.grad_out, self.w2, self.h, self.row_scores, r, "swiglu",
            ),
            tiles.INPUT_GRADIENT: choose(
                contiguous_gemm.input_gradient, gluon_contiguous.input_gradient, contiguous, self.grad_h, self.w1, r
            ),
            tiles.UP_WEIGHT_GRADIENT: choose(
                weight_gradient.up_weight_gradient, gluon_weights.up_weight_gradient, weights, self.grad_h, self.x, r
            ),
            tiles.DOWN_WEIGHT_GRADIENT: choose(
                weight_gradient.down_weight_gradient, gluon_weights.down_weight_gradient, weights,
                self.grad_out, self.scaled_a, r,
            ),
            tiles.AGGREGATION: self._aggregate,
        }  # fmt: skip

    def width(self, kernel: str) -> int:
        """See `tuned.overrides`."""
        if kernel == tiles.AGGREGATION:
            return self.shape.K
        return (2 if kernel in (tiles.INPUT_GRADIENT, tiles.UP_WEIGHT_GRADIENT) else 1) * self.shape.n

    def flops(self, kernel: str) -> int:
        if kernel == tiles.AGGREGATION:
            return 2 * self.rows * self.shape.d
        halves = 2 if kernel in (tiles.UP_PROJECTION, tiles.INPUT_GRADIENT, tiles.UP_WEIGHT_GRADIENT) else 1
        return 2 * halves * self.rows * self.shape.n * self.shape.d


def _compile(job: tuple[MoEShape, str, int]) -> tuple[tuple[MoEShape, str, int], str]:
    """Compile one candidate into Triton's cache by running it on a few tokens; what went wrong, or nothing."""
    shape, kernel, index = job
    try:
        # What is compiled depends on the widths alone; all experts' weights need not fit in so many processes.
        few = replace(shape, E=max(8, shape.K))
        Layer(few, 256).launches()[kernel](candidates_of(kernel)[index])
        torch.cuda.synchronize()
    except Exception as error:
        return job, f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return job, ""


def difference(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected. Piece by piece: float32 copies of all of the largest
    layers' gradients would not fit beside them."""
    wrong, whole = torch.zeros(2, device=expected.device, dtype=torch.float64)
    for one, other in zip(found.flatten().split(_PIECE), expected.flatten().split(_PIECE), strict=True):
        wrong += (one.float() - other.float()).square().sum(dtype=torch.float64)
        whole += other.float().square().sum(dtype=torch.float64)
    return float((wrong / whole).sqrt())


def comparable(kernel: str, results: Sequence[Tensor]) -> list[Tensor]:
    """A kernel's results without what depends on its tile: dS comes in a part for each tile of columns."""
    if kernel != tiles.HIDDEN_GRADIENT:
        return list(results)
    grad_h, scaled_a, partial_scores = results
    return [grad_h, scaled_a, partial_scores.sum(0)]


def in_turns(launches: Mapping[int, Callable[[], object]]) -> dict[int, float]:
    """Median milliseconds of each, in turns."""
    graphs, counts = {}, {}
    for index, launch in launches.items():
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        launch()
        end.record()
        end.synchronize()
        counts[index] = min(32, max(3, int(TURN_MS / begin.elapsed_time(end))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(counts[index]):
                launch()
        graphs[index] = graph
    times: dict[int, list[float]] = {index: [] for index in graphs}
    for turn in range(ROUNDS + 1):
        for index, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn:
                times[index].append(begin.elapsed_time(end) / counts[index])
    return {index: statistics.median(values) for index, values in times.items()}


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _measure(layer: Layer, kernel: str, failed: Mapping[int, str]) -> list[dict[str, Any]]:
    """Every candidate of one kernel: what it took, or why not. ``failed``: why some could not be compiled."""
    launch, candidates, problems = layer.launches()[kernel], candidates_of(kernel), dict(failed)
    ready = []
    expected = comparable(kernel, launch(PLAIN if PLAIN in candidates else DEFAULT))
    for index in range(len(candidates)):
        if index in problems:
            continue
        try:
            found = comparable(kernel, launch(candidates[index]))
            errors = [difference(*pair) for pair in zip(found, expected, strict=True)]
            del found
        except Exception as error:  # memory, or whatever a launch may raise: the others can still be compared
            problems[index] = _reason(error)
            continue
        if all(error < AGREES for error in errors):  # not if one is NaN
            ready.append(index)
        else:
            problems[index] = f"differs from the plain kernel by {max(errors):.1e}"
    del expected
    times = in_turns({index: functools.partial(launch, candidates[index]) for index in ready})
    about = {"shape": str(layer.shape), "kernel": kernel, "d": layer.shape.d, "width": layer.width(kernel)}
    about |= {"rows": 0 if kernel == tiles.AGGREGATION else layer.rows // layer.shape.E}
    rows = []
    for index, options in enumerate(candidates):
        if index in times:
            rate = layer.flops(kernel) / times[index] / 1e9
            outcome: dict[str, Any] = {"ms": round(times[index], 5), "tflops": round(rate, 1)}
        else:
            outcome = {"problem": problems[index]}
        rows.append(about | {"options": options} | outcome)
    return rows


def _measure_all(
    shape: MoEShape, kernels: Sequence[str], failed: Mapping[tuple[MoEShape, str, int], str]
) -> list[dict[str, Any]]:
    """Every kernel at one shape. One that fails as a whole, for want of memory say, has no rows and costs no other."""
    measured: list[dict[str, Any]] = []
    try:
        layer = Layer(shape, shape.T)
    except Exception as error:
        print(f"{shape}: {_reason(error)}", flush=True)
        return measured
    for kernel in kernels:
        of_kernel = {job[2]: problem for job, problem in failed.items() if job[:2] == (shape, kernel)}
        try:
            measured += (found := _measure(layer, kernel, of_kernel))
            _print(shape, kernel, found)
        except Exception as error:
            print(f"{shape} {kernel}: {_reason(error)}", flush=True)
        torch.cuda.empty_cache()
    return measured


def tune(shapes: Sequence[MoEShape], kernels: Sequence[str], workers: int) -> Iterator[list[dict[str, Any]]]:
    """Every candidate of every kernel at one shape after the other: what it took, or why not."""
    jobs = [(shape, kernel, i) for shape in shapes for kernel in kernels for i in range(len(candidates_of(kernel)))]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        failed = {job: problem for job, problem in pool.imap_unordered(_compile, jobs) if problem}
    for shape in shapes:
        # In a function of its own: what it held is gone when the next one begins.
        yield _measure_all(shape, kernels, failed)
        torch.cuda.empty_cache()


def _print(shape: MoEShape, kernel: str, rows: Sequence[Mapping[str, Any]]) -> None:
    def text(row: Mapping[str, Any]) -> str:
        chosen = row["options"]
        options = "default" if chosen is DEFAULT else ",".join(f"{key}={value}" for key, value in chosen.items())
        return f"{options}: " + (f"{row['ms']:.3f} ({row['tflops']:.0f})" if "ms" in row else row["problem"])

    print(f"{shape} {kernel}  " + "  ".join(map(text, rows)), flush=True)


def place(choice: Mapping[str, Any]) -> tuple[str, int, int, int]:
    """What an entry of the table, or a measurement, is about: two of one place exclude each other."""
    return choice["kernel"], choice["d"], choice["width"], bucket(choice["rows"])


def choices(measured: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int, int, int], dict[str, Any]]:
    """The winners among rows of `tune` by their `place`. Where two shapes share one, the last counts."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in measured:
        if "ms" in row:
            groups.setdefault((row["shape"], row["kernel"]), []).append(row)
    found = {}
    for timed in groups.values():
        best = min(timed, key=lambda row: row["ms"])
        for row in timed:
            if row["options"] is DEFAULT and best["ms"] > (1 - MARGIN) * row["ms"]:
                best = row
        kept = ("kernel", "d", "width", "rows", "options", "commit", "dirty")
        found[place(best)] = {key: best[key] for key in kept if key in best}
    return found


def merged(
    old: Sequence[Mapping[str, Any]], winners: Mapping[tuple[str, int, int, int], Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The entries of a new table. The default is written down as well: without it an entry for other numbers of rows
    would count here."""
    entries = {place(choice): choice for choice in old} | dict(winners)
    return [entries[key] for key in sorted(entries)]


def with_earlier(old: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """All measurements: those of a shape's kernel take the place of earlier ones."""
    again = {(row["shape"], row["kernel"]) for row in measured}
    return [*(row for row in old if (row["shape"], row["kernel"]) not in again), *measured]


def main(
    shape: Annotated[list[str] | None, typer.Option(help="T,d,n,E,K (repeatable); default: paper_layers.")] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="Only this kernel (repeatable).")] = None,
    table: Annotated[Path, typer.Option(help="The table to write.")] = TABLE,
    rows: Annotated[Path | None, typer.Option(help="Where the measurements go.")] = None,
    workers: Annotated[int, typer.Option(help="Processes that compile.")] = min(14, os.cpu_count() or 1),
) -> None:
    """Time every candidate and keep the winners; other shapes' entries stay."""
    shapes = [MoEShape.parse(text) for text in shape or []]
    shapes = shapes or list(dict.fromkeys(point.shape for point in load_sweep("paper_layers", load_registry()).points))
    known = [*CANDIDATES, tiles.AGGREGATION]
    kernels = kernel or known
    unknown = [name for name in kernels if name not in known]
    if unknown:
        raise typer.BadParameter(f"unknown kernel {unknown[0]}; choose from {', '.join(known)}")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise typer.BadParameter("tuning needs a Hopper GPU (compute capability 9.0)")
    where = environment("cuda")
    about = {key: where[key] for key in ("gpu", "driver", "torch", "triton")}
    code = {key: where[key] for key in ("commit", "dirty")}
    rows = rows or ROOT / "results" / gpu_slug(about["gpu"]) / "tuning" / "sonicmoe_triton.json"
    rows.parent.mkdir(parents=True, exist_ok=True)
    old = tuned.read(table) if table.exists() else []
    before = json.loads(rows.read_text()) if rows.exists() else {"measured": []}
    # Files from when all measurements were of one commit.
    whole = {key: before[key] for key in code if key in before}
    earlier = [whole | row for row in before["measured"]]
    ordered: Sequence[Mapping[str, Any]] = old
    measured: list[dict[str, Any]] = []
    for found in tune(shapes, kernels, workers):
        # After every shape: what comes later may fail, or be stopped.
        measured += [row | code for row in found]
        ordered = merged(old, choices(measured))
        save(rows, json.dumps(about | {"measured": with_earlier(earlier, measured)}, indent=1) + "\n")
        # Half a table would stop every kernel.
        save(table, json.dumps(about | {"choices": ordered}, indent=1) + "\n")
    print(f"{len(ordered)} choices -> {table}; {len(measured)} measurements -> {rows}")


if __name__ == "__main__":
    typer.run(main)

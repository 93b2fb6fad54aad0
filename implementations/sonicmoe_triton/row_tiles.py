"""Whether an expert's rows are better cut into tiles of 64 than of 128, on the GPU at hand:

    python -m implementations.sonicmoe_triton.row_tiles                        # token rounding's sparsest layers
    python -m implementations.sonicmoe_triton.row_tiles --shape 16384,4096,1024,512,8

Tiles of 64 rows waste half the padding; what they cost is that a tile's weights are read for half as many rows. The
four grouped GEMMs whose tiles are rows (the weight gradients' are not) run with routings of both, uniform top-K, and of
each height the fastest candidate counts. Candidates are checked and timed as those of `tune`. The numbers go to a file
beside the GPU's results.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from harness.environment import environment
from harness.errors import UserError
from harness.record import gpu_slug
from harness.registry import ROOT
from harness.shapes import MoEShape
from implementations.sonicmoe_triton import tiles, tune
from implementations.sonicmoe_triton.tiles import Tile

FILE = "sonicmoe_triton_row_tiles.json"
SHAPES = ("16384,4096,1024,256,8", "16384,4096,1024,512,8")
HEIGHTS = (64, 128)
#: What `tune.choose` of a layer picks from: the plain twin with this tile, or the Gluon kernel with these options.
Candidate = Tile | Mapping[str, Any]

_PLAIN_64 = [
    Tile(64, 256, 64, warps=4, stages=5),
    Tile(64, 256, 64, warps=8, stages=5),
    Tile(64, 256, 64, warps=4, stages=4, flatten=True),
    Tile(64, 128, 64, warps=4, stages=8),
]
_PLAIN_128 = [Tile(128, 256, 64, warps=8, stages=4), Tile(128, 256, 64, warps=8, stages=3, flatten=True)]
_CONTIGUOUS_64 = [
    {"block_n": 256, "stages": stages, "slices": slices, "by_expert": by_expert}
    for stages, slices in ((5, 4), (4, 2))
    for by_expert in (False, True)
]
_CONTIGUOUS_128 = [
    {"stages": stages, "slices": 2, "by_expert": by_expert} for stages in (5, 6) for by_expert in (False, True)
]
_CONTIGUOUS: dict[int, list[Candidate]] = {
    64: [*_CONTIGUOUS_64, *_PLAIN_64],
    128: [*_CONTIGUOUS_128, *_PLAIN_128],
}
#: The Gluon kernels that gather rows have tiles of 128 only.
_GATHERED: dict[int, list[Candidate]] = {
    64: [*_PLAIN_64],
    128: [*({"block_n": 256, "ragged": ragged} for ragged in (False, True)), *_PLAIN_128],
}
CANDIDATES: dict[str, dict[int, list[Candidate]]] = {
    tiles.UP_PROJECTION: _GATHERED,
    tiles.DOWN_PROJECTION: _CONTIGUOUS,
    tiles.HIDDEN_GRADIENT: _GATHERED,
    tiles.INPUT_GRADIENT: _CONTIGUOUS,
}


def _launches(layer: tune.Layer, routing: Any) -> dict[str, Callable[[Candidate], Sequence[Tensor]]]:
    """Each kernel as a function of the candidate, rows cut as ``routing`` says."""
    from implementations.sonicmoe_triton import contiguous_gemm, gluon_contiguous, gluon_gathered
    from implementations.sonicmoe_triton.gluon_hidden_gradient import hidden_gradient as gluon_hidden_gradient
    from implementations.sonicmoe_triton.gluon_up_projection import up_projection as gluon_up_projection
    from implementations.sonicmoe_triton.hidden_gradient import hidden_gradient
    from implementations.sonicmoe_triton.up_projection import up_projection

    def either(
        plain: Callable[..., Any], gluon: Callable[..., Any], make: Callable[..., Any], *operands: Any
    ) -> Callable[[Candidate], Sequence[Tensor]]:
        def launch(candidate: Candidate) -> Sequence[Tensor]:
            if isinstance(candidate, Tile):
                found = plain(*operands, tile=candidate)
            else:
                found = gluon(*operands, options=make(**candidate))
            return [found] if isinstance(found, Tensor) else found

        return launch

    gathered, contiguous = gluon_gathered.make_options, gluon_contiguous.Options
    dense_down = contiguous_gemm.down_projection, gluon_contiguous.down_projection, contiguous
    dense_dx = contiguous_gemm.input_gradient, gluon_contiguous.input_gradient, contiguous
    of_dh = layer.grad_out, layer.w2, layer.h, layer.row_scores, routing, "swiglu"
    return {
        tiles.UP_PROJECTION: either(
            up_projection, gluon_up_projection, gathered, layer.x, layer.w1, routing, "swiglu"
        ),
        tiles.DOWN_PROJECTION: either(*dense_down, layer.a, layer.w2, routing),
        tiles.HIDDEN_GRADIENT: either(hidden_gradient, gluon_hidden_gradient, gathered, *of_dh),
        tiles.INPUT_GRADIENT: either(*dense_dx, layer.grad_h, layer.w1, routing),
    }  # fmt: skip


def _named(candidate: Candidate) -> dict[str, Any]:
    if isinstance(candidate, Tile):
        shown = {"block_n": candidate.block_n, "block_k": candidate.block_k, "warps": candidate.warps}
        return {"plain": True} | shown | {"stages": candidate.stages, "flatten": candidate.flatten}
    return dict(candidate)


def measure(size: MoEShape) -> dict[str, Any]:
    """Every candidate of every kernel at one shape; and, for each height, the rows with their padding.

    A candidate that cannot be compiled or is wrong has its ``problem`` in place of ``ms``."""
    from implementations.sonicmoe_triton.metadata import route
    from implementations.sonicmoe_triton.router import top_k

    layer = tune.Layer(size, size.T)
    generator = torch.Generator(device="cuda").manual_seed(1)
    logits = torch.randn(size.T, size.E, device="cuda", dtype=torch.bfloat16, generator=generator)
    scores, experts = top_k(logits, size.K)
    # The order of rows within an expert is the same for both: operands of one fit the other.
    routings = {}
    for height in HEIGHTS:
        routings[height], layer.row_scores = route(scores, experts, size.E, height)
    plain = _PLAIN_128[0]
    layer.h, layer.a = _launches(layer, routings[128])[tiles.UP_PROJECTION](plain)
    layer.grad_h, layer.scaled_a, _ = _launches(layer, routings[128])[tiles.HIDDEN_GRADIENT](plain)
    launches = {height: _launches(layer, routings[height]) for height in HEIGHTS}
    measured = []
    for kernel, heights in CANDIDATES.items():
        jobs = [(height, candidate) for height in HEIGHTS for candidate in heights[height]]
        expected = tune.comparable(kernel, launches[128][kernel](plain))
        ready, problems = {}, {}
        for index, (height, candidate) in enumerate(jobs):
            call = functools.partial(launches[height][kernel], candidate)
            try:
                found = tune.comparable(kernel, call())
            except Exception as error:
                problems[index] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                continue
            errors = [tune.difference(*pair) for pair in zip(found, expected, strict=True)]
            if all(error < tune.AGREES for error in errors):  # not if one is NaN
                ready[index] = call
            else:
                problems[index] = f"differs from the plain kernel by {errors}"
            del found
        del expected
        times = tune.in_turns(ready)
        for index, (height, candidate) in enumerate(jobs):
            row = {"kernel": kernel, "rows": height, "options": _named(candidate)}
            row |= {"ms": round(times[index], 5)} if index in times else {"problem": problems[index]}
            measured.append(row)
        ready.clear()
        torch.cuda.empty_cache()
    padded = {str(height): int(routings[height].num_tiles) * height for height in HEIGHTS}
    return {"shape": str(size), "routed_rows": layer.rows, "padded_rows": padded, "measured": measured}


def best(measured: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Milliseconds of each kernel's fastest candidate, by height."""
    found: dict[str, dict[int, float]] = {}
    for row in measured:
        if "ms" in row:
            of_kernel = found.setdefault(row["kernel"], {})
            of_kernel[row["rows"]] = min(row["ms"], of_kernel.get(row["rows"], row["ms"]))
    return found


def main(
    shape: Annotated[list[str] | None, typer.Option(help="T,d,n,E,K (repeatable).")] = None,
    rows: Annotated[Path | None, typer.Option(help="Where the measurements go.")] = None,
) -> None:
    """Time the grouped GEMMs with tiles of 64 and of 128 rows."""
    try:
        sizes = [MoEShape.parse(text) for text in shape or SHAPES]
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
            raise UserError("comparing tiles needs a Hopper GPU (compute capability 9.0)")
    except UserError as error:
        typer.echo(f"row_tiles: {error}", err=True)
        raise typer.Exit(2) from error
    where = environment("cuda")
    about = {key: where[key] for key in ("gpu", "driver", "torch", "triton", "commit", "dirty")}
    rows = rows or ROOT / "results" / gpu_slug(about["gpu"]) / "tuning" / FILE
    rows.parent.mkdir(parents=True, exist_ok=True)
    found = []
    for size in sizes:
        found.append(measure(size))
        for kernel, heights in best(found[-1]["measured"]).items():
            shown = ", ".join(f"{height} rows {heights[height]:.3f} ms" for height in HEIGHTS if height in heights)
            print(f"{size} {kernel}: {shown}", flush=True)
        torch.cuda.empty_cache()
        # After every shape: the next may fail, or be stopped.
        rows.write_text(json.dumps(about | {"shapes": found}, indent=1) + "\n")
    print(f"-> {rows}")


if __name__ == "__main__":
    typer.run(main)

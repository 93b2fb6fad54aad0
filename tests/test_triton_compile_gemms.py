"""The six grouped GEMMs compiled ahead of time for Hopper (sm_90): no GPU needed, about three seconds a kernel.

What can be told without running: tensor cores are used (wgmma), operands travel as intended (TMA boxes, cp.async for
gathered rows), nothing spills, shared memory fits. A case that fails prints the facts of all cases compiled so far.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from implementations.sonicmoe_triton import tiles
from implementations.sonicmoe_triton.compiled import Facts, facts_of
from implementations.sonicmoe_triton.contiguous_gemm import down_projection_kernel, input_gradient_kernel
from implementations.sonicmoe_triton.hidden_gradient import SLICE, hidden_gradient_kernel
from implementations.sonicmoe_triton.tiles import Tile
from implementations.sonicmoe_triton.up_projection import up_projection_kernel
from implementations.sonicmoe_triton.weight_gradient import down_weight_gradient_kernel, up_weight_gradient_kernel

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted, not built")

E = 128
LAYERS = {"7B": (1536, 256), "120B": (4096, 1024)}
KERNELS = (
    tiles.UP_PROJECTION,
    tiles.DOWN_PROJECTION,
    tiles.INPUT_GRADIENT,
    tiles.HIDDEN_GRADIENT,
    tiles.UP_WEIGHT_GRADIENT,
    tiles.DOWN_WEIGHT_GRADIENT,
)
GATHERING = (tiles.UP_PROJECTION, tiles.HIDDEN_GRADIENT, tiles.UP_WEIGHT_GRADIENT, tiles.DOWN_WEIGHT_GRADIENT)


_facts: dict[str, tuple[Tile, Facts]] = {}


def build(
    kernel: str, d: int, n: int, tile: Tile, element: str = "bf16", gated: bool = True, bias: bool = False
) -> Facts:
    """Compile one kernel of `tiles` for widths d and n."""
    m, bn, bk = tile.block_m, tile.block_n, tile.block_k
    halves = 2 if gated else 1
    activation = "swiglu" if gated else "silu"
    row_tiles = {"tile_expert": "*i32", "tile_row": "*i32", "expert_offsets": "*i32", "num_tiles": "*i32"}
    pointer = f"*{element}"

    def boxes(*sides: int) -> str:
        return f"tensordesc<{element}[{', '.join(map(str, sides))}]>"

    signature: dict[str, str]
    constants: dict[str, Any]
    if kernel == tiles.UP_PROJECTION:
        function = up_projection_kernel
        w1 = boxes(halves, bn // halves, bk)
        signature = {"x": pointer, "w1": w1, "bias1": pointer, "h": pointer, "a": pointer, "gather": "*i32"} | row_tiles
        constants = {"D": d, "N": n, "HALVES": halves, "ACTIVATION": activation, "HAS_BIAS": bias}
    elif kernel == tiles.DOWN_PROJECTION:
        function = down_projection_kernel
        signature = {"a": boxes(m, bk), "w2": boxes(1, bn, bk), "bias2": pointer, "y": pointer} | row_tiles
        constants = {"D": d, "N": n, "HAS_BIAS": bias}
    elif kernel == tiles.INPUT_GRADIENT:
        function = input_gradient_kernel
        signature = {"grad_h": boxes(m, bk), "w1": boxes(1, bk, bn), "row_gradients": "*fp32", "router": pointer}
        signature |= {"grad_rows": pointer} | row_tiles
        constants = {"D": d, "K": halves * n, "ROUTED": True}
    elif kernel == tiles.HIDDEN_GRADIENT:
        function = hidden_gradient_kernel
        signature = {"grad_out": pointer, "w2": boxes(1, bk, bn), "h": pointer, "row_scores": "*fp32"}
        signature |= {"grad_h": pointer, "scaled_a": pointer, "partial_scores": "*fp32", "gather": "*i32"}
        signature |= row_tiles | {"R": "i32"}
        constants = {"D": d, "N": n, "HALVES": halves, "ACTIVATION": activation, "SLICE": SLICE}
    elif kernel == tiles.UP_WEIGHT_GRADIENT:
        function = up_weight_gradient_kernel
        signature = {"grad_h": boxes(bk, m), "x": pointer, "grad_w1": boxes(1, m, bn)}
        signature |= {"gather": "*i32", "expert_offsets": "*i32"}
        constants = {"E": E, "M": halves * n, "D": d}
    else:
        function = down_weight_gradient_kernel
        signature = {"grad_out": pointer, "scaled_a": boxes(bk, bn), "grad_w2": boxes(1, m, bn)}
        signature |= {"gather": "*i32", "expert_offsets": "*i32"}
        constants = {"E": E, "D": d, "N": n}
    constants |= {"PRECISION": "ieee" if element == "fp32" else "tf32", "BM": m, "BN": bn, "BK": bk, "PROGRAMS": 132}
    if "FLATTEN" in function.arg_names:
        constants["FLATTEN"] = tile.flatten
    signature = {name: signature.get(name, "constexpr") for name in function.arg_names}
    # What a launch finds out of its arguments. Without it loads are not vectorised, and the spills shown are not real.
    aligned = {
        (position,): [["tt.divisibility", 16]]
        for position, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    compiled = triton.compile(
        ASTSource(function, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )
    return facts_of(compiled)


def table() -> str:
    lines = ["| case | tile | registers | stack | shared KiB | wgmma | TMA loads | TMA stores | cp.async |"]
    lines.append("| --- " * 9 + "|")
    for case, (tile, f) in _facts.items():
        shape = f"{tile.block_m}, {tile.block_n}, {tile.block_k}, {tile.warps}, {tile.stages}"
        shape += ", flattened" if tile.flatten else ""
        counts = f"{f.wgmma} | {f.tma_loads} | {f.tma_stores} | {f.cp_async}"
        lines.append(f"| {case} | {shape} | {f.registers} | {f.stack} | {f.shared / 1024:.0f} | {counts} |")
    return "\n".join(lines)


def check(case: str, kernel: str, tile: Tile, facts: Facts, tensor_cores: bool = True) -> None:
    _facts[case] = (tile, facts)
    message = f"{case}: {facts}\n{table()}"
    assert facts.stack == 0, message
    assert facts.registers <= 255, message
    assert facts.shared <= tiles.SHARED_MEMORY, message
    assert (facts.wgmma > 0) == tensor_cores, message
    assert facts.tma_loads > 0, message
    assert facts.cp_async > 0 or kernel not in GATHERING, message
    assert (facts.tma_stores > 0) == (kernel in (tiles.UP_WEIGHT_GRADIENT, tiles.DOWN_WEIGHT_GRADIENT)), message


def tile_for(kernel: str, d: int, n: int, gated: bool = True, element_size: int = 2) -> Tile:
    """The tile that the kernel's wrapper chooses."""
    halves = 2 if gated else 1
    sees_h = kernel in (tiles.INPUT_GRADIENT, tiles.UP_WEIGHT_GRADIENT)
    width = halves * n if sees_h else n
    return tiles.choose(kernel, d, width, element_size, halves=halves if kernel == tiles.UP_PROJECTION else 1)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layer", LAYERS)
def test_tuned_tiles(layer: str, kernel: str) -> None:
    d, n = LAYERS[layer]
    tile = tile_for(kernel, d, n)
    check(f"{layer} {kernel}", kernel, tile, build(kernel, d, n, tile))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("d", "n"), [(2880, 2880), (776, 72), (64, 32)])
def test_widths_that_tiles_do_not_divide(d: int, n: int, kernel: str) -> None:
    tile = tile_for(kernel, d, n)
    check(f"{d}, {n} {kernel}", kernel, tile, build(kernel, d, n, tile))


@pytest.mark.parametrize("kernel", (tiles.UP_PROJECTION, tiles.HIDDEN_GRADIENT))
def test_ungated(kernel: str) -> None:
    tile = tile_for(kernel, 1536, 256, gated=False)
    check(f"7B ungated {kernel}", kernel, tile, build(kernel, 1536, 256, tile, gated=False))


@pytest.mark.parametrize("kernel", (tiles.UP_PROJECTION, tiles.DOWN_PROJECTION))
def test_bias(kernel: str) -> None:
    tile = tile_for(kernel, 1536, 256)
    check(f"7B bias {kernel}", kernel, tile, build(kernel, 1536, 256, tile, bias=True))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("d", "n"), [LAYERS["120B"], (100, 100)])
def test_float32_is_exact_and_does_not_spill(d: int, n: int, kernel: str) -> None:
    tile = tile_for(kernel, d, n, element_size=4)
    check(f"{d}, {n} fp32 {kernel}", kernel, tile, build(kernel, d, n, tile, element="fp32"), tensor_cores=False)


@pytest.mark.parametrize("kernel", (tiles.UP_PROJECTION, tiles.HIDDEN_GRADIENT))
def test_float32_ungated(kernel: str) -> None:
    tile = tile_for(kernel, 1536, 256, gated=False, element_size=4)
    facts = build(kernel, 1536, 256, tile, element="fp32", gated=False)
    check(f"7B fp32 ungated {kernel}", kernel, tile, facts, tensor_cores=False)

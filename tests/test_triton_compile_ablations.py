"""The ablations' kernels compiled ahead of time for Hopper (sm_90): no GPU needed. Nothing spills, the GEMMs use tensor
cores and load as the fused ones do, memory-bound kernels move 16 bytes at once."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import triton
from test_triton_compile_gluon_gathered import boxes as gluon_boxes
from test_triton_compile_gluon_gathered import check as check_gluon
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from implementations import _ablation_gluon, _ablation_kernels, _separate_kernels
from implementations.sonicmoe_triton import gluon_hidden_gradient, gluon_up_projection, tiles
from implementations.sonicmoe_triton.compiled import resources
from implementations.sonicmoe_triton.gluon_common import CONSUMER_WARPS, ENTRY_REGISTERS
from implementations.sonicmoe_triton.gluon_gathered import ROWS, Options
from implementations.sonicmoe_triton.tiles import Tile

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted, not built")

TARGET = GPUTarget("cuda", 90, 32)
LAYERS = {"7B": (1536, 256), "120B": (4096, 1024), "uneven": (776, 72), "narrow": (64, 32)}
ROW_TILES = dict.fromkeys(("gather", "places", "tile_expert", "tile_row", "expert_offsets", "num_tiles"), "*i32")


def aligned(signature: dict[str, str]) -> dict[tuple[int], list[list[Any]]]:
    """What a launch finds out of its arguments. Without it loads are not vectorised, and spills shown are not real."""
    return {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}


def build(
    kernel: Any, kinds: dict[str, str], constants: dict[str, Any], **options: int
) -> triton.compiler.CompiledKernel:
    signature = {name: kinds.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants, aligned(signature))
    return triton.compile(source, target=TARGET, options=options)


def build_gemm(
    kernel: Any, kinds: dict[str, str], constants: dict[str, Any], tile: Tile, element: str
) -> triton.compiler.CompiledKernel:
    constants |= {"PRECISION": "ieee" if element == "fp32" else "tf32", "PROGRAMS": 132, "FLATTEN": tile.flatten}
    constants |= {"BM": tile.block_m, "BN": tile.block_n, "BK": tile.block_k}
    return build(kernel, kinds | ROW_TILES, constants, num_warps=tile.warps, num_stages=tile.stages)


def check_gemm(compiled: triton.compiler.CompiledKernel, element: str, gathers: bool) -> None:
    registers, stack = resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    assert stack == 0, (registers, stack)
    assert compiled.metadata.shared <= tiles.SHARED_MEMORY
    assert ("wgmma.mma_async" in ptx) == (element != "fp32")
    assert re.search(r"cp\.async\.bulk\.tensor\.\dd\.shared", ptx)
    assert re.search(r"cp\.async\.c[ag]\.", ptx) or not gathers


def boxes(element: str, *sides: int) -> str:
    return f"tensordesc<{element}[{', '.join(map(str, sides))}]>"


@pytest.mark.parametrize("transposed", [True, False], ids=["up", "dH"])
@pytest.mark.parametrize(("layer", "element"), [("7B", "bf16"), ("120B", "bf16"), ("7B", "fp32")])
def test_plain_gathered_gemm(layer: str, element: str, transposed: bool) -> None:
    d, n = LAYERS[layer]
    size = 4 if element == "fp32" else 2
    kernel, halves = (tiles.UP_PROJECTION, 2) if transposed else (tiles.HIDDEN_GRADIENT, 1)
    tile = tiles.choose(kernel, d, n, size, halves=halves)
    box = (1, tile.block_n, tile.block_k) if transposed else (1, tile.block_k, tile.block_n)
    kinds = {"x": f"*{element}", "w": boxes(element, *box), "out": f"*{element}"}
    constants = {"D": d, "N": halves * n, "TRANSPOSED": transposed}
    compiled = build_gemm(_ablation_kernels.gathered_gemm_kernel, kinds, constants, tile, element)
    assert ("up_projection" if transposed else "hidden_gradient") in compiled.metadata.name
    check_gemm(compiled, element, gathers=True)


@pytest.mark.parametrize(("layer", "element"), [("7B", "bf16"), ("120B", "bf16"), ("7B", "fp32")])
def test_scattered_down_projection(layer: str, element: str) -> None:
    d, n = LAYERS[layer]
    tile = tiles.choose(tiles.DOWN_PROJECTION, d, n, 4 if element == "fp32" else 2)
    kinds = {"a": boxes(element, tile.block_m, tile.block_k), "w2": boxes(element, 1, tile.block_n, tile.block_k)}
    kinds |= {"y": f"*{element}"}
    kernel = _ablation_kernels.scattered_down_projection_kernel
    compiled = build_gemm(kernel, kinds, {"D": d, "N": n}, tile, element)
    check_gemm(compiled, element, gathers=False)
    assert element == "fp32" or re.search(r"st\.global\.v4\.b32", compiled.asm["ptx"])


def build_gluon(d: int, n: int, transposed: bool, options: Options, element: str) -> triton.compiler.CompiledKernel:
    tile, halves = options.tile, 2 if transposed else 1
    plan = _ablation_gluon.plan_of(d, halves * n, transposed, 132, options)
    box = (halves, tile.block_n // halves, tile.block_k) if transposed else (1, tile.block_k, tile.block_n)
    result = (*((1, 1) if options.ragged else ()), halves, ROWS.value, options.slice)
    kinds = {"x": f"*{element}", "w": gluon_boxes(element, *box), "boxes": gluon_boxes(element, *result)}
    kinds |= {"out": f"*{element}"} | ROW_TILES
    kernel = _ablation_gluon.gathered_gemm_kernel
    signature = {name: kinds.get(name, "constexpr") for name in kernel.arg_names}
    constants = {"TRANSPOSED": transposed, "P": plan}
    return triton.compile(
        GluonASTSource(kernel, signature, constants, aligned(signature)),
        target=TARGET,
        options={"num_warps": CONSUMER_WARPS, "maxnreg": ENTRY_REGISTERS},
    )


@pytest.mark.parametrize("transposed", [True, False], ids=["up", "dH"])
@pytest.mark.parametrize(("layer", "element"), [*((layer, "bf16") for layer in LAYERS), ("7B", "fp16")])
def test_gluon_gathered_gemm(layer: str, element: str, transposed: bool, tmp_path: Path) -> None:
    d, n = LAYERS[layer]
    fused = gluon_up_projection.choose(n) if transposed else gluon_hidden_gradient.choose(n)
    options = _ablation_gluon.like(fused, 2 if transposed else 1)
    assert (options.tile, options.ragged) == (fused.tile, fused.ragged)
    compiled = build_gluon(d, n, transposed, options, element)
    assert ("up_projection" if transposed else "hidden_gradient") in compiled.metadata.name
    check_gluon(compiled, options, tmp_path)


#: Each kernel and the elements of a program.
MEMORY_BOUND = {
    "gather": (_separate_kernels._apart_gather_kernel, _separate_kernels.COPIED),
    "swiglu": (_separate_kernels._apart_swiglu_kernel, _separate_kernels.COMPUTED),
    "scaled_swiglu": (_separate_kernels._apart_scaled_swiglu_kernel, _separate_kernels.COMPUTED),
    "score_gradient": (_separate_kernels._apart_score_gradient_kernel, _separate_kernels.COMPUTED),
    "swiglu_backward": (_separate_kernels._apart_swiglu_backward_kernel, _separate_kernels.COMPUTED),
    "epilogue": (_separate_kernels._apart_epilogue_kernel, _separate_kernels.ALL_COMPUTED),
}


@pytest.mark.parametrize("width", [4096, 72])
@pytest.mark.parametrize("name", MEMORY_BOUND)
def test_memory_bound(name: str, width: int) -> None:
    kernel, elements = MEMORY_BOUND[name]
    kinds = dict.fromkeys(("x", "out", "h", "a", "grad_a", "grad_h", "scaled_a"), "*bf16")
    kinds |= {"scores": "*fp32", "grad_scores": "*fp32", "gather": "*i32", "rows": "i32"}
    constants = {"D" if name == "gather" else "N": width, **_separate_kernels.sizes(width, 2, elements)}
    compiled = build(kernel, kinds, constants, num_warps=_separate_kernels.WARPS)
    registers, stack = resources(compiled.asm["cubin"])
    assert stack == 0, (registers, stack)
    # Enough warps at once to keep the memory busy.
    assert registers <= 128, registers
    ptx = compiled.asm["ptx"]
    assert re.search(r"ld\.global\.v4\.b32", ptx), ptx
    assert name == "score_gradient" or re.search(r"st\.global\.v4\.b32", ptx), ptx

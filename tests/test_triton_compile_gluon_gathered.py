"""The warp-specialised kernels compiled ahead of time for Hopper (sm_90): no GPU needed, about a second a kernel.

What can be told without running: warps are specialised and trade registers (setmaxnreg), tensor cores are used and not
serialised, operands travel as intended (TMA boxes, cp.async for gathered rows), nothing spills, shared memory fits.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
from test_triton_compile_gluon_contiguous import check_shared_memory_rules
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from implementations.sonicmoe_triton import gluon_hidden_gradient, gluon_up_projection, tiles
from implementations.sonicmoe_triton.compiled import resources
from implementations.sonicmoe_triton.gluon_common import CONSUMER_WARPS, ENTRY_REGISTERS
from implementations.sonicmoe_triton.gluon_gathered import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    ROWS,
    Options,
    Plan,
    make_options,
    make_plan,
)
from implementations.sonicmoe_triton.gluon_hidden_gradient import hidden_gradient_kernel
from implementations.sonicmoe_triton.gluon_up_projection import up_projection_kernel

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted, not built")

LAYERS = {"7B": (1536, 256), "120B": (4096, 1024), "uneven": (776, 72), "narrow": (64, 32)}


def boxes(element: str, *sides: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for(list(sides), gl.bfloat16 if element == "bf16" else gl.float16)
    return f"tensordesc<{element}[{', '.join(map(str, sides))}],{layout!r}>"


def compile_kernel(function: Any, signature: dict[str, str], plan: Plan) -> triton.compiler.CompiledKernel:
    signature |= dict.fromkeys(("gather", "tile_expert", "tile_row", "expert_offsets", "num_tiles"), "*i32")
    signature = {name: signature.get(name, "constexpr") for name in function.arg_names}
    # What a launch finds out of its arguments. Without it loads are not vectorised, and the spills shown are not real.
    aligned = {
        (position,): [["tt.divisibility", 16]]
        for position, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    return triton.compile(
        GluonASTSource(function, signature, {"P": plan}, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": CONSUMER_WARPS, "maxnreg": ENTRY_REGISTERS},
    )


def boxes_of_results(element: str, halves: int, options: Options) -> tuple[str, str]:
    """Of the results with HALVES N columns and with N."""
    ragged = (1, 1) if options.ragged else ()
    box = (ROWS.value, options.slice)
    return boxes(element, *ragged, halves, *box), boxes(element, *ragged, *box)


def build_hidden_gradient(
    d: int, n: int, options: Options, element: str = "bf16", activation: str = "swiglu", halves: int = 2
) -> triton.compiler.CompiledKernel:
    tile, pointer = options.tile, f"*{element}"
    grad_h_boxes, scaled_a_boxes = boxes_of_results(element, halves, options)
    signature = {
        "grad_out": pointer,
        "w2": boxes(element, 1, tile.block_k, tile.block_n),
        "h": boxes(element, halves, ROWS.value, options.slice),
        "row_scores": "*fp32",
        "grad_h_boxes": grad_h_boxes,
        "scaled_a_boxes": scaled_a_boxes,
        "grad_h": pointer,
        "scaled_a": pointer,
        "partial_scores": "*fp32",
        "R": "i32",
    }
    return compile_kernel(
        hidden_gradient_kernel, signature, make_plan(d, n, activation, halves, tile.block_n, 132, options)
    )


def build_up_projection(
    d: int,
    n: int,
    options: Options,
    element: str = "bf16",
    activation: str = "swiglu",
    halves: int = 2,
    bias: bool = False,
) -> triton.compiler.CompiledKernel:
    tile, pointer = options.tile, f"*{element}"
    columns = tile.block_n // halves
    h_boxes, a_boxes = boxes_of_results(element, halves, options)
    signature = {
        "x": pointer,
        "w1": boxes(element, halves, columns, tile.block_k),
        "bias1": pointer,
        "h_boxes": h_boxes,
        "a_boxes": a_boxes,
        "h": pointer,
        "a": pointer,
    }
    return compile_kernel(
        up_projection_kernel, signature, make_plan(d, n, activation, halves, columns, 132, options, bias)
    )


def check(compiled: triton.compiler.CompiledKernel, options: Options, folder: Path) -> None:
    ptx = compiled.asm["ptx"]
    _, stack = resources(compiled.asm["cubin"])
    (folder / "kernel.ptx").write_text(ptx)
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    command = [str(ptxas), "-v", "--gpu-name=sm_90a", str(folder / "kernel.ptx"), "-o", str(folder / "kernel.cubin")]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    shared = compiled.metadata.shared
    facts = f"{options}: stack {stack}, shared {shared}, {log}"
    assert "wgmma.mma_async" in ptx, facts
    assert "serialized" not in log, facts
    assert re.search(r"cp\.async\.bulk\.tensor\.\dd\.shared", ptx), facts
    assert re.search(r"cp\.async\.bulk\.tensor\.\dd\.global", ptx), facts
    assert re.search(r"cp\.async\.cg\..*0x10", ptx), facts
    assert "cp.async.mbarrier.arrive.noinc" in ptx, facts
    changed = {int(count) for count in re.findall(r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32\s+(\d+)", ptx)}
    assert {CONSUMER_REGISTERS.value, PRODUCER_REGISTERS.value} <= changed, facts
    assert stack == 0 and " 0 bytes spill stores" in log, facts
    assert shared <= tiles.SHARED_MEMORY, facts
    check_shared_memory_rules(ptx)


@pytest.mark.parametrize("layer", LAYERS)
def test_hidden_gradient(layer: str, tmp_path: Path) -> None:
    d, n = LAYERS[layer]
    options = gluon_hidden_gradient.choose(n)
    check(build_hidden_gradient(d, n, options), options, tmp_path)


def test_the_other_stores(tmp_path: Path) -> None:
    options = make_options(256, ragged=False)
    check(build_hidden_gradient(1536, 256, options), options, tmp_path)
    options = make_options(256, ragged=True)
    check(build_up_projection(1536, 256, options), options, tmp_path)


def test_the_other_order(tmp_path: Path) -> None:
    options = make_options(256, ragged=False, by_expert=True)
    check(build_up_projection(7168, 2048, options), options, tmp_path)
    options = make_options(256, ragged=True, by_expert=True)
    check(build_hidden_gradient(7168, 2048, options), options, tmp_path)


@pytest.mark.parametrize(("halves", "bias"), [(2, False), (2, True), (1, True)])
def test_large_experts_with_few_rows(halves: int, bias: bool, tmp_path: Path) -> None:
    """What the layer chooses there, in every form in which it may be asked for."""
    options = gluon_up_projection.choose(1024, halves, ordered_by_expert=True)
    activation = "swiglu" if halves == 2 else "silu"
    check(build_up_projection(4096, 1024, options, "bf16", activation, halves, bias), options, tmp_path)
    if not bias or halves == 1:
        options = gluon_hidden_gradient.choose(1024, halves, ordered_by_expert=True)
        check(build_hidden_gradient(4096, 1024, options, "bf16", activation, halves=halves), options, tmp_path)


def test_hidden_gradient_of_an_ungated_activation(tmp_path: Path) -> None:
    options = gluon_hidden_gradient.choose(256, halves=1)
    check(build_hidden_gradient(1536, 256, options, "fp16", "silu", halves=1), options, tmp_path)


@pytest.mark.parametrize("layer", LAYERS)
def test_up_projection(layer: str, tmp_path: Path) -> None:
    d, n = LAYERS[layer]
    options = gluon_up_projection.choose(n)
    check(build_up_projection(d, n, options), options, tmp_path)


def test_up_projection_of_an_ungated_activation_with_bias(tmp_path: Path) -> None:
    options = gluon_up_projection.choose(256, halves=1)
    check(build_up_projection(1536, 256, options, "fp16", "silu", halves=1, bias=True), options, tmp_path)


@pytest.mark.parametrize("wrong", [{"block_k": 128}, {"stages": 1}], ids=["wide steps", "one stage"])
def test_options_that_do_not_fit(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"at (most|least)"):
        make_options(256, ragged=True, **wrong)

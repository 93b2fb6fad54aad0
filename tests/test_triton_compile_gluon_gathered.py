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
from test_triton_compile_gemms import resources
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from implementations.sonicmoe_triton import gluon_hidden_gradient, gluon_up_projection, tiles
from implementations.sonicmoe_triton.gluon_gathered import Options, make_options
from implementations.sonicmoe_triton.gluon_hidden_gradient import hidden_gradient_kernel
from implementations.sonicmoe_triton.gluon_up_projection import up_projection_kernel

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted, not built")

LAYERS = {"7B": (1536, 256), "120B": (4096, 1024), "uneven": (776, 72)}


def boxes(element: str, *sides: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for(list(sides), gl.bfloat16 if element == "bf16" else gl.float16)
    return f"tensordesc<{element}[{', '.join(map(str, sides))}],{layout!r}>"


def compile_kernel(
    function: Any, signature: dict[str, str], constants: dict[str, Any], options: Options
) -> triton.compiler.CompiledKernel:
    signature = {name: signature.get(name, "constexpr") for name in function.arg_names}
    # What a launch finds out of its arguments. Without it loads are not vectorised, and the spills shown are not real.
    aligned = {
        (position,): [["tt.divisibility", 16]]
        for position, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    return triton.compile(
        GluonASTSource(function, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": options.tile.warps // options.groups, "maxnreg": options.registers},
    )


def build_hidden_gradient(
    d: int, n: int, options: Options, element: str = "bf16", activation: str = "swiglu", halves: int = 2
) -> triton.compiler.CompiledKernel:
    tile, pointer = options.tile, f"*{element}"
    ragged = (1, 1) if options.ragged else ()
    h = (halves, options.rows, options.slice)
    signature = {
        "grad_out": pointer,
        "w2": boxes(element, 1, tile.block_k, tile.block_n),
        "h": boxes(element, *h),
        "row_scores": "*fp32",
        "grad_h_boxes": boxes(element, *ragged, *h),
        "scaled_a_boxes": boxes(element, *ragged, *h[1:]),
        "grad_h": pointer,
        "scaled_a": pointer,
        "partial_scores": "*fp32",
        "gather": "*i32",
        "tile_expert": "*i32",
        "tile_row": "*i32",
        "expert_offsets": "*i32",
        "num_tiles": "*i32",
        "R": "i32",
    }
    constants = {
        "D": d,
        "N": n,
        "HALVES": halves,
        "ACTIVATION": activation,
        "BM": tile.block_m,
        "BN": tile.block_n,
        "BK": tile.block_k,
        "SLICE": options.slice,
        "STAGES": tile.stages,
        "PROGRAMS": 132 * tile.programs,
        "GROUPS": options.groups,
        "CONSUMER_REGISTERS": options.consumer_registers,
        "PRODUCER_REGISTERS": options.producer_registers,
        "RAGGED": options.ragged,
        "STAGGER": options.stagger,
    }
    return compile_kernel(hidden_gradient_kernel, signature, constants, options)


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
    ragged = (1, 1) if options.ragged else ()
    h = (halves, options.rows, options.slice)
    signature = {
        "x": pointer,
        "w1": boxes(element, halves, tile.block_n // halves, tile.block_k),
        "bias1": pointer,
        "h_boxes": boxes(element, *ragged, *h),
        "a_boxes": boxes(element, *ragged, *h[1:]),
        "h": pointer,
        "a": pointer,
        "gather": "*i32",
        "tile_expert": "*i32",
        "tile_row": "*i32",
        "expert_offsets": "*i32",
        "num_tiles": "*i32",
    }
    constants = {
        "D": d,
        "N": n,
        "HALVES": halves,
        "ACTIVATION": activation,
        "HAS_BIAS": bias,
        "BM": tile.block_m,
        "BN": tile.block_n,
        "BK": tile.block_k,
        "SLICE": options.slice,
        "STAGES": tile.stages,
        "PROGRAMS": 132 * tile.programs,
        "GROUPS": options.groups,
        "CONSUMER_REGISTERS": options.consumer_registers,
        "PRODUCER_REGISTERS": options.producer_registers,
        "RAGGED": options.ragged,
        "STAGGER": options.stagger,
    }
    return compile_kernel(up_projection_kernel, signature, constants, options)


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
    assert "setmaxnreg" in ptx, facts
    assert stack == 0 and " 0 bytes spill stores" in log, facts
    assert shared * options.tile.programs <= tiles.SHARED_MEMORY, facts


@pytest.mark.parametrize("layer", LAYERS)
def test_hidden_gradient(layer: str, tmp_path: Path) -> None:
    d, n = LAYERS[layer]
    options = gluon_hidden_gradient.choose(n)
    check(build_hidden_gradient(d, n, options), options, tmp_path)


def test_hidden_gradient_with_two_programs_on_a_multiprocessor(tmp_path: Path) -> None:
    options = make_options(128, warps=4, programs=2, slice=16, stagger=5000)
    check(build_hidden_gradient(1536, 256, options), options, tmp_path)


def test_hidden_gradient_with_two_groups_and_ragged_stores(tmp_path: Path) -> None:
    options = make_options(256, groups=2, ragged=True)
    check(build_hidden_gradient(1536, 256, options), options, tmp_path)


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

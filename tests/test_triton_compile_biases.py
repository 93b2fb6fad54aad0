"""The biases' kernels, with every activation's device functions, compiled ahead of time for Hopper (sm_90)."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from implementations.sonicmoe_triton import activations, biases

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted, not built")

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@triton.jit
def _activation_probe(h_ptr, grad_ptr, out_ptr, n, ACTIVATION: tl.constexpr):
    column = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    gate, up = tl.load(h_ptr + column).to(tl.float32), tl.load(h_ptr + n + column).to(tl.float32)
    grad_gate, grad_up, activated = activations.activation_backward(gate, up, tl.load(grad_ptr + column), ACTIVATION)
    tl.store(out_ptr + column, grad_gate)
    tl.store(out_ptr + n + column, grad_up)
    tl.store(out_ptr + 2 * n + column, activated - activations.activate(gate, up, ACTIVATION))


def stack_bytes(kernel: Any, arguments: dict[str, str], constants: dict[str, Any], directory: Path) -> int:
    """Bytes of stack of a thread, which are its spills, when compiled as a launch with aligned pointers would."""
    signature = {name: arguments.get(name, "constexpr") for name in kernel.arg_names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    cubin = directory / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run([CUOBJDUMP, "-res-usage", cubin], check=True, capture_output=True, text=True).stdout
    return int(re.findall(r"STACK:(\d+)", usage)[-1])


@pytest.mark.parametrize("activation", activations.ACTIVATIONS)
def test_activations(activation: str, tmp_path: Path) -> None:
    arguments = {"h_ptr": "*bf16", "grad_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"}
    assert stack_bytes(_activation_probe, arguments, {"ACTIVATION": activation}, tmp_path) == 0


@pytest.mark.parametrize("gathered", [False, True])
def test_expert_sum(gathered: bool, tmp_path: Path) -> None:
    arguments = {"values_ptr": "*bf16", "weights_ptr": "*fp32", "gather_ptr": "*i32", "expert_offsets_ptr": "*i32"}
    arguments |= {"out_ptr": "*bf16", "c": "i32"}
    constants = {"GATHERED": gathered, "WEIGHTED": gathered, "ROWS": biases._ROWS, "COLUMNS": biases._COLUMNS}
    assert stack_bytes(biases._expert_sum_kernel, arguments, constants, tmp_path) == 0


def test_row_products(tmp_path: Path) -> None:
    arguments = {"grad_out_ptr": "*bf16", "bias_ptr": "*bf16", "out_ptr": "*fp32", "d": "i32"}
    arguments |= {
        name: "*i32"
        for name in ("gather_ptr", "expert_offsets_ptr", "tile_expert_ptr", "tile_row_ptr", "num_tiles_ptr")
    }
    constants = {"ROWS": biases._ROWS, "COLUMNS": biases._COLUMNS}
    assert stack_bytes(biases._row_products_kernel, arguments, constants, tmp_path) == 0

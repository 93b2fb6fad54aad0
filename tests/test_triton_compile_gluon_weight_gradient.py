"""The Gluon weight gradients compiled ahead of time for Hopper (sm_90): no GPU needed, about a second a kernel.

What can be told without running: the tensor cores read both operands from shared memory, operands travel as intended
(TMA boxes, cp.async for gathered rows), warps are specialised (setmaxnreg), nothing spills, shared memory fits.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import triton
from test_triton_compile_gluon_contiguous import check_shared_memory_rules
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from implementations.sonicmoe_triton import gluon_weight_gradient as kernels
from implementations.sonicmoe_triton import tiles
from implementations.sonicmoe_triton.gluon_common import CONSUMER_WARPS

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted, not built")

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ELEMENTS = {"bf16": gl.bfloat16, "fp16": gl.float16}


def build(up: bool, d: int, n: int, options: kernels.Options, element: str = "bf16") -> tuple[str, int]:
    """(PTX, bytes of shared memory) of dW1 (`up`, gated) or dW2 for widths d and n."""
    dense_width = 2 * n if up else n
    options = kernels.narrowed(options, d, dense_width)
    loaded, stored = kernels.box_shapes(options, up)

    def descriptor(*box: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for(list(box), ELEMENTS[element])
        return f"tensordesc<{element}[{', '.join(map(str, box))}],{layout!r}>"

    plan = kernels.make_plan(options, up, experts=128, gathered_width=d, dense_width=dense_width, stride=132)
    signature = {"gathered": f"*{element}", "dense": descriptor(1, 1, *loaded), "out": descriptor(*stored)}
    signature |= {"gather": "*i32", "expert_offsets": "*i32"}
    function = kernels.weight_gradient_kernel
    signature = {name: signature.get(name, "constexpr") for name in function.arg_names}
    # What a launch finds out of its arguments; without it rows would not be copied 16 bytes at a time.
    aligned = {
        (position,): [["tt.divisibility", 16]]
        for position, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    compiled = triton.compile(
        GluonASTSource(function, signature, {"P": plan}, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": CONSUMER_WARPS},
    )
    return compiled.asm["ptx"], compiled.metadata.shared


def assembler_says(ptx: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        cubin = source.with_suffix(".cubin")
        command = [str(TOOLS / "ptxas"), "-v", "--gpu-name=sm_90a", str(source), "-o", str(cubin)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def check(up: bool, d: int, n: int, options: kernels.Options, element: str = "bf16") -> None:
    ptx, shared = build(up, d, n, options, element)
    assert shared <= tiles.SHARED_MEMORY
    # Operands as descriptors of shared memory: no list of registers but the accumulator's.
    products = re.findall(r"wgmma\.mma_async.*?;", ptx, re.DOTALL)
    assert products
    assert all(product.count("{") == 1 for product in products)
    assert re.search(r"cp\.async\.bulk\.tensor\.4d\.shared", ptx)
    assert re.search(r"cp\.async\.bulk\.tensor\.3d\.global", ptx)
    assert re.search(r"cp\.async\.cg\.shared\.global \[.*\], \[.*\], 0x10", ptx)
    assert "cp.async.mbarrier.arrive.noinc" in ptx
    assert re.search(rf"setmaxnreg\.(dec|inc)\.sync\.aligned\.u32\s+{options.producer_registers};", ptx)
    assert "stmatrix" in ptx
    check_shared_memory_rules(ptx)
    # A stack frame means spills.
    said = assembler_says(ptx)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said, said
    assert "wgmma" not in said, said  # "instructions are serialized due to …"


@pytest.mark.parametrize("up", [True, False], ids=["dW1", "dW2"])
@pytest.mark.parametrize(
    ("d", "n", "element"), [(1536, 256, "bf16"), (4096, 1024, "bf16"), (776, 72, "fp16")], ids=["7B", "120B", "uneven"]
)
def test_chosen_options(up: bool, d: int, n: int, element: str) -> None:
    check(up, d, n, kernels.Options(), element)


@pytest.mark.parametrize("up", [True, False], ids=["dW1", "dW2"])
@pytest.mark.parametrize(("slice_columns", "buffers"), [(64, 2), (128, 1)])
def test_gathered_columns(up: bool, slice_columns: int, buffers: int) -> None:
    options = kernels.Options(256, 128, gathered_rows=False, slice_columns=slice_columns, buffers=buffers)
    check(up, 4096, 256, options)


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "columns"])
def test_gathered_columns_end_with_the_operand(rows: bool) -> None:
    """A tile of 128 or 256 comes in parts: a width may fill some of them and yet end within the tile."""
    options = kernels.Options() if rows else kernels.Options(256, 128, gathered_rows=False)
    tile = options.gathered
    for d in (11 * tile, 11 * tile + 64, 11 * tile + tile // 2, 11 * tile + 8):
        ptx, _ = build(False, d, 712, options)
        bounds = re.findall(rf"setp\.[lg][te]\.[su](?:32|64)[^;]* {d};", ptx)
        assert bool(bounds) == (d % tile != 0), d


def test_rows_that_consumers_cannot_share() -> None:
    with pytest.raises(ValueError, match="192 rows"):
        kernels.Options(gathered=192)


def test_boxes_follow_the_gradient() -> None:
    options = kernels.Options(gathered=128, dense=256, block_k=64, slice_columns=64)
    assert kernels.box_shapes(options, up=True) == ((64, 256), (1, 64, 64))
    wide_rows = kernels.Options(gathered=128, dense=256, block_k=32, slice_columns=64, gathered_rows=False)
    assert kernels.box_shapes(wide_rows, up=True) == ((32, 128), (1, 128, 64))
    assert kernels.box_shapes(wide_rows, up=False) == ((32, 128), (1, 64, 128))

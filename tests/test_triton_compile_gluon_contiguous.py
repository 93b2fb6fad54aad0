"""The Gluon GEMMs over contiguous rows compiled ahead of time for Hopper (sm_90): no GPU needed, a second a kernel.

What can be told without running: tensor cores are used (wgmma, not serialised), operands and results travel by TMA,
registers are shared out between the roles (setmaxnreg), nothing spills, shared memory fits.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from implementations.sonicmoe_triton import compiled as compiled_facts
from implementations.sonicmoe_triton import tiles
from implementations.sonicmoe_triton.gluon_common import CONSUMER_WARPS, ENTRY_REGISTERS
from implementations.sonicmoe_triton.gluon_contiguous import Options, choose, contiguous_kernel, make_plan

#: d, n.
WIDTHS = {"7B": (1536, 256), "120B": (4096, 1024), "uneven": (776, 72)}
ELEMENTS = {"bf16": gl.bfloat16, "fp16": gl.float16}


@dataclass(frozen=True)
class Facts(compiled_facts.Facts):
    """And the numbers of registers that warps change to, and what the assembler warns of."""

    setmaxnreg: frozenset[int]
    warnings: tuple[str, ...]


def build(options: Options, d: int, k: int, b_transposed: bool, element: str = "bf16", addend: str = "") -> Facts:
    """Compile the kernel for an output of d columns and a contraction of length k."""
    plan = make_plan(d, k, b_transposed, addend, block_m=128, stride=132, options=options)

    def boxes(*sides: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for(list(sides), ELEMENTS[element])
        return f"tensordesc<{element}{list(sides)},{layout!r}>"

    block_n, block_k = options.block_n, options.block_k
    kinds = {
        "a": boxes(plan.block_m, block_k),
        "b": boxes(1, block_n, block_k) if b_transposed else boxes(1, block_k, block_n),
        "y": boxes(1, 1, plan.block_m, block_n // options.slices),
        "vectors": f"*{element}",
        "row_weights": "*fp32",
    } | dict.fromkeys(("tile_expert", "tile_row", "expert_offsets", "num_tiles"), "*i32")
    signature = {name: kinds.get(name, "constexpr") for name in contiguous_kernel.arg_names}
    # What a launch finds out of its arguments.
    aligned = {
        (position,): [["tt.divisibility", 16]]
        for position, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    compiled = triton.compile(
        GluonASTSource(contiguous_kernel, signature, {"P": plan}, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": CONSUMER_WARPS, "maxnreg": ENTRY_REGISTERS},
    )
    ptx = compiled.asm["ptx"]
    check_shared_memory_rules(ptx)
    log = assembler_log(ptx)
    return Facts(
        **asdict(compiled_facts.facts_of(compiled)),
        setmaxnreg=frozenset(map(int, re.findall(r"setmaxnreg\.\S+\s+(\d+)", ptx))),
        # Serialised wgmma is C7510 to C7518 by its reason, an ignored setmaxnreg C7508.
        warnings=tuple(line for line in log.splitlines() if re.search(r"C75\d\d|serializ|setmaxnreg|warning", line)),
    )


def check_shared_memory_rules(ptx: str) -> None:
    """The rules of gluon_common.py: a fence between the barriers' initialisation and all other warps, and a barrier of
    the partition's threads behind every wait for stores."""
    lines = [line.strip() for line in ptx.splitlines()]
    # Of all instructions that matter here, in order.
    kinds = {"mbarrier.init": "init", "fence.proxy.async": "fence", "barrier.sync": "start"}
    start = [kind for line in lines for text, kind in kinds.items() if text in line.split(";")[0]]
    last = len(start) - 1 - start[::-1].index("init")
    assert start[last + 1 : last + 3] == ["fence", "start"], start[: last + 4]
    instructions = [line for line in lines if line and not line.startswith(("//", ".loc", "$"))]
    waits = [i for i, line in enumerate(instructions) if line.startswith("cp.async.bulk.wait_group.read")]
    assert waits
    for i in waits:
        assert instructions[i + 1].startswith("bar.sync"), instructions[i : i + 3]


def assembler_log(ptx: str) -> str:
    """What ptxas says of a kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(tool), "-v", "--gpu-name=sm_90a", str(source), "-o", str(source.with_suffix(".cubin"))]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def check(facts: Facts) -> None:
    assert facts.stack == 0, facts
    assert facts.registers <= 168, facts
    assert facts.shared <= tiles.SHARED_MEMORY, facts
    assert facts.wgmma > 0, facts
    assert facts.tma_loads > 0 and facts.tma_stores > 0, facts
    assert {24, 240} <= facts.setmaxnreg, facts
    assert not facts.warnings, facts


pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted, not built")


@pytest.mark.parametrize("layer", WIDTHS)
def test_down_projection(layer: str) -> None:
    d, n = WIDTHS[layer]
    # A bias and float16 with the uneven widths: that saves compilations of their own.
    uneven = layer == "uneven"
    element, addend = ("fp16", "bias") if uneven else ("bf16", "")
    check(build(choose(d, n), d, n, b_transposed=True, element=element, addend=addend))


@pytest.mark.parametrize("layer", WIDTHS)
def test_input_gradient(layer: str) -> None:
    d, n = WIDTHS[layer]
    check(build(choose(d, 2 * n), d, 2 * n, b_transposed=False, addend="router"))


def test_other_order() -> None:
    check(build(Options(by_expert=True, slices=4, buffers=2), 1536, 256, b_transposed=True))


@pytest.mark.parametrize("options", [{"stages": 1}, {"slices": 3}, {"slices": 2, "buffers": 4}])
def test_options_that_make_no_kernel(options: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        Options(**options)


@pytest.mark.parametrize("options", [Options(stages=7), Options(block_n=256, stages=3), Options(block_k=128)])
def test_plans_that_do_not_fit(options: Options) -> None:
    with pytest.raises(ValueError):
        make_plan(1536, 256, True, "", block_m=128, stride=132, options=options)


@pytest.mark.parametrize(("columns", "k"), [(8, 8), (64, 32), (776, 72), (2880, 2880), (4096, 1024)])
def test_choose_fits(columns: int, k: int) -> None:
    make_plan(columns, k, True, "", block_m=128, stride=132, options=choose(columns, k))

"""Router, metadata and aggregation kernels compiled ahead of time for Hopper (sm_90): no GPU needed.

What can be told without running: nothing spills, and the aggregation reads its rows as 16-byte vectors.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from implementations.sonicmoe_triton import aggregation, metadata, router

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted, not built")

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
#: E, K of the paper's sweeps, of open models, and of the limits.
ROUTINGS = [(128, 8), (256, 16), (32, 2), (8, 2), (512, 10), (100, 22), (1024, 64), (1, 1)]
#: Those of `test_router_sorts_in_registers`.
SORTED = [(128, 8), (256, 16), (64, 4), (32, 2), (512, 10)]
# A build takes up to a second: every two of the parameters below meet, not every three.
#: E, K, element, softmax over all.
ROUTERS = [
    (*routing, *case)
    for routing in ROUTINGS
    for case in (("bf16", False), ("fp16", True), ("fp32", routing not in SORTED))
]
#: E, K, pairs of a block.
BLOCKS = [
    *[(*routing, metadata.PAIRS_PER_BLOCK) for routing in ROUTINGS],
    *[(*routing, 64) for routing in ((128, 8), (100, 22), (1024, 64), (1, 1))],
]
#: K, d, element.
AGGREGATIONS = [
    (k, d, ("bf16", "fp32")[(row + column) % 2])
    for row, k in enumerate((1, 2, 4, 8, 10, 16, 22, None))
    for column, d in enumerate((768, 1536, 4096, 2880, 24))
]


@dataclass(frozen=True)
class Facts:
    """registers and stack (bytes) of a thread; the PTX to count instructions in."""

    registers: int
    stack: int
    ptx: str


def build(
    kernel: Any, arguments: dict[str, str], constants: dict[str, Any], num_warps: int, directory: Path, **options: int
) -> Facts:
    """Compile as a launch with 16-byte aligned pointers would."""
    signature = {name: arguments.get(name, "constexpr") for name in kernel.arg_names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps, **options})
    cubin = directory / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run([CUOBJDUMP, "-res-usage", cubin], check=True, capture_output=True, text=True).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[-1]
    return Facts(int(registers), int(stack), compiled.asm["ptx"])


@pytest.mark.parametrize(("experts", "k", "element", "over_all"), ROUTERS)
def test_router(experts: int, k: int, element: str, over_all: bool, tmp_path: Path) -> None:
    element_size = 4 if element == "fp32" else 2
    padded, block_t, warps = router._launch_shape(experts, element_size)
    kernel, top_sizes, top_warps = router.top_k_configuration(experts, k, element_size)
    sizes = {"E": experts, "K": k, "E_PAD": padded, "K_PAD": triton.next_power_of_2(k), "BLOCK_T": block_t}
    arguments = {"logits_ptr": f"*{element}", "scores_ptr": "*fp32", "experts_ptr": "*i32", "tokens": "i32"}
    constants = {"E": experts, "K": k, "OVER_ALL": over_all, **top_sizes}
    facts = build(kernel, arguments, constants, top_warps, tmp_path)
    assert facts.stack == 0, facts.registers
    arguments |= {"grad_scores_ptr": "*fp32", "reverse_ptr": "*i32", "grad_logits_ptr": f"*{element}"}
    arguments |= {"row_gradients_ptr": "*fp32"}
    constants = {**sizes, "OVER_ALL": over_all, "ROW_ORDER": True, "BY_ROW": not over_all}
    constants |= {"PARTS": 1 if over_all else 8}
    facts = build(router._router_backward_kernel, arguments, constants, warps, tmp_path)
    assert facts.stack == 0, facts.registers


@pytest.mark.parametrize("element", ["bf16", "fp32"])
@pytest.mark.parametrize(("experts", "k"), SORTED)
def test_router_sorts_in_registers(experts: int, k: int, element: str, tmp_path: Path) -> None:
    """16-byte loads of logits; what moves between threads is the lists that neighbours exchange, and the result."""
    element_size = 4 if element == "fp32" else 2
    kernel, sizes, warps = router.top_k_configuration(experts, k, element_size)
    arguments = {"logits_ptr": f"*{element}", "scores_ptr": "*fp32", "experts_ptr": "*i32", "tokens": "i32"}
    facts = build(kernel, arguments, {"E": experts, "K": k, "OVER_ALL": False, **sizes}, warps, tmp_path)
    vectors = sizes["E_PAD"] // sizes["LANES"] // sizes["VECTOR"]
    assert len(re.findall(r"ld\.global\.v4\.b32", facts.ptx)) == vectors
    words = 2 if element == "fp32" else 1
    exchanged = words * (sizes["LIST"] + 1) * sizes["LOG_LANES"]
    assert facts.ptx.count("shfl.sync") <= exchanged + 2 * sizes["K_PAD"] + 2
    assert facts.ptx.count("st.shared") <= sizes["K_PAD"] // 2


@pytest.mark.parametrize(("experts", "k", "block"), BLOCKS)
def test_metadata(experts: int, k: int, block: int, tmp_path: Path) -> None:
    padded = metadata.padded_experts(experts)
    sizes = {"E": experts, "E_PAD": padded, "BLOCK": block}
    rows = {**sizes, "BLOCK_M": 128, "TILES": metadata.TILES_PER_STORE}
    cases: list[tuple[Any, dict[str, Any], int]] = [
        (metadata._routing_count_kernel, {**sizes, "GENERAL": False}, metadata.BLOCK_WARPS),
        (metadata._routing_count_kernel, {**sizes, "GENERAL": True}, metadata.BLOCK_WARPS),
        (metadata._routing_scan_kernel, {"E": experts, "CHUNK": metadata.SCAN_BLOCKS}, 4),
        (metadata._routing_rows_kernel, {**rows, "K": k, "GENERAL": False, "SCORED": True}, metadata.BLOCK_WARPS),
        (metadata._routing_rows_kernel, {**rows, "K": 0, "GENERAL": True, "SCORED": False}, metadata.BLOCK_WARPS),
    ]
    for kernel, constants, warps in cases:
        arguments = {
            name: "*i32" if name.endswith("_ptr") else "i32" for name in kernel.arg_names if name not in constants
        }
        facts = build(kernel, arguments, constants, warps, tmp_path)
        assert facts.stack == 0, (kernel.__name__, facts.registers)


@pytest.mark.parametrize(("k", "d", "element"), AGGREGATIONS)
def test_aggregation(k: int | None, d: int, element: str, tmp_path: Path) -> None:
    sizes, options = aggregation.configuration(k, d, 4 if element == "fp32" else 2)
    _, across = aggregation.column_block(d, 4 if element == "fp32" else 2)
    arguments = {name: "*i32" for name in ("reverse_ptr", "token_offsets_ptr")} | {"tokens": "i32"}
    arguments |= {name: f"*{element}" for name in ("rows_ptr", "base_ptr", "out_ptr")} | {"weights_ptr": "*fp32"}
    constants = {"K": k or 0, "GENERAL": k is None, "D": d, **sizes}
    for based in (False, True):
        case = {"WEIGHTED": not based, "BASED": based}
        facts = build(aggregation._aggregation_kernel, arguments, {**constants, **case}, directory=tmp_path, **options)
        assert facts.stack == 0, facts.registers
        # Every row, the base and the output: one 16-byte access a thread each. A thread adds its own rows.
        tokens = sizes["TOKENS"] * across // options["num_warps"]
        turns = 1 if k is None else -(-k // sizes["ROWS"])
        loads = len(re.findall(r"ld\.global\.v4\.b32", facts.ptx))
        # Where eight pairs of a token lie side by side, the numbers of its rows come four at a time.
        numbers = turns * sizes["ROWS"] // 4 if k is not None and k % 8 == 0 else 0
        assert loads == tokens * (turns * sizes["ROWS"] + based) + numbers, loads
        assert len(re.findall(r"st\.global\.v4\.b32", facts.ptx)) == tokens
        assert "bar.sync" not in facts.ptx and "shfl" not in facts.ptx

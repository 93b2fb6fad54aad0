"""DeepGEMM++'s routing compiled ahead of time for Hopper (sm_90): nothing spills."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_triton_compile_routing import build

from implementations import _deepgemm_pp_kernels as kernels
from implementations._deepgemm_ops import ALIGNMENT
from implementations.sonicmoe_triton.metadata import padded_experts

FP32, INT32 = "*fp32", "*i32"


@pytest.mark.parametrize("experts", [1, 100, 1024])
def test_routing(experts: int, tmp_path: Path) -> None:
    names = ("gather", "row_scores", "expert_offsets", "tile_expert", "tile_row")
    arguments = dict.fromkeys((*names, "padded_gather", "padded_scores", "expert_of_row"), INT32)
    arguments |= {"row_scores": FP32, "padded_scores": FP32}
    facts = build(kernels._pp_routing_rows_kernel, arguments, {"TILE": ALIGNMENT}, kernels.WARPS, tmp_path)
    assert facts.stack == 0, facts.registers
    arguments = dict.fromkeys(("reverse", "experts", "expert_offsets", "padded_reverse"), INT32) | {"pairs": "i32"}
    constants = {"E": experts, "E_PAD": padded_experts(experts), "TILE": ALIGNMENT, "BLOCK": kernels.PAIRS}
    facts = build(kernels._pp_routing_pairs_kernel, arguments, constants, kernels.WARPS, tmp_path)
    assert facts.stack == 0, facts.registers

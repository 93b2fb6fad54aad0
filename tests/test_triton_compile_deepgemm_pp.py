"""DeepGEMM++'s kernels compiled ahead of time for Hopper (sm_90): nothing spills, and rows move as 16-byte vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_triton_compile_routing import build

from implementations import _deepgemm_pp_kernels as kernels
from implementations._deepgemm_ops import ALIGNMENT
from implementations.sonicmoe_triton.aggregation import column_block
from implementations.sonicmoe_triton.metadata import padded_experts

BF16, FP32, INT32 = "*bf16", "*fp32", "*i32"
#: Kernel, its arguments, and how many elements a block has.
MOVING: dict[str, tuple[Any, dict[str, str], int]] = {
    "gather": (kernels._pp_gather_kernel, {"x": BF16, "gather": INT32, "out": BF16}, kernels.COPIED),
    "swiglu": (kernels._pp_swiglu_kernel, {"h": BF16, "a": BF16}, kernels.COMPUTED),
    "scaled_swiglu": (
        kernels._pp_scaled_swiglu_kernel,
        {"h": BF16, "scores": FP32, "scaled_a": BF16},
        kernels.COMPUTED,
    ),
    "score_gradient": (
        kernels._pp_score_gradient_kernel,
        {"grad_a": BF16, "h": BF16, "grad_scores": FP32},
        kernels.COMPUTED,
    ),
    "swiglu_backward": (
        kernels._pp_swiglu_backward_kernel,
        {"grad_a": BF16, "h": BF16, "scores": FP32, "grad_h": BF16},
        kernels.COMPUTED,
    ),
}


@pytest.mark.parametrize("name", list(MOVING))
@pytest.mark.parametrize("width", [256, 4096])
def test_moving(name: str, width: int, tmp_path: Path) -> None:
    kernel, arguments, elements = MOVING[name]
    block, _ = column_block(width, 2)
    constants = {"D" if name == "gather" else "N": width, "ROWS": elements // block, "BLOCK": block}
    facts = build(kernel, arguments, constants, kernels.WARPS, tmp_path)
    assert facts.stack == 0, facts.registers
    assert "ld.global.v4" in facts.ptx
    assert name == "score_gradient" or "st.global.v4" in facts.ptx


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

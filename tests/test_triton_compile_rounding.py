"""Token rounding's kernels compiled ahead of time for Hopper (sm_90): nothing spills, and keys move in vectors."""

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

from harness.token_rounding import ROUNDINGS
from implementations.sonicmoe_triton import rounding_kernels as rounding

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted, not built")

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
#: E, K: of the paper's comparison, and of the limits.
ROUTINGS = [(256, 8), (512, 10), (100, 22), (1024, 64), (1, 1)]
INTEGERS = ("top", "block_counts", "keys", "counts", "thresholds", "kept", "token_offsets", "experts")


@dataclass(frozen=True)
class Facts:
    """registers and stack (bytes) of a thread; the PTX to count instructions in."""

    registers: int
    stack: int
    ptx: str


def build(kernel: Any, constants: dict[str, Any], directory: Path, element: str = "bf16", **options: int) -> Facts:
    """Compile as a launch with 16-byte aligned pointers, and T a multiple of 16, would."""
    kinds = {f"{name}_ptr": "*i32" for name in INTEGERS} | {"draws_ptr": "*i64"}
    kinds |= {"logits_ptr": f"*{element}", "grad_logits_ptr": f"*{element}"}
    signature = {}
    for name in kernel.arg_names:
        signature[name] = kinds.get(name, "*fp32") if name.endswith("_ptr") else "i32"
    signature |= dict.fromkeys(constants, "constexpr")
    special = {parameter.name for parameter in kernel.params if not parameter.do_not_specialize}
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if name in special - {*constants}}
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes), target=GPUTarget("cuda", 90, 32), options=options
    )
    cubin = directory / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run([CUOBJDUMP, "-res-usage", cubin], check=True, capture_output=True, text=True).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[-1]
    return Facts(int(registers), int(stack), compiled.asm["ptx"])


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize(("experts", "k"), ROUTINGS)
def test_kernels_of_tokens(experts: int, k: int, divided: bool, tmp_path: Path) -> None:
    warps = rounding.ROW_WARPS
    kind = {"DIVIDED": divided}
    rows = {**kind, **rounding.row_sizes(experts, rounding.ELEMENTS)}
    marked = {**kind, "K": k, **rounding.row_sizes(experts, rounding.MARKED_ELEMENTS)}
    tile = {"E": experts, "BLOCK_T": rounding.TRANSPOSED_TOKENS, "BLOCK_E": rounding.TRANSPOSED_EXPERTS}
    # Each routing meets both elements, with one of the two softmaxes each: builds take long.
    element = ("bf16", "fp32")[(ROUTINGS.index((experts, k)) + divided) % 2]
    facts = build(rounding._rounding_mark_kernel, marked, tmp_path, element, num_warps=warps)
    assert facts.stack == 0, facts.registers
    for raw in sorted({False, divided}):
        weighted = {**rows, "RAW": raw}
        facts = build(rounding._rounding_backward_kernel, weighted, tmp_path, element, num_warps=warps)
        assert facts.stack == 0, facts.registers
        weighted = {**rows, "RAW": raw, "CLEARED": rounding.CLEARED}
        facts = build(rounding._rounding_write_kernel, weighted, tmp_path, num_warps=warps)
        assert facts.stack == 0, facts.registers
    facts = build(rounding._rounding_pairs_kernel, rows, tmp_path, num_warps=warps)
    assert facts.stack == 0, facts.registers
    facts = build(rounding._rounding_keys_kernel, {**kind, **tile}, tmp_path, num_warps=warps)
    assert facts.stack == 0, facts.registers
    # A weight's last bit decides, so it has to be torch's.
    assert ("div.rn.f32" in facts.ptx) == divided and "div.full" not in facts.ptx
    assert re.search(r"st\.global\.v4\.b32", facts.ptx)


@pytest.mark.parametrize("method", ROUNDINGS)
@pytest.mark.parametrize("tokens", [16384, 500, 1])
def test_select(tokens: int, method: str, tmp_path: Path) -> None:
    select(tokens, 256, method, tmp_path)


@pytest.mark.parametrize("experts", [1024, 100, 1])
@pytest.mark.parametrize("tokens", [1000, 5000, 16384, 32768, 40960])
def test_select_of_other_sizes(tokens: int, experts: int, tmp_path: Path) -> None:
    facts = select(tokens, experts, "balanced", tmp_path)
    resident = tokens <= rounding.RESIDENT_TOKENS
    assert re.search(r"ld\.global\.v4\.b32", facts.ptx) or not resident


def select(tokens: int, experts: int, method: str, directory: Path) -> Facts:
    sizes, options = rounding.select_configuration(tokens)
    padded = rounding.row_sizes(experts, rounding.ELEMENTS)["E_PAD"]
    constants = {"ROUNDING": method, "E": experts, "E_PAD": padded, **sizes}
    facts = build(rounding._rounding_select_kernel, constants, directory, **options)
    assert facts.stack == 0, facts.registers
    assert facts.registers * options["num_warps"] * 32 <= 65536
    return facts

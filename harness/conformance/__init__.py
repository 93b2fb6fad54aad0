"""The conformance suite: public bug reports of MoE kernels as small cases that every implementation meets."""

from __future__ import annotations

from harness.conformance.cases import CASES, COVERED, LINES, Case, Covered, Line, get_case

#: What rows of the suite name as their operation; their variant is the case.
OPERATION = "conformance"
#: Implementations that are this project's own: these must pass.
OURS = ("sonicmoe_triton", "sonicmoe_torch", "torch_grouped_mm", "torch_loop")

__all__ = ["CASES", "COVERED", "LINES", "OPERATION", "OURS", "Case", "Covered", "Line", "get_case"]

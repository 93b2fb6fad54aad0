"""The conformance suite: public bug reports of MoE kernels as small cases that every implementation meets."""

from __future__ import annotations

from harness.conformance.cases import CASES, COVERED, IN_PART, LINES, Case, Covered, InPart, Line, get_case

#: What rows of the suite name as their operation; their variant is the case.
OPERATION = "conformance"
#: Implementations whose algorithm is this project's own: these must pass. (What `torch_grouped_mm` shows are PyTorch's
#: kernels, as they come.)
OURS = ("sonicmoe_triton", "sonicmoe_torch", "torch_loop")

__all__ = ["CASES", "COVERED", "IN_PART", "LINES", "OPERATION", "OURS", "Case", "Covered", "InPart", "Line", "get_case"]

"""Each claim and its measure."""

from __future__ import annotations

from harness.claims.kernel_claims import io_overlap, token_rounding
from harness.claims.memory_claims import activation_memory, memory_constant, memory_range
from harness.claims.model import Finding
from harness.claims.paper import Entry
from harness.claims.rows import GpuRows
from harness.claims.subjects import Measure, unmeasured
from harness.claims.time_claims import forward_vs_deepgemm, near_bound, speed
from harness.claims.training_claims import ROUNDED, quality, step_ratio
from harness.token_rounding import TOP_K


def unknown(rows: GpuRows, entry: Entry, subject: str) -> Finding:
    """Of a claim that nobody has written a measure for."""
    return unmeasured(rows, subject, "no measure is written for this claim (harness/claims/measures.py)")


#: Claim -> how it is measured.
MEASURES: dict[str, Measure] = {
    "throughput-vs-scattermoe-7b": speed("scattermoe", "forward_backward"),
    "activation-memory-7b": activation_memory,
    "memory-constant-in-granularity": memory_constant,
    "forward-vs-deepgemm-7b": forward_vs_deepgemm,
    "backward-vs-scattermoe-7b": speed("scattermoe", "backward"),
    "token-rounding-kernel-speedup": token_rounding,
    "token-rounding-quality": quality,
    "near-dense-bound": near_bound,
    "training-throughput-7b": step_ratio("7B", "scattermoe", TOP_K),
    # "In a sparse 1.4B setting": in the layers of Figure 14's 1.4B experts have so many tiles that padding is little.
    "token-rounding-training-throughput": step_ratio("1.4B-sparse", None, ROUNDED, beside="1.4B"),
    "activation-memory-range": memory_range,
    "io-overlap": io_overlap,
}
#: Claims whose entry has to name a shape.
WITH_SHAPE = frozenset({
    "throughput-vs-scattermoe-7b", "activation-memory-7b", "forward-vs-deepgemm-7b", "backward-vs-scattermoe-7b",
    "token-rounding-kernel-speedup",
})  # fmt: skip

"""Ablation: the gather taken out of our kernels. Rows are made contiguous by a copy, then the same fused kernel reads
them with a gather that is the identity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from implementations._ablation import Ablation

_AFTER = "the same fused kernel then gathers them in order: by the same instructions, not by TMA boxes"


class AblationGather(Ablation):
    """The extra traffic is a write and a read of (R, d)."""

    name = "ablation_gather"
    label = "ours, rows copied first"
    differences: ClassVar[Mapping[str, str]] = {
        "grouped_gemm_gather_m": f"rows of X are copied side by side by a kernel of their own; {_AFTER}",
        "grouped_gemm_gather_k": f"rows of X or dO are copied side by side by a kernel of their own; {_AFTER}",
        "hidden_gradient": f"rows of dO are copied side by side by a kernel of their own; {_AFTER}",
    }
    operations = tuple(differences)

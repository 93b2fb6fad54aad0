"""DeepGEMM++: DeepGEMM's grouped GEMMs between our Triton kernels for router, gather, activation and aggregation."""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

from torch import Tensor

from harness.interface import ROUTER_CONVENTIONS, Layer, Point, Problem
from implementations._deepgemm_ops import ALIGNMENT
from implementations.deepgemm import DeepGemm, DeepGemmLayer


class DeepGemmPPLayer(DeepGemmLayer):
    """The same weights as DeepGEMM-pt's."""

    notes = (
        f"every expert's rows are gathered and padded to a multiple of {ALIGNMENT}, in the backward again",
        "backward as SonicMoE's (neither Y nor gathered X is held), with dS, A' and dH in a kernel each after the GEMM",
        "group sizes are read back to the host once per forward: the grouped GEMM over varying K takes a host list",
        "weight gradients accumulate in bf16 onto a zero-filled output (fp32 within the GEMM), since that kernel "
        "always adds to its output",
    )

    def __init__(self, problem: Problem, deep_gemm: ModuleType) -> None:
        from implementations import _deepgemm_pp

        super().__init__(problem, deep_gemm)
        self.function = _deepgemm_pp
        self.convention = problem.point.layer.router_convention

    def expert_indices(self, x: Tensor) -> Tensor:
        return self.function.choose_experts(x, self.router.detach(), self.k, self.convention)

    def forward(self, x: Tensor) -> Tensor:
        return self.function.moe_layer(x, self.w1, self.w2, self.router, self.k, self.convention, self.deep_gemm)


class DeepGemmPP(DeepGemm):
    """The paper's DeepGEMM++, as far as its description goes: its authors' code is not published."""

    name = "deepgemm_pp"
    label = "DeepGEMM++"
    requires: ClassVar[dict[str, str]] = {**DeepGemm.requires, "triton": "pip install triton==3.6.0"}
    distributions = (*DeepGemm.distributions, "triton")
    operations = ("moe_layer",)
    conventions = ROUTER_CONVENTIONS
    #: Of the GEMMs: see `DeepGemm._gemm_role`. What SonicMoE's dH kernel has in its epilogue counts as dH here too.
    kernel_roles = (
        ("_pp_routing_", "router"),
        ("_apart_gather_", "gather"),
        ("_apart_scaled_swiglu_", "dH"),
        ("_apart_score_gradient_", "dH"),
        ("_apart_swiglu_backward_", "dH"),
        ("_apart_swiglu_", "activation"),
        ("_aggregation_", "aggregation"),
        ("_router_", "router"),
        ("_routing_", "router"),
        *((part, "fill") for part in ("fillfunctor", "memset")),
        # Dense GEMMs, and torch's small kernels on scores and numbers of rows, are the router's only.
        *((part, "router") for part in ("nvjet", "cublas", "gemm", "at::native", "cub::")),
    )

    def restriction(self, point: Point) -> str | None:
        # What our router's kernels take.
        if point.shape.E > 1024 or point.shape.K > 64:
            return (
                f"{self.label} takes at most 1024 experts, 64 for each token, not E={point.shape.E}, K={point.shape.K}"
            )
        return super().restriction(point)

    def _layer(self, problem: Problem, deep_gemm: ModuleType) -> Layer:
        return DeepGemmPPLayer(problem, deep_gemm)

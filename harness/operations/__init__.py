"""Operations: what is computed, with which inputs, checked against which reference, at which cost."""

from __future__ import annotations

from harness.errors import UserError
from harness.interface import Implementation
from harness.operations.base import Operation
from harness.operations.dense_bound import DenseBound
from harness.operations.expert_aggregation import ExpertAggregation
from harness.operations.fused_kernels import DownAggregation, HiddenGradient
from harness.operations.grouped_gemm import GroupedGemm, GroupedGemmGatherK, GroupedGemmGatherM
from harness.operations.moe_layer import MoELayer
from harness.operations.routed_experts import RoutedExperts
from harness.operations.topk_router import TopKRouter

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        MoELayer(),
        RoutedExperts(),
        DenseBound(),
        GroupedGemm(),
        GroupedGemmGatherM(),
        GroupedGemmGatherK(),
        HiddenGradient(),
        DownAggregation(),
        ExpertAggregation(),
        TopKRouter(),
    )
}


def get_operation(name: str) -> Operation:
    """The operation of that name; `UserError` lists the known ones."""
    try:
        return OPERATIONS[name]
    except KeyError:
        raise UserError(f"unknown operation {name!r}; choose from {', '.join(OPERATIONS)}") from None


def variants_of(implementation: Implementation, operation: str) -> tuple[str, ...]:
    """The variants of an operation that an implementation offers; ("",) where there is one without a name."""
    return tuple(implementation.variants.get(operation, get_operation(operation).variants))


__all__ = ["OPERATIONS", "DenseBound", "MoELayer", "Operation", "RoutedExperts", "get_operation", "variants_of"]

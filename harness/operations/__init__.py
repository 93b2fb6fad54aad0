"""Operations: what is computed, with which inputs, checked against which reference, at which cost."""

from __future__ import annotations

from harness.errors import UserError
from harness.operations.base import Operation
from harness.operations.dense_bound import DenseBound
from harness.operations.moe_layer import MoELayer
from harness.operations.routed_experts import RoutedExperts

OPERATIONS: dict[str, Operation] = {
    operation.name: operation for operation in (MoELayer(), RoutedExperts(), DenseBound())
}


def get_operation(name: str) -> Operation:
    """The operation of that name; `UserError` lists the known ones."""
    try:
        return OPERATIONS[name]
    except KeyError:
        raise UserError(f"unknown operation {name!r}; choose from {', '.join(OPERATIONS)}") from None


__all__ = ["OPERATIONS", "DenseBound", "MoELayer", "Operation", "RoutedExperts", "get_operation"]

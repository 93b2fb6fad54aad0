"""The ablations' kernels for the harness's operations: our own, with one fusion taken apart each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.interface import Kernel, Problem
from implementations import _ablation_gluon, _ablation_kernels, _separate_kernels
from implementations.sonicmoe_triton import (
    contiguous_gemm,
    gluon_gathered,
    gluon_hidden_gradient,
    gluon_up_projection,
    kernel_layers,
    kernels,
    tiles,
)
from implementations.sonicmoe_triton.aggregation import aggregate
from implementations.sonicmoe_triton.metadata import Routing


class Copied(NamedTuple):
    """Rows are copied side by side first.

    Attributes:
        gather: (R,), the token of each row.
        routing: the problem's, in which each row is its own token.
    """

    gather: Tensor
    routing: Routing


def copied(routing: Routing) -> Copied:
    gather = torch.arange(routing.rows, dtype=torch.int32, device=routing.gather.device)
    return Copied(routing.gather, replace(routing, gather=gather))


class CopiedGatherM(kernel_layers.GatherM):
    """The copy, then the fused up-projection of contiguous rows."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.gather, self.routing = copied(self.routing)

    def forward(self, x: Tensor) -> Any:
        return super().forward(_separate_kernels.gather_rows(x, self.gather))


class CopiedGatherK(kernel_layers.GatherK):
    """The copy, then the weight gradient of contiguous rows."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.gather, self.routing = copied(self.routing)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_separate_kernels.gather_rows(x, self.gather))


class CopiedHiddenGradient(kernel_layers.HiddenGradient):
    """The copy of dO's rows, then the fused dH of contiguous rows."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.gather, self.routing = copied(self.routing)

    def forward(self, x: Tensor) -> Any:
        return super().forward(_separate_kernels.gather_rows(x, self.gather))


def up_projection(x: Tensor, w1: Tensor, routing: Routing) -> Tensor:
    """H (R, 2n), by the kernel (plain or Gluon) and the tile that the fused up-projection takes here."""
    n, d = w1.shape[1] // 2, w1.shape[2]
    choice = kernels._choice(tiles.UP_PROJECTION, gluon_gathered.make_options, d, n, x, routing)
    if choice.plain:
        tile = tiles.choose(tiles.UP_PROJECTION, d, n, x.element_size(), routing.block_m, halves=2)
        return _ablation_kernels.gathered_gemm(x, w1, routing, True, tile)
    ordered = gluon_gathered.by_expert(2 * n, d, routing.rows // w1.shape[0])
    options = choice.options or gluon_up_projection.choose(n, ordered_by_expert=ordered)
    return _ablation_gluon.gathered_gemm(x, w1, routing, True, options)


def hidden_gradient(grad_out: Tensor, w2: Tensor, routing: Routing) -> Tensor:
    """dA' (R, n), by the kernel (plain or Gluon) and the tile that the fused dH takes here."""
    d, n = w2.shape[1:]
    choice = kernels._choice(tiles.HIDDEN_GRADIENT, gluon_gathered.make_options, d, n, grad_out, routing)
    if choice.plain:
        tile = tiles.choose(tiles.HIDDEN_GRADIENT, d, n, grad_out.element_size(), routing.block_m)
        return _ablation_kernels.gathered_gemm(grad_out, w2, routing, False, tile)
    ordered = gluon_gathered.by_expert(n, d, routing.rows // w2.shape[0])
    options = choice.options or gluon_hidden_gradient.choose(n, ordered_by_expert=ordered)
    return _ablation_gluon.gathered_gemm(grad_out, w2, routing, False, options)


class ActivationGatherM(kernel_layers.GatherM):
    """H from gathered rows, then A = SwiGLU(H) in a kernel of its own."""

    def forward(self, x: Tensor) -> Any:
        h = up_projection(x, self.w1, self.routing)
        return h, _separate_kernels.swiglu(h)


class ActivationHiddenGradient(kernel_layers.HiddenGradient):
    """dA' from gathered rows, then dS, A' and dH in a kernel each."""

    def forward(self, x: Tensor) -> Any:
        h, row_scores = self.operands["h"], self.operands["row_scores"]
        grad_a = hidden_gradient(x, self.operands["down"], self.routing)
        grad_scores = _separate_kernels.score_gradient(grad_a, h)
        scaled_a = _separate_kernels.scaled_swiglu(h, row_scores)
        return _separate_kernels.swiglu_backward(grad_a, h, row_scores), scaled_a, grad_scores

    def outputs(self, found: Any) -> dict[str, Tensor]:
        return dict(zip(("grad_h", "scaled_a", "grad_scores"), found, strict=True))


class EpilogueHiddenGradient(ActivationHiddenGradient):
    """dA' from gathered rows, then dS, A' and dH in one kernel."""

    def forward(self, x: Tensor) -> Any:
        grad_a = hidden_gradient(x, self.operands["down"], self.routing)
        return _separate_kernels.epilogue(grad_a, self.operands["h"], self.operands["row_scores"])


class PlainDownAggregation(kernel_layers.DownAggregation):
    """The layer's own two steps, the GEMM by the plain kernel whatever the GPU."""

    def forward(self, x: Tensor) -> Tensor:
        y = contiguous_gemm.down_projection(x, self.operands["down"], self.routing)
        return aggregate(y, self.routing, weights=self.row_scores)


class ScatteredDownAggregation(kernel_layers.DownAggregation):
    """Each row of Y at its token's place t·K + k, then a sum over rows in order."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        in_order = torch.arange(self.routing.rows, dtype=torch.int32, device=problem.x.device)
        self.places = torch.empty_like(in_order).scatter_(0, self.routing.reverse.long(), in_order)
        self.by_token = replace(self.routing, reverse=in_order)
        self.pair_scores = self.operands["scores"].reshape(-1).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        y = _ablation_kernels.scattered_down_projection(x, self.operands["down"], self.routing, self.places)
        return aggregate(y, self.by_token, weights=self.pair_scores)


#: By plugin and operation.
BUILD: Mapping[str, Mapping[str, Callable[[Problem], Kernel]]] = {
    "ablation_gather": {
        "grouped_gemm_gather_m": CopiedGatherM,
        "grouped_gemm_gather_k": CopiedGatherK,
        "hidden_gradient": CopiedHiddenGradient,
    },
    "ablation_activation": {
        "grouped_gemm_gather_m": ActivationGatherM,
        "hidden_gradient": ActivationHiddenGradient,
    },
    "ablation_epilogue": {"hidden_gradient": EpilogueHiddenGradient},
    "ablation_scatter": {"down_aggregation": ScatteredDownAggregation},
    "ablation_plain": {"down_aggregation": PlainDownAggregation},
}

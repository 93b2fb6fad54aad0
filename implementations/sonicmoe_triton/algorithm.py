"""The algorithm of SonicMoE (arXiv 2512.14080), forward and backward, as a sequence of kernels.

`layer_forward` and `layer_backward` have the router inside, `routed_forward` and `routed_backward` are for callers who
route by themselves. `Held` is what lies between the passes. None of them knows autograd: `function` and `operators` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from implementations.sonicmoe_triton.aggregation import aggregate
from implementations.sonicmoe_triton.biases import expert_sum, row_products
from implementations.sonicmoe_triton.kernels import (
    down_projection,
    down_weight_gradient,
    hidden_gradient,
    input_gradient,
    up_projection,
    up_weight_gradient,
)
from implementations.sonicmoe_triton.metadata import Routing, route
from implementations.sonicmoe_triton.operands import RouterTerm
from implementations.sonicmoe_triton.router import router_backward, top_k

#: M tile of the grouped GEMMs over rows.
BLOCK_M = 128


class Held(NamedTuple):
    """What the forward leaves for the backward. R = P rows; see `metadata.Routing`."""

    h: Tensor  # (R, 2n); taken out (None) where the backward is to free it
    row_scores: Tensor  # (R,) fp32
    experts: Tensor  # (P,)
    gather: Tensor  # (R,)
    reverse: Tensor  # (P,)
    expert_offsets: Tensor  # (E+1,)
    tile_expert: Tensor  # (max_tiles,)
    tile_row: Tensor  # (max_tiles,)
    num_tiles: Tensor  # (1,)

    def routing(self, k: int, token_offsets: Tensor | None = None) -> Routing:
        return Routing(
            gather=self.gather,
            reverse=self.reverse,
            token_offsets=token_offsets,
            k=k,
            experts=self.experts,
            expert_offsets=self.expert_offsets,
            tile_expert=self.tile_expert,
            tile_row=self.tile_row,
            num_tiles=self.num_tiles,
            block_m=BLOCK_M,
        )


def hold(h: Tensor, row_scores: Tensor, routing: Routing) -> Held:
    return Held(
        h,
        row_scores,
        routing.experts,
        routing.gather,
        routing.reverse,
        routing.expert_offsets,
        routing.tile_expert,
        routing.tile_row,
        routing.num_tiles,
    )


def autocasts(x: Tensor) -> bool:
    """Whether autocast would change what torch computes of x. Asked of the device ``meta``, torch itself raises."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


@contextmanager
def guard(x: Tensor) -> Iterator[None]:
    """On x's device, and without autocast: the kernels would not see it, and torch's own products beside them would."""
    with torch.cuda.device_of(x):
        if autocasts(x):
            with torch.autocast(x.device.type, enabled=False):
                yield
        else:
            yield


def logits_of(x: Tensor, router: Tensor) -> Tensor:
    return torch.mm(x, router.t())


class SavedH:
    """H, which the backward has done with long before it needs the most memory.

    Args:
        tensor: (R, 2n). Letting go frees it where nobody else refers to it: eagerly, not within an operator.
        context: of the `autograd.Function` that has saved it; what is saved is freed with it, unless the graph is to
            be kept. (A backward that fails after this cannot be repeated.)
    """

    def __init__(self, tensor: Tensor, context: Any = None) -> None:
        self.tensor = tensor
        # What compiled functions of torch itself call for the same end; not every version may have it.
        self._release = getattr(context, "maybe_clear_saved_tensors", None)

    def let_go(self) -> None:
        del self.tensor
        if self._release is not None:
            self._release()


class Parameters(NamedTuple):
    """The experts' own, shaped as for `moe_layer`."""

    w1: Tensor
    w2: Tensor
    bias1: Tensor | None
    bias2: Tensor | None


def experts_forward(
    x: Tensor, parameters: Parameters, row_scores: Tensor, routing: Routing, activation: str
) -> tuple[Tensor, Tensor]:
    """Steps 3 to 5: (out (T, d), h (R, 2n))."""
    h, a = up_projection(x, parameters.w1, routing, activation, parameters.bias1)
    y = down_projection(a, parameters.w2, routing, parameters.bias2)
    del a
    return aggregate(y, routing, weights=row_scores), h


class RoutingGradients(NamedTuple):
    """What the routing makes of dS: its own gradient, and what dX gains by the router, in one of two forms."""

    gradient: Tensor | None = None  # as `Gradients.routing`
    term: RouterTerm | None = None  # where a token's own experts are all that count
    base: Tensor | None = None  # (T, d), where all experts do


class Needs(NamedTuple):
    """Which gradients are wanted; ``routing``: that of the router, or of the caller's scores."""

    x: bool
    w1: bool
    w2: bool
    routing: bool
    bias1: bool
    bias2: bool


class Gradients(NamedTuple):
    """None where not wanted; ``routing`` as in `Needs`."""

    x: Tensor | None  # (T, d)
    w1: Tensor | None  # (E, 2n, d)
    w2: Tensor | None  # (E, d, n)
    routing: Tensor | None  # (E, d) or (P,)
    bias1: Tensor | None  # (E, 2n)
    bias2: Tensor | None  # (E, d)


def experts_backward(
    grad_out: Tensor,
    x: Tensor,
    parameters: Parameters,
    held: Held,
    routing: Routing,
    activation: str,
    routing_backward: Callable[[Tensor], RoutingGradients],
    needs: Needs,
    saved_h: SavedH,
) -> Gradients:
    """Steps 6 to 10.

    Args:
        held: its h is not looked at: see ``saved_h``.
        routing_backward: called with parts (C, R) fp32 in row order whose sum is dS.
    """
    w1, w2, bias1, bias2 = parameters
    grad_x = grad_w1 = grad_w2 = grad_bias1 = grad_bias2 = None
    # 6. dA' = dO W2, then dS, A' = S A and dH in its epilogue: neither Y nor dY is needed.
    grad_h, scaled_a, partial_scores = hidden_gradient(
        grad_out, w2, saved_h.tensor, held.row_scores, routing, activation
    )
    saved_h.let_go()
    # 7. dW2.
    if needs.w2:
        grad_w2 = down_weight_gradient(grad_out, scaled_a, routing)
    del scaled_a
    if bias1 is not None and needs.bias1:
        grad_bias1 = expert_sum(grad_h, routing)
    if bias2 is not None:
        partial_scores[0] += row_products(grad_out, bias2, routing)
        if needs.bias2:
            grad_bias2 = expert_sum(grad_out, routing, weights=held.row_scores, gathered=True)
    of_routing = routing_backward(partial_scores)
    # 8. and 9. dX.
    if needs.x:
        grad_rows = input_gradient(grad_h, w1, routing, of_routing.term)
        grad_x = aggregate(grad_rows, routing, base=of_routing.base, over_base=True)
        del grad_rows
    # 10. dW1.
    if needs.w1:
        grad_w1 = up_weight_gradient(grad_h, x, routing)
    return Gradients(grad_x, grad_w1, grad_w2, of_routing.gradient, grad_bias1, grad_bias2)


# The layer, router inside.


def layer_forward(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    router: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    k: int,
    convention: str,
    activation: str,
    keep_logits: bool,
) -> tuple[Tensor, Tensor | None, Held]:
    """(out, logits if they are asked for or the backward needs them, held)."""
    x = x.contiguous()
    with guard(x):
        # 1. Router: logits in the layer's dtype, compared and normalised in fp32.
        logits = logits_of(x, router)
        scores, experts = top_k(logits, k, convention)
        # 2. Routing.
        routing, row_scores = route(scores, experts, router.shape[0], BLOCK_M)
        del scores
        kept = logits if keep_logits or convention == "softmax_topk" else None
        del logits
        out, h = experts_forward(x, Parameters(w1, w2, bias1, bias2), row_scores, routing, activation)
    return out, kept, hold(h, row_scores, routing)


def layer_backward(
    grad_out: Tensor,
    grad_logits: Tensor | None,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    router: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    logits: Tensor | None,
    k: int,
    convention: str,
    activation: str,
    *,
    held: Held,
    needs: Needs,
    saved_h: SavedH,
) -> Gradients:
    """Gradients of the first six tensors of `layer_forward`. ``logits``: for ``softmax_topk`` only."""
    x, grad_out = x.contiguous(), grad_out.contiguous()

    def router_gradients(partial_scores: Tensor) -> RoutingGradients:
        """11. dS -> dlogits -> dWr, and the router's term of dX."""
        if not needs.x and not needs.routing:
            return RoutingGradients()
        term = None
        if needs.x and grad_logits is None and convention != "softmax_topk":
            # K of a token's E logits have a gradient: their rows carry it into dX.
            term = RouterTerm(torch.empty_like(held.row_scores), router)
        total = router_backward(
            held.row_scores,
            held.experts.view(-1, k),
            partial_scores,
            convention,
            logits,
            router.shape[0],
            x.dtype,
            held.reverse,
            term and term.row_gradients,
        )
        if grad_logits is not None:
            total += grad_logits
        of_router = torch.mm(total.t(), x) if needs.routing else None
        base = torch.mm(total, router) if needs.x and term is None else None
        return RoutingGradients(of_router, term, base)

    parameters = Parameters(w1, w2, bias1, bias2)
    with guard(x):
        return experts_backward(
            grad_out, x, parameters, held, held.routing(k), activation, router_gradients, needs, saved_h
        )


# The experts alone, routed by the caller.


def routed_forward(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    scores: Tensor,
    experts: Tensor,
    token_offsets: Tensor | None,
    bias1: Tensor | None,
    bias2: Tensor | None,
    k: int,
    activation: str,
) -> tuple[Tensor, Held]:
    x = x.contiguous()
    given = experts.view(-1, k) if token_offsets is None else experts
    with guard(x):
        routing, row_scores = route(scores, given, w1.shape[0], BLOCK_M, token_offsets)
        out, h = experts_forward(x, Parameters(w1, w2, bias1, bias2), row_scores, routing, activation)
    return out, hold(h, row_scores, routing)


def routed_backward(
    grad_out: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    token_offsets: Tensor | None,
    bias1: Tensor | None,
    bias2: Tensor | None,
    k: int,
    activation: str,
    *,
    held: Held,
    needs: Needs,
    saved_h: SavedH,
) -> Gradients:
    """Gradients of x, w1, w2, scores, bias1, bias2."""
    x, grad_out = x.contiguous(), grad_out.contiguous()

    def scores_gradient(partial_scores: Tensor) -> RoutingGradients:
        if not needs.routing:
            return RoutingGradients()
        total, reverse = partial_scores.sum(0), held.reverse
        if token_offsets is None:
            return RoutingGradients(total[reverse])
        # A pair without an expert has no row.
        return RoutingGradients(torch.where(reverse >= 0, total[reverse.clamp_min(0)], 0.0))

    parameters, routing = Parameters(w1, w2, bias1, bias2), held.routing(k, token_offsets)
    with guard(x):
        return experts_backward(grad_out, x, parameters, held, routing, activation, scores_gradient, needs, saved_h)

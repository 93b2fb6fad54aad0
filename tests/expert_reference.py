"""The experts, and a layer whose pairs are given, in plain torch: for the tests of the Triton layer on the interpreter
and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from implementations.sonicmoe_triton.activations import is_gated

ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    **{"swiglu": F.silu, "geglu": F.gelu, "reglu": F.relu, "silu": F.silu, "gelu": F.gelu},
    "relu2": lambda x: F.relu(x).square(),
}


def plain_experts(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    scores: Tensor,
    experts: Tensor,
    tokens: Tensor,
    activation: str = "swiglu",
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
) -> Tensor:
    """The experts one by one: scores, experts, tokens (P,)."""
    out = torch.zeros_like(x)
    for e in range(w1.shape[0]):
        own = (experts == e).nonzero().squeeze(1)
        h = x[tokens[own]] @ w1[e].T
        h = h if bias1 is None else h + bias1[e]
        gate, up = h.chunk(2, dim=1) if is_gated(activation) else (h, torch.ones_like(h))
        y = (ACTIVATE[activation](gate) * up) @ w2[e].T
        y = y if bias2 is None else y + bias2[e]
        out = out.index_add(0, tokens[own], scores[own, None] * y)
    return out


def plain_rounded_layer(
    tensors: Sequence[Tensor | None],
    indices: Tensor,
    experts: Tensor,
    token_offsets: Tensor,
    convention: str,
    activation: str,
) -> Tensor:
    """The layer with its top-K (T, K) and the pairs that its rounding has kept given: experts (P,), offsets (T + 1,).

    Args:
        tensors: x, w1, w2, router, bias1, bias2.
    """
    x, w1, w2, router, bias1, bias2 = tensors
    assert x is not None and w1 is not None and w2 is not None and router is not None
    pairs, experts = token_offsets.long().diff(), experts.long()
    tokens = torch.repeat_interleave(torch.arange(x.shape[0], device=x.device), pairs)
    p = torch.softmax(x @ router.T, dim=1)
    scores = p[tokens, experts]
    if convention != "softmax_topk":
        scores = scores / p.gather(1, indices.long()).sum(1)[tokens]
    return plain_experts(x, w1, w2, scores, experts, tokens, activation, bias1, bias2)

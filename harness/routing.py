"""The router: logits, top-K choice, scores in each convention, and what came of a routing (rows, padding)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def choose_experts(x: Tensor, router: Tensor, k: int) -> Tensor:
    """(T, K) expert indices, int64: the K largest of ``x @ router.T`` computed in ``x``'s dtype, compared in fp32.

    A layer that computes its logits the same way chooses the same experts up to exact ties.
    """
    return torch.topk((x @ router.T).float(), k, dim=-1).indices


def router_scores(logits: Tensor, indices: Tensor, convention: str) -> Tensor:
    """(T, K) weights of the chosen experts.

    Args:
        logits: (T, E), fp32.
        indices: (T, K), int64.
        convention: see `harness.interface.LayerSpec`.
    """
    if convention == "topk_softmax":
        return torch.softmax(torch.gather(logits, 1, indices), dim=-1)
    chosen = torch.gather(torch.softmax(logits, dim=-1), 1, indices)
    if convention == "softmax_topk":
        return chosen
    if convention == "softmax_topk_renormalised":
        return chosen / chosen.sum(dim=-1, keepdim=True)
    raise ValueError(f"unknown router convention {convention!r}")


def expert_counts(indices: Tensor, experts: int) -> Tensor:
    """(E,) rows of each expert, int64, on the indices' device."""
    return torch.zeros(experts, dtype=torch.int64, device=indices.device).scatter_add_(
        0, indices.reshape(-1).long(), torch.ones(indices.numel(), dtype=torch.int64, device=indices.device)
    )


def assign(counts: Sequence[int], tokens: int, k: int) -> Tensor:
    """(T, K) distinct experts of each token, int64 on the CPU, of which expert e has ``counts[e]``.

    Raises:
        ValueError: the counts do not add up to T·K, or an expert has more rows than there are tokens.
    """
    if sum(counts) != tokens * k or max(counts, default=0) > tokens:
        raise ValueError(f"counts {tuple(counts)} are no routing of {tokens} tokens to {k} experts each")
    pairs = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    # Pair i is token i mod T's: an expert's run of pairs is at most T long and so meets no token twice.
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(tokens))
    return pairs.view(k, tokens).T[order]


def routing_outcome(counts: Tensor, m_tile: int) -> dict[str, int]:
    """What came of a routing: ``routed_rows``, ``padded_rows`` (every expert's count rounded up to the M tile),
    ``dropped``, ``added`` and ``empty_experts``, from the (E,) counts."""
    padded = (counts + m_tile - 1) // m_tile * m_tile
    return {
        "routed_rows": int(counts.sum()),
        "padded_rows": int(padded.sum()),
        "dropped": 0,
        "added": 0,
        "empty_experts": int((counts == 0).sum()),
    }

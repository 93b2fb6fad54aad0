"""Seeded random inputs of an MoE layer, at the scale that a trained layer sees, with a planted routing distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.interface import DISTRIBUTIONS, Point, Problem

#: A logit offset that no random logit (standard deviation about 1) overcomes.
FORBIDDEN = 24.0


def planted_logits(distribution: str, experts: int, k: int) -> Tensor | None:
    """(E,) logit offsets, fp32 on the CPU, that give the routing its distribution; None for ``uniform``.

    ``skewed``: log-probabilities of a Zipf law with exponent 1. ``one_group``: the first K experts take every token.
    ``empty_experts``: a quarter of the experts (at least one where E > K, never leaving fewer than K) get no token.
    """
    if distribution == "uniform":
        return None
    if distribution == "skewed":
        return -torch.log(torch.arange(1, experts + 1, dtype=torch.float32))
    offsets = torch.zeros(experts)
    if distribution == "one_group":
        offsets[k:] = -FORBIDDEN
    elif distribution == "empty_experts":
        empty = min(max(experts // 4, 1), experts - k)
        # Spread over the experts, so that empty groups lie at the start, inside and at the end.
        for i in range(empty):
            offsets[i * experts // max(empty, 1)] = -FORBIDDEN
    else:
        raise ValueError(f"unknown distribution {distribution!r}; choose from {', '.join(DISTRIBUTIONS)}")
    return offsets


def make_problem(point: Point, device: torch.device | str, input_set: int = 0) -> Problem:
    """Draw the inputs of ``point``.

    Activations and the incoming gradient are standard normal, weights normal with variance 1 / fan-in, as after a
    standard initialisation; nothing is zero or constant, since the data's values change a GPU's power and so its
    clock. A skew is planted through the first feature: ``x[:, 0] = 1`` and ``router[:, 0]`` = the logit offsets, so
    that a layer with its own router meets it too.

    Args:
        device: where the tensors live; the same seed gives the same numbers on one kind of device only.
        input_set: another draw of ``x`` and ``grad_output`` for the same weights.
    """
    T, d, n, E = point.shape.T, point.shape.d, point.shape.n, point.shape.E
    dtype = point.torch_dtype
    generator = torch.Generator(device=device).manual_seed(1_000_003 * point.routing.seed + 17)

    def normal(*size: int, std: float = 1.0) -> Tensor:
        return torch.empty(size, device=device, dtype=dtype).normal_(0.0, std, generator=generator)

    gate, up = normal(E, n, d, std=d**-0.5), normal(E, n, d, std=d**-0.5)
    down = normal(E, d, n, std=n**-0.5)
    router = normal(E, d, std=d**-0.5)
    x_generator = torch.Generator(device=device).manual_seed(1_000_003 * point.routing.seed + 101 + input_set)
    x = torch.empty((T, d), device=device, dtype=dtype).normal_(0.0, 1.0, generator=x_generator)
    grad_output = torch.empty((T, d), device=device, dtype=dtype).normal_(0.0, 1.0, generator=x_generator)
    offsets = planted_logits(point.routing.distribution, E, point.shape.K)
    if offsets is not None:
        x[:, 0] = 1.0
        router[:, 0] = offsets.to(device=device, dtype=dtype)
    return Problem(point, x, gate, up, down, router, grad_output)

"""Seeded random inputs of an MoE layer, at the scale that a trained layer sees, with a planted routing distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.interface import DISTRIBUTIONS, Point, Problem
from harness.traces import chosen_experts

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


def plant_experts(problem: Problem, chosen: Tensor) -> None:
    """Give each token the experts ``chosen`` (T, K), distinct, int64 on the CPU, in place.

    Feature e of a token says that expert e is not its own, and expert e's router row answers with an offset that no
    random logit overcomes; logits of chosen experts stay what they were, so that rounding them stays harmless. That
    takes E of the d features.

    Raises:
        ValueError: there are more experts than features.
    """
    experts = problem.shape.E
    if experts > problem.shape.d:
        raise ValueError(f"the choice of {experts} experts cannot be planted at {problem.shape}")
    problem.x[:, :experts] = _others(chosen, experts).to(problem.x)
    problem.router[:, :experts] = -FORBIDDEN * torch.eye(experts, device=problem.x.device, dtype=problem.x.dtype)


def forbid_others(logits: Tensor, chosen: Tensor) -> Tensor:
    """The logits (T, E) with an offset that none overcomes wherever an expert is not among ``chosen`` (T, K): top-K
    takes the chosen ones, by their own logits."""
    return logits - FORBIDDEN * _others(chosen, logits.shape[1]).to(logits)


def _others(chosen: Tensor, experts: int) -> Tensor:
    """(T, E), fp32 on the CPU: 1 where an expert is not among ``chosen`` (T, K), else 0."""
    return torch.ones(len(chosen), experts).scatter_(1, chosen, 0.0)


def make_problem(point: Point, device: torch.device | str, input_set: int = 0, plant_trace: bool = True) -> Problem:
    """Draw the inputs of ``point``.

    Activations and the incoming gradient are standard normal, weights normal with variance 1 / fan-in, as after a
    standard initialisation; nothing is zero or constant, since the data's values change a GPU's power and so its
    clock. A skew is planted through the first feature: ``x[:, 0] = 1`` and ``router[:, 0]`` = the logit offsets, so
    that a layer with its own router meets it too.

    Args:
        device: where the tensors live; the same seed gives the same numbers on one kind of device only.
        input_set: another draw of ``x`` and ``grad_output`` for the same weights.
        plant_trace: where the distribution is a trace, plant it (`plant_experts`); False: whoever asks gives it to the
            operation as it is.
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
    problem = Problem(point, x, gate, up, down, router, grad_output)
    if point.routing.trace_file:
        if plant_trace:
            plant_experts(problem, chosen_experts(point.routing, point.shape))
        return problem
    offsets = planted_logits(point.routing.distribution, E, point.shape.K)
    if offsets is not None:
        x[:, 0] = 1.0
        router[:, 0] = offsets.to(device=device, dtype=dtype)
    return problem

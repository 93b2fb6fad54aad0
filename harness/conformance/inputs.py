"""Inputs of a case: the harness's own, with the routing that the report names planted into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from harness.conformance.cases import Case
from harness.interface import Point, Problem
from harness.problem import FORBIDDEN, make_problem


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


def plant_counts(problem: Problem, counts: Sequence[int]) -> None:
    """Give expert e ``counts[e]`` rows, in place.

    Feature e of a token says that expert e is not its own, and expert e's router row answers with an offset that no
    random logit overcomes; logits of chosen experts stay what they were, so that rounding them stays harmless."""
    tokens, d = problem.x.shape
    experts = len(counts)
    if experts > d or experts != problem.shape.E:
        raise ValueError(f"{experts} counts cannot be planted at {problem.shape}")
    chosen = assign(counts, tokens, problem.shape.K)
    others = torch.ones(tokens, experts).scatter_(1, chosen, 0.0)
    problem.x[:, :experts] = others.to(problem.x)
    problem.router[:, :experts] = -FORBIDDEN * torch.eye(experts, device=problem.x.device, dtype=problem.x.dtype)


def case_problem(case: Case, point: Point, device: torch.device | str, input_set: int = 0) -> Problem:
    """The case's inputs at its point; ``input_set`` draws other activations for the same weights."""
    drawn = point
    if case.counts:
        drawn = replace(point, routing=replace(point.routing, distribution="uniform"))
    problem = replace(make_problem(drawn, device, input_set), point=point)
    if case.counts:
        plant_counts(problem, case.counts)
    if case.tied:
        problem.router[1::2] = problem.router[0::2]
    return problem

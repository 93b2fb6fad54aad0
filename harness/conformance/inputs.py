"""Inputs of a case: the harness's own, with the routing that the report names planted into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from harness.conformance.cases import Case
from harness.interface import Point, Problem
from harness.problem import make_problem, plant_experts
from harness.routing import assign


def plant_counts(problem: Problem, counts: Sequence[int]) -> None:
    """Give expert e ``counts[e]`` rows, in place."""
    if len(counts) != problem.shape.E:
        raise ValueError(f"{len(counts)} counts cannot be planted at {problem.shape}")
    plant_experts(problem, assign(counts, problem.shape.T, problem.shape.K))


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

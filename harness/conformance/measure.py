"""Meets one case in the worker process: inputs, layer, check; gives the row."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from harness.conformance.cases import Case, get_case
from harness.conformance.checks import CHECKS, Subject, Verdict
from harness.conformance.inputs import case_problem
from harness.environment import environment
from harness.interface import Implementation, Layer, Point
from harness.measure import Context, notes_of
from harness.record import utc_now
from harness.routing import routing_outcome


def meet(
    case: Case, point: Point, implementation: Implementation, context: Context, alone: bool = True
) -> tuple[Verdict, Layer, float]:
    """Draw the inputs, build the layer and check it: the verdict, the layer, and the seconds of building.

    Args:
        alone: whether no other process runs cases meanwhile.
    """
    if point.device == "cuda":
        context.start_cuda()
    context.phase("inputs")
    problem = case_problem(case, point, point.device)
    context.phase("build")
    start = time.perf_counter()
    layer = implementation.build(problem)
    if point.device == "cuda":
        torch.cuda.synchronize()
    build_s = time.perf_counter() - start
    context.phase(case.check)
    verdict = CHECKS[case.check](Subject(case, problem, layer, implementation, context, alone))
    if point.device == "cuda":
        torch.cuda.synchronize()
    return verdict, layer, build_s


def conformance_rows(
    job: dict[str, Any], point: Point, implementation: Implementation, context: Context
) -> Iterator[dict[str, Any]]:
    """The row of the job's case. Its ``bases`` have the fields that the parent fixed, by pass."""
    verdict, layer, build_s = meet(get_case(job["case"]), point, implementation, context, job["alone"])
    found = verdict.correctness
    for base in job["bases"].values():
        row = {
            **base,
            "timestamp": utc_now(),
            "environment": environment(point.device, tuple(implementation.distributions)),
            "notes": notes_of([layer], *base["notes"], *verdict.notes),
            "status": verdict.status,
            "reason": verdict.reason,
            "build_s": round(build_s, 3),
        }
        if found is not None:
            row["correctness"] = found.as_dict(point.dtype)
            if found.counts is not None:
                row["routing"] = {**base["routing"], **routing_outcome(found.counts, point.routing.m_tile)}
        yield row

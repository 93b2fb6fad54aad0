"""The interface of an operation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from harness.correctness import Correctness
from harness.costs import PASSES
from harness.interface import Layer, Point, Problem


class Operation(ABC):
    """Inputs, reference and costs of one piece of work."""

    name: ClassVar[str]
    #: Names of the variants that tell apart e.g. the up- and the down-projection; ("",) where there is one.
    variants: ClassVar[tuple[str, ...]] = ("",)
    passes: ClassVar[tuple[str, ...]] = PASSES
    #: Whether held and peak memory mean anything for it.
    reports_memory: ClassVar[bool] = True

    def unsupported_reason(self, point: Point) -> str | None:
        """Why the operation itself is not defined at this point; None where it is."""
        return None

    @abstractmethod
    def make_problem(self, point: Point, device: torch.device | str, input_set: int = 0) -> Problem:
        """Seeded inputs; ``input_set`` draws other activations for the same weights."""

    @abstractmethod
    def check(self, layer: Layer, problem: Problem) -> Correctness:
        """Run the layer once and compare it with the fp32 reference, gradients included."""

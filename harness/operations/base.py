"""The interface of an operation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from harness.correctness import Correctness, Evaluated, WrongResult
from harness.costs import ELEMENT_BYTES, PASSES, algorithm_bytes, boundary_bytes, model_flops
from harness.interface import Layer, Point, Problem


class Operation(ABC):
    """Inputs, reference and costs of one piece of work."""

    name: ClassVar[str]
    #: Names of the variants that tell apart e.g. the up- and the down-projection; ("",) where there is one.
    variants: ClassVar[tuple[str, ...]] = ("",)
    passes: ClassVar[tuple[str, ...]] = PASSES
    #: Whether a routing is handed to it, so that one from a trace need not be planted through X and Wr.
    takes_routing: ClassVar[bool] = False
    #: Whether held and peak memory mean anything for it.
    reports_memory: ClassVar[bool] = True
    #: Whether its rows say what came of a routing (the gate's counts).
    reports_routing: ClassVar[bool] = True
    #: Whether bytes a second say something of it: it moves more than it multiplies, or both are worth knowing.
    reports_bandwidth: ClassVar[bool] = False

    def unsupported_reason(self, point: Point) -> str | None:
        """Why the operation itself is not defined at this point; None where it is."""
        if point.routing.trace_file and not self.takes_routing and point.shape.d < point.shape.E:
            return f"a trace is planted through E of x's d features, but E={point.shape.E} exceeds d={point.shape.d}"
        return None

    def flops(self, point: Point, pass_: str, rows: int) -> int:
        """What the definition multiplies and adds, for so many routed rows (or, for hardware FLOPs, padded ones)."""
        return model_flops(point.shape, pass_, rows)

    def boundary_bytes(self, point: Point, pass_: str, rows: int) -> int:
        """Bytes of inputs, weights and outputs, each once."""
        return boundary_bytes(point.shape, pass_, ELEMENT_BYTES[point.dtype])

    def algorithm_bytes(self, point: Point, pass_: str, rows: int) -> int:
        """Bytes that the kernels as designed must move."""
        return algorithm_bytes(point.shape, pass_, ELEMENT_BYTES[point.dtype], rows)

    def sizes(self, point: Point) -> dict[str, Any] | None:
        """A row's ``problem``, for operations on single kernels."""
        return None

    @abstractmethod
    def make_problem(self, point: Point, device: torch.device | str, input_set: int = 0) -> Problem:
        """Seeded inputs; ``input_set`` draws other activations for the same weights."""

    def check(self, layer: Layer, problem: Problem) -> Correctness:
        """Run the layer and compare it with the fp32 reference, gradients included."""
        try:
            return self.compare(layer, problem)
        except WrongResult as wrong:
            return Correctness(reason=str(wrong))

    @abstractmethod
    def compare(self, layer: Layer, problem: Problem) -> Correctness:
        """`check`, which may raise `WrongResult`."""

    def repeatable(self, layer: Layer, found: Any) -> dict[str, Tensor]:
        """The tensors that are the same in every call on the same data, by name, from what a call gave: `Evaluated`, or
        what a kernel's forward returned."""
        assert isinstance(found, Evaluated)
        return found.by_name()

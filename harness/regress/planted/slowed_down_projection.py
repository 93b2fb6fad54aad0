"""A slowdown to be found by `harness.regress.trial`: our layer, whose down-projection multiplies a part of its tiles
twice. Our layer itself stays as it is in the same process, so that both can be measured against each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from harness.interface import Layer, Problem
from implementations.sonicmoe_triton import SonicMoETriton

#: Of the tiles, how many in a thousand are multiplied twice.
PERMILLE = "MOEBENCH_PLANTED_PERMILLE"


@contextmanager
def planted(permille: int) -> Iterator[None]:
    """Calls of the algorithm within are slowed down. The result is as before: what is multiplied again is thrown
    away."""
    from implementations.sonicmoe_triton import algorithm, kernels

    before = algorithm.down_projection

    def down_projection(a: Tensor, w2: Tensor, routing: kernels.Routing, bias2: Tensor | None = None) -> Tensor:
        some = (routing.num_tiles * permille).div(1000, rounding_mode="floor")
        before(a, w2, replace(routing, num_tiles=some), bias2)
        return before(a, w2, routing, bias2)

    algorithm.down_projection = down_projection
    try:
        yield
    finally:
        algorithm.down_projection = before


class Slowed(SonicMoETriton):
    """Our layer, slowed down."""

    name = "slowed_down_projection"
    label = "SonicMoE (ours, Triton), slowed down"

    def build(self, problem: Problem) -> Layer:
        layer = super().build(problem)
        permille = int(os.environ.get(PERMILLE, "0"))
        forward = layer.forward

        def slowed(x: Tensor) -> Tensor:
            with planted(permille):
                return forward(x)

        layer.notes = [*layer.notes, f"of the down-projection's tiles, {permille} in 1000 are multiplied twice"]
        layer.forward = slowed  # type: ignore[method-assign]
        return layer

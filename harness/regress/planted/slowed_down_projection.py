"""A slowdown to be found by `harness.regress.trial`: in a process whose MOEBENCH_PLUGINS names this folder, the
down-projection of our layer multiplies a part of its tiles twice."""

from __future__ import annotations

import os
from dataclasses import replace

from torch import Tensor

from harness.interface import Layer, Problem
from implementations.sonicmoe_triton import SonicMoETriton

#: Of the tiles, how many in a thousand are multiplied twice.
PERMILLE = "MOEBENCH_PLANTED_PERMILLE"


def plant(permille: int) -> None:
    """From now on, in this process. The result is as before: what is multiplied again is thrown away."""
    from implementations.sonicmoe_triton import algorithm, kernels

    def down_projection(a: Tensor, w2: Tensor, routing: kernels.Routing, bias2: Tensor | None = None) -> Tensor:
        some = (routing.num_tiles * permille).div(1000, rounding_mode="floor")
        kernels.down_projection(a, w2, replace(routing, num_tiles=some), bias2)
        return kernels.down_projection(a, w2, routing, bias2)

    algorithm.down_projection = down_projection


class Slowed(SonicMoETriton):
    """Our layer, slowed down wherever it is built."""

    name = "slowed_down_projection"
    label = "SonicMoE (ours, Triton), slowed down"


def _build(self: SonicMoETriton, problem: Problem) -> Layer:
    plant(int(os.environ.get(PERMILLE, "0")))
    return _BUILD(self, problem)


_BUILD = SonicMoETriton.build
SonicMoETriton.build = _build  # type: ignore[method-assign]

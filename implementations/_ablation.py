"""What the ablations' plugins share: our layer's limits, and notes on what is different."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from harness.interface import Implementation, Layer, Point, Problem
from implementations.sonicmoe_triton import SonicMoETriton


class Ablation(Implementation):
    """Our own kernels with one fusion taken apart, for single operations."""

    #: By operation, what a row says is different.
    differences: ClassVar[Mapping[str, str]]

    upstream = SonicMoETriton.upstream
    licence = SonicMoETriton.licence
    requires = SonicMoETriton.requires
    distributions = SonicMoETriton.distributions
    devices = SonicMoETriton.devices
    # What the fusions are measured in: in float32 the kernels are other ones, without tensor cores.
    dtypes = ("bfloat16", "float16")
    # More specific parts first. The GEMMs are found by the names that they share with the fused ones.
    kernel_roles = (
        ("_apart_gather_", "gather"),
        ("_apart_swiglu_backward_", "dH"),
        ("_apart_scaled_swiglu_", "dH"),
        ("_apart_score_gradient_", "dH"),
        ("_apart_epilogue_", "dH"),
        ("_apart_swiglu_", "activation"),
        *SonicMoETriton.kernel_roles,
    )

    def restriction(self, point: Point) -> str | None:
        reason = SonicMoETriton().restriction(point)
        return reason and reason.replace(SonicMoETriton.label, self.label)

    def build(self, problem: Problem) -> Layer:
        from implementations import _ablation_layers

        operation = problem.point.operation
        layer = _ablation_layers.BUILD[self.name][operation](problem)
        layer.notes = [self.differences[operation]]
        if problem.x.device.type == "cuda" and problem.shape.T:
            # One call compiles every kernel.
            layer.call_once(problem)
        return layer

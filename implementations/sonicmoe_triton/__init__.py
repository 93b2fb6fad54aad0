"""Our own SonicMoE (arXiv 2512.14080) in Triton: the plugin, and the door to the layer.

    from implementations.sonicmoe_triton import SonicMoE, moe_layer

Everything that needs Triton is imported when first asked for, so that the registry can load the plugin without it.
`algorithm` reads as the paper's; each kernel has a file with its formula on top, `kernels` picks between twins of one,
and NOTES.md holds what was tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from harness.interface import KERNELS, ROUTER_CONVENTIONS, Implementation, Layer, Point, Problem
from harness.token_rounding import ROUNDINGS, TOP_K, GeneralRouting

if TYPE_CHECKING:
    from implementations.sonicmoe_triton.function import (
        RouterOutput,
        moe_layer,
        moe_layer_with_router,
        rounded_moe_layer,
        routed_experts,
    )
    from implementations.sonicmoe_triton.layer import SonicMoE, load_balancing_loss

__all__ = [
    "RouterOutput",
    "SonicMoE",
    "SonicMoETriton",
    "load_balancing_loss",
    "moe_layer",
    "moe_layer_with_router",
    "rounded_moe_layer",
    "routed_experts",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from implementations.sonicmoe_triton import function, layer

        return getattr(layer, name) if hasattr(layer, name) else getattr(function, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _TritonLayer(Layer):
    """Weights: w1 (E, 2n, d), gate rows then up rows; w2 (E, d, n); router (E, d)."""

    def __init__(self, problem: Problem) -> None:
        from implementations.sonicmoe_triton import function

        self._function = function
        self.k = problem.shape.K
        self.convention = problem.point.layer.router_convention
        self.w1 = torch.cat([problem.gate, problem.up], dim=1).detach().requires_grad_()
        self.w2 = problem.down.detach().requires_grad_()
        self.router = problem.router.detach().requires_grad_()

    def parameters(self) -> Sequence[Tensor]:
        return [self.w1, self.w2, self.router]

    def forward(self, x: Tensor) -> Tensor:
        return self._function.moe_layer(x, self.w1, self.w2, self.router, self.k, self.convention)

    def forward_with_router(self, x: Tensor) -> tuple[Tensor, Tensor]:
        arguments = x, self.w1, self.w2, self.router, self.k, self.convention
        out, router = self._function.moe_layer_with_router(*arguments)
        return out, router.logits

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        grad_gate, grad_up = gradients[0].chunk(2, dim=1)
        return {"grad_gate": grad_gate, "grad_up": grad_up, "grad_down": gradients[1], "grad_router": gradients[2]}

    def expert_indices(self, x: Tensor) -> Tensor:
        # Its own router breaks ties towards the lower expert, which torch.topk does not promise.
        return self._function.choose_experts(x, self.router, self.k, self.convention)[1]


class _RoundingTritonLayer(_TritonLayer):
    """The same with top-K rounded by the point's method."""

    def __init__(self, problem: Problem) -> None:
        from implementations.sonicmoe_triton import algorithm, rounding

        super().__init__(problem)
        self._logits_of, self._round_routing = algorithm.logits_of, rounding.round_routing
        routing, self.draws = problem.point.routing, None
        self.m_tile, self.method = routing.m_tile, routing.method
        if self.method == "stochastic":
            generator = torch.Generator().manual_seed(routing.seed)
            self.draws = torch.randint(self.m_tile, (problem.shape.E,), generator=generator).to(problem.x.device)
            self.notes = ["stochastic rounding draws the same numbers in every call"]

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_with_router(x)[0]

    def forward_with_router(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, router = self._function.rounded_moe_layer(
            x, self.w1, self.w2, self.router, self.k, self.m_tile, self.method, self.convention, draws=self.draws
        )
        return out, router.logits

    def kept_pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            logits = self._logits_of(x, self.router)
            found = self._round_routing(logits, self.k, self.m_tile, self.method, self.convention, draws=self.draws)
        return found.experts[: int(found.token_offsets[-1])], found.token_offsets


class _TritonExperts(Layer):
    """The experts with the routing given: w1, w2 as above; scores (P,)."""

    def __init__(self, problem: Problem) -> None:
        from implementations.sonicmoe_triton import function

        routing = problem.routing
        assert routing is not None
        self._function = function
        self.w1 = torch.cat([problem.gate, problem.up], dim=1).detach().requires_grad_()
        self.w2 = problem.down.detach().requires_grad_()
        self.scores = routing.scores.detach().requires_grad_()
        self.experts, self.token_offsets = routing.experts, routing.token_offsets

    def use_routing(self, routing: GeneralRouting) -> None:
        self.scores, self.experts, self.token_offsets = routing.scores, routing.experts, routing.token_offsets

    def parameters(self) -> Sequence[Tensor]:
        return [self.w1, self.w2, self.scores]

    def forward(self, x: Tensor) -> Tensor:
        return self._function.routed_experts(x, self.w1, self.w2, self.scores, self.experts, self.token_offsets)

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        grad_gate, grad_up = gradients[0].chunk(2, dim=1)
        return {"grad_gate": grad_gate, "grad_up": grad_up, "grad_down": gradients[1], "grad_scores": gradients[2]}


class SonicMoETriton(Implementation):
    """The algorithm with every gather, activation and gradient of the scores inside its GEMM's kernel."""

    name = "sonicmoe_triton"
    label = "SonicMoE (ours, Triton)"
    upstream = "https://arxiv.org/abs/2512.14080"
    licence = "Apache-2.0"
    requires: ClassVar[dict[str, str]] = {"triton": "pip install triton==3.6.0"}
    distributions = ("torch", "triton")
    operations = ("moe_layer", "routed_experts", *KERNELS)
    devices = ("cuda",)
    # float32 multiplies exactly and without tensor cores: for checking, not for speed.
    dtypes = ("bfloat16", "float16", "float32")
    conventions = ROUTER_CONVENTIONS
    routing_methods = (TOP_K, *ROUNDINGS)
    # It traces, and holds what it should; but a trace does not see the temporaries inside an operator, so that the peak
    # of a fake row would be too small.
    fake_tensors = False
    #: Part of a kernel's name -> its role; more specific parts first.
    kernel_roles = (
        ("up_projection", "up"),
        ("down_projection", "down"),
        ("hidden_gradient", "dH"),
        ("up_weight_gradient", "dW1"),
        ("down_weight_gradient", "dW2"),
        ("input_gradient", "dX"),
        ("_aggregation_", "aggregation"),
        ("_rounding_", "router"),
        ("_router_", "router"),
        ("_routing_", "router"),
        # With rounding, autograd adds the router's term to that of the experts (in float32 by a kernel that the router
        # itself uses as well, to which its time then counts).
        *((f"cudafunctor_add<c10::{dtype}>", "dX") for dtype in ("bfloat16", "half")),
        *((part, "fill") for part in ("fillfunctor", "memset")),
        # Dense GEMMs, and torch's small kernels on logits, scores and numbers of tokens, are the router's only.
        *((part, "router") for part in ("nvjet", "cublas", "gemm", "softmax", "at::native", "cub::")),
    )

    def restriction(self, point: Point) -> str | None:
        shape = point.shape
        # What function's checks refuse; that module needs Triton, and this answer must not.
        multiple = 16 // point.torch_dtype.itemsize
        wrong = [f"{name}={size}" for name, size in (("d", shape.d), ("n", shape.n)) if size % multiple]
        # The layer pads them; a kernel on its own does not.
        if wrong and point.operation in KERNELS:
            return (
                f"{self.label}, one kernel on its own, takes widths that are multiples of {multiple} (16 bytes) in "
                f"{point.dtype}, not {' and '.join(wrong)}"
            )
        if shape.E > 1024:
            return f"{self.label} takes at most 1024 experts, not E={shape.E}"
        if shape.K > 64 and point.operation in ("moe_layer", *KERNELS):
            return f"{self.label} takes at most 64 experts per token, not K={shape.K}"
        return None

    def build(self, problem: Problem) -> Layer:
        layer: Layer
        if problem.forward_only:
            from implementations.sonicmoe_triton import kernel_layers

            layer = kernel_layers.BUILD[problem.point.operation](problem)
        elif problem.routing is not None:
            layer = _TritonExperts(problem)
        else:
            layer = (_TritonLayer if problem.point.routing.method == TOP_K else _RoundingTritonLayer)(problem)
        if problem.x.device.type == "cuda" and not is_fake(problem.x) and problem.shape.T:
            # One call of each pass compiles every kernel.
            layer.call_once(problem)
        return layer

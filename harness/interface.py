"""What a plugin implements: one file with one `Implementation`, which builds one `Layer` for a problem.

Correctness, timing, memory, records and figures come for free. `implementations/_template.py` is a working example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from harness.shapes import MoEShape

if TYPE_CHECKING:
    from harness.token_rounding import GeneralRouting

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
#: As tables have room for.
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
DISTRIBUTIONS = ("uniform", "skewed", "one_group", "empty_experts")
ROUTER_CONVENTIONS = ("topk_softmax", "softmax_topk", "softmax_topk_renormalised")
#: Operations on single kernels.
KERNELS = (
    "grouped_gemm",
    "grouped_gemm_gather_m",
    "grouped_gemm_gather_k",
    "hidden_gradient",
    "down_aggregation",
    "expert_aggregation",
    "topk_router",
)
GRADIENTS = ("grad_x", "grad_gate", "grad_up", "grad_down", "grad_router")


@dataclass(frozen=True)
class LayerSpec:
    """What the layer computes.

    Attributes:
        activation: ``swiglu``: silu(gate) * up.
        router_convention: ``topk_softmax`` (softmax over the K chosen logits, the default), ``softmax_topk``
            (softmax over all E logits, chosen weights as they are) or ``softmax_topk_renormalised`` (chosen weights
            divided by their sum; mathematically equal to ``topk_softmax``).
        bias: expert biases (no implementation offers them yet).
    """

    activation: str = "swiglu"
    router_convention: str = "topk_softmax"
    bias: bool = False


@dataclass(frozen=True)
class RoutingSpec:
    """How tokens find experts: the method (see `harness.token_rounding.METHODS`), the distribution of the router's
    choices, its seed, and the M tile: to which a grouped GEMM pads each expert's rows, and to which rounding rounds.

    The distribution is one of `DISTRIBUTIONS`, or ``trace:NAME@HASH``, of the file ``trace_file`` (`harness.traces`).
    """

    method: str = "top_k"
    distribution: str = "uniform"
    seed: int = 0
    m_tile: int = 128
    trace_file: str = ""

    def as_dict(self) -> dict[str, Any]:
        """What rows and resume keys hold: where a trace's file lies is no part of a measurement, its content is."""
        fields = asdict(self)
        del fields["trace_file"]
        return fields


@dataclass(frozen=True)
class Point:
    """One thing to measure: operation × shape × dtype × routing × implementation on a device (``cuda`` or ``cpu``)."""

    operation: str
    implementation: str
    shape: MoEShape
    dtype: str = "bfloat16"
    layer: LayerSpec = field(default_factory=LayerSpec)
    routing: RoutingSpec = field(default_factory=RoutingSpec)
    variant: str = ""
    device: str = "cuda"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class RoutedRows:
    """Where the rows of a grouped GEMM come from and go to: row r of expert e, expert_offsets[e] <= r <
    expert_offsets[e + 1], belongs to token gather[r]; within an expert rows are ordered by token.

    Attributes:
        scores: (T, K), fp32, the weight of each of a token's experts.
        indices: (T, K), int64, the experts.
        gather: (R,), int32. reverse: (T, K), int32, the row of each (token, k). expert_offsets: (E + 1,), int32.
    """

    scores: Tensor
    indices: Tensor
    gather: Tensor
    reverse: Tensor
    expert_offsets: Tensor


@dataclass
class Problem:
    """Seeded random inputs of one point, in canonical layout, on the device.

    Attributes:
        x: (T, d), the layer's input; requires no gradient here (the harness sets it on its own leaf).
        gate, up: (E, n, d); down: (E, d, n); router: (E, d). Weights scaled as a trained layer's.
        grad_output: (T, d), the gradient that arrives from the next layer.
        routing: of the operation ``routed_experts`` only: which experts each token has, with which weights.
        rows: of the operations on single kernels only: the routed rows. ``x`` is then what the operation says, the
            weights and ``grad_output`` are empty, and there is no backward.
        operands: of those operations, what the kernel reads beside ``x``, by name.
    """

    point: Point
    x: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    router: Tensor
    grad_output: Tensor
    routing: GeneralRouting | None = None
    rows: RoutedRows | None = None
    operands: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def forward_only(self) -> bool:
        return self.rows is not None

    @property
    def shape(self) -> MoEShape:
        return self.point.shape


class Layer(ABC):
    """A built layer: parameters in the plugin's own layout, a forward that autograd can differentiate."""

    #: What was substituted or restricted, for the row; fill it while building.
    notes: Sequence[str] = ()

    @abstractmethod
    def parameters(self) -> Sequence[Tensor]:
        """The trainable leaves (``requires_grad``), in the plugin's own layout and order."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """(T, d) -> (T, d), in ``x``'s dtype and on its device, differentiable with respect to ``x`` and every
        parameter; but for rounding the same result in every call with the same ``x``.

        The harness calls ``torch.autograd.grad(out, [x, *parameters], grad_output)`` once for each forward."""

    @abstractmethod
    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        """Gradients of `parameters` (same order) as ``grad_gate`` (E, n, d), ``grad_up`` (E, n, d), ``grad_down``
        (E, d, n) and ``grad_router`` (E, d); with ``routed_experts`` ``grad_scores`` (P,) in place of the router's.
        Views, not copies, wherever the layout allows."""

    def forward_with_router(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """`forward` and the router's logits (T, E), differentiable, for a load-balancing loss. None (the default): the
        kernels keep them, and who needs them multiplies once more."""
        return None

    def use_routing(self, routing: GeneralRouting) -> None:
        """Of a layer of ``routed_experts``: go by this routing from now on. The weights of its pairs (P,), which may
        have a graph behind them, become the last of `parameters`."""
        raise NotImplementedError(f"{type(self).__name__} keeps the routing that it was built with")

    def expert_indices(self, x: Tensor) -> Tensor | None:
        """(T, K) experts chosen for each token of ``x`` by exactly the router that `forward` runs; only called
        outside timing. None (the default): recompute as `harness.routing.choose_experts` does, in ``x``'s dtype.
        Where the point's routing method is a rounding: top-K's, before it."""
        return None

    def kept_pairs(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """The (token, expert) pairs of ``x`` that `forward` computes where the point's routing method is a rounding:
        experts (P,), by token, and token_offsets (T + 1,). Only called outside timing."""
        return None

    def call_once(self, problem: Problem) -> None:
        """A forward and a backward on the problem's own data, results dropped: for a `build` whose kernels compile or
        tune when first called."""
        x = problem.x.detach().clone().requires_grad_()
        torch.autograd.grad(self.forward(x), [x, *self.parameters()], problem.grad_output)


class Kernel(Layer):
    """What a plugin builds for an operation on single kernels: a forward alone, called without gradients."""

    def parameters(self) -> Sequence[Tensor]:
        """None: operands are the kernel's own."""
        return ()

    @abstractmethod
    def forward(self, x: Tensor) -> Any:
        """What the operation says of the problem's ``x`` (see `harness.operations`); ``x`` is another at each call."""

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        return {}

    def outputs(self, found: Any) -> dict[str, Tensor]:
        """What `forward` returned, by the operation's names and in its layout: views, not copies, where that can be."""
        return {"output": found}

    def call_once(self, problem: Problem) -> None:
        with torch.no_grad():
            self.forward(problem.x)


class Implementation(ABC):
    """A plugin. The module imports only the standard library, torch and the harness at module level; its package
    is imported inside `build`, in a worker process."""

    name: ClassVar[str]
    label: ClassVar[str]
    upstream: ClassVar[str]
    licence: ClassVar[str]
    #: Importable module -> how to get it. All must be importable for the plugin to count as installed.
    requires: ClassVar[dict[str, str]] = {}
    #: Distributions whose versions belong in the row.
    distributions: ClassVar[Sequence[str]] = ()
    operations: ClassVar[Sequence[str]] = ("moe_layer",)
    devices: ClassVar[Sequence[str]] = ("cuda",)
    dtypes: ClassVar[Sequence[str]] = ("bfloat16",)
    conventions: ClassVar[Sequence[str]] = ("topk_softmax",)
    #: Routing methods of its ``moe_layer``; ``routed_experts``, which is handed a routing, takes any.
    routing_methods: ClassVar[Sequence[str]] = ("top_k",)
    #: Variants of an operation where it does not offer all of them, e.g. {"expert_aggregation": ("gather",)}.
    variants: ClassVar[dict[str, Sequence[str]]] = {}
    #: A sentence where a CUDA graph can never capture it (a host synchronisation, say); None: try.
    no_graph_reason: ClassVar[str | None] = None
    #: Part of a kernel's name in lower case -> its role in the breakdown of a layer; the first match wins. router (its
    #: GEMMs, top-K, sorting, metadata, and their gradients), gather (rows brought into the experts' order, or back),
    #: up, activation, down, aggregation (of dX's rows too, and the gradients of its weights), dH, dW1, dW2, dX (the sum
    #: of its two terms too). Where one name serves several: grouped_gemm; gemm (dense ones, of experts one by one or in
    #: a batch); dW; pointwise (products, sums and casts in kernels of their own); fill (zeroing). No role is better
    #: than a wrong one.
    kernel_roles: ClassVar[Sequence[tuple[str, str]]] = ()
    #: Can it run under fake tensors on the CPU (for held memory at full scale)?
    fake_tensors: ClassVar[bool] = False

    def unsupported_reason(self, point: Point) -> str | None:
        """Why this point cannot run, in words a user can act on; None where it can. Answered without a GPU and
        without the plugin's package. Override `restriction` for limits of your own."""
        if point.operation not in self.operations:
            return f"{self.label} does not offer the operation {point.operation}"
        if point.device not in self.devices:
            return f"{self.label} does not run on {point.device}"
        if point.dtype not in self.dtypes:
            return f"{self.label} computes in {', '.join(self.dtypes)} only, not in {point.dtype}"
        methods = self.routing_methods if point.operation == "moe_layer" else ("top_k",)
        if point.operation != "routed_experts" and point.routing.method not in methods:
            return f"{self.label} has no {point.operation} with the routing method {point.routing.method}"
        routers = ("moe_layer", "topk_router")
        if point.operation in routers and point.layer.router_convention not in self.conventions:
            return f"{self.label} has no router of the convention {point.layer.router_convention}"
        if point.layer.activation != "swiglu" or point.layer.bias:
            return f"{self.label} is set up here for SwiGLU experts without bias only"
        return self.restriction(point)

    def restriction(self, point: Point) -> str | None:
        """A limit of this plugin beyond dtype, device, operation and convention, in words; None where there is none."""
        return None

    @abstractmethod
    def build(self, problem: Problem) -> Layer:
        """Lay out weights, compile, tune: everything that a user does once. Untimed (reported as ``build_s``).

        The problem's tensors must not be modified; weights may be shared with it where the layout is canonical."""

    def kernel_role(self, name: str) -> str | None:
        """The role of one of its kernels by name, for the breakdown, from `kernel_roles`; None: no role claimed."""
        lowered = name.lower()
        return next((role for part, role in self.kernel_roles if part in lowered), None)

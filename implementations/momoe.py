"""MoMoE: Triton kernels that recompute in the backward what the forward did not keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from harness.interface import ROUTER_CONVENTIONS, Implementation, Layer, Point, Problem
from harness.routing import router_scores
from implementations._torch_ops import ROUTER_ROLES

#: Share of the rows whose H and Y the forward keeps, in percent; the package's default is 0.
SAVE_PERCENT = 100


class MoMoELayer(Layer):
    """MoMoE's experts behind a router in plain torch.

    Args:
        experts: the package's ``MoMoE`` module, whose weights are (E, d, 2n), up columns then gate columns, and
            (E, n, d).
        router: (E, d).
    """

    notes = (
        "router in plain torch: logits in the layer's dtype, top-K and softmax in fp32; scores handed over in fp32",
        f"save_percent={SAVE_PERCENT}: H and Y of every row are kept, which is what the paper's memory of MoMoE "
        "amounts to; the package's default of 0 recomputes them",
        "not reproducible bit for bit: atomics decide in which order a token's rows are summed",
    )

    def __init__(self, experts: Any, router: Tensor, k: int, convention: str) -> None:
        self.experts, self.router, self.k, self.convention = experts, router, k, convention

    def parameters(self) -> Sequence[Tensor]:
        return [self.experts.Wl1_ND2H, self.experts.Wl2_NHD, self.router]

    def forward(self, x: Tensor) -> Tensor:
        logits = (x @ self.router.T).float()
        indices = torch.topk(logits, self.k, dim=-1).indices
        scores = torch.zeros_like(logits).scatter(1, indices, router_scores(logits, indices, self.convention))
        mask = torch.zeros(scores.shape[::-1], dtype=torch.int32, device=x.device).scatter_(0, indices.T, 1)
        # A batch of one sequence; it takes mask and scores by expert.
        out, _ = self.experts(x.unsqueeze(0), mask, scores.T)
        result: Tensor = out.squeeze(0)
        return result

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        up_gate, down, router = gradients
        up, gate = up_gate.transpose(1, 2).chunk(2, dim=1)
        return {"grad_gate": gate, "grad_up": up, "grad_down": down.transpose(1, 2), "grad_router": router}


class MoMoE(Implementation):
    name = "momoe"
    label = "MoMoE"
    upstream = "https://github.com/tilde-research/MoMoE-impl"
    licence = "none stated in its repository"
    #: All that the package's own start imports: a checkout may lack a part.
    requires: ClassVar[dict[str, str]] = {
        **dict.fromkeys(
            ("momoe.momoe", "momoe.sample_moe", "momoe.topk_router"),
            "clone https://github.com/tilde-research/MoMoE-impl and put the checkout on PYTHONPATH",
        ),
        "einops": "pip install --no-deps -r requirements/momoe.txt",
    }
    distributions = ("MoMoE-impl", "einops", "triton")
    conventions = ROUTER_CONVENTIONS
    #: Its dH kernel also recomputes H where that was not kept, its dX kernel also sums up dS.
    kernel_roles = (
        ("scatter_cols", "router"),
        ("lin1_backward", "dX"),
        ("lin1_kernel", "up"),
        ("lin2_kernel", "down"),
        ("making_nice_scatter", "gather"),
        ("swiglu_backward", "dH"),
        ("weights_update", "dW"),
        ("sum_functor<c10::bfloat16", "aggregation"),
        # Autograd adds the router's term to that of the experts.
        ("cudafunctor_add<c10::bfloat16>", "dX"),
        *((part, "fill") for part in ("fillfunctor", "memset")),
        *((part, "router") for part in ("nvjet", "cublas", "gemm", "sum_functor")),
        *ROUTER_ROLES,
    )

    def restriction(self, point: Point) -> str | None:
        shape = point.shape
        if shape.T == 0:
            return "MoMoE cannot run without tokens"
        # The kernels multiply 32-bit row and expert numbers by row lengths; past 2^31 elements that wraps around.
        rows = (shape.routed_rows - 1) * max(shape.d, 2 * shape.n)
        weights = (shape.E - 1) * 2 * shape.n * shape.d
        if max(rows, weights) >= 2**31:
            return (
                "MoMoE's kernels address tensors by 32-bit offsets: T*K*max(d, 2n) and 2*E*n*d may be at most "
                f"2^31 = {2**31}, here {shape.routed_rows * max(shape.d, 2 * shape.n)} and "
                f"{2 * shape.E * shape.n * shape.d}"
            )
        return None

    def build(self, problem: Problem) -> Layer:
        import momoe

        shape = problem.shape
        # Its first projection's second half is activated and multiplied with the first. It takes copies, and asks for
        # contiguous weights.
        up_gate = torch.cat([problem.up, problem.gate], dim=1).transpose(1, 2).contiguous()
        experts = momoe.MoMoE(
            embedding_dim=shape.d,
            intermediate_dim=shape.n,
            num_experts=shape.E,
            num_chosen_experts=shape.K,
            save_percent=SAVE_PERCENT,
            Wl1_ND2H=up_gate,
            Wl2_NHD=problem.down.transpose(1, 2).contiguous(),
        )
        router = problem.router.detach().clone().requires_grad_()
        layer = MoMoELayer(experts, router, shape.K, problem.point.layer.router_convention)
        # Its kernels tune themselves at their first call.
        layer.call_once(problem)
        return layer

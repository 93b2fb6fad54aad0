"""ScatterMoE: Triton kernels that gather rows while loading and scatter them while storing, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from harness.interface import Implementation, Layer, Point, Problem
from implementations._torch_ops import ROUTER_ROLES


class ScatterMoELayer(Layer):
    """ScatterMoE's gated MLP behind a router in plain torch."""

    notes = ("router in plain torch: logits in the layer's dtype, top-K and softmax in fp32, scores cast back",)

    def __init__(self, mlp: Any, router: Tensor, k: int) -> None:
        self.mlp = mlp
        self.router = router
        self.k = k

    def parameters(self) -> Sequence[Tensor]:
        return [self.mlp.experts.weight, self.mlp.output_experts.weight, self.router]

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(T, d) -> the K largest logits of each token (T, K), fp32, and their experts (T, K), int64."""
        logits, indices = torch.topk((x @ self.router.T).float(), self.k, dim=-1)
        return logits, indices

    def forward(self, x: Tensor) -> Tensor:
        logits, indices = self.route(x)
        out: Tensor = self.mlp(x, torch.softmax(logits, dim=-1).to(x.dtype), indices)
        return out

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        up_gate, down, router = gradients
        up, gate = up_gate.chunk(2, dim=1)
        return {"grad_gate": gate, "grad_up": up, "grad_down": down, "grad_router": router}

    def expert_indices(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.route(x)[1]


class ScatterMoE(Implementation):
    name = "scattermoe"
    label = "ScatterMoE"
    upstream = "https://github.com/shawntan/scattermoe"
    licence = "Apache-2.0"
    #: All that the package's own start imports: a checkout may lack a part.
    requires: ClassVar[dict[str, str]] = dict.fromkeys(
        (f"scattermoe.{part}" for part in ("parallel_experts", "kernels.ops", "mlp", "utils.replace_moe")),
        "clone https://github.com/shawntan/scattermoe and put the checkout on PYTHONPATH",
    )
    distributions = ("scattermoe", "triton")
    # Not fp32: its kernels multiply in TF32.
    dtypes = ("bfloat16", "float16")
    conventions = ("topk_softmax", "softmax_topk_renormalised")
    no_graph_reason = "ScatterMoE counts the tokens of each expert with bincount, which synchronises with the host"
    #: One kernel computes the up- and the
    #: down-projection, dA and dX, another dW1 and dW2: their names do not tell these apart.
    kernel_roles = (
        ("_scatter2scatter", "grouped_gemm"),
        ("_groupxty", "dW"),
        ("_group", "gather"),
        ("silu", "activation"),
        ("catarray", "activation"),
        ("binaryfunctor<c10::bfloat16, c10::bfloat16, c10::bfloat16, at::native::binary_internal::mul", "activation"),
        ("sum_functor", "aggregation"),
        # A token's K rows times its K weights is a batch of matrices of K rows or columns, hence tiles of 8 or none;
        # so are the weights' gradients. cuBLAS' other kernels are the router's.
        *((part, "aggregation") for part in ("tst_8x", "x8_64x", "gemv")),
        # Autograd adds the router's term to that of the experts.
        ("cudafunctor_add<c10::bfloat16>", "dX"),
        *((part, "fill") for part in ("fillfunctor", "memset")),
        *((part, "router") for part in ("nvjet", "cublas", "cumsum")),
        *ROUTER_ROLES,
    )

    def restriction(self, point: Point) -> str | None:
        shape = point.shape
        # The kernels multiply 32-bit row and expert numbers by row lengths; past 2^31 elements that wraps around.
        rows = (shape.routed_rows - 1) * max(shape.d, 2 * shape.n)
        weights = (shape.E - 1) * 2 * shape.n * shape.d
        if max(rows, weights) >= 2**31:
            return (
                "ScatterMoE's kernels address tensors by 32-bit offsets: T*K*max(d, 2n) and 2*E*n*d may be at most "
                f"2^31 = {2**31}, here {shape.routed_rows * max(shape.d, 2 * shape.n)} and "
                f"{2 * shape.E * shape.n * shape.d}"
            )
        return None

    def build(self, problem: Problem) -> Layer:
        from scattermoe.mlp import GLUMLP

        shape = problem.shape
        with torch.device("meta"):  # its initial weights are replaced at once
            mlp = GLUMLP(shape.d, shape.n, shape.E, shape.K)
        # Its MLP activates the second half of the up-projection and multiplies it with the first.
        mlp.experts.weight = torch.nn.Parameter(torch.cat([problem.up, problem.gate], dim=1))
        mlp.output_experts.weight = torch.nn.Parameter(problem.down.detach())
        layer = ScatterMoELayer(mlp, problem.router.detach().clone().requires_grad_(), shape.K)
        # Its kernels and its compiled sort specialise on shapes at their first call.
        layer.call_once(problem)
        return layer

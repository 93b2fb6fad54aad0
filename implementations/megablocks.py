"""MegaBlocks: dropless MoE; here its grouped path, one GEMM for each expert between a gather and a scatter."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from harness.interface import ROUTER_CONVENTIONS, Implementation, Layer, Point, Problem
from implementations._torch_ops import DENSE_GEMM_ROLES, ROUTER_ROLES


class MegaBlocksLayer(Layer):
    """MegaBlocks' ``dMoE`` module, router included."""

    def __init__(self, module: Any, notes: Sequence[str]) -> None:
        self.module = module
        self.notes = notes

    def parameters(self) -> Sequence[Tensor]:
        mlp = self.module.experts.mlp
        return [mlp.w1, mlp.v1, mlp.w2, self.module.router.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(x)
        return out

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        gate, up, down, router = gradients
        experts, d = router.shape
        return {
            "grad_gate": gate.view(experts, -1, d),
            "grad_up": up.view(experts, -1, d),
            "grad_down": down.view(experts, -1, d).transpose(1, 2),
            "grad_router": router,
        }

    def expert_indices(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            _, _, indices = self.module.router(x)
        chosen: Tensor = indices
        return chosen


class MegaBlocks(Implementation):
    name = "megablocks"
    label = "MegaBlocks (grouped)"
    upstream = "https://github.com/databricks/megablocks"
    licence = "Apache-2.0"
    requires: ClassVar[dict[str, str]] = {
        "megablocks": "install requirements/megablocks.txt line by line, as its comments say",
        "grouped_gemm": "install requirements/megablocks.txt line by line, as its comments say",
        "stk": "install requirements/megablocks.txt line by line, as its comments say",
    }
    distributions = ("megablocks", "grouped-gemm", "stanford-stk", "triton")
    dtypes = ("bfloat16",)  # all that grouped-gemm computes in
    conventions = ROUTER_CONVENTIONS
    no_graph_reason = "MegaBlocks copies the tokens per expert to the host in the middle of its forward"
    #: cuBLAS' names tell weight gradients from the other GEMMs only (the router's are among both), and the copy
    #: kernel's name does not tell the gather from the scatter. Products and sums serve several roles.
    kernel_roles = (
        ("_padded_copy_wgrad", "router"),
        ("_padded_copy", "gather"),
        *DENSE_GEMM_ROLES,
        ("silu", "activation"),
        # Over a token's K weights, where they are normalised; over its K rows otherwise.
        ("reduce_kernel<512", "router"),
        ("sum_functor", "aggregation"),
        *((part, "pointwise") for part in ("mulfunctor", "cudafunctor_add<c10::bfloat16>")),
        *((part, "fill") for part in ("fillfunctor", "memset")),
        *((part, "router") for part in ("normoneops", "divfunctor")),
        *ROUTER_ROLES,
    )

    def restriction(self, point: Point) -> str | None:
        shape = point.shape
        if shape.n * shape.E < 128:
            return f"MegaBlocks counts blocks of 128 columns: n*E must be at least 128, here {shape.n * shape.E}"
        # Its copy kernel multiplies a 32-bit row number by d; past 2^31 elements that wraps around.
        if (shape.routed_rows - 1) * shape.d >= 2**31:
            return (
                "MegaBlocks' copy kernels address routed rows by 32-bit offsets: T*K*d may be at most "
                f"2^31 = {2**31}, here {shape.routed_rows * shape.d}"
            )
        return None

    def build(self, problem: Problem) -> Layer:
        notes = [
            # Made to run anyway, its kernels multiply 16-bit block numbers by 128 in 16 bits: wrong past 32768 rows.
            "mlp_impl=grouped, which MegaBlocks asks for with Triton 3.2 and newer: its block-sparse kernels, those of "
            "the paper, refuse to run there",
            "grouped: a cuBLAS GEMM for each expert (grouped-gemm as it installs), between a gather and a scatter",
            "router scores in the layer's dtype, as MegaBlocks computes them",
        ]
        from implementations import _megablocks_ops

        try:
            import megablocks_ops
        except ImportError:
            megablocks_ops = sys.modules["megablocks_ops"] = _megablocks_ops
        if megablocks_ops is _megablocks_ops:
            notes.append("megablocks_ops (sort, histogram, prefix sums) replaced by torch operators")
        from megablocks.layers.arguments import Arguments
        from megablocks.layers.dmoe import dMoE

        shape, convention = problem.shape, problem.point.layer.router_convention
        arguments = Arguments(
            hidden_size=shape.d,
            ffn_hidden_size=shape.n,
            moe_num_experts=shape.E,
            moe_top_k=shape.K,
            moe_normalize_expert_weights=None if convention == "softmax_topk" else 1,
            moe_loss_weight=0.0,
            bias=False,
            activation_fn=torch.nn.functional.silu,
            mlp_type="glu",
            mlp_impl="grouped",
            fp16=False,
            bf16=True,
            device=torch.device("meta"),  # its initial weights are replaced at once
        )
        module = dMoE(arguments)
        mlp = module.experts.mlp
        mlp.w1 = torch.nn.Parameter(problem.gate.detach().view(-1, shape.d))
        mlp.v1 = torch.nn.Parameter(problem.up.detach().view(-1, shape.d))
        mlp.w2 = torch.nn.Parameter(problem.down.detach().transpose(1, 2).contiguous().view(-1, shape.d))
        module.router.layer.weight = torch.nn.Parameter(problem.router.detach())
        layer = MegaBlocksLayer(module, notes)
        # Its copy kernels tune themselves at their first forward and backward.
        layer.call_once(problem)
        return layer

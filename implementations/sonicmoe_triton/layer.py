"""The SonicMoE layer as a torch module.

layer = SonicMoE(d=1536, n=256, experts=128, k=8, dtype=torch.bfloat16, device="cuda")
out = layer(x)                                  # (…, d) -> (…, d)
out, router = layer.forward_with_router(x)      # also the router's logits and counts, for a balancing loss
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from implementations.sonicmoe_triton import checks, function
from implementations.sonicmoe_triton.activations import is_gated
from implementations.sonicmoe_triton.function import RouterOutput

LAYOUTS = ("concatenated", "interleaved")


class SonicMoE(nn.Module):
    """A mixture of experts: out[t] = Σ over the token's K experts e of S[t,e] · down_e(act(gate_e x_t) · up_e x_t).

    Parameters: ``w1`` (E, 2n, d), gate rows then up rows; ``w2`` (E, d, n); ``router`` (E, d); with ``bias`` also
    ``bias1`` (E, 2n) and ``bias2`` (E, d). The forward allocates and keeps the output, and of each routed row H (2n
    values) and 16 bytes (see `function`); with ``rounding``, of the most rows that there may be, and p of the router,
    (T, E) in fp32.

    Args:
        d: embedding width. The kernels take multiples of 16 bytes (8 in a 2-byte dtype); any other width is padded
            with zeros in each forward, which copies x, the weights and the output, and holds the copies of x and the
            weights until the backward (see `widths`). The parameters have the widths as given.
        n: intermediate width of one expert, likewise.
        experts: E, at most 1024.
        k: experts for each token, at most E and 64.
        activation: ``swiglu``, ``geglu`` (exact gelu), ``reglu``; ungated ``silu``, ``gelu``, ``relu2``, for which
            every 2n here is n and there are no up rows.
        router_convention: ``topk_softmax`` (softmax over the K chosen logits), ``softmax_topk`` (softmax over all E
            logits, chosen weights as they are; keeps the logits for the backward) or ``softmax_topk_renormalised``.
        bias: give the experts biases.
        rounding: round each expert's number of tokens while training (``nearest``, ``up``, ``down``, ``stochastic``,
            ``balanced``; see `function.rounded_moe_layer`); ``eval()`` goes by top-K. ``stochastic`` draws from torch's
            default generator.
        m_tile: to a multiple of this; an expert whose number rounded up would exceed T keeps top-K's. Where it is no
            multiple of 128, the kernels' own tile, some of their tiles are full in part.
        dtype: bfloat16 or float16 (float32 is exact and slow); default: torch's default dtype.

    Raises:
        ValueError: a size or name that the kernels do not take; the message says which.
    """

    def __init__(
        self,
        d: int,
        n: int,
        experts: int,
        k: int,
        activation: str = "swiglu",
        router_convention: str = "topk_softmax",
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        rounding: str | None = None,
        m_tile: int = 128,
    ) -> None:
        super().__init__()
        halves = 2 if is_gated(activation) else 1
        dtype = dtype or torch.get_default_dtype()
        checks.check_convention(router_convention)
        checks.check_choice(experts, k)
        checks.check_dtype(dtype)
        checks.check_width("d", d)
        checks.check_width("n", n)
        self.d, self.n, self.experts, self.k = d, n, experts, k
        self.activation, self.router_convention = activation, router_convention
        checks.check_tile(m_tile)
        if rounding is not None:
            checks.check_method(rounding)
        self.rounding, self.m_tile = rounding, m_tile

        def parameter(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(size, dtype=dtype, device=device))

        self.w1, self.w2, self.router = (
            parameter(experts, halves * n, d),
            parameter(experts, d, n),
            parameter(experts, d),
        )
        self.bias1 = parameter(experts, halves * n) if bias else None
        self.bias2 = parameter(experts, d) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights of variance 1 / (their number of inputs), so that activations keep unit scale; zero biases."""
        nn.init.normal_(self.w1, std=self.d**-0.5)
        nn.init.normal_(self.w2, std=self.n**-0.5)
        nn.init.normal_(self.router, std=self.d**-0.5)
        for bias in (self.bias1, self.bias2):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) -> (…, d). Raises ValueError where x's width, dtype or device is not the layer's."""
        self._check(x)
        if self._rounds:
            return self._rounded(x)[0]
        out = function.moe_layer(x.reshape(-1, self.d), *self._arguments())
        return out.view(x.shape)

    def forward_with_router(self, x: Tensor) -> tuple[Tensor, RouterOutput]:
        """`forward`, and the router's logits (T, E) and counts (E,), where T is the product of x's leading sizes.
        The logits stay differentiable, for `load_balancing_loss` or another loss; they are kept (2TE bytes)."""
        self._check(x)
        if self._rounds:
            return self._rounded(x)
        out, router = function.moe_layer_with_router(x.reshape(-1, self.d), *self._arguments())
        return out.view(x.shape), router

    def load_gate_up_down(self, gate: Tensor, up: Tensor | None, down: Tensor, layout: str = "concatenated") -> None:
        """Copy expert weights in, converted to the layer's dtype.

        Args:
            gate, up: (E, n, d) each; or, with ``up`` None, ``gate`` holds both as (E, 2n, d) in the given layout. For
                an ungated activation ``gate`` is (E, n, d), ``up`` None and the layout without meaning.
            down: (E, d, n).
            layout: how a joint tensor orders its rows: ``concatenated`` (gate rows, then up rows: this layer's own) or
                ``interleaved`` (gate 0, up 0, gate 1, up 1, …). Separate tensors have no order to tell.

        Raises:
            ValueError: a shape or the layout does not fit.
        """
        if layout not in LAYOUTS:
            raise ValueError(f"unknown layout {layout!r}; choose from {', '.join(LAYOUTS)}")
        experts, d, n = self.w2.shape
        _check_shape("down", down, (experts, d, n))
        if up is not None:
            if not is_gated(self.activation):
                raise ValueError(f"up: the activation {self.activation} has none")
            _check_shape("gate", gate, (experts, n, d))
            _check_shape("up", up, (experts, n, d))
            joint = torch.cat([gate, up], dim=1)
        else:
            _check_shape("gate", gate, tuple(self.w1.shape))
            joint = gate
            if layout == "interleaved" and is_gated(self.activation):
                joint = torch.cat([gate[:, 0::2], gate[:, 1::2]], dim=1)
        with torch.no_grad():
            self.w1.copy_(joint)
            self.w2.copy_(down)

    def extra_repr(self) -> str:
        return (
            f"d={self.d}, n={self.n}, experts={self.experts}, k={self.k}, activation={self.activation}, "
            f"router_convention={self.router_convention}, bias={self.bias1 is not None}"
            + ("" if self.rounding is None else f", rounding={self.rounding}, m_tile={self.m_tile}")
        )

    @property
    def _rounds(self) -> bool:
        return self.rounding is not None and self.training

    def _rounded(self, x: Tensor) -> tuple[Tensor, RouterOutput]:
        assert self.rounding is not None
        out, said = function.rounded_moe_layer(
            x.reshape(-1, self.d),
            self.w1,
            self.w2,
            self.router,
            self.k,
            self.m_tile,
            self.rounding,
            self.router_convention,
            self.activation,
            self.bias1,
            self.bias2,
        )
        return out.view(x.shape), said

    def _check(self, x: Tensor) -> None:
        if x.dim() == 0 or x.shape[-1] != self.d:
            raise ValueError(f"d: x has shape {tuple(x.shape)}, expected (…, {self.d})")

    def _arguments(self) -> tuple[Tensor, Tensor, Tensor, int, str, str, Tensor | None, Tensor | None]:
        """`function.moe_layer`'s arguments after x."""
        return (
            self.w1,
            self.w2,
            self.router,
            self.k,
            self.router_convention,
            self.activation,
            self.bias1,
            self.bias2,
        )


def load_balancing_loss(router: RouterOutput) -> Tensor:
    """E · Σ_e f_e · p_e (Switch Transformer, arXiv 2101.03961, eq. 4, over K choices): f_e is expert e's share of all
    routed pairs, p_e its mean probability. 1 for a perfectly even router; a scalar in fp32, differentiable by p_e."""
    tokens, experts = router.logits.shape
    share = router.counts.float() / router.counts.sum().clamp_min(1)
    probability = torch.softmax(router.logits.float(), dim=-1).sum(0) / max(tokens, 1)
    return experts * (share * probability).sum()


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")

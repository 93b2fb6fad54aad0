"""Token rounding (arXiv 2512.14080, section 5) on the device: the routing that `harness.token_rounding` defines.

`rounding_kernels` says how. Eagerly a plain `autograd.Function`; where somebody looks on (see `function`), an operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harness.token_rounding import ADDED_WEIGHTS, ROUNDINGS
from implementations.sonicmoe_triton.dispatch import is_plain
from implementations.sonicmoe_triton.rounding_kernels import Held, Kind, RoundedRouting, backward, forward, pairs_bound
from implementations.sonicmoe_triton.router import MAX_EXPERTS, MAX_K, SOFTMAX_OVER_ALL


class RoundedScores(torch.autograd.Function):
    """`forward` and `backward`. Nothing is recomputed but what is kept: p, in fp32, is held."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, kind: Kind, m_tile: int, rounding: str, draws: Tensor | None) -> Any:
        routing, held = forward(logits, kind, m_tile, rounding, draws)
        ctx.save_for_backward(*held)
        ctx.kind, ctx.dtype = kind, logits.dtype
        ctx.mark_non_differentiable(routing.experts, routing.token_offsets, routing.counts)
        return tuple(routing)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_scores: Tensor, *_: Any) -> Any:
        return backward(grad_scores, Held(*ctx.saved_tensors), ctx.kind, ctx.dtype), None, None, None, None


@torch.library.custom_op(
    "sonicmoe_triton::round_routing",
    mutates_args=(),
    schema="(Tensor logits, Tensor? draws, int num_experts, int k, bool divided, bool raw, int m_tile, str rounding)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def round_routing_operator(
    logits: Tensor, draws: Tensor | None, num_experts: int, k: int, divided: bool, raw: bool, m_tile: int, rounding: str
) -> tuple[Tensor, ...]:
    """`RoundedRouting`, then what the backward needs beside token_offsets."""
    routing, held = forward(logits, Kind(num_experts, k, divided, raw), m_tile, rounding, draws)
    return *routing, held.marked, held.sums, held.thresholds


@round_routing_operator.register_fake
def _(logits: Tensor, _draws: Tensor | None, num_experts: int, k: int, *rest: Any) -> tuple[Tensor, ...]:
    divided, _raw, m_tile, rounding = rest
    tokens = logits.shape[0]
    pairs = pairs_bound(tokens, num_experts, k, m_tile, rounding)

    def new(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return logits.new_empty(size, dtype=dtype)

    return (
        new(pairs, dtype=torch.float32), new(pairs), new(tokens + 1), new(num_experts),
        new(tokens, num_experts, dtype=torch.float32), new(tokens if divided else 1, dtype=torch.float32),
        new(2, num_experts),
    )  # fmt: skip


@torch.library.custom_op(
    "sonicmoe_triton::round_routing_backward",
    mutates_args=(),
    schema="(Tensor grad_scores, Tensor marked, Tensor sums, Tensor thresholds, Tensor token_offsets, int num_experts, "
    "int k, bool divided, bool raw, ScalarType dtype) -> Tensor",
)
def round_routing_backward_operator(
    grad_scores: Tensor,
    marked: Tensor,
    sums: Tensor,
    thresholds: Tensor,
    token_offsets: Tensor,
    num_experts: int,
    k: int,
    divided: bool,
    raw: bool,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of the logits."""
    kind = Kind(num_experts, k, divided, raw)
    return backward(grad_scores, Held(marked, sums, thresholds, token_offsets), kind, dtype)


@round_routing_backward_operator.register_fake
def _(_grad_scores: Tensor, marked: Tensor, *rest: Any) -> Tensor:
    return marked.new_empty(marked.shape, dtype=rest[-1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, _draws, *kind, _m_tile, _rounding = inputs
    _scores, experts, token_offsets, counts, marked, sums, thresholds = output
    ctx.mark_non_differentiable(experts, token_offsets, counts, marked, sums, thresholds)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(marked, sums, thresholds, token_offsets)
    ctx.kind, ctx.dtype = kind, logits.dtype


def _gradients(ctx: Any, grad_scores: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad_scores is None:
        return (None,) * 8
    grad_logits = round_routing_backward_operator(grad_scores, *ctx.saved_tensors, *ctx.kind, ctx.dtype)
    return grad_logits, None, None, None, None, None, None, None


round_routing_operator.register_autograd(_gradients, setup_context=_setup)


def round_routing(
    logits: Tensor,
    k: int,
    m_tile: int = 128,
    rounding: str = "nearest",
    convention: str = "topk_softmax",
    added_weight: str = "renormalised",
    generator: torch.Generator | None = None,
    draws: Tensor | None = None,
) -> RoundedRouting:
    """`harness.token_rounding.token_rounding` (arXiv 2512.14080) on the device, without waiting for it.

    The selection is that of the reference on the same device, bit for bit, ties, exempt experts and NaNs included; it
    is not differentiable, the scores are. Equal logits (and draws) give equal bits.

    Args:
        logits: (T, E), any floating-point dtype, compared in fp32; T may be 0. The backward keeps p, (T, E) in fp32.
        k: 1 <= K <= min(E, 64), experts for each token before the rounding.
        m_tile: each expert's number of tokens becomes a multiple of this.
        rounding: one of `ROUNDINGS`; see `harness.token_rounding.round_counts`.
        convention: of the router; see `harness.interface.LayerSpec`.
        added_weight: what a pair weighs that is not among top-K, p over its token's sum of p over top-K
            (``renormalised``) or p (``raw``). ``softmax_topk`` weighs every pair p.
        generator: for ``stochastic``; torch's default one of the logits' device where None. One on the CPU gives the
            reference's numbers too, but cannot be captured in a CUDA graph.
        draws: (E,) integers within 0 to m_tile - 1 on the logits' device, instead of a generator's: an expert whose
            remainder f_e mod m_tile exceeds its number is rounded up.

    Returns:
        Tensors of `pairs_bound` entries, of which the first token_offsets[T] are used.

    Raises:
        ValueError: ``logits`` not (T, E) floating-point, E above 1024, ``k`` or ``m_tile`` out of range, an unknown
            ``rounding``, ``convention`` or ``added_weight``, ``draws`` that do not fit or come without ``stochastic``
            or with a generator, or a bound of 2^31 pairs or more.
    """
    _check_name("rounding", rounding, ROUNDINGS)
    _check_name("convention", convention, tuple(SOFTMAX_OVER_ALL))
    _check_name("added_weight", added_weight, ADDED_WEIGHTS)
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be (T, E) floating-point, not {tuple(logits.shape)} {logits.dtype}")
    tokens, num_experts = logits.shape
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"logits have E = {num_experts} experts: not within 1 to {MAX_EXPERTS}")
    if not 1 <= k <= min(num_experts, MAX_K):
        raise ValueError(f"k = {k} is not within 1 to min(E, {MAX_K}) = {min(num_experts, MAX_K)}")
    if m_tile < 1:
        raise ValueError(f"m_tile must be at least 1, not {m_tile}")
    if (bound := pairs_bound(tokens, num_experts, k, m_tile, rounding)) >= 2**31:
        raise ValueError(f"logits of T = {tokens} tokens may give {bound} pairs: 2^31 or more")
    draws = _draws(logits, m_tile, rounding, generator, draws)
    if tokens == 0:
        nothing = torch.zeros(1, dtype=torch.int32, device=logits.device)
        counts = torch.zeros(num_experts, dtype=torch.int32, device=logits.device)
        return RoundedRouting(logits.reshape(-1).float(), nothing[:0], nothing, counts)
    if logits.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        logits = logits.float()
    divided = not SOFTMAX_OVER_ALL[convention]
    kind = Kind(num_experts, k, divided, raw=divided and added_weight == "raw")
    logits = logits.contiguous()
    if is_plain(logits, draws):
        return RoundedRouting(*RoundedScores.apply(logits, kind, m_tile, rounding, draws))
    return RoundedRouting(*round_routing_operator(logits, draws, *kind, m_tile, rounding)[:4])


def _check_name(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"unknown {name} {value!r}; known: {', '.join(known)}")


def _draws(
    logits: Tensor, m_tile: int, rounding: str, generator: torch.Generator | None, draws: Tensor | None
) -> Tensor | None:
    """(E,) int64 for ``stochastic``: as `harness.token_rounding.round_counts` draws them."""
    num_experts, device = logits.shape[1], logits.device
    if draws is None:
        if rounding != "stochastic":
            return None
        source = device if generator is None else generator.device
        drawn = torch.randint(m_tile, (num_experts,), generator=generator, device=source)
        return drawn.to(device, non_blocking=True)
    if rounding != "stochastic":
        raise ValueError(f"draws are for the rounding 'stochastic', not {rounding!r}")
    if generator is not None:
        raise ValueError("draws and a generator: one of them")
    integers = not (draws.is_floating_point() or draws.is_complex() or draws.dtype == torch.bool)
    if draws.shape != (num_experts,) or not integers or draws.device != device:
        found = f"{tuple(draws.shape)} {draws.dtype} on {draws.device}"
        raise ValueError(f"draws must be ({num_experts},) integers on {device}, not {found}")
    return draws.long().contiguous()

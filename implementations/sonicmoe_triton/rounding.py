"""Token rounding (arXiv 2512.14080, section 5) on the device: the routing that `harness.token_rounding` defines.

`rounding_kernels` says how. Eagerly a plain `autograd.Function`; where somebody looks on (see `function`), an operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from implementations.sonicmoe_triton import checks
from implementations.sonicmoe_triton.dispatch import is_plain
from implementations.sonicmoe_triton.rounding_kernels import Held, Kind, RoundedRouting, backward, forward, pairs_bound
from implementations.sonicmoe_triton.router import SOFTMAX_OVER_ALL

#: The kernels number pairs in 32 bits.
MAX_PAIRS = 2**31
#: The largest integer that an operator takes. Nobody has so many tokens: a larger tile rounds as this one does.
LARGEST_TILE = 2**63 - 1


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

    Where what is computed here is computed again for the backward (activation checkpointing), ``stochastic`` needs
    ``draws``, or torch's default generator, whose state checkpointing restores: another ``generator`` has moved on and
    would give the second forward another routing than the first.

    Args:
        logits: (T, E), any floating-point dtype, compared in fp32; T may be 0. For the backward p is kept, (T, E) in
            fp32: 4TE bytes, and 4T more for its sums over top-K.
        k: 1 <= K <= min(E, 64), experts for each token before the rounding.
        m_tile: each expert's number of tokens becomes a multiple of this. An expert whose number rounded up would
            exceed T is exempt and keeps the number it has, in every rounding.
        rounding: one of `ROUNDINGS`; see `harness.token_rounding.round_counts`.
        convention: of the router; see `harness.interface.LayerSpec`.
        added_weight: what a pair weighs that is not among top-K, p over its token's sum of p over top-K
            (``renormalised``) or p (``raw``). ``softmax_topk`` weighs every pair p.
        generator: for ``stochastic``; torch's default one of the logits' device where None. One on the CPU gives the
            reference's numbers too, but cannot be captured in a CUDA graph.
        draws: (E,) integers within 0 to m_tile - 1 on the logits' device, instead of a generator's: an expert whose
            remainder f_e mod m_tile exceeds its number is rounded up. Any other number counts as the nearest of these.

    Returns:
        Tensors of `pairs_bound` entries, of which the first token_offsets[T] are used.

    Raises:
        ValueError: ``logits`` not (T, E) floating-point, E above 1024, ``k`` or ``m_tile`` no integer or out of range,
            an unknown ``rounding``, ``convention`` or ``added_weight``, ``draws`` or a ``generator`` that do not fit,
            that come together or without ``stochastic``, or a bound of 2^31 pairs or more.
    """
    checks.check_method(rounding)
    checks.check_tile(m_tile)
    checks.check_convention(convention)
    checks.check_added_weight(added_weight)
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be (T, E) floating-point, not {tuple(logits.shape)} {logits.dtype}")
    tokens, num_experts = logits.shape
    checks.check_choice(num_experts, k)
    checks.check_draws(logits.device, num_experts, rounding, generator, draws)
    bound = pairs_bound(tokens, num_experts, k, m_tile, rounding)
    checks.check_rounded_pairs(bound, tokens, num_experts, m_tile, rounding, MAX_PAIRS)
    m_tile = min(m_tile, LARGEST_TILE)
    if rounding == "stochastic":
        draws = _drawn(num_experts, m_tile, logits.device, generator) if draws is None else draws.long().contiguous()
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


def _drawn(num_experts: int, m_tile: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """(E,) int64: as `harness.token_rounding.round_counts` draws them."""
    source = device if generator is None else generator.device
    drawn = torch.randint(m_tile, (num_experts,), generator=generator, device=source)
    return drawn.to(device, non_blocking=True)

"""What our layer takes: every check of a caller's arguments, each with one line that names what does not fit."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.token_rounding import ADDED_WEIGHTS, ROUNDINGS
from implementations.sonicmoe_triton.activations import is_gated

CONVENTIONS = ("topk_softmax", "softmax_topk", "softmax_topk_renormalised")
#: What the router's kernels take.
MAX_EXPERTS, MAX_K = 1024, 64
MAX_PAIRS = 2**30
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_router(x: Tensor, router: Tensor, w1: Tensor, k: int, convention: str) -> None:
    check_convention(convention)
    if router.dim() != 2:
        raise ValueError(f"router has shape {tuple(router.shape)}, expected (E, d)")
    if router.shape[0] != w1.shape[0]:
        raise ValueError(f"E: router has {router.shape[0]} experts, w1 has {w1.shape[0]}")
    if router.shape[1] != x.shape[-1]:
        raise ValueError(f"d: router has {router.shape[1]} columns, x has {x.shape[-1]}")
    check_choice(router.shape[0], k)
    check_pairs(x.shape[0] * k)
    check_alike(x, router=router)


def check_convention(convention: str) -> None:
    """ValueError for an unknown router convention."""
    _check_name("router convention", convention, CONVENTIONS)


def check_method(rounding: str) -> None:
    """ValueError for an unknown token rounding."""
    _check_name("rounding", rounding, ROUNDINGS)


def check_added_weight(added_weight: str) -> None:
    """ValueError for an unknown weight of the pairs that a rounding adds."""
    _check_name("added_weight", added_weight, ADDED_WEIGHTS)


def check_tile(m_tile: int) -> None:
    """ValueError for a tile that is no number of rows."""
    _check_integer("m_tile", m_tile)
    if m_tile < 1:
        raise ValueError(f"m_tile = {m_tile}: must be at least 1")


def check_draws(
    device: torch.device, experts: int, rounding: str, generator: torch.Generator | None, draws: Tensor | None
) -> None:
    """ValueError for numbers, or a source of them, that do not fit or that the rounding does not draw."""
    for name, given in (("draws", draws), ("generator", generator)):
        if given is not None and rounding != "stochastic":
            raise ValueError(f"{name}: for the rounding 'stochastic' only, not {rounding!r}")
    if generator is not None and draws is not None:
        raise ValueError("draws and a generator: one of them")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"generator must be a torch.Generator, not {type(generator).__name__}")
    if draws is None:
        return
    if not isinstance(draws, Tensor):
        raise ValueError(f"draws must be ({experts},) integers on {device}, not {type(draws).__name__}")
    integers = not (draws.is_floating_point() or draws.is_complex() or draws.dtype == torch.bool)
    if draws.shape != (experts,) or not integers or draws.device != device:
        found = f"{tuple(draws.shape)} {draws.dtype} on {draws.device}"
        raise ValueError(f"draws must be ({experts},) integers on {device}, not {found}")


def check_rounded_pairs(
    bound: int, tokens: int, experts: int, m_tile: int, rounding: str, limit: int = MAX_PAIRS
) -> None:
    """ValueError where a rounding may keep too many pairs; ``bound``: `rounding_kernels.pairs_bound`."""
    if bound >= limit:
        raise ValueError(
            f"T = {tokens} tokens and E = {experts} experts may have {bound} pairs by the rounding {rounding!r} to "
            f"m_tile = {m_tile}: must be below {limit}"
        )


def check_choice(experts: int, k: int) -> None:
    """ValueError where K of E experts cannot be chosen."""
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"E = {experts}: at most {MAX_EXPERTS} experts, at least one")
    _check_integer("K", k)
    if not 1 <= k <= min(experts, MAX_K):
        raise ValueError(f"K = {k}: must be between 1 and {min(experts, MAX_K)} for E = {experts}")


def check_dtype(dtype: torch.dtype) -> None:
    """ValueError for a dtype that the kernels do not compute in."""
    if dtype not in DTYPES:
        raise ValueError(f"{dtype}: must be one of {', '.join(map(str, DTYPES))}")


def check_pairs(pairs: int) -> None:
    """Rows are numbered in 32 bits, with room for a tile past the end."""
    if pairs >= MAX_PAIRS:
        raise ValueError(f"T * K = {pairs}: must be below {MAX_PAIRS}")


def check_width(name: str, width: int) -> None:
    """ValueError for a width that is no number of columns; `widths` sees to those that the kernels do not take."""
    _check_integer(name, width)
    if width < 1:
        raise ValueError(f"{name} = {width}: must be at least 1")


def check_experts(
    x: Tensor, w1: Tensor, w2: Tensor, bias1: Tensor | None, bias2: Tensor | None, activation: str
) -> None:
    halves = 2 if is_gated(activation) else 1
    if x.dim() != 2 or w1.dim() != 3 or w2.dim() != 3:
        raise ValueError(
            f"x {tuple(x.shape)}, w1 {tuple(w1.shape)}, w2 {tuple(w2.shape)}: expected (T, d), (E, 2n, d), (E, d, n)"
        )
    experts, d, n = w2.shape
    if x.shape[1] != d:
        raise ValueError(f"d: x has {x.shape[1]} columns, w2 makes {d}")
    if w1.shape[0] != experts:
        raise ValueError(f"E: w1 has {w1.shape[0]} experts, w2 has {experts}")
    if w1.shape[1] != halves * n:
        raise ValueError(f"n: w1 has {w1.shape[1]} rows, expected {halves * n} for {activation}, as w2 takes n = {n}")
    if w1.shape[2] != d:
        raise ValueError(f"d: w1 takes {w1.shape[2]} columns, w2 makes {d}")
    for name, bias, size in (("bias1", bias1, halves * n), ("bias2", bias2, d)):
        if bias is not None and tuple(bias.shape) != (experts, size):
            raise ValueError(f"{name} has shape {tuple(bias.shape)}, expected ({experts}, {size})")
    check_dtype(x.dtype)
    if d < 1 or n < 1:
        raise ValueError(f"d = {d} and n = {n}: must be at least 1")
    check_alike(x, w1=w1, w2=w2, bias1=bias1, bias2=bias2)


def _check_name(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"unknown {name} {value!r}; choose from {', '.join(known)}")


def _check_integer(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} = {value!r}: must be an integer")


def check_alike(x: Tensor, **others: Tensor | None) -> None:
    for name, other in others.items():
        if other is not None and (other.dtype != x.dtype or other.device != x.device):
            raise ValueError(
                f"{name} is {other.dtype} on {other.device}, x is {x.dtype} on {x.device}: they must agree"
            )

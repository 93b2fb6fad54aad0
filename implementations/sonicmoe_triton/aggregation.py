"""Aggregation: each token sums its experts' rows.

    out[t] = base[t] + sum over the pairs p of t of weights[reverse[p]] * rows[reverse[p]]

Memory-bound: R * d elements are read once, T * d written once. What matters is bytes in flight: a thread owns 16 bytes
of one token's columns, or of several tokens' where they have few pairs, and loads 8 to 16 rows before it adds any. It
adds its own rows, in a fixed order, so that equal inputs give equal bits. It gives the cache no hint, as the official
kernel gives none: while it said that rows are not read again, it was behind that one (NOTES.md).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from implementations.sonicmoe_triton import tiles, tuned
from implementations.sonicmoe_triton.launching import Launcher, cdiv, next_power_of_2
from implementations.sonicmoe_triton.metadata import Routing

#: Rows of one token loaded at once, at most: 16 rows x 16 bytes are 64 registers of loads a thread.
ROWS_AT_ONCE = 16
#: The same where tokens have any number of pairs.
GENERAL_ROWS_AT_ONCE = 8
#: A thread takes several tokens until it loads this many rows at once, but no more than so many tokens.
ROWS_A_THREAD, TOKENS_A_THREAD = 8, 4
WARPS = 4
#: Up to here the loop over a token's K rows is unrolled, so that one turn's loads need not wait for another's sum.
UNROLLED_K = tl.constexpr(64)


class Options(NamedTuple):
    """What differs from the kernel's own choice.

    Attributes:
        warps: of a program that takes one token's whole rows; 0: one that takes a part of several tokens' columns.
        rows: how many of the token's K rows it loads at once, a power of two; counts with ``warps``.
    """

    warps: int = 0
    rows: int = 0


@triton.jit
def _aggregate_rows(  # type: ignore[no-untyped-def]
    rows_ptr, weights_ptr, reverse_ptr, first_pair, count, column,
    D: tl.constexpr, BLOCK_D: tl.constexpr, WEIGHTED: tl.constexpr, GENERAL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # (TOKENS, BLOCK_D): the weighted sums of the rows of pairs first_pair ... first_pair + min(count, ROWS) - 1
    slot = tl.arange(0, ROWS)[None, :]
    live = slot < count[:, None]
    row = tl.load(reverse_ptr + first_pair[:, None] + slot, mask=live, other=0)
    if GENERAL:
        # A pair without an expert.
        live = live & (row >= 0)
        row = tl.where(live, row, 0)
    at = row[:, :, None].to(tl.int64) * D + column[None, None, :]
    mask = live[:, :, None]
    if D % BLOCK_D != 0:
        mask = mask & (column < D)[None, None, :]
    y = tl.load(rows_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if WEIGHTED:
        y *= tl.load(weights_ptr + row, mask=live, other=0.0)[:, :, None]
    return tl.sum(y, 1)


@triton.jit
def _aggregation_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, weights_ptr, base_ptr, reverse_ptr, token_offsets_ptr, out_ptr, tokens,
    K: tl.constexpr, GENERAL: tl.constexpr, WEIGHTED: tl.constexpr, BASED: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # rows (R, D), weights (R,), base (T, D), reverse (P,), token_offsets (T + 1,) -> out (T, D)
    COLUMN_BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    token = tl.program_id(0) // COLUMN_BLOCKS * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(0) % COLUMN_BLOCKS * BLOCK_D + tl.arange(0, BLOCK_D)
    at = token.to(tl.int64)[:, None] * D + column[None, :]
    mask = (token < tokens)[:, None] & (column < D)[None, :]
    if BASED:
        total = tl.load(base_ptr + at, mask=mask, other=0.0).to(tl.float32)
    else:
        total = tl.zeros((TOKENS, BLOCK_D), tl.float32)
    if GENERAL:
        pair = tl.load(token_offsets_ptr + token, mask=token < tokens, other=0)
        count = tl.load(token_offsets_ptr + token + 1, mask=token < tokens, other=0) - pair
        for k in range(0, tl.max(count, 0), ROWS):
            total += _aggregate_rows(
                rows_ptr, weights_ptr, reverse_ptr, pair + k, count - k, column, D, BLOCK_D, WEIGHTED, True, ROWS
            )
    else:
        pair = token * K
        count = tl.where(token < tokens, K, 0)
        if K <= UNROLLED_K:
            for k in tl.static_range(0, K, ROWS):
                total += _aggregate_rows(
                    rows_ptr, weights_ptr, reverse_ptr, pair + k, count - k, column,
                    D, BLOCK_D, WEIGHTED, False, ROWS,
                )  # fmt: skip
        else:
            for k in range(0, K, ROWS):
                total += _aggregate_rows(
                    rows_ptr, weights_ptr, reverse_ptr, pair + k, count - k, column,
                    D, BLOCK_D, WEIGHTED, False, ROWS,
                )  # fmt: skip
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


def column_block(d: int, element_size: int) -> tuple[int, int]:
    """(BLOCK_D, warps across it) for rows of ``d`` elements: one 16-byte vector a thread, 1 to 4 warps, the width that
    wastes the fewest lanes and, among equals, the widest (d = 768, 1536, 4096 in bf16: 256, 512, 1024, no waste)."""
    vectors = 512 // element_size
    warps = min((4, 2, 1), key=lambda w: cdiv(d, w * vectors) * w)
    return warps * vectors, warps


def rows_at_once(k: int | None) -> int:
    """Rows of a token that a program loads at once where every token has ``k`` pairs; None: where they vary."""
    return GENERAL_ROWS_AT_ONCE if k is None else min(ROWS_AT_ONCE, next_power_of_2(k))


def tokens_a_thread(rows: int) -> int:
    """Whose columns a thread owns if it loads ``rows`` of each at once."""
    return max(1, min(TOKENS_A_THREAD, ROWS_A_THREAD // rows))


def configuration(
    k: int | None, d: int, element_size: int, options: Options | None = None
) -> tuple[dict[str, Any], dict[str, int]]:
    """The kernel's sizes, and what its launch is told. ``k``: as for `rows_at_once`."""
    options = options or Options()
    if options.warps:
        rows = options.rows if k is None else min(options.rows, next_power_of_2(k))
        return {"BLOCK_D": next_power_of_2(d), "ROWS": rows, "TOKENS": 1}, {"num_warps": options.warps}
    block_d, across = column_block(d, element_size)
    rows = rows_at_once(k)
    sizes = {"BLOCK_D": block_d, "ROWS": rows}
    if k is None:  # a program of several tokens would take as long as its longest
        return {**sizes, "TOKENS": 1}, {"num_warps": across}
    # Without a limit the assembler aims at fewer registers and issues half of the loads after the first sums.
    how = {"num_warps": WARPS, "maxnreg": 64 if rows <= ROWS_A_THREAD else 96}
    return {**sizes, "TOKENS": tokens_a_thread(rows) * (WARPS // across)}, how


@functools.cache
def _launcher(
    k: int | None, weighted: bool, based: bool, d: int, element_size: int, options: Options | None
) -> tuple[Launcher, int, int]:
    """And the tokens of a program and the blocks of columns of a token. ``k``: as for `rows_at_once`."""
    sizes, how = configuration(k, d, element_size, options)
    # A bound on general routing's pairs changes nothing in the kernel, and must not make another one.
    constants = {"K": k or 0, "GENERAL": k is None, "WEIGHTED": weighted, "BASED": based, "D": d, **sizes}
    return Launcher(_aggregation_kernel, constants, **how), sizes["TOKENS"], cdiv(d, sizes["BLOCK_D"])


@functools.cache
def choose(k: int | None, d: int) -> Options | None:
    """What was tuned for tokens of ``k`` pairs each; None: what `configuration` makes without options."""
    found = None if k is None else tuned.overrides(tiles.AGGREGATION, d, k, 0)
    return None if found is None else Options(**found)


def aggregate(
    rows: Tensor,
    routing: Routing,
    weights: Tensor | None = None,
    base: Tensor | None = None,
    over_base: bool = False,
    options: Options | None = None,
) -> Tensor:
    """(T, d) in ``rows``' dtype, summed in fp32; a token without pairs gives its base, or zeros.

    Args:
        rows: (R, d).
        routing: which rows belong to which token.
        weights: (R,) in row order (usually fp32 scores); None: ones.
        base: (T, d), added once; None: zeros.
        over_base: write the result over the base, which must be contiguous and of ``rows``' dtype, and return that.
        options: None: for 16-bit elements those of `choose`.

    Raises:
        ValueError: a shape that does not fit, a base that cannot take the result, or rows of d elements that are no
            multiple of 16 bytes.
    """
    tokens, d = routing.tokens, rows.shape[1]
    if d * rows.element_size() % 16:
        raise ValueError(f"d = {d} is no multiple of 16 bytes in {rows.dtype}")
    if rows.shape[0] != routing.rows:
        raise ValueError(f"{rows.shape[0]} rows for a routing of {routing.rows}")
    if weights is not None and weights.shape != (routing.rows,):
        raise ValueError(f"weights {tuple(weights.shape)} for a routing of {routing.rows} rows")
    if base is not None and base.shape != (tokens, d):
        raise ValueError(f"base {tuple(base.shape)} for an output of {(tokens, d)}")
    if base is not None and over_base and not (base.is_contiguous() and base.dtype == rows.dtype):
        raise ValueError(f"a {base.dtype} base with strides {base.stride()} cannot take a result in {rows.dtype}")
    if base is None:
        out = torch.empty((tokens, d), dtype=rows.dtype, device=rows.device)
    else:
        # A program reads its part of the base before it writes there, and nobody else's.
        out = base if over_base else torch.empty_like(base, dtype=rows.dtype, memory_format=torch.contiguous_format)
    if routing.rows == 0:
        return out.zero_() if base is None else out.copy_(base)
    rows = rows.contiguous()
    k = routing.k if routing.token_offsets is None else None
    size = rows.element_size()
    if options is None and size == 2:
        options = choose(k, d)
    launcher, block_t, column_blocks = _launcher(k, weights is not None, base is not None, d, size, options)
    # Pointers that are never read still have to point somewhere.
    launcher(
        (cdiv(tokens, block_t) * column_blocks,),
        (
            rows,
            rows if weights is None else weights.contiguous(),
            rows if base is None else base.contiguous(),
            routing.reverse,
            routing.reverse if routing.token_offsets is None else routing.token_offsets,
            out,
            tokens,
        ),
    )
    return out

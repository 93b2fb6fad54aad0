"""What the grouped GEMMs over rows share on the device: where a tile of rows lies, and loads of gathered rows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate(tile_expert, tile_row, expert_offsets, row_tile, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    """(expert, first row, (BM,) whether a row is still the expert's) of a tile of rows."""
    expert = tl.load(tile_expert + row_tile)
    first = tl.load(tile_row + row_tile)
    inside = tl.arange(0, BM) < tl.load(expert_offsets + expert + 1) - first
    return expert, first, inside


@triton.jit
def gathered(x, gather, first, inside, WIDTH: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    """(BM, BK) pointers to the first columns of x[gather[first + i]], x (T, WIDTH).

    Rows past the expert's end point at token 0; they are computed and not stored: a mask here would cost one on every
    load."""
    token = tl.load(gather + first + tl.arange(0, BM), mask=inside, other=0)
    return x + token[:, None].to(tl.int64) * WIDTH + tl.arange(0, BK)[None, :]


@triton.jit
def load_step(pointers, k, WIDTH: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns k to k + BK of `gathered` rows, zero past their width."""
    if WIDTH % BK == 0:
        step = tl.load(pointers + k)
    else:
        step = tl.load(pointers + k, mask=(k + tl.arange(0, BK) < WIDTH)[None, :], other=0.0)
    return step

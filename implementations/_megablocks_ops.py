"""A stand-in for ``megablocks_ops``, MegaBlocks' CUDA extension, which does not compile under CUDA 13.

It holds what MegaBlocks' grouped path calls, in torch operators and without a host synchronisation: small work beside
the GEMMs, on one number for each routed row. Signatures are the extension's: it writes into outputs that it is given.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sort(x: Tensor, end_bit: int, x_out: Tensor, iota_out: Tensor) -> None:
    """Sort the non-negative integers ``x`` (R,) below ``2**end_bit``; the sorted values and each one's place in ``x``
    go to ``x_out`` and ``iota_out`` (R,)."""
    # A radix sort takes time in proportion to the width of its keys.
    narrow = torch.uint8 if end_bit <= 8 else torch.int16 if end_bit <= 15 else x.dtype
    values, places = torch.sort(x.to(narrow), stable=True)
    x_out.copy_(values)
    iota_out.copy_(places)


def histogram(x: Tensor, num_bins: int) -> Tensor:
    """(num_bins,) int32: how often each of 0 … num_bins − 1 occurs in ``x`` (R,); exact up to 2^24 occurrences."""
    return torch.histc(x.float(), bins=num_bins, min=0, max=num_bins).int()


def inclusive_cumsum(x: Tensor, dim: int, out: Tensor) -> None:
    """Prefix sums of ``x`` (B, E) along ``dim``, each including its own element, into ``out`` (B, E)."""
    torch.cumsum(x, dim, dtype=x.dtype, out=out)


def exclusive_cumsum(x: Tensor, dim: int, out: Tensor) -> None:
    """Prefix sums of ``x`` (B, E) along ``dim``, each without its own element, into ``out`` (B, E)."""
    torch.sub(torch.cumsum(x, dim, dtype=x.dtype), x, out=out)

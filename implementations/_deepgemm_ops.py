"""DeepGEMM's three grouped GEMMs in bf16, for the plugins that multiply with them.

Rows lie by expert, each expert's padded to a multiple of `ALIGNMENT`. ``expert_of_row`` (M,) int32 names the expert of
every row, padding included. Without rows nothing is launched.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

#: Rows to which each expert's group is padded: the M tile of the contiguous layout, and the unit of the
#: weight gradients' contraction.
ALIGNMENT = 128


def load() -> ModuleType:
    """The package; RuntimeError where it wants other groups than are made here."""
    import deep_gemm

    alignment = int(deep_gemm.get_mk_alignment_for_contiguous_layout())
    if alignment != ALIGNMENT:
        raise RuntimeError(f"this DeepGEMM aligns groups to {alignment} rows, the plugin pads to {ALIGNMENT}")
    return deep_gemm


# DLPack, through which the tensors pass, refuses leaves that require a gradient.


def multiply(deep_gemm: ModuleType, rows: Tensor, weight: Tensor, expert_of_row: Tensor) -> Tensor:
    """(M, k) times the transposes of (E, n, k) -> (M, n)."""
    out = rows.new_empty(rows.shape[0], weight.shape[1])
    if rows.shape[0]:
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(rows.detach(), weight.detach(), out, expert_of_row)
    return out


def multiply_back(deep_gemm: ModuleType, rows: Tensor, weight: Tensor, expert_of_row: Tensor) -> Tensor:
    """(M, n) times (E, n, k) -> (M, k): the gradient of `multiply`'s rows."""
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    if rows.shape[0]:
        deep_gemm.m_grouped_bf16_gemm_nn_contiguous(rows.detach(), weight.detach(), out, expert_of_row)
    return out


def weight_gradient(deep_gemm: ModuleType, a: Tensor, b: Tensor, padded: Tensor, padded_host: list[int]) -> Tensor:
    """(M, m), (M, k) -> (E, m, k): aᵀ·b over the rows of each expert, zero for an expert without rows.

    Args:
        padded: (E,) int32, rows of each expert. padded_host: the same numbers as a list.
    """
    # The kernel over varying K always accumulates and skips empty groups, so its output starts at zero.
    out = torch.zeros(len(padded_host), a.shape[1], b.shape[1], dtype=a.dtype, device=a.device)
    if a.shape[0]:
        deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a.detach(), b.detach(), out, padded_host, padded, out)
    return out

"""DeepGEMM's package replaced by loops that assert what its kernels ask for."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from implementations._deepgemm_ops import ALIGNMENT


def check_operands(dtype: torch.dtype, *tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        # DLPack refuses them otherwise.
        assert not tensor.requires_grad


def m_grouped(a: Tensor, b: Tensor, d: Tensor, layout: Tensor) -> None:
    """(M, k), (E, k, m) -> (M, m); each tile of rows takes the weights of its first row's expert."""
    rows, k = a.shape
    assert rows > 0
    assert rows % ALIGNMENT == 0
    assert b.shape[1] == k
    assert k % 64 == 0
    assert d.shape == (rows, b.shape[2])
    assert layout.shape == (rows,)
    assert layout.dtype == torch.int32
    assert layout.is_contiguous()
    tiles = layout.view(-1, ALIGNMENT)
    assert torch.equal(tiles, tiles[:, :1].expand_as(tiles))
    assert bool((layout.diff() >= 0).all())
    for tile, expert in enumerate(tiles[:, 0].tolist()):
        part = slice(tile * ALIGNMENT, (tile + 1) * ALIGNMENT)
        d[part] = (a[part].float() @ b[expert].float()).to(d.dtype)


class FakeDeepGemm(ModuleType):
    """What the plugins call of `deep_gemm`, with the real one's assertions; ``calls`` lists the names. ``dtype``:
    another than the real one's, for kernels whose interpreter knows no bfloat16."""

    def __init__(self, alignment: int = ALIGNMENT, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__("deep_gemm")
        self.alignment, self.dtype = alignment, dtype
        self.calls: list[str] = []

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return self.alignment

    def m_grouped_bf16_gemm_nt_contiguous(self, a: Tensor, b: Tensor, d: Tensor, layout: Tensor) -> None:
        self.calls.append("nt")
        check_operands(self.dtype, a, b, d)
        m_grouped(a, b.transpose(1, 2), d, layout)

    def m_grouped_bf16_gemm_nn_contiguous(self, a: Tensor, b: Tensor, d: Tensor, layout: Tensor) -> None:
        self.calls.append("nn")
        check_operands(self.dtype, a, b, d)
        m_grouped(a, b, d, layout)

    def k_grouped_bf16_gemm_tn_contiguous(
        self, a: Tensor, b: Tensor, d: Tensor, ks: list[int], ks_tensor: Tensor, c: Tensor
    ) -> None:
        """d[e] = c[e] + a[rows of e]ᵀ·b[rows of e]; groups without rows are left as they are."""
        self.calls.append("tn")
        check_operands(self.dtype, a, b, c, d)
        assert ks_tensor.dtype == torch.int32
        assert ks_tensor.is_contiguous()
        assert ks_tensor.tolist() == ks
        assert all(k % ALIGNMENT == 0 for k in ks)
        assert a.shape[0] == b.shape[0] == sum(ks) > 0
        assert c.shape == d.shape == (len(ks), a.shape[1], b.shape[1])
        for expert, (rows_a, rows_b) in enumerate(zip(a.split(ks), b.split(ks), strict=True)):
            if ks[expert]:
                d[expert] = (c[expert].float() + rows_a.float().T @ rows_b.float()).to(d.dtype)

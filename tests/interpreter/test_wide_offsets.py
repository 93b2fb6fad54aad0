"""Rows and tokens that lie more than 2^31 elements into their tensor: a 32-bit offset would wrap.

The tensors are zero pages that nobody touches (numpy's zeros come so, torch's do not), and one tile at their far end is
computed; the kernels are launched without their wrappers, which would allocate and fill whole outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from implementations.sonicmoe_triton.contiguous_gemm import down_projection_kernel, input_gradient_kernel
from implementations.sonicmoe_triton.hidden_gradient import SLICE, hidden_gradient_kernel
from implementations.sonicmoe_triton.up_projection import up_projection_kernel
from implementations.sonicmoe_triton.weight_gradient import down_weight_gradient_kernel, up_weight_gradient_kernel

from . import grouped_cases as cases

WIDTH, NARROW = 1024, 16
ROWS = 2**31 // WIDTH + 40
OWN = 5  # rows of the only tile, the last of all
HALF = torch.float16
#: A grouped GEMM's options: tiles of 16 x 256, one program.
GEMM: dict[str, Any] = {"PRECISION": "tf32", "BM": 16, "BN": 256, "BK": 16, "PROGRAMS": 1}


def untouched(*shape: int, dtype: Any = np.float16) -> Tensor:
    try:
        return torch.from_numpy(np.zeros(shape, dtype))
    except MemoryError:
        pytest.skip("4 GiB of address space are not to be had")


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def last_tile() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """tile_expert, tile_row, expert_offsets, num_tiles."""
    return integers(0), integers(ROWS - OWN), integers(0, ROWS), integers(1)


def narrow_rows() -> Tensor:
    rows = untouched(ROWS, NARROW)
    rows[-OWN:] = cases.random(OWN, NARROW, dtype=HALF)
    return rows


def boxes(tensor: Tensor, *sides: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, list(sides))


def test_up_projection() -> None:
    n = WIDTH // 2
    x, w1 = cases.random(1, NARROW, dtype=HALF), cases.random(2, n, NARROW, dtype=HALF)
    h, a, gather = untouched(ROWS, WIDTH), untouched(ROWS, n), untouched(ROWS, dtype=np.int32)
    up_projection_kernel[(1,)](
        x, boxes(w1, 2, 128, 16), x, h, a, gather, *last_tile(),
        D=NARROW, N=n, HALVES=2, ACTIVATION="swiglu", HAS_BIAS=False, FLATTEN=False, **GEMM,
    )  # fmt: skip
    want = (x.float() @ w1.float().flatten(0, 1).T).expand(OWN, WIDTH)
    cases.assert_close(h[-OWN:], want, HALF)
    cases.assert_close(a[-OWN:], cases.activation(want, "swiglu"), HALF)
    assert not h[-OWN - 1].any()


def test_hidden_gradient() -> None:
    n = WIDTH // 2
    grad_out, w2 = cases.random(1, NARROW, dtype=HALF), cases.random(1, NARROW, n, dtype=HALF)
    h, grad_h, a = untouched(ROWS, WIDTH), untouched(ROWS, WIDTH), untouched(ROWS, n)
    h[-OWN:] = cases.random(OWN, WIDTH, dtype=HALF)
    scores, partial, gather = torch.ones(ROWS), untouched(2, ROWS, dtype=np.float32), untouched(ROWS, dtype=np.int32)
    hidden_gradient_kernel[(1,)](
        grad_out, boxes(w2, 1, 16, 256), h, scores, grad_h, a, partial, gather, *last_tile(), ROWS,
        D=NARROW, N=n, HALVES=2, ACTIVATION="swiglu", SLICE=SLICE, FLATTEN=False, **GEMM,
    )  # fmt: skip
    leaf = h[-OWN:].float().requires_grad_()
    gate, up = leaf.chunk(2, dim=1)
    grad_a = (grad_out.float() @ w2[0].float()).expand(OWN, n)
    (want,) = torch.autograd.grad(F.silu(gate) * up, leaf, grad_a)
    cases.assert_close(grad_h[-OWN:], want, HALF)
    cases.assert_close(partial[:, -OWN:].sum(0), (grad_a * F.silu(gate) * up).sum(1).detach(), HALF)


def test_contiguous_gemms() -> None:
    rows, out = narrow_rows(), untouched(ROWS, WIDTH)
    w2 = cases.random(1, WIDTH, NARROW, dtype=HALF)
    down_projection_kernel[(1,)](
        boxes(rows, 16, 16), boxes(w2, 1, 256, 16), out, out, *last_tile(),
        D=WIDTH, N=NARROW, HAS_BIAS=False, FLATTEN=False, **GEMM,
    )  # fmt: skip
    cases.assert_close(out[-OWN:], rows[-OWN:].float() @ w2[0].float().T, HALF)
    w1 = cases.random(1, NARROW, WIDTH, dtype=HALF)
    input_gradient_kernel[(1,)](
        boxes(rows, 16, 16), boxes(w1, 1, 16, 256), out, out, out, *last_tile(),
        D=WIDTH, K=NARROW, ROUTED=False, FLATTEN=False, **GEMM,
    )  # fmt: skip
    cases.assert_close(out[-OWN:], rows[-OWN:].float() @ w1[0].float(), HALF)


def test_weight_gradients() -> None:
    rows, x = narrow_rows(), untouched(ROWS, WIDTH)  # x: ROWS tokens, each with its own row
    x[-OWN:] = cases.random(OWN, WIDTH, dtype=HALF)
    gather, offsets = torch.arange(ROWS, dtype=torch.int32), integers(ROWS - OWN, ROWS)
    want = rows[-OWN:].float().T @ x[-OWN:].float()
    grad_w1 = torch.empty(1, NARROW, WIDTH, dtype=HALF)
    up_weight_gradient_kernel[(1,)](
        boxes(rows, 16, 16), x, boxes(grad_w1, 1, 16, 256), gather, offsets, E=1, M=NARROW, D=WIDTH, **GEMM
    )
    cases.assert_close(grad_w1[0], want, HALF)
    grad_w2 = torch.empty(1, WIDTH, NARROW, dtype=HALF)
    down_weight_gradient_kernel[(1,)](
        x, boxes(rows, 16, 16), boxes(grad_w2, 1, 256, 16), gather, offsets, E=1, D=WIDTH, N=NARROW,
        **(GEMM | {"BM": 256, "BN": 16}),
    )  # fmt: skip
    cases.assert_close(grad_w2[0], want.T, HALF)

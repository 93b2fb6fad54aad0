"""The interpreter as these tests run it computes what Triton's own computes."""

from __future__ import annotations

import numpy
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from implementations.sonicmoe_triton import function

from .grouped_cases import random
from .quicker import ORIGINALS


def test_halves_are_divided_in_single_precision() -> None:
    """Alike as they are: operands are promoted for what the operation is."""
    semantic = TritonSemantic(interpreter.interpreter_builder)
    half = tl.tensor(interpreter.TensorHandle(numpy.ones(4, numpy.float16), tl.float16), tl.block_type(tl.float16, [4]))
    for rules, named in (((False, False, True, True), {}), ((), {"div_or_mod": True})):
        operands = semantic.binary_op_type_checking_impl(half, half, *rules, **named)
        assert [its.dtype for its in operands] == [tl.float32] * 2
    assert all(its is half for its in semantic.binary_op_type_checking_impl(half, half))


def outputs_and_gradients() -> list[Tensor]:
    """Of a layer with token rounding: all kinds of operations, sorts and reductions by device functions among them."""
    leaves = [random(*size).requires_grad_() for size in ((20, 16), (4, 16, 16), (4, 16, 8), (4, 16))]
    out, told = function.rounded_moe_layer(*leaves, 2, 8)
    return [out.detach(), told.counts, *torch.autograd.grad(out.square().sum(), leaves)]


def test_every_bit_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found = outputs_and_gradients()
    for place, name, original in ORIGINALS:
        assert getattr(place, name) is not original
        monkeypatch.setattr(place, name, original)
    assert all(torch.equal(a, b) for a, b in zip(found, outputs_and_gradients(), strict=True))

"""Its backward raises."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.interface import Layer, Problem

from ._base import FakeBase, RightLayer


class _Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("no backward kernel for this shape")


class _Layer(RightLayer):
    def forward(self, x: Tensor) -> Tensor:
        return _Refuses.apply(super().forward(x))


class FakeBackwardRaises(FakeBase):
    name = "fake_backward_raises"

    def build(self, problem: Problem) -> Layer:
        return _Layer(problem)

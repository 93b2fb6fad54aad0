"""Its output is ten per cent too large."""

from __future__ import annotations

from torch import Tensor

from harness.interface import Layer, Problem

from ._base import FakeBase, RightLayer


class _WrongLayer(RightLayer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.1


class FakeWrong(FakeBase):
    name = "fake_wrong"

    def build(self, problem: Problem) -> Layer:
        return _WrongLayer(problem)

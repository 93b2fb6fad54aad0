"""Its build never ends where there are more than eight tokens."""

from __future__ import annotations

import time

from harness.interface import Layer, Problem

from ._base import FakeBase, RightLayer


class FakeHangs(FakeBase):
    name = "fake_hangs"

    def build(self, problem: Problem) -> Layer:
        if problem.shape.T <= 8:
            return RightLayer(problem)
        time.sleep(3600)
        raise AssertionError

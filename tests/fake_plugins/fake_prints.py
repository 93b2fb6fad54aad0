"""It prints ten megabytes and is right."""

from __future__ import annotations

import sys

from harness.interface import Layer, Problem

from ._base import FakeBase, RightLayer


class FakePrints(FakeBase):
    name = "fake_prints"

    def build(self, problem: Problem) -> Layer:
        for stream in (sys.stdout, sys.stderr):
            stream.write(("x" * 99 + "\n") * 50_000)
        return RightLayer(problem)

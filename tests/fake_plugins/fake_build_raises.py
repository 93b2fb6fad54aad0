"""Its build raises."""

from __future__ import annotations

from harness.interface import Layer, Problem

from ._base import FakeBase


class FakeBuildRaises(FakeBase):
    name = "fake_build_raises"

    def build(self, problem: Problem) -> Layer:
        raise RuntimeError("no layout for these weights\nsecond line")

"""It runs out of memory."""

from __future__ import annotations

from harness.interface import Layer, Problem

from ._base import FakeBase


class FakeMemoryError(FakeBase):
    name = "fake_memory_error"

    def build(self, problem: Problem) -> Layer:
        raise MemoryError("a buffer of 3 TiB")

"""Its build never ends."""

from __future__ import annotations

import time

from harness.interface import Layer, Problem

from ._base import FakeBase


class FakeHangs(FakeBase):
    name = "fake_hangs"

    def build(self, problem: Problem) -> Layer:
        time.sleep(3600)
        raise AssertionError

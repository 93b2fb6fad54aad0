"""It takes its process down."""

from __future__ import annotations

import os
import signal

from harness.interface import Layer, Problem

from ._base import FakeBase


class FakeSegfault(FakeBase):
    name = "fake_segfault"

    def build(self, problem: Problem) -> Layer:
        print("about to touch address zero", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
        raise AssertionError

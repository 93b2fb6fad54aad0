"""It leaves a process behind and is right."""

from __future__ import annotations

import subprocess

from harness.interface import Layer, Problem

from ._base import FakeBase, RightLayer


class FakeLeavesChild(FakeBase):
    name = "fake_leaves_child"

    def build(self, problem: Problem) -> Layer:
        subprocess.Popen(["sleep", "3600"])
        return RightLayer(problem)

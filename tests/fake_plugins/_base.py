"""A right layer (the template's) and a plugin around it, for plugins that fail in one way each."""

from __future__ import annotations

from harness.interface import Implementation, Layer, Problem
from implementations._template import _TemplateLayer as RightLayer


class FakeBase(Implementation):
    name, label, upstream, licence = "fake_base", "Fake", "none", "none"
    devices, dtypes = ("cpu",), ("float32", "bfloat16")

    def build(self, problem: Problem) -> Layer:
        return RightLayer(problem)

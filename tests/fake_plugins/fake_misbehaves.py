"""It misbehaves in another way for each number of tokens: one plugin, so that all of its points share workers."""

from __future__ import annotations

from harness.interface import Layer, Problem

from ._base import FakeBase, RightLayer
from ._misconduct import MISCONDUCT
from ._wrong_layers import WRONG

#: In the order of their tokens: 9, 11, 13 and so on. With an even number it is right.
MISBEHAVIOURS = {**WRONG, **MISCONDUCT}
FIRST = 9


def tokens_of(name: str) -> int:
    return FIRST + 2 * list(MISBEHAVIOURS).index(name)


class FakeMisbehaves(FakeBase):
    name = "fake_misbehaves"

    def build(self, problem: Problem) -> Layer:
        if problem.shape.T % 2 == 0:
            return RightLayer(problem)
        return list(MISBEHAVIOURS.values())[(problem.shape.T - FIRST) // 2](problem)

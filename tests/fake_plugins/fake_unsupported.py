"""It takes tiny widths only."""

from __future__ import annotations

from harness.interface import Point

from ._base import FakeBase


class FakeUnsupported(FakeBase):
    name = "fake_unsupported"

    def restriction(self, point: Point) -> str | None:
        return f"it takes d of at most 8, not d={point.shape.d}" if point.shape.d > 8 else None

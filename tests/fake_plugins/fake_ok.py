"""Nothing is wrong with it."""

from __future__ import annotations

from ._base import FakeBase


class FakeOk(FakeBase):
    name = "fake_ok"

"""Its package is not installed."""

from __future__ import annotations

from typing import ClassVar

from ._base import FakeBase


class FakeMissingPackage(FakeBase):
    name = "fake_missing_package"
    requires: ClassVar[dict[str, str]] = {"moebench_no_such_module": "pip install no-such-thing"}

"""It dies, and leaves a process behind with its own session, no living parent and all of the worker's descriptors."""

from __future__ import annotations

import os
import time

from harness.interface import Layer, Problem

from ._base import FakeBase


class FakeLeavesDaemon(FakeBase):
    name = "fake_leaves_daemon"

    def build(self, problem: Problem) -> Layer:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(3600)
            os._exit(0)
        os.wait()
        os._exit(3)

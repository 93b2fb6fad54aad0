"""A run that must end in time: on a machine that is rented by the hour, or under a scheduler's limit."""

from __future__ import annotations

import re
import threading
import time

from harness.errors import UserError

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


class Deadline:
    """Says whether a job still fits into the time that is left, by its estimate and by how long earlier jobs took
    beside theirs. Several threads may ask.

    Args:
        seconds: from now on; at least 0.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._estimated = 0.0
        self._taken = 0.0

    @classmethod
    def of(cls, option: str, text: str) -> Deadline | None:
        """From an option's text, such as ``90s``, ``25m`` or ``1.5h`` (a bare number: seconds); None where it is empty.

        Raises:
            UserError: it is no length of time, or 0.
        """
        if not text:
            return None
        match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{0,9})?) ?([a-z]*)", text.strip(), re.ASCII)
        if match is None or match[2] not in _UNITS or not float(match[1]):
            raise UserError(f"{option} {text}: expected a length of time such as 90s, 25m or 1.5h")
        return cls(float(match[1]) * _UNITS[match[2]])

    def left_s(self) -> float:
        """Seconds until then; negative once they are over."""
        return self._end - time.monotonic()

    def fits(self, estimate_s: float) -> bool:
        """Whether a job that is thought to take so long ends in time, if it exceeds its estimate as those before it
        did."""
        with self._lock:
            # What builds and compiles is in no estimate: until some jobs have ended, none is trusted to be shorter.
            slower = max(1.0, self._taken / self._estimated) if self._estimated else 1.0
        return estimate_s * slower <= self.left_s()

    def took(self, estimate_s: float, seconds: float) -> None:
        """Learn from a job that has ended."""
        with self._lock:
            self._estimated += estimate_s
            self._taken += seconds

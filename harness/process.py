"""One worker process: start it, send a job, read its events until a deadline, end it with all its children."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

#: Seconds that a worker may take to import torch and the plugins.
START_LIMIT_S = 180.0
#: The longest wait that no signal's handler interrupts.
WAIT_SLICE_S = 0.2


class WorkerDied(Exception):
    """The worker ended without finishing its job. ``exit_code`` is negative for a signal."""

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(f"worker ended with code {exit_code}")
        self.exit_code = exit_code


class WorkerTimeout(Exception):
    """The worker did not finish its job in time."""


class WorkerStartError(Exception):
    """The worker did not come up; the message holds what it printed last."""


class WorkerProcess:
    """A `harness.worker` in its own process group, its output in a temporary file."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """
        Args:
            environment: variables beside this process's own.
        """
        self._log = tempfile.TemporaryFile()
        read, write = os.pipe()
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.worker", "--events", str(write)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(write,),
            start_new_session=True,
            env={**os.environ, "PYTHONFAULTHANDLER": "1", **(environment or {})},
        )
        os.close(write)
        self._events = read
        self._selector = selectors.DefaultSelector()
        self._selector.register(read, selectors.EVENT_READ)
        self._buffer = b""
        self.phase = "start"
        self._job_start = 0
        try:
            self._wait_ready()
        except (WorkerDied, WorkerTimeout) as error:
            tail = self.log_tail(lines=3)
            self.close(patience_s=0.0)
            raise WorkerStartError(f"{str(error) or 'no answer'}: {tail}") from error
        except BaseException:  # Ctrl-C while it starts: nobody else could end it
            self.close(patience_s=0.0)
            raise
        self.start_s = time.perf_counter() - started

    def _wait_ready(self) -> None:
        for event in self._read(time.monotonic() + START_LIMIT_S):
            if event["event"] == "ready":
                return

    def _read(self, deadline: float) -> Iterator[dict[str, Any]]:
        while True:
            while b"\n" in self._buffer:
                line, self._buffer = self._buffer.split(b"\n", 1)
                yield json.loads(line)
            left = deadline - time.monotonic()
            # In slices: a signal that arrives just before the wait begins, or in another thread, does not end it, and
            # its handler runs only between two of them.
            if left <= 0 or not self._selector.select(min(left, WAIT_SLICE_S)):
                if time.monotonic() >= deadline:
                    raise WorkerTimeout
                continue
            chunk = os.read(self._events, 1 << 16)
            if not chunk:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=30)
                raise WorkerDied(self._process.poll())
            self._buffer += chunk

    def run(self, job: dict[str, Any], limit_s: float) -> Iterator[dict[str, Any]]:
        """Send a job and yield its events, ``done`` last.

        Raises:
            WorkerDied, WorkerTimeout: the job did not finish; rows yielded so far are good.
        """
        self._job_start = os.fstat(self._log.fileno()).st_size
        self.phase = "start"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerDied(self._process.poll()) from None
        for event in self._read(time.monotonic() + limit_s):
            if event["event"] == "phase":
                self.phase = event["name"]
            yield event
            if event["event"] == "done":
                return

    def log_tail(self, lines: int = 12, limit: int = 1500) -> str:
        """The last lines that the current job printed."""
        size = os.fstat(self._log.fileno()).st_size
        start = max(self._job_start, size - 16384)
        text = os.pread(self._log.fileno(), size - start, start).decode(errors="replace")
        # Of a fault handler's report the list of extension modules would push out all that matters.
        told = [line for line in text.splitlines() if line.strip() and not line.startswith("Extension modules:")]
        return "\n".join(told[-lines:])[-limit:]

    def kill(self) -> None:
        """End the whole process group now; a thread that reads its events gets `WorkerDied`."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self, patience_s: float = 5.0) -> None:
        """End the worker: politely where ``patience_s`` allows, then with its whole process group."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        if patience_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=patience_s)
        # The group outlives its leader where a plugin left a child behind.
        self.kill()
        self._process.wait()
        self._selector.close()
        os.close(self._events)
        self._log.close()


def describe_exit(exit_code: int | None) -> str:
    """``ended by signal SIGSEGV`` or ``exit code 3``."""
    if exit_code is not None and exit_code < 0:
        try:
            return f"ended by signal {signal.Signals(-exit_code).name}"
        except ValueError:
            return f"ended by signal {-exit_code}"
    return f"exit code {exit_code}"

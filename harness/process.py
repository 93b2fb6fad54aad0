"""One worker process: start it, send a job, read its events until a deadline, end it with all that it has started."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any

from harness import descendants
from harness.errors import printable

#: Seconds that a worker may take to import torch and the plugins.
START_LIMIT_S = 180.0
#: Seconds that the system may take to end a process; one that hangs in a driver ends when the driver lets it.
END_LIMIT_S = 30.0
#: The longest wait that no signal's handler interrupts.
WAIT_SLICE_S = 0.2
#: Bytes of what workers print that are kept, and how many there may be before the rest is dropped.
LOG_KEPT, LOG_LIMIT = 1 << 16, 1 << 26


class WorkerDied(Exception):
    """The worker ended without finishing its job.

    Attributes:
        exit_code: negative for a signal; None where it has not ended but cannot be understood.
        status: of the rows that this leaves without numbers: ``out_of_memory`` or ``crashed``.
        how: how it ended, in words.
    """

    def __init__(self, exit_code: int | None, out_of_memory: bool = False, how: str = "") -> None:
        self.exit_code = exit_code
        self.status = "out_of_memory" if out_of_memory else "crashed"
        self.how = how or describe_exit(exit_code)
        if out_of_memory:
            self.how += ": the host's memory was used up"
        elif exit_code == -signal.SIGKILL:
            self.how += ", which comes from outside: a batch system, a person, a kernel short of memory"
        super().__init__(f"worker died: {self.how}")


class WorkerTimeout(Exception):
    """The worker did not finish its job in time."""


class WorkerStopped(Exception):
    """The run ends: whoever waits for the worker is to give up, without a word about its job."""


class WorkerStartError(Exception):
    """The worker did not come up; the message holds what it printed last."""


class WorkerProcess:
    """A `harness.worker` in its own session, its output in a temporary file."""

    def __init__(self, environment: Mapping[str, str] | None = None, stop: threading.Event | None = None) -> None:
        """
        Args:
            environment: variables that the worker gets beside those of this process.
            stop: once set, whoever waits for the worker gets `WorkerStopped`.
        """
        self._mark = uuid.uuid4().hex
        self._stop = stop
        started = time.perf_counter()
        try:
            self._start(environment or {})
        except OSError as error:
            raise WorkerStartError(f"the system refuses: {error}") from error
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._events, selectors.EVENT_READ)
        self._buffer = b""
        self.phase = "start"
        #: Whether a tuner in it has taken its first configuration untimed (`harness.tuners`), in whichever job.
        self.untuned = False
        self._served = 0
        self._job_start = 0
        self._oom_kills = oom_kills()
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

    def _start(self, environment: Mapping[str, str]) -> None:
        with contextlib.ExitStack() as undo:
            self._log = undo.enter_context(log_file())
            self._events, write = os.pipe()
            undo.callback(os.close, self._events)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "harness.worker", "--events", str(write)],
                    stdin=subprocess.PIPE,
                    stdout=self._log,
                    stderr=self._log,
                    pass_fds=(write,),
                    start_new_session=True,
                    env={**os.environ, "PYTHONFAULTHANDLER": "1", **environment, descendants.MARK_VARIABLE: self._mark},
                )
            finally:
                os.close(write)
            undo.pop_all()

    def _wait_ready(self) -> None:
        for event in self._read(time.monotonic() + START_LIMIT_S):
            if event["event"] == "ready":
                return

    def _read(self, deadline: float) -> Iterator[dict[str, Any]]:
        while True:
            while b"\n" in self._buffer:
                line, self._buffer = self._buffer.split(b"\n", 1)
                yield self._event(line)
            if self._stop is not None and self._stop.is_set():
                raise WorkerStopped
            self._cut_log()
            left = deadline - time.monotonic()
            # In slices: a signal that arrives just before the wait begins, or in another thread, does not end it, and
            # its handler runs only between two of them.
            if left <= 0 or not self._selector.select(min(left, WAIT_SLICE_S)):
                # A process that the plugin has left may hold the pipe open, so that its end never comes.
                if self._process.poll() is not None and not self._selector.select(0):
                    raise self._death()
                if time.monotonic() >= deadline:
                    raise WorkerTimeout
                continue
            chunk = os.read(self._events, 1 << 16)
            if not chunk:
                raise self._death()
            self._buffer += chunk

    def _event(self, line: bytes) -> dict[str, Any]:
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not (isinstance(event, dict) and isinstance(event.get("event"), str)):
            # A plugin that writes to descriptors which are not its own.
            told = printable(line[:60].decode(errors="replace"))
            raise WorkerDied(None, how=f"where the harness expects an event it wrote: {told}")
        return event

    def _death(self) -> WorkerDied:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=END_LIMIT_S)
        code = self._process.poll()
        killed = code == -signal.SIGKILL
        return WorkerDied(code, out_of_memory=killed and oom_kills() > self._oom_kills)

    @property
    def died_before_job(self) -> bool:
        """Of a worker that has died: did it do so after an earlier job, before the current one had begun?"""
        return self._served > 0 and self.phase == "start"

    def run(self, job: dict[str, Any], limit_s: float) -> Iterator[dict[str, Any]]:
        """Send a job and yield its events, ``done`` last.

        Raises:
            WorkerDied, WorkerTimeout: the job did not finish; rows yielded so far are good.
            WorkerStopped: the run ends.
        """
        self._job_start = os.fstat(self._log.fileno()).st_size
        self._oom_kills = oom_kills()
        self.phase = "start"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None
        for event in self._read(time.monotonic() + limit_s):
            if event["event"] == "phase":
                self.phase = event["name"]
            if event["event"] == "first_configuration":
                self.untuned = True
                continue
            # Before the caller has it, who may not come back for more.
            self._served += event["event"] == "done"
            yield event
            if event["event"] == "done":
                return

    def _cut_log(self) -> None:
        """Forget the beginning of what was printed, before it fills the disk."""
        size = os.fstat(self._log.fileno()).st_size
        if size > LOG_LIMIT:
            tail = os.pread(self._log.fileno(), LOG_KEPT, size - LOG_KEPT)
            os.ftruncate(self._log.fileno(), 0)
            self._log.write(tail)
            self._job_start = 0

    def log_tail(self, lines: int = 12, limit: int = 1500) -> str:
        """The last lines that the current job printed; of a fault handler's report its beginning, which names the fault
        and the innermost calls, and what came right before."""
        size = os.fstat(self._log.fileno()).st_size
        start = max(self._job_start, size - 16384)
        text = printable(os.pread(self._log.fileno(), size - start, start).decode(errors="replace"))
        # What was printed before need not have ended its line.
        text = text.replace("Fatal Python error", "\nFatal Python error")
        # Of a fault handler's report the list of extension modules would push out all that matters.
        told = [line for line in text.splitlines() if line.strip() and not line.startswith("Extension modules:")]
        faults = [i for i, line in enumerate(told) if line.startswith("Fatal Python error")]
        if faults and len(told) - faults[-1] > lines - 2:
            told = told[: faults[-1] + lines - 2]
        return "\n".join(line[-limit // 2 :] for line in told[-lines:])[-limit:]

    def where(self, lines: int = 8) -> str:
        """Where a worker that does not answer is: its main thread's stack, the innermost call first; empty where it
        does not say within a second."""
        start = size = os.fstat(self._log.fileno()).st_size
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            time.sleep(0.05)
            last, size = size, os.fstat(self._log.fileno()).st_size
            if start < last == size:
                break
        text = printable(os.pread(self._log.fileno(), min(size - start, LOG_KEPT), start).decode(errors="replace"))
        return "\n".join([line for line in text.splitlines() if line.startswith("  File ")][:lines])

    def failure(self, error: WorkerTimeout | WorkerDied, limit_s: float) -> tuple[str, str]:
        """Status and reason of what `run` left without numbers, with where it hung or what it printed last."""
        if isinstance(error, WorkerTimeout):
            status, reason = "timeout", f"not finished after {limit_s:g} s, while in {self.phase}"
            more = self.where()
        else:
            status, reason = error.status, f"the worker died while in {self.phase} ({error.how})"
            more = self.log_tail()
        return status, f"{reason}\n{more}" if more else reason

    def close(self, patience_s: float = 5.0) -> None:
        """End the worker, politely where ``patience_s`` allows, and then everything that it has started."""
        # Also before it knows: once it has ended, nothing leads from it to a child without its environment and session.
        started = descendants.find(self._process.pid, self._mark)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        if patience_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=patience_s)
        started |= descendants.find(self._process.pid, self._mark, started)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=END_LIMIT_S)
        descendants.end(self._process.pid, self._mark, started)
        self._selector.close()
        os.close(self._events)
        self._log.close()


def side_by_side(work: Sequence[Callable[[], None]], threads: int, stop: threading.Event) -> None:
    """Do work that waits for worker processes in so many threads.

    The first exception (Ctrl-C, a full disk) sets ``stop``, which ends every wait for a worker that was given it, and
    is raised once all threads have ended. A worker dies with the thread that has started it: each piece of work starts
    and ends its own.
    """
    with ThreadPoolExecutor(threads, "worker") as pool:
        left = {pool.submit(one) for one in work}
        try:
            while left:
                # In slices: a signal's handler runs only between two of them.
                ended, left = wait(left, WAIT_SLICE_S, FIRST_EXCEPTION)
                for future in ended:
                    future.result()
        except BaseException:
            stop.set()
            for future in left:
                future.cancel()
            raise


def log_file() -> IO[bytes]:
    """A file without a name for what a worker prints, by descriptors that all write at its end: so they go on there
    after it has been cut."""
    file = tempfile.TemporaryFile(buffering=0)
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file


def oom_kills() -> int:
    """How many processes of this machine the kernel has ended so far for want of memory; 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def describe_exit(exit_code: int | None) -> str:
    """``ended by signal SIGSEGV`` or ``exit code 3``."""
    if exit_code is None:
        return "no exit code"
    if exit_code < 0:
        try:
            return f"ended by signal {signal.Signals(-exit_code).name}"
        except ValueError:
            return f"ended by signal {-exit_code}"
    return f"exit code {exit_code}"

"""Where nothing is timed, kernels' tuners take their first configuration that runs, instead of timing all of them.

Which configuration is fastest tells nothing there, and to compile up to hundreds of them at each new shape takes
minutes. A result is judged all the same, of that configuration; what a tuner chooses when it may is judged where it is
timed, for every timed row passes the gate with the choice that it was timed with. And nobody is blamed for a
configuration that its tuner may not choose: where a result is wrong, or a kernel crashes, whoever asked asks again in a
process whose tuners choose (`tuners_choose`).
"""

from __future__ import annotations

import enum
import functools
import importlib
import math
import re
from collections.abc import Callable
from typing import Any

#: Precedes what became of a point with what its kernels' tuners took untimed.
FIRST_CONFIGURATION = "with the first configuration that its tuners offer"
#: Begins the note of an outcome that is of what they chose, after it was none with the first.
OWN_CHOICE = "of its tuners' own choice"
#: Where the choices are from that quack's tuner finds on a machine: made at some time, beside who knows what.
QUACK_CACHE = "the machine's quack cache"
#: GEMMs of the official layer, each of which has tiles to choose.
GEMMS = 6
_TILES = re.compile(rf"tiles of the six GEMMs: (\d+) tuned while building, the others from {QUACK_CACHE}")
#: Outcomes that a tuner's choice may be the reason for.
OF_A_CHOICE = ("wrong", "wrong_result", "crashed")


def tiles_note(tuned: int, source: object) -> str:
    """A sentence for a row on the official layer's tiles: how many were tuned while it was built, and where the others
    are from."""
    return f"tiles of the six GEMMs: {tuned} tuned while building, the others from {source}"


def tiles_found(note: str) -> bool:
    """Does a `tiles_note` say that tiles were found on the machine? A process that had built other layers before may
    count more than `GEMMS`."""
    said = _TILES.fullmatch(note)
    return said is not None and int(said[1]) < GEMMS


class _Mode(enum.Enum):
    """What tuners of this process do."""

    TIME = "as ever"
    FIRST = "take their first configuration that runs"
    EVERY = "launch each once, and take any"
    OWN = "choose as ever, and keep it to themselves"


_mode = _Mode.TIME
_taken: Callable[[], None] | None = None
#: Choices that Triton's tuner has found on disk since `watch_found`.
_found = 0


def nothing_is_timed(taken: Callable[[], None] | None = None) -> None:
    """Say so of this process, for good: what its tuners have taken stays in their memory, so that it must time nothing
    any more. Triton's tuner is told at once.

    Args:
        taken: called whenever a tuner takes one of several configurations untimed, before the kernel is used with it;
            in whatever thread launches the kernel. What it raises the kernel's caller gets.
    """
    _tell(_Mode.FIRST, taken)


def all_is_compiled() -> None:
    """`nothing_is_timed`, but for Triton's tuner: it launches each configuration once, so that all are compiled for the
    next process, and takes any."""
    _tell(_Mode.EVERY)


def tuners_choose() -> None:
    """Nothing is timed but by tuners, which choose as they always do. What they find on a machine that others use too
    is on no disk either."""
    _tell(_Mode.OWN)


def _tell(mode: _Mode, taken: Callable[[], None] | None = None) -> None:
    global _mode, _taken
    _mode, _taken = mode, taken
    take_first("triton.runtime.autotuner")


def untimed() -> bool:
    """Was any of these said of this process?"""
    return _mode is not _Mode.TIME


def take_first(module: str) -> bool:
    """Where nothing is timed, let this module's class ``Autotuner``, Triton's or one modelled on it, take its first
    configuration that runs (or do what else was said of this process). Imports the module; does nothing where something
    may be timed.

    Returns:
        Whether it chooses nothing by time from now on. False as well where there is no such class: then it tunes as it
        always does.
    """
    if not untimed():
        return False
    try:
        tuner = importlib.import_module(module).Autotuner
    except (ImportError, AttributeError):
        return False
    return _patch(tuner) and _mode is not _Mode.OWN


def _patch(tuner: Any) -> bool:
    prune, bench = (getattr(tuner, name, None) for name in ("prune_configs", "_bench"))
    if not callable(prune) or not callable(bench):
        return False
    if not hasattr(prune, "takes_first"):
        tuner.prune_configs = _first_that_runs(prune)
    return True


def _first_that_runs(prune: Any) -> Any:
    """In place of the method that tells a tuner, before it times them, which configurations there are for this call."""

    @functools.wraps(prune)
    def pruned(self: Any, kwargs: dict[str, Any]) -> Any:
        configs = prune(self, kwargs)
        arguments = getattr(self, "nargs", None)
        # Triton's `warmup` asks too, which compiles and must run nothing; only a call says ``warmup=False``.
        compiles = hasattr(self, "warmup") and "warmup" not in kwargs
        if arguments is None or compiles:
            return configs
        # The choice must be on no disk: neither tuned runs nor a table of what was tuned may find it there.
        self.cache_results = False
        if _mode is _Mode.EVERY and "do_bench" in dir(self):
            self.do_bench = _launch_once
        elif _mode is not _Mode.OWN and len(configs) > 1:
            if _taken is not None:
                _taken()
            for config in configs:
                if _ran(self._bench(*arguments.values(), config=config, **kwargs)):
                    return [config]
        return configs

    vars(pruned)["takes_first"] = True
    return pruned


def _launch_once(call: Callable[[], Any], quantiles: Any = None, **_: Any) -> Any:
    """In place of a function that times launches."""
    call()
    return [1.0] * len(quantiles) if quantiles else 1.0


def _ran(times: Any) -> bool:
    """Times in ms, one or several; a configuration that cannot run takes infinitely long."""
    return math.isfinite(times[0] if isinstance(times, (list, tuple)) else times)


def watch_found() -> None:
    """Count in this process, from now on, what Triton's tuner finds in its cache on disk, where another process left it
    (``TRITON_CACHE_AUTOTUNING=1``, or a kernel that asks for it). Imports that tuner; does nothing where there is none.
    """
    try:
        tuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    except Exception:  # of a Triton that is broken, who needs it will tell
        return
    check = getattr(tuner, "check_disk_cache", None)
    if callable(check) and not hasattr(check, "counts_found"):
        tuner.check_disk_cache = _counting(check)


def _counting(check: Any) -> Any:
    @functools.wraps(check)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _found
        found = check(self, *args, **kwargs)
        _found += found is True
        return found

    vars(checked)["counts_found"] = True
    return checked


def found_note() -> str:
    """A sentence for a row on the choices that were not made in this process; empty where all were. It counts those of
    earlier points too: what is in the process's memory is not looked for again."""
    if not _found:
        return ""
    choices = "1 choice" if _found == 1 else f"{_found} choices"
    return f"{choices} of Triton's tuner found on the machine by this process, not made in it"

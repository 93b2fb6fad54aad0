"""The GPU's busy time of training steps, with a made-up profiler: what rows and ratios of it say, and where there is
none."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from test_profiling_timing import Event, markers
from torch import Tensor
from training_runs import train

from harness import store
from harness.errors import UserError
from harness.record import Row
from harness.training import data, log, loop, pairs, profiled, rows
from harness.training.processes import Place

CommandLine = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("one_process")
#: What the run's turns find: milliseconds of each step, or what goes wrong.
Turns = list[list[float] | Exception]
BUSY = [3.0, 1.0, 2.0]
LOST = RuntimeError("lost")
NO_MEMORY = "CUDA out of memory. Tried to allocate 2 GiB"


@contextmanager
def window(name: str, order: list[str]) -> Iterator[None]:
    order.append(name)
    yield


def events(busy_ms: list[float]) -> list[Event]:
    """Of windows ten seconds apart: kernels over each other, idleness, and one outside."""
    found = [Event("outside", 1, 500)]
    for i, ms in enumerate(busy_ms, 1):
        start, half = i * 10**10, int(ms * 5e5)
        found += markers(start, start + 3 * half)
        found += [Event("gemm", start, half), Event("norm", start + half // 2, half // 2)]
        found += [Event("Memset (Device)", start + 2 * half, half)] if half else []
    return found


@pytest.fixture
def profiles(monkeypatch: pytest.MonkeyPatch) -> Callable[[Turns], None]:
    """A GPU that says what it is told to, turn by turn."""

    def on_a_gpu(*arguments: Any) -> dict[str, Any]:
        row = base_row(*arguments)
        environment = {**row["environment"], "gpu": "NVIDIA H200", "measured_on": "cuda"}
        return {**row, "measured_on": "cuda", "environment": environment}

    def says(turns: Turns) -> None:
        left = iter(turns)

        def profile(run: Callable[[], None]) -> list[Event]:
            run()
            its = next(left)
            if its is LOST:
                return [event for event in events(BUSY) if event.start < 3 * 10**10 - 10]
            if isinstance(its, Exception):
                raise its
            return events(its)

        monkeypatch.setattr(profiled, "profile", profile)

    base_row = rows.base_row
    monkeypatch.setattr(rows, "base_row", on_a_gpu)
    monkeypatch.setattr(profiled, "sees_busy", lambda _: True)
    monkeypatch.setattr(profiled, "window", window)
    return says


def stored(folder: Path) -> list[Row]:
    found, problems = store.read(folder / rows.FILE)
    assert not problems
    return found


def in_turns(command_line: CommandLine, folder: Path) -> tuple[list[Row], str]:
    """PyTorch's loop over our algorithm in PyTorch, two rounds: the rows, and what was said at the end."""
    arguments = ("tiny", "--against", "torch_loop", "--rounds", 2, "--output", folder, "--device", "cpu")
    code, said, error = command_line("train", *arguments)
    assert code == 0 and not error
    return stored(folder), said.splitlines()[-1]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("world", [1, 2])
def test_of_several_processes_none(device: str, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where each of them trains alone."""
    monkeypatch.setattr(profiled.dist, "get_world_size", lambda: world)
    place = Place(0, 1, torch.device(device), cast(Any, None))
    assert profiled.sees_busy(place) == (device == "cuda" and world == 1)


def test_a_run_ends_with_its_busy_time(
    command_line: CommandLine, tmp_path: Path, profiles: Callable[[Turns], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    profiles([BUSY])
    taken, step = [], loop.Trainer.step

    def counted(self: loop.Trainer, number: int, counts: bool = True, batches: Any = None) -> dict[str, Any]:
        taken.append((number, counts))
        return step(self, number, counts, batches)

    monkeypatch.setattr(loop.Trainer, "step", counted)
    arguments = ("tiny", "--steps", 5, "--folder", tmp_path / "run", "--output", tmp_path, "--device", "cpu")
    code, said, _ = command_line("train", *arguments)
    [row] = stored(tmp_path)
    assert code == 0 and row["busy_ms"] == {"median": 2.0, "ci95": [1.0, 3.0], "samples": 3}
    share = 2.0 / row["latency_ms"]["median"]
    assert rows.busy_share(row) == pytest.approx(share) and f", GPU busy {100 * share:.0f} % of the step" in said
    # These steps are further ones, in no time and no curve.
    assert taken == [(0, False), (1, False), (2, False), (3, True), (4, True), (5, False), (6, False), (7, False)]
    assert row["latency_ms"]["samples"] == 2 and sum("loss" in line for line in log.read(tmp_path / "run")) == 5
    assert not any("not measured" in note for note in row["notes"])


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        (LOST, "the profiler recorded 4 of 6 window markers"),
        ([1.0, 0.0, 1.0], "the profiler recorded no kernel of a step"),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate"), "CUDA out of memory. Tried to allocate"),
        (UserError("the loss is nan at step 7"), "the loss is nan at step 7"),
    ],
)
def test_what_goes_wrong_costs_the_busy_time_alone(
    tmp_path: Path, profiles: Callable[[Turns], None], turn: Any, said: str
) -> None:
    profiles([turn])
    train(tmp_path, steps=5, checkpoint_every=0)
    [row] = stored(tmp_path)
    assert row["status"] == "ok" and "busy_ms" not in row and row["latency_ms"]["samples"] == 2
    assert f"busy times were not measured: {said}" in row["notes"]
    assert rows.busy_share(row) is None


def test_what_compiles_meanwhile_is_no_busy_time(
    tmp_path: Path, profiles: Callable[[Turns], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    profiles([BUSY])
    counter = type("Counter", (), {"since_start": lambda _: 2})
    monkeypatch.setattr(profiled, "CompilationCounter", counter)
    train(tmp_path, steps=5, checkpoint_every=0)
    [row] = stored(tmp_path)
    assert row["status"] == "ok" and "busy_ms" not in row
    assert "busy times were not measured: 2 compilations happened meanwhile" in row["notes"]


def test_a_corpus_that_ends_with_the_run(
    tmp_path: Path, profiles: Callable[[Turns], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = data.PythonText.batches

    def ends(self: data.PythonText, step: int) -> Iterator[Tensor]:
        if step >= 7:
            raise UserError("corpus python: ended; train fewer --steps")
        return batches(self, step)

    monkeypatch.setattr(data.PythonText, "batches", ends)
    profiles([])
    train(tmp_path, steps=5, checkpoint_every=0)
    [row] = stored(tmp_path)
    assert row["status"] == "ok" and "busy_ms" not in row
    assert "busy times were not measured: the corpus could not be read any further" in row["notes"]


def test_a_ratio_of_busy_times(
    command_line: CommandLine, tmp_path: Path, profiles: Callable[[Turns], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other's over this one's, of each round's medians: above 1 this one is faster. A profiler that has run may
    slow down what is launched after it: nothing is timed then."""
    profiles([])
    others = iter(([3.0, 9.0, 2.9], [4.0, 0.4, 4.1], [3.5, 3.5, 3.5]))
    of = {"torch_loop": others, "sonicmoe_torch": iter([BUSY] * pairs.BUSY_ROUNDS)}
    steps: list[bool | None] = []
    step = loop.Trainer.step

    def recorded(trainer: loop.Trainer, number: int, counts: bool = True, **more: Any) -> dict[str, Any]:
        steps.append(counts)
        return step(trainer, number, counts, **more)

    def busy_ms(trainer: loop.Trainer, number: int) -> list[float]:
        steps.append(None)
        return next(of[trainer.plugin.name])

    monkeypatch.setattr(loop.Trainer, "step", recorded)
    monkeypatch.setattr(profiled, "busy_ms", busy_ms)
    during = {"sm_clock_mhz": None, "power_w": None, "throttle_reasons": []}
    measured_row = rows.measured_row

    def with_clocks(*arguments: Any) -> dict[str, Any]:
        row = measured_row(*arguments)
        return {**row, "environment": {**row["environment"], "during_samples": during}}

    monkeypatch.setattr(rows, "measured_row", with_clocks)
    found, said = in_turns(command_line, tmp_path)
    assert steps.count(True) == 2 * 2 * pairs.STEPS and True not in steps[steps.index(None) :]
    other, ours, wall, busy = found
    assert [row["busy_ms"]["samples"] for row in (other, ours)] == [9, 9]
    assert (other["busy_ms"]["median"], ours["busy_ms"]["median"]) == (3.5, 2.0)
    assert [row["time_kind"] for row in (wall, busy)] == ["host", "busy"] and "basis" not in wall
    assert (busy["numerator"], busy["denominator"], busy["basis"]) == ("torch_loop", "sonicmoe_torch", "busy")
    assert (busy["value"], busy["ci95"], busy["samples"]) == (1.75, [1.5, 2.0], 3)
    assert not {"busy_ms", "latency_ms", "training"} & (set(wall) | set(busy))
    assert "during_samples" in wall["environment"] and "during_samples" not in busy["environment"]
    assert len(store.latest(found)) == 4
    shares = [f"{100 * row['busy_ms']['median'] / row['latency_ms']['median']:.0f} %" for row in (other, ours)]
    numbers = r"[\d.]+ \[[\d.]+, [\d.]+\]; busy times of the GPU 1\.750 \[1\.500, 2\.000\], busy "
    assert re.match(f"{numbers}{' and '.join(shares)} of the step; rows in ", said), said


def test_no_ratio_of_busy_times_where_a_turn_has_none(
    command_line: CommandLine, tmp_path: Path, profiles: Callable[[Turns], None]
) -> None:
    profiles([BUSY, LOST, BUSY, BUSY, BUSY, BUSY])
    found, said = in_turns(command_line, tmp_path)
    assert [row["record"] for row in found] == ["measurement", "measurement", "ratio"]
    assert found[2]["time_kind"] == "host" and "busy times" not in said
    # What the other turns found stays, with a note beside it.
    fewer, more = sorted(found[:2], key=lambda row: row["busy_ms"]["samples"])
    assert (fewer["busy_ms"]["samples"], more["busy_ms"]["samples"]) == (6, 9)
    assert [any(note.startswith("busy times were not measured") for note in row["notes"]) for row in (fewer, more)] == [
        True, False
    ]  # fmt: skip


def test_a_turn_that_fails_keeps_no_model_and_no_row_from_the_others(
    command_line: CommandLine, tmp_path: Path, profiles: Callable[[Turns], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models do not fit; and a GPU after an error frees nothing, but what was timed is timed."""
    profiles([])
    made: list[weakref.ref[loop.Trainer]] = []
    left: list[int] = []
    init = loop.Trainer.__init__

    def remembered(trainer: loop.Trainer, *arguments: Any) -> None:
        init(trainer, *arguments)
        made.append(weakref.ref(trainer))

    def fails(trainer: loop.Trainer, number: int) -> list[float]:
        raise torch.OutOfMemoryError(NO_MEMORY)

    def refuses(place: Place) -> None:
        left.append(sum(reference() is not None for reference in made))
        if len(made) > 4:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(loop.Trainer, "__init__", remembered)
    monkeypatch.setattr(profiled, "busy_ms", fails)
    monkeypatch.setattr(pairs, "free", refuses)
    found, _ = in_turns(command_line, tmp_path)
    assert len(left) == len(made) == 4 + 2 * pairs.BUSY_ROUNDS and set(left) == {0}
    assert [(row["record"], row["status"]) for row in found] == [
        ("measurement", "ok"), ("measurement", "ok"), ("ratio", "ok"),
    ]  # fmt: skip
    # Six times the same is one note.
    note = f"busy times were not measured: {NO_MEMORY}"
    assert [row["notes"].count(note) for row in found[:2]] == [1, 1]


def test_a_step_that_fails_costs_the_share_of_communication_alone(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(run: Callable[[], None]) -> None:
        run()
        raise torch.OutOfMemoryError(f"{NO_MEMORY}\nof 140")

    monkeypatch.setattr(profiled, "communicates", lambda _: True)
    monkeypatch.setattr(profiled, "profile", fails)
    monkeypatch.setattr(profiled, "window", window)
    code, _, error = command_line("train", "tiny", "--output", tmp_path, "--device", "cpu")
    assert code == 0 and not error
    [row] = stored(tmp_path)
    assert row["status"] == "ok" and f"communication was not measured: {NO_MEMORY} of 140" in row["notes"]
    assert row["training"].get("communication") is None


def test_communication_that_fails_takes_nothing_from_what_was_timed(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory where the profiler's own take its place, and where another process is lost."""
    failing = iter([torch.OutOfMemoryError(NO_MEMORY), RuntimeError("Connection closed by peer")])

    def fails(trainer: loop.Trainer, number: int) -> None:
        raise next(failing)

    monkeypatch.setattr(profiled, "communicates", lambda _: True)
    monkeypatch.setattr(profiled, "communication", fails)
    arguments = ("tiny", "--against", "torch_loop", "--rounds", 1, "--output", tmp_path, "--device", "cpu")
    code, _, error = command_line("train", *arguments)
    assert code == 0 and not error
    found = stored(tmp_path)
    assert [(row["record"], row["status"]) for row in found] == [
        ("measurement", "ok"), ("measurement", "ok"), ("ratio", "ok"),
    ]  # fmt: skip
    notes = [[note for note in row["notes"] if note.startswith("communication was not")] for row in found[:2]]
    assert notes == [
        [f"communication was not measured: {NO_MEMORY}"], ["communication was not measured: Connection closed by peer"],
    ]  # fmt: skip
    assert not any("communication" in row["training"] for row in found[:2])

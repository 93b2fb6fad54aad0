"""One sweep over a plugin that misbehaves in every way: each gives the right row, the next point is right, and nothing
is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import uuid
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from conftest import FAKE_PLUGINS, MoeBench, wait_for_no_process
from fake_plugins.fake_misbehaves import MISBEHAVIOURS, tokens_of
from test_runner import PASSES, rows_of, write_sweep

from harness import descendants
from harness.interface import Point
from harness.points import point_to_dict
from harness.process import WorkerProcess
from harness.record import validate
from harness.shapes import MoEShape

LIMIT_S = 4
TIMED = "^right when it was checked, but after it was timed its results on the same data differ: "
GATE = "^relative L2 error above tolerance for float32: "
CHANGED = "the plugin changed for its whole process: "
DIED = r"^the worker died while in build \("
DIED_CALLED = r"^the worker died while in correctness \("
HUNG = f"^not finished after {LIMIT_S} s, while in correctness" + r'\n  File ".*_misconduct.py", line \d+ in hangs\n'
#: Misbehaviour -> the status of its rows, a pattern of their reason, and one of their notes.
EXPECTED: dict[str, tuple[str, str] | tuple[str, str, str]] = {
    "wrong_output": ("wrong_result", GATE + ".*output 0.1 > 0.0001"),
    # The others are right: none of them is named.
    "wrong_grad_x": ("wrong_result", GATE + "grad_x 0.1 > 0.0001$"),
    "wrong_grad_gate": ("wrong_result", GATE + "grad_gate 0.1 > 0.0001$"),
    "wrong_grad_up": ("wrong_result", GATE + "grad_up 0.1 > 0.0001$"),
    "wrong_grad_down": ("wrong_result", GATE + "grad_down 0.1 > 0.0001$"),
    "wrong_grad_router": ("wrong_result", GATE + r"grad_router 0\.\d+ > 0.0001$"),
    "nan_output": ("wrong_result", GATE + "output nan > 0.0001$"),
    "nan_gradient": ("wrong_result", GATE + "grad_up nan > 0.0001$"),
    "nan_grad_x": ("wrong_result", GATE + "grad_x nan > 0.0001$"),
    "nan_second_call": ("wrong_result", GATE + "output nan > 0.0001$"),
    "wrong_second_call": ("wrong_result", GATE + ".*output 0.1 > 0.0001"),
    "wrong_while_timed": ("wrong_result", TIMED + r".*output 0.0\d+ > 0.0002"),
    "wrong_gradient_while_timed": ("wrong_result", TIMED + r"grad_down 0.0\d+ > 0.0002$"),
    "wrong_expert_while_timed": ("wrong_result", TIMED + r"grad_gate 0.\d+ > 0.0002$"),
    "nan_while_timed": ("wrong_result", TIMED + "grad_up nan > 0.0002$"),
    "shape_while_timed": ("wrong_result", TIMED + "grad_up has 1 parts in place of 4$"),
    "random": ("wrong_result", GATE + r".*output 0.\d+ > 0.0001"),
    "random_while_timed": ("wrong_result", TIMED + r".*output 0.\d+ > 0.0002"),
    "random_within_rounding": ("ok", ""),
    "returns_none": ("wrong_result", r"^forward returned NoneType, expected a tensor \(\d+, 16\)$"),
    "returns_tuple": ("wrong_result", "^forward returned tuple, expected a tensor"),
    "returns_other_shape": ("wrong_result", r"^output has shape \(\d+, 15\), expected \(\d+, 16\)$"),
    "returns_other_rank": ("wrong_result", r"^output has shape \(1, \d+, 16\), expected"),
    "returns_other_dtype": ("wrong_result", "^output is torch.float64, expected torch.float32$"),
    "returns_other_device": ("wrong_result", "^output is on meta, expected cpu$"),
    "returns_no_graph": ("wrong_result", "^output requires no gradient, so that there is no backward$"),
    "returns_its_input": ("wrong_result", GATE + r".*output \d"),
    "gradient_none": ("wrong_result", r"^grad_gate is NoneType, expected a tensor \(4, 8, 16\)$"),
    "gradient_other_shape": ("wrong_result", r"^grad_down has shape \(4, 8, 16\), expected \(4, 16, 8\)$"),
    "gradient_other_device": ("wrong_result", "^grad_router is on meta, expected cpu$"),
    "gradient_missing": ("wrong_result", "^grad_up is missing$"),
    "gradients_none": ("wrong_result", "^canonical_gradients returned NoneType, expected tensors by name$"),
    "backward_other_shape": ("crashed", "^while in correctness: RuntimeError: .*returned an invalid gradient"),
    "writes_x": ("wrong_result", "^the layer changed its input$"),
    "writes_weights": ("wrong_result", "^the layer changed the problem's up weights$"),
    "writes_router": ("wrong_result", "^the layer changed the problem's router weights$"),
    "writes_grad_output": ("wrong_result", "^the layer changed the incoming gradient$"),
    "writes_x_building": ("wrong_result", "^the layer changed its input while it was built$"),
    "writes_weights_building": ("wrong_result", "^the layer changed the problem's down weights while it was built$"),
    "leaks": ("ok", "", r"of the \d+ bytes held stay allocated after the backward"),
    # What is raised.
    "exit_in_forward": ("crashed", "^while in correctness: SystemExit: 0$"),
    "interrupt_in_backward": ("crashed", "^while in correctness: KeyboardInterrupt$"),
    "mute_error": ("crashed", "^while in build: _Mute$"),
    "unprintable_error": ("crashed", "^while in build: RuntimeError: colours red, halves \ufffd and bells \ufffd$"),
    "error_in_build": ("crashed", "^while in build: RuntimeError: no layout for these weights second line$"),
    "error_in_backward": ("crashed", "^while in correctness: ValueError: no backward kernel for this shape$"),
    "build_returns_none": ("crashed", "^while in build: TypeError: build returned NoneType, expected a Layer$"),
    "odd_notes": ("ok", "", "^one sentence \ufffd, not a list of them$"),
    "memory_error": ("out_of_memory", "^while in correctness: MemoryError$"),
    "torch_out_of_memory": (
        "out_of_memory",
        "^while in correctness: OutOfMemoryError: CUDA out of memory. Tried to allocate 3 TiB$",
    ),
    "driver_out_of_memory": ("out_of_memory", r"^while in build: RuntimeError: Triton Error \[CUDA\]: out of memory$"),
    "caused_by_memory": ("out_of_memory", "^while in build: RuntimeError: no workspace$"),
    "missing_package": (
        "not_installed",
        "^while in build: the package moebench_no_such_package is missing; install it",
    ),
    "missing_part": ("crashed", "^while in build: ModuleNotFoundError: No module named 'torch.no_such_part'$"),
    "missing_name": ("crashed", "^while in build: ImportError: cannot import name 'fast' from 'package'$"),
    "broken_module": ("crashed", r"^while in build: SyntaxError: .*moebench_broken_module.py, line 1"),
    "slow_import": ("ok", ""),
    # How the process ends.
    "null_pointer": (
        "crashed",
        DIED_CALLED + r"ended by signal SIGSEGV\)\nFatal Python error",
    ),
    "silent_exit": ("crashed", DIED_CALLED + r"exit code 0\)$"),
    "abort": ("crashed", DIED_CALLED + r"ended by signal SIGABRT\)\nFatal Python error"),
    "killed": ("crashed", DIED + "ended by signal SIGKILL, which comes from outside"),
    "killed_for_memory": ("out_of_memory", DIED + "ended by signal SIGKILL: the host's memory was used up"),
    "hang_in_forward": ("timeout", HUNG),
    "hang_in_backward": ("timeout", HUNG),
    "closes_descriptors": ("crashed", DIED),
    "writes_everywhere": ("crashed", DIED + "where the harness expects an event it wrote: \ufffd not an event"),
    "dies_when_idle": ("ok", ""),
    # Its streams.
    "prints": ("ok", ""),
    "prints_and_dies": ("crashed", DIED + r"ended by signal SIGABRT\)\n[^\x00-\x08\x1b]*Fatal Python error: Aborted"),
    "closes_streams": ("ok", ""),
    "closes_streams_and_raises": ("crashed", "^while in build: RuntimeError: unheard$"),
    "reads_answers": ("ok", ""),
    # What it leaves.
    "leaves_family": ("ok", ""),
    "leaves_family_and_dies": ("crashed", DIED + "ended by signal SIGABRT"),
    "leaves_stranger": ("out_of_memory", "^while in build: MemoryError$"),
    "leaves_fork_and_dies": ("crashed", DIED + "ended by signal SIGABRT"),
    "forgets_that_it_forked": ("ok", ""),
    "leaves_thread": ("ok", ""),
    "leaves_files": ("ok", ""),
    "leaves_files_and_dies": ("crashed", DIED + "ended by signal SIGABRT"),
    "leaves_shared_memory_and_dies": ("crashed", DIED + "ended by signal SIGABRT"),
    "leaves_shared_memory_and_is_ended": ("out_of_memory", "^while in build: MemoryError$"),
    # What it changes for its process.
    "default_dtype": ("ok", "", CHANGED + r"default dtype \(float32 -> float16\)$"),
    "default_device": ("ok", "", CHANGED + r"default device \(cpu -> meta\)$"),
    "gradients_off": ("wrong_result", "^output requires no gradient", CHANGED + r"gradients \(on -> off\)$"),
    "autocast": ("wrong_result", GATE + ".*output 0.00", CHANGED + r"autocast \(off -> cpu\)$"),
    "deterministic": ("ok", "", CHANGED + r"deterministic algorithms \(off -> on\)$"),
    "anomalies": ("ok", "", CHANGED + r"anomaly detection \(off -> on\)$"),
    "threads": ("ok", "", CHANGED + r"threads \(1 -> 3\)$"),
    "directory": ("ok", "", CHANGED + r"working directory \(.* -> /\)$"),
    "directory_gone": ("ok", "", CHANGED + r"working directory \(.* -> a folder that is gone\)$"),
    "seeds": ("ok", ""),
}


def _row_fault(row: dict[str, Any], status: str, reason: str, note: str = "") -> str | None:
    """What is wrong with a row of a misbehaviour; None where nothing is."""
    if row["status"] != status:
        return f"status {row['status']}, reason {row['reason']!r}"
    if not (re.search(reason, row["reason"]) if reason else row["reason"] == ""):
        return f"reason {row['reason']!r}"
    # What a layer has changed in its process stands in its notes, where it has been built, and in its reason otherwise.
    notes = row.get("notes", [])
    if not any(re.search(note, said) for said in [*notes, row["reason"]]) or (notes and not note):
        return f"notes {notes}, reason {row['reason']!r}"
    if len(row["reason"].partition("\n")[0]) > 700 or len(row["reason"]) > 2000:
        return "a reason that nobody reads"
    if ("latency_ms" in row) != (status == "ok") or ("memory_bytes" in row) != (status == "ok"):
        return "numbers that do not go with its status"
    return None


def _good_fault(row: dict[str, Any]) -> str | None:
    """What is wrong with a row of a point behind it."""
    if (row["status"], row["reason"], row.get("notes")) != ("ok", "", []):
        return f"status {row['status']}, reason {row['reason']!r}, notes {row.get('notes')}"
    if max(row["correctness"]["relative_l2"].values()) > 1e-5 or row["latency_ms"]["samples"] != 6:
        return "other numbers than those of a right layer"
    return None if row["environment"]["cpu_threads"] == 1 else "threads that an earlier point has asked for"


def test_every_misbehaviour_has_an_expectation() -> None:
    assert list(EXPECTED) == list(MISBEHAVIOURS)


def test_each_gives_the_right_row_harms_nobody_and_leaves_nothing(tmp_path: Path) -> None:
    """One test, since it is one sweep. Its workers are forked, which is quick; those of `test_runner` are started as
    ever."""
    bench = MoeBench(uuid.uuid4().hex, warm=True)
    temporary, output = tmp_path / "tmp", tmp_path / "rows"
    temporary.mkdir()
    shared, nap = f"moebench-{uuid.uuid4().hex[:12]}", f"3600.{uuid.uuid4().int % 10**12}"
    bench.environment |= {
        "TMPDIR": str(temporary),
        "MOEBENCH_TEST_FOLDER": str(tmp_path),
        "MOEBENCH_TEST_SHARED": shared,
        "MOEBENCH_TEST_NAP": nap,
    }
    # Each misbehaviour, and then a point that is right.
    shapes = [f"{tokens + more},16,8,4,2" for tokens in map(tokens_of, MISBEHAVIOURS) for more in (0, 1)]
    sweep = write_sweep(tmp_path, "misbehaviour", ["fake_misbehaves"], shapes, limit=LIMIT_S)
    ended = bench("run", sweep, "--output", output)
    assert ended.returncode == 3, ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    assert f"{6 * len(EXPECTED)} rows in" in ended.stdout

    path = output / "misbehaviour.jsonl"
    assert all(validate(json.loads(line)) == [] for line in path.read_text().splitlines())
    rows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows_of(path):
        rows[row["shape"]["T"]].append(row)
    faults = []
    for name, expected in EXPECTED.items():
        for what, found, fault in (
            (name, rows[tokens_of(name)], lambda row, expected=expected: _row_fault(row, *expected)),
            (f"the point behind {name}", rows[tokens_of(name) + 1], _good_fault),
        ):
            if sorted(row["pass"] for row in found) != sorted(PASSES):
                faults.append(f"{what}: rows of {[row['pass'] for row in found]}")
            faults += dict.fromkeys(f"{what}: {told}" for told in map(fault, found) if told)
    assert not faults, "\n".join(faults)
    # What changes how long a point takes is told by its row.
    assert {row["environment"]["cpu_threads"] for row in rows[tokens_of("threads")]} == {3}
    assert all(row["build_s"] >= 0.3 for row in rows[tokens_of("slow_import")])

    assert wait_for_no_process(bench.mark, seconds=2.0) == []
    # What a job left behind was killed, which on a busy machine takes a moment to be seen.
    end = time.monotonic() + 15
    while left := subprocess.run(["pgrep", "-f", nap], capture_output=True, text=True).stdout:
        assert time.monotonic() < end, left
        time.sleep(0.1)
    # torch's own cache is there to stay.
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []
    assert list(Path("/dev/shm").glob(f"{shared}*")) == []


@pytest.mark.parametrize("patience_s", [0.0, 5.0])
def test_a_stranger_is_found_before_its_worker_may_end(
    patience_s: float, monkeypatch: pytest.MonkeyPatch, forked_workers: None
) -> None:
    """On a machine so busy that the worker has ended, as its standard input has, before anybody looks."""
    nap = f"3600.{uuid.uuid4().int % 10**12}"
    worker = WorkerProcess({"MOEBENCH_PLUGINS": str(FAKE_PLUGINS), "MOEBENCH_TEST_NAP": nap})
    shape = MoEShape(tokens_of("leaves_stranger"), 16, 8, 4, 2)
    point = Point("moe_layer", "fake_misbehaves", shape, "float32", device="cpu")
    asked: dict[str, Any] = {"passes": [], "bases": {}, "settings": {}}
    job = {"kind": "check", "point": point_to_dict(point), **asked}
    assert [event["status"] for event in worker.run(job, 60.0) if event["event"] == "failed"] == ["out_of_memory"]
    assert subprocess.run(["pgrep", "-f", nap], capture_output=True).stdout

    def late(*arguments: Any) -> set[descendants.Process]:
        time.sleep(0.5)
        return find(*arguments)

    find = descendants.find
    monkeypatch.setattr(descendants, "find", late)
    worker.close(patience_s=patience_s)
    left = subprocess.run(["pgrep", "-f", nap], capture_output=True, text=True).stdout
    for pid in left.split():
        os.kill(int(pid), signal.SIGKILL)
    assert not left

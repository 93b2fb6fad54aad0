"""Sweeps that are killed again and again, at any moment and within any step of the store: no finished row is lost or
doubled, every line parses, nothing is left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, MoeBench, marked_processes, wait_for_no_process

from harness import store

KILLS = 100
SEED = 20_261_130
INTERRUPTED = "moebench: interrupted; every finished row is stored, continue with --resume\n"


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `killed_sweeps` found, and the folder that it leaves."""
    folder = tmp_path_factory.mktemp("kills")
    own, cache = tmp_path_factory.mktemp("temporary"), tmp_path_factory.mktemp("torch")
    ended = subprocess.run(
        [sys.executable, ROOT / "tests" / "killed_sweeps.py", folder, str(KILLS), str(SEED)],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(own),
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
        },
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stderr
    return {**json.loads(ended.stdout), "folder": folder, "temporary": own}


def of_kind(campaign: dict[str, Any], *what: str) -> list[dict[str, Any]]:
    return [one for one in campaign["tries"] if one["what"] in what]


# One test, since another process of the suite would make the whole campaign once more.
def test_a_hundred_kills_lose_and_double_nothing(campaign: dict[str, Any]) -> None:
    assert campaign["faults"] == []
    tries = of_kind(campaign, "store", "outside")
    assert len(tries) == KILLS
    # Whom the end of the sweep saved was not killed.
    killed = [one for one in tries if one["code"] != 0]
    assert len(killed) >= KILLS * 9 // 10
    for one in killed:
        assert one["code"] in (-one["number"], 128 + one["number"]), one
        # Before the command is at work there is nothing to say.
        assert one["error"] in ("", INTERRUPTED, "moebench: interrupted\n"), one
        assert (one["code"] < 0) == (one["error"] == ""), one
    kinds = Counter((one["what"], one["number"] == signal.SIGKILL) for one in killed)
    assert all(kinds[what, hard] >= 10 for what in ("store", "outside") for hard in (True, False)), kinds
    # That it tests what it says: rows were finished between the kills, and lines were torn.
    assert campaign["finished"] > 200 and sum(one["broken"] for one in tries) >= 1
    assert len({one["rows"] for one in tries}) > 30

    second, full, whole, again = (of_kind(campaign, what)[0] for what in ("second", "full", "whole", "again"))
    assert second["code"] == full["code"] == 2
    assert "another run is writing rows there; wait until it ends, or name another folder" in second["error"]
    assert "cannot be written: File too large" in full["error"] and "continue with --resume" in full["error"]
    for one in (second, full):
        assert one["error"].startswith("moebench: ") and one["error"].count("\n") == 1, one
    assert whole["code"] == again["code"] == 0 and whole["rows"] == again["rows"] == campaign["rows"]

    path = campaign["folder"] / "rows" / "killed.jsonl"
    keys = Counter(json.loads(line)["resume_key"] for line in path.read_bytes().splitlines())
    assert len(keys) == campaign["rows"] and set(keys.values()) == {1}
    left = sorted(str(file.relative_to(campaign["folder"])) for file in campaign["folder"].rglob("*"))
    assert left == ["killed.toml", "rows", "rows/killed.jsonl"]
    assert list(Path(campaign["temporary"]).iterdir()) == []


# The command line itself, with the worker processes that it really has.


def wait_for(what: Callable[[], object], process: subprocess.Popen[bytes], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)


def test_no_worker_outlives_a_killed_sweep(tmp_path: Path) -> None:
    bench = MoeBench(uuid.uuid4().hex)
    # Only what is measured in earnest; and what it leaves in the folder for temporary files is seen.
    del bench.environment["MOEBENCH_PLUGINS"]
    own = tmp_path / "temporary"
    own.mkdir()
    bench.environment |= {"TMPDIR": str(own), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch")}
    path = tmp_path / "rows" / "smoke.jsonl"
    command = ("run", "smoke", "--only", "torch_loop", "--only", "sonicmoe_torch", "--output", path.parent, "--resume")
    randoms = random.Random(SEED)

    def lines() -> int:
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def workers() -> list[tuple[int, str]]:
        return [found for found in marked_processes(bench.mark) if "harness.worker" in found[1]]

    # While the first worker imports torch, and some time after the first row.
    for moment in (workers, lines):
        process = bench.start(*command)
        wait_for(moment, process)
        time.sleep(randoms.uniform(0.0, 0.6))
        # The sweep alone: nobody ends its worker for it.
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert wait_for_no_process(bench.mark) == []
        finished = lines()
    ended = bench(*command)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert wait_for_no_process(bench.mark) == []
    rows, problems = store.read(path)
    assert problems == [] and 0 < finished < len(rows)
    assert {row["status"] for row in rows} == {"ok"}
    keys = Counter(row["resume_key"] for row in rows)
    points = Counter(
        (row["implementation"], row["routing"]["distribution"], row["pass"], row["measured_on"]) for row in rows
    )
    assert len(keys) == len(points) == 13 and set(keys.values()) == set(points.values()) == {1}
    assert [file.name for file in path.parent.iterdir()] == [path.name] and not list(own.iterdir())

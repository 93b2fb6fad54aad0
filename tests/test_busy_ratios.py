"""Ratios that are asked for by busy times: how the wish travels, what their rows say, and who must not read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_method_ratios import PASSES, REGISTRY, SETTINGS, runner_of, work_of
from test_routed_experts import routed

from harness import measure, store, worker
from harness.interface import Layer, Problem
from harness.measure import Context, measure_ratio
from harness.record import check
from harness.runner import Work
from harness.session import works_of
from harness.sweep import RatioPoint, Sweep


def busy_work() -> Work:
    return replace(work_of(routed(method="top_k"), "top_k"), time_kind="busy")


class OnCpu(Context):
    def start_cuda(self) -> None:
        self.evict, self.monitor = object(), self  # type: ignore[assignment]

    def sample(self) -> dict[str, Any]:
        return {"sm_clock_mhz": 1500, "power_w": 500.0, "throttle_reasons": []}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which side was called under the profiler, in order; stand-ins for what only a GPU has. Whoever captures a graph
    fails the test."""
    tags: list[str] = []

    class Windowed:
        def __init__(self, tag: str, layer: Layer, problems: Sequence[Problem], evict: object, order: list[str]):
            self.tag, self.order = tag, order

        def __call__(self, index: int) -> tuple[float, float]:
            self.order.append(f"{self.tag}:{index}")
            return 0.0, 0.0

    def profile(run: Callable[[], None]) -> list[Any]:
        run()
        return []

    def windows(events: Sequence[Any], order: Sequence[str]) -> dict[str, Any]:
        tags.extend(order)
        return dict.fromkeys(order)

    def busy_samples(found: dict[str, Any], tag: str) -> list[tuple[float, float]]:
        calls = [int(name.split(":")[1]) for name in found if name.startswith(tag)]
        # The first pair's is the profiler's own.
        return [((3.0 if tag == "n" else 2.0) * (9.0 if index == 0 and tag == "n" else 1.0), 1.0) for index in calls]

    monkeypatch.setattr(measure, "release", lambda: None)
    monkeypatch.setattr(measure, "GraphCalls", None)
    monkeypatch.setattr(measure, "WindowedCalls", Windowed)
    monkeypatch.setattr(measure, "profile", profile)
    monkeypatch.setattr(measure, "kernels_in_windows", windows)
    monkeypatch.setattr(measure, "busy_samples", busy_samples)
    monkeypatch.setattr(measure, "environment", lambda *_: {"measured_on": "cuda", "gpu": "NVIDIA H200"})
    monkeypatch.setattr(REGISTRY.get("torch_loop"), "no_graph_reason", None, raising=False)
    return tags


def test_both_sides_alternate_under_the_profiler_though_graphs_could_be_captured(taken: list[str]) -> None:
    (job,) = runner_of([busy_work()]).jobs
    loop = REGISTRY.get("torch_loop")
    context = OnCpu(lambda _: None, SETTINGS)
    rows = list(measure_ratio(job.work.points, PASSES, loop, loop, job.bases, context, True, "busy"))  # type: ignore[arg-type]
    assert [row["pass"] for row in rows] == list(PASSES)
    for row, value in zip(rows, (1.5, 1.0), strict=True):
        check(row)
        assert (row["status"], row["time_kind"], row["basis"]) == ("ok", "busy", "busy")
        assert row["basis_reason"] == "busy times were asked for" and row["value"] == value and row["samples"] == 11
    assert [{name[0] for name in taken[i : i + 2]} for i in range(0, 24, 2)] == [{"n", "d"}] * 12


def test_the_wish_travels_from_the_sweep_to_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    point = routed(method="top_k")
    asked = [RatioPoint(point, "torch_loop", PASSES), RatioPoint(point, "torch_loop", PASSES, time_kind="busy")]
    works = works_of(Sweep("s", "d", ratios=asked))
    assert [work.time_kind for work in works] == ["device", "busy"] and works[0].title != works[1].title
    runner = runner_of(works)
    sent: list[str] = []
    monkeypatch.setattr(worker, "measure_ratio", lambda *given: sent.append(given[-1]) or iter(()))
    monkeypatch.setattr(worker, "release", lambda: None)
    context = OnCpu(lambda _: None, SETTINGS)

    def run(message: dict[str, Any], limit_s: float) -> list[dict[str, Any]]:
        worker.run_job(message, REGISTRY, context, SimpleNamespace(send=lambda *_, **__: None))  # type: ignore[arg-type]
        return []

    for job in runner.jobs:
        runner._run_job(SimpleNamespace(run=run), job, True, 0.0)  # type: ignore[arg-type]
    assert sent == ["device", "busy"]


def test_such_a_ratio_is_a_measurement_of_its_own(tmp_path: Path) -> None:
    """Without numbers as well: one that failed must not stand for the ratio of replays."""
    works = [replace(busy_work(), time_kind=kind) for kind in ("device", "busy")]
    keys = [base["resume_key"] for job in runner_of(works).jobs for base in job.bases.values()]
    assert len(set(keys)) == 2 * len(PASSES)
    path = tmp_path / "rows.jsonl"
    runner_of(works, path).run()
    rows, problems = store.read(path)
    assert not problems and {row["status"] for row in rows} == {"unsupported"}
    assert [row["time_kind"] for row in rows] == ["device"] * 2 + ["busy"] * 2 and store.latest(rows) == rows

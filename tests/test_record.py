"""The row's rules: each one broken once."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import pytest

from harness.environment import GpuMonitor, environment, is_slowdown, throttle_names
from harness.errors import UserError
from harness.interface import Point
from harness.record import SCHEMA_VERSION, STATUSES, RecordError, check, clean, gpu_slug, point_fields, validate
from harness.shapes import MoEShape

POINT = Point("moe_layer", "demo", MoEShape(64, 32, 16, 4, 2), "float32", device="cpu")


def measurement(**changes: Any) -> dict[str, Any]:
    row = {
        "schema": SCHEMA_VERSION,
        "record": "measurement",
        "run_id": "r1",
        "timestamp": "2026-01-31T12:00:00+00:00",
        "sweep": "smoke",
        **point_fields(POINT),
        "pass": "forward",
        "label": "Demo",
        "status": "ok",
        "reason": "",
        "latency_ms": {"median": 2.0, "p05": 1.5, "p95": 3.0, "ci95": [1.9, 2.2], "samples": 10, "mode": "burst"},
        "measured_on": "cuda",
        "environment": {"gpu": "NVIDIA H200", "torch": "2.11.0"},
    }
    row.update(changes)
    return {key: value for key, value in row.items() if value is not ...}


def ratio(**changes: Any) -> dict[str, Any]:
    row = measurement(record="ratio", implementation=..., label=..., latency_ms=...)
    row.update(numerator="a", denominator="b", time_kind="device", basis="graph", value=1.5, ci95=[1.4, 1.6], samples=9)
    row.update(changes)
    return {key: value for key, value in row.items() if value is not ...}


def device(**changes: Any) -> dict[str, Any]:
    return {"median": 1.0, "ci95": [0.9, 1.1], "samples": 7, "basis": "graph", **changes}


def nested(inside: Any, depth: int) -> Any:
    for _ in range(depth):
        inside = [inside]
    return inside


def test_good_rows_pass() -> None:
    for row in (
        measurement(),
        measurement(device_ms=device(), busy_ms={"median": 1.0, "ci95": [1.0, 1.0], "samples": 8}),
        measurement(device_ms=device(basis="busy", basis_reason="it synchronises")),
        measurement(memory_bytes={"static": 10, "held": 5, "peak": 9, "layer": 15}, notes=["a"], overhead_s={"x": 1.0}),
        measurement(status="unstable", reason="the clock drifted"),
        measurement(status="crashed", reason="signal 11", latency_ms=..., environment={"torch": "2.11.0"}),
        measurement(
            measured_on="fake", latency_ms=..., memory_bytes={"static": 1, "held": 2, "peak": None, "layer": 3}
        ),
        ratio(),
        ratio(time_kind="busy", basis="busy", basis_reason="busy times were asked for"),
        ratio(status="not_installed", reason="b is missing", value=..., ci95=..., samples=...),
    ):
        assert validate(row) == []
        assert check(row) is row


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run_id": ...}, "run_id: missing"),
        ({"label": ""}, "label: missing"),
        ({"environment": ...}, "environment: missing"),
        ({"environment": {}}, "environment: must be an object"),
        ({"environment": {"torch": "2"}}, "environment.gpu"),
        ({"environment": {"gpu": "x", "measured_on": "cpu"}}, "the environment says 'cpu'"),
        ({"measured_on": "gpu"}, "measured_on 'gpu': choose from"),
        ({"status": "fine"}, "status 'fine': choose from"),
        ({"status": "unstable", "reason": " "}, "reason: missing"),
        ({"status": "timeout", "reason": "600 s"}, "latency_ms: status timeout carries no performance numbers"),
        ({"pass": "sideways"}, "pass 'sideways'"),
        ({"dtype": "bf16"}, "dtype 'bf16'"),
        ({"timestamp": "yesterday"}, "timestamp 'yesterday'"),
        ({"timestamp": "2026-01-31T12:00:00+02:00"}, "UTC"),
        ({"timestamp": "2026-01-31T12:00:00"}, "UTC"),
        ({"shape": {"T": 1}}, "shape:"),
        ({"shape": {"T": 1, "d": 1, "n": 1, "E": 2, "K": 3}}, "shape:"),
        ({"layer": {"activation": "swiglu"}}, "layer: lacks router_convention, bias"),
        ({"routing": "uniform"}, "routing: must be an object"),
        ({"latency": 3}, "latency: not a field of schema"),
        ({"value": 1.0}, "value: belongs to ratio rows only"),
        ({"build_s": math.nan}, "build_s: nan is not a finite number"),
        ({"costs": {"flops": [1.0, math.inf]}}, "costs.flops[1]: inf"),
        ({"notes": "one"}, "notes: must be a list"),
        ({"memory_bytes": {"static": 1, "held": 2, "peak": 3, "layer": 4}}, "static + held = 3"),
        ({"memory_bytes": {"static": 1.5}}, "memory_bytes.static"),
        ({"latency_ms": 3.0}, "latency_ms: must be an object"),
        ({"latency_ms": {"median": 2.0, "ci95": [2.2, 1.9], "samples": 9}}, "ordered and contain"),
        ({"latency_ms": {"median": 2.0, "ci95": [2.1, 2.2], "samples": 9}}, "ordered and contain"),
        ({"latency_ms": {"median": 2.0, "samples": 9}}, "ci95: must be [low, high]"),
        ({"latency_ms": {"median": 0.0, "ci95": [0.0, 0.0], "samples": 9}}, "greater than zero"),
        ({"latency_ms": {"median": 2.0, "ci95": [2.0, 2.0], "samples": 0}}, "samples 0"),
        ({"latency_ms": {"median": 2.0, "ci95": [2.0, 2.0], "samples": 9, "p05": 2.5}}, "wrong side"),
        ({"device_ms": device(basis="guess")}, "device_ms.basis 'guess'"),
        ({"tflops": {"host": "fast"}}, "tflops.host: must be a number, not 'fast'"),
        ({"measured_on": "cpu", "device_ms": device()}, "a CPU run has no device time"),
        ({"measured_on": "fake"}, "fake tensors run nothing"),
        ({"correctness": {"relative_l2": {"output": None}}}, "never passes"),
        ({"correctness": {"output": "nan"}}, "never passes"),
        ({"status": ["ok"]}, "status: must be text, not ['ok']"),
        ({"environment": []}, "environment: must be an object, not []"),
        ({"environment": {"gpu": ["x"]}}, "environment.gpu: must be text, not ['x']"),
        ({"routing": {"method": None}}, "routing: lacks method"),
        ({"routing": {**measurement()["routing"], "seed": 0.5}}, "routing.seed: must be a whole number, not 0.5"),
        ({"problem": {"M": True}}, "problem.M: must be a whole number, not True"),
        ({"kernels": {"name": "a"}}, "kernels: must be a list, not {'name': 'a'}"),
        ({"kernels": [3]}, "kernels[1]: must be an object, not 3"),
        ({"kernels": [{"name": "a", "calls": 1}]}, "kernels[1]: lacks us"),
        ({"kernels": [{"name": "a", "calls": 1, "us": "5"}]}, "kernels[1].us: must be a number, not '5'"),
        ({"kernels": [{"name": "a", "calls": 1, "us": -5}]}, "kernels[1].us -5: must not be negative"),
        ({"tflops": {"host": -1.0}}, "tflops.host -1.0: must not be negative"),
        ({"latency_ms": {"median": 2.0, "ci95": [0.0, 2.2], "samples": 9}}, "ci95 [0.0, 2.2]: must lie above zero"),
        ({"latency_ms": {"median": 10**400, "ci95": [1, 2], "samples": 9}}, "latency_ms.median: a whole number beyond"),
        ({"costs": {"floor_ms": {"compute": "x"}}}, "costs.floor_ms.compute: must be a number, not 'x'"),
        ({"overhead_s": {"x": "1"}}, "overhead_s.x: must be a number"),
        ({"notes": nested([], 900)}, "nested more than 32 deep"),
        ({"costs": {"more": nested([], 40)}}, "costs.more[1][1]"),
        ({"label": "\ud800"}, "label: holds half a surrogate pair"),
        ({"costs": {"\udfff": 1}}, "a key that holds half a surrogate pair"),
        ({"timestamp": "20260131T120000+00:00"}, "must be written as 2026-01-31T12:00:00+00:00"),
        ({"shape": {"T": 2**31, "d": 1, "n": 1, "E": 2, "K": 2}}, "shape T: must be at most 2147483647"),
    ],
)
def test_each_rule(change: dict[str, Any], message: str) -> None:
    problems = validate(measurement(**change))
    assert any(message in problem for problem in problems), problems
    with pytest.raises(RecordError):
        check(measurement(**change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"denominator": ...}, "denominator: missing"),
        ({"time_kind": "wall"}, "time_kind 'wall'"),
        ({"ci95": [1.6, 1.4]}, "ordered and contain the value"),
        ({"ci95": [1.6, 1.7]}, "ordered and contain the value"),
        ({"samples": ...}, "samples: missing"),
        ({"status": "crashed", "reason": "x"}, "value: status crashed"),
        ({"basis": "guess"}, "basis 'guess'"),
        ({"time_kind": "busy"}, "basis 'graph': a ratio that was asked for by busy times is of them"),
        ({"variant": "up", "denominator_variant": "up"}, "only where it is another variant"),
    ],
)
def test_ratio_rules(change: dict[str, Any], message: str) -> None:
    assert any(message in problem for problem in validate(ratio(**change)))


def step(measured_on: str = "cuda", numbers: Any = None, **changes: Any) -> list[str]:
    """What is wrong with a training step of two processes that has other ``numbers`` besides."""
    training = {"tokens_per_s": 1.0, "tokens_per_day_per_gpu": 4.0, "mfu": None, "world_size": 2, "layers": 8}
    training |= {"steps": 50, "loss": 5.0, "validation_loss": None, **changes}
    return validate(measurement(operation="training_step", training=training, measured_on=measured_on, **numbers or {}))


def test_shares_of_communication() -> None:
    assert step() == []
    for share, exposed in ((0.4, 0.1), (1.0, 1.0), (0.0, 0.0), (None, None)):
        assert step(communication=share, exposed_communication=exposed) == []
    for share, exposed in ((0.1, 0.4), (1.1, 0.4), (0.4, -0.1), (0.4, None), (None, 0.1)):
        [problem] = step(communication=share, exposed_communication=exposed)
        assert "must be shares of the step" in problem
    for elsewhere in ({"world_size": 1}, {"measured_on": "cpu"}):
        [problem] = step(communication=0.4, exposed_communication=0.1, **elsewhere)
        assert "belongs to several processes on GPUs" in problem
    assert "training: must be an object with tokens_per_s" in step(efficiency=0.9)[0]


def test_busy_times_of_a_training_step_are_of_one_process() -> None:
    busy = {"busy_ms": {"median": 1.0, "ci95": [0.9, 1.0], "samples": 3}}
    assert step(numbers=busy, world_size=1) == []
    rates = dict.fromkeys(("tokens_per_s", "tokens_per_day_per_gpu"))
    for wrong in (step(numbers=busy), step(numbers={**busy, "latency_ms": ...}, world_size=1, **rates)):
        assert wrong == ["busy_ms: of a training step, belongs to one process, beside latency_ms"]


def test_every_failure_needs_a_reason_and_carries_no_number() -> None:
    for status in STATUSES:
        row = measurement(status=status, reason="because")
        assert bool(validate(row)) == (status not in ("ok", "unstable"))
        assert bool(validate(measurement(status=status, latency_ms=...))) == (status != "ok")


def test_other_schemas_and_no_rows() -> None:
    assert validate(measurement(schema=SCHEMA_VERSION + 1, unheard_of=1)) == [
        f"schema {SCHEMA_VERSION + 1} is newer than this harness reads ({SCHEMA_VERSION}); update the harness"
    ]
    for row in ([], None, {}, measurement(schema=True), measurement(schema=0), measurement(record="guess")):
        assert len(validate(row)) == 1


def test_clean_gives_json_and_keeps_the_row() -> None:
    row = measurement(correctness={"output": math.nan}, build_s=np.float32(1.5), notes=("a",), samples=np.int64(3))
    before = copy.copy(row)
    cleaned = clean(row)
    assert row == before
    assert cleaned["correctness"] == {"output": "nan"}
    assert cleaned["notes"] == ["a"]
    assert json.loads(json.dumps(cleaned, allow_nan=False))["build_s"] == 1.5
    assert math.isnan(clean(measurement(build_s=math.nan))["build_s"])


def test_gpu_slug() -> None:
    assert gpu_slug("NVIDIA H200") == "nvidia_h200"
    assert gpu_slug("NVIDIA A100-SXM4-80GB") == "nvidia_a100_sxm4_80gb"
    with pytest.raises(UserError):
        gpu_slug("--")


def test_environment_belongs_into_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    found = environment("cpu", ["numpy", "no-such-distribution"])
    assert found["packages"]["numpy"] and found["packages"]["no-such-distribution"] is None
    assert found["gpu"] is None
    assert validate(measurement(measured_on="cpu", environment=found)) == []
    assert found["torch"] and found["python"] and found["cpu"]
    with pytest.raises(ValueError, match="choose from"):
        environment("gpu")


def test_commit_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.environment import _git_state

    for text, state in (("abc1234", ("abc1234", False)), ("abc1234-dirty", ("abc1234", True))):
        monkeypatch.setenv("MOEBENCH_COMMIT", text)
        _git_state.cache_clear()
        assert _git_state() == state
    # What `git rev-parse` says where there is no commit is no commit.
    for text in ("HEAD", "HEAD\nabc1234", "main"):
        monkeypatch.setenv("MOEBENCH_COMMIT", text)
        _git_state.cache_clear()
        with pytest.raises(UserError, match="must be a commit's hash"):
            _git_state()
    monkeypatch.undo()
    _git_state.cache_clear()


class FakeNvml:
    """As much of NVML as the monitor asks for; clock event reasons only under the older name."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return 697_500

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:
        return 0x4

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int) -> int:
        return 1575

    def nvmlDeviceGetTemperature(self, handle: Any, kind: int) -> int:
        raise RuntimeError("not supported")


def test_gpu_monitor() -> None:
    monitor = GpuMonitor()
    monitor.available, monitor._nvml, monitor._handle = True, FakeNvml(), object()
    sample = monitor.sample()
    assert sample == {
        "sm_clock_mhz": 1575,
        "power_w": 697.5,
        "temperature_c": None,
        "throttle_reasons": ["power_cap"],
    }
    assert not is_slowdown(sample)
    assert is_slowdown({"throttle_reasons": throttle_names(0x44)})
    assert throttle_names(0x1001) == ["gpu_idle", "0x1000"]
    monitor.available = False
    assert monitor.sample()["throttle_reasons"] == []

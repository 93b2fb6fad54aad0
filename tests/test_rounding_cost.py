"""The tool that measures what token rounding costs beside the layer, as far as a machine without a GPU can tell."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from conftest import ROOT, problem_of
from torch import Tensor
from typer.testing import CliRunner

from harness.interface import Layer, Problem
from harness.shapes import MoEShape
from harness.timing import L2Eviction
from harness.token_rounding import ROUNDINGS, route_by

pytest.importorskip("triton")

from implementations.sonicmoe_triton import rounding_cost
from implementations.sonicmoe_triton.rounding import RoundedRouting
from implementations.sonicmoe_triton.rounding_cost import NUMBERS, Take

COMMITTED = ROOT / "results" / "nvidia_h200" / "tuning" / rounding_cost.FILE
SHAPES = ("1000,16,8,6,2", "600,16,8,4,2")
EVICT: Any = None


def command(*arguments: str) -> tuple[int, str]:
    """Exit code and output of the command."""
    app = typer.Typer(add_completion=False)
    app.command()(rounding_cost.main)
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "the cost of rounding needs a Hopper GPU (compute capability 9.0)"),
        (("--shape", SHAPES[0], "--shape", "8,64,64"), "shape '8,64,64': expected five whole numbers"),
        (("--shape", "8,64,64,1025,2"), "takes at most 1024 experts, not E=1025"),
    ],
)
def test_refusals(arguments: tuple[str, ...], reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = tmp_path / "rows.json"
    code, output = command(*arguments, "--rows", str(rows))
    assert code == 2 and not rows.exists()
    assert reason in output and output.count("\n") == 1, output


def samples_of(first: float) -> dict[str, list[float]]:
    """Seven of each number; those of ``nearest`` and the layer drift together, but for one."""
    drift = [1.0, 1.1, 1.2, 0.9, 0.8, 1.3, 1.4]
    found = {name: [(first + i) * factor for factor in drift] for i, name in enumerate(NUMBERS)}
    found["nearest"][2] *= 3
    return found


def test_medians_intervals_and_the_share() -> None:
    samples = samples_of(2.0)
    found = rounding_cost.summary(samples)
    assert list(found["ms"]) == list(samples) and found["samples"] == samples
    for name, values in samples.items():
        # Of seven the whole range covers the median with 1 - 2/2^7 = 98 %, all but the ends with 87 % only.
        interval = [min(values), max(values)]
        assert found["ms"][name] == {"median": statistics.median(values), "ci95": interval, "samples": 7}
    nearest, top_k, layer = (statistics.median(samples[name]) for name in ("nearest", "top_k", "top_k_layer_forward"))
    assert found["share"]["value"] == pytest.approx(nearest / layer)
    assert found["extra_share"] == pytest.approx((nearest - top_k) / layer)
    # Paired: what the clock does to both is not in the ratio.
    ratio = 3.0 / (2.0 + NUMBERS.index("top_k_layer_forward"))
    assert found["share"]["ci95"] == pytest.approx([ratio, 3 * ratio]) and found["share"]["samples"] == 7
    json.dumps(found, allow_nan=False)


def test_candidates_take_turns() -> None:
    calls: list[str] = []

    def of(*names: str) -> Take:
        def take() -> dict[str, float]:
            calls.extend(names)
            return dict.fromkeys(names, float(len(calls)))

        return take

    samples = rounding_cost.in_turns([*(of(name) for name in NUMBERS[:6]), of(*NUMBERS[6:8]), *map(of, NUMBERS[8:])])
    assert list(samples) == list(NUMBERS) and {len(values) for values in samples.values()} == {rounding_cost.ROUNDS}
    rounds = [calls[i : i + len(NUMBERS)] for i in range(0, len(calls), len(NUMBERS))]
    assert len(rounds) == rounding_cost.WARM_UP + rounding_cost.ROUNDS
    assert all(sorted(one) == sorted(NUMBERS) for one in rounds) and rounds[0] != rounds[1]
    # Those of the first rounds are left out, and a round's samples stay beside each other.
    for i in range(rounding_cost.ROUNDS):
        start = (rounding_cost.WARM_UP + i) * len(NUMBERS)
        assert all(start < values[i] <= start + len(NUMBERS) for values in samples.values())


def padded(logits: Tensor, k: int, m_tile: int, rounding: str, convention: str, draws: Tensor | None) -> RoundedRouting:
    """What rounding on the device gives, by the harness: with unused entries at the end."""
    assert (draws is None) == (rounding != "stochastic")
    generator = torch.Generator().manual_seed(rounding_cost.SEED)
    want = route_by(logits, k, rounding, m_tile, convention, generator=generator)
    unused = torch.zeros(50)
    fields: dict[str, Tensor] = {name: torch.zeros(0) for name in RoundedRouting._fields}
    fields |= {"scores": torch.cat([want.scores, unused]), "token_offsets": want.token_offsets}
    return RoundedRouting(**fields | {"experts": torch.cat([want.experts, unused.int() - 1])})


def other_expert(routing: RoundedRouting) -> RoundedRouting:
    routing.experts[0] += 1
    return routing


def other_offset(routing: RoundedRouting) -> RoundedRouting:
    routing.token_offsets[1] += 1
    return routing


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper GPU by word, tensors on the CPU; the candidates take what `samples_of` says, from T / 1000 ms on."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(rounding_cost, "environment", lambda *_: dict.fromkeys(ABOUT, "known"))
    monkeypatch.setattr(rounding_cost, "DEVICE", "cpu")
    monkeypatch.setattr(rounding_cost, "L2Eviction", lambda: EVICT)
    monkeypatch.setattr(rounding_cost, "round_routing", padded)

    def prepare(problem: Problem, logits: Tensor, draws: Tensor, evict: L2Eviction) -> list[Take]:
        size = problem.shape
        assert logits.shape == (size.T, size.E) and logits.dtype == torch.bfloat16
        assert torch.equal(logits, problem.x @ problem.router.T) and draws.shape == (size.E,)
        of_one = {name: values[0] for name, values in samples_of(size.T / 1000).items()}
        return [lambda: of_one]

    monkeypatch.setattr(rounding_cost, "prepare", prepare)


ABOUT = ("gpu", "driver", "torch", "triton", "commit", "dirty", "packages")


@pytest.mark.usefixtures("on_the_cpu")
def test_what_is_written(tmp_path: Path) -> None:
    rows = tmp_path / "new" / "rows.json"
    code, output = command(*(part for shape in SHAPES for part in ("--shape", shape)), "--rows", str(rows))
    assert code == 0, output
    written = json.loads(rows.read_text())
    assert all(written[key] == "known" for key in ABOUT)
    assert written["command"] == f"python -m {rounding_cost.__name__} --shape {SHAPES[0]} --shape {SHAPES[1]}"
    settings = {"dtype": "bfloat16", "m_tile": 128, "convention": "topk_softmax", "rounds": rounding_cost.ROUNDS}
    assert settings.items() <= written.items()
    assert [found["shape"] for found in written["shapes"]] == list(SHAPES)
    for found in written["shapes"]:
        size = MoEShape.parse(found["shape"])
        assert set(found["ms"]) == set(found["samples"]) == set(NUMBERS)
        assert found["ms"]["top_k"]["median"] == size.T / 1000
        assert set(found["pairs"]) == set(ROUNDINGS)
        assert found["pairs"]["down"] <= size.T * size.K <= found["pairs"]["up"]
        assert found.items() >= rounding_cost.summary(found["samples"]).items()
    # The table comes last, and tells of every number.
    lines = [line.strip() for line in output.splitlines()]
    assert lines[0] == f"-> {rows}" and all(any(line.startswith(name) for line in lines) for name in NUMBERS)
    share = written["shapes"][0]["share"]["value"]
    assert any(line.startswith("share (at most 10%)") and f"{share:.1%}" in line for line in lines)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("spoil", [other_expert, other_offset])
def test_a_wrong_routing_writes_nothing(
    spoil: Callable[[RoundedRouting], RoundedRouting], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def spoiled(*arguments: Any, **rest: Any) -> RoundedRouting:
        return spoil(padded(*arguments, **rest)) if "balanced" in arguments else padded(*arguments, **rest)

    monkeypatch.setattr(rounding_cost, "round_routing", spoiled)
    rows = tmp_path / "rows.json"
    for before in (None, "older numbers"):
        if before:
            rows.write_text(before)
        code, output = command("--shape", SHAPES[0], "--rows", str(rows))
        assert code == 2 and output.count("\n") == 1, output
        assert f"balanced at {SHAPES[0]}: tokens have other experts than in harness.token_rounding" in output
        assert rows.read_text() == before if before else not rows.exists()


@pytest.mark.usefixtures("on_the_cpu")
def test_a_folder_cannot_be_written(tmp_path: Path) -> None:
    code, output = command("--rows", str(tmp_path))
    assert code == 2 and "cannot be written" in output and output.count("\n") == 1


def test_all_candidates_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: dict[str, Callable[[], object]] = {}

    class Replays:
        def __init__(self, name: str, call: Callable[[], object], evict: L2Eviction) -> None:
            captured[name] = call

    class Graphs:
        """The harness's: their backward goes through autograd."""

        def __init__(self, layer: Layer, problems: list[Problem], evict: L2Eviction) -> None:
            x = problems[0].x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(layer.forward(x), [x, *layer.parameters()], problems[0].grad_output)
            assert gradient.shape == x.shape and bool(gradient.any())

        def __call__(self, index: int) -> tuple[float, float]:
            return 2.0, 3.0

    called: list[tuple[str, Any]] = []
    monkeypatch.setattr(rounding_cost, "DEVICE", "cpu")
    monkeypatch.setattr(rounding_cost, "round_routing", padded)
    monkeypatch.setattr(rounding_cost, "Replays", Replays)
    monkeypatch.setattr(rounding_cost, "GraphCalls", Graphs)
    for name in ("top_k", "moe_layer", "routed_experts"):
        monkeypatch.setattr(rounding_cost, name, lambda *operands, name=name: called.append((name, operands)))
    problem = problem_of(SHAPES[0])
    logits, draws = problem.x @ problem.router.T, torch.zeros(6, dtype=torch.int64)
    takes = rounding_cost.prepare(problem, logits, draws, EVICT)
    assert set(captured) | set(takes[-1]()) == set(NUMBERS) and len(takes) == len(captured) + 1
    assert takes[-1]() == {"nearest_backward": 3.0, "nearest_forward_backward": 5.0}
    rounded = {name: captured[name]() for name in ROUNDINGS}
    for name, routing in rounded.items():
        want = padded(logits, 2, 128, name, "topk_softmax", draws if name == "stochastic" else None)
        assert isinstance(routing, RoundedRouting) and torch.equal(routing.experts, want.experts)
    for name in ("top_k", "layer_forward", "top_k_layer_forward"):
        captured[name]()
    assert [name for name, _ in called] == ["top_k", "routed_experts", "moe_layer"]
    shapes = [[tuple(part.shape) for part in operands if isinstance(part, Tensor)] for _, operands in called]
    pairs = padded(logits, 2, 128, "nearest", "topk_softmax", None).experts.shape
    assert shapes[0] == [(1000, 6)] and shapes[2] == [(1000, 16), (6, 16, 16), (6, 16, 8), (6, 16)]
    assert shapes[1] == [(1000, 16), (6, 16, 16), (6, 16, 8), pairs, pairs, (1001,)]


@pytest.mark.skipif(not COMMITTED.exists(), reason="not measured yet")
def test_the_committed_file_is_whole() -> None:
    found = json.loads(COMMITTED.read_text())
    assert {*ABOUT, "command", "m_tile", "rounds"} <= set(found)
    assert [one["shape"] for one in found["shapes"]] == list(rounding_cost.SHAPES)
    for one in found["shapes"]:
        assert set(one["samples"]) == set(NUMBERS) and set(one["pairs"]) == set(ROUNDINGS)
        assert one.items() >= rounding_cost.summary(one["samples"]).items()

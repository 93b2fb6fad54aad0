"""What rows of training steps say of the claims, and that they say nothing of the others."""

from __future__ import annotations

import functools
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console
from scipy import stats
from test_claims import changed, finding, write

from harness.claims import Finding, evaluate
from harness.record import validate
from harness.registry import ROOT
from harness.report import data, html, markdown, terminal
from harness.store import latest, read
from harness.training import power
from plots import rows as plotted

Row = dict[str, Any]


@functools.cache
def headline() -> list[Row]:
    """The committed rows of the headline's layer."""
    rows, _ = read(ROOT / "results" / "nvidia_h200" / "paper_layers.jsonl")
    return [dict(row) for row in rows if row["shape"] == {"T": 24576, "d": 1536, "n": 256, "E": 128, "K": 8}]


def first(**fields: Any) -> Row:
    rows = headline()
    return next(json.loads(json.dumps(row)) for row in rows if all(row.get(key) == fields[key] for key in fields))


def ratio(**fields: Any) -> Row:
    """A ratio of training steps."""
    row = first(record="ratio", numerator="scattermoe", status="ok", operation="moe_layer", **{"pass": "forward"})
    row = {key: value for key, value in row.items() if key not in ("correctness", "basis", "basis_reason")}
    step = {"operation": "training_step", "pass": "forward_backward", "sweep": "training", "time_kind": "host"}
    step |= {"variant": "7B, 8 layers, 6 sequences, 1 process", "value": 1.5, "ci95": [1.45, 1.55]}
    row = {**row, **step, "denominator": "sonicmoe_triton", **fields}
    assert validate(row) == []
    return row


def measurement() -> Row:
    """A training step of the headline's shape."""
    row = first(record="measurement", implementation="sonicmoe_triton", operation="moe_layer", status="ok")
    drop = ("device_ms", "busy_ms", "kernels", "tflops", "costs", "correctness")
    row = {key: value for key, value in row.items() if key not in drop}
    times = {"median": 900.0, "p05": 899.0, "p95": 901.0, "ci95": [899.5, 900.5], "samples": 9, "mode": "sustained"}
    training = {"tokens_per_s": 27000.0, "tokens_per_day_per_gpu": 2.3e9, "mfu": 0.3, "world_size": 1, "layers": 8}
    row |= {"operation": "training_step", "pass": "forward_backward", "variant": "7B, 8 layers", "latency_ms": times}
    training |= {"steps": 50, "loss": 5.0, "validation_loss": None}
    row |= {"training": training, "memory_bytes": {"peak": 10**11}, "timestamp": "2099-01-01T00:00:00+00:00"}
    assert validate(row) == []
    return row


def test_steps_in_turns_measure_the_claims(tmp_path: Path) -> None:
    rounding = ratio(numerator="sonicmoe_triton", variant="1.4B-sparse, 17 layers", value=1.1, ci95=[1.09, 1.12])
    rounding["denominator_routing"] = {**rounding["routing"], "method": "nearest"}
    found, problems = evaluate(write(tmp_path / "gpu", [ratio(), rounding]).parent)
    assert not problems
    its = finding(found, "training-throughput-7b", "ours")
    assert (its.value, its.ci95, its.verdict) == (1.5, (1.45, 1.55), "better")
    assert "7B, 8 layers" in its.reason
    assert finding(found, "token-rounding-training-throughput", "ours").value == 1.1
    official = finding(found, "training-throughput-7b", "official")
    assert official.value is None and "--implementation sonicmoe_official --against scattermoe" in official.reason


@pytest.mark.parametrize(
    "other",
    [
        {"variant": "1.4B, 17 layers"},
        {"numerator": "megablocks"},
        {"status": "unstable", "reason": "something compiled"},
        {"routing": {"method": "nearest", "distribution": "uniform", "seed": 0, "m_tile": 128}},
        {"operation": "moe_layer"},
        {"variant": "7B-of-mine, 8 layers"},
        {"denominator_variant": "7B, 8 layers, 12 sequences, 2 processes"},
        {"time_kind": "busy", "basis": "busy"},
    ],
)
def test_other_rows_do_not(tmp_path: Path, other: Row) -> None:
    found, _ = evaluate(write(tmp_path / "gpu", [ratio(**other)]).parent)
    its = finding(found, "training-throughput-7b", "ours")
    assert its.value is None and "moebench train 7B --implementation sonicmoe_triton --against scattermoe" in its.reason


def test_a_newer_failure_counts(tmp_path: Path) -> None:
    later = changed(ratio(), timestamp="2099-01-01T00:00:00+00:00", status="unstable", reason="something compiled")
    found, _ = evaluate(write(tmp_path / "gpu", [ratio(), later]).parent)
    its = finding(found, "training-throughput-7b", "ours")
    assert its.value is None and "something compiled" in its.reason


def test_a_newer_ratio_of_busy_times_takes_nothing_back(tmp_path: Path) -> None:
    busy = ratio(time_kind="busy", basis="busy", value=0.5, ci95=[0.49, 0.51], timestamp="2099-01-01T00:00:00+00:00")
    its = finding(evaluate(write(tmp_path / "gpu", [ratio(), busy]).parent)[0], "training-throughput-7b", "ours")
    assert (its.value, its.ci95) == (1.5, (1.45, 1.55)) and len(its.rows) == 1


def test_the_whole_model_counts_before_a_newer_trial_of_fewer_layers(tmp_path: Path) -> None:
    whole = ratio(variant="7B, 43 layers, 6 sequences, 11 steps, 1 process, recomputing", value=1.3, ci95=[1.29, 1.31])
    trial = changed(ratio(), timestamp="2099-01-01T00:00:00+00:00")
    found, _ = evaluate(write(tmp_path / "gpu", [whole, trial]).parent)
    its = finding(found, "training-throughput-7b", "ours")
    assert its.value == 1.3 and "43 layers" in its.reason


@pytest.mark.parametrize(("tile", "value"), [(128, 1.1), (64, None)])
def test_rounding_is_to_the_papers_tile(tmp_path: Path, tile: int, value: float | None) -> None:
    rounding = ratio(numerator="sonicmoe_triton", variant="1.4B-sparse, 17 layers", value=1.1, ci95=[1.09, 1.12])
    rounding["routing"] = {**rounding["routing"], "m_tile": tile}
    rounding["denominator_routing"] = {**rounding["routing"], "method": "nearest"}
    its = finding(evaluate(write(tmp_path / "gpu", [rounding]).parent)[0], "token-rounding-training-throughput", "ours")
    assert its.value == value
    assert value or "--routing nearest --against sonicmoe_triton:top_k" in its.reason


def test_rounding_where_experts_have_many_tiles_is_told_and_not_judged(tmp_path: Path) -> None:
    dense = ratio(numerator="sonicmoe_triton", variant="1.4B, 17 layers", value=0.98, ci95=[0.97, 0.99])
    dense["denominator_routing"] = {**dense["routing"], "method": "nearest"}

    def found(*rows: Row) -> Finding:
        folder = write(tmp_path / str(len(rows)), rows)
        return finding(evaluate(folder.parent)[0], "token-rounding-training-throughput", "ours")

    its = found(dense)
    assert (its.value, its.verdict) == (None, "not measured") and "moebench train 1.4B-sparse " in its.reason
    assert its.parts == (("not what is claimed: 1.4B, 17 layers", 0.98, (0.97, 0.99)),) and len(its.rows) == 1
    sparse = changed(dense, variant="1.4B-sparse, 17 layers", value=1.1, ci95=[1.09, 1.12])
    its = found(dense, sparse)
    assert its.value == 1.1 and not its.parts and len(its.rows) == 1


def test_training_steps_disturb_no_other_claim_and_no_figure(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    write(folder / "nvidia_h200", headline())
    before, layers = evaluate(folder)[0], plotted.layers(plotted.load(folder)[0])
    efficiency = ratio(numerator="sonicmoe_triton", denominator_variant="7B, 8 layers, 12 sequences, 2 processes")
    write(folder / "nvidia_h200", [ratio(), efficiency, measurement()], "training.jsonl")
    after, problems = evaluate(folder)
    assert not problems
    differing = {one.claim.id for one, other in zip(before, after, strict=True) if one.findings != other.findings}
    assert differing == {"training-throughput-7b"}
    table, unread = plotted.load(folder)
    assert not unread and (table["operation"] == "training_step").sum() == 3
    pd.testing.assert_frame_equal(plotted.layers(table), layers)


def trained(method: str, seed: int, loss: float, **fields: Any) -> Row:
    """A run with a validation."""
    row = changed(measurement(), routing={"method": method, "seed": seed}, training={"validation_loss": loss})
    return {**row, **fields}


def without_times(row: Row) -> Row:
    """The row of a run that shared its GPU."""
    rates = dict.fromkeys(("tokens_per_s", "tokens_per_day_per_gpu", "mfu"))
    row = {**row, "training": {**row["training"], **rates}}
    del row["latency_ms"]
    assert validate(row) == []
    return row


def test_quality_by_seeds(tmp_path: Path) -> None:
    top_k = [trained("top_k", seed, 3.0 + 0.001 * seed) for seed in range(3)]
    nearest = [trained("nearest", seed, 3.1 + 0.001 * seed + 0.0001 * (seed == 1)) for seed in range(3)]
    found, problems = evaluate(write(tmp_path / "gpu", top_k + nearest).parent)
    assert not problems
    its = finding(found, "token-rounding-quality", "ours")
    assert its.value == pytest.approx(math.exp(0.1), abs=1e-4) and its.verdict == "no number in the paper"
    assert its.ci95 is not None and its.ci95[0] < its.value < its.ci95[1] and "worse" in its.reason
    assert [part[1] for part in its.parts] == pytest.approx([math.exp(3.001), math.exp(3.101)], abs=1e-3)
    assert len(its.rows) == 6 and finding(found, "token-rounding-quality", "official").value is None


def test_what_seeds_cannot_tell_is_not_measured(tmp_path: Path) -> None:
    runs = [trained("top_k", seed, 3.0) for seed in range(3)]
    runs += [trained("nearest", seed, 3.0 + 0.01 * (seed - 1)) for seed in range(3)]
    its = finding(evaluate(write(tmp_path / "a" / "gpu", runs).parent)[0], "token-rounding-quality", "ours")
    assert its.value is None and its.verdict == "not measured" and its.parts and len(its.rows) == 6
    low, high = stats.ttest_rel([2.99, 3.0, 3.01], [3.0] * 3).confidence_interval(0.95)
    found = re.fullmatch(
        r"validation loss with nearest-128 minus with top-K: [+-]0\.0000 nats a token \[(\S+), (\S+)\] over 3 seeds, "
        r"so no difference was seen; less than (\S+) cannot be told by these runs; what more seeds would tell: "
        r"python -m harness\.training\.power --plan 0\.0100 6",
        its.reason,
    )
    assert found, its.reason
    assert [float(found[1]), float(found[2])] == pytest.approx([low, high], abs=5e-5)
    assert float(found[3]) == pytest.approx(power.detectable_difference(0.01, 3, 2), abs=5e-5)
    one = [trained("top_k", 0, 3.0), trained("nearest", 0, 3.1)]
    its = finding(evaluate(write(tmp_path / "b" / "gpu", one).parent)[0], "token-rounding-quality", "ours")
    assert its.value is None and "no two arms share two seeds" in its.reason
    apart = [trained("top_k", 0, 3.0), trained("nearest", 0, 3.1, variant="another run")]
    its = finding(evaluate(write(tmp_path / "c" / "gpu", apart).parent)[0], "token-rounding-quality", "ours")
    assert its.value is None and "moebench train quality" in its.reason and not its.parts


def test_quality_is_nearest_roundings_to_128(tmp_path: Path) -> None:
    """Other arms, also by another tile, are listed; the newest of them stands in for none."""
    runs = [trained("top_k", seed, 3.0 + 0.01 * seed) for seed in range(3)]
    runs += [trained("nearest", seed, 3.1 + 0.01 * seed + 0.0001 * (seed == 1)) for seed in range(3)]
    alone = finding(evaluate(write(tmp_path / "a" / "gpu", runs).parent)[0], "token-rounding-quality", "ours")
    tile = changed(trained("nearest", 0, 4.0), routing={"m_tile": 64}, timestamp="2099-01-02T00:00:00+00:00")
    its = finding(
        evaluate(write(tmp_path / "b" / "gpu", [*runs, tile, trained("up", 0, 5.0)]).parent)[0],
        "token-rounding-quality",
        "ours",
    )
    assert (its.value, its.ci95) == (alone.value, alone.ci95) and its.value == pytest.approx(math.exp(0.1), abs=1e-4)
    assert {part[0]: part[1] for part in its.parts} == pytest.approx(
        {
            "perplexity, top_k, 3 seeds": math.exp(3.01),
            "perplexity, nearest-128, 3 seeds": math.exp(3.11 + 0.0001 / 3),
            "perplexity, nearest-64, 1 seed": math.exp(4.0),
            "perplexity, up-128, 1 seed": math.exp(5.0),
        }
    )
    # Three more seeds that scatter widen the interval: the deviation is pooled.
    scattered = [trained("down", seed, 3.0 + 0.03 * seed) for seed in range(3)]
    wide = finding(
        evaluate(write(tmp_path / "c" / "gpu", [*runs, *scattered]).parent)[0], "token-rounding-quality", "ours"
    )
    assert wide.value == alone.value and wide.ci95 is not None and alone.ci95 is not None
    assert wide.ci95[0] < alone.ci95[0] - 0.01


def test_a_terminal_says_what_runs_came_to_before_what_was_never_run(tmp_path: Path) -> None:
    runs = [trained("top_k", seed, 3.0) for seed in range(3)]
    runs += [trained("nearest", seed, 3.0 + 0.01 * (seed - 1)) for seed in range(3)]
    write(tmp_path / "gpu", runs)
    made = data.build(tmp_path, tmp_path / "out")
    shown = io.StringIO()
    terminal.render(Console(file=shown, width=400), made)
    lines = [line.strip() for line in shown.getvalue().splitlines()]
    mine = [line for line in lines if line.startswith("token-rounding-quality, ")]
    ours, official = "token-rounding-quality, NVIDIA H200, ours (Triton): ", "SonicMoE (official): run: moebench train"
    assert len(mine) == 2 and mine[0].startswith(f"{ours}validation loss with nearest-128 minus with top-K: ")
    assert mine[0].endswith("--plan 0.0100 6") and official in mine[1]
    # Where nobody ran anything, one line says what would.
    assert [line.split(":")[0] for line in lines if line.startswith("near-dense-bound")] == ["near-dense-bound"]
    for text in (markdown.render(made, tmp_path / "out"), html.render(made)):
        assert "over 3 seeds, so no difference was seen; less than 0." in text


@pytest.mark.parametrize(
    "apart",
    [{"notes": ["corpus of another kind"]}, {"dtype": "float32"}, {"variant": "7B, 8 layers, 60 steps"}],
)
def test_runs_that_differ_in_more_are_another_set(tmp_path: Path, apart: Row) -> None:
    runs = [trained("top_k", seed, 3.0, notes=["corpus python"]) for seed in range(3)]
    runs += [trained("nearest", seed, 3.1 + 0.001 * seed, **{"notes": ["corpus python"], **apart}) for seed in range(3)]
    its = finding(evaluate(write(tmp_path / "gpu", runs).parent)[0], "token-rounding-quality", "ours")
    assert its.value is None and not its.parts


def test_a_newer_trial_with_fewer_seeds_is_not_judged(tmp_path: Path) -> None:
    runs = [trained("top_k", seed, 3.0 + 0.001 * seed) for seed in range(3)]
    runs += [trained("nearest", seed, 3.1 + 0.001 * seed + 0.0001 * (seed == 1)) for seed in range(3)]
    later = {"variant": "1.4B, 17 layers", "timestamp": "2099-01-02T00:00:00+00:00"}
    trial = [trained(method, 0, 5.0, **later) for method in ("top_k", "nearest")]
    its = finding(evaluate(write(tmp_path / "gpu", [*runs, *trial]).parent)[0], "token-rounding-quality", "ours")
    assert its.value == pytest.approx(math.exp(0.1), abs=1e-4) and len(its.rows) == 6


def test_losses_count_without_times(tmp_path: Path) -> None:
    runs = [trained("top_k", seed, 3.0 + 0.001 * seed) for seed in range(3)]
    runs += [trained("nearest", seed, 3.1 + 0.001 * seed + 0.0001 * (seed == 1)) for seed in range(3)]
    before = finding(evaluate(write(tmp_path / "a" / "gpu", runs).parent)[0], "token-rounding-quality", "ours")
    shared = [without_times(row) for row in runs]
    after = finding(evaluate(write(tmp_path / "b" / "gpu", shared).parent)[0], "token-rounding-quality", "ours")
    assert after.value is not None and (after.value, after.ci95) == (before.value, before.ci95)


def test_a_run_without_times_replaces_no_timed_one() -> None:
    timed = measurement()
    rows = [timed, without_times(timed)]
    assert latest(rows) == rows

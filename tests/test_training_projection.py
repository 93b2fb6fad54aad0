"""The projection to many GPUs, and what few seeds can tell."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import training_rows
from scipy import stats

from harness import store
from harness.errors import UserError
from harness.registry import ROOT, default_registry
from harness.token_rounding import routing_name
from harness.training import costs, log, power, projection, rows
from harness.training.config import CONFIGURATIONS, load_config
from harness.training.projection import OPTIMISER_BYTES, Compute, Links, compute_of, project
from harness.training.rows import asked

SEVEN = load_config("7B")
GPU = "NVIDIA H200"
COMPUTE = Compute(block=0.02, rest=0.05, forward_share=1 / 3, how="made up")


def row(layers: int, seconds: float, world: int = 1, micro_batches: int = 2) -> dict[str, Any]:
    """Of so many micro-batches on each GPU."""
    rate = micro_batches * SEVEN.shape.T * world / seconds
    training = {"world_size": world, "layers": layers, "tokens_per_s": rate}
    training["tokens_per_day_per_gpu"] = rate * 86_400 / world
    return {"latency_ms": {"median": seconds * 1e3}, "training": training, "variant": f"{layers}, {world}"}


def optimiser(layers: int) -> float:
    return costs.parameters(replace(SEVEN, layers=layers)) * OPTIMISER_BYTES / 4.8e12


def test_one_gpu_is_what_was_measured() -> None:
    config = replace(SEVEN, layers=8, batch=12)
    steps = [row(layers, 2 * (0.03 * layers + 0.07) + optimiser(layers)) for layers in (4, 8)]
    compute = compute_of(steps, config, GPU)
    assert compute.block == pytest.approx(0.03) and compute.rest == pytest.approx(0.07)
    expected = steps[1]["training"]["tokens_per_s"] * 86_400
    its = project(config, compute, 1, GPU)
    assert its.tokens_per_day == pytest.approx(expected) and its.exposed == pytest.approx(0, abs=1e-12)


def test_one_step_is_divided_by_flops() -> None:
    compute = compute_of([row(8, 1.0 + optimiser(8))], SEVEN, GPU)
    own = replace(SEVEN, layers=8)
    assert 8 * compute.block + compute.rest == pytest.approx(0.5)
    assert compute.rest / 0.5 == pytest.approx(6 * 50304 * 1536 / costs.model_flops(own))
    assert "divided by FLOPs" in compute.how and "carried on to 43" in compute.how


def test_what_is_computed_again_is_none_of_the_heads() -> None:
    """One step alone, recomputing: blocks take four thirds of their model FLOPs, the forward a quarter of that."""
    head, block = 6 * 50304 * 1536, (costs.model_flops(SEVEN) - 6 * 50304 * 1536) / 43
    config = replace(SEVEN, recompute=True)
    compute = compute_of([row(43, 2 * (head + 43 * 4 / 3 * block) * 1e-11 + optimiser(43))], config, GPU)
    assert compute.rest == pytest.approx(head * 1e-11) and compute.block == pytest.approx(4 / 3 * block * 1e-11)
    assert compute.forward_share * compute.block == pytest.approx(block * 1e-11 / 3)
    assert "carried on" not in compute.how


def test_steps_of_one_batch_only() -> None:
    def steps(block: float, layers: list[int], micro_batches: int) -> list[dict[str, Any]]:
        return [row(n, micro_batches * (block * n + 0.07) + optimiser(n), 1, micro_batches) for n in layers]

    two, four, eight = steps(0.03, [8, 16], 2), steps(0.02, [8, 16], 4), steps(0.01, [8], 8)
    assert compute_of(four + two + eight, SEVEN, GPU).block == pytest.approx(0.02)
    assert "with 8, 16 layers and 4 micro-batches, carried on to 43" in compute_of(two + four, SEVEN, GPU).how
    whole = compute_of(two + four + steps(0.04, [43], 1), SEVEN, GPU)
    assert 43 * whole.block + whole.rest == pytest.approx(0.04 * 43 + 0.07)
    # Of equal ones the median.
    assert compute_of(four + steps(0.05, [8, 16], 4) + steps(0.03, [8, 16], 4), SEVEN, GPU).block == pytest.approx(0.03)


def test_steps_of_the_configuration() -> None:
    ours = training_rows.step(layers=8)
    others = [
        training_rows.failed("out_of_memory", "too large"),
        training_rows.step(unstable="something compiled"),
        {**ours, "measured_on": "cpu"},
        training_rows.step(layers=8, validation_loss=3.2),
        {**ours, "variant": ours["variant"].replace("7B", "my 7B")},
        training_rows.in_turns(ours, ours, 1.0),
        *(
            training_rows.step(**changes)
            for changes in ({"configuration": "1.4B"}, {"micro_batch": 3}, {"routing": "nearest"}, {"recompute": True})
        ),
        training_rows.step(implementation="scattermoe"),
    ]
    assert projection.steps_of([*others, ours], SEVEN, "sonicmoe_triton") == [ours]
    again = projection.steps_of([*others, ours], replace(SEVEN, recompute=True), "sonicmoe_triton")
    assert again == [others[-2]]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "training.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*training_rows.session(), training_rows.step(world=8)]))
    projection.main([str(path), "--implementation", "sonicmoe_triton", "--gpus", "64", "96", "128"])
    head, *lines = capsys.readouterr().out.splitlines()
    names = ("recomputing", *projection.COLUMNS)
    assert head.split() == " ".join(names).split() and len({len(line) for line in (head, *lines[:12])}) == 1
    ways = [(again, gpus, over) for again in ("yes", "no") for gpus in ("64", "96", "128") for over in ("8", "all")]
    assert [tuple(line.split()[:3]) for line in lines[:12]] == ways
    for recompute, shard in ((True, 0), (False, 8)):
        config = replace(SEVEN, recompute=recompute, shard=shard)
        rows = projection.steps_of(training_rows.session(), config, "sonicmoe_triton")
        its = project(config, compute_of(rows, config, GPU), 96, GPU)
        line = lines[ways.index(("yes" if recompute else "no", "96", str(shard or "all")))]
        assert line.split()[3] == f"{its.tokens_per_day / 1e9:.1f}" and "225 (ScatterMoE)" in line
    # 64 micro-batches of 6 sequences: on more GPUs each has one.
    assert [project(config, COMPUTE, gpus, GPU).sequences for gpus in (16, 64, 96)] == [384, 384, 576]
    assert lines[4].split()[7] == "–"
    assert lines[12].startswith("Recomputing, yes: from a step with 43 layers and 4 micro-batches, divided by FLOPs")
    assert lines[13].startswith("check: 7B, 43 layers, 384 sequences, 11 steps, 8 proc")
    assert "Recomputing, no: " in lines[14] and "20, 24 layers" in lines[14]
    assert "Each GPU has the memory" in " ".join(lines)
    projection.main([str(path), "--implementation", "sonicmoe_triton", "--gpus", "64", "--shard", "0"])
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()[1:3]] == ["all"] * 2
    with pytest.raises(SystemExit, match=r"^2$"):
        projection.main([str(path), "--implementation", "sonicmoe_triton", "--gpus", "60"])
    assert "projection: shard = 8: must divide the number of processes, 60" in capsys.readouterr().err


def test_a_link_without_end_hides_everything() -> None:
    fast = project(SEVEN, COMPUTE, 64, GPU, Links(inside=1e30, between=1e30))
    own = SEVEN.micro_batches // 64
    seconds = own * (43 * 0.02 + 0.05) + optimiser(43) / 64
    assert fast.tokens_per_day == pytest.approx(86_400 * SEVEN.step_tokens / seconds)
    assert fast.exposed == pytest.approx(0, abs=1e-9)


def test_a_slow_link_is_all_that_counts() -> None:
    # A machine has eight of them.
    slow = project(SEVEN, COMPUTE, 64, GPU, Links(between=1e9 / 8, efficiency=1.0))
    parameters = costs.parameters(SEVEN)
    block = parameters - costs.parameters(replace(SEVEN, layers=42))
    moved = 63 / 64 * (8 * 43 * block + 6 * (parameters - 43 * block))  # 2 + 2 + 4 bytes
    # What cannot hide would take longer than all of the computation: no more than one after the other.
    seconds = SEVEN.micro_batches // 64 * (moved / 1e9 + 43 * 0.02 + 0.05) + optimiser(43) / 64
    assert slow.tokens_per_day == pytest.approx(86_400 * SEVEN.step_tokens / seconds)
    assert slow.exposed > 0.9


@pytest.mark.parametrize(
    ("gpus", "shard"), [(2, 0), (2, 1), (8, 0), (8, 2), (8, 8), (16, 0), (16, 8), (64, 0), (64, 8), (96, 0), (96, 8)]
)
def test_bounds_enclose_the_projection(gpus: int, shard: int) -> None:
    its = project(replace(SEVEN, shard=shard), COMPUTE, gpus, GPU)
    assert its.bounds[0] <= its.tokens_per_day <= its.bounds[1] and 0 <= its.exposed < 1
    assert its.state_bytes == 16 * costs.parameters(SEVEN) / (shard or gpus)
    assert (its == project(SEVEN, COMPUTE, gpus, GPU)) == (shard in (0, gpus))


def test_the_slowest_place_of_a_ring() -> None:
    links = Links(inside=300e9, between=50e9, efficiency=0.5)
    rates = {(8, 1): 300, (4, 2): 300, (2, 8): 50, (64, 1): 300, (12, 8): 50, (32, 2): 200, (4, 16): 50}
    for (gpus, every), rate in rates.items():
        assert links.bytes_per_s(gpus, every) == 0.5e9 * rate


@pytest.mark.parametrize("own", [1, 3])
def test_copies_are_summed_once_a_step(own: int) -> None:
    """By hand: a slow network, over which a block's gradients take longer than its backward."""
    links = Links(between=1e9, efficiency=1.0)
    config = replace(SEVEN, shard=8, batch=64 * 6 * own)
    parameters = costs.parameters(SEVEN)
    block = parameters - costs.parameters(replace(SEVEN, layers=42))
    root = parameters - 43 * block
    gather, scatter = (7 / 8 * size * block / 450e9 for size in (2, 4))
    reduce = 2 * 7 / 8 * 4 / 8 * block / 1e9
    backward = 0.02 * 2 / 3
    assert reduce > backward > gather + scatter
    micro_batch = 43 * 0.02 + 0.05 + gather + scatter + 7 / 8 * 6 * root / 450e9
    last = 43 * (gather + scatter + reduce - backward) + reduce * (1 + root / block)
    seconds = own * micro_batch + last + optimiser(43) / 8
    its = project(config, COMPUTE, 64, GPU, links)
    assert its.tokens_per_day == pytest.approx(86_400 * config.step_tokens / seconds)
    assert its.exposed == pytest.approx((own * (micro_batch - 0.91) + last) / seconds)
    # With all links fast what is left is the optimiser, on an eighth of the parameters.
    fast = project(config, COMPUTE, 64, GPU, Links(inside=1e30, between=1e30))
    assert fast.tokens_per_day == pytest.approx(86_400 * config.step_tokens / (own * 0.91 + optimiser(43) / 8))


def test_the_check_goes_by_steps_of_the_same_layers_and_micro_batches() -> None:
    own = replace(SEVEN, layers=8, batch=2 * 3 * 6)
    alone = row(8, 3 * 0.5 + optimiser(8), micro_batches=3)
    compute = compute_of([alone], SEVEN, GPU)
    expected = project(own, compute, 2, GPU)
    together = row(8, 6 * SEVEN.shape.T * 86_400 / expected.tokens_per_day, world=2, micro_batches=3)
    together["training"]["exposed_communication"] = 0.034
    # Others of one process, by which the same steps would take twice as long.
    others = [row(8, 2 * 1.0 + optimiser(8)), row(4, 2 * 0.6 + optimiser(4))]
    for found in ([alone, together], [*others, alone, together], [together, alone, *others]):
        [line] = projection.check(found, SEVEN, GPU, Links())
        assert "8, 2: projected / measured = 1.000;" in line
        assert f"exposed communication {expected.exposed:.1%} projected, 3.4% measured" in line
    del together["training"]["exposed_communication"]
    [line] = projection.check([*others, together], SEVEN, GPU, Links())
    assert "measured = 1.000" not in line and line.endswith("projected, not measured")
    assert projection.check([alone], SEVEN, GPU, Links()) == []


def test_the_check_goes_by_the_rows_own_sharding() -> None:
    config = replace(SEVEN, layers=8, batch=2 * 6)
    alone = row(8, 0.5 + optimiser(8), micro_batches=1)
    copies = project(replace(config, shard=1), compute_of([alone], SEVEN, GPU), 2, GPU)
    together = row(8, 2 * SEVEN.shape.T * 86_400 / copies.tokens_per_day, world=2, micro_batches=1)
    for shard, same in ((1, True), (0, False)):
        together["variant"] = rows.variant(replace(config, shard=shard), 2)
        [line] = projection.check([alone, together], SEVEN, GPU, Links())
        assert ("projected / measured = 1.000;" in line) == same


def test_steps_of_the_same_layers_count_once() -> None:
    rows = [row(8, seconds + optimiser(8), micro_batches=1) for seconds in (0.5, 0.6, 5.0)]
    compute = compute_of(rows, SEVEN, GPU)
    assert 8 * compute.block + compute.rest == pytest.approx(0.6) and "and 1 micro-batch," in compute.how


def test_what_cannot_be_projected(capsys: pytest.CaptureFixture[str]) -> None:
    for steps, gpu, said in (
        ([], GPU, "no row of a step on one GPU"),
        ([row(8, 1.0, world=2)], GPU, "no row of a step on one GPU"),
        ([row(8, 1.0)], "NVIDIA A100", "no rates are recorded"),
        ([row(4, 2.0), row(8, 1.0)], GPU, "no rising line"),
    ):
        with pytest.raises(UserError, match=said):
            compute_of(steps, SEVEN, gpu)
    path = str(ROOT / "results" / "nvidia_h200" / rows.FILE)
    for given, said in (
        (["/nowhere/rows.jsonl"], "cannot be read"),
        ([path, "--configuration", "nope"], "choose from"),
        ([path, "--gpus", "8", "0"], "--gpus 0: must be at least 1"),
        ([path, "--gpus", "9" * 400], "must be at least 1 and at most 2147483647"),
        ([path, "--shard", "9" * 400], "must be at least 0 and at most 2147483647"),
        ([path, "--efficiency", "0"], "--efficiency 0: must be greater than 0 and at most 1"),
        ([path, "--efficiency", "nan"], "--efficiency nan: must"),
        ([path, "--shard", "-8"], "--shard -8: must"),
    ):
        with pytest.raises(SystemExit, match=r"^2$"):
            projection.main([*given, "--implementation", "sonicmoe_triton"])
        error = capsys.readouterr().err
        assert error.startswith("projection: ") and said in error and error.count("\n") == 1


@pytest.mark.parametrize("number", ["9" * 5000, "9" * 18, "0"], ids=len)
def test_a_row_that_claims_anything_is_one_line_or_projected(tmp_path: Path, number: str) -> None:
    """A rate beyond every float, and numbers beyond what Python reads as such."""
    step = training_rows.step(layers=8)
    step["variant"] += f", sharded over {number}, {number} processes"
    step["training"] |= {"tokens_per_s": 1.7e308, "tokens_per_day_per_gpu": 1.7e308}
    path = tmp_path / "training.jsonl"
    path.write_text(json.dumps(step))
    assert store.read(path)[1] == []
    try:
        projection.main([str(path), "--implementation", "sonicmoe_triton"])
    except SystemExit as end:
        assert end.code == 2


def test_the_papers_numbers_stand_beside_its_7b_alone() -> None:
    for name, said in (("7B", "213 (SonicMoE)"), ("1.4B", "–")):
        config = load_config(name)
        its = project(config, compute_of([row(8, 1.0)], config, GPU), 64, GPU)
        assert projection.cells(its, name)[4][1] == said


def test_a_step_on_a_shared_gpu_is_not_projected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(SEVEN, layers=8, implementation="torch_loop", routing="top_k")
    base = rows.base_row(config, default_registry().get("torch_loop"), 1, "cpu")
    base |= {"measured_on": "cuda", "environment": {**base["environment"], "measured_on": "cuda", "gpu": GPU}}
    arguments = [str(tmp_path / rows.FILE), "--implementation", "torch_loop"]
    for step_ms in (None, [900.0]):
        rows.append(tmp_path, rows.measured_row(base, config, 1, step_ms, 2.5, 2.0, 10**10, [], None))
        if step_ms is None:
            with pytest.raises(SystemExit, match=r"^2$"):
                projection.main(arguments)
            assert "no training step of torch_loop on one GPU" in capsys.readouterr().err
    projection.main(arguments)
    assert "a step with 8 layers" in capsys.readouterr().out


def test_detectable_differences_are_detected() -> None:
    """By simulation: Student's test finds them as often as promised, and `compare` is that test."""
    noise = np.random.default_rng(0).normal(0, 1, (20_000, 3))
    for delta, expected in ((power.detectable_difference(1.0, 3, 2), 0.8), (0.0, 0.05)):
        drawn = noise + delta
        found = stats.ttest_1samp(drawn, 0.0, axis=1).pvalue < 0.05
        assert found.mean() == pytest.approx(expected, abs=0.01)
        for one, said in zip(drawn[:60].tolist(), found, strict=False):
            verdict = power.compare(one, *power.pooled_deviation([one])).verdict
            assert (verdict != "not measured") == said
            assert not said or (verdict == "worse") == (np.mean(one) > 0)


def test_more_seeds_tell_more() -> None:
    one, three = (power.detectable_difference(0.01, seeds, 4) for seeds in (1, 3))
    assert one > three > power.detectable_difference(0.01, 10, 9) > 0.005
    assert power.detectable_difference(0.0, 3, 4) == 0
    with pytest.raises(ValueError, match="at least 1"):
        power.detectable_difference(0.01, 0, 4)


def test_what_a_plan_can_tell(capsys: pytest.CaptureFixture[str]) -> None:
    power.main(["--plan", "0.01", "4"])
    many, one = (f"{power.detectable_difference(0.01, seeds, 3):.4f}" for seeds in (4, 1))
    said = capsys.readouterr().out
    assert f"a difference of {many} nats is found with a probability of 80%; of an arm with one seed, {one}." in said
    for wrong in (["0.01", "1"], ["-1", "4"], ["nan", "4"], ["0.01", "four"]):
        assert re.fullmatch(r"power: --plan .* seeds\n", refused(["--plan", *wrong], capsys))
    for neither in ([], ["run", "--plan", "0.01", "4"]):
        assert refused(neither, capsys) == "power: name the folders of runs, or --plan DEVIATION SEEDS\n"


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What `power` says before its exit code 2."""
    with pytest.raises(SystemExit, match=r"^2$"):
        power.main(arguments)
    return capsys.readouterr().err


def test_arms_are_compared_seed_by_seed() -> None:
    assert power.differences({0: 2.0, 1: 3.0, 4: 9.0}, {1: 2.5, 0: 2.0, 3: 1.0}) == [0.0, 0.5]


def test_the_deviation_is_pooled() -> None:
    deviation, freedom = power.pooled_deviation([[1.0, 3.0], [5.0], [], [10.0, 10.0, 13.0]])
    assert (deviation, freedom) == (pytest.approx(math.sqrt((2 + 6) / 3)), 3)
    with pytest.raises(UserError, match="no two arms share two seeds"):
        power.pooled_deviation([[1.0], []])


def run(folder: Path, loss: float, step: int = 100, **changes: Any) -> Path:
    config = load_config("tiny", changes)
    name = f"{config.routing}-{config.seed}-{config.layers}-{step}"
    its = log.Log(folder / name, 0, config.as_dict())
    its.write(step=step, loss=9.0, tokens=64 * step)
    its.write(step=step, validation_loss=loss)
    its.close()
    return folder / name


def test_arms_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Seeds move the loss by far more than the routing does, but both arms alike.
    runs = [run(tmp_path, 2.0 + 0.1 * seed, seed=seed) for seed in range(3)]
    nearest = {"routing": "nearest", "m_tile": 64}
    runs += [run(tmp_path, 2.001 + 0.1 * seed + 0.0001 * (seed == 1), seed=seed, **nearest) for seed in range(3)]
    runs += [run(tmp_path, 2.00001, routing="expert_choice")]
    power.main([str(folder) for folder in runs])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "top_k: 2.1000, 3 seeds"
    assert said[1].startswith("nearest-64: 2.1010, 3 seeds; +0.0010 [") and said[1].endswith("against top-K: worse")
    assert "expert_choice" in said[2] and "not measured (less than" in said[2]
    assert said[3].startswith("A seed moves the difference of two arms by 0.0001 nats (standard deviation, 2 degrees")


def test_runs_that_are_not_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(tmp_path, 2.0)
    for other, said in (
        (run(tmp_path, 2.0, layers=3), "layers = 3, 2 in the runs before"),
        (run(tmp_path, 2.0, step=50), "step = 50, 100 in the runs before"),
        (tmp_path, "holds no run of moebench train"),
    ):
        with pytest.raises(UserError, match=said):
            power.arms_of([first, other])
    (first / log.FILE).write_text(json.dumps({"step": 1, "loss": 2.0, "tokens": 64}))
    assert "has no validation loss yet" in refused([str(first)], capsys)


def test_the_plan_for_quality_rests_on_committed_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """What `quality.toml` says of its pilot, and of what it can tell."""
    said = " ".join((CONFIGURATIONS / "quality.toml").read_text(encoding="utf-8").replace("#", " ").split())
    losses: dict[str, dict[int, float]] = {}
    for row in store.read(ROOT / "results" / "cpu" / "training.jsonl")[0]:
        if asked(row["variant"]).configuration == "quality-pilot":
            routing = row["routing"]
            arm = losses.setdefault(routing_name(routing["method"], routing["m_tile"]), {})
            arm[routing["seed"]] = row["training"]["validation_loss"]
    assert set(losses) == {"top_k", "nearest-128"}
    deviation, freedom = power.pooled_deviation([power.differences(losses["nearest-128"], losses["top_k"])])
    assert freedom == 5 and f"of both by {deviation:.3f} nats" in said
    arms, one, more = (power.detectable_difference(0.014, *sizes) for sizes in ((4, 3), (1, 3), (8, 7)))
    for part in (f"difference of {arms:.3f} nats", f"one seed {one:.3f}", f"8 seeds would find {more:.3f}"):
        assert part in said
    power.main(["--plan", "0.014", "4"])
    assert f"{arms:.4f} nats" in capsys.readouterr().out


def test_the_runs_for_quality_are_those_of_its_plan() -> None:
    said = " ".join((CONFIGURATIONS / "quality.toml").read_text(encoding="utf-8").replace("#", " ").split())
    folder = ROOT / "results" / "nvidia_h200"
    runs = [row for row in store.read(folder / "training.jsonl")[0] if row["variant"].startswith("quality, 6 layers, ")]
    arms = Counter(routing_name(row["routing"]["method"], row["routing"]["m_tile"]) for row in runs)
    one = said.split("seed 0 alone: ")[1].split(".")[0].split(", ")
    assert arms == {"top_k": 4, "nearest-128": 4, **dict.fromkeys(one, 1)} and len(one) == 7
    # The rows' losses are those of the curves.
    losses = power.arms_of(sorted((folder / "training").glob("quality-*")))
    assert sum(map(len, losses.values())) == len(runs) == 15
    for row in runs:
        arm = routing_name(row["routing"]["method"], row["routing"]["m_tile"])
        assert losses[arm][row["routing"]["seed"]] == row["training"]["validation_loss"]
    deviation = statistics.stdev(losses["nearest-128"][seed] - losses["top_k"][seed] for seed in range(4))
    limits = [power.detectable_difference(deviation, seeds, 3) for seeds in (4, 1)]
    assert f"is {deviation:.4f} nats (3 degrees of freedom)" in said
    assert f"difference of {limits[0]:.4f} nats" in said and f"with one seed {limits[1]:.4f}." in said
    # What the README makes of them in words.
    last = {arm: its[0] - losses["top_k"][0] for arm, its in losses.items() if arm in one}
    assert sum(difference > 0 for arm, difference in last.items() if arm != "expert_choice") == 5
    ends = {}
    for arm in one:
        curve = log.read(next((folder / "training").glob(f"quality-*-{arm}-seed-0")))
        ends[arm] = statistics.fmean([line["loss"] for line in curve if "loss" in line][-30:])
    assert min(ends.values()) < ends["expert_choice"] < max(ends.values())

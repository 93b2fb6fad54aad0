"""The README's numbers are those of the committed rows."""

from __future__ import annotations

import json
import math
import re
import statistics
from typing import Any

import pandas as pd
import pytest
from scipy import stats
from training_rows import in_turns, step

from harness.store import read_folder
from harness.tuners import tiles_note
from plots import kernel_table, numbers, rows

FOLDER = rows.RESULTS / "nvidia_h200"
#: As notes name it.
TUNING = "results/nvidia_h200/tuning/sonicmoe_official.json"
COMMITTED = [json.loads(line) for path in FOLDER.glob("*.jsonl") for line in path.read_text().splitlines()]


def test_the_readme_holds_what_the_rows_say() -> None:
    table, problems = rows.load(FOLDER)
    assert not problems
    text = numbers.README.read_text(encoding="utf-8")
    assert text == numbers.with_numbers(text, numbers.lines(table)), "run: python -m plots.numbers"


def newest(**wanted: object) -> dict[str, object]:
    found = [
        row
        for row in COMMITTED
        if row["status"] == "ok" and all(row.get(key) == value for key, value in wanted.items())
    ]
    return max(found, key=lambda row: row["timestamp"])


def test_its_numbers_by_another_way() -> None:
    shape = {"T": 24576, "d": 1536, "n": 256, "E": 128, "K": 8}
    ratio = newest(
        record="ratio", numerator="scattermoe", denominator="sonicmoe_official", shape=shape, **{"pass": "forward"}
    )
    assert f"{ratio['value']:.2f}× [" in numbers.README.read_text(encoding="utf-8")
    memory = newest(operation="moe_layer", implementation="sonicmoe_official", shape=shape, measured_on="cuda")[
        "memory_bytes"
    ]
    assert isinstance(memory, dict)
    assert f"{memory['layer'] / 2**30:.3f} GiB |" in numbers.README.read_text(encoding="utf-8")


def test_the_kernels_numbers_by_another_way() -> None:
    found: dict[str, dict[str, float]] = {}
    # A file's later rows are newer.
    for row in COMMITTED:
        place = row["record"], row["operation"], row.get("denominator"), row.get("variant")
        if place == ("ratio", "expert_aggregation", "sonicmoe_triton", "gather") and row["numerator"] != place[2]:
            shape = json.dumps(row["shape"])
            found.setdefault(shape, {})[row["numerator"]] = row["value"]
    best = {shape: min(values.values()) for shape, values in found.items()}
    assert len(best) == 12
    mean = math.prod(best.values()) ** (1 / 12)
    text = f"{mean:.2f}× ({min(best.values()):.2f}× to {max(best.values()):.2f}×)"
    assert text in numbers.README.read_text(encoding="utf-8")


def test_token_roundings_numbers_by_another_way() -> None:
    shape = {"T": 16384, "d": 4096, "n": 1024, "E": 512, "K": 8}
    of_layer = [row for row in COMMITTED if row["record"] == "ratio" and row["operation"] == "moe_layer"]
    found = [row for row in of_layer if row.get("denominator_routing", {}).get("method") == "nearest"]
    found = [row for row in found if row["shape"] == shape and row["pass"] == "forward"]
    last = max(found, key=lambda row: row["timestamp"])
    weight = last["denominator_routing"]["routed_rows"] / last["routing"]["routed_rows"]
    value, low, high = (weight * value for value in (last["value"], *last["ci95"]))
    text = f"included | – | forward {value:.2f}× [{low:.2f}, {high:.2f}];"
    assert text in numbers.README.read_text(encoding="utf-8")


def test_what_the_readme_says_of_the_official_kernels_rounded() -> None:
    text = " ".join(numbers.README.read_text(encoding="utf-8").split())
    own = [row for row in COMMITTED if row["sweep"] == "token_rounding" and row["operation"] == "routed_experts"]
    own = sorted((row for row in own if row["status"] == "ok"), key=lambda row: row["timestamp"])
    gains: dict[tuple[int, str], list[tuple[float, ...]]] = {}
    found = set()
    for row in own:
        if row.get("numerator") == row.get("denominator") == "sonicmoe_official":
            weight = row["denominator_routing"]["routed_rows"] / row["routing"]["routed_rows"]
            gain = tuple(weight * value for value in (row["value"], *row["ci95"]))
            gains.setdefault((row["shape"]["E"], row["pass"]), []).append(gain)
            (found.discard if tiles_note(0, TUNING) in row["notes"] else found.add)(row["shape"]["E"])
    last = {key: values[-1] for key, values in gains.items()}
    assert "exceed the paper's number at 512 experts, forward and forward + backward" in text
    paper = rows.claims()["token-rounding-kernel-speedup"]["value"]
    assert last[512, "forward"][1] > paper and last[512, "forward_backward"][1] > paper
    assert "with 32 experts rounding makes their backward slower" in text and last[32, "backward"][2] < 1
    assert "At 256 and 512 experts their tiles were chosen" in text and "with fewer they were found" in text
    assert found == {32, 64, 128}
    assert "say less backward and forward + backward at both: at 512 experts less than the paper's number." in text
    first = {key: values[0] for key, values in gains.items() if key[0] in (256, 512)}
    assert all(first[key][2] < last[key][1] for key in first if key[1] != "forward")
    assert first[512, "forward_backward"][2] < paper
    assert "Forward at 256 experts they say more" in text and first[256, "forward"][1] > last[256, "forward"][2]
    assert "a tile of the up-projection that is slower than the one found then" in text
    assert "the gain is smaller than at 128 and 512 experts" in text
    assert last[256, "forward"][2] < min(last[128, "forward"][1], last[512, "forward"][1])
    name = "sonicmoe_official"
    points = [row for row in own if row.get("implementation") == name and row["pass"] == "forward"]
    rounded = [row for row in points if row["shape"]["E"] == 256 and row["routing"]["method"] == "nearest"]
    up = [max(kernel["us"] for kernel in row["kernels"] if "GemmGated" in kernel["name"]) for row in rounded]
    # Of the rows' difference in milliseconds, most is this kernel's.
    assert up[0] < up[-1] and up[-1] - up[0] > 0.5e3 * (
        rounded[-1]["busy_ms"]["median"] - rounded[0]["busy_ms"]["median"]
    )


def layer_ratios(
    sweep: str, numerator: str, denominator: str = "sonicmoe_triton"
) -> dict[tuple[str, str], tuple[float, ...]]:
    """Of layers, forward + backward: (shape, distribution) -> the newest ratio and its interval, the sweep's first."""
    found = {}
    for row in sorted(COMMITTED, key=lambda row: (row["sweep"] == sweep, row["timestamp"])):
        what = row["record"], row["operation"], row["status"], row["dtype"], row["pass"]
        if what == ("ratio", "moe_layer", "ok", "bfloat16", "forward_backward") and (
            (row["numerator"], row["denominator"]) == (numerator, denominator) and "denominator_routing" not in row
        ):
            shape = ",".join(str(row["shape"][name]) for name in "TdnEK")
            found[shape, row["routing"]["distribution"]] = row["value"], *row["ci95"]
    return found


def test_finer_and_more_experts_by_another_way() -> None:
    text = numbers.README.read_text(encoding="utf-8")
    finer = [f"24576,1536,{n},{32768 // n},{2048 // n}" for n in (1024, 512, 256, 128, 64)]
    more = [f"24576,1536,256,{experts},8" for experts in (32, 64, 128, 256, 512)]
    rising = {}
    for name in ("sonicmoe_official", "scattermoe", "deepgemm", "torch_grouped_mm"):
        for sweep, what, shapes in (
            ("granularity", "with n = 1024 to 64, at equal cost", finer),
            ("sparsity", "n = 256, with 32 to 512 experts", more),
        ):
            ratios = layer_ratios(sweep, name)
            values = [ratios[shape, "uniform"][0] for shape in shapes]
            mean = f"{statistics.geometric_mean(values):.2f}×"
            assert f"{what} | – | {mean} ({min(values):.2f}× to {max(values):.2f}×) |" in text
            rising[name, sweep] = values == sorted(values)
    # As the text below the table says.
    assert rising["deepgemm", "granularity"] and rising["deepgemm", "sparsity"]
    assert rising["torch_grouped_mm", "granularity"]


def test_what_the_readme_says_of_finer_and_more_experts() -> None:
    """What it says of the official layer's tiles, points and commits in the two sweeps."""
    text = " ".join(numbers.README.read_text(encoding="utf-8").split())
    last: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in sorted(COMMITTED, key=lambda row: row["timestamp"]):
        if row["sweep"] in ("granularity", "sparsity") and row["operation"] == "moe_layer" and row["status"] == "ok":
            who = (row.get("numerator") or row["implementation"], row.get("denominator", ""))
            last[(row["sweep"], *who, row["pass"], *(str(row["shape"][name]) for name in "nE"))] = row
    official, ours = "sonicmoe_official", "sonicmoe_triton"
    assert (
        "the official tiles of every layer here were chosen by the package's own tuner while nothing else ran" in text
    )
    of_official = [row for key, row in last.items() if official in key]
    assert len(of_official) == 2 * (15 + 15 + 3) and all(tiles_note(0, TUNING) in row["notes"] for row in of_official)
    point, our_point = (last["granularity", name, "", "forward", "128", "256"] for name in (official, ours))
    ratio = last["granularity", official, ours, "forward", "128", "256"]
    assert "At n = 128 forward, where the two lie close" in text
    assert point["busy_ms"]["median"] < our_point["busy_ms"]["median"] and ratio["ci95"][0] > 1
    assert "The ratios with the official package are of a later commit than the others" in text
    ratios = {key: row for key, row in last.items() if key[2] == ours}
    its = [row for key, row in ratios.items() if key[1] == official]
    others = [row for key, row in ratios.items() if key[1] != official]
    for its_or_others in (its, others):
        assert len({row["environment"]["commit"] for row in its_or_others}) == 1
    assert min(row["timestamp"] for row in its) > max(row["timestamp"] for row in others)
    assert "ScatterMoE's where n = 256 and E = 128 of an earlier one" in text
    assert not [key for key in ratios if key[1] == "scattermoe" and key[-2:] == ("256", "128")]
    elsewhere = [
        row["timestamp"]
        for row in COMMITTED
        if (row.get("numerator"), row.get("denominator"), row["status"]) == ("scattermoe", ours, "ok")
        and row["operation"] == "moe_layer"
        and row["shape"] == {"T": 24576, "d": 1536, "n": 256, "E": 128, "K": 8}
        and row["routing"]["distribution"] == "uniform"
    ]
    assert elsewhere and max(elsewhere) < min(row["timestamp"] for row in others)


def test_what_the_readme_says_of_megablocks() -> None:
    text = " ".join(numbers.README.read_text(encoding="utf-8").split())
    ratios = layer_ratios("paper_layers", "megablocks", "sonicmoe_official")
    behind = {shape: ratios[shape, "uniform"][0] for _, shape in rows.paper_shapes()}
    assert "MegaBlocks falls the further behind the finer the experts are." in text
    for model in {model for model, _ in rows.paper_shapes()}:
        finest_first = [behind[shape] for its, shape in rows.paper_shapes() if its == model]
        assert len(finest_first) == 3 and finest_first == sorted(finest_first, reverse=True)
    assert (
        "at the finer two layers of 1.4B and of 7B it is further behind than those, at the coarser and larger" in text
    )
    papers = {shape: numbers.paper_time("megablocks", shape, "forward_backward") for shape in behind}
    papers = {
        shape: its / numbers.paper_time("sonicmoe_official", shape, "forward_backward") for shape, its in papers.items()
    }
    further = {shape for shape in behind if behind[shape] > papers[shape]}
    assert further == {"40960,768,256,128,8", "40960,768,512,64,4", "24576,1536,256,128,8", "24576,1536,512,64,4"}
    assert sum(behind[shape] < papers[shape] for shape in behind) == 6


def test_ratios_by_uneven_routing_by_another_way() -> None:
    text = numbers.README.read_text(encoding="utf-8")
    shape = "24576,1536,256,128,8"
    for name, called in (("sonicmoe_official", "SonicMoE"), ("scattermoe", "ScatterMoE")):
        ratios = layer_ratios("skew", name)
        (line,) = [its for its in text.splitlines() if f"{called} / our Triton layer, 7B n = 256, uneven" in its]
        for distribution in ("skewed", "one_group", "empty_experts"):
            value, low, high = ratios[shape, distribution]
            assert f"{value:.2f}× [{low:.2f}, {high:.2f}] " in line and low > 1
    skew = [layer_ratios("skew", name)[shape, "skewed"][0] for name in ("sonicmoe_official", "scattermoe")]
    assert skew == sorted(skew)
    for denominator in ("torch_grouped_mm", "sonicmoe_triton"):
        of_loop = layer_ratios("skew", "torch_loop", denominator)
        for distribution in ("uniform", "skewed"):
            value, low, high = of_loop["65536,2048,3072,32,1", distribution]
            assert f"{value:.2f}× [{low:.2f}, {high:.2f}] {distribution}" in text and low > 1


def test_what_uneven_routing_costs_by_another_way() -> None:
    shape = {"T": 24576, "d": 1536, "n": 256, "E": 128, "K": 8}
    names = ("sonicmoe_triton", "sonicmoe_official", "scattermoe")
    of_pass: dict[str, dict[tuple[str, str], float]] = {}
    for row in sorted(COMMITTED, key=lambda row: row["timestamp"]):
        what = row["record"], row["operation"], row["status"], row["dtype"], row["routing"]["method"]
        if what == ("measurement", "moe_layer", "ok", "bfloat16", "top_k") and (
            row["shape"] == shape and row["implementation"] in names and row["measured_on"] == "cuda"
        ):
            its = of_pass.setdefault(row["pass"], {})
            its[row["implementation"], row["routing"]["distribution"]] = row["busy_ms"]["median"]
    busy, backward = of_pass["forward_backward"], of_pass["backward"]
    for distribution in ("uniform", "skewed", "one_group", "empty_experts"):
        of_each = [busy[name, distribution] for name in names]
        assert of_each == sorted(of_each)
    longer = {key: time / busy[key[0], "uniform"] - 1 for key, time in busy.items()}
    assert [round(longer[name, "skewed"], 2) for name in names] == [0.08, 0.10, 0.05]
    assert all(abs(longer[name, other]) < 0.05 for name in names for other in ("one_group", "empty_experts"))
    text = " ".join(numbers.README.read_text(encoding="utf-8").split())
    assert "about a tenth longer with ours and the official layer and half of that with ScatterMoE, most of it" in text
    for name in names:
        both, late = (its[name, "skewed"] - its[name, "uniform"] for its in (busy, backward))
        assert late > both / 2


def test_lines_of_training_are_of_equal_steps() -> None:
    whole: dict[str, Any] = {"layers": 43, "batch": 6, "recompute": True}
    ours, other = step(**whole), step(implementation="scattermoe", slower=1.3, **whole)
    top_k, nearest = (step("1.4B", batch=10, routing=routing) for routing in ("top_k", "nearest"))
    sparse = [step("1.4B-sparse", batch=10, routing=routing) for routing in ("top_k", "nearest")]
    found = [other, ours, in_turns(other, ours, 1.3), top_k, nearest, in_turns(top_k, nearest, 0.97)]
    found += [*sparse, in_turns(*sparse, 1.07)]

    def lines(*more: dict[str, Any]) -> list[tuple[str, str, str]]:
        return numbers._training(rows.one_gpu([*found, *more]))

    before = lines()
    texts = [(what.split("(")[0], paper, measured.split(" [")[0]) for what, paper, measured in before]
    a_day = [
        f"{row['training']['tokens_per_day_per_gpu'] / 1e9:.2f} B tokens a day" for row in (ours, top_k, sparse[0])
    ]
    assert texts == [
        ("training 7B ", "–", a_day[0]),
        ("… time of a step with ScatterMoE / with ours", "1.42×", "1.30×"),
        ("training 1.4B ", "–", a_day[1]),
        ("… time of a step by top-K / by rounding to the nearest 128", "–", "0.97×"),
        ("training 1.4B-sparse ", "–", a_day[2]),
        ("… time of a step by top-K / by rounding to the nearest 128", "1.16×", "1.07×"),
    ]
    # Of another batch, of two GPUs, to another tile, of a rival by rounding, and of losses alone.
    many = [step(**{**whole, "batch": 12, "implementation": name}) for name in ("scattermoe", "sonicmoe_triton")]
    two = [
        step(**{**whole, "batch": 12, "implementation": name}, world=2) for name in ("scattermoe", "sonicmoe_triton")
    ]
    tile = [step("1.4B", batch=10, routing=routing, m_tile=64) for routing in ("top_k", "nearest")]
    mixed = in_turns(other, step(routing="nearest", **whole), 1.9)
    later = [in_turns(*two, 1.7), in_turns(*tile, 1.8), mixed, step(validation_loss=3.0, **whole), *two, tile[1]]
    assert lines(*later) == before
    assert lines(in_turns(*many, 1.6)) == before
    # Busy times of the same turns stand below; of earlier turns they do not.
    assert found[-1]["time_kind"] == "host"
    busy = in_turns(*sparse, 1.2, busy=True)
    assert lines(busy) == [
        *before,
        ("… by the GPU's busy time alone", "–", numbers._interval(rows.frame([busy]).iloc[0])),
    ]
    assert lines(busy, in_turns(*sparse, 1.07)) == before
    rival = step("1.4B-sparse", batch=10, implementation="scattermoe")
    assert lines(in_turns(rival, sparse[0], 1.2))[-1][1] == "–"


def test_quality_by_another_way() -> None:
    losses: dict[str, dict[int, float]] = {}
    for row in COMMITTED:
        if row["operation"] == "training_step" and row["variant"].startswith("quality, "):
            routing = row["routing"]
            arm = losses.setdefault(f"{routing['method']}-{routing['m_tile']}", {})
            arm[routing["seed"]] = row["training"]["validation_loss"]
    top_k, nearest = losses["top_k-128"], losses["nearest-128"]
    assert sorted(top_k) == sorted(nearest) == [0, 1, 2, 3]
    apart = [nearest[seed] - top_k[seed] for seed in range(4)]
    low, high = stats.ttest_1samp(apart, 0.0).confidence_interval(0.95)
    readme = numbers.README.read_text(encoding="utf-8")
    assert low < 0 < high and f"{statistics.fmean(apart):+.4f} [{low:+.4f}, {high:+.4f}]: not measured" in readme
    half = stats.t.ppf(0.975, 3) * statistics.stdev(apart)
    alone = {arm: its[0] - top_k[0] for arm, its in losses.items() if arm not in ("top_k-128", "nearest-128")}
    choice = alone.pop("expert_choice-128")
    assert choice > half and f"{choice:+.4f} [{choice - half:+.4f}, {choice + half:+.4f}]: worse" in readme
    assert len(alone) == 6 and max(map(abs, alone.values())) < half
    said = f"1 seed each | – | {min(alone.values()):+.4f} to {max(alone.values()):+.4f}: not measured, less than"
    assert said in readme


def test_lines_of_quality_are_of_one_set_of_runs() -> None:
    def run(routing: str, seed: int, loss: float, **changes: Any) -> dict[str, Any]:
        return step("quality", validation_loss=loss, routing=routing, seed=seed, **changes)

    runs = [run("top_k", seed, 1.0 + 0.01 * seed) for seed in range(3)]
    runs += [run("nearest", seed, 1.1 + 0.01 * seed + 0.001 * seed) for seed in range(3)]
    runs += [run("up", 0, 1.001), run("down", 0, 0.5)]

    def lines(*more: dict[str, Any]) -> list[tuple[str, str, str]]:
        return numbers._quality(rows.one_gpu([*runs, *more]))

    before = lines()
    assert [what.split("trained by ")[1] for what, _, _ in before] == [
        "nearest-128 minus by top-K, 3 seeds",
        "down-128 minus by top-K, 1 seed",
        "up-128 minus by top-K, 1 seed",
    ]
    assert [measured.split(" [")[0] for _, _, measured in before] == ["+0.1010", "-0.5000", "+0.0010"]
    assert [measured.split("]: ")[1].split(",")[0] for _, _, measured in before] == ["worse", "better", "not measured"]
    # Fewer seeds, another implementation, another length, and a later run of the same seed that failed to validate.
    short = [run(routing, 0, 9.0, steps=700) for routing in ("top_k", "nearest")]
    other = [run(routing, 0, 9.0, implementation="torch_loop") for routing in ("top_k", "nearest", "up")]
    assert lines(*short, *other, step("quality", routing="nearest", seed=1)) == before
    assert lines(run("up", 0, 1.3))[1][2].startswith("-0.5000") and lines(run("up", 0, 1.3))[2][2].endswith("worse")
    assert numbers._quality(rows.one_gpu([run("top_k", 0, 1.0), run("nearest", 0, 1.1)])) == []
    assert numbers._quality(rows.one_gpu([])) == []


def test_the_papers_ratios() -> None:
    # The abstract's 1.86, from Figure 14's bars.
    ours = numbers.paper_time("sonicmoe_official", rows.HEADLINE_SHAPE, "forward_backward")
    theirs = numbers.paper_time("scattermoe", rows.HEADLINE_SHAPE, "forward_backward")
    assert theirs / ours == pytest.approx(1.857, abs=2e-3)
    assert math.isnan(numbers.paper_time("torch_loop", rows.HEADLINE_SHAPE, "forward"))


def test_markers_must_be_there() -> None:
    with pytest.raises(ValueError, match="markers"):
        numbers.with_numbers("no table here", [])


def test_rows_that_were_not_timed_in_a_burst_change_no_number() -> None:
    """Rows of another mode, newer than all others and with other times, of every point."""
    others = []
    for row in COMMITTED:
        if row["operation"] == "training_step" or row["status"] != "ok" or row["measured_on"] != "cuda":
            continue
        other = {**row, "timestamp": "2040-01-01T00:00:00+00:00"}
        if row["record"] == "ratio":
            others.append({**other, "mode": "paced", "value": 3.0, "ci95": [2.9, 3.1]})
            continue
        for time in ("latency_ms", "device_ms", "busy_ms"):
            if time in row:
                other[time] = {**row[time], "median": 3 * row[time]["median"]}
        if "latency_ms" not in row:
            continue  # of the conformance suite
        other["latency_ms"]["mode"] = "sustained"
        other["tflops"] = {key: value / 3 for key, value in row.get("tflops", {}).items()}
        others.append({**other, "kernels": [{**kernel, "us": 3 * kernel["us"]} for kernel in row.get("kernels", [])]})
    assert len(others) > 1000
    assert numbers.lines(rows.frame([*COMMITTED, *others])) == numbers.lines(rows.frame(COMMITTED))
    assert kernel_table.lines([*COMMITTED, *others]) == kernel_table.lines(COMMITTED)
    # What every figure draws from.
    drawn = (rows.one_gpu(its).reset_index(drop=True) for its in ([*COMMITTED, *others], COMMITTED))
    pd.testing.assert_frame_equal(*drawn)


def test_without_rows_the_table_is_empty() -> None:
    assert len(numbers.lines(rows.frame([]))) == 2


def test_the_notes_hold_the_kernels_of_the_rows() -> None:
    text = kernel_table.NOTES.read_text(encoding="utf-8")
    table = kernel_table.lines(read_folder(FOLDER)[0])
    assert len(table) == 2 + 12
    assert text == kernel_table.with_table(text, table), "run: python -m plots.kernel_table"
    for implementation in (numbers.OFFICIAL, numbers.OURS):
        row = newest(implementation=implementation, sweep="paper_layers", **{"pass": "forward_backward"})
        found = kernel_table.times(row)
        assert found["sum"] == pytest.approx(sum(kernel["us"] for kernel in row["kernels"]))  # type: ignore[attr-defined]
        assert sum(us for column, us in found.items() if column != "sum") == pytest.approx(found["sum"])
        assert all(found.values())


#: Of no measurement: intervals' level, how well a figure of the paper can be read, the gate's threshold.
STATED = {"95 %", "0.4 %", "5%"}


def test_the_readmes_prose_has_no_measured_number_of_its_own() -> None:
    text = numbers.README.read_text(encoding="utf-8")
    prose = text.split(numbers.BEGIN)[0] + text.split(numbers.END)[1]
    prose = re.sub(r"```.*?```", "", prose, flags=re.DOTALL)
    found = re.findall(r"\d+(?:\.\d+)?\s?(?:×|x\b|%|µs|ms|s\b|min\b|seconds|minutes|[KMG]i?B|TFLOPS|GB/s)", prose)
    assert set(found) <= STATED, sorted(set(found) - STATED)

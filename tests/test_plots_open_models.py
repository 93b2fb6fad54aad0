"""The figure of open models from made-up rows, and the sizes of its sweep against the models' published totals."""

from __future__ import annotations

import math
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
from test_plots import failed, ratio, synthetic

from harness.registry import default_registry
from harness.shapes import MoEShape
from harness.store import read
from harness.sweep import load_sweep
from harness.tuners import QUACK_CACHE, tiles_found, tiles_note
from plots import open_models as figure
from plots import rows as table
from plots import style

REGISTRY = default_registry()
SHAPES = figure.models()
TUNING = "results/nvidia_h200/tuning/sonicmoe_official.json"
SPEED = {"sonicmoe_official": 0.9, "sonicmoe_triton": 1.0, "scattermoe": 0.5, "megablocks": 0.45, "deepgemm": 0.6,
         "torch_grouped_mm": 0.48}  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """Numbers for all but: ScatterMoE at the last model, MegaBlocks at one without any row, an unstable one."""
    found = []
    for index, (model, shape) in enumerate(SHAPES.items()):
        for name, speed in SPEED.items():
            for direction, factor in (("forward", 1.0), ("backward", 1.1), ("forward_backward", 1.05)):
                place = {"implementation": name, "shape": shape, "direction": direction, "sweep": "open_models"}
                if name == "scattermoe" and model == "DeepSeek-V3.2":
                    found.append(failed("unsupported", "its kernels address tensors by 32-bit offsets", **place))
                elif name == "megablocks" and model == "gpt-oss-20b":
                    continue
                else:
                    rate = (430 + 40 * index) * speed * factor
                    ms = {"forward": 6, "backward": 12}.get(direction, 18) * _units(shape) / rate / 1e9
                    status = "unstable" if (name, model) == ("deepgemm", "Qwen3-Next-80B-A3B") else "ok"
                    found.append(synthetic(
                        **place, tflops={"device": rate, "host": rate, "hardware": rate}, status=status,
                        device_ms={"median": ms, "ci95": [ms * 0.98, ms * 1.02], "samples": 40, "basis": "graph"},
                        reason="" if status == "ok" else "clock drifted by 9 %",
                    ))  # fmt: skip
        found.append(ratio("sonicmoe_official", "sonicmoe_triton", shape, 1.11, sweep="open_models"))
        if model != "DeepSeek-V3.2":
            found.append(ratio("scattermoe", "sonicmoe_triton", shape, 2.0, sweep="open_models"))
    return found


def _units(shape: str) -> int:
    T, d, n, _, K = (int(size) for size in shape.split(","))
    return T * n * K * d


def test_the_sweep() -> None:
    sweep = load_sweep("open_models", REGISTRY)
    assert list(SHAPES.values()) == [str(shape) for shape in sweep.shapes] and sweep.figure == figure.NAME
    layers = [point.implementation for point in sweep.points if point.operation == "moe_layer"]
    assert figure.implementations() == list(dict.fromkeys(layers)) and set(SPEED) < set(layers)
    assert len(layers) == 6 * len(set(layers))
    bound = [(point.operation, point.variant) for point in sweep.points if point.implementation == "cublas_bound"]
    assert bound.count(("dense_bound", "gemm")) == bound.count(("dense_bound", "gemm_glue")) == 6
    # Every layer that traces, which is where held memory at these sizes is known without a GPU.
    traces = {plugin.name for plugin in REGISTRY.offering("moe_layer") if plugin.fake_tensors}
    assert {point.implementation for point in sweep.fakes} == traces and len(sweep.fakes) == 6 * len(traces)
    pairs = [(found.numerator, found.denominator) for found in sweep.ratios]
    for numerator in ("sonicmoe_official", "scattermoe"):
        assert pairs.count((numerator, "sonicmoe_triton")) == 6
    assert pairs.count(("sonicmoe_triton", "sonicmoe_triton")) == 1


@pytest.mark.parametrize(
    ("model", "sizes", "layers", "low", "high"),
    [
        # Layers with experts, and the share of the model's published total that its experts make up.
        ("OLMoE-1B-7B", (2048, 1024, 64, 8), 16, 6.2e9, 6.9e9),
        ("gpt-oss-20b", (2880, 2880, 32, 4), 24, 18.8e9, 20.9e9),
        ("Kimi-Linear-48B-A3B", (2304, 1024, 256, 8), 26, 46e9, 49e9),
        ("Qwen3-Next-80B-A3B", (2048, 512, 512, 10), 48, 76e9, 80e9),
        ("Qwen3-235B-A22B", (4096, 1536, 128, 8), 94, 226e9, 235e9),
        ("DeepSeek-V3.2", (7168, 2048, 256, 8), 58, 645e9, 671e9),
    ],
)
def test_sizes_make_up_the_models_totals(
    model: str, sizes: tuple[int, ...], layers: int, low: float, high: float
) -> None:
    shape = MoEShape.parse(SHAPES[model])
    assert (shape.d, shape.n, shape.E, shape.K) == sizes and shape.T == 16384
    assert low < layers * 3 * shape.E * shape.d * shape.n < high


def test_what_cannot_do_a_shape_is_known_before_it_runs() -> None:
    sweep = load_sweep("open_models", REGISTRY)
    named = {shape: model for model, shape in SHAPES.items()}
    refused = {
        (point.implementation, named[str(point.shape)]): REGISTRY.get(point.implementation).unsupported_reason(point)
        for point in sweep.points
    }
    narrow = {("scattermoe", "DeepSeek-V3.2"), ("momoe", "DeepSeek-V3.2")}
    assert {key for key, reason in refused.items() if reason} == narrow
    assert all("32-bit offsets" in (refused[key] or "") for key in narrow)


def test_bars() -> None:
    layers = table.layers(table.one_gpu(rows()))
    notes = style.Footnotes()

    def bar(name: str, model: str, direction: str = "forward") -> figure.Bar:
        return figure.model_bar(layers, name, model, SHAPES[model], direction, notes)

    official = bar("sonicmoe_official", "OLMoE-1B-7B")
    assert official.value == pytest.approx(430 * 0.9) and official.text == ""
    assert official.low < official.value < official.high
    assert bar("deepgemm", "Qwen3-Next-80B-A3B").unstable
    assert bar("megablocks", "gpt-oss-20b").text == "not measured"
    scattermoe = bar("scattermoe", "DeepSeek-V3.2", "forward_backward")
    assert math.isnan(scattermoe.value) and scattermoe.text == "unsupported¹"
    assert "32-bit offsets" in notes.lines(200)[0]


def test_what_the_readme_says_of_whom() -> None:
    """Who is behind whom in the committed bars, forward + backward where nothing else is said."""
    readme = " ".join((table.ROOT / "README.md").read_text(encoding="utf-8").split())
    layers, notes = table.layers(table.one_gpu(table.load(table.RESULTS / "nvidia_h200")[0])), style.Footnotes()
    names = sorted(set(layers["implementation"]) - {"cublas_bound"})

    def order(shape: str, direction: str = "forward_backward") -> list[str]:
        """Fastest first."""
        found = {name: figure.model_bar(layers, name, "", shape, direction, notes).value for name in names}
        return sorted((name for name in found if not math.isnan(found[name])), key=lambda name: -found[name])

    sonic = {"sonicmoe_official", "sonicmoe_triton"}
    by_model = {model: order(shape) for model, shape in SHAPES.items()}
    assert "MoMoE slower than PyTorch's grouped GEMM at the five models" in readme
    assert all(
        its.index("torch_grouped_mm") < its.index("momoe")
        for model, its in by_model.items()
        if model != "DeepSeek-V3.2"
    )
    assert "is the slowest of all at Kimi and Qwen3-Next; Liger-Kernel is that at the other four." in readme
    megablocks = {"Kimi-Linear-48B-A3B", "Qwen3-Next-80B-A3B"}
    assert {model: its[-1] for model, its in by_model.items()} == {
        model: "megablocks" if model in megablocks else "liger" for model in SHAPES
    }
    assert "DeepGEMM-pt is slower than SonicMoE and ours everywhere" in readme
    assert all(its.index("deepgemm") > max(map(its.index, sonic)) for its in by_model.values())
    assert "(ours and the official layer's at OLMoE, gpt-oss and Qwen3-235B)" in readme
    otherwise = {model for model, its in by_model.items() if its[0] == "sonicmoe_official"}
    assert otherwise == {"OLMoE-1B-7B", "gpt-oss-20b", "Qwen3-235B-A22B"}
    assert "DeepGEMM++ comes next after SonicMoE and ours at four of the six" in readme
    assert [set(its[:2]) == sonic and its[2] for its in by_model.values()].count("deepgemm_pp") == 4
    assert "MegaBlocks comes near SonicMoE and ours at gpt-oss and DeepSeek-V3.2" in readme
    assert [its[2] for its in by_model.values()].count("megablocks") == 2
    assert by_model["gpt-oss-20b"][2] == by_model["DeepSeek-V3.2"][2] == "megablocks"
    assert "forward alone has the highest bar at DeepSeek-V3.2 and, hardly, at Qwen3-235B" in readme
    highest = {model for model, shape in SHAPES.items() if order(shape, "forward")[0] == "deepgemm_pp"}
    assert highest == {"DeepSeek-V3.2", "Qwen3-235B-A22B"}
    assert "Of the 7B layer it comes next after SonicMoE and ours at n = 64" in readme
    assert "forward next after DeepGEMM++ at n = 128 to 512" in readme
    assert "only PyTorch's loop is slower forward + backward" in readme
    finer = {512: "64,4", 256: "128,8", 128: "256,16", 64: "512,32"}
    for direction in ("forward", "backward"):
        assert set(order("24576,1536,64,512,32", direction)[:2]) == sonic
        assert order("24576,1536,64,512,32", direction)[2] == "liger"
    for n in (512, 256, 128):
        assert order(f"24576,1536,{n},{finer[n]}", "forward")[2:4] == ["deepgemm_pp", "liger"]
    coarse = ["24576,1536,1024,32,2", "32768,4096,512,128,8", "32768,4096,1024,64,4"]
    coarse += [f"32768,4096,{n},{e},{k}" for n, e, k in table.MODELS["120B"][1]]
    assert all(order(shape)[-2:] == ["liger", "torch_loop"] for shape in coarse)


def test_the_ratios_are_as_the_readme_says() -> None:
    readme = " ".join((table.ROOT / "README.md").read_text(encoding="utf-8").split())
    named = {shape: model for model, shape in SHAPES.items()}
    stored: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in read(table.RESULTS / "nvidia_h200" / "open_models.jsonl")[0]:
        shape = ",".join(map(str, row["shape"].values()))
        if row["record"] == "ratio" and row["status"] == "ok" and row["denominator"] == "sonicmoe_triton":
            stored.setdefault((row["numerator"], named[shape], row["pass"]), []).append(row)
    of = {key: max(its, key=lambda row: row["timestamp"]) for key, its in stored.items()}

    def official(model: str, direction: str = "forward_backward") -> dict[str, Any]:
        return of["sonicmoe_official", model, direction]

    assert "Ours is faster than both at each of them, forward + backward." in readme
    both = [row for (name, _, way), row in of.items() if name in figure.BASELINES and way == "forward_backward"]
    assert len(both) == 11 and all(row["ci95"][0] > 1 for row in both)
    assert "the least at gpt-oss, whose experts are the fewest and widest, and at DeepSeek-V3.2" in readme
    assert set(sorted(SHAPES, key=lambda model: official(model)["value"])[:2]) == {"gpt-oss-20b", "DeepSeek-V3.2"}
    assert "forward alone it is slower at gpt-oss, and backward alone no faster at DeepSeek-V3.2." in readme
    slower = {
        (model, way) for model in SHAPES for way in ("forward", "backward") if official(model, way)["ci95"][0] <= 1
    }
    assert slower == {("gpt-oss-20b", "forward"), ("DeepSeek-V3.2", "backward")}
    assert official("gpt-oss-20b", "forward")["ci95"][1] < 1 < official("DeepSeek-V3.2", "backward")["ci95"][1]
    assert "The official tiles of all six were chosen anew for these ratios" in readme
    assert "run at the card's power limit" in readme
    for model in SHAPES:
        row = official(model)
        assert tiles_note(0, TUNING) in row["notes"]
        assert "power_cap" in row["environment"]["during_samples"]["throttle_reasons"]
    assert "say more for ours, at OLMoE, Kimi-Linear and Qwen3-Next by more than a tenth" in readme
    for model in ("OLMoE-1B-7B", "Kimi-Linear-48B-A3B", "Qwen3-Next-80B-A3B"):
        first, last = stored["sonicmoe_official", model, "forward_backward"]
        assert first["value"] > 1.1 * last["value"] and any(map(tiles_found, first["notes"]))


def test_tiles_that_were_found_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    below = figure.style.below
    monkeypatch.setattr(figure.style, "below", lambda *args: (said.extend(args[2]), below(*args))[1])
    marked = rows()
    for row in marked:
        official = "sonicmoe_official" in (row["implementation"], row.get("numerator"))
        models = ("OLMoE-1B-7B",) if row["record"] == "ratio" else ("OLMoE-1B-7B", "gpt-oss-20b")
        if official:
            found = ",".join(map(str, row["shape"].values())) in {SHAPES[model] for model in models}
            # Where ten were tuned, in a process that had built others before, none need have been found.
            row["notes"] = ["another", tiles_note(0 if found else 10, QUACK_CACHE)]
    figure.draw(marked, tmp_path)
    told = [line for line in said if "found on the machine" in line]
    assert told == [
        "With tiles found on the machine, chosen beside who knows what other work: SonicMoE (official)'s ratios (*) at "
        "OLMoE-1B-7B and bars at OLMoE-1B-7B, gpt-oss-20b."
    ]
    compared = {name: figure.ratios(table.one_gpu(marked), figure.REFERENCE, name) for name in figure.BASELINES}
    assert figure.ratio_text(compared, SHAPES["OLMoE-1B-7B"], {}) == "SonicMoE / ours 1.11×*\nScatterMoE / ours 2.00×"
    said.clear()
    figure.draw(rows(), tmp_path)
    assert not [line for line in said if "found on the machine" in line]


def test_ratios_stand_below_the_models() -> None:
    everything = table.one_gpu(rows())
    compared = {name: figure.ratios(everything, figure.REFERENCE, name) for name in figure.BASELINES}
    text = figure.ratio_text(compared, SHAPES["OLMoE-1B-7B"], {})
    assert text == "SonicMoE / ours 1.11×\nScatterMoE / ours 2.00×"
    assert figure.ratio_text(compared, SHAPES["DeepSeek-V3.2"], {}) == "SonicMoE / ours 1.11×"
    # Nor is there a line where a row says why; of what else went wrong there is one.
    for status, line in (("unsupported", ""), ("crashed", "\nScatterMoE / ours crashed")):
        row = ratio("scattermoe", "sonicmoe_triton", SHAPES["DeepSeek-V3.2"], 2.0, sweep="open_models")
        row = {
            key: value for key, value in row.items() if key not in ("value", "ci95", "samples", "basis", "basis_reason")
        }
        everything = table.one_gpu([*rows(), {**row, "status": status, "reason": "32-bit offsets"}])
        compared = {name: figure.ratios(everything, figure.REFERENCE, name) for name in figure.BASELINES}
        assert figure.ratio_text(compared, SHAPES["DeepSeek-V3.2"], {}) == f"SonicMoE / ours 1.11×{line}"
    assert figure.ratio_text(compared, table.HEADLINE_SHAPE, {}) == ""


def test_who_has_no_row_is_named_and_not_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[list[str]] = []
    said: list[str] = []
    panel, below = figure._panel, figure.style.below
    monkeypatch.setattr(figure, "_panel", lambda *args: (drawn.append(args[-1]), panel(*args)))
    monkeypatch.setattr(figure.style, "below", lambda *args: (said.extend(args[2]), below(*args))[1])
    figure.draw(rows(), tmp_path)
    assert [set(names) for names in drawn] == [set(SPEED)] * 3
    assert said[-1] == "Not measured yet: MoMoE, Megatron, DeepGEMM++, Liger-Kernel."


@pytest.mark.parametrize("state", ["all", "one", "failures"])
def test_the_figure_from_every_state(state: str, tmp_path: Path) -> None:
    shape = SHAPES["Qwen3-Next-80B-A3B"]
    found = {
        "all": rows,
        "one": lambda: [synthetic("my_moe", shape)],
        "failures": lambda: [failed("out_of_memory", "no room", shape=shape, direction="forward")],
    }[state]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = figure.draw(found, tmp_path / "first")
    assert [path.name for path in first] == ["open_models.svg", "open_models.png"]
    if state == "all":
        second = figure.draw(random.Random(0).sample(found, len(found)), tmp_path / "second")
        assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]

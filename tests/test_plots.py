"""Figures from synthetic rows: every state a results folder can be in, the files' reproducibility, what is selected."""

from __future__ import annotations

import itertools
import json
import math
import random
import warnings
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

import plots
from harness.record import validate
from harness.tuners import QUACK_CACHE, tiles_note
from plots import bars, granularity, headline, style
from plots import rows as table

GPU = "NVIDIA Imaginary 100"
#: Fractions of the paper's SonicMoE TFLOPS; the numbers are made up and stay in temporary folders.
SPEED = {
    "sonicmoe_official": 1.25, "sonicmoe_triton": 1.2, "sonicmoe_torch": 0.3, "scattermoe": 0.5, "momoe": 0.6,
    "megablocks": 0.45, "megatron": 0.35, "deepgemm": 0.6, "deepgemm_pp": 0.9, "torch_grouped_mm": 0.4,
    "torch_loop": 0.2,
}  # fmt: skip
_clock = itertools.count()


def synthetic(
    implementation: str = "sonicmoe_official",
    shape: str = table.HEADLINE_SHAPE,
    direction: str = "forward",
    **changes: Any,
) -> dict[str, Any]:
    """A row as it is stored; ``changes`` replace whole fields."""
    T, d, n, E, K = (int(size) for size in shape.split(","))
    static = 6 * E * d * n + 2 * T * d
    held = int((2 * T * d + 4 * T * K * n) / SPEED.get(implementation, 1) ** 0.8)
    rate = table.paper_value(table.paper_tflops(), "sonicmoe_official", shape, direction)
    rate = (400.0 if math.isnan(rate) else rate) * SPEED.get(implementation, 1)
    ms = {"forward": 6, "backward": 12}.get(direction, 18) * T * n * K * d / rate / 1e9
    row: dict[str, Any] = {
        "schema": 1, "record": "measurement", "run_id": "test", "sweep": "paper_layers",
        "timestamp": f"2030-01-01T00:{next(_clock) // 60 % 60:02d}:{next(_clock) % 60:02d}Z",
        "operation": "moe_layer", "variant": "", "pass": direction, "implementation": implementation,
        "label": style.label(implementation), "shape": {"T": T, "d": d, "n": n, "E": E, "K": K}, "dtype": "bfloat16",
        "layer": {"activation": "swiglu", "router_convention": "topk_softmax", "bias": False},
        "routing": {"method": "top_k", "distribution": "uniform", "seed": 0, "m_tile": 128}, "status": "ok",
        "reason": "", "tflops": {"device": rate, "host": rate * 0.7, "hardware": rate * 1.1},
        "device_ms": {"median": ms, "ci95": [ms * 0.98, ms * 1.02], "samples": 40, "basis": "graph"},
        "latency_ms": {"median": ms * 1.4, "ci95": [ms * 1.3, ms * 1.5], "samples": 40, "mode": "burst"},
        "memory_bytes": {"static": static, "held": held, "peak": held * 2, "layer": static + held},
        "measured_on": "cuda", "environment": {"gpu": GPU},
    }  # fmt: skip
    row.update(changes)
    return row


def failed(status: str, reason: str, **fields: Any) -> dict[str, Any]:
    row = synthetic(**fields)
    return {
        **row,
        "status": status,
        "reason": reason,
        "tflops": None,
        "device_ms": None,
        "latency_ms": None,
        "memory_bytes": None,
    }


def fake(implementation: str, shape: str, **changes: Any) -> dict[str, Any]:
    return synthetic(implementation, shape, measured_on="fake", environment={"gpu": None}, tflops=None, device_ms=None,
                     latency_ms=None, **changes)  # fmt: skip


def ratio(numerator: str, denominator: str, shape: str, value: float, **changes: Any) -> dict[str, Any]:
    row = synthetic(
        numerator, shape, "forward_backward", tflops=None, device_ms=None, latency_ms=None, memory_bytes=None
    )
    row.update(record="ratio", numerator=numerator, denominator=denominator, value=value, time_kind="device",
               ci95=[value * 0.985, value * 1.015], samples=60)  # fmt: skip
    row.update(changes)
    return row


def test_the_synthetic_rows_keep_the_rows_rules() -> None:
    for row in [*everything(), *sweeps()]:
        assert validate(row) == []


def everything() -> list[dict[str, Any]]:
    """Rows of all implementations with failures of every kind, bounds, ratios and fake traces."""
    rows = []
    for (model, shape), direction in itertools.product(table.paper_shapes(), ("forward", "backward")):
        for name in SPEED:
            place = {"implementation": name, "shape": shape, "direction": direction}
            n = int(shape.split(",")[2])
            if name == "megatron":
                rows.append(failed("not_installed", "the package transformer_engine is not installed", **place))
            elif name == "megablocks" and model in ("30B", "120B"):
                rows.append(failed("out_of_memory", f"tried to allocate {n / 8} GiB with 3 GiB free", **place))
            elif name == "momoe" and n == 256:
                rows.append(failed("unsupported", "MoMoE computes with n a multiple of 512 only", **place))
            elif name == "deepgemm" and n == 1024:
                rows.append(failed("crashed", "exit code -11: an illegal memory access was encountered at "
                                   "grouped_gemm.cu:214; " + "long stderr " * 30, **place))  # fmt: skip
            elif name == "torch_loop" and model == "7B":
                rows.append(synthetic(name, shape, direction, status="unstable", reason="clock drifted by 9 %"))
            else:
                rows.append(synthetic(name, shape, direction))
        rate = table.paper_value(table.paper_tflops(), "sonicmoe_official", shape, direction)
        for variant, factor in (("gemm", 1.6), ("gemm_glue", 1.38)):
            rows.append(synthetic("cublas_bound", shape, direction, operation="dense_bound", variant=variant,
                                  tflops={"device": rate * factor}))  # fmt: skip
    for _, shape in table.paper_shapes():
        rows += [ratio(name, "sonicmoe_official", shape, 1.25 / speed) for name, speed in SPEED.items()]
        rows += [fake("torch_loop", shape), fake("sonicmoe_torch", shape)]
    return rows


def sweeps() -> list[dict[str, Any]]:
    """Rows of a granularity and a sparsity sweep."""
    rows = []
    for name, direction in itertools.product(SPEED, ("forward", "backward")):
        for n, E, K in ((64, 512, 32), (128, 256, 16), (256, 128, 8), (512, 64, 4)):
            shape = f"16384,2048,{n},{E},{K}"
            if name == "megablocks" and n < 256:
                rows.append(failed("unsupported", "MegaBlocks needs n to be a multiple of 128", implementation=name,
                                   shape=shape, direction=direction, ) | {"sweep": "granularity"})  # fmt: skip
            else:
                rows.append(synthetic(name, shape, direction, sweep="granularity"))
        for E in (64, 128, 256, 512):
            rows.append(synthetic(name, f"16384,4096,1024,{E},8", direction, sweep="sparsity"))
    return rows


#: Without rows at all: `test_a_missing_results_folder_gives_the_papers_values`.
STATES = {
    "everything": everything,
    "sweeps": sweeps,
    "one_implementation": lambda: [
        synthetic(shape=shape, direction=direction)
        for _, shape in table.paper_shapes() for direction in ("forward", "backward")
    ],
    "one_row": lambda: [synthetic("my_moe")],
    "only_failures": lambda: [
        failed(status, f"because of {status}", implementation=name, shape=shape)
        for status, name in zip(style.STATUS_TEXT, SPEED, strict=False) for _, shape in table.paper_shapes()
    ],
    "only_fake": lambda: [
        fake(name, shape) for name in ("sonicmoe_torch", "torch_loop") for _, shape in table.paper_shapes()
    ],
    "not_of_the_paper": lambda: [synthetic(shape="128,64,32,8,2", measured_on="cpu", environment={"gpu": None})],
    "nulls": lambda: [synthetic(tflops=None, device_ms=None, memory_bytes={"static": None, "held": 12}),
                      ratio("scattermoe", "sonicmoe_official", table.HEADLINE_SHAPE, 1.9, ci95=None)],
    "failed_ratio": lambda: [ratio("scattermoe", "sonicmoe_official", table.HEADLINE_SHAPE, 1.9, status="crashed",
                                   reason="exit code 1") | {"value": None, "ci95": None}],
}  # fmt: skip


def test_points_that_a_sweep_lacks_are_told() -> None:
    def told(rows: list[dict[str, Any]]) -> list[str]:
        layers = table.layers(table.one_gpu(rows))
        lines = granularity.families(layers)
        return granularity.not_measured(layers, lines, style.ordered(set(layers["implementation"])))

    rows = sweeps()
    assert told(rows) == [] and told(everything()) == [] and told([]) == []
    gone = {("scattermoe", "128,256,16"), ("scattermoe", "1024,512,8"), ("deepgemm", "512,64,4")}
    left = [
        row
        for row in rows
        if (row["implementation"], ",".join(str(row["shape"][name]) for name in "nEK")) not in gone
        and not (row["implementation"] == "megablocks" and row["shape"]["n"] == 1024)
    ]
    # A failure is told of where it is drawn.
    (line,) = told(left)
    names = "ScatterMoE (n = 128; E = 512), DeepGEMM-pt (n = 512), MegaBlocks (E: all)"
    assert line == f"Not measured yet: {names}."


def test_points_with_tiles_that_were_found_are_told() -> None:
    def told(rows: list[dict[str, Any]]) -> list[str]:
        layers = table.layers(table.one_gpu(rows))
        return granularity.found_choices(
            layers, granularity.families(layers), style.ordered(set(layers["implementation"]))
        )

    rows = sweeps()
    assert told(rows) == []
    for row in rows:
        if row["implementation"] == "sonicmoe_official" and row["shape"]["n"] == 128:
            row["notes"] = [tiles_note(2, QUACK_CACHE)]
    assert told(rows) == [f"{table.FOUND_CHOICES}: SonicMoE (official) (n = 128)."]


#: Figures of the paper's layers; the others have such tests of their own, of states that are about them.
OF_LAYERS = ("figure13_memory", "figure14_throughput", "headline", "granularity")


def test_every_other_figure_has_tests_of_its_own() -> None:
    for name in set(plots.FIGURES) - set(OF_LAYERS):
        assert (Path(__file__).parent / f"test_plots_{name}.py").is_file()


#: States of which some figures look at nothing; to the others their rows are as good as none.
LOOKED_AT = dict.fromkeys(("not_of_the_paper", "failed_ratio"), ("figure14_throughput", "headline"))


def test_figures_bear_the_names_of_their_modules() -> None:
    for name, figure in [*plots.FIGURES.items(), *plots.RUN_FIGURES.items()]:
        assert isinstance(figure, plots.InModule)
        assert name == figure.name == figure.module().NAME and callable(getattr(figure.module(), figure.function))


@pytest.mark.parametrize("state", STATES)
def test_every_figure_from_every_state_without_warnings(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the paper's models make every kind of row; one state has them all."""
    if state != "one_implementation":
        monkeypatch.setattr(table, "MODELS", {name: table.MODELS[name] for name in ("7B", "30B")})
    rows = STATES[state]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in LOOKED_AT.get(state, OF_LAYERS):
            written = plots.FIGURES[name](rows, tmp_path)
            assert written == [tmp_path / f"{name}.svg", tmp_path / f"{name}.png"]
            assert all(path.stat().st_size > 5000 for path in written)
            if state == "everything":
                # Equal rows give equal bytes, in any order.
                again = plots.FIGURES[name](random.Random(0).sample(rows, len(rows)), tmp_path / "again")
                assert [path.read_bytes() for path in written] == [path.read_bytes() for path in again]


def test_one_folder_of_figures_for_each_gpu(tmp_path: Path) -> None:
    results = tmp_path / "results"
    for gpu in ("NVIDIA H200", "NVIDIA B200"):
        folder = results / table.slug(gpu)
        folder.mkdir(parents=True)
        line = json.dumps(synthetic(environment={"gpu": gpu}))
        (folder / "paper_layers.jsonl").write_text(line + "\n", encoding="utf-8")
    written, problems = plots.draw(results, tmp_path / "figures", ["figure13_memory"])
    assert problems == []
    assert sorted({path.parent.name for path in written}) == ["nvidia_b200", "nvidia_h200"]
    every, _ = table.load(results)
    with pytest.raises(ValueError, match="several GPUs"):
        plots.FIGURES["headline"](every, tmp_path)


def test_a_row_that_does_not_name_its_gpu_takes_the_folders(tmp_path: Path) -> None:
    folder = tmp_path / "local" / "nvidia_h200"
    folder.mkdir(parents=True)
    nameless = failed("crashed", "exit code -6", implementation="scattermoe", environment={"host": "node"})
    text = "".join(json.dumps(row) + "\n" for row in (synthetic(), nameless, fake("torch_loop", table.HEADLINE_SHAPE)))
    (folder / "a.jsonl").write_text(text, encoding="utf-8")
    found, problems = table.load(tmp_path)
    assert problems == []
    assert list(found["gpu"]) == [GPU, GPU, ""]
    assert len(table.of_gpu(found, GPU)) == 3


def test_a_missing_results_folder_gives_the_papers_values(tmp_path: Path) -> None:
    """The state without rows, of every figure but the one that is then not drawn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written, problems = plots.draw(tmp_path / "missing", tmp_path / "figures")
    assert problems == []
    folder = tmp_path / "figures" / plots.NO_GPU
    names = [name for name in plots.FIGURES if name != "training_steps"]
    assert written == [folder / f"{name}.{kind}" for name in names for kind in ("svg", "png")]
    assert all(path.stat().st_size > 5000 for path in written)


def test_a_broken_line_is_reported_and_the_others_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "gpu"
    folder.mkdir()
    text = json.dumps(synthetic()) + '\n{"cut off": \n' + json.dumps(synthetic("scattermoe")) + "\n"
    (folder / "a.jsonl").write_text(text, encoding="utf-8")
    found, problems = table.load(tmp_path)
    assert len(problems) == 1
    assert set(found["implementation"]) == {"sonicmoe_official", "scattermoe"}


def test_the_latest_row_of_a_point_counts_even_if_it_failed() -> None:
    old = synthetic(timestamp="2030-01-01T00:00:00Z")
    new = failed("crashed", "exit code 1", timestamp="2030-01-02T00:00:00Z")
    for order in ([old, new], [new, old]):
        kept = table.latest(table.frame(order))
        assert list(kept["status"]) == ["crashed"]


def test_a_missing_package_takes_no_number_back() -> None:
    measured = synthetic(timestamp="2030-01-01T00:00:00Z")
    missing = failed("not_installed", "no such package", timestamp="2030-01-02T00:00:00Z")
    for order in ([measured, missing], [missing, measured]):
        assert list(table.latest(table.frame(order))["status"]) == ["ok"]
        assert list(table.layers(table.frame(order))["status"]) == ["not_installed", "ok"]


def test_rows_of_another_kind_do_not_stand_for_the_papers_layers() -> None:
    others = [
        synthetic(dtype="float16"),
        synthetic(routing={"method": "top_k", "distribution": "skewed"}),
        synthetic(routing={"method": "nearest", "distribution": "uniform"}),
        synthetic(layer={"router_convention": "softmax_topk"}),
        synthetic(operation="grouped_gemm"),
        synthetic(measured_on="cpu"),
        synthetic(latency_ms={"median": 1.0, "mode": "sustained"}),
        synthetic(latency_ms={"median": 1.0, "mode": "paced"}),
        ratio("scattermoe", "sonicmoe_official", table.HEADLINE_SHAPE, 2.0),
    ]
    assert table.layers(table.one_gpu(others)).empty
    assert len(table.layers(table.one_gpu([*others, synthetic()]))) == 1


def test_the_rates_interval_is_the_times_turned_over() -> None:
    row = table.frame([synthetic(tflops={"device": 400.0}, device_ms={"median": 2.0, "ci95": [1.6, 2.5]})]).iloc[0]
    assert (row["tflops_low"], row["tflops_high"]) == (320.0, 500.0)


def test_a_failure_has_a_text_and_no_number() -> None:
    notes = style.Footnotes()
    from plots.figure13_memory import memory_bar
    from plots.figure14_throughput import throughput_bar

    rows = table.frame([failed("out_of_memory", "tried to allocate 3 GiB", implementation="scattermoe")])
    memory = memory_bar(rows, table.paper_memory(), "scattermoe", "7B", table.HEADLINE_SHAPE, notes)
    speed = throughput_bar(rows, table.paper_tflops(), "scattermoe", "7B", table.HEADLINE_SHAPE, "forward", notes)
    for bar in (memory, speed):
        assert math.isnan(bar.value)
        assert bar.text == "out of memory¹"
    assert memory.paper == pytest.approx(1.2020)
    assert speed.paper == pytest.approx(208.0)
    assert notes.lines(200) == ["¹ ScatterMoE, out of memory: tried to allocate 3 GiB."]


def test_ratios_are_turned_to_the_reference_and_their_mean_is_geometric() -> None:
    first, second = (shape for _, shape in table.paper_shapes()[:2])
    rows = table.frame([
        ratio("scattermoe", "sonicmoe_official", first, 2.0, ci95=[1.9, 2.1]),
        ratio("sonicmoe_official", "scattermoe", second, 0.125, ci95=[0.1, 0.2]),
        ratio("scattermoe", "sonicmoe_official", first, 9.0, time_kind="host"),
        ratio("scattermoe", "sonicmoe_official", first, 9.0, time_kind="busy", basis="busy"),
        ratio("scattermoe", "sonicmoe_official", first, 9.0, **{"pass": "forward"}),
    ])  # fmt: skip
    found = headline.ratios(rows, "sonicmoe_official", "scattermoe")
    assert (found[second].value, found[second].low, found[second].high) == pytest.approx((8.0, 5.0, 10.0))
    mean = headline.geometric_mean(found.values())
    assert mean.value == pytest.approx(4.0)
    assert mean.points == 2
    assert mean.low < mean.value < mean.high


def test_the_headlines_mean_is_over_the_papers_layers_alone() -> None:
    others = ["16384,2048,1024,64,8", "16384,7168,2048,256,8"]
    rows = table.frame([
        ratio("scattermoe", "sonicmoe_official", shape, value)
        for shape, value in [(table.HEADLINE_SHAPE, 2.0), *((other, 8.0) for other in others)]
    ])  # fmt: skip
    figure, axes = plt.subplots()
    said = headline._speed(axes, rows, ["sonicmoe_official", "scattermoe"], {"scattermoe": "#000000"})
    circles = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"]
    plt.close(figure)
    assert said == "circle: geometric mean (1 of the twelve layers)"
    assert circles == pytest.approx([2.0])


def test_the_papers_bars_give_its_headline_ratio() -> None:
    value = headline.paper_ratio(table.paper_tflops(), "scattermoe", table.HEADLINE_SHAPE)
    assert value == pytest.approx(1.857, abs=1e-3)
    assert table.claims()["throughput-vs-scattermoe-7b"]["value"] == 1.86


def test_the_papers_values_are_complete() -> None:
    memory, tflops = table.paper_memory(), table.paper_tflops()
    assert (len(memory), len(tflops)) == (84, 168)
    for paper in (memory, tflops):
        assert set(paper["shape"]) == {shape for _, shape in table.paper_shapes()}
        assert set(paper["implementation"]) == set(table.PAPER_NAMES.values())
        assert set(paper.loc[paper["value"].isna(), "note"]) == {"not supported"}


def test_colours_are_distinct_and_unknown_implementations_get_their_own() -> None:
    names = style.ordered([*style.KNOWN, "my_moe", "another_moe"])
    assert names[-2:] == ["another_moe", "my_moe"]
    assert len(set(style.colours(names).values())) == len(names)


def test_reasons_are_grouped_and_cut_to_length() -> None:
    notes = style.Footnotes()
    for n in range(40):
        assert notes.mark("MoMoE", "crashed", f"reason {n} " + "x" * 300, f"7B {n}") == "¹"
    assert notes.mark("Megatron", "not_installed", "", "7B") == "²"
    lines = notes.lines(120, most=6)
    assert len(lines) <= 6
    assert all(len(line) <= 120 for line in lines)


def test_limits_cover_bars_and_bounds() -> None:
    drawn = {(0, "a"): bars.Bar(value=3.0, high=4.0), (0, "b"): bars.Bar(paper=5.0)}
    assert bars.limit(drawn, [6.0, math.nan], headroom=1.0) == 6.0
    assert bars.limit({}) == 1.0

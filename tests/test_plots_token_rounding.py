"""The figure of token rounding from made-up rows: the numbers of its series, what stands for missing ones, files."""

from __future__ import annotations

import itertools
import json
import math
import random
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import plots
from harness.record import validate
from harness.tuners import QUACK_CACHE, tiles_note
from plots import rows as table
from plots import style
from plots import token_rounding as figure
from plots import token_rounding_series as series

GPU = "NVIDIA Imaginary 100"
T, D, N, K, TILE = 4096, 512, 128, 4, 128
_clock = itertools.count()
#: Method -> (routed, padded, added, dropped) of T·K = 16384 rows, made up.
COUNTS = {
    "top_k": (16384, 20480, 0, 0),
    "nearest": (16128, 16128, 512, 768),
    "up": (20480, 20480, 4096, 0),
    "down": (13312, 13440, 0, 3072),
    "stochastic": (16512, 16512, 1024, 896),
    "balanced": (16384, 16384, 900, 900),
    "expert_choice": (16384, 16384, 13107, 13107),
    "token_drop": (12288, 14336, 0, 4096),
}


def row(
    experts: int, method: str, distribution: str = "uniform", counted: bool = True, **changes: Any
) -> dict[str, Any]:
    """The fields that rows of every kind have."""
    second = next(_clock)
    routing: dict[str, Any] = {"method": method, "distribution": distribution, "seed": 0, "m_tile": TILE}
    if counted:
        routing |= outcome(method)
    return {
        "schema": 1, "record": "measurement", "run_id": "test", "sweep": "token_rounding",
        "timestamp": f"2030-01-01T{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}Z", "variant": "",
        "shape": {"T": T, "d": D, "n": N, "E": experts, "K": K}, "dtype": "bfloat16",
        "layer": {"activation": "swiglu", "router_convention": "topk_softmax", "bias": False}, "routing": routing,
        "status": "ok", "reason": "", **changes,
    }  # fmt: skip


def outcome(method: str) -> dict[str, int]:
    routed, padded, added, dropped = COUNTS[method]
    return {"routed_rows": routed, "padded_rows": padded, "added": added, "dropped": dropped, "empty_experts": 0}


def account(experts: int, method: str, distribution: str = "uniform", **changes: Any) -> dict[str, Any]:
    flops = 6 * N * D
    return row(experts, method, distribution, **{
        "operation": "token_rounding", "implementation": "routing", "label": "Routing", "pass": "forward",
        "measured_on": "cpu", "environment": {"gpu": None, "cpu": "made up"},
        "costs": {"flops": flops * COUNTS[method][0], "hardware_flops": flops * COUNTS[method][1]}, **changes,
    })  # fmt: skip


def measured(
    experts: int, method: str, implementation: str = "sonicmoe_triton", direction: str = "forward", ms: float = 2.0,
    **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """The experts alone on a GPU: ``ms`` are busy, 1.25 times that is the device time."""
    flops = {"forward": 6, "backward": 12}.get(direction, 18) * N * D
    routed, padded, _, _ = COUNTS[method]
    return row(experts, method, **{
        "operation": "routed_experts", "implementation": implementation, "label": style.label(implementation),
        "pass": direction, "measured_on": "cuda", "environment": {"gpu": GPU},
        "device_ms": {"median": 1.25 * ms, "ci95": [1.2 * ms, 1.3 * ms], "samples": 40, "basis": "graph"},
        "busy_ms": {"median": ms, "ci95": [0.8 * ms, 1.6 * ms], "samples": 40},
        "tflops": {"device": flops * routed / ms / 1.25e9, "hardware": flops * padded / ms / 1.25e9}, **changes,
    })  # fmt: skip


def ratio(
    experts: int, method: str = "nearest", implementation: str = "sonicmoe_triton", direction: str = "forward",
    value: float = 1.2, *, counted: bool = True, **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """Time with top-K over time with the method."""
    other = {"method": method, "distribution": "uniform", "seed": 0, "m_tile": TILE}
    return row(experts, "top_k", counted=counted, **{
        "record": "ratio", "operation": "routed_experts", "numerator": implementation, "denominator": implementation,
        "numerator_label": style.label(implementation), "denominator_label": style.label(implementation),
        "denominator_routing": other | (outcome(method) if counted else {}), "pass": direction,
        "measured_on": "cuda", "environment": {"gpu": GPU}, "time_kind": "device", "basis": "graph", "value": value,
        "ci95": [value - 0.02, value + 0.03], "samples": 60, **changes,
    })  # fmt: skip


def failed(made: dict[str, Any], status: str = "out_of_memory", reason: str = "3 GiB are missing") -> dict[str, Any]:
    numbers = ("tflops", "device_ms", "busy_ms", "value", "ci95", "samples", "costs")
    bare = {key: made["routing"][key] for key in ("method", "distribution", "seed", "m_tile")}
    return made | dict.fromkeys(numbers) | {"status": status, "reason": reason, "routing": bare}


def accounts() -> list[dict[str, Any]]:
    return [
        account(experts, method, distribution)
        for experts in (16, 32, 64) for method in COUNTS for distribution in ("uniform", "skewed")
    ]  # fmt: skip


def on_gpu() -> list[dict[str, Any]]:
    rows = []
    for experts, name, direction in itertools.product(
        (16, 32, 64), ("sonicmoe_triton", "sonicmoe_official"), ("forward", "backward", "forward_backward")
    ):
        for method, ms in (("top_k", 2.4), ("nearest", 2.0)):
            rows.append(measured(experts, method, name, direction, ms))
        rows.append(ratio(experts, "nearest", name, direction))
        rows.append(ratio(experts, "nearest", name, direction, 1.1, operation="moe_layer", counted=False))
    return rows


def several() -> list[dict[str, Any]]:
    """Rows with failures and unstable ones of every kind."""
    rows = [*accounts(), *on_gpu()]
    unsteady: dict[str, Any] = {"status": "unstable", "reason": "the clock drifted by 9 %"}
    rows.append(failed(account(64, "down"), "crashed", "exit code 1"))
    rows.append(account(64, "up", **unsteady))
    rows.append(measured(32, "nearest", **unsteady))
    rows.append(failed(measured(64, "top_k", "sonicmoe_official")))
    rows.append(ratio(32, **unsteady))
    rows.append(failed(ratio(64, implementation="sonicmoe_official")))
    return rows


FAMILY = series.Family(T, D, N, K, str(TILE), (16, 32, 64))
STATES = {
    "accounts": accounts,
    "gpu": on_gpu,
    "both": lambda: [*accounts(), *on_gpu()],
    "several": several,
    "one": lambda: [account(16, "top_k")],
    "unknown_method": lambda: [row(16, "top_k") | account(16, "top_k", routing={
        **outcome("up"), "method": "sideways", "distribution": "odd", "seed": 0, "m_tile": TILE})],
    "only_failures": lambda: [failed(account(16, "up")), failed(measured(16, "top_k")), failed(ratio(16))],
    "only_ratios": lambda: [ratio(16), ratio(32)],
    "no_numbers": lambda: [account(16, "up", routing={"method": "up", "distribution": "uniform", "seed": 0,
                                                      "m_tile": TILE})],
    "no_tokens": lambda: [without_tokens(made) for made in several()],
}  # fmt: skip


def texts(rows: list[dict[str, Any]]) -> list[str]:
    """Every text in the figure."""
    with style.figure_style():
        drawn = figure._make(figure._Figure(table.one_gpu(rows)), 10.0)
    from matplotlib.text import Text

    return [found.get_text() for found in drawn.findobj(Text)]


def test_the_made_up_rows_keep_the_rows_rules() -> None:
    for made in several():
        assert validate(made) == []


@pytest.mark.parametrize("state", STATES)
def test_every_state_draws_without_warnings(state: str, tmp_path: Path) -> None:
    """Without rows at all: in test_plots.py, with every other figure."""
    rows = STATES[state]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written = figure.draw(rows, tmp_path)
    assert written == [tmp_path / f"{figure.NAME}.svg", tmp_path / f"{figure.NAME}.png"]
    assert all(path.stat().st_size > 5000 for path in written)
    if state == "several":
        # Equal rows give equal bytes, in any order.
        again = figure.draw(random.Random(0).sample(rows, len(rows)), tmp_path / "again")
        assert [path.read_bytes() for path in written] == [path.read_bytes() for path in again]


def test_such_rows_hurt_no_other_figure(tmp_path: Path) -> None:
    rows = STATES["both"]() + STATES["no_numbers"]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in plots.FIGURES.keys() - {figure.NAME}:
            written = plots.FIGURES[name](rows, tmp_path)
            drawn = [tmp_path / f"{name}.svg", tmp_path / f"{name}.png"]
            assert written == ([] if name == "training_steps" else drawn)
            assert all(path.stat().st_size > 5000 for path in written)


@pytest.mark.parametrize(
    "method, share",
    [("top_k", 20.0), ("nearest", 0.0), ("up", 0.0), ("down", 100 / 105), ("token_drop", 100 / 7)],
)
def test_the_wasted_share(method: str, share: float) -> None:
    counted = series.accounts(table.frame(accounts()))
    notes = style.Footnotes()
    points = series.wasted(counted, FAMILY, method, "skewed", notes)
    assert [point.experts for point in points] == [16, 32, 64]
    assert [point.value for point in points] == pytest.approx([share] * 3)
    assert not notes.entries


def test_rows_added_and_dropped_are_shares_of_top_ks_rows() -> None:
    counted = series.accounts(table.frame(accounts()))
    (first, *_) = series.moved(counted, FAMILY, "nearest", "uniform")
    assert (first.added, first.dropped) == pytest.approx((100 * 512 / 16384, 100 * 768 / 16384))
    (first, *_) = series.moved(counted, FAMILY, "up", "uniform")
    assert (first.added, first.dropped) == pytest.approx((25.0, 0.0))


def test_bars_of_methods_that_do_not_round_are_cut_and_named() -> None:
    rows = accounts()
    counted = series.accounts(table.frame(rows))
    moves = {m: series.moved(counted, FAMILY, m, "uniform") for m in COUNTS}
    limit = figure.moved_limit([moves])
    assert 25.0 < limit < 80.0  # up adds 25 %, expert choice 80 %
    found = texts(rows)
    assert found.count("80 %") == 2 * 2 * 3  # up and down, for each distribution and E
    assert any("Longer bars are cut" in text for text in found)
    assert not any("are cut" in text for text in texts([account(16, "up"), account(16, "token_drop")]))


def test_throughput_is_over_the_busy_time() -> None:
    rows = table.frame([measured(16, "top_k", ms=2.0), measured(16, "top_k", direction="backward", ms=9.0)])
    family = series.Family(T, D, N, K, str(TILE), (16, 32))
    notes = style.Footnotes()
    args = family, "sonicmoe_triton", "top_k", "uniform", "forward", notes
    model, hardware = series.throughput(series.measurements(rows), *args)
    rate = 6 * 16384 * N * D / 2.0 / 1e9
    assert (model[0].value, model[0].low, model[0].high) == pytest.approx((rate, rate / 1.6, rate / 0.8))
    assert hardware[0].value == pytest.approx(6 * 20480 * N * D / 2.0 / 1e9)
    assert math.isnan(model[1].value) and not model[1].failed


def test_the_speed_up_is_per_routed_row() -> None:
    args = FAMILY, "sonicmoe_triton", "routed_experts", "nearest", "uniform", "forward"
    everything = table.frame([ratio(16, value=1.2), ratio(32, value=1.3, direction="backward")])
    points = series.speedups(series.Rounded.among(everything), *args, style.Footnotes())
    scale = 16128 / 16384
    assert (points[0].value, points[0].low, points[0].high) == pytest.approx((1.2 * scale, 1.18 * scale, 1.23 * scale))
    assert math.isnan(points[1].value)


def test_where_rounding_begins_and_ends_to_pay_is_said() -> None:
    def points(*lows: float) -> list[series.Point]:
        return [series.Point(8 << i, low + 0.01, low, low + 0.02) for i, low in enumerate(lows)]

    assert series.paying(points(0.99, 1.01, 1.02), 4) == "4 to 8"
    assert series.paying(points(1.01, 0.995, 1.02, 1.03, 1.0), 4) == "2, 8 to 16"
    assert series.paying(points(1.01, math.nan, 1.02, math.nan), 4) == "2, 8"
    assert series.paying(points(0.9, 1.0), 4) == "nowhere"
    rows = [*accounts(), *(ratio(e, value=value) for e, value in ((16, 0.9), (32, 1.3), (64, 1.4)))]
    caption = " ".join(" ".join(figure._Figure(table.one_gpu(rows)).caption(400)).split())
    label = style.label("sonicmoe_triton")
    assert f"of E / K from 4 to 16. Forward, uniform: 8 to 16, {label}." in caption


def test_row_counts_of_a_ratio_without_them_come_from_other_rows() -> None:
    args = FAMILY, "sonicmoe_triton", "moe_layer", "nearest", "uniform", "forward"
    bare = ratio(16, value=1.2, operation="moe_layer", counted=False)
    with_accounts = table.frame([bare, account(16, "top_k"), account(16, "nearest")])
    assert series.speedups(series.Rounded.among(with_accounts), *args, style.Footnotes())[0].value == pytest.approx(
        1.2 * 16128 / 16384
    )
    # What a GPU ran goes before what was counted.
    other = measured(16, "nearest", routing=measured(16, "nearest")["routing"] | {"routed_rows": 8192})
    with_gpu = table.frame([bare, other, account(16, "top_k"), account(16, "nearest")])
    assert series.speedups(series.Rounded.among(with_gpu), *args, style.Footnotes())[0].value == pytest.approx(0.6)
    notes = style.Footnotes()
    (alone, *_) = series.speedups(series.Rounded.among(table.frame([bare])), *args, notes)
    assert alone.failed and math.isnan(alone.value)
    assert "rows that were routed are not known" in notes.lines(200)[0]


def test_the_prediction_is_top_ks_padding() -> None:
    for rows in ([account(16, "top_k"), account(16, "nearest")], [ratio(16)], [measured(16, "top_k")]):
        for direction, expected in (("forward", 1.25), ("backward", 1.125), ("forward_backward", 1 + 0.25 * 2 / 3)):
            points = series.prediction(series.Rounded.among(table.frame(rows)), FAMILY, "uniform", direction)
            assert points[0].value == pytest.approx(expected)
            assert math.isnan(points[1].value)


def test_both_passes_stand_for_their_sum_and_four_panels_in_a_line() -> None:
    def titles(rows: list[dict[str, Any]]) -> list[str]:
        return [text.replace("\n", ", ") for text in texts(rows) if text.startswith("(c) ") and "FLOPs" not in text]

    skewed = [made | {"routing": made["routing"] | {"distribution": "skewed"}} for made in on_gpu()]
    found = [text for text in titles([*on_gpu(), *skewed]) if "SonicMoE (official)" in text]
    assert found == [
        f"(c) {direction}, {distribution}, SonicMoE (official)"
        for distribution in ("uniform", "skewed") for direction in ("forward", "backward")
    ]  # fmt: skip
    sums = [measured(16, "top_k", direction="forward_backward")]
    assert next(text for text in titles(sums) if "SonicMoE" in text).startswith("(c) forward + backward, uniform, ")


def test_which_ratio_rows_count() -> None:
    others = [
        ratio(16, time_kind="host", basis=None),
        ratio(16, denominator="sonicmoe_official"),
        ratio(16) | {"denominator_routing": None},  # a method against itself
        ratio(16, dtype="float16"),
        ratio(16, mode="sustained"),
        ratio(16, mode="paced"),
    ]
    assert series.comparisons(table.one_gpu(others)).empty
    assert len(series.comparisons(table.one_gpu([*others, ratio(16)]))) == 1
    # Ratios that differ in the denominator's routing only are different points.
    pair = [ratio(16, "nearest"), ratio(16, "up"), ratio(16) | {"denominator_routing": None}]
    assert sorted(table.latest(table.frame(pair))["denominator_method"]) == ["", "nearest", "up"]


def test_failures_have_no_number_and_a_reason() -> None:
    everything = table.one_gpu(several())
    notes = style.Footnotes()
    down = series.wasted(series.accounts(everything), FAMILY, "down", "uniform", notes)
    assert [point.failed for point in down] == [False, False, True] and math.isnan(down[2].value)
    bars = series.moved(series.accounts(everything), FAMILY, "down", "uniform")
    assert bars[2].failed and math.isnan(bars[2].added)
    args = "sonicmoe_official", "top_k", "uniform", "forward", notes
    model, hardware = series.throughput(series.measurements(everything), FAMILY, *args)
    assert model[2].failed and math.isnan(model[2].value) and math.isnan(hardware[2].value)
    their = "sonicmoe_official", "routed_experts", "nearest", "uniform", "forward", notes
    speed = series.speedups(series.Rounded.among(everything), FAMILY, *their)
    assert speed[2].failed and not speed[1].failed
    assert notes.lines(200) == [
        "¹ Routing, crashed: exit code 1.",
        "² SonicMoE (official), out of memory: 3 GiB are missing.",
    ]
    found = texts(several())
    assert "no number (see below)" in found and "¹ Routing, crashed: exit code 1." in found


def test_unstable_points_are_drawn_and_marked() -> None:
    everything = table.one_gpu(several())
    model, _ = series.throughput(
        series.measurements(everything), FAMILY, "sonicmoe_triton", "nearest", "uniform", "forward", style.Footnotes()
    )
    assert [point.unstable for point in model] == [False, True, False]
    assert not math.isnan(model[1].value)
    args = FAMILY, "sonicmoe_triton", "routed_experts", "nearest", "uniform", "forward", style.Footnotes()
    assert [point.unstable for point in series.speedups(series.Rounded.among(everything), *args)] == [
        False,
        True,
        False,
    ]
    up = series.moved(series.accounts(everything), FAMILY, "up", "uniform")
    assert [point.unstable for point in up] == [False, False, True]
    assert "slash: unstable" in texts(several())
    assert "slash: unstable" not in texts([*accounts(), *on_gpu()])


def test_tiles_that_were_found_on_the_machine_are_told() -> None:
    """Of what is drawn: the newest rows, where they have a number."""
    found, own = [[tiles_note(tuned, QUACK_CACHE)] for tuned in (0, 6)]
    name = "sonicmoe_official"
    rows = [
        measured(16, "nearest", name, notes=found), measured(16, "nearest", name, notes=own),
        ratio(32, implementation=name, notes=found), measured(32, "top_k", name, notes=own),
        measured(64, "top_k", name, notes=found), failed(measured(64, "top_k", name, notes=own)),
    ]  # fmt: skip
    sentence = f"{table.FOUND_CHOICES}: {style.label(name)} (E = 32)."
    told = [" ".join(figure._Figure(table.one_gpu(its)).caption(999)) for its in (rows, on_gpu())]
    assert sentence in told[0] and table.FOUND_CHOICES not in told[1]
    assert series.found_choices(series.Rounded.among(table.one_gpu(rows)), FAMILY) == {name: [32]}


def test_what_is_missing_is_said_in_words() -> None:
    assert figure.NO_GPU_ROWS in texts(accounts())
    assert "moebench run token_rounding" in figure.NO_GPU_ROWS
    assert figure.NO_ACCOUNTS not in texts(accounts())
    assert figure.NO_ACCOUNTS in texts(on_gpu()) and figure.NO_GPU_ROWS not in texts(on_gpu())
    assert {figure.NO_GPU_ROWS, figure.NO_ACCOUNTS} <= set(texts([]))


def test_the_family_with_the_most_points_is_drawn() -> None:
    def of(sizes: tuple[int, int, int], made: dict[str, Any]) -> dict[str, Any]:
        return made | {"shape": made["shape"] | dict(zip(("T", "d", "n"), sizes, strict=True))}

    few = [of((8192, 64, 32), account(experts, "top_k")) for experts in (16, 32)]
    tile = [account(16, "top_k", routing=account(16, "top_k")["routing"] | {"m_tile": 64})]
    counted = series.accounts(table.frame([*few, *tile, *accounts()]))
    none = series.measurements(table.frame([]))
    first, second, left = series.choose(counted, none)
    assert first == FAMILY and second is None
    assert [(family.T, family.m_tile, family.experts) for family in left] == [(8192, "128", (16, 32)), (T, "64", (16,))]
    # Of equally many points, those that a GPU has measured as well; its own family where it has no other.
    both = table.frame([*few, *(of((9000, 64, 32), made) for made in few)])
    gpu = series.measurements(table.frame([of((9000, 64, 32), measured(16, "top_k"))]))
    first, second, _ = series.choose(both, gpu)
    assert first is not None and second is not None and (first.T, second.T) == (9000, 9000)
    first, second, left = series.choose(counted, gpu)
    assert first == FAMILY and second is not None and (second.T, len(left)) == (9000, 2)
    assert any("not drawn: T = 8192, d = 64, n = 32." in text for text in texts([*few, *accounts()]))


def without_tokens(made: dict[str, Any]) -> dict[str, Any]:
    zero = dict.fromkeys(("routed_rows", "padded_rows", "added", "dropped"), 0)
    return made | {"shape": made["shape"] | {"T": 0}, "routing": made["routing"] | zero}


def test_families_without_tokens_are_left_out() -> None:
    # More points than the others have, and still not chosen.
    none = [without_tokens(account(experts, method)) for experts in (8, 16, 32, 64) for method in COUNTS]
    timed = [without_tokens(measured(16, "top_k")), without_tokens(ratio(16))]
    gpu = pd.concat([series.measurements(table.frame(timed)), series.comparisons(table.frame(timed))])
    first, second, left = series.choose(series.accounts(table.frame([*none, *accounts()])), gpu)
    assert first == FAMILY and second is None and [family.T for family in left] == [0]
    found = texts([*none, *timed, *accounts()])
    assert any("not drawn: T = 0." in text for text in found)
    alone = texts([*none, *timed])
    assert {figure.NO_ACCOUNTS, figure.NO_GPU_ROWS} <= set(alone)
    assert any("not drawn: T = 0, d = 512, n = 128, K = 4, M tile of 128 rows." in text for text in alone)


def test_the_layer_is_in_the_legend_only_where_it_was_compared() -> None:
    entry = "(d) rounding's own time included"
    layer = ratio(16, operation="moe_layer", counted=False)
    assert entry in texts([ratio(16), layer, *accounts()])
    assert entry not in texts([ratio(16), measured(16, "nearest"), *accounts()])
    # Nor for rows of the layer that are not drawn: of another family, or with one routing on both sides.
    other = layer | {"shape": layer["shape"] | {"d": 64}}
    assert entry not in texts([ratio(16), ratio(32), other, layer | {"denominator_routing": None}, *accounts()])


def test_accounts_belong_to_every_gpu_and_to_none(tmp_path: Path) -> None:
    def write(folder: str, rows: list[dict[str, Any]]) -> None:
        (tmp_path / "results" / folder).mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(made) + "\n" for made in rows)
        (tmp_path / "results" / folder / "token_rounding.jsonl").write_text(text, encoding="utf-8")

    def seen(part: pd.DataFrame) -> int:
        return len(series.accounts(table.one_gpu(part)))

    write("cpu", accounts())
    every, problems = table.load(tmp_path / "results")
    assert problems == [] and seen(table.of_no_gpu(every)) == 48
    written, problems = plots.draw(tmp_path / "results", tmp_path / "figures", [figure.NAME])
    assert problems == []
    assert [path.relative_to(tmp_path / "figures").as_posix() for path in written] == [
        "no_gpu/token_rounding.svg",
        "no_gpu/token_rounding.png",
    ]
    write("nvidia_imaginary_100", on_gpu())
    every, _ = table.load(tmp_path / "results")
    assert seen(table.of_gpu(every, GPU)) == 48 and len(series.comparisons(table.of_gpu(every, GPU))) == 36
    written, _ = plots.draw(tmp_path / "results", tmp_path / "figures", [figure.NAME])
    assert {path.parent.name for path in written} == {"nvidia_imaginary_100"}


def test_moebench_plot_draws_it_and_every_other_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from harness.cli import app

    others: list[str] = []

    def another(name: str) -> plots.Figure:
        def note(*_: object) -> list[Path]:
            others.append(name)
            return []

        return note

    for name in plots.FIGURES.keys() - {figure.NAME}:
        monkeypatch.setitem(plots.FIGURES, name, another(name))
    (tmp_path / "rows" / "cpu").mkdir(parents=True)
    text = "".join(json.dumps(made) + "\n" for made in accounts())
    (tmp_path / "rows" / "cpu" / "token_rounding.jsonl").write_text(text, encoding="utf-8")
    arguments = ["plot", "--results", str(tmp_path / "rows"), "--output", str(tmp_path / "out")]
    ended = CliRunner().invoke(app, arguments)
    assert ended.exit_code == 0, ended.output
    names = {path.name for path in (tmp_path / "out" / plots.NO_GPU).iterdir()}
    assert names == {"token_rounding.png", "token_rounding.svg"}
    assert sorted([*others, figure.NAME]) == sorted(plots.FIGURES)

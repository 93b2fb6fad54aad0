"""The README's table of numbers, made from the committed rows: ``python -m plots.numbers`` rewrites it in place.

Nothing in the table is typed by hand, and a test compares it with the rows.
"""

from __future__ import annotations

import math
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd

from harness.claims.training_claims import ROUNDED
from harness.errors import UserError
from harness.token_rounding import TOP_K, routing_name
from harness.training import power
from harness.training.config import load_config
from harness.training.rows import OPERATION, asked
from plots import ablations, kernels, open_models
from plots import rows as table

README = table.ROOT / "README.md"
BEGIN, END = "<!-- numbers: begin (made by python -m plots.numbers) -->", "<!-- numbers: end -->"
OFFICIAL = "sonicmoe_official"
OURS = "sonicmoe_triton"
#: Baselines whose ratios stand in the table.
BASELINES = ("scattermoe", "momoe", "megablocks", "deepgemm", "deepgemm_pp", "torch_grouped_mm")
#: Beside a ratio with tiles of the official kernels that were found on the machine.
FOUND_CHOICES = "SonicMoE's tiles as found on the machine"
PASS_TEXT = {"forward": "forward", "backward": "backward", "forward_backward": "forward + backward"}
#: Endings of the columns of a ratio and of its interval.
_VALUE_PARTS = ("", "_low", "_high")
_PARTS = {"forward": 6.0, "backward": 12.0}


def paper_time(implementation: str, shape: str, pass_: str) -> float:
    """Time per routed row and n·d in the paper's Figure 14, in arbitrary units; NaN where it shows no bar.

    Forward + backward is 6 / forward TFLOPS + 12 / backward TFLOPS, since that many FLOPs belong to each."""
    values = table.paper_tflops()
    parts = [part for part in _PARTS if pass_ in (part, "forward_backward")]
    return sum(_PARTS[part] / table.paper_value(values, implementation, shape, part) for part in parts)


def _paper_ratio(plugin: str, shape: str, pass_: str) -> float:
    return paper_time(plugin, shape, pass_) / paper_time(OFFICIAL, shape, pass_)


def _ratio(
    rows: pd.DataFrame, numerator: str, shape: str, pass_: str, denominator: str = OFFICIAL, bound: str = ""
) -> pd.Series | None:
    """The latest ratio row. ``bound``: the variant of `dense_bound` that the denominator computes."""
    rows = rows[rows["shape"] == shape]  # so that all else is asked of few
    chosen = table.by_precedence(
        rows[
            (rows["record"] == "ratio")
            & (rows["status"] == "ok")
            & (rows["numerator"] == numerator)
            & (rows["denominator"] == denominator)
            & (rows["denominator_variant"] == bound)
            & (rows["pass"] == pass_)
            & (rows["time_kind"] == "device")
            & (rows["sweep"] == "paper_layers")
        ]
    )
    return chosen.iloc[-1] if len(chosen) else None


def _geometric_mean(values: list[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def _times(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}×"


def _speed(rows: pd.DataFrame) -> list[tuple[str, str, str]]:
    lines: list[tuple[str, str, str]] = []
    shape = table.HEADLINE_SHAPE
    labels = dict(zip(rows["implementation"], rows["label"], strict=True))
    for plugin in BASELINES:
        name = labels.get(plugin, plugin)
        for pass_, text in PASS_TEXT.items():
            row = _ratio(rows, plugin, shape, pass_)
            if row is None:
                continue
            paper = _paper_ratio(plugin, shape, pass_)
            lines.append((f"{text}: time of {name} / SonicMoE, 7B n = 256", _times(paper), _interval(row)))
        measured = _over_layers(rows, plugin, OFFICIAL, "forward_backward")
        if measured:
            paper = _geometric_mean(
                [_paper_ratio(plugin, found, "forward_backward") for _, found in table.paper_shapes()]
            )
            text = f"forward + backward: {name} / SonicMoE, geometric mean of the twelve layers"
            lines.append((text, _times(paper), measured))
    same = _ratio(rows, OFFICIAL, shape, "forward_backward")
    if same is not None:
        measured = f"{same['value']:.3f} [{same['value_low']:.3f}, {same['value_high']:.3f}]"
        lines.append(("the method against itself: SonicMoE / SonicMoE, 7B n = 256", "1", measured))
    return lines


def _memory_bytes(rows: pd.DataFrame, plugin: str, shape: str, quantity: str) -> float:
    """One of the columns ``memory_*``, measured on a GPU; NaN where there is none."""
    chosen = table.layers(rows[rows["shape"] == shape])
    chosen = chosen[
        (chosen["implementation"] == plugin)
        & (chosen["status"] == "ok")
        & (chosen["measured_on"] == "cuda")
        & chosen[quantity].notna()
    ]
    return float(chosen[quantity].iloc[-1]) if len(chosen) else math.nan


def _layer_gib(rows: pd.DataFrame, plugin: str, shape: str) -> float:
    return _memory_bytes(rows, plugin, shape, "memory_layer") / table.GIB


def _paper_gib(plugin: str, shape: str) -> float:
    return table.paper_value(table.paper_memory(), plugin, shape)


def _interval(row: pd.Series) -> str:
    return f"{row['value']:.2f}× [{row['value_low']:.2f}, {row['value_high']:.2f}]"


def _remark(found: Iterable[pd.Series], where: str = "") -> str:
    """Follows a text on these ratios; empty where none has tiles that were found. ``where``: of several shapes, the
    column that tells them apart."""
    marked = [row for row in found if row["found_choices"]]
    places = f" at {where} = {', '.join(f'{row[where]:.0f}' for row in marked)}" if where else ""
    return f"; {FOUND_CHOICES}{places}" if marked else ""


def _over_layers(rows: pd.DataFrame, numerator: str, denominator: str, pass_: str) -> str:
    """Geometric mean and range of a ratio over the twelve layers; empty where one is missing."""
    every = [_ratio(rows, numerator, found, pass_, denominator) for _, found in table.paper_shapes()]
    values = [float(row["value"]) for row in every if row is not None]
    if len(values) < len(every):
        return ""
    return f"{_times(_geometric_mean(values))} ({_times(min(values))} to {_times(max(values))})"


def _ours(rows: pd.DataFrame) -> list[tuple[str, str, str]]:
    lines: list[tuple[str, str, str]] = []
    for pass_, text in PASS_TEXT.items():
        row = _ratio(rows, OFFICIAL, table.HEADLINE_SHAPE, pass_, OURS)
        if row is not None:
            lines.append((f"{text}: time of SonicMoE / our Triton layer, 7B n = 256", "–", _interval(row)))
    for pass_, text in PASS_TEXT.items():
        measured = _over_layers(rows, OFFICIAL, OURS, pass_)
        if measured:
            of = "geometric mean of the twelve layers"
            lines.append((f"{text}: SonicMoE / our Triton layer, {of}", "–", measured))
    return lines


def _memory(rows: pd.DataFrame) -> list[tuple[str, str, str]]:
    lines: list[tuple[str, str, str]] = []
    shape = table.HEADLINE_SHAPE
    ours = _layer_gib(rows, OFFICIAL, shape)
    if math.isnan(ours):
        return lines
    paper = _paper_gib(OFFICIAL, shape)
    lines.append(("memory per layer of SonicMoE, 7B n = 256", f"{paper:.3f} GiB", f"{ours:.3f} GiB"))
    other = _layer_gib(rows, "scattermoe", shape)
    if not math.isnan(other):
        share = 1 - paper / _paper_gib("scattermoe", shape)
        lines.append(("… less than ScatterMoE's", f"{share:.0%}", f"{1 - ours / other:.0%}"))
    momoe, of_paper = _layer_gib(rows, "momoe", shape), _paper_gib("momoe", shape)
    text = f"{1 - ours / of_paper:.0%} (against the paper's MoMoE)" if math.isnan(momoe) else f"{1 - ours / momoe:.0%}"
    lines.append(("… less than MoMoE's", f"{1 - paper / of_paper:.0%}", text))
    for model, ((t, d), layers) in table.MODELS.items():
        finest, coarsest = (f"{t},{d},{n},{e},{k}" for n, e, k in (layers[0], layers[-1]))
        measured = _layer_gib(rows, OFFICIAL, finest) / _layer_gib(rows, OFFICIAL, coarsest)
        paper = _paper_gib(OFFICIAL, finest) / _paper_gib(OFFICIAL, coarsest)
        lines.append((f"… at the finest / at the coarsest experts, {model}", f"{paper:.3f}", f"{measured:.3f}"))
    return lines


def _bound(rows: pd.DataFrame) -> list[tuple[str, str, str]]:
    lines: list[tuple[str, str, str]] = []
    for model, n in (("7B", 256), ("30B", 256), ("120B", 1024)):
        (t, d), layers = table.MODELS[model]
        shape = next(f"{t},{d},{n_},{e},{k}" for n_, e, k in layers if n_ == n)
        text = f"forward throughput of SonicMoE / cuBLAS bound, {model} n = {n}"
        ratio = _ratio(rows, OFFICIAL, shape, "forward", "cublas_bound", "gemm_glue")
        if ratio is not None:
            low, high = 1 / ratio["value_high"], 1 / ratio["value_low"]
            measured = f"{1 / ratio['value']:.2f} [{low:.2f}, {high:.2f}]"
            lines.append((f"{text}, activation and aggregation at copy speed", "–", measured))
            continue
        # Rows of two runs: within several per cent.
        of_shape = rows[
            (rows["shape"] == shape)
            & (rows["pass"] == "forward")
            & (rows["record"] == "measurement")
            & (rows["status"] == "ok")
            & (rows["measured_on"] == "cuda")
            & rows["busy_ms"].notna()
        ]
        times = {
            key: of_shape.loc[of_shape["implementation"] + of_shape["variant"] == key, "busy_ms"]
            for key in (OFFICIAL, "cublas_boundgemm", "cublas_boundgemm_glue")
        }
        if all(len(found) for found in times.values()):
            sonic, gemm, glue = (float(found.iloc[-1]) for found in times.values())
            measured = f"{gemm / sonic:.2f}; {glue / sonic:.2f} with activation and aggregation at copy speed"
            lines.append((text, "–", measured))
    return lines


def _ours_beside(rows: pd.DataFrame) -> list[tuple[str, str, str]]:
    """Our layer's distance from the bound at the large layers, and its memory beside the official one's."""
    lines: list[tuple[str, str, str]] = []
    large = [shape for model, shape in table.paper_shapes() if model in ("30B", "120B")]
    found = [_ratio(rows, OURS, shape, "forward", "cublas_bound", "gemm_glue") for shape in large]
    values = [1 / float(row["value"]) for row in found if row is not None]
    if len(values) == len(large):
        text = f"forward throughput of our Triton layer / cuBLAS bound, the {len(large)} layers of 30B and 120B"
        spread = f"{_geometric_mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"
        lines.append((f"{text}, activation and aggregation at copy speed", "–", spread))
    for quantity, what in (("memory_layer", "memory per layer"), ("memory_peak", "highest use in forward + backward")):
        shares = []
        for _, shape in table.paper_shapes():
            ours, official = (_memory_bytes(rows, plugin, shape, quantity) for plugin in (OURS, OFFICIAL))
            shares.append(ours / official)
        if not any(map(math.isnan, shares)):
            spread = f"{_geometric_mean(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"
            lines.append((f"{what}: our Triton layer / SonicMoE, the twelve layers", "–", spread))
    return lines


def _rounded(rows: pd.DataFrame, plugin: str, operation: str, shape: str, pass_: str) -> pd.Series | None:
    """Time with top-K over time with nearest rounding: of the last run, as everywhere."""
    chosen = table.by_precedence(
        rows[
            (rows["record"] == "ratio")
            & (rows["status"] == "ok")
            & (rows["operation"] == operation)
            & (rows["numerator"] == plugin)
            & (rows["denominator"] == plugin)
            & (rows["method"] == "top_k")
            & (rows["denominator_method"] == "nearest")
            & (rows["distribution"] == "uniform")
            & (rows["shape"] == shape)
            & (rows["pass"] == pass_)
            & (rows["time_kind"] == "device")
        ]
    )
    return chosen.iloc[-1] if len(chosen) else None


def _per_row(row: pd.Series) -> str:
    """Such a ratio weighed by the rows of both, with its interval."""
    value, low, high = (row[f"value{part}"] * row["denominator_rows"] / row["routed_rows"] for part in _VALUE_PARTS)
    return f"{PASS_TEXT[row['pass']]} {value:.2f}× [{low:.2f}, {high:.2f}]"


def _rounding(rows: pd.DataFrame) -> list[tuple[str, str, str]]:
    """What token rounding gains at the shape that stands for the paper's claim, which names none, and with half of its
    experts."""
    lines: list[tuple[str, str, str]] = []
    claim = table.claims()["token-rounding-kernel-speedup"]
    sizes = claim["shape"]
    for experts in (sizes["E"], sizes["E"] // 2):
        shape = f"{sizes['T']},{sizes['d']},{sizes['n']},{experts},{sizes['K']}"
        for plugin, operation, what in (
            (OURS, "routed_experts", "our experts, routing given"),
            (OURS, "moe_layer", "our whole layer, its rounding's own time included"),
            (OFFICIAL, "routed_experts", "SonicMoE's experts, routing given"),
        ):
            passes = ("forward", "forward_backward")
            found = [_rounded(rows, plugin, operation, shape, pass_) for pass_ in passes]
            its = [row for row in found if row is not None]
            if len(its) == len(passes):
                text = f"token rounding, E = {experts}: top-K's time / nearest tile's, per routed row: {what}"
                lines.append((text, "–", "; ".join(map(_per_row, its)) + _remark(its)))
    if lines:
        lines.insert(0, ('token rounding on kernel time, "at high sparsity"', _times(claim["value"]), "next lines"))
    return lines


def _host(rows: pd.DataFrame) -> list[tuple[str, str, str]]:
    """What the GPU needs, and what a host that launches the calls one by one sees."""
    chosen = table.layers(rows)
    lines: list[tuple[str, str, str]] = []
    for plugin, name in ((OFFICIAL, "SonicMoE"), (OURS, "our Triton layer")):
        found = chosen[
            (chosen["implementation"] == plugin)
            & (chosen["shape"] == table.HEADLINE_SHAPE)
            & (chosen["pass"] == "forward_backward")
            & (chosen["status"] == "ok")
            & (chosen["measured_on"] == "cuda")
        ]
        if len(found):
            last = found.iloc[-1]
            device, host = last["device_ms"], last["latency_ms"]
            text = f"{device:.2f} ms of GPU time; {host:.2f} ms launched from an idle GPU, each pass by itself"
            lines.append((f"forward + backward of {name}, 7B n = 256", "–", text))
    return lines


def _of_sweep(rows: pd.DataFrame, sweep: str) -> pd.DataFrame:
    """A sweep's ratios over our kernels or our layer."""
    return rows[
        (rows["sweep"] == sweep)
        & (rows["record"] == "ratio")
        & (rows["status"] == "ok")
        & (rows["denominator"] == OURS)
        & (rows["numerator"] != OURS)
        & (rows["time_kind"] == "device")
    ]


def _kernels(rows: pd.DataFrame) -> list[tuple[str, str, str]]:
    """Each single kernel beside the fastest other one of each shape."""
    lines: list[tuple[str, str, str]] = []
    found = _of_sweep(rows, kernels.NAME)
    for panel in kernels.PANELS:
        own = found[(found["operation"] == panel.operation) & (found["variant"] == panel.variant)]
        values = [float(own.loc[own["shape"] == shape, "value"].min()) for _, shape in table.paper_shapes()]
        if not any(map(math.isnan, values)):
            text = f"kernel by kernel, the fastest other / ours, geometric mean of the twelve layers: {panel.title}"
            lines.append((text, "–", f"{_times(_geometric_mean(values))} ({min(values):.2f}× to {max(values):.2f}×)"))
    return lines


def _open_models(rows: pd.DataFrame) -> list[tuple[str, str, str]]:
    lines: list[tuple[str, str, str]] = []
    found = _of_sweep(rows, open_models.NAME)
    found = found[(found["numerator"] == OFFICIAL) & (found["pass"] == "forward_backward")]
    for model, shape in open_models.models().items():
        own = found[found["shape"] == shape]
        if len(own):
            text = f"forward + backward: time of SonicMoE / our Triton layer, a layer of {model}, T = 16384"
            lines.append((text, "–", _interval(own.iloc[-1]) + _remark([own.iloc[-1]])))
    return lines


def _layer_ratio(
    rows: pd.DataFrame, sweep: str, numerator: str, shape: str, distribution: str, denominator: str = OURS
) -> pd.Series | None:
    """The sweep's latest ratio of two layers, forward + backward; where it has none, that of another sweep, which the
    sweep itself does not measure again."""
    rows = rows[rows["shape"] == shape]
    chosen = table.by_precedence(
        rows[
            (rows["record"] == "ratio")
            & (rows["status"] == "ok")
            & (rows["operation"] == "moe_layer")
            & (rows["dtype"] == "bfloat16")
            & (rows["numerator"] == numerator)
            & (rows["denominator"] == denominator)
            & (rows["denominator_variant"] == "")
            & (rows["denominator_method"] == "")
            & (rows["method"] == TOP_K)
            & (rows["distribution"] == distribution)
            & (rows["pass"] == "forward_backward")
            & (rows["time_kind"] == "device")
        ]
    )
    own = chosen[chosen["sweep"] == sweep]
    chosen = own if len(own) else chosen
    return chosen.iloc[-1] if len(chosen) else None


def _groups() -> dict[str, list[str]]:
    """The groups of shapes that sweeps share."""
    with (table.ROOT / "sweeps" / "shapes.toml").open("rb") as file:
        groups: dict[str, list[str]] = tomllib.load(file)["shapes"]
    return groups


def _families(rows: pd.DataFrame) -> list[tuple[str, str, str]]:
    """Others over our layer as experts of the 7B layer get finer, and as they get more."""
    labels = dict(zip(rows["implementation"], rows["label"], strict=True)) | {OFFICIAL: "SonicMoE"}
    lines: list[tuple[str, str, str]] = []
    for sweep, differs, what in (
        ("granularity", "n", "the 7B layer with n = 1024 to 64, at equal cost"),
        ("sparsity", "E", "the 7B layer, n = 256, with 32 to 512 experts"),
    ):
        shapes = _groups()[f"{sweep}_7b"]
        for numerator in (OFFICIAL, *BASELINES):
            found = [_layer_ratio(rows, sweep, numerator, shape, "uniform") for shape in shapes]
            its = [row for row in found if row is not None]
            values = [float(row["value"]) for row in its]
            if len(values) == len(shapes):
                text = f"forward + backward: {labels.get(numerator, numerator)} / our Triton layer, {what}"
                spread = f"{_times(_geometric_mean(values))} ({_times(min(values))} to {_times(max(values))})"
                lines.append((text, "–", spread + _remark(its, differs)))
    return lines


#: Distributions of the sweep ``skew`` -> what the table calls them.
_UNEVEN = {"skewed": "skewed", "one_group": "on one group of experts", "empty_experts": "experts without rows"}
#: A public report's layer of few large experts, at which it found a loop over them faster than grouped GEMMs.
FEW_LARGE = "65536,2048,3072,32,1"


def _uneven(rows: pd.DataFrame) -> list[tuple[str, str, str]]:
    lines: list[tuple[str, str, str]] = []
    for numerator, name in ((OFFICIAL, "SonicMoE"), ("scattermoe", "ScatterMoE")):
        found = {
            text: _layer_ratio(rows, "skew", numerator, table.HEADLINE_SHAPE, its) for its, text in _UNEVEN.items()
        }
        told = [f"{_interval(row)} {text}" for text, row in found.items() if row is not None]
        if len(told) == len(found):
            what = f"forward + backward: time of {name} / our Triton layer, 7B n = 256, uneven routing"
            lines.append((what, "–", "; ".join(told)))
    for denominator, name in (("torch_grouped_mm", "PyTorch grouped GEMM"), (OURS, "our Triton layer")):
        few = {
            its: _layer_ratio(rows, "skew", "torch_loop", FEW_LARGE, its, denominator) for its in ("uniform", "skewed")
        }
        told = [f"{_interval(row)} {its}" for its, row in few.items() if row is not None]
        if len(told) == len(few):
            what = f"forward + backward: time of PyTorch loop / {name}, 32 experts of n = 3072, K = 1"
            lines.append((what, "–", "; ".join(told)))
    return lines


def _ablations(rows: pd.DataFrame) -> list[tuple[str, str, str]]:
    """What each fusion buys, over the twelve layers."""
    lines: list[tuple[str, str, str]] = []
    for title, panel in ablations.PANELS.items():
        for series in panel:
            chosen = table.by_precedence(
                rows[
                    (rows["sweep"] == ablations.NAME)
                    & (rows["record"] == "ratio")
                    & (rows["status"] == "ok")
                    & (rows["operation"] == series.operation)
                    & (rows["variant"] == series.variant)
                    & (rows["numerator"] == series.numerator)
                    & (rows["denominator"] == series.denominator)
                ]
            )
            last = chosen.drop_duplicates("shape", keep="last").set_index("shape")["value"]
            values = [float(last.get(shape, math.nan)) for _, shape in table.paper_shapes()]
            if not any(map(math.isnan, values)):
                what = title[4:] + (f", {series.text}" if series.text else "")
                spread = f"{_times(_geometric_mean(values))} ({min(values):.2f}× to {max(values):.2f}×)"
                lines.append((f"a fusion taken apart / ours, geometric mean of the twelve layers: {what}", "–", spread))
    return lines


#: Configuration and numerator -> the claim that the ratio stands beside.
_OF_STEPS = {
    ("7B", "scattermoe"): "training-throughput-7b",
    ("1.4B-sparse", OURS): "token-rounding-training-throughput",
}


def _training(rows: pd.DataFrame) -> list[tuple[str, str, str]]:
    """Whole training steps on one GPU: tokens a day of ours, and ratios from steps in turns."""
    lines: list[tuple[str, str, str]] = []
    of_steps = table.by_precedence(
        rows[(rows["operation"] == OPERATION) & (rows["status"] == "ok") & (rows["measured_on"] == "cuda")]
    )
    labels = dict(zip(rows["implementation"], rows["label"], strict=True)) | {OFFICIAL: "SonicMoE"}
    steps = {variant: asked(variant) for variant in of_steps["variant"]}
    for configuration in ("7B", "1.4B", "1.4B-sparse"):
        layers = load_config(configuration).layers
        whole = [
            variant
            for variant, its in steps.items()
            if (its.configuration, its.layers, its.processes) == (configuration, layers, 1)
        ]
        own = of_steps[
            of_steps["variant"].isin(whole)
            & (of_steps["implementation"] == OURS)
            & (of_steps["method"] == TOP_K)
            & of_steps["tokens_per_day"].notna()
        ]
        if len(own):
            last = own.iloc[-1]
            how = steps[last["variant"]].rest
            text = f"training {configuration} ({layers} layers, a step: {how}) on one GPU with our Triton layer"
            lines.append((text, "–", f"{last['tokens_per_day'] / 1e9:.2f} B tokens a day"))
            alike = [variant for variant in whole if steps[variant].rest == how]
            lines += _step_ratios(of_steps[of_steps["variant"].isin(alike)], configuration, labels)
    return lines


def _step_ratios(rows: pd.DataFrame, configuration: str, labels: dict[str, str]) -> list[tuple[str, str, str]]:
    """Of equal steps: another implementation over ours, and top-K over rounding to the paper's tile; by the wall clock,
    and, where the same run gave them, by busy times."""
    claims = table.claims()
    chosen = rows[
        (rows["record"] == "ratio")
        & (rows["denominator"] == OURS)
        & (rows["denominator_variant"] == "")
        & (rows["method"] == TOP_K)
    ]
    rounding = (chosen["denominator_method"] == "nearest") & (chosen["m_tile"] == "128")
    chosen = chosen[
        ((chosen["numerator"] == OURS) & rounding)
        | ((chosen["numerator"] != OURS) & (chosen["denominator_method"] == ""))
    ]
    lines = []
    busy = chosen[chosen["time_kind"] == "busy"]
    for _, row in chosen[chosen["time_kind"] == "host"].drop_duplicates("numerator", keep="last").iterrows():
        numerator = str(row["numerator"])
        claim = _OF_STEPS.get((configuration, numerator), "")
        text = f"… time of a step with {labels.get(numerator, numerator)} / with ours"
        if numerator == OURS:
            text = f"… time of a step by top-K / by rounding to the nearest {row['m_tile']}"
        lines.append((text, _times(claims[claim]["value"]) if claim else "–", _interval(row)))
        # Written after the ratio by the wall clock; an older one is of another run.
        its = busy[(busy["numerator"] == numerator) & (busy["timestamp"] >= row["timestamp"])]
        if len(its):
            lines.append(("… by the GPU's busy time alone", "–", _interval(its.iloc[-1])))
    return lines


def _quality(rows: pd.DataFrame) -> list[tuple[str, str, str]]:
    """Validation losses of our layer's runs that differ in routing and seed, each arm's beside top-K's: the paper's
    rounding, then arms that differ, then those that cannot be told, together where they have as many seeds."""
    runs = table.by_precedence(
        rows[
            (rows["record"] == "measurement")
            & (rows["operation"] == OPERATION)
            & (rows["status"] == "ok")
            & (rows["measured_on"] == "cuda")
            & (rows["implementation"] == OURS)
            & rows["validation_loss"].notna()
        ]
    )
    losses = power.judged(
        (
            ((run["variant"], run["shape"], run["dtype"], run["corpus"]), _arm(run), int(run["seed"]), run)
            for _, run in runs.iterrows()
        ),
        ROUNDED,
    )
    its = {arm: {seed: float(run["validation_loss"]) for seed, run in of.items()} for arm, of in losses.items()}
    try:
        compared = power.beside_top_k(its)[0]
    except UserError:
        return []
    together: dict[tuple[str, int], list[str]] = {}
    for arm, found in sorted(compared.items(), key=lambda one: (one[0] != ROUNDED, one[1].verdict == "not measured")):
        alone = arm == ROUNDED or found.verdict != "not measured"
        together.setdefault((arm if alone else "", len(power.differences(its[arm], its[TOP_K]))), []).append(arm)
    lines: list[tuple[str, str, str]] = []
    for (_, seeds), arms in together.items():
        differences = sorted(compared[arm].difference for arm in arms)
        values = " to ".join(f"{value:+.4f}" for value in dict.fromkeys((differences[0], differences[-1])))
        found = compared[arms[0]]
        if len(arms) == 1:
            values += f" [{found.ci95[0]:+.4f}, {found.ci95[1]:+.4f}]"
        limit = f", less than {found.detectable:.4f} cannot be told" if found.verdict == "not measured" else ""
        over = f"{seeds} seed{'s' * (seeds > 1)}{' each' * (len(arms) > 1)}"
        what, paper = f"trained by {', '.join(arms)} minus by top-K, {over}", "–"
        if lines:
            what = f"… {what}"
        else:
            run = asked(next(iter(losses[TOP_K].values()))["variant"])
            setting = f"training `{run.configuration}` ({run.layers} layers, a step: {run.rest})"
            what = f"{setting}: validation loss, nats a token, {what}"
            paper = '"similar"' if arms == [ROUNDED] else paper
        lines.append((what, paper, f"{values}: {found.verdict}{limit}"))
    return lines


def _arm(run: pd.Series) -> str:
    return routing_name(run["method"], run["m_tile"])


def lines(rows: pd.DataFrame) -> list[str]:
    """The table as Markdown, from the rows of one GPU."""
    rows = table.as_timed(rows)
    chosen = table.one_gpu(rows)
    gpu = table.gpus(chosen)
    head = [f"| what is compared | paper (H100) | measured ({gpu[0] if gpu else 'no GPU'}) |", "| --- | --- | --- |"]
    parts: list[Callable[[pd.DataFrame], list[tuple[str, str, str]]]] = [
        _speed,
        _ours,
        _host,
        _memory,
        _bound,
        _ours_beside,
        _kernels,
        _families,
        _open_models,
        _uneven,
        _ablations,
    ]
    every = rows[rows["gpu"] == gpu[0]] if gpu else chosen
    cells = [*(its for part in parts for its in part(chosen)), *_rounding(every), *_training(every), *_quality(every)]
    return head + [f"| {' | '.join(its)} |" for its in cells]


def with_numbers(text: str, block: list[str]) -> str:
    """``text`` with the table between its markers replaced. ValueError where the markers are missing."""
    if BEGIN not in text or END not in text:
        raise ValueError(f"the markers {BEGIN} and {END} are missing")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    return f"{before}{BEGIN}\n\n" + "\n".join(block) + f"\n\n{END}{after}"


def main(folder: Path = table.RESULTS / "nvidia_h200", readme: Path = README) -> None:
    """Rewrite the README's table from the committed rows."""
    rows, problems = table.load(folder)
    for problem in problems:
        print(problem, file=sys.stderr)
    readme.write_text(with_numbers(readme.read_text(encoding="utf-8"), lines(rows)), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Measured rows and the paper's values as pandas tables; what a figure shows of them.

A table of rows has one line for each JSON Lines row, its nested fields flattened (see `COLUMNS`).
"""

from __future__ import annotations

import csv
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pandas as pd

from harness import store
from harness.documents import load_toml
from harness.errors import UserError
from harness.record import Row
from harness.training.rows import OPERATION
from harness.tuners import tiles_found

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
PAPER = RESULTS / "paper"
GIB = 2**30

#: The paper's four model sizes: (T, d) and the (n, E, K) of each, finest experts first.
MODELS: dict[str, tuple[tuple[int, int], tuple[tuple[int, int, int], ...]]] = {
    "1.4B": ((40960, 768), ((256, 128, 8), (512, 64, 4), (1024, 32, 2))),
    "7B": ((24576, 1536), ((256, 128, 8), (512, 64, 4), (1024, 32, 2))),
    "30B": ((32768, 4096), ((256, 256, 16), (512, 128, 8), (1024, 64, 4))),
    "120B": ((32768, 4096), ((512, 256, 16), (1024, 128, 8), (2048, 64, 4))),
}
#: The shape of the paper's two headline numbers: 7B with its finest experts.
HEADLINE_SHAPE = "24576,1536,256,128,8"

#: The paper's names of implementations -> the names of the plugins here.
PAPER_NAMES = {
    "SonicMoE": "sonicmoe_official",
    "ScatterMoE": "scattermoe",
    "MegaBlocks": "megablocks",
    "MoMoE": "momoe",
    "Megatron": "megatron",
    "DeepGEMM-pt": "deepgemm",
    "DeepGEMM++": "deepgemm_pp",
}
#: Columns of a table of rows. Units: ``tflops*`` in TFLOPS and ``gb_per_s*`` in GB/s (over the busy time where the row
#: has it), ``device_ms*``, ``busy_ms`` and ``latency_ms`` in ms, ``memory_*`` in bytes, ``kernels_us`` in µs, the sum
#: over ``kernels``, one call's profiled kernels as stored; ``tokens_per_day`` of a training step on each GPU, and its
#: run's ``validation_loss`` in nats a token; ``found_choices``: 1 where tiles were found on the machine
#: (`harness.tuners.tiles_found`), else 0; ``*_low`` and ``*_high`` are the 95 % interval; absent numbers are NaN,
#: absent texts "", absent kernels ().
COLUMNS = (
    "folder", "identity", "timestamp", "record", "sweep", "operation", "variant", "pass", "implementation", "label",
    "status", "reason", "T", "d", "n", "E", "K", "shape", "dtype", "method", "m_tile", "distribution", "convention",
    "mode", "measured_on", "gpu", "tflops", "tflops_low", "tflops_high", "tflops_host", "tflops_hardware", "device_ms",
    "device_ms_low", "device_ms_high", "busy_ms", "basis", "latency_ms", "memory_static", "memory_held", "memory_peak",
    "memory_layer", "numerator", "denominator", "numerator_label", "denominator_label", "time_kind",
    "value", "value_low", "value_high", "denominator_method", "denominator_variant", "routed_rows", "padded_rows",
    "rows_added", "rows_dropped", "denominator_rows", "kernels", "kernels_us", "gb_per_s", "gb_per_s_low",
    "gb_per_s_high", "tokens_per_day", "tokens_per_day_low", "tokens_per_day_high", "seed", "corpus", "validation_loss",
    "found_choices",
)  # fmt: skip
#: One point of one sweep on one GPU; of several rows with the same key the latest counts.
KEY = ("sweep", "identity", "gpu")
_TEXT = {
    "folder", "identity", "timestamp", "record", "sweep", "operation", "variant", "pass", "implementation", "label",
    "status", "reason", "shape", "dtype", "method", "m_tile", "distribution", "convention", "mode", "measured_on",
    "gpu", "basis", "numerator", "denominator", "numerator_label", "denominator_label", "time_kind",
    "denominator_method", "denominator_variant", "kernels", "seed", "corpus",
}  # fmt: skip
NUMBERS_ALLOWED = ("ok", "unstable")


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if math.isfinite(value) else math.nan


def _interval(value: Any) -> tuple[float, float]:
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        return _number(value[0]), _number(value[1])
    return math.nan, math.nan


def _part(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = row.get(name)
    return value if isinstance(value, Mapping) else {}


def _flatten(row: Mapping[str, Any], folder: str) -> dict[str, Any]:
    shape, routing, layer = _part(row, "shape"), _part(row, "routing"), _part(row, "layer")
    device, latency, tflops = _part(row, "device_ms"), _part(row, "latency_ms"), _part(row, "tflops")
    memory, environment = _part(row, "memory_bytes"), _part(row, "environment")
    sizes = {name: int(shape.get(name) or 0) for name in ("T", "d", "n", "E", "K")}
    rate, median = _number(tflops.get("device")), _number(device.get("median"))
    training = _part(row, "training")
    trained, step = _number(training.get("tokens_per_day_per_gpu")), _number(latency.get("median"))
    step_low, step_high = _interval(latency.get("ci95"))
    low, high = _interval(device.get("ci95"))
    # Bars stand side by side, so they share one basis: `device_ms` is a graph's replay for some implementations, gaps
    # between kernels included, and the kernels' busy time for others; the busy time is in every row measured on a GPU.
    busy = _part(row, "busy_ms")
    drawn = _number(busy.get("median"))
    drawn_low, drawn_high = _interval(busy.get("ci95"))
    if math.isnan(drawn):
        drawn, drawn_low, drawn_high = median, low, high
    kernels = tuple(row.get("kernels") or ())
    flops, moved = rate * median, _number(_part(row, "gb_per_s").get("device")) * median
    value_low, value_high = _interval(row.get("ci95"))
    static, held, layer_bytes = (_number(memory.get(name)) for name in ("static", "held", "layer"))
    if math.isnan(static) and row.get("measured_on") == "fake":
        # A trace may give only what the forward allocates; weights, router and input follow from the shape.
        static = 2.0 * (3 * sizes["E"] * sizes["d"] * sizes["n"] + (sizes["E"] + sizes["T"]) * sizes["d"])
    if math.isnan(layer_bytes):
        layer_bytes = static + held

    def text(source: Mapping[str, Any], name: str) -> str:
        value = source.get(name)
        return "" if value is None else str(value)

    return {
        **{name: text(row, name) for name in ("timestamp", "sweep", "operation", "variant", "pass", "label", "reason")},
        **{name: text(row, name) for name in ("dtype", "measured_on", "time_kind")},
        **{name: text(row, name) for name in ("numerator_label", "denominator_label")},
        **{name: text(row, name) for name in ("implementation", "numerator", "denominator")},
        **sizes,
        "folder": folder,
        # All that was asked for, but for the sweep's name and the GPU, which may not name itself.
        "identity": store.identity(cast(Row, row), None),
        "record": text(row, "record") or "measurement",
        "status": text(row, "status") or "ok",
        "shape": ",".join(str(size) for size in sizes.values()),
        **{name: text(routing, name) for name in ("method", "distribution", "m_tile", "seed")},
        "convention": text(layer, "router_convention"),
        "mode": text(latency, "mode") or text(row, "mode") or "burst",
        "gpu": text(environment, "gpu"),
        "tflops": flops / drawn,
        # The rate's interval is the time's, turned over.
        "tflops_low": flops / drawn_high,
        "tflops_high": flops / drawn_low,
        "gb_per_s": moved / drawn,
        "gb_per_s_low": moved / drawn_high,
        "gb_per_s_high": moved / drawn_low,
        "tflops_host": _number(tflops.get("host")),
        "tflops_hardware": _number(tflops.get("hardware")),
        "device_ms": median,
        "device_ms_low": low,
        "device_ms_high": high,
        "busy_ms": drawn,
        "basis": text(device, "basis"),
        "latency_ms": step,
        "tokens_per_day": trained,
        "tokens_per_day_low": trained * step / step_high,
        "tokens_per_day_high": trained * step / step_low,
        "memory_static": static,
        "memory_held": held,
        "memory_peak": _number(memory.get("peak")),
        "memory_layer": layer_bytes,
        "value": _number(row.get("value")),
        "value_low": value_low,
        "value_high": value_high,
        # The denominator's routing method and its routed rows, where a ratio compares two routings.
        "denominator_method": text(_part(row, "denominator_routing"), "method"),
        # Where the denominator is a bound: which one.
        "denominator_variant": text(row, "denominator_variant"),
        "routed_rows": _number(routing.get("routed_rows")),
        "padded_rows": _number(routing.get("padded_rows")),
        "rows_added": _number(routing.get("added")),
        "rows_dropped": _number(routing.get("dropped")),
        "denominator_rows": _number(_part(row, "denominator_routing").get("routed_rows")),
        "corpus": ", ".join(sorted(note for note in map(str, row.get("notes") or ()) if note.startswith("corpus "))),
        "validation_loss": _number(training.get("validation_loss")),
        "found_choices": float(any(tiles_found(str(note)) for note in row.get("notes") or ())),
        "kernels": kernels,
        "kernels_us": float(sum(kernel["us"] for kernel in kernels)) if kernels else math.nan,
    }


def frame(rows: pd.DataFrame | Iterable[Mapping[str, Any]], folder: str = "") -> pd.DataFrame:
    """A table with `COLUMNS` from rows as stored; a table is returned as it is.

    Args:
        rows: decoded JSON Lines rows, or a table that this function made.
        folder: name of the folder below ``results/`` from which they come.
    """
    if isinstance(rows, pd.DataFrame):
        return rows
    flat = [_flatten(row, folder) for row in rows]
    return pd.DataFrame({
        name: pd.Series([row[name] for row in flat], dtype="object" if name in _TEXT else "float64")
        for name in COLUMNS
    })  # fmt: skip


def load(results: Path = RESULTS) -> tuple[pd.DataFrame, list[str]]:
    """Rows of every file below ``results/<folder>/`` (`store.row_files`) and one sentence for each line that could not
    be read.

    A folder that does not exist or holds nothing gives an empty table. A row for a GPU that does not name it (written
    for a worker that died, say) takes the name from its neighbours where they agree.
    """
    tables: list[pd.DataFrame] = []
    problems: list[str] = []
    for path in store.row_files(Path(results)):
        try:
            found, complaints = store.read(path)
        except UserError as error:
            # One of many: the others still say something.
            problems.append(str(error))
            continue
        problems += map(str, complaints)
        if found:
            tables.append(frame(found, folder=path.parent.name))
    if not tables:
        return frame([]), problems
    table = pd.concat(tables, ignore_index=True)
    for folder in sorted(set(table["folder"])):
        here = table["folder"] == folder
        names = gpus(table[here])
        if len(names) == 1:
            table.loc[here & (table["measured_on"] == "cuda") & (table["gpu"] == ""), "gpu"] = names[0]
    return table, problems


def by_precedence(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows in the order of `harness.store.precedence`: where several are of one point, the last of them counts."""
    # Figures ask this of many handfuls of rows.
    if len(rows) < 2:
        return rows
    by_time = rows.iloc[rows["timestamp"].to_numpy().argsort(kind="stable")]
    installed = (by_time["status"] != "not_installed").to_numpy()
    return by_time if installed.all() else by_time.iloc[installed.argsort(kind="stable")]


def latest(rows: pd.DataFrame) -> pd.DataFrame:
    """The row of each `KEY` that counts."""
    return by_precedence(rows).drop_duplicates(list(KEY), keep="last").sort_index()


#: Begins a figure's sentence on `found_choices`.
FOUND_CHOICES = "With tiles found on the machine, chosen beside who knows what other work"


def found_choices(layers: pd.DataFrame, implementation: str) -> set[str]:
    """The shapes at which its rows that count have choices that were found on the machine (see `COLUMNS`)."""
    own = latest(layers[layers["implementation"] == implementation])
    return set(own.loc[own["found_choices"] > 0, "shape"])


def slug(gpu: str) -> str:
    """A GPU's name as a folder name: ``NVIDIA H200`` -> ``nvidia_h200``."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_")


def gpus(rows: pd.DataFrame) -> list[str]:
    """Names of the GPUs on which rows were measured (attempts that failed included), sorted."""
    return sorted(set(rows.loc[rows["measured_on"] == "cuda", "gpu"]) - {""})


def _of_any_gpu(rows: pd.DataFrame) -> pd.Series:
    return (rows["measured_on"] == "fake") | (rows["operation"] == "token_rounding")


def of_no_gpu(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that hold for any GPU: fake-tensor traces, and accounts of routings, which only count rows."""
    return rows[_of_any_gpu(rows)]


def of_gpu(rows: pd.DataFrame, gpu: str) -> pd.DataFrame:
    """One GPU's rows, with those that belong to no GPU."""
    return rows[((rows["measured_on"] == "cuda") & (rows["gpu"] == gpu)) | _of_any_gpu(rows)]


def as_timed(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that stand beside each other and beside the paper's: timed in a burst, and steps of training, which have
    a mode of their own."""
    return rows[(rows["mode"] == "burst") | (rows["operation"] == OPERATION)]


def one_gpu(rows: pd.DataFrame | Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """What a figure may draw from: the latest rows, all of one GPU and timed alike (`as_timed`). Raises ValueError
    where they are of several GPUs."""
    table = as_timed(latest(frame(rows)))
    names = gpus(table)
    if len(names) > 1:
        raise ValueError(f"rows of several GPUs ({', '.join(names)}): draw each with rows.of_gpu(rows, gpu)")
    return table


def layers(rows: pd.DataFrame) -> pd.DataFrame:
    """Measurements of `moe_layer` as the paper made them: bfloat16, top-K, softmax over the K chosen logits, uniform
    routing; on a GPU or under fake tensors. Rows of the sweep ``paper_layers`` come last, so that they win."""
    return _as_the_paper(rows[rows["operation"] == "moe_layer"], "paper_layers")


def single_kernels(rows: pd.DataFrame, sweep: str) -> pd.DataFrame:
    """The same of a sweep's operations on single kernels."""
    return _as_the_paper(rows[rows["sweep"] == sweep], sweep)


def _as_the_paper(rows: pd.DataFrame, sweep: str) -> pd.DataFrame:
    chosen = rows[
        (rows["record"] == "measurement")
        & rows["measured_on"].isin(["cuda", "fake"])
        & rows["dtype"].isin(["bfloat16", ""])
        & rows["method"].isin(["top_k", ""])
        & rows["distribution"].isin(["uniform", ""])
        & rows["convention"].isin(["topk_softmax", ""])
    ]
    order = by_precedence(chosen)
    return order.iloc[(order["sweep"] == sweep).argsort(kind="stable")]


def best_row(rows: pd.DataFrame, value: str) -> pd.Series | None:
    """Of one point's rows the one to draw: the last with a number in the column ``value``, else the last failure,
    else None. Rows that succeeded without that number (another pass, say) count as absent."""
    # In plain lists: figures ask this a thousand times, of a handful of rows.
    allowed = [status in NUMBERS_ALLOWED for status in rows["status"].to_list()]
    known = rows[value].notna().to_list()
    numbers = [place for place, good in enumerate(allowed) if good and known[place]]
    failures = [place for place, good in enumerate(allowed) if not good]
    chosen = numbers[-1:] or failures[-1:]
    return rows.iloc[chosen[0]] if chosen else None


def bound(rows: pd.DataFrame, variant: str, direction: str, shape: str) -> float:
    """TFLOPS of the dense cuBLAS bound (variant ``gemm`` or ``gemm_glue``) for a pass and shape; NaN if unmeasured."""
    found = rows[
        (rows["record"] == "measurement")
        & (rows["operation"] == "dense_bound")
        & (rows["variant"] == variant)
        & (rows["pass"] == direction)
        & (rows["shape"] == shape)
        & (rows["measured_on"] == "cuda")
        & rows["status"].isin(NUMBERS_ALLOWED)
        & rows["tflops"].notna()
    ]
    return float(by_precedence(found)["tflops"].iloc[-1]) if len(found) else math.nan


def paper_shapes() -> list[tuple[str, str]]:
    """(model, shape) of the paper's twelve layers, in its order."""
    return [
        (model, f"{T},{d},{n},{E},{K}")
        for model, ((T, d), experts) in MODELS.items()
        for n, E, K in experts
    ]  # fmt: skip


@functools.cache
def _paper(name: str, value: str) -> pd.DataFrame:
    # Read once: figures ask for every bar.
    with (PAPER / name).open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    return pd.DataFrame({
        "model": [line["model"] for line in lines],
        "shape": [",".join(line[size] for size in ("T", "d", "n", "E", "K")) for line in lines],
        "pass": [line.get("pass") or "" for line in lines],
        "paper_name": [line["implementation"] for line in lines],
        "implementation": [PAPER_NAMES[line["implementation"]] for line in lines],
        "value": pd.Series([float(line[value]) if line[value] else math.nan for line in lines], dtype="float64"),
        "note": [line["note"] or "" for line in lines],
    })  # fmt: skip


def paper_memory() -> pd.DataFrame:
    """The paper's Figure 13: memory for each layer in GiB in the column ``value`` (NaN: not supported there)."""
    return _paper("figure13_activation_memory.csv", "gib")


def paper_tflops() -> pd.DataFrame:
    """The paper's Figure 14: TFLOPS in the column ``value``, by ``pass`` (NaN: not supported there)."""
    return _paper("figure14_tflops.csv", "tflops")


def paper_value(table: pd.DataFrame, implementation: str, shape: str, direction: str = "") -> float:
    """One value of `paper_memory` or `paper_tflops`; NaN where the paper has none."""
    # In plain lists: figures ask this a thousand times, of some dozens of values.
    points = zip(*(table[name].to_list() for name in ("implementation", "shape", "pass", "value")), strict=True)
    wanted = (implementation, shape, direction)
    return next((float(value) for *point, value in points if tuple(point) == wanted), math.nan)


def claims() -> dict[str, dict[str, Any]]:
    """The paper's claims by their id."""
    return {claim["id"]: claim for claim in load_toml(PAPER / "claims.toml")["claim"]}

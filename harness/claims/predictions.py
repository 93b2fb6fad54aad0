"""What measured rows and the roofline say of a GPU that nobody has measured. Never a measurement.

Memory needs no model: the same kernels allocate the same bytes. For times each implementation's kernels of one call are
put into two classes. Kernels that stream (sums, gathers, activations, sorting) take longer by the ratio of the two
memories' bandwidths. The experts' GEMMs take longer by the ratio of their roofline floors, each GEMM with the larger of
its compute and its memory floor: a kernel keeps the share of its floor that it reaches. A ratio of times then changes
by the two implementations' factors.

Kernels reach no peak, so that a GEMM near the ridge of the roofline may be bound by either side. Therefore the same is
worked out with every GEMM bound by compute, and where the two results differ by more than `TOLERANCE`, there is no
prediction.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from harness.claims.measures import MEASURES
from harness.claims.model import Finding, Prediction
from harness.claims.paper import Entry
from harness.claims.rows import GpuRows, Line, newest
from harness.claims.subjects import OFFICIAL, SUBJECTS, SWEEP
from harness.claims.time_claims import BOUND, DENSE, bound_shares
from harness.costs import floors_ms
from harness.errors import UserError
from harness.gpus import GpuRates, rates_of
from harness.interface import Point
from harness.operations import get_operation
from harness.registry import default_registry
from harness.shapes import MoEShape

TARGET = "NVIDIA H100 SXM"
#: The name of that part begins so; other parts of the family have slower memory.
_SAME_PART = "NVIDIA H100 80GB HBM3"
#: The GPU whose rows a prediction starts from: the same chip, with faster memory.
BASE = "H200"
TOLERANCE = 0.05
DTYPE = "bfloat16"
#: Roles of kernels that stream: all but the experts' GEMMs. A kernel that no role claims streams too, since plugins
#: name their GEMMs; of the dense bound they name all but the GEMMs.
STREAMING = frozenset({"router", "gather", "activation", "aggregation", "pointwise", "fill"})
#: The layer's GEMMs: (operation whose costs are this GEMM's, variant). dX~ reads and writes what a contiguous
#: up-projection writes and reads.
GEMMS: dict[str, tuple[tuple[str, str], ...]] = {
    "forward": (("grouped_gemm_gather_m", "up"), ("grouped_gemm", "down")),
    "backward": (
        ("hidden_gradient", ""),
        ("grouped_gemm_gather_k", "dW2"),
        ("grouped_gemm", "up"),
        ("grouped_gemm_gather_k", "dW1"),
    ),
}
GEMMS["forward_backward"] = GEMMS["forward"] + GEMMS["backward"]

#: A factor of time with each GEMM by its floors, and with every GEMM bound by compute.
Factors = tuple[float, float]


def gemm_factor(shape: MoEShape, pass_: str, base: GpuRates, target: GpuRates, padded: int | None = None) -> float:
    """Sum of the roofline floors of a pass's GEMMs on one GPU over those on another.

    ``padded``: rows that are multiplied, where they are more than T·K. Every tensor counts once, a gathered one as its
    source.
    """
    totals = []
    for rates in (target, base):
        total = 0.0
        for name, variant in GEMMS[pass_]:
            operation, point = get_operation(name), Point(name, OFFICIAL, shape, dtype=DTYPE, variant=variant)
            flops = operation.flops(point, "forward", padded or shape.routed_rows)
            moved = operation.algorithm_bytes(point, "forward", shape.routed_rows)
            total += max(floors_ms(flops, moved, DTYPE, rates).values())
        totals.append(total)
    return totals[0] / totals[1]


@cache
def _present_role(plugin: str) -> Callable[[str], str | None]:
    """A plugin's roles as it gives them now: rows may be older than a role's name."""
    try:
        return default_registry().get(plugin).kernel_role
    except UserError:
        return lambda name: None


def streaming_share(plugin: str, kernels: list[dict[str, Any]]) -> float | None:
    """The share of the kernels' time, of 1, that streams; None where they took none."""
    role_of = _present_role(plugin)

    def streams(kernel: dict[str, Any]) -> bool:
        role = role_of(kernel["name"]) or kernel.get("role")
        return role in STREAMING or (role is None and plugin != BOUND)

    total = sum(kernel["us"] for kernel in kernels)
    if not total:
        return None
    return sum(kernel["us"] for kernel in kernels if streams(kernel)) / total


def time_factors(line: Line | None, base: GpuRates, target: GpuRates) -> Factors | None:
    """Time on the target / on the measured GPU of the call that a measurement row profiled; None without kernels."""
    if line is None or line.row["status"] != "ok" or not line.row.get("kernels"):
        return None
    row = line.row
    streaming = streaming_share(row["implementation"], row["kernels"])
    if streaming is None:
        return None
    slower = base.bytes_per_s / target.bytes_per_s
    gemms = gemm_factor(line.shape, row["pass"], base, target, row["routing"].get("padded_rows"))
    compute = base.tflops[DTYPE] / target.tflops[DTYPE]
    return streaming * slower + (1 - streaming) * gemms, streaming * slower + (1 - streaming) * compute


def _between(value: float, top: Factors | None, bottom: Factors | None) -> Factors | None:
    if top is None or bottom is None:
        return None
    return value * top[0] / bottom[0], value * top[1] / bottom[1]


def _says(subject: str, text: str) -> str:
    return f"{'official kernels' if subject == 'official' else 'our layer'}: {text}"


def _none(subject: str, why: str) -> Prediction:
    return Prediction(TARGET, None, _says(subject, why))


def _time(subject: str, ends: Factors | None, of: float) -> Prediction:
    """A prediction of a ratio of times from its two ends, or why there is none."""
    if ends is None:
        return _none(subject, "no profiled kernels of both sides to split their times by")
    roofline, compute = ends
    if abs(roofline / compute - 1) > TOLERANCE:
        text = (
            "the GEMMs lie near the ridge of the roofline, and the result depends on which side binds them: "
            f"{roofline:.2f} by the datasheet's floors, {compute:.2f} with all bound by compute"
        )
        return _none(subject, text)
    text = (
        f"{of:.2f} measured on {BASE}; kernels that stream slowed by the ratio of the memories' bandwidths, GEMMs by "
        f"that of their roofline floors, whose reached share is taken to stay ({compute:.2f} with all GEMMs bound by "
        "compute); of today's packages, not of those that the paper measured"
    )
    return Prediction(TARGET, roofline, _says(subject, text))


def _layer(rows: GpuRows, plugin: str, shape: MoEShape, pass_: str) -> Line | None:
    return newest(rows.measurements(plugin, shape, pass_=pass_), SWEEP)


def _speed(rows: GpuRows, entry: Entry, subject: str, found: Finding, rates: tuple[GpuRates, GpuRates]) -> Prediction:
    numerator, pass_ = SPEED[entry.claim.id]
    assert entry.shape is not None and found.value is not None
    sides = [
        time_factors(_layer(rows, plugin, entry.shape, pass_), *rates) for plugin in (numerator, SUBJECTS[subject])
    ]
    return _time(subject, _between(found.value, *sides), found.value)


def _rounding(
    rows: GpuRows, entry: Entry, subject: str, found: Finding, rates: tuple[GpuRates, GpuRates]
) -> Prediction:
    assert entry.shape is not None and found.value is not None
    sides = [
        time_factors(
            newest(
                rows.measurements(SUBJECTS[subject], entry.shape, "routed_experts", "", "forward_backward", method),
                "token_rounding",
            ),
            *rates,
        )
        for method in ("top_k", "nearest")
    ]
    return _time(subject, _between(found.value, *sides), found.value)


def _bound(rows: GpuRows, entry: Entry, subject: str, found: Finding, rates: tuple[GpuRates, GpuRates]) -> Prediction:
    assert found.value is not None
    every: list[Factors] = []
    for layer, number in bound_shares(rows, subject, DENSE):
        bound = newest(rows.measurements(BOUND, layer.shape, "dense_bound", DENSE, "forward"), SWEEP)
        own = time_factors(_layer(rows, SUBJECTS[subject], layer.shape, "forward"), *rates)
        ends = _between(number.value, time_factors(bound, *rates), own)
        if ends is None:
            return _time(subject, None, found.value)
        every.append(ends)
    return _time(subject, min(every), found.value)


def _same(rows: GpuRows, entry: Entry, subject: str, found: Finding, rates: tuple[GpuRates, GpuRates]) -> Prediction:
    text = f"as measured on {BASE}: the same kernels allocate the same bytes, whatever the memory's speed"
    return Prediction(TARGET, found.value, _says(subject, text))


Model = Callable[[GpuRows, Entry, str, Finding, tuple[GpuRates, GpuRates]], Prediction]
#: Claim -> numerator and pass of its ratio.
SPEED = {
    "throughput-vs-scattermoe-7b": ("scattermoe", "forward_backward"),
    "forward-vs-deepgemm-7b": ("deepgemm_pp", "forward"),
    "backward-vs-scattermoe-7b": ("scattermoe", "backward"),
}
MODELS: dict[str, Model] = {
    **dict.fromkeys(SPEED, _speed),
    **dict.fromkeys(("activation-memory-7b", "memory-constant-in-granularity", "activation-memory-range"), _same),
    "token-rounding-kernel-speedup": _rounding,
    "near-dense-bound": _bound,
}
#: Why the others have no model.
NO_MODEL = {
    "token-rounding-quality": "the quality of a trained model does not depend on the GPU",
    "training-throughput-7b": "a step's time is set by communication and the host too, which no row measures",
    "token-rounding-training-throughput": "a step's time holds more than the layer, which no row measures",
    "io-overlap": "a roofline says how long bytes take, not how much of that time hides behind computation",
}


def predict(entry: Entry, gpus: list[GpuRows]) -> tuple[Prediction, ...]:
    """A prediction for each subject on `TARGET`; none once that GPU has rows."""
    if any(rows.gpu.startswith((_SAME_PART, TARGET)) for rows in gpus):
        return ()
    model = MODELS.get(entry.claim.id)
    if model is None:
        why = NO_MODEL.get(entry.claim.id, "no model is written for this claim")
        return tuple(_none(subject, why) for subject in SUBJECTS)
    rows = next((rows for rows in gpus if re.search(rf"\b{BASE}\b", rows.gpu)), None)
    base, target = rates_of(BASE), rates_of(TARGET)
    assert base is not None and target is not None
    every = []
    for subject in SUBJECTS:
        found = None if rows is None else MEASURES[entry.claim.id](rows, entry, subject)
        if rows is None or found is None or found.value is None:
            every.append(_none(subject, f"not measured on an {BASE} either, so that there is nothing to start from"))
        else:
            every.append(model(rows, entry, subject, found, (base, target)))
    return tuple(every)


__all__ = ["MODELS", "SPEED", "TARGET", "gemm_factor", "predict", "streaming_share", "time_factors"]

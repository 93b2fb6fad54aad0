"""The claims on time against other implementations and against the dense bound."""

from __future__ import annotations

from harness.claims.hints import ratio_command
from harness.claims.model import Finding
from harness.claims.paper import Entry, PaperLayer, paper_layers
from harness.claims.rows import GpuRows, Line, Number, failure, good_ratio, mean
from harness.claims.subjects import (
    OFFICIAL,
    OURS,
    SUBJECTS,
    SWEEP,
    Measure,
    Part,
    measured,
    sentences,
    shape_of,
    unmeasured,
)
from harness.shapes import MoEShape

BOUND = "cublas_bound"


def against(rows: GpuRows, subject: str, numerator: str, pass_: str, shape: MoEShape) -> tuple[Number | None, str]:
    """Time of a baseline / of SonicMoE, and a remark; or None and why.

    Ours is compared directly where such rows exist, else through the official kernels: the product of two ratios.
    """
    plugin = SUBJECTS[subject]
    direct = rows.ratios(numerator, plugin, pass_, shape)
    if direct or subject == "official":
        number = good_ratio(direct, SWEEP)
        if number is not None:
            return number, ""
        tried = failure(direct, rows.measurements(numerator, shape), rows.measurements(plugin, shape))
        return None, sentences(ratio_command(SWEEP, (numerator, plugin), shape=shape), tried)
    pairs = ((numerator, OFFICIAL), (OFFICIAL, OURS))
    steps = [rows.ratios(*pair, pass_, shape) for pair in pairs]
    first, second = (good_ratio(step, SWEEP) for step in steps)
    if first is None or second is None:
        plugins = (numerator, OFFICIAL, OURS)
        tried = failure(*steps, *(rows.measurements(plugin, shape) for plugin in plugins))
        return None, sentences(ratio_command(SWEEP, *pairs, shape=shape), tried)
    remark = (
        f"not paired directly: {numerator} / {OFFICIAL} ({first.value:.3f}) times {OFFICIAL} / {OURS} "
        f"({second.value:.3f}), from two processes; the interval is the product of their low ends to that of their "
        "high ends"
    )
    return first.times(second), remark


def speed(numerator: str, pass_: str) -> Measure:
    """The measure of a claim on a baseline's time over SonicMoE's."""

    def measure(rows: GpuRows, entry: Entry, subject: str) -> Finding:
        number, text = against(rows, subject, numerator, pass_, shape_of(entry))
        if number is None:
            return unmeasured(rows, subject, text)
        return measured(rows, entry.claim, subject, number, text)

    return measure


def forward_vs_deepgemm(rows: GpuRows, entry: Entry, subject: str) -> Finding:
    """DeepGEMM++ is compared; DeepGEMM-pt, whose gathers and activation are PyTorch's, is only named beside it."""
    shape = shape_of(entry)
    number, text = against(rows, subject, "deepgemm_pp", "forward", shape)
    other, _ = against(rows, subject, "deepgemm", "forward", shape)
    beside = "" if other is None else f"against DeepGEMM-pt, which is no substitute: {other.value:.2f}"
    lines = () if other is None else other.lines
    if number is None:
        return unmeasured(rows, subject, sentences(text, beside), lines=lines)
    return measured(rows, entry.claim, subject, number, sentences(text, beside), lines=lines)


#: What the claim's measure names, and a lower bar: with activation and aggregation at copy speed.
DENSE, GLUED = "gemm", "gemm_glue"


def bound_shares(rows: GpuRows, subject: str, bound: str) -> list[tuple[PaperLayer, Number]]:
    """Forward throughput as a share of a dense bound's, at each of the twelve layers that has it: the bound's time
    over SonicMoE's, since both count the same FLOPs."""
    found = []
    for layer in paper_layers():
        number = good_ratio(rows.ratios(SUBJECTS[subject], BOUND, "forward", layer.shape, bound=bound), SWEEP)
        if number is not None:
            found.append((layer, number.inverse()))
    return found


def near_bound(rows: GpuRows, entry: Entry, subject: str) -> Finding:
    """Against the GEMMs alone, as the claim has it: the smallest share of the layers goes into the finding, all of them
    into its parts. Shares of the lower bar stand beside them."""
    parts: list[Part] = []
    lines: list[Line] = []
    shares = {bound: bound_shares(rows, subject, bound) for bound in (DENSE, GLUED)}
    for bound, found in shares.items():
        for layer, number in found:
            parts.append((f"{layer.name}: of {bound}", number.value, number.ci95))
            lines += number.lines
    beside = "" if not shares[GLUED] else (
        f"with activation and aggregation at copy speed in the bound ({GLUED}): {_spread(shares[GLUED])}"
    )  # fmt: skip
    if not shares[DENSE]:
        plugin = SUBJECTS[subject]
        tried = [rows.ratios(plugin, BOUND, "forward", layer.shape, bound=DENSE) for layer in paper_layers()]
        tried += [rows.measurements(plugin, layer.shape) for layer in paper_layers()]
        reason = sentences(ratio_command(SWEEP, (plugin, BOUND)), failure(*tried), beside)
        return unmeasured(rows, subject, reason, parts, lines)
    worst = min((number for _, number in shares[DENSE]), key=lambda number: number.value)
    remark = sentences(f"of GEMMs alone: {_spread(shares[DENSE])}", beside)
    return measured(rows, entry.claim, subject, worst, remark, parts, lines)


def _spread(found: list[tuple[PaperLayer, Number]]) -> str:
    numbers = [number for _, number in found]
    least = min(number.value for number in numbers)
    return f"{least:.3f} at the layer where it is least, {mean(numbers).value:.3f} the geometric mean of {len(numbers)}"

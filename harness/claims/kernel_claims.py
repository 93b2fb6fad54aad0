"""The claims on kernels: what token rounding gains, and what fusing the gather and the epilogues costs."""

from __future__ import annotations

from harness.claims.hints import command, ratio_command
from harness.claims.model import Finding
from harness.claims.paper import Entry, paper_layers
from harness.claims.rows import PASS_TEXT, GpuRows, Line, Number, failure, good_ratio, mean, newest, number_of
from harness.claims.subjects import OFFICIAL, OURS, SUBJECTS, Part, measured, sentences, shape_of, unmeasured
from harness.shapes import MoEShape


def rounding(rows: GpuRows, plugin: str, operation: str, pass_: str, shape: MoEShape, m_tile: int) -> list[Line]:
    """Ratio rows of top-K's time over nearest rounding's, oldest first; those that succeeded say how many rows were
    routed on either side."""
    return [
        line
        for line in rows.ratios(plugin, plugin, pass_, shape, operation, rounded=m_tile)
        if line.row["status"] != "ok"
        or (line.row["routing"].get("routed_rows") and line.row["denominator_routing"].get("routed_rows"))
    ]


def per_row(line: Line) -> Number:
    """A ratio of times as a ratio of times per routed row: rounding changes how many rows there are."""
    row = line.row
    return number_of(line).scaled(row["denominator_routing"]["routed_rows"] / row["routing"]["routed_rows"])


def token_rounding(rows: GpuRows, entry: Entry, subject: str) -> Finding:
    """The verdict goes by the experts' forward + backward, rounding excluded, of the newest run."""
    shape, plugin, m_tile = shape_of(entry), SUBJECTS[subject], entry.m_tile or 128
    parts: list[Part] = []
    lines: list[Line] = []
    for operation, what in (("routed_experts", "rounding excluded"), ("moe_layer", "rounding included")):
        for pass_, text in PASS_TEXT.items():
            tried = rounding(rows, plugin, operation, pass_, shape, m_tile)
            runs = [line for line in tried if line.row["status"] == "ok"]
            for run in runs:
                number = per_row(run)
                label = f"{what}, {text}" + (f", run of {run.when}" if len(runs) > 1 else "")
                parts.append((label, number.value, number.ci95))
            lines += runs
    every = rounding(rows, plugin, "routed_experts", "forward_backward", shape, m_tile)
    line = newest(every, "token_rounding")
    if line is None or line.row["status"] != "ok":
        how = command("token_rounding", plugin, shape=shape)
        return unmeasured(rows, subject, sentences(how, failure(every)), parts, lines)
    count = sum(other.row["status"] == "ok" for other in every)
    remark = sentences(
        "the experts' forward + backward, rounding excluded" + (f", the last of {count} runs" if count > 1 else ""),
        "the paper names no shape",
        "" if subject == "ours" else "the official package has no rounding of its own to include",
    )
    return measured(rows, entry.claim, subject, per_row(line), remark, parts, lines)


#: Text, operation, variant and the plugin whose kernels are taken apart, of each fusion.
FUSIONS = (
    ("gather of the up-projection", "grouped_gemm_gather_m", "up", "ablation_gather"),
    ("gather of dW1", "grouped_gemm_gather_k", "dW1", "ablation_gather"),
    ("epilogue of dH", "hidden_gradient", "", "ablation_epilogue"),
)


def _unpaired(rows: GpuRows, plugin: str) -> tuple[str, list[Line]]:
    """The up-projection with its gather and epilogue over the plain GEMM, from rows that no process paired: a remark,
    never the number."""
    shares: list[float] = []
    used: list[Line] = []
    for layer in paper_layers():
        pair = [
            newest(rows.measurements(plugin, layer.shape, operation, "up", "forward"), "kernels")
            for operation in ("grouped_gemm_gather_m", "grouped_gemm")
        ]
        lines = [line for line in pair if line is not None and line.row["status"] == "ok"]
        times = [line.row["device_ms"]["median"] for line in lines if line.row.get("device_ms")]
        if len(times) == 2:
            shares.append(times[0] / times[1])
            used += lines
    if not shares:
        return "", []
    text = (
        f"timed apart, not paired: the up-projection with gather and SwiGLU takes {min(shares):.2f} to "
        f"{max(shares):.2f} times the plain GEMM over contiguous rows at {len(shares)} layers"
    )
    return text, used


def io_overlap(rows: GpuRows, entry: Entry, subject: str) -> Finding:
    """Of our kernels: the fusion that pays least goes into the finding. Nobody takes the official ones apart."""
    beside, unpaired = _unpaired(rows, SUBJECTS[subject])
    if subject == "official":
        text = (
            "no sweep pairs the official kernels with themselves taken apart; moebench run kernels --only "
            f"{OFFICIAL} times them with gathered and with contiguous rows, each by itself"
        )
        return unmeasured(rows, subject, sentences(text, beside), lines=unpaired)
    series: list[tuple[str, Number]] = []
    tried: list[list[Line]] = []
    for text, operation, variant, apart in FUSIONS:
        every = [rows.ratios(apart, OURS, "forward", layer.shape, operation, variant) for layer in paper_layers()]
        numbers = [number for lines in every if (number := good_ratio(lines, "ablations")) is not None]
        tried += every
        if numbers:
            series.append((f"{text}, apart / fused, geometric mean of {len(numbers)} layers", mean(numbers)))
    parts: list[Part] = [(text, number.value, number.ci95) for text, number in series]
    lines = [line for _, number in series for line in number.lines]
    if len(series) < len(FUSIONS):
        run = ratio_command("ablations", *dict.fromkeys((apart, OURS) for _, _, _, apart in FUSIONS))
        return unmeasured(rows, subject, sentences(run, failure(*tried), beside), parts, [*lines, *unpaired])
    worst = min((number for _, number in series), key=lambda number: number.value)
    remark = sentences(
        "the fusion that pays least, separate kernels / fused: above 1 it pays",
        "fused / contiguous rows is not paired by any sweep",
        beside,
    )
    return measured(rows, entry.claim, subject, worst, remark, parts, [*lines, *unpaired])

"""The claims on memory: what a layer holds after the forward, weights and input included."""

from __future__ import annotations

from harness.claims.hints import command
from harness.claims.model import Finding
from harness.claims.paper import MEMORY_BASELINES, Entry, PaperLayer, paper_layers
from harness.claims.rows import GpuRows, Number, failure, memory
from harness.claims.subjects import SUBJECTS, SWEEP, Part, measured, sentences, shape_of, unmeasured
from harness.claims.verdicts import verdict
from harness.shapes import MoEShape

GIB = 2**30
NO_INTERVAL = "memory is counted, not sampled, so it has no interval"


def _memory_of(rows: GpuRows, plugin: str, shape: MoEShape) -> Number | None:
    return memory(rows.measurements(plugin, shape), SWEEP)


def reduction(rows: GpuRows, plugin: str, other: str, shape: MoEShape) -> Number | None:
    """1 - memory of one / memory of the other; None where one of them has none."""
    own, its = _memory_of(rows, plugin, shape), _memory_of(rows, other, shape)
    if own is None or its is None:
        return None
    return Number(1 - own.value / its.value, None, own.lines + its.lines)


def _paper_layer(shape: MoEShape) -> PaperLayer | None:
    return next((layer for layer in paper_layers() if layer.shape == shape), None)


def activation_memory(rows: GpuRows, entry: Entry, subject: str) -> Finding:
    """Against MoMoE as measured on the same GPU; the comparison with the paper's value is a remark."""
    shape, plugin = shape_of(entry), SUBJECTS[subject]
    own = _memory_of(rows, plugin, shape)
    layer = _paper_layer(shape)
    beside = ""
    if own is not None and layer is not None and "MoMoE" in layer.gib:
        share = 1 - own.value / GIB / layer.gib["MoMoE"]
        beside = f"against the paper's MoMoE value of {layer.gib['MoMoE']:.3f} GiB: {share:.3f}"
    number = reduction(rows, plugin, "momoe", shape)
    if number is None:
        lacking = plugin if own is None else "momoe"
        tried = failure(rows.measurements(lacking, shape))
        run = command(SWEEP, "momoe", plugin, shape=shape)
        lines = own.lines if own is not None else ()
        return unmeasured(rows, subject, sentences(run, tried, beside), lines=lines)
    return measured(rows, entry.claim, subject, number, sentences(NO_INTERVAL, beside))


def memory_constant(rows: GpuRows, entry: Entry, subject: str) -> Finding:
    """Finest over coarsest experts of each model; the model whose memory grows most goes into the finding."""
    plugin = SUBJECTS[subject]
    models: dict[str, list[MoEShape]] = {}
    for layer in paper_layers():
        models.setdefault(layer.model, []).append(layer.shape)
    parts: list[Part] = []
    found: list[Number] = []
    missing: list[MoEShape] = []
    for model, shapes in models.items():
        ends = [min(shapes, key=lambda shape: shape.n), max(shapes, key=lambda shape: shape.n)]
        values = [_memory_of(rows, plugin, shape) for shape in ends]
        missing += [shape for shape, value in zip(ends, values, strict=True) if value is None]
        if values[0] is not None and values[1] is not None:
            number = Number(values[0].value / values[1].value, None, values[0].lines + values[1].lines)
            parts.append((f"{model}: n={ends[0].n} / n={ends[1].n}", number.value, None))
            found.append(number)
    lines = [line for number in found for line in number.lines]
    if missing:
        tried = failure(*(rows.measurements(plugin, shape) for shape in missing))
        lacking = f"no memory at {', '.join(map(str, missing))}"
        return unmeasured(rows, subject, sentences(command(SWEEP, plugin), lacking, tried), parts, lines)
    worst = max(found, key=lambda number: number.value)
    remark = sentences("the model whose memory grows most", NO_INTERVAL)
    return measured(rows, entry.claim, subject, worst, remark, parts, lines)


def memory_range(rows: GpuRows, entry: Entry, subject: str) -> Finding:
    """Against the best of the paper's baselines that were measured and whose memory compares (`MEMORY_BASELINES`); the
    one that is best in the paper's figure has to be among them, since without it the number would flatter."""
    plugin = SUBJECTS[subject]
    parts: list[Part] = []
    found: list[Number] = []
    lacking: dict[str, int] = {}
    tried = ""
    for layer in paper_layers():
        every = {name: reduction(rows, plugin, name, layer.shape) for name in MEMORY_BASELINES}
        of = {name: number for name, number in every.items() if number is not None}
        needed = plugin if _memory_of(rows, plugin, layer.shape) is None else layer.best_baseline
        if needed not in of:
            lacking[needed] = lacking.get(needed, 0) + 1
            tried = tried or failure(rows.measurements(needed, layer.shape))
            continue
        best = min(of, key=lambda name: of[name].value)
        parts.append((f"{layer.name}: against {MEMORY_BASELINES[best]}", of[best].value, None))
        found.append(of[best])
    lines = [line for number in found for line in number.lines]
    if lacking:
        names = ", ".join(f"{name} at {count}" for name, count in lacking.items())
        text = f"of the twelve layers these lack memory, {names}"
        so_far, run = "", command(SWEEP, plugin, *lacking)
        if found:
            worst = min(found, key=lambda number: number.value)
            so_far = f"smallest over the other {len(found)}: {worst.value:.1%}"
            if verdict(entry.claim, worst.value) == "not reproduced":
                # More layers can only make the smallest smaller.
                remark = sentences(f"at most this, by {len(found)} of the twelve layers", run, tried, NO_INTERVAL)
                return measured(rows, entry.claim, subject, worst, remark, parts, lines)
        return unmeasured(rows, subject, sentences(run, text, tried, so_far), parts, lines)
    worst = min(found, key=lambda number: number.value)
    return measured(
        rows, entry.claim, subject, worst, sentences("the smallest of the twelve layers", NO_INTERVAL), parts, lines
    )  # fmt: skip

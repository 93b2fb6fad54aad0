"""The rows that claims go by: one GPU's, each with the file and line it stands in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from harness import store
from harness.claims.model import Interval, RowRef
from harness.record import Row
from harness.report.rows import UNNAMED, Stored, read
from harness.shapes import MoEShape

#: The sweep's name in rows of ``moebench compare``.
BY_HAND = "compare"
PASS_TEXT = {"forward": "forward", "backward": "backward", "forward_backward": "forward + backward"}


@dataclass(frozen=True)
class Line:
    """A row, the GPU it belongs to, and where it stands."""

    row: Row
    gpu: str
    file: str
    number: int

    @property
    def moment(self) -> datetime:
        return datetime.fromisoformat(self.row["timestamp"])

    @property
    def when(self) -> str:
        """The row's time for people: ``2026-01-31 12:00 UTC``."""
        return f"{self.moment:%Y-%m-%d %H:%M} UTC"

    @property
    def shape(self) -> MoEShape:
        return MoEShape(**self.row["shape"])

    def ref(self) -> RowRef:
        """This line, with a phrase that names its row."""
        row = self.row
        if row["record"] == "ratio":
            method = (row.get("denominator_routing") or {}).get("method")
            who = f"{row['numerator']} / {row['denominator']}" + (f" with {method} rounding" if method else "")
        else:
            who = row["implementation"]
        parts = [row["operation"], row.get("variant"), PASS_TEXT[row["pass"]], str(self.shape)]
        return RowRef(self.file, self.number, f"{row['record']} {who}: {', '.join(part for part in parts if part)}")


@dataclass(frozen=True)
class Number:
    """A number, its interval, and the lines that it comes from."""

    value: float
    ci95: Interval | None
    lines: tuple[Line, ...]

    def times(self, other: Number) -> Number:
        """The product. Its interval holds whatever the two factors' hold together, so it is wider than need be."""
        both = None
        if self.ci95 is not None and other.ci95 is not None:
            both = (self.ci95[0] * other.ci95[0], self.ci95[1] * other.ci95[1])
        return Number(self.value * other.value, both, self.lines + other.lines)

    def inverse(self) -> Number:
        turned = None if self.ci95 is None else (1 / self.ci95[1], 1 / self.ci95[0])
        return Number(1 / self.value, turned, self.lines)

    def scaled(self, factor: float) -> Number:
        its = None if self.ci95 is None else (self.ci95[0] * factor, self.ci95[1] * factor)
        return Number(self.value * factor, its, self.lines)


def read_lines(results: Path | str) -> tuple[list[Line], list[str]]:
    """Every row measured on a GPU in and below a folder, and a sentence for what cannot be read. A missing folder gives
    nothing."""
    results = Path(results)
    if not results.is_dir():
        return [], []
    stored, problems = read(results)
    return lines_of(stored), problems


def lines_of(stored: Iterable[Stored]) -> list[Line]:
    """The rows measured on a GPU whose name is known."""
    return [Line(one.row, one.machine, one.file, one.line) for one in stored if one.on_gpu and one.machine != UNNAMED]


def _as_the_paper(row: Row) -> bool:
    """bfloat16 SwiGLU without biases, softmax over the K chosen logits, uniform routing, single calls; measured by a
    sweep, since whoever compares two implementations by hand says nothing of a claim."""
    layer, routing = row["layer"], row["routing"]
    mode = (row.get("latency_ms") or {}).get("mode") or row.get("mode") or "burst"
    return (
        row["dtype"] == "bfloat16"
        and layer.get("activation", "swiglu") == "swiglu"
        and layer.get("router_convention", "topk_softmax") == "topk_softmax"
        and not layer.get("bias")
        and routing.get("distribution", "uniform") == "uniform"
        and mode == "burst"
        and row["sweep"] != BY_HAND
    )


class GpuRows:
    """The rows of one GPU that are measured as the paper measures, in the order of `harness.store.precedence`: where
    several are of one measurement, the last of them counts."""

    def __init__(self, gpu: str, lines: list[Line]) -> None:
        self.gpu = gpu
        self.every = [line for line in lines if line.gpu == gpu]
        kept = [line for line in self.every if _as_the_paper(line.row)]
        kept.sort(key=lambda line: store.precedence(line.row))
        self._index: dict[tuple[str, str, MoEShape], list[Line]] = {}
        for line in kept:
            self._index.setdefault((line.row["record"], line.row["operation"], line.shape), []).append(line)

    def _find(self, record: str, operation: str, shape: MoEShape, fits: Callable[[Row], Any]) -> list[Line]:
        return [line for line in self._index.get((record, operation, shape), ()) if fits(line.row)]

    def ratios(
        self,
        numerator: str,
        denominator: str,
        pass_: str,
        shape: MoEShape,
        operation: str = "moe_layer",
        variant: str = "",
        bound: str = "",
        rounded: int | None = None,
    ) -> list[Line]:
        """Ratio rows of device times, the one that counts last, whatever their status.

        Args:
            bound: the variant of `dense_bound` that the denominator computes.
            rounded: rows of the tile to which the denominator's routing is rounded (nearest), while the numerator's is
                top-K; None: top-K on both sides.
        """

        def fits(row: Row) -> bool:
            other = row.get("denominator_routing") or {}
            tiles = (row["routing"].get("m_tile"), other.get("m_tile"))
            return (
                row["numerator"] == numerator
                and row["denominator"] == denominator
                and row["pass"] == pass_
                and row["variant"] in (variant, "")
                and row["time_kind"] == "device"
                and (row.get("denominator_variant") or "") == bound
                and row["routing"]["method"] == "top_k"
                and (other.get("method", "top_k") == "top_k" if rounded is None
                     else other.get("method") == "nearest" and tiles == (rounded, rounded))
            )  # fmt: skip

        return self._find("ratio", operation, shape, fits)

    def measurements(
        self,
        plugin: str,
        shape: MoEShape,
        operation: str = "moe_layer",
        variant: str = "",
        pass_: str | None = None,
        method: str = "top_k",
    ) -> list[Line]:
        """Measurement rows, the one that counts last, whatever their status; of every pass where none is given."""
        return self._find(
            "measurement",
            operation,
            shape,
            lambda row: (
                row["implementation"] == plugin
                and row["variant"] in (variant, "")
                and pass_ in (row["pass"], None)
                and row["routing"]["method"] == method
            ),
        )


def newest(lines: list[Line], sweep: str) -> Line | None:
    """The row that counts: the last one, of the sweep that the paper's layers are measured by where it has any."""
    own = [line for line in lines if line.row["sweep"] == sweep]
    chosen = own or lines
    return chosen[-1] if chosen else None


def good_ratio(lines: list[Line], sweep: str) -> Number | None:
    """The newest ratio, unless it failed or is unstable: a point that fails now is not vouched for by an older row."""
    line = newest(lines, sweep)
    if line is None or line.row["status"] != "ok":
        return None
    return number_of(line)


def number_of(line: Line) -> Number:
    """A ratio row's value with its interval."""
    low, high = line.row["ci95"]
    return Number(float(line.row["value"]), (float(low), float(high)), (line,))


def memory(lines: list[Line], sweep: str) -> Number | None:
    """Bytes of a layer (weights, input and what is held after the forward) from measurement rows; it has no interval.
    Every pass of a point carries it, so the newest row of any pass that is good will do."""
    passes = dict.fromkeys(line.row["pass"] for line in lines)
    last = [newest([line for line in lines if line.row["pass"] == pass_], sweep) for pass_ in passes]
    good = [
        line
        for line in last
        if line is not None and line.row["status"] == "ok" and (line.row.get("memory_bytes") or {}).get("layer")
    ]
    if not good:
        return None
    line = max(good, key=lambda line: line.moment)
    return Number(float(line.row["memory_bytes"]["layer"]), None, (line,))


def failure(*groups: Sequence[Line]) -> str:
    """Why the newest row of the first group that fails now has no number that counts, in one line; empty where none
    fails. A group is the rows of one point or of one implementation, the one that counts last."""
    for lines in groups:
        if not lines or lines[-1].row["status"] == "ok":
            continue
        row = lines[-1].row
        who = row.get("implementation") or f"{row.get('numerator')} / {row.get('denominator')}"
        text = f"the last attempt of {who} is {row['status'].replace('_', ' ')}"
        reason = " ".join((row.get("reason") or "").strip().split("\n")[0].split())
        return f"{text}: {reason[:200]}" if reason else text
    return ""


def mean(numbers: Sequence[Number]) -> Number:
    """Geometric mean; its interval from the means of the low and of the high ends, wider than need be."""

    def of(values: Iterable[float]) -> float:
        return math.exp(sum(math.log(value) for value in values) / len(numbers))

    intervals = [number.ci95 for number in numbers if number.ci95 is not None]
    both = (of(low for low, _ in intervals), of(high for _, high in intervals))
    lines = tuple(line for number in numbers for line in number.lines)
    return Number(of(number.value for number in numbers), both if len(intervals) == len(numbers) else None, lines)

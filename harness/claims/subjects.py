"""What every measure of a claim is made of: the two subjects, and findings with and without a number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from harness.claims.model import Claim, Finding, Interval, RowRef
from harness.claims.paper import Entry
from harness.claims.rows import GpuRows, Line, Number
from harness.claims.verdicts import verdict
from harness.shapes import MoEShape

OFFICIAL, OURS = "sonicmoe_official", "sonicmoe_triton"
#: Subject of a finding -> its plugin.
SUBJECTS = {"official": OFFICIAL, "ours": OURS}
#: The sweep of the paper's layers.
SWEEP = "paper_layers"

#: Label, value and interval of one of several numbers.
Part = tuple[str, float, Interval | None]
#: (rows of a GPU, claim, subject) -> finding.
Measure = Callable[[GpuRows, Entry, str], Finding]


def refs(lines: Iterable[Line]) -> tuple[RowRef, ...]:
    """Each line once, in the order of first use."""
    return tuple(dict.fromkeys(line.ref() for line in lines))


def sentences(*texts: str) -> str:
    """Those that are not empty, in one line."""
    return "; ".join(text for text in texts if text)


def measured(
    rows: GpuRows,
    claim: Claim,
    subject: str,
    number: Number,
    remark: str = "",
    parts: Sequence[Part] = (),
    lines: Iterable[Line] = (),
) -> Finding:
    """A finding with a number and the verdict on it; ``lines`` are those of the parts."""
    its = verdict(claim, number.value, number.ci95)
    return Finding(
        rows.gpu, subject, number.value, number.ci95, its, remark, tuple(parts), refs((*number.lines, *lines))
    )  # fmt: skip


def unmeasured(
    rows: GpuRows, subject: str, reason: str, parts: Sequence[Part] = (), lines: Iterable[Line] = ()
) -> Finding:
    """A finding without a number: ``reason`` says what would measure it."""
    return Finding(rows.gpu, subject, None, None, "not measured", reason, tuple(parts), refs(lines))


def shape_of(entry: Entry) -> MoEShape:
    """The shape of a claim that names one."""
    assert entry.shape is not None  # `MEASURES` says which claims have one, and `engine` looks.
    return entry.shape

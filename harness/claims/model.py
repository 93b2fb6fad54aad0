"""What a claim of the paper is, and what was found of it on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

#: What a finding can come to (``harness.claims.verdicts`` has the rule).
VERDICTS = ("better", "reproduced", "not reproduced", "not measured", "no number in the paper")

#: A 95 % interval: its low and its high end.
Interval = tuple[float, float]


@dataclass(frozen=True)
class RowRef:
    """Where a number comes from: one line of the results.

    Attributes:
        file: path below ``results/``, e.g. ``nvidia_h200/paper_layers.jsonl``.
        line: line of that file, counted from 1.
        what: one short phrase: which row it is.
    """

    file: str
    line: int
    what: str


@dataclass(frozen=True)
class Finding:
    """What the rows of one GPU say of one claim, for one of the two implementations of SonicMoE.

    Attributes:
        gpu: e.g. ``NVIDIA H200``.
        subject: ``official`` (the authors' package) or ``ours`` (this repository's layer).
        value: the number that the verdict goes by, in the claim's unit; None where nothing was measured.
        ci95: its 95 % interval; None where it has none (memory, or nothing measured).
        verdict: one of ``VERDICTS``.
        reason: for "not measured", what would measure it; else a remark, or empty.
        parts: (label, value, interval) of each number, where the claim has several.
        rows: the rows that the numbers come from.
    """

    gpu: str
    subject: str
    value: float | None
    ci95: Interval | None
    verdict: str
    reason: str
    parts: tuple[tuple[str, float, Interval | None], ...]
    rows: tuple[RowRef, ...]


@dataclass(frozen=True)
class Prediction:
    """What a model says of a GPU that nobody has measured. Never a measurement.

    Attributes:
        gpu: e.g. ``NVIDIA H100 SXM``.
        value: in the claim's unit; None where no sound model exists.
        how: one sentence: the formula and its assumption, or why there is none.
    """

    gpu: str
    value: float | None
    how: str


@dataclass(frozen=True)
class Claim:
    """One entry of ``results/paper/claims.toml``.

    Attributes:
        id, text, unit, measure, source: as in the file.
        paper: the paper's number; None where it gives none.
        smaller_is_better: whether a smaller number fulfils the claim better.
    """

    id: str
    text: str
    paper: float | None
    unit: str
    measure: str
    source: str
    smaller_is_better: bool


@dataclass(frozen=True)
class ClaimResult:
    """A claim with its findings, a pair (official, ours) for each GPU that has rows, and predictions for a GPU that
    has none."""

    claim: Claim
    findings: tuple[Finding, ...]
    predictions: tuple[Prediction, ...]

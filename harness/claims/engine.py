"""The claims of the paper against a folder of results."""

from __future__ import annotations

from pathlib import Path

from harness.claims.measures import MEASURES, WITH_SHAPE, unknown
from harness.claims.model import ClaimResult
from harness.claims.paper import CLAIMS, load_entries
from harness.claims.predictions import predict
from harness.claims.rows import GpuRows, Line, read_lines
from harness.claims.subjects import SUBJECTS
from harness.errors import UserError
from harness.registry import ROOT


def evaluate(
    results: Path | str = ROOT / "results", claims: Path | str = CLAIMS
) -> tuple[list[ClaimResult], list[str]]:
    """Every claim with what the rows in and below ``results`` say of it.

    Args:
        results: folder of ``<gpu>/*.jsonl``; may be missing or empty, which gives claims without findings.
        claims: the file of the paper's claims.

    Returns:
        The claims in the file's order, with findings for each GPU by name, the official kernels' before ours; and one
        sentence for each line that could not be read.

    Raises:
        UserError: the file of claims is missing or malformed; one line.
    """
    lines, problems = read_lines(results)
    return judge(lines, claims), problems


def judge(lines: list[Line], claims: Path | str = CLAIMS) -> list[ClaimResult]:
    """`evaluate` of rows that have been read."""
    entries = load_entries(claims)
    for entry in entries:
        if entry.claim.id in WITH_SHAPE and entry.shape is None:
            raise UserError(f"{claims}: claim {entry.claim.id}: shape: missing")
    gpus = [GpuRows(gpu, lines) for gpu in sorted({line.gpu for line in lines})]
    return [
        ClaimResult(
            entry.claim,
            tuple(MEASURES.get(entry.claim.id, unknown)(rows, entry, subject) for rows in gpus for subject in SUBJECTS),
            predict(entry, gpus),
        )
        for entry in entries
    ]

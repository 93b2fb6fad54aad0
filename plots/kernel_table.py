"""Our kernels beside the official ones, in the notes of our layer: ``python -m plots.kernel_table`` rewrites the table.

From the profiled calls of the committed rows (`kernels` of a row), forward + backward. The two layers' rows come from
separate processes, so that a cell is good to a few per cent; which layer is faster is for ratio rows to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.store import Row, latest, read_folder
from plots.numbers import OFFICIAL, OURS
from plots.rows import MODELS, RESULTS, ROOT

NOTES = ROOT / "implementations" / "sonicmoe_triton" / "NOTES.md"
BEGIN, END = "<!-- kernels: begin (made by python -m plots.kernel_table) -->", "<!-- kernels: end -->"
#: Column -> the roles that it adds up. The official kernels' four plain GEMMs have one name and so one role; dX there
#: is the addition of the router's term, which our aggregation reads.
GROUPS = {
    "up-projection": ("up",),
    "dH": ("dH",),
    "down, dX, dW1, dW2": ("grouped_gemm", "gemm", "down", "dW1", "dW2"),
    "aggregation, addition": ("aggregation",),
}
OTHERS = "router and the rest"


def group_of(role: str | None, implementation: str) -> str:
    """The column in which a kernel of this role is counted."""
    if role == "dX":
        return "aggregation, addition" if implementation == OFFICIAL else "down, dX, dW1, dW2"
    return next((group for group, roles in GROUPS.items() if role in roles), OTHERS)


def times(row: Mapping[str, Any]) -> dict[str, float]:
    """Microseconds of each column, and of all kernels under ``sum``."""
    found = dict.fromkeys([*GROUPS, OTHERS, "sum"], 0.0)
    for kernel in row["kernels"]:
        found[group_of(kernel.get("role"), row["implementation"])] += kernel["us"]
        found["sum"] += kernel["us"]
    return found


def lines(rows: Iterable[Row]) -> list[str]:
    """The table as Markdown; a layer that one of the two lacks is left out."""
    of: dict[tuple[str, str], dict[str, float]] = {}
    # Other sweeps have some of these layers too; all cells come from one.
    for row in latest(row for row in rows if row["sweep"] == "paper_layers"):
        if (
            row["record"] == "measurement"
            and row["status"] == "ok"
            and (row.get("latency_ms") or {}).get("mode", "burst") == "burst"
            and row["pass"] == "forward_backward"
            and row["implementation"] in (OFFICIAL, OURS)
            and row.get("kernels")
        ):
            of[row["implementation"], ",".join(str(row["shape"][name]) for name in "TdnEK")] = times(row)
    columns = [*GROUPS, OTHERS, "sum"]
    table = [f"| layer | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    for model, ((tokens, d), layers) in MODELS.items():
        for n, experts, k in layers:
            shape = f"{tokens},{d},{n},{experts},{k}"
            if (OFFICIAL, shape) not in of or (OURS, shape) not in of:
                continue
            theirs, ours = of[OFFICIAL, shape], of[OURS, shape]
            cells = [f"{ours[column]:.0f} ({theirs[column] / ours[column]:.2f})" for column in columns]
            table.append(f"| {model}, n = {n} | {' | '.join(cells)} |")
    return table


def with_table(text: str, table: list[str]) -> str:
    """``text`` with the table between its markers replaced. ValueError where the markers are missing."""
    if BEGIN not in text or END not in text:
        raise ValueError(f"the markers {BEGIN} and {END} are missing")
    before, rest = text.split(BEGIN, 1)
    return before + BEGIN + "\n\n" + "\n".join(table) + "\n\n" + END + rest.split(END, 1)[1]


def main(folder: Path = RESULTS / "nvidia_h200", notes: Path = NOTES) -> None:
    """Rewrite the notes' table from the committed rows."""
    rows, _ = read_folder(folder)
    notes.write_text(with_table(notes.read_text(encoding="utf-8"), lines(rows)), encoding="utf-8")


if __name__ == "__main__":
    main()

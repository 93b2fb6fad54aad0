"""``moebench conformance``: chooses implementations and cases, runs the suite, prints what came of it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.conformance import CASES, COVERED, IN_PART, OPERATION, Case, get_case
from harness.conformance.suite import TIME_LIMIT_S, Suite, failed_of_ours, own_in_words
from harness.deadline import Deadline
from harness.environment import environment, gpu_name
from harness.errors import UserError
from harness.interface import Implementation
from harness.registry import Registry, choices, load_registry
from harness.report.text import count, one_line, plain
from harness.session import known_rows, results_folder

#: In the table's cells, of which a dozen must stand beside each other.
SHORT = {
    "ok": "ok",
    "unsupported": "no",
    "not_installed": "none",
    "wrong_result": "WRONG",
    "out_of_memory": "MEM",
    "timeout": "TIME",
    "crashed": "CRASH",
    "unstable": "UNST",
}
_COLOURS = {"ok": "green", "unsupported": "dim", "not_installed": "dim"}


def conformance(
    out: Console,
    names: Sequence[str],
    cases: Sequence[str],
    device: str = "",
    output: Path | None = None,
    jobs: int = 1,
    time_limit_s: float = TIME_LIMIT_S,
    missing_in: Path | None = None,
    deadline: Deadline | None = None,
) -> int:
    """Run the suite; rows go to ``conformance.jsonl`` in ``output`` (default: as for ``run``).

    Args:
        names, cases: all that there are where empty; implementations then are those with a layer for the device.
        device: ``cuda`` or ``cpu``; empty: cuda where there is a GPU.
        missing_in: meet only the cases of which no row in this folder, or file, says what came (`store.Known`).
        deadline: begin no case once it is over.

    Returns:
        How many cases our own implementations failed.

    Raises:
        UserError: an unknown name, case or device; no GPU.
    """
    registry = load_registry()
    if device and device not in ("cuda", "cpu"):
        raise UserError(f"--device {device}: {choices(device, ['cuda', 'cpu'])}")
    if jobs < 1:
        raise UserError(f"--jobs {jobs}: must be at least 1")
    if not time_limit_s > 0:
        raise UserError(f"--time-limit {time_limit_s:g}: must be more than 0 seconds")
    has_gpu = gpu_name() is not None
    if device == "cuda" and not has_gpu:
        raise UserError("--device cuda: this machine has no NVIDIA GPU")
    device = device or ("cuda" if has_gpu else "cpu")
    plugins = _implementations(registry, names, device)
    wanted = {get_case(case).name for case in cases}
    # In the suite's order, in which what may spoil a process comes last.
    chosen = [case for case in CASES if not wanted or case.name in wanted]
    # Also where a commit is named wrongly: that must not turn every row into a failure.
    environment("fake")
    known = known_rows(out, missing_in)
    path = results_folder(output) / f"{OPERATION}.jsonl"
    out.print(f"rows -> {path}", highlight=False, soft_wrap=True, markup=False)
    total, done = len(plugins) * len(chosen), 0
    with out.status(f"0 of {total}") as status:

        def ended(row: dict[str, Any]) -> None:
            nonlocal done
            done += 1
            status.update(escape(f"{done} of {total} · {row['implementation']} {row['variant']}: {row['status']}"))

        suite = Suite(plugins, chosen, device, path, time_limit_s, jobs, ended, known, deadline)
        rows = suite.run()
    if rows:
        show(out, rows, chosen, plugins)
    if suite.skipped:
        out.print(f"{count(suite.skipped, 'case')} there already.", highlight=False)
    if suite.late:
        # The option takes one place: with another one given already, this one alone would not do.
        again = f": continue with {shlex.join(['--missing-in', str(path)])}" if rows and missing_in is None else "."
        said = f"{count(suite.late, 'case')}, since the time was over{again}"
        out.print(f"[yellow]left out[/] {escape(said)}", highlight=False, soft_wrap=True)
    return len(failed_of_ours(rows))


def _implementations(registry: Registry, names: Sequence[str], device: str) -> list[Implementation]:
    plugins = [registry.get(name) for name in dict.fromkeys(names)]
    for plugin in plugins:
        if "moe_layer" not in plugin.operations:
            offering = [one.name for one in registry.offering("moe_layer")]
            raise UserError(f"{plugin.name} offers no whole layer; {choices(plugin.name, offering)}")
    return plugins or registry.offering("moe_layer", device)


def _cell(status: str) -> str:
    return f"[{_COLOURS.get(status, 'red')}]{SHORT[status]}[/]"


def show(
    out: Console, rows: Sequence[dict[str, Any]], cases: Sequence[Case], plugins: Sequence[Implementation]
) -> None:
    """Print the table of statuses of what was met (a dash: this one not), the reasons for those that are not ok, and a
    last line that sums up."""
    found = {(row["implementation"], row["variant"]): row for row in rows}
    plugins = [plugin for plugin in plugins if any(name == plugin.name for name, _ in found)]
    cases = [case for case in cases if any(variant == case.name for _, variant in found)]
    widest = max((len(case.name) for case in cases), default=0)
    named = widest + sum(len(plugin.name) + 3 for plugin in plugins) <= out.width
    if not named:
        numbers = ", ".join(f"{number} {plugin.name}" for number, plugin in enumerate(plugins, 1))
        out.print(f"Conformance of {numbers}", highlight=False, markup=False)
    # Where even numbers do not fit, one table below the other.
    each = len(plugins) if named else max((out.width - widest) // (max(map(len, SHORT.values())) + 3), 1)
    for start in range(0, len(plugins), each):
        table = Table(title="Conformance" if named else None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("case", no_wrap=True)
        these = plugins[start : start + each]
        for number, plugin in enumerate(these, start + 1):
            table.add_column(escape(plugin.name) if named else str(number), no_wrap=True)
        for case in cases:
            met = [found.get((plugin.name, case.name)) for plugin in these]
            table.add_row(case.name, *(_cell(row["status"]) if row else "–" for row in met))
        out.print(table)
    # A reason that many cases or implementations share stands once.
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            key = (row["status"], one_line(plain(row["reason"]), 300))
            reasons.setdefault(key, []).append(f"{row['implementation']} {row['variant']}")
    # What somebody must look at stands last, where a terminal ends.
    for (status, reason), which in sorted(reasons.items(), key=lambda item: (item[0][0] not in _COLOURS, item)):
        colour = _COLOURS.get(status, "red")
        shown = ", ".join(which) if len(which) <= 3 else f"{', '.join(which[:2])} and {len(which) - 2} more"
        out.print(f"[{colour}]{status}[/] {escape(f'{shown}: {reason}')}", highlight=False, soft_wrap=True)
    tests = ", ".join(dict.fromkeys(covered.line for covered in COVERED))
    out.print(f"Also met by tests of this repository: {tests}", highlight=False, soft_wrap=True)
    parts = "; ".join(map(str, IN_PART))
    out.print(f"Met in part: {parts}", highlight=False, soft_wrap=True)
    passed = sum(row["status"] == "ok" for row in rows)
    out.print(f"{passed} of {count(len(rows), 'case')} ok; our own: {own_in_words(rows)}.", highlight=False)

"""Two implementations against each other, live, by ratio rows of one shape; or two sets of rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness import store
from harness.environment import gpu_name
from harness.errors import UserError
from harness.interface import DTYPES, Implementation, Point
from harness.operations import OPERATIONS, get_operation, variants_of
from harness.registry import choices, installed_reason, load_registry, refusal
from harness.session import results_folder, run_sweep
from harness.shapes import MoEShape
from harness.sweep import RatioPoint, Sweep, SweepOptions

#: The layer of the paper's headline numbers.
SHAPE = "24576,1536,256,128,8"
NAME = "compare"


def compare(
    out: Console,
    names: tuple[str, str],
    shape: str,
    operation: str,
    variant: str,
    dtype: str,
    output: Path | None,
) -> int:
    """Measure time of the first / time of the second, each pass, and the second against itself; print a table.

    The rows go to ``compare.jsonl`` as a sweep's do. Returns how many rows failed.

    Args:
        shape: T,d,n,E,K; empty: the headline's.
        variant: of the operation, where it has any; empty: the first that both offer.
        dtype: empty: the first that both take.

    Raises:
        UserError: an unknown name or size, a comparison that one of the two cannot take part in, or no GPU.
    """
    registry = load_registry()
    plugins = [registry.get(name) for name in names]
    size = MoEShape.parse(shape or SHAPE)
    if operation not in OPERATIONS:
        raise UserError(f"--operation {operation}: {choices(operation, OPERATIONS)}")
    for plugin in plugins:
        if operation not in plugin.operations:
            raise UserError(f"{plugin.name} does not offer {operation}; {choices(operation, plugin.operations)}")
    point = Point(
        operation,
        names[0],
        size,
        dtype=_common("--dtype", dtype, list(DTYPES), [plugin.dtypes for plugin in plugins], plugins),
        variant=_variant(operation, variant, plugins),
    )
    passes = tuple(get_operation(operation).passes)
    ratios = [RatioPoint(point, names[1], passes)]
    if names[0] != names[1]:
        ratios.append(RatioPoint(replace(point, implementation=names[1]), names[1], passes))
    for ratio in ratios:
        _refuse(ratio, plugins)
    if gpu_name() is None:
        raise UserError("times are compared on a GPU, and this machine has none; two files of rows compare anywhere")
    text = f"{plugins[0].label} against {plugins[1].label}, {size}, {point.dtype}"
    path = results_folder(output) / f"{NAME}.jsonl"
    sweep = Sweep(NAME, text, ratios=ratios, options=SweepOptions(passes=passes))
    with store.additions(path) as rows:
        failed = run_sweep(out, sweep, registry, path, resume=False, dry_run=False)
    _print(out, rows, plugins)
    return failed


def are_rows(*texts: str) -> bool:
    """Whether two arguments name files or folders of rows. A name that an implementation has means the implementation,
    unless it is written as a path (``./name``)."""
    names = load_registry().names()
    return any(text not in names and ("/" in text or Path(text).exists() or text.endswith(".jsonl")) for text in texts)


def compare_rows(out: Console, earlier: Path, later: Path) -> None:
    """Print which points of two files or folders of rows got slower or faster, and, where they are of several GPUs, the
    points of those beside each other.

    Raises:
        UserError: a file or folder that is missing or cannot be read, or holds no row.
    """
    from harness.report import rows, tables, terminal

    sets = []
    for path in (earlier, later):
        found, problems = rows.read(path, "compare")
        for problem in problems:
            out.print(f"[yellow]ignored[/] {escape(problem)}", highlight=False, soft_wrap=True)
        if not found:
            raise UserError(f"{path}: no rows there")
        sets.append(found)
    changed = tables.against(sets[1], sets[0], str(earlier))
    across = tables.across(rows.latest([*sets[0], *sets[1]]))
    several = across is not None and across.rows
    if changed.rows or not several:
        terminal.changes(out, changed)
    if across is not None and several:
        terminal.across(out, across)


def _common(
    option: str, given: str, valid: Iterable[str], offers: Sequence[Sequence[str]], plugins: Sequence[Implementation]
) -> str:
    """The value asked for, or the first that all plugins offer."""
    if given and given not in valid:
        raise UserError(f"{option} {given}: {choices(given, valid)}")
    both = [value for value in offers[0] if value in offers[1]]
    if given in both or (both and not given):
        return given or both[0]
    theirs = "; ".join(f"{plugin.name}: {', '.join(its)}" for plugin, its in zip(plugins, offers, strict=True))
    raise UserError(f"{option} {given or 'of both'}: not offered by both ({theirs})")


def _variant(operation: str, given: str, plugins: Sequence[Implementation]) -> str:
    offers = [list(variants_of(plugin, operation)) for plugin in plugins]
    every = list(OPERATIONS[operation].variants)
    if every == [""]:
        if given:
            raise UserError(f"--variant {given}: {operation} has no variants")
        return ""
    return _common("--variant", given, every, offers, plugins)


def _refuse(ratio: RatioPoint, plugins: Sequence[Implementation]) -> None:
    by_name = {plugin.name: plugin for plugin in plugins}
    for point in (ratio.point, ratio.denominator_point):
        plugin = by_name[point.implementation]
        if reason := installed_reason(plugin):
            raise UserError(f"{plugin.name} is not installed: {reason}")
        impossible = get_operation(point.operation).unsupported_reason(point)
        refused = ("unsupported", impossible) if impossible else refusal(plugin, point)
        if refused:
            raise UserError(f"{plugin.name}: {refused[0].replace('_', ' ')}: {refused[1]}")


def _print(out: Console, rows: Sequence[Mapping[str, Any]], plugins: Sequence[Implementation]) -> None:
    first, second = (plugin.label for plugin in plugins)
    table = Table(title=f"Time of {first} / time of {second}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("pass", "ratio", "95 % interval", "what it says"):
        table.add_column(column, overflow="fold")
    two = plugins[0].name != plugins[1].name
    for row in sorted(rows, key=lambda row: row["numerator"] == row["denominator"]):
        itself = row["numerator"] == row["denominator"] and two
        name = f"{row['pass'].replace('_', ' + ')}{f' ({second} / itself)' if itself else ''}"
        if row.get("value") is None:
            table.add_row(escape(name), "", "", escape(f"{row['status']}: {row['reason']}".splitlines()[0]))
            continue
        low, high = row["ci95"]
        says = f"{second} is {row['value'] - 1:.1%} faster" if low > 1 else "no difference that the interval excludes"
        if high < 1:
            says = f"{first} is {1 / row['value'] - 1:.1%} faster"
        if itself:
            says = "as it should be" if low <= 1 <= high else "should include 1: trust no smaller difference than this"
        if row["status"] != "ok":
            says += f" ({row['status']}: {row['reason']})"
        table.add_row(escape(name), f"{row['value']:.3f}", f"{low:.3f} – {high:.3f}", escape(says))
    out.print(table)

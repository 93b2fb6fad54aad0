"""The report in three forms from one data model: on the terminal, as Markdown, and as one self-contained HTML page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from harness.errors import UserError

FORMATS = ("terminal", "markdown", "html", "all")
#: Names of the files.
MARKDOWN, HTML = "report.md", "report.html"


def report(
    out: Console,
    results: Path | None = None,
    output: Path | None = None,
    against: Path | None = None,
    form: str = "all",
) -> list[Path]:
    """Make the report of every row below ``results`` (default: the committed and the local ones).

    Args:
        output: folder for the files; default ``results/local/report``, which git ignores. Figures go below it.
        against: an earlier set of rows, a folder or a file, to compare with.
        form: one of `FORMATS`.

    Returns:
        The files written, figures apart.

    Raises:
        UserError: an argument names nothing usable, or a file cannot be written.
    """
    if form not in FORMATS:
        raise UserError(f"--format {form}: choose from {', '.join(FORMATS)}")
    if results is not None and not results.is_dir():
        raise UserError(f"--results {results}: no such folder")
    if output is not None and output.exists() and not output.is_dir():
        raise UserError(f"--output {output}: is a file; name a folder")
    if against is not None and not against.exists():
        raise UserError(f"--against {against}: no such file or folder")
    from harness.report import data, figures, html, markdown, terminal
    from harness.session import RESULTS

    results = results or RESULTS
    output = output or RESULTS / "local" / "report"
    made = data.build(results, output, against)
    written = []
    try:
        if form != "terminal":
            drawn, problems = figures.draw(results, output / "figures")
            made = replace(made, figures=tuple(drawn), problems=(*made.problems, *problems))
        texts = {}
        if form in ("all", "markdown"):
            texts[MARKDOWN] = markdown.render(made, output)
        if form in ("all", "html"):
            texts[HTML] = html.render(made)
        for name, text in texts.items():
            output.mkdir(parents=True, exist_ok=True)
            (output / name).write_text(text, encoding="utf-8")
            written.append(output / name)
    except OSError as error:
        raise UserError(f"{error.filename or output}: cannot be written: {error.strerror or error}") from error
    if form in ("all", "terminal"):
        terminal.render(out, made)
    for path in written:
        out.print(f"wrote {path}", highlight=False, soft_wrap=True, markup=False)
    return written

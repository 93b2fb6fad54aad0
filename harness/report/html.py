"""The report as one HTML page that needs nothing else: styles, script, figures and rows are inside it.

Everything that comes from rows or plugins goes through Jinja's escaping or into JSON that the script shows as text. The
page's policy lets nothing run but its own script, named by its hash, and nothing load.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from harness.report import data, figures
from harness.report.data import Report
from harness.report.tables import Number, Place, Table, cell_text
from harness.report.text import count, in_unit, plain

TEMPLATE, STYLE, SCRIPT = "page.html.j2", "page.css", "page.js"


def _resource(name: str) -> str:
    return files("harness.report").joinpath(name).read_text(encoding="utf-8")


def json_text(value: Any) -> Markup:
    """JSON that can stand inside a script element, whatever its texts hold."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def table_data(table: Table, report: Report) -> dict[str, Any]:
    """A table column by column, repeated texts and files once each: ``d`` the distinct ones, ``i`` which of them;
    numbers with their value ``v`` to sort by and their text ``t``; places as file ``i`` of ``d`` and line ``l``."""
    columns = []
    for index, column in enumerate(table.columns):
        cells = [row[index] for row in table.rows]
        found: dict[str, Any] = {"title": column.title, "kind": column.kind}
        found |= {key: 1 for key in ("filter", "wide") if getattr(column, key)}
        if column.kind == "number":
            values = [cell.value if isinstance(cell, Number) else None for cell in cells]
            # More digits than that only make the page larger.
            found["v"] = [None if value is None else float(f"{value:.8g}") for value in values]
            found["t"] = [cell_text(cell) for cell in cells]
        else:
            # Two files whose names read alike stay two: `dict.fromkeys` sees the names as they are.
            texts = [cell.file if isinstance(cell, Place) else cell_text(cell) for cell in cells]
            distinct = {text: number for number, text in enumerate(dict.fromkeys(texts))}
            found["d"], found["i"] = list(map(plain, distinct)), [distinct[text] for text in texts]
            if column.kind == "place":
                found["l"] = [cell.line if isinstance(cell, Place) else 0 for cell in cells]
                found["h"] = [report.file_href(file) for file in distinct]
        columns.append(found)
    return {"name": table.name, "title": table.title, "rows": len(table.rows), "columns": columns}


def policy(script: str) -> str:
    """The page's Content-Security-Policy. Styles are allowed inline: matplotlib writes style attributes."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = ("default-src 'none'", f"script-src 'sha256-{digest}'", "style-src 'unsafe-inline'", "base-uri 'none'")
    return "; ".join((*rules, "form-action 'none'"))


def render(report: Report) -> str:
    """The whole page."""
    script = _resource(SCRIPT)
    pictures = []
    for figure in report.figures:
        svg = figures.inline(figure)
        # An SVG's own serialisation is markup; its texts were escaped by it.
        pictures.append({"figure": figure, "svg": Markup(svg), "id": f"figure-{figure.folder}-{figure.name}"})
    environment = Environment(
        loader=FunctionLoader(_resource),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"plain": plain}
    return environment.get_template(TEMPLATE).render(
        title=data.TITLE,
        report=report,
        verdicts=data.verdict_counts(report.claims),
        subjects=data.SUBJECTS,
        finding_parts=data.finding_parts,
        in_unit=in_unit,
        count=count,
        place=Place,
        pictures=pictures,
        method=data.METHOD,
        glossary=data.GLOSSARY,
        policy=policy(script),
        script=Markup(script),
        style=Markup(_resource(STYLE)),
        tables=json_text([table_data(table, report) for table in report.tables if table.rows]),
    )

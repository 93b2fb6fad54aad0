"""What the documents state is what the code does and what the rows hold."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

import pytest

from harness import record, store
from harness.conformance import CASES
from harness.correctness import TOLERANCES, WORST_PART
from harness.registry import ROOT, load_registry
from harness.sweep import SweepOptions
from harness.timing import CLOCK_BAND, TimingSettings
from harness.tuners import OWN_CHOICE

DOCS = ROOT / "docs"
DOCUMENTS = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((ROOT / "notebooks").glob("*.ipynb"))]
#: Objects whose keys differ from row to row: a key of theirs is documented once, in angle brackets.
OPEN = {"correctness": "<side>"}
_CODE = [*(ROOT / "harness").rglob("*.py"), *(ROOT / "plots").glob("*.py")]


def table(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    below = text.split(heading, 1)[1]
    lines = re.findall(r"^\|.*\|$", below.split("\n## ", 1)[0], re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def schema_lines() -> list[list[str]]:
    lines = re.findall(r"^\| `.*\|$", (DOCS / "schema.md").read_text(encoding="utf-8"), re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@functools.cache
def documented() -> dict[str, list[str]]:
    """Field of the schema -> its line."""
    return {cells[0].strip("`"): cells for cells in schema_lines()}


def rows() -> Iterator[dict[str, Any]]:
    for path in store.row_files(ROOT / "results"):
        if "local" not in path.parts:
            yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


@functools.cache
def occurring() -> dict[str, set[str]]:
    """Field that committed rows have, top level and one level down -> the JSON types of its values."""
    found: dict[str, set[str]] = {}
    names = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "text", list: "array"}

    def note(field: str, value: Any) -> None:
        found.setdefault(field, set()).add(names.get(type(value), "object"))

    for row in rows():
        for field, value in row.items():
            note(field, value)
            for part in value if isinstance(value, list) else [value]:
                for key, inner in part.items() if isinstance(part, Mapping) else ():
                    known = f"{field}.{key}" in documented()
                    note(f"{field}.{key}" if known or field not in OPEN else f"{field}.{OPEN[field]}", inner)
    return found


def test_every_field_of_the_rows_is_documented() -> None:
    missing = sorted(set(occurring()) - set(documented()))
    assert not missing, f"docs/schema.md lacks {', '.join(missing)}"


def test_every_field_of_the_code_is_documented() -> None:
    assert set(record.Row.__annotations__) <= set(documented())
    for field, keys in (("latency_ms", record.TimeSummary), ("memory_bytes", record.MemoryBytes)):
        described = {name.split(".")[1] for name in documented() if "." in name}
        assert set(keys.__annotations__) <= described, field


def test_no_documented_field_is_unknown() -> None:
    literals = {
        node.value
        for path in _CODE
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for field in documented():
        top, _, key = field.partition(".")
        assert top in record.Row.__annotations__, f"{field}: not a field of schema {record.SCHEMA_VERSION}"
        assert field in occurring() or "<" in key or not key or key in literals, f"{field}: nothing has or writes it"


def test_the_rules_have_the_documented_types() -> None:
    """All but the share of tokens, which may be a word, and keys that are checked with their object."""
    said = {field: cells[1] for field, cells in documented().items() if "<" not in field}
    by_object = {field for field in said if field.startswith(("correctness.tokens", "overhead_s."))}
    assert {field: said[field] for field in said if field not in by_object} == record.TYPES


def test_documented_fields_have_the_types_of_the_rows() -> None:
    for field, types in occurring().items():
        said = documented()[field][1]
        allowed = {said, "null"} | ({"integer"} if said == "number" else set())
        assert types <= allowed, f"{field}: documented as {said}, rows have {', '.join(sorted(types))}"


def test_each_field_is_documented_once_and_in_full() -> None:
    lines = schema_lines()
    assert len({cells[0] for cells in lines}) == len(lines)
    for cells in lines:
        assert len(cells) == 5 and cells[1] and cells[3] and cells[4], cells


def test_what_is_said_to_be_always_there_is() -> None:
    always = [field for field, cells in documented().items() if cells[4] == "always"]
    assert {"status", "shape.T", "environment.torch"} <= set(always)
    for row in rows():
        for field in always:
            top, _, key = field.partition(".")
            assert top in row and (not key or key in row[top]), f"{field}: absent in a row of {row['run_id']}"


def test_the_statuses() -> None:
    text = (DOCS / "method.md").read_text(encoding="utf-8")
    lines = {cells[0].strip("`"): cells[-1] for cells in table(text, "## Status")}
    assert set(lines) == set(record.STATUSES)
    assert {status for status, numbers in lines.items() if numbers == "yes"} == set(record.MEASURED_STATUSES)


def test_the_tolerances() -> None:
    text = (DOCS / "method.md").read_text(encoding="utf-8")
    lines = {cells[0]: (float(cells[1]), float(cells[2])) for cells in table(text, "## The correctness gate")}
    assert lines == TOLERANCES
    assert WORST_PART == 10 and "more than ten times that" in text


def test_the_numbers_of_sampling() -> None:
    text = (DOCS / "method.md").read_text(encoding="utf-8")
    settings = TimingSettings()
    assert f"at least {settings.min_samples} samples" in text and f"after {settings.max_samples} samples" in text
    assert f"at most {settings.target_width:.0%} wide".replace("%", " %") in text
    assert (settings.time_limit_s, settings.heat_s) == (1.0, 2.0)
    assert "after one second" in text and "for two seconds" in text
    assert text.count(f"more than {CLOCK_BAND:.0%}".replace("%", " %")) == 2


def test_the_readme_on_conformance_is_what_the_rows_say() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    said = text.split("Committed rows are of a CPU and of an H200.")[1].split("Sweeps are the TOML")[0]
    found: dict[str, dict[str, str]] = {}
    shapes: dict[tuple[str, str], dict[str, int]] = {}
    chosen: dict[tuple[str, str], bool] = {}
    for line in (ROOT / "results" / "nvidia_h200" / "conformance.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found.setdefault(row["implementation"], {})[row["variant"]] = row["status"]
        shapes[row["implementation"], row["variant"]] = row["shape"]
        chosen[row["implementation"], row["variant"]] = any(note.startswith(OWN_CHOICE) for note in row["notes"])
    registry = load_registry()
    counts = {name: Counter(its.values()) for name, its in found.items()}
    assert counts["sonicmoe_triton"] == counts["sonicmoe_torch"] == {"ok": len(CASES)}
    assert f"our layer has {len(CASES)} ok of {len(CASES)} cases, and so has its algorithm in PyTorch" in said
    others = set(found) - {"sonicmoe_triton", "sonicmoe_torch"}
    names = {"sonicmoe_official": "the official package", "torch_loop": "PyTorch's loop", "megablocks": "MegaBlocks"}
    names["torch_grouped_mm"] = "PyTorch's grouped GEMM"
    for name in others:
        label = names.get(name, registry.get(name).label)
        assert re.search(
            rf"{re.escape(label)} (?:has )?{counts[name]['ok']} ok of {counts[name].total()}\b", said, re.IGNORECASE
        ), f"{label} {counts[name]}"
    failed = {
        (name, variant): status for name, its in found.items() for variant, status in its.items()
        if status not in ("ok", "unsupported")
    }  # fmt: skip
    assert Counter((name, status) for (name, _), status in failed.items()) == {
        ("megablocks", "wrong_result"): 2, ("megablocks", "crashed"): 2,
        ("momoe", "wrong_result"): 15, ("momoe", "crashed"): 1,
    }  # fmt: skip
    assert {what for what, status in failed.items() if status == "crashed"} == {
        ("megablocks", "non-contiguous-weights"), ("megablocks", "torch-compile"), ("momoe", "stride-of-100"),
    }  # fmt: skip
    own = {variant: status for (name, variant), status in failed.items() if name == "momoe"}
    assert {(shapes["momoe", variant]["n"], status) for variant, status in own.items()} == {
        (64, "wrong_result"), (100, "crashed"),
    }  # fmt: skip
    met_again = Counter(
        found["momoe"][variant] for name, variant in chosen if name == "momoe" and chosen[name, variant]
    )
    assert met_again == {"ok": 4, "wrong_result": 15, "crashed": 1}
    assert f"MoMoE was met again in {met_again.total()} cases, and passes four of them" in said
    assert all(chosen["momoe", variant] for variant in own)
    assert all(counts[name].total() == len(CASES) for name in counts)


def test_the_a_a_ratios_that_leave_one_out_are_told() -> None:
    """All that the method says of them, and no other."""
    found = [
        row for row in rows() if row["record"] == "ratio" and row["status"] == "ok" and row["measured_on"] == "cuda"
        and row["numerator"] == row["denominator"] and not {"denominator_variant", "denominator_routing"} & set(row)
    ]  # fmt: skip
    assert {row["environment"]["gpu"] for row in found} == {"NVIDIA H200"}
    outside = [row for row in found if not row["ci95"][0] <= 1 <= row["ci95"][1]]
    said = (DOCS / "method.md").read_text(encoding="utf-8").split("**A/A ratios.**")[1].split("\n")[0]
    assert (
        f"Of the {len(found)} A/A ratios in the committed rows of an H200 the interval of {len(outside)} leaves" in said
    )
    for row in outside:
        value = f"{row['value']:.3f} [{row['ci95'][0]:.3f}, {row['ci95'][1]:.3f}]"
        operation = f"{row['operation']} {row['variant']}".strip()
        layer = f"{operation}, {row['pass']}, 7B n = {row['shape']['n']}"
        assert f"{layer}, came to {value} (`{row['sweep']}.jsonl` of {row['timestamp'][:10]})" in said
        assert row["shape"]["d"] == 1536


def test_two_runs_may_differ_by_more_than_their_intervals() -> None:
    assert "Two runs of the same ratio in the committed rows do." in (DOCS / "method.md").read_text(encoding="utf-8")
    runs: dict[str, list[list[float]]] = {}
    for row in rows():
        if row["record"] == "ratio" and row["status"] == "ok":
            fields = ("operation", "pass", "shape", "numerator", "denominator", "denominator_variant", "layer", "dtype")
            routings = [
                {key: row.get(routing, {}).get(key) for key in ("method", "distribution", "seed", "m_tile")}
                for routing in ("routing", "denominator_routing")
            ]
            key = json.dumps([row["environment"]["gpu"], row["variant"], *map(row.get, fields), routings])
            runs.setdefault(key, []).append(row["ci95"])
    assert any(a[1] < b[0] for found in runs.values() for a in found for b in found)


def test_what_the_method_names_exists() -> None:
    """Functions and constants in backticks, in method.md."""
    defined = {
        name
        for path in _CODE
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in (
            [node.name]
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))
            else [target.id for target in node.targets if isinstance(target, ast.Name)]
            if isinstance(node, ast.Assign)
            else []
        )
    }
    text = (DOCS / "method.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(_?[a-z]\w*_\w+|[A-Z]\w*(?:\.\w+)?|judge)`", text))
    keys = {name.split(".")[-1] for name in documented()} | set(record.STATUSES) | {"interval_width", "training_step"}
    keys |= {*record.PASSES, "max_samples", "time_limit", *(option.name for option in fields_of(SweepOptions))}
    unknown = sorted(name for name in named if name.split(".")[-1] not in defined | keys)
    assert not unknown, f"docs/method.md names {', '.join(unknown)}"
    assert {"measure_point", "sample_until", "median_interval", "judge", "CLOCK_BAND"} <= named


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] != "code")
    named = set(re.findall(r"`((?:docs|harness|notebooks|plots|results|sweeps|tests)/[\w./]*)`", text))
    named |= {name for name in re.findall(r"\]\(([\w./]+)\)", text) if "://" not in name}
    made = ("results/local",)
    missing = [name for name in named if not name.startswith(made) and not (ROOT / name).exists()]
    assert not [name for name in missing if not (path.parent / name).exists()], missing
    for name in re.findall(r"[\w/]+\.ipynb", text):
        assert (ROOT / "notebooks" / Path(name).name).exists(), name


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_documents_name_no_place_of_a_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(?:^|[\s\"'(`=])(?:/[A-Za-z_]|~/|[A-Z]:\\\w)", text, re.MULTILINE)
    assert max(map(len, text.splitlines()), default=0) < 2000


def test_the_glossary_has_the_symbols_and_terms() -> None:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    symbols = {symbol.strip() for cells in table(text, "## Symbols") for symbol in cells[0].split(",")}
    assert {"T", "d", "n", "E", "K", "R", "S", "H"} <= symbols
    terms = re.findall(r"\*\*(.+?)\.\*\*", text)
    assert len(terms) == len(set(terms))
    for term in ("Tile", "Padding", "Token rounding", "Gather fusion", "Model FLOPs", "Hardware FLOPs", "Sparse"):
        assert term in terms

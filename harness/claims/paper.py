"""What the paper states: its claims, and the memory that its Figure 13 shows."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from harness.claims.model import Claim
from harness.documents import load_toml
from harness.errors import UserError
from harness.registry import ROOT
from harness.shapes import MoEShape

PAPER = ROOT / "results" / "paper"
CLAIMS = PAPER / "claims.toml"
#: The baselines of the paper's figures: the plugin's name -> the paper's.
BASELINES = {
    "scattermoe": "ScatterMoE",
    "megablocks": "MegaBlocks",
    "momoe": "MoMoE",
    "megatron": "Megatron",
    "deepgemm": "DeepGEMM-pt",
    "deepgemm_pp": "DeepGEMM++",
}
#: Those whose memory compares. DeepGEMM++ has SonicMoE's backward here and holds what SonicMoE holds; in the paper's
#: Figure 13 it holds what DeepGEMM-pt does.
MEMORY_BASELINES = {name: its for name, its in BASELINES.items() if name != "deepgemm_pp"}
_TEXTS = ("id", "text", "unit", "measure", "source")
_SIZES = ("T", "d", "n", "E", "K")


@dataclass(frozen=True)
class Entry:
    """A claim with the shape that it is about and the rows of a GEMM's tile, where the file gives them."""

    claim: Claim
    shape: MoEShape | None
    m_tile: int | None


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _entry(table: Any, where: str) -> Entry:
    if not isinstance(table, Mapping):
        raise UserError(f"{where}: must be a table")
    for field in _TEXTS:
        if not isinstance(table.get(field), str) or not table[field].strip():
            raise UserError(f"{where}: {field}: missing or not a text")
    where = f"{where} ({table['id']})"
    value = table.get("value")
    if value is not None and not (_number(value) and value > 0):
        raise UserError(f"{where}: value {value!r}: must be a number greater than zero")
    shape, sizes = None, table.get("shape")
    m_tile = None
    if sizes is not None:
        if not isinstance(sizes, Mapping) or not set(_SIZES) <= set(sizes) <= {*_SIZES, "m_tile"}:
            raise UserError(f"{where}: shape: must hold {', '.join(_SIZES)} (and m_tile)")
        try:
            shape = MoEShape(**{name: sizes[name] for name in _SIZES})
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        m_tile = sizes.get("m_tile")
        if m_tile is not None and (isinstance(m_tile, bool) or not isinstance(m_tile, int) or m_tile < 1):
            raise UserError(f"{where}: shape: m_tile {m_tile!r}: must be a whole number of at least 1")
    claim = Claim(
        **{field: table[field] for field in _TEXTS},
        paper=None if value is None else float(value),
        smaller_is_better="smaller is better" in table["measure"],
    )
    return Entry(claim, shape, m_tile)


def load_entries(path: Path | str = CLAIMS) -> list[Entry]:
    """The claims of a file with their shapes, in its order; raises `UserError` as `load_claims` does."""
    path = Path(path)
    tables = load_toml(path).get("claim")
    if not isinstance(tables, list):
        raise UserError(f"{path}: holds no [[claim]]")
    entries = [_entry(table, f"{path}: claim {number}") for number, table in enumerate(tables, 1)]
    names = [entry.claim.id for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{path}: two claims have the id {name!r}")
    return entries


def load_claims(path: Path | str = CLAIMS) -> list[Claim]:
    """The paper's claims in the order of the file.

    Raises:
        UserError: the file cannot be read, or an entry lacks a field or has a wrong one; one line.
    """
    return [entry.claim for entry in load_entries(path)]


@dataclass(frozen=True)
class PaperLayer:
    """One of the twelve layers of the paper's Figure 13: its model, its shape, and GiB by the paper's names."""

    model: str
    shape: MoEShape
    gib: Mapping[str, float]

    @property
    def name(self) -> str:
        """E.g. ``7B n=256``."""
        return f"{self.model} n={self.shape.n}"

    @property
    def best_baseline(self) -> str:
        """The plugin of the baseline that holds least here by the paper's figure."""
        return min(
            (name for name, its in MEMORY_BASELINES.items() if its in self.gib),
            key=lambda name: self.gib[BASELINES[name]],
        )


@cache
def paper_layers(path: Path = PAPER / "figure13_activation_memory.csv") -> tuple[PaperLayer, ...]:
    """The twelve layers in the order of the figure, finest experts first within each model."""
    layers: dict[tuple[str, MoEShape], dict[str, float]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            shape = MoEShape(**{name: int(line[name]) for name in _SIZES})
            gib = layers.setdefault((line["model"], shape), {})
            if line["gib"]:
                gib[line["implementation"]] = float(line["gib"])
    return tuple(PaperLayer(model, shape, gib) for (model, shape), gib in layers.items())

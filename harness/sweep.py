"""Sweeps: TOML files that say which operations, shapes, routings and implementations to measure.

The format, every key optional unless marked (*)::

    [sweep]
    name = "paper_layers"            # default: the file's name
    description = "..."              # (*) one sentence
    figure = "token_rounding"        # drawn from the sweep's rows when it has run

    [defaults]                       # for every entry below; the first seven may also stand in an entry
    dtype = "bfloat16"               # or a list
    distributions = ["uniform"]      # of the router's choices; "trace:FILE" goes by a real model's (harness/traces.py),
                                     # FILE as seen from the sweep's folder
    conventions = ["topk_softmax"]   # router conventions
    methods = ["top_k"]              # routing methods (harness/token_rounding.py); moe_layer takes the roundings
    seed = 0
    device = "cuda"                  # or "cpu"
    m_tile = 128                     # the M tile for padding accounts
    passes = ["forward", "backward", "forward_backward"]
    mode = "burst"                   # or "sustained", "paced"
    time_limit_s = 600               # a job that takes longer is ended (status timeout)
    min_samples = 10                 # the next four: when sampling ends; default: the timer's own
    max_samples = 50
    target_width = 0.01              # relative width of the median's interval
    sampling_s = 1.0                 # seconds
    pace_below_s = 0.01              # mode "paced": no rest after a sample that takes longer; default: after each one

    [shapes]                         # named groups of shapes; a group may name others
    small = ["256,64,32,8,2"]

    [[points]]
    operation = "moe_layer"          # default
    implementations = ["torch_loop"] # (*) names, or "*": all that offer the operation on the device
    shapes = ["small", "512,64,32,8,2"]  # (*) groups, texts T,d,n,E,K, or tables (also as [[points.shapes]])
    variants = ["gemm"]              # default: every variant that the implementation offers
    dtype, distributions, conventions, seed, device

    [[ratios]]                       # numerator and denominator alternate in one process
    numerator = ["scattermoe"]       # (*) a name or a list
    denominator = "sonicmoe_torch"   # (*) a name or a list; an A/A ratio (both the same) must be among the ratios
    operation, variants              # as above
    shapes = ["small"]               # default: those of the points of this operation
    passes = ["forward"]             # default: the sweep's
    bound = "gemm_glue"              # the denominator is this variant of dense_bound: how far from the bound is it?
    denominator_method = "nearest"   # the denominator is routed by this method: what does it gain?
    dtype, distributions, conventions, seed, device

    [[fake]]                         # memory held, traced under fake tensors: any size on any machine
    implementations, shapes          # (*)
    operation, dtype                 # as above

    [[routing]]                      # rows and padding of routings, counted: any size on any machine
    methods = ["top_k", "nearest"]   # (*) see harness/token_rounding.py
    shapes                           # (*)
    distributions, seed, m_tile      # as above

Named groups that several sweeps share stand in ``shapes.toml`` in the folder of the sweeps. Operations without an
implementation in the list, unknown keys and names of any kind are errors, not surprises.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

from harness import accounts, traces
from harness.documents import load_toml
from harness.errors import UserError
from harness.interface import (
    DTYPES,
    ROUTER_CONVENTIONS,
    Implementation,
    LayerSpec,
    Point,
    RoutingSpec,
)
from harness.operations import OPERATIONS, DenseBound, MoELayer, RoutedExperts, variants_of
from harness.record import MODES, PASSES
from harness.registry import ROOT, Registry, choices
from harness.shapes import MoEShape
from harness.store import PLANTED
from harness.timing import TimingSettings
from harness.token_rounding import METHODS, MOST_M_TILE, ROUNDINGS, TOP_K

SWEEPS = ROOT / "sweeps"
SHAPES_FILE = "shapes.toml"
DEVICES = ("cuda", "cpu")
EVERY = "*"
#: Largest seed: generators are seeded with multiples of it.
MOST_SEED = 2**32 - 1

_POINT_KEYS = ("dtype", "distributions", "conventions", "methods", "seed", "device", "m_tile")
_OPTION_KEYS = (
    "passes",
    "mode",
    "time_limit_s",
    "min_samples",
    "max_samples",
    "target_width",
    "sampling_s",
    "pace_below_s",
)
_KEYS: dict[str, tuple[str, ...]] = {
    "": ("sweep", "defaults", "shapes", "points", "ratios", "fake", "routing"),
    "sweep": ("name", "description", "figure"),
    "defaults": (*_POINT_KEYS, *_OPTION_KEYS),
    "points": ("operation", "implementations", "shapes", "variants", *_POINT_KEYS),
    "ratios": (
        "numerator",
        "denominator",
        "bound",
        "denominator_method",
        "operation",
        "shapes",
        "variants",
        "passes",
        *_POINT_KEYS,
    ),
    "fake": ("operation", "implementations", "shapes", "variants", "dtype"),
    "routing": ("methods", "shapes", "distributions", "seed", "m_tile"),
}


@dataclass(frozen=True)
class SweepOptions:
    """How a sweep measures.

    Attributes:
        passes: which rows each point gets.
        mode: ``burst``, ``sustained`` or ``paced``; see `harness.timing.TimingSettings`.
        time_limit_s: a job that takes longer is ended.
        min_samples, max_samples, target_width, sampling_s: when sampling ends; None: the timer's default.
        pace_below_s: see `harness.timing.TimingSettings`; None: no limit.
    """

    passes: tuple[str, ...] = PASSES
    mode: str = "burst"
    time_limit_s: float = 600.0
    min_samples: int | None = None
    max_samples: int | None = None
    target_width: float | None = None
    sampling_s: float | None = None
    pace_below_s: float | None = None

    def settings(self) -> dict[str, Any]:
        """Keyword arguments for `harness.timing.TimingSettings`; what the sweep leaves open is absent."""
        given = {
            "mode": self.mode,
            "min_samples": self.min_samples,
            "max_samples": self.max_samples,
            "target_width": self.target_width,
            # The timer's limit is on sampling alone, the sweep's `time_limit_s` on the whole job.
            "time_limit_s": self.sampling_s,
            "pace_below_s": self.pace_below_s,
        }
        return {key: value for key, value in given.items() if value is not None}


@dataclass(frozen=True)
class RatioPoint:
    """A ratio to measure: two implementations on the same point. ``point.implementation`` is the numerator.

    ``bound`` names the variant of `dense_bound` that the denominator computes at the same shape, in place of the same
    operation; empty where both compute the same. ``method`` is the denominator's routing method; empty where both are
    routed alike. ``time_kind``: ``busy`` asks for busy times where graphs could be captured too; only the gate does."""

    point: Point
    denominator: str
    passes: tuple[str, ...] = PASSES
    bound: str = ""
    method: str = ""
    time_kind: str = "device"

    @property
    def numerator(self) -> str:
        return self.point.implementation

    @property
    def numerator_point(self) -> Point:
        return self.point

    @property
    def denominator_point(self) -> Point:
        other = replace(self.point, implementation=self.denominator)
        if self.method:
            other = replace(other, routing=replace(other.routing, method=self.method))
        return replace(other, operation=DenseBound.name, variant=self.bound) if self.bound else other

    @property
    def is_a_a(self) -> bool:
        """An implementation against itself: what the method's own noise looks like."""
        return self.numerator_point == self.denominator_point


@dataclass(frozen=True)
class Sweep:
    """A sweep, written out: every point, ratio and fake-tensor trace, in the order in which they are named.

    Attributes:
        fakes: points whose held memory is traced under fake CPU tensors (their device is ``cpu``).
        accounts: points whose routing is counted (see `harness.accounts`).
        figure: what to draw from the rows; empty: nothing.
        groups: the named groups of shapes that its file could use.
    """

    name: str
    description: str
    points: list[Point] = field(default_factory=list)
    ratios: list[RatioPoint] = field(default_factory=list)
    fakes: list[Point] = field(default_factory=list)
    accounts: list[Point] = field(default_factory=list)
    figure: str = ""
    options: SweepOptions = field(default_factory=SweepOptions)
    groups: dict[str, list[MoEShape]] = field(default_factory=dict)

    @property
    def implementations(self) -> list[str]:
        """Names of all implementations in it, sorted."""
        names = {point.implementation for point in [*self.points, *self.fakes, *self.accounts]}
        for ratio in self.ratios:
            names |= {ratio.numerator, ratio.denominator}
        return sorted(names)

    @property
    def shapes(self) -> list[MoEShape]:
        """Every shape in it, each once, in order."""
        everything = [*self.points, *(ratio.point for ratio in self.ratios), *self.fakes, *self.accounts]
        return list(dict.fromkeys(point.shape for point in everything))

    @property
    def operations(self) -> list[str]:
        """Names of all operations in it, in order; a bound's stand for themselves."""
        everything = [*self.points, *(ratio.point for ratio in self.ratios), *self.fakes, *self.accounts]
        return list(dict.fromkeys(point.operation for point in everything))

    def filter(
        self,
        only: Iterable[str] = (),
        skip: Iterable[str] = (),
        shape: Iterable[str] | str = (),
        operation: Iterable[str] = (),
    ) -> Sweep:
        """The part of it that a user asks for.

        Args:
            only: implementations to keep; none: all. A ratio stays where both of its implementations do.
            skip: implementations to leave out.
            shape: shapes to keep, as ``T,d,n,E,K`` or as the name of a group; none: all.
            operation: operations to keep; none: all.

        Raises:
            UserError: a name or shape that the sweep does not have, or nothing is left.
        """
        only, skip = list(only), list(skip)
        for option, names in (("--only", only), ("--skip", skip)):
            for name in names:
                if name not in self.implementations:
                    raise UserError(f"{option} {name}: not in sweep {self.name}; {choices(name, self.implementations)}")
        wanted: set[MoEShape] = set()
        shape_texts = [shape] if isinstance(shape, str) else list(shape)
        for text in shape_texts:
            if text in self.groups:
                found = self.groups[text]
            elif "," in text:
                found = [MoEShape.parse(text)]
            else:
                raise UserError(f"--shape {text}: neither T,d,n,E,K nor a group; {choices(text, self.groups)}")
            if not set(found) & set(self.shapes):
                raise UserError(
                    f"--shape {text}: not in sweep {self.name}; choose from {' '.join(str(s) for s in self.shapes)}"
                )
            wanted |= set(found)

        operations = list(operation)
        for name in operations:
            if name not in self.operations:
                raise UserError(f"--operation {name}: not in sweep {self.name}; {choices(name, self.operations)}")

        def keeps(name: str) -> bool:
            return (not only or name in only) and name not in skip

        def keeps_point(point: Point) -> bool:
            asked = (not wanted or point.shape in wanted) and (not operations or point.operation in operations)
            return asked and keeps(point.implementation)

        left = replace(
            self,
            points=[point for point in self.points if keeps_point(point)],
            ratios=[ratio for ratio in self.ratios if keeps_point(ratio.point) and keeps(ratio.denominator)],
            fakes=[point for point in self.fakes if keeps_point(point)],
            accounts=[point for point in self.accounts if keeps_point(point)],
        )
        if not (left.points or left.ratios or left.fakes or left.accounts):
            raise UserError(f"sweep {self.name}: the filters leave nothing to measure")
        return left


def sweep_names(folder: Path = SWEEPS) -> list[str]:
    """Names of the sweeps in a folder, sorted."""
    return sorted(path.stem for path in folder.glob("*.toml") if path.name != SHAPES_FILE)


def load_sweep(
    name_or_path: str | Path,
    registry: Registry,
    *,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    shape: Iterable[str] | str = (),
    folder: Path = SWEEPS,
) -> Sweep:
    """Read a sweep by its name or its file's path, and apply the filters of `Sweep.filter`.

    Raises:
        UserError: no such sweep, or anything in the file that is not as it should be; the message names the file, the
            key and the valid choices.
    """
    text = str(name_or_path)
    path = Path(text) if text.endswith(".toml") or os.sep in text else folder / f"{text}.toml"
    if not path.is_file() or path == folder / SHAPES_FILE:
        if path.parent == folder:
            raise UserError(f"unknown sweep {text!r}; {choices(path.stem, sweep_names(folder))}")
        raise UserError(f"{path}: no such file; the sweeps here are {', '.join(sweep_names(folder))}")
    shared = [place / SHAPES_FILE for place in dict.fromkeys([folder, path.parent])]
    groups: dict[str, Any] = {}
    for file in shared:
        if file.is_file() and file != path:
            groups.update(_shared_groups(file))
    sweep = _Reader(path, registry, groups).sweep()
    return sweep.filter(only, skip, shape)


def _shared_groups(path: Path) -> dict[str, Any]:
    tables = load_toml(path)
    for key in tables:
        if key != "shapes":
            raise UserError(f"{path}: {key}: unknown key; choose from shapes")
    groups = tables.get("shapes", {})
    if not isinstance(groups, dict):
        raise UserError(f"{path}: shapes: must be a table")
    return groups


class _Reader:
    """Reads one file; every error it raises names the file and the key."""

    def __init__(self, path: Path, registry: Registry, shared_groups: Mapping[str, Any]) -> None:
        self.path = path
        self.registry = registry
        self.tables = load_toml(path)
        self.known_names = [*registry.names(), *(entry.name for entry in registry.broken)]
        self._check_keys(self.tables, "", "")
        own = self.tables.get("shapes", {})
        if not isinstance(own, dict):
            self.fail("shapes", "must be a table of groups, e.g. small = ['256,64,32,8,2']")
        self.raw_groups = {**shared_groups, **own}
        self.groups = {name: self._group(name, ()) for name in self.raw_groups}
        self.defaults = self._table("defaults")
        self._check_keys(self.defaults, "defaults", "defaults")

    def fail(self, key: str, message: str) -> NoReturn:
        raise UserError(f"{self.path}: {key}: {message}" if key else f"{self.path}: {message}")

    def sweep(self) -> Sweep:
        head = self._table("sweep")
        self._check_keys(head, "sweep", "sweep")
        name = self._text(head.get("name", self.path.stem), "sweep.name")
        # It names the file of the rows, which must lie in the folder asked for.
        if "/" in name or not name.isprintable() or name.startswith("."):
            self.fail("sweep.name", f"{name!r} cannot be a file's name; use letters, digits and underscores")
        if name.endswith(PLANTED):
            self.fail("sweep.name", f"{name!r} ends as files of planted slowdowns do, which no report shows; rename it")
        if "description" not in head:
            self.fail("sweep.description", "missing; say in one sentence what the sweep is for")
        description = self._text(head["description"], "sweep.description")
        options = self._options()
        points: list[Point] = []
        for where, entry in self._entries("points"):
            points += self._points(entry, where)
        ratios: list[RatioPoint] = []
        for where, entry in self._entries("ratios"):
            ratios += self._ratios(entry, where, points, options)
        fakes: list[Point] = []
        for where, entry in self._entries("fake"):
            # What a routing makes of memory, a trace cannot tell: it has no values.
            fixed = {"device": "cpu", "distributions": "uniform", "methods": "top_k"}
            if self._operation(entry, where) == RoutedExperts.name:
                self.fail(f"{where}.operation", f"{RoutedExperts.name} cannot be traced: a routing needs values")
            fakes += self._points({**fixed, **entry}, where, fake=True)
        counted: list[Point] = []
        for where, entry in self._entries("routing"):
            counted += self._accounts(entry, where)
        if not (points or ratios or fakes or counted):
            self.fail("", "asks for nothing: it has neither points nor ratios nor fake nor routing entries")
        if ratios and not any(ratio.is_a_a for ratio in ratios):
            self.fail("ratios", "no A/A ratio; add one whose numerator is its denominator (it must include 1.00)")
        return Sweep(
            name,
            description,
            list(dict.fromkeys(points)),
            list(dict.fromkeys(ratios)),
            list(dict.fromkeys(fakes)),
            list(dict.fromkeys(counted)),
            self._figure(head),
            options,
            self.groups,
        )

    def _figure(self, head: Mapping[str, Any]) -> str:
        if "figure" not in head:
            return ""
        import plots

        (name,) = self._chosen(self._text(head["figure"], "sweep.figure"), "sweep.figure", "figure", [*plots.FIGURES])
        return name

    # Tables and keys

    def _table(self, key: str) -> dict[str, Any]:
        table = self.tables.get(key, {})
        if not isinstance(table, dict):
            self.fail(key, f"must be a table, written [{key}]")
        return table

    def _entries(self, key: str) -> list[tuple[str, dict[str, Any]]]:
        entries = self.tables.get(key, [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            self.fail(key, f"must be an array of tables, each written [[{key}]]")
        listed = [(f"{key}[{number}]", entry) for number, entry in enumerate(entries, start=1)]
        for where, entry in listed:
            self._check_keys(entry, key, where)
        return listed

    def _check_keys(self, table: Mapping[str, Any], kind: str, where: str) -> None:
        for key in table:
            if key not in _KEYS[kind]:
                self.fail(f"{where}.{key}" if where else key, f"unknown key; {choices(key, _KEYS[kind])}")

    def _text(self, value: Any, where: str) -> str:
        if not isinstance(value, str) or not value:
            self.fail(where, f"must be a text, not {value!r}")
        return value

    def _texts(self, value: Any, where: str) -> list[str]:
        """A text or a list of them."""
        values = value if isinstance(value, list) else [value]
        if not values:
            self.fail(where, "is empty")
        return [self._text(item, where) for item in values]

    def _chosen(self, value: Any, where: str, what: str, valid: Sequence[str]) -> list[str]:
        texts = self._texts(value, where)
        for text in texts:
            if text not in valid:
                self.fail(where, f"unknown {what} {text!r}; {choices(text, valid)}")
        return texts

    def _number(self, value: Any, where: str, whole: bool, least: float, most: float = math.inf) -> float:
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            self.fail(where, f"must be a {'whole ' if whole else ''}number, not {value!r}")
        if not value >= least or not math.isfinite(value):
            self.fail(where, f"must be a finite number of at least {least:g}, not {value}")
        if value > most:
            self.fail(where, f"must be at most {most:.0f}, not {value}")
        return value

    def _setting(self, entry: Mapping[str, Any], where: str, key: str, default: Any) -> tuple[Any, str]:
        """An entry's value, else the defaults' one; and where it stands, for messages."""
        if key in entry:
            return entry[key], f"{where}.{key}"
        return self.defaults.get(key, default), f"defaults.{key}"

    # Shapes

    def _group(self, name: str, outer: tuple[str, ...]) -> list[MoEShape]:
        if name in outer:
            self.fail(f"shapes.{name}", f"names itself ({' -> '.join([*outer, name])})")
        return self._shapes(self.raw_groups[name], f"shapes.{name}", (*outer, name))

    def _shapes(self, value: Any, where: str, outer: tuple[str, ...] = ()) -> list[MoEShape]:
        items = value if isinstance(value, list) else [value]
        if not items:
            self.fail(where, "is empty")
        shapes: list[MoEShape] = []
        for item in items:
            if isinstance(item, dict):
                axes = ("T", "d", "n", "E", "K")
                if set(item) != set(axes):
                    self.fail(where, f"a shape needs exactly the keys {', '.join(axes)}, not {', '.join(item)}")
                shapes.append(self._shape(lambda item=item: MoEShape(**item), where))
            elif isinstance(item, str) and item in self.raw_groups:
                shapes += self._group(item, outer)
            elif isinstance(item, str) and "," in item:
                shapes.append(self._shape(lambda item=item: MoEShape.parse(item), where))
            elif isinstance(item, str):
                known = choices(item, self.raw_groups)
                self.fail(where, f"unknown group of shapes {item!r}; write T,d,n,E,K or {known}")
            else:
                self.fail(where, f"must be texts T,d,n,E,K, groups or tables, not {item!r}")
        return list(dict.fromkeys(shapes))

    def _shape(self, make: Any, where: str) -> MoEShape:
        try:
            return make()
        except UserError as error:
            self.fail(where, str(error))

    # Points

    def _options(self) -> SweepOptions:
        table = self.defaults
        given: dict[str, Any] = {}
        if "passes" in table:
            given["passes"] = self._passes(table["passes"], "defaults.passes")
        if "mode" in table:
            mode = self._chosen(table["mode"], "defaults.mode", "mode", MODES)
            if len(mode) != 1:
                self.fail("defaults.mode", f"must be one of {', '.join(MODES)}")
            given["mode"] = mode[0]
        for key, whole, least in (
            ("time_limit_s", False, 1.0),
            ("min_samples", True, 1),
            ("max_samples", True, 1),
            ("target_width", False, 0.0),
            ("sampling_s", False, 0.0),
            ("pace_below_s", False, 0.0),
        ):
            if key in table:
                given[key] = self._number(table[key], f"defaults.{key}", whole, least)
        # An option that the sweep leaves open has the timer's default.
        timing = TimingSettings(**SweepOptions(**given).settings())
        if timing.min_samples > timing.max_samples:
            self.fail("defaults.min_samples", f"{timing.min_samples} exceeds max_samples = {timing.max_samples}")
        return SweepOptions(**given)

    def _passes(self, value: Any, where: str) -> tuple[str, ...]:
        chosen = self._chosen(value, where, "pass", PASSES)
        return tuple(name for name in PASSES if name in chosen)

    def _operation(self, entry: Mapping[str, Any], where: str) -> str:
        found = self._chosen(entry.get("operation", "moe_layer"), f"{where}.operation", "operation", list(OPERATIONS))
        if len(found) != 1:
            self.fail(f"{where}.operation", "must be one operation; write another entry for the next")
        return found[0]

    def _names(self, value: Any, where: str) -> list[str]:
        texts = self._texts(value, where)
        for text in texts:
            if text not in self.known_names:
                self.fail(where, f"unknown implementation {text!r}; {choices(text, self.known_names)}")
        return texts

    def _implementations(
        self, entry: Mapping[str, Any], where: str, operation: str, device: str, fake: bool
    ) -> list[str]:
        key = f"{where}.implementations"
        if "implementations" not in entry:
            self.fail(key, f'missing; choose from "*", {", ".join(self.known_names)}')
        value = entry["implementations"]
        if value in (EVERY, [EVERY]):
            # Under fake tensors the device is the CPU whatever the implementation needs to compute.
            offering = self.registry.offering(operation, None if fake else device)
            names = [found.name for found in offering if found.fake_tensors or not fake]
            if not names:
                self.fail(key, f"no registered implementation offers {operation} on {device}")
            return names
        names = self._names(value, key)
        for name in names:
            self._check_offers(name, operation, key)
        return names

    def _check_offers(self, name: str, operation: str, where: str) -> None:
        implementation = self._known(name)
        if implementation is not None and operation not in implementation.operations:
            offering = [found.name for found in self.registry.offering(operation)]
            self.fail(where, f"{name} does not offer the operation {operation}; {choices(name, offering)}")

    def _known(self, name: str) -> Implementation | None:
        """The plugin; None for a broken one, which stays in the sweep and becomes a row with its reason."""
        return self.registry.get(name) if name in self.registry else None

    def _variants(
        self, entry: Mapping[str, Any], where: str, operation: str, names: Sequence[str]
    ) -> dict[str, list[str]]:
        """For each implementation the variants to measure; [""] where the operation has none."""
        offered: dict[str, list[str]] = {}
        broken = []
        for name in names:
            implementation = self._known(name)
            if implementation is None:
                broken.append(name)
            else:
                offered[name] = list(variants_of(implementation, operation))
        every = list(dict.fromkeys(variant for found in offered.values() for variant in found)) or [""]
        if "variants" in entry:
            key = f"{where}.variants"
            every = self._chosen(entry["variants"], key, "variant", [variant for variant in every if variant])
            for name, found in offered.items():
                offered[name] = [variant for variant in every if variant in found]
                if not offered[name]:
                    self.fail(key, f"{name} offers none of them; write another entry for it")
        # A broken plugin cannot be asked; its rows stand where the others' do.
        return {**offered, **{name: every for name in broken}}

    def _settings_of(
        self, entry: Mapping[str, Any], where: str, operation: str
    ) -> tuple[str, list[tuple[str, LayerSpec, RoutingSpec]]]:
        """The device, and every combination of dtype, layer and routing, for an operation."""
        value, key = self._setting(entry, where, "device", "cuda")
        device = self._chosen(value, key, "device", DEVICES)
        if len(device) != 1:
            self.fail(key, "must be one device; write another entry for the next")
        value, key = self._setting(entry, where, "dtype", "bfloat16")
        dtypes = self._chosen(value, key, "dtype", list(DTYPES))
        value, key = self._setting(entry, where, "distributions", "uniform")
        distributions = [self._distribution(text, key) for text in self._texts(value, key)]
        value, key = self._setting(entry, where, "conventions", LayerSpec().router_convention)
        conventions = self._chosen(value, key, "router convention", ROUTER_CONVENTIONS)
        value, key_of_methods = self._setting(entry, where, "methods", RoutingSpec().method)
        methods = self._chosen(value, key_of_methods, "routing method", METHODS)
        value, key = self._setting(entry, where, "seed", 0)
        seed = int(self._number(value, key, True, 0, MOST_SEED))
        value, key = self._setting(entry, where, "m_tile", RoutingSpec().m_tile)
        m_tile = int(self._number(value, key, True, 1, MOST_M_TILE))
        for method in methods:
            self._check_takes(operation, method, key_of_methods)
        combinations = [
            (
                dtype,
                LayerSpec(router_convention=convention),
                replace(distribution, method=method, seed=seed, m_tile=m_tile),
            )
            for dtype, convention, distribution, method in product(dtypes, conventions, distributions, methods)
        ]
        return device[0], combinations

    def _distribution(self, text: str, where: str) -> RoutingSpec:
        try:
            return traces.parse(text, self.path.parent)
        except UserError as error:
            self.fail(where, str(error))

    def _check_traces(
        self, shapes: Sequence[MoEShape], combinations: Sequence[tuple[str, LayerSpec, RoutingSpec]], where: str
    ) -> None:
        for shape, (_, _, routing) in product(shapes, combinations):
            try:
                traces.check(routing, shape)
            except UserError as error:
                self.fail(f"{where}.distributions", str(error))

    def _check_takes(self, operation: str, method: str, where: str) -> None:
        taken = {RoutedExperts.name: METHODS, MoELayer.name: (TOP_K, *ROUNDINGS)}.get(operation, (TOP_K,))
        if method not in taken:
            self.fail(where, f"{operation} takes {', '.join(taken)}, not {method}")

    def _points(self, entry: Mapping[str, Any], where: str, fake: bool = False) -> list[Point]:
        operation = self._operation(entry, where)
        device, combinations = self._settings_of(entry, where, operation)
        names = self._implementations(entry, where, operation, device, fake)
        variants = self._variants(entry, where, operation, names)
        if "shapes" not in entry:
            self.fail(f"{where}.shapes", f"missing; write T,d,n,E,K or {choices('', self.raw_groups)}")
        shapes = self._shapes(entry["shapes"], f"{where}.shapes")
        self._check_traces(shapes, combinations, where)
        return [
            Point(operation, name, shape, dtype, layer, routing, variant, device)
            for shape, (dtype, layer, routing), name in product(shapes, combinations, names)
            for variant in variants[name]
        ]

    def _accounts(self, entry: Mapping[str, Any], where: str) -> list[Point]:
        if "methods" not in entry:
            self.fail(f"{where}.methods", f"missing; choose from {', '.join(METHODS)}")
        if "shapes" not in entry:
            self.fail(f"{where}.shapes", f"missing; write T,d,n,E,K or {choices('', self.raw_groups)}")
        shapes = self._shapes(entry["shapes"], f"{where}.shapes")
        _, combinations = self._settings_of(
            {"device": "cpu", "conventions": LayerSpec().router_convention, **entry}, where, RoutedExperts.name
        )
        self._check_traces(shapes, combinations, where)
        routings = list(dict.fromkeys(routing for _, _, routing in combinations))
        return [
            Point(accounts.OPERATION, accounts.NAME, shape, routing=routing, device="cpu")
            for shape, routing in product(shapes, routings)
        ]

    def _ratios(
        self, entry: Mapping[str, Any], where: str, points: Sequence[Point], options: SweepOptions
    ) -> list[RatioPoint]:
        operation = self._operation(entry, where)
        device, combinations = self._settings_of(entry, where, operation)
        bound = ""
        if "bound" in entry:
            bounds = self._chosen(entry["bound"], f"{where}.bound", "bound", list(DenseBound.variants))
            if len(bounds) != 1:
                self.fail(f"{where}.bound", "must be one variant; write another entry for the next")
            methods = {routing.method for _, _, routing in combinations}
            if operation == RoutedExperts.name or methods != {TOP_K}:
                self.fail(f"{where}.bound", "the bound multiplies T*K rows, which only moe_layer with top_k has")
            bound = bounds[0]
        method = ""
        if "denominator_method" in entry:
            (method, *more) = self._chosen(
                entry["denominator_method"], f"{where}.denominator_method", "routing method", METHODS
            )
            if more or bound:
                self.fail(f"{where}.denominator_method", "must be one method, and no bound beside it")
            self._check_takes(operation, method, f"{where}.denominator_method")
        sides = []
        for side in ("numerator", "denominator"):
            if side not in entry:
                self.fail(f"{where}.{side}", f"missing; choose from {', '.join(self.known_names)}")
            names = self._names(entry[side], f"{where}.{side}")
            wanted = DenseBound.name if bound and side == "denominator" else operation
            for name in names:
                self._check_offers(name, wanted, f"{where}.{side}")
            sides.append(names)
        numerators, denominators = sides
        variants = self._variants(entry, where, operation, numerators if bound else [*numerators, *denominators])
        passes = self._passes(entry["passes"], f"{where}.passes") if "passes" in entry else options.passes
        if "shapes" in entry:
            shapes = self._shapes(entry["shapes"], f"{where}.shapes")
        else:
            shapes = list(dict.fromkeys(point.shape for point in points if point.operation == operation))
            if not shapes:
                self.fail(f"{where}.shapes", f"missing, and no [[points]] of {operation} give any")
        self._check_traces(shapes, combinations, where)
        found = []
        for shape, (dtype, layer, routing), top, bottom in product(shapes, combinations, numerators, denominators):
            shared = [variant for variant in variants[top] if bound or variant in variants[bottom]]
            if not shared:
                self.fail(where, f"{top} and {bottom} share no variant of {operation}")
            for variant in shared:
                point = Point(operation, top, shape, dtype, layer, routing, variant, device)
                found.append(RatioPoint(point, bottom, passes, bound, method if method != routing.method else ""))
        return found

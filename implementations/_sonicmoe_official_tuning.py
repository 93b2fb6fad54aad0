"""Keeps what the official kernels' own tuner chose on this GPU, so that they need not be tuned again.

    python -m implementations._sonicmoe_official_tuning 16384,2048,1024,64,8 16384,4096,1024,256,8:nearest ...

Builds the official layer at each shape T,d,n,E,K, or its experts alone with the rows that a routing method gives them,
which tunes its six grouped GEMMs where nothing is known of them (half a minute or more for the first of a width). The
fastest tile of each is added to ``results/<gpu>/tuning/sonicmoe_official.json``, from where the plugin takes it.
Nothing else may run on the GPU meanwhile. What the table has already stays as it is; what earlier processes left in
quack's cache is not taken.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.documents import save
from harness.environment import environment, gpu_name, package_version
from harness.errors import UserError, one_line, refusals
from harness.interface import Point, Problem, RoutingSpec
from harness.operations import get_operation
from harness.record import utc_now
from harness.registry import ROOT, installed_reason, load_registry, refusal
from harness.shapes import MoEShape
from harness.token_rounding import METHODS
from implementations.sonicmoe_official import cache_folder, committed_tuning, rows_of, winner_of

NAME = "sonicmoe_official"
GEMMS = ("up", "down", "dH", "dW2", "dX", "dW1")
#: What the choices depend on.
PACKAGES = ("sonic-moe", "quack-kernels", "nvidia-cutlass-dsl", "torch")
#: When and with what an entry was chosen; the table's own where an entry has none.
STAMPS = ("date", "driver")
#: Lists of these are written with one entry a line.
LISTS = ("aggregation", "winners")


@dataclass(frozen=True)
class Asked:
    """A layer to tune at; with a routing method its experts alone, with the rows of that method's routing."""

    shape: MoEShape
    method: str | None = None

    @classmethod
    def parse(cls, text: str) -> Asked:
        """Read ``T,d,n,E,K`` or ``T,d,n,E,K:METHOD``; raises `UserError` on anything else."""
        shape, colon, method = text.partition(":")
        if colon and method not in METHODS:
            raise UserError(f"{text}: after the colon must be a routing method: {', '.join(METHODS)}")
        return cls(MoEShape.parse(shape), method if colon else None)

    def __str__(self) -> str:
        return str(self.shape) if self.method is None else f"{self.shape}:{self.method}"

    @property
    def point(self) -> Point:
        """The point whose layer is built, in bfloat16."""
        if self.method is None:
            return Point("moe_layer", NAME, self.shape)
        return Point("routed_experts", NAME, self.shape, routing=RoutingSpec(self.method))


def sizes_of(key: Sequence[str]) -> list[tuple[int, ...]]:
    """The tensors' sizes in a key of quack's tuner, in order."""
    found = (re.fullmatch(r"torch\.Size\(\[([\d, ]+)\]\)", part) for part in key)
    return [tuple(int(size) for size in match[1].split(",")) for match in found if match]


def gemms_of(shape: MoEShape, rows: int) -> dict[tuple[str, tuple[tuple[int, ...], ...]], str]:
    """(the tuned function, its first three tensors' sizes) -> which of the layer's GEMMs that is, with so many routed
    rows."""
    t, d, n, e, r = shape.T, shape.d, shape.n, shape.E, rows
    return {
        ("gemm_gated_tuned", ((t, d), (e, d, 2 * n), (r, 2 * n))): "up",
        ("gemm_tuned", ((r, n), (e, n, d), (r, d))): "down",
        ("gemm_dgated_tuned", ((t, d), (e, d, n), (r, 2 * n))): "dH",
        ("gemm_tuned", ((d, t), (r, n), (e, d, n))): "dW2",
        ("gemm_tuned", ((r, 2 * n), (e, 2 * n, d), (r, d))): "dX",
        ("gemm_tuned", ((d, t), (r, 2 * n), (e, d, 2 * n))): "dW1",
    }


def collect(cache: Path, layers: Sequence[tuple[MoEShape, int]]) -> Iterator[dict[str, Any]]:
    """The winners for these shapes, each with a number of routed rows, in quack's cache folder, in bfloat16, one layer
    after another in the order of `GEMMS`; of several entries for one GEMM (the folder may have seen other versions of
    quack) the one that was written last.

    Raises:
        UserError: a GEMM of a layer that the folder has no entry of, or none that can be read.
    """
    entries = []
    broken = []
    for path in sorted(cache.glob("*/*.autotune.json"), key=lambda path: (path.stat().st_mtime_ns, path)):
        entry = _entry(path)
        if entry is None:
            broken.append(path)
            continue
        dtypes = [part for part in entry["key"] if part.startswith("torch.") and "Size" not in part]
        if dtypes and dtypes[0] == "torch.bfloat16":
            entries.append((path, entry))
    for shape, rows in layers:
        wanted = gemms_of(shape, rows)
        found = {}
        for path, entry in entries:
            function = path.name.removesuffix(".autotune.json")
            gemm = wanted.get((function, tuple(sizes_of(entry["key"])[:3])))
            if gemm is not None:
                found[gemm] = _winner(shape, rows, gemm, path, entry)
        missing = [gemm for gemm in GEMMS if gemm not in found]
        if missing:
            why = "was the layer built in bfloat16?"
            if broken:
                why = f"entries that cannot be read, to be removed before the next try: {', '.join(map(str, broken))}"
            what = f"{shape} with {rows} routed rows"
            raise UserError(f"{cache}: no entry for {', '.join(missing)} at {what}; {why}")
        yield from (found[gemm] for gemm in GEMMS)


def _entry(path: Path) -> dict[str, Any] | None:
    """An entry of the cache; None where it is none, cut short by an interruption say, or timed no tile."""
    try:
        entry = json.loads(path.read_text())
        timings = [[config, ms] for config, ms in entry["configs_timings"] if math.isfinite(ms[0])]
        texts = all(isinstance(part, str) for part in entry["key"])
        return {**entry, "key": list(entry["key"]), "configs_timings": timings} if texts and timings else None
    except (OSError, ValueError, TypeError, LookupError):
        return None


def _winner(shape: MoEShape, rows: int, gemm: str, path: Path, entry: Mapping[str, Any]) -> dict[str, Any]:
    timings = entry["configs_timings"]
    config, ms = min(timings, key=lambda timing: timing[1])
    return {
        "shape": str(shape),
        **({"routed_rows": rows} if rows != shape.routed_rows else {}),
        "gemm": gemm,
        # An entry that was itself put there from this table has one timing left.
        "candidates": entry.get("candidates", len(timings)),
        "file": f"{path.parent.name}/{path.name}",
        "key": entry["key"],
        "configs_timings": [[config, [round(value, 4) for value in ms]]],
    }


def merged(tuning: Mapping[str, Any], winners: Sequence[Mapping[str, Any]], where: Mapping[str, Any]) -> dict[str, Any]:
    """The table with these winners in place of what it had of the same shapes and routed rows. Those that it had, for
    whatever layer, keep their date and driver: the plugin had taken them from there.

    Args:
        where: ``gpu``, ``driver``, ``date`` and ``packages`` of this machine, which a new table gets.

    Raises:
        UserError: the table is of other packages.
    """
    check_packages(tuning, where["packages"])
    made = dict(tuning) or {**where, "method": "quack's own tuner; the fastest tile of each GEMM", "aggregation": []}
    known = _known(tuning)
    stamped = []
    for winner in winners:
        old = known.get(_choice(winner))
        stamps = where if old is None else {**tuning, **old}
        stamped.append({**winner, **{key: stamps[key] for key in STAMPS}})
    layers = {winner_of(winner) for winner in winners}
    kept = [winner for winner in tuning.get("winners", ()) if winner_of(winner) not in layers]
    return {**made, "winners": [*kept, *stamped]}


def _choice(winner: Mapping[str, Any]) -> tuple[str, str]:
    """What makes two entries one choice: the place in the cache, and what was timed."""
    return winner["file"], json.dumps(winner["configs_timings"])


def _known(tuning: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """The table's entries by their `_choice`."""
    return {_choice(winner): winner for winner in tuning.get("winners", ())}


def check_packages(tuning: Mapping[str, Any], packages: Mapping[str, Any]) -> None:
    """Raises `UserError` where the table holds choices of other versions than these."""
    if tuning and tuning["packages"] != packages:
        raise UserError(
            f"the table holds choices of {_versions(tuning['packages'])}, and here is {_versions(packages)}: "
            "remove it or install those"
        )


def _versions(packages: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in packages.items())


def text_of(tuning: Mapping[str, Any]) -> str:
    """The table as JSON, an entry a line."""
    parts = []
    for key, value in tuning.items():
        shown = json.dumps(value)
        if key in LISTS:
            shown = "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in value) + "\n ]"
        parts.append(f" {json.dumps(key)}: {shown}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _build(asked: Asked) -> int:
    """Build the layer there, which tunes it; returns how many routed rows it has.

    Raises:
        UserError: it has none, or does not build, for want of memory say.
    """
    import torch

    try:
        problem: Problem = get_operation(asked.point.operation).make_problem(asked.point, "cuda")
        if not rows_of(problem):
            raise UserError(f"shape {asked}: no expert has a row, so there is nothing to tune")
        load_registry().get(NAME).build(problem)
        torch.cuda.synchronize()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"shape {asked}: {type(error).__name__}: {one_line(str(error))}") from error
    torch.cuda.empty_cache()
    return rows_of(problem)


@contextmanager
def nothing_found(cache: Path) -> Iterator[None]:
    """A block in which quack finds none of the choices that lie in its cache folder: who made them, and beside what, is
    not known. They are there again afterwards, but for those that were made anew. The compiled kernels stay.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        try:
            for path in list(cache.glob("*/*.autotune.json")):
                path.rename(path.with_suffix(".aside"))
            yield
        finally:
            # Those of a run that was killed too.
            for aside in list(cache.glob("*/*.autotune.aside")):
                path = aside.with_suffix(".json")
                if path.exists():
                    aside.unlink()
                else:
                    aside.rename(path)
    except OSError as error:
        raise UserError(f"{cache}: {error}") from error


def tune(shapes: Sequence[str]) -> tuple[Path, int]:
    """Tune at each shape, ``T,d,n,E,K`` or ``T,d,n,E,K:METHOD``, and write the table; returns its path, and how many
    GEMMs were tuned: those of which it had no choice.

    Raises:
        UserError: a shape or method that is none or that the plugin refuses, no GPU, the package is missing, a layer
            does not build, or the table is of other packages or cannot be read or written.
    """
    every = list(dict.fromkeys(map(Asked.parse, shapes)))
    gpu = gpu_name()
    if gpu is None:
        raise UserError("the tiles are timed on a GPU, and this machine has none")
    plugin = load_registry().get(NAME)
    for asked in every:
        if refused := refusal(plugin, asked.point):
            raise UserError(f"shape {asked}: {refused[1]}")
    if reason := installed_reason(plugin):
        raise UserError(f"{NAME} is not installed: {reason}")
    path, tuning = committed_tuning(gpu)
    machine = environment("cuda")
    # Of torch the whole version, CUDA's included.
    packages = {name: package_version(name) for name in PACKAGES} | {"torch": machine["torch"]}
    # Tuning takes minutes: what would keep its outcome from being written is said before.
    check_packages(tuning, packages)
    where = {"gpu": gpu, "date": utc_now()[:10], "driver": str(machine.get("driver")), "packages": packages}
    number = 0
    cache = cache_folder()
    with nothing_found(cache):
        for asked in every:
            rows = _build(asked)
            found = list(collect(cache, [(asked.shape, rows)]))
            number += len({_choice(winner) for winner in found} - _known(tuning).keys())
            tuning = merged(tuning, found, where)
            # After every shape: what comes later may fail, or be stopped.
            save(ROOT / path, text_of(tuning))
    return ROOT / path, number


def main(
    shapes: Annotated[
        list[str], typer.Argument(metavar="T,d,n,E,K[:METHOD]...", help="Layers, or experts routed so, to tune at.")
    ],
) -> None:
    """Tune the official kernels at these layers and keep what was chosen."""
    with refusals("tuning"):
        path, number = tune(shapes)
    typer.echo(f"{number} GEMMs tuned; the choices are in {path}")


if __name__ == "__main__":
    typer.run(main)

"""The tables of our kernels' notes, cell by cell, and the table of tuned choices, against what was measured."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from implementations.sonicmoe_triton.tune import MARGIN, place
from implementations.sonicmoe_triton.tuned import PLAIN, TABLE
from plots.kernel_table import NOTES
from plots.rows import RESULTS

FOLDER = RESULTS / "nvidia_h200" / "tuning"
LAYERS = {
    "7B": "24576,1536,256,128,8",
    "30B": "32768,4096,256,256,16",
    "120B": "32768,4096,1024,128,8",
    "1.4B": "40960,768,256,128,8",
}
CONTIGUOUS = {
    "plain, 128×256×64, 3 stages, flattened": "plain",
    "plain, 4 stages": "plain4",
    "two groups share a 128×256 tile, 4 stages": "default",
    "… one may only start when the other stores": "ordered",
    "… steps of 32, 8 stages": "k32",
    "… steps of 128, 2 stages": "k128",
    "… B kept in shared memory over an expert's rows": "keep",
    "one group of 8 warps": "joint",
    "**ping-pong of 128×128 tiles**, 5 stages": "pingpong5",
    "**ping-pong of 128×128 tiles**, 6 stages": "pingpong6",
    "two programs a multiprocessor, 128×128": "two",
}
WEIGHTS = {
    "plain dW1 256×128×32, dW2 128×256×32, 7 stages": {"dW1": "plain 256x128x32 s7", "dW2": "plain 128x256x32 s7"},
    "plain, 128×256×64, 4 stages": "plain 128x256x64 s4",
    "**two groups, 128 gathered × 256 dense, steps of 64, 4 stages**": "gluon default",
    "… steps of 32, 8 stages": "bk32 s8",
    "… 3 stages, whole tile staged": "bk64 s3 b4",
    "one group of 8 warps": "c1",
    "256 gathered (as columns) × 128 dense": "g256 cols",
    "three groups, 192 gathered × 256 dense, 3 stages": "192 c3 s3",
    "longest experts first (sorted on the device; uniform routing)": "longest",
}
GATHERED: dict[str, dict[str, Any]] = {
    "plain, 128×256×64, 4 stages": {"plain": True},
    "one group of 8 warps, 128×256": {"block_n": 256},
    "… an expert's last rows by ragged TMA stores": {"block_n": 256, "ragged": True},
    "two groups of 4 warps, 64 rows each": {"block_n": 256, "groups": 2},
    "… ragged": {"block_n": 256, "groups": 2, "ragged": True},
}
_PING_PONG = {"block_n": 128, "ping_pong": True}
#: What dH and the up-projection ran as.
TURNS: dict[str, dict[str, Any]] = {
    "two groups of 4 warps, 64 rows each (the default)": {"dH": None, "up": None},
    "ping-pong, slices of 32 columns": {
        "dH": _PING_PONG | {"ragged": True, "buffers": 2},
        "up": _PING_PONG | {"ragged": False},
    },
    "… of 64; for dH twice the buffers": {
        "dH": _PING_PONG | {"ragged": True, "buffers": 4},
        "up": _PING_PONG | {"ragged": False, "slice_columns": 64},
    },
    "plain": {"dH": PLAIN, "up": PLAIN},
}
#: The pass, and the launches.
DEPENDENT = {
    "forward, ordinary launches": ("fwd", "plain_ms"),
    "forward, dependent launches": ("fwd", "pdl_ms"),
    "forward + backward, ordinary launches": ("both", "plain_ms"),
    "forward + backward, dependent launches": ("both", "pdl_ms"),
}


def rows_of(name: str) -> list[dict[str, Any]]:
    return list(json.loads((FOLDER / name).read_text()))


TUNED = json.loads((FOLDER / "sonicmoe_triton.json").read_text())["measured"]


def contiguous(variant: str, column: str) -> float | None:
    layer, kernel = column.split()
    found = [
        row["ms"]
        for row in rows_of("trial_contiguous.json")
        if "ms" in row and (row["layer"], row["kernel"], row["variant"]) == (layer, kernel.lower(), CONTIGUOUS[variant])
    ]
    return found[0] if found else None


def weights(variant: str, column: str) -> float | None:
    layer, kernel = column.split()
    name = WEIGHTS[variant]
    name = name if isinstance(name, str) else name[kernel]
    found = [
        row["ms"]
        for row in rows_of("trial_weight_gradients.json")
        if row.get("ms") and (row["shape"], row["kernel"], row["variant"]) == (layer, kernel, name)
    ]
    return found[0] if found else None


FULL = {"dH": "hidden_gradient", "up": "up_projection"}


def gathered(variant: str, column: str) -> float | None:
    layer, kernel = column.split()
    (found,) = (
        row["ms"]
        for row in json.loads((FOLDER / "trial_options.json").read_text())["measured"]
        if (row["shape"], row["kernel"], row["options"]) == (LAYERS[layer], FULL[kernel], GATHERED[variant])
    )
    return float(found)


def in_turns(variant: str, column: str) -> float | None:
    layer, kernel = column.split()
    (found,) = (
        row["ms"]
        for row in json.loads((FOLDER / "trial_gathered_ping_pong.json").read_text())["measured"]
        if (row["shape"], row["kernel"], row["options"]) == (LAYERS[layer], FULL[kernel], TURNS[variant][kernel])
    )
    return float(found)


def dependent(variant: str, column: str) -> float | None:
    pass_, launches = DEPENDENT[variant]
    (found,) = (
        row[launches]
        for row in rows_of("trial_dependent_launch.json")
        if (row["shape"], row["pass"]) == (LAYERS[column], pass_)
    )
    return float(found)


ROUTING_LAYERS = {
    "1.4B n = 256": "40960,768,128,8",
    "7B n = 256": "24576,1536,128,8",
    "7B n = 512": "24576,1536,64,4",
    "1.4B n = 1024": "40960,768,32,2",
}
ROUTING = {
    "256, 4 warps": "256/4",
    "512, 2 warps": "512/2",
    "**512, 4 warps**": "512/4",
    "1024, 4 warps": "1024/4",
}


def routing(variant: str, column: str) -> float | None:
    (found,) = (
        row["us"][ROUTING[variant]]
        for row in rows_of("trial_small_kernels.json")
        if (row["what"], row["layer"]) == ("route", ROUTING_LAYERS[column])
    )
    return float(found)


@pytest.mark.parametrize(
    ("section", "names", "measured"),
    [
        ("## Down-projection", CONTIGUOUS, contiguous),
        ("## Weight gradients", WEIGHTS, weights),
        ("## dH and up", GATHERED, gathered),
        ("## Ping-pong over", TURNS, in_turns),
        ("## Programmatic", DEPENDENT, dependent),
        ("## Routing,", ROUTING, routing),
    ],
)
def test_the_notes_hold_what_was_measured(
    section: str, names: dict[str, Any], measured: Callable[[str, str], float | None]
) -> None:
    text = NOTES.read_text(encoding="utf-8").split(section, 1)[1].split("\n## ", 1)[0]
    table = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    columns, rows = table[0][1:], table[2:]
    assert [row[0] for row in rows] == list(names)
    for label, *cells in rows:
        for column, cell in zip(columns, cells, strict=True):
            ms = measured(label, column)
            if cell == "–":
                assert ms is None, (label, column, ms)
            else:
                digits = len(cell.strip("*").split(".")[1])
                assert ms is not None and cell.strip("*") == f"{ms:.{digits}f}", (label, column, cell, ms)


def test_the_notes_hold_what_tiles_of_64_rows_took() -> None:
    text = NOTES.read_text(encoding="utf-8").split("## Tiles of 64 rows", 1)[1].split("\n## ", 1)[0]
    of_shapes = json.loads((FOLDER / "sonicmoe_triton_row_tiles.json").read_text())["shapes"]
    cases = [(its, height) for its in of_shapes for height in (64, 128)]
    for line, kernel in (
        ("up-projection", "up_projection"),
        ("down-projection", "down_projection"),
        ("dH", "hidden_gradient"),
        ("dX", "input_gradient"),
    ):
        own = [
            min(row["ms"] for row in its["measured"] if (row["kernel"], row["rows"]) == (kernel, height))
            for its, height in cases
        ]
        assert f"| {line} | {' | '.join(f'{ms:.3f}' for ms in own)} |" in text

    def losses(kernels: tuple[str, ...], plain: bool = False) -> list[float]:
        """What 64 rows take over what 128 take, best of each; of the plain twins alone."""
        found = []
        for its in of_shapes:
            for kernel in kernels:
                best = [
                    min(
                        row["ms"]
                        for row in its["measured"]
                        if (row["kernel"], row["rows"]) == (kernel, height)
                        and (row["options"].get("plain") or not plain)
                    )
                    for height in (64, 128)
                ]
                found.append(best[0] / best[1] - 1)
        return found

    gathering, contiguous = ("up_projection", "hidden_gradient"), ("down_projection", "input_gradient")
    won = [-loss for loss in losses(contiguous)]
    assert f"win {100 * min(won):.0f} to {100 * max(won):.0f} %" in text
    for its, form in (
        (losses(gathering), "lose {:.0f} to {:.0f} %"),
        (losses(gathering, True), "take {:.0f} to {:.0f} %"),
    ):
        assert form.format(100 * min(its), 100 * max(its)) in text
    padded = [its["padded_rows"][str(height)] / its["routed_rows"] for its, height in cases]
    assert f"| padded / routed rows | {' | '.join(f'{share:.3f}' for share in padded)} |" in text


def test_the_notes_hold_what_the_tiles_order_does() -> None:
    text = NOTES.read_text(encoding="utf-8").split("## Few rows", 1)[1].split("\n## ", 1)[0]
    kernels = {"up-projection, ragged": "up_projection", "down-projection": "down_projection", "dX": "input_gradient"}

    def ms(shape: str, kernel: str, options: dict[str, Any]) -> str:
        (found,) = (
            row["ms"] for row in TUNED if (row["shape"], row["kernel"], row["options"]) == (shape, kernel, options)
        )
        return f"{found:.3f}"

    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| .*\d", line)]
    assert len(lines) > 5
    for label, *cells in lines:
        name, *shape = label.rsplit(", ", 5)
        if kernels[name] == "up_projection":
            orders: list[dict[str, Any]] = [{"block_n": 256, "ragged": True}]
            orders.append(orders[0] | {"by_expert": True})
        else:
            orders = [{"by_expert": False}, {"by_expert": True}]
        assert cells == [ms(",".join(shape), kernels[name], options) for options in orders], label
    assert f"would take {ms('16384,4096,1024,512,8', 'up_projection', dict(PLAIN))}" in " ".join(text.split())


def test_the_notes_hold_that_whole_rows_make_no_difference_to_the_aggregation() -> None:
    for shape in {row["shape"] for row in TUNED if row["kernel"] == "aggregation"}:
        of = [row for row in TUNED if (row["shape"], row["kernel"]) == (shape, "aggregation") and "ms" in row]
        own = next(row["ms"] for row in of if row["options"] is None)
        assert min(row["ms"] for row in of) > 0.995 * own


@pytest.mark.parametrize(
    "choice", json.loads(TABLE.read_text())["choices"], ids=lambda c: f"{c['kernel']}-{c['d']}-{c['width']}-{c['rows']}"
)
def test_every_tuned_choice_was_faster_than_the_default(choice: dict[str, Any]) -> None:
    of = [row for row in TUNED if place(row) == place(choice)]
    # Two layers of one place: the last one counts.
    of = [row for row in of if row["shape"] == of[-1]["shape"]]
    assert {row["commit"] for row in of} == {choice["commit"]}
    times = {json.dumps(row["options"], sort_keys=True): row["ms"] for row in of if "ms" in row}
    chosen, default = times[json.dumps(choice["options"], sort_keys=True)], times["null"]
    if choice["options"] is None:
        assert min(times.values()) >= (1 - MARGIN) * default
    else:
        assert chosen == min(times.values()) and chosen < (1 - MARGIN) * default


def test_the_notes_hold_what_launching_cost() -> None:
    text = NOTES.read_text(encoding="utf-8").split("## What launching costs", 1)[1].split("\n## ", 1)[0]
    measured = json.loads((FOLDER / "sonicmoe_triton_launch_cost.json").read_text())
    first = measured["first_call"]
    for line, key in (
        ("first call, s", "first_call_s"),
        ("the whole process, imports and CUDA context too, s", "wall_s"),
    ):
        assert f"| {line} | {' | '.join(f'{first[cache][key]:.1f}' for cache in ('cold', 'warm'))} |" in text
    lines = {
        "launched from Python, in a row": "host_ms",
        "until the host has launched it": "enqueue_ms",
        "replayed as a CUDA graph, in a row": "graph_ms",
        "launched / replayed, paired": "host_over_graph",
        "one call, from an idle GPU": "idle_ms",
    }
    layers = measured["in_a_row"]["layers"]
    for line, key in lines.items():
        cells = " | ".join(f"{layers[name][key]['median']:.2f}" for name in ("sonicmoe_triton", "sonicmoe_official"))
        assert f"| {line} | {cells} |" in text


def test_the_notes_hold_what_rounding_cost() -> None:
    text = NOTES.read_text(encoding="utf-8").split("## Token rounding", 1)[1].split("\n## ", 1)[0]
    shapes = json.loads((FOLDER / "sonicmoe_triton_rounding_cost.json").read_text())["shapes"]
    assert [each["shape"] for each in shapes] == ["16384,4096,1024,256,8", "16384,4096,1024,512,8"]
    for line, key in (
        ("top-K alone", "top_k"),
        ("rounding to the nearest tile", "nearest"),
        ("… `balanced`", "balanced"),
        ("… its backward", "nearest_backward"),
        ("the layer's forward with top-K", "top_k_layer_forward"),
    ):
        cells = [f"{each['ms'][key]['median']:.3f}" for each in shapes]
        assert f"| {line} | {' | '.join(cells)} |" in text
    shares = [each["ms"]["nearest"]["median"] / each["ms"]["top_k_layer_forward"]["median"] for each in shapes]
    assert f"| rounding / the layer's forward | {' | '.join(f'{100 * share:.1f} %' for share in shares)} |" in text
    # What the routing was to cost at most.
    assert shares[0] < 0.1

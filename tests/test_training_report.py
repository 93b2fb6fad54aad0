"""Training steps in the report: tables of their own, beside the paper's numbers, in every form."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console
from test_plots import ratio, synthetic
from test_report import build, column, store, titled
from training_rows import GPU, failed, in_turns, session, step

from harness.record import Row
from harness.report import html, markdown, tables, terminal, training
from harness.report.rows import Stored
from harness.token_rounding import ROUNDINGS, TOP_K
from plots import rows as table

OURS = "sonicmoe_triton"
FILE = "gpu/training.jsonl"


def test_steps_stand_apart_from_layers(tmp_path: Path) -> None:
    layers = [synthetic(environment={"gpu": GPU}), ratio("scattermoe", OURS, table.HEADLINE_SHAPE, 2.0)]
    alone = build(store(tmp_path / "alone", layers))
    both = build(store(store(tmp_path / "both", layers), session(), FILE))
    for name in ("measurements", "ratios"):
        assert titled(both, name).rows == titled(alone, name).rows
    names = (training.NAME, training.RATIOS, training.PROJECTION)
    assert [alone.table(name) for name in names] == [None] * 3
    assert "Training" not in markdown.render(alone, tmp_path)
    assert all(name in [one.name for one in both.tables] for name in names)
    assert column(titled(both, "failures"), "operation") == ["training_step"]


@pytest.mark.parametrize(
    ("method", "text"),
    [(TOP_K, "top_k"), ("expert_choice", "expert_choice"), ("token_drop", "token_drop")]
    + [(method, f"{method} to 64") for method in ROUNDINGS],
)
def test_a_tile_is_named_where_a_method_rounds_to_it(method: str, text: str) -> None:
    row = step()
    row["routing"] |= {"method": method, "m_tile": 64}
    assert Stored(cast(Row, row), FILE, 1, GPU).routing == text


def test_rates(tmp_path: Path) -> None:
    found = titled(build(store(tmp_path, session(), FILE)), training.NAME)
    assert column(found, "configuration") == ["1.4B-sparse"] * 2 + ["7B"] * 7
    assert column(found, "layers") == ["17", "17", "43", "43", "43", "43", "24", "24", "20"]
    assert column(found, "routing")[:3] == ["nearest to 128", "top_k", "top_k"]
    fastest_first = [OURS, "sonicmoe_official", "scattermoe", "torch_grouped_mm"]
    assert column(found, "implementation")[2:6] == fastest_first
    assert column(found, "a step")[2] == "24 sequences, recomputing"
    ours = step(layers=43, batch=24, recompute=True)
    place = column(found, "implementation").index(OURS, 2)
    assert column(found, "tokens/s")[place] == f"{ours['training']['tokens_per_s']:,.0f}"
    rate = ours["training"]["tokens_per_day_per_gpu"] / 1e9
    assert column(found, "B/day a GPU")[place].startswith(f"{rate:.2f} [")
    assert column(found, "MFU")[place] == f"{100 * ours['training']['mfu']:.1f} %"
    assert column(found, "peak GiB")[place] == "100.0" and column(found, "GPUs") == ["1"] * 9
    broken = column(found, "status").index("out_of_memory")
    assert [column(found, title)[broken] for title in ("implementation", "tokens/s", "MFU")] == ["scattermoe", "–", "–"]


def stored(*rows: dict[str, Any]) -> list[Stored]:
    return [Stored(cast(Row, row), FILE, line, GPU) for line, row in enumerate(rows, 1)]


def test_what_has_no_rate_of_a_gpu() -> None:
    """A run for its losses alone, and one on a CPU."""
    losses = step(validation_loss=3.2)
    rates, _, projected = training.of(stored(losses, {**step("tiny"), "measured_on": "cpu"}), [])
    assert column(rates, "B/day a GPU") == ["–", "–"] and column(rates, "GPUs") == ["1", "–"]
    assert column(rates, "validation loss") == ["3.200", "–"] and not projected.rows
    assert column(rates, "tokens/s")[0] == "–" != column(rates, "tokens/s")[1]


def test_ratios_stand_beside_the_claims_that_rest_on_them(tmp_path: Path) -> None:
    top_k = step()
    alone = in_turns(step(batch=48), step(world=8), 0.9)
    older = in_turns(step(implementation="scattermoe"), top_k, 1.3)
    results = store(tmp_path, [older, *session(), alone], FILE)
    made = build(results)
    found = titled(made, training.RATIOS)
    paper = dict(zip(column(found, "row"), column(found, "paper, H100"), strict=True))
    claims = {finding.rows[0].line: result.claim.id for result in made.claims for finding in result.findings
              if finding.rows}  # fmt: skip
    assert claims == {4: "training-throughput-7b", 16: "token-rounding-training-throughput"}
    assert {place: text for place, text in paper.items() if text != "–"} == {
        f"{FILE}:4": "1.42×",
        f"{FILE}:16": "1.16×",
    }
    assert column(found, "routing")[0] == "top_k / nearest" and sorted(column(found, "GPUs")) == ["1"] * 5 + ["1 / 8"]
    assert column(found, "a step")[column(found, "GPUs").index("1 / 8")] == "48 sequences / 384 sequences"
    # Claims link to these rows as to any others.
    assert f"#row-{FILE}%3A4" in html.render(made)


def test_the_gpus_busy_share_and_ratios_of_busy_times(tmp_path: Path) -> None:
    top_k, nearest = step("1.4B-sparse", busy=0.342), step("1.4B-sparse", 0.95, busy=0.31, routing="nearest")
    turns = [in_turns(top_k, nearest, 0.91), in_turns(top_k, nearest, 1.102, busy=True)]
    made = build(store(tmp_path, [top_k, nearest, *turns, step()], FILE))
    assert sorted(column(titled(made, training.NAME), "busy")) == ["31 %", "34 %", "–"]
    found = titled(made, training.RATIOS)
    told = [text.split(" [")[0] for text in column(found, "ratio")]
    assert dict(zip(column(found, "time"), told, strict=True)) == {"wall clock": "0.9100", "GPU busy": "1.102"}
    assert column(found, "paper, H100") == ["1.16×", "–"]
    for width in (80, 200):
        out = io.StringIO()
        terminal.render(Console(file=out, width=width), made)
        rates, text = out.getvalue().split("Training\n")[1].split("Training: ratios")
        assert "34 %" in rates and max(map(len, out.getvalue().splitlines())) <= width
        assert "1.102 [1.091, 1.113]" in text and ("sonicmoe_triton, GPU busy" in text or width == 80)
    # An earlier report's step is compared by the wall clock, busy times or not.
    slower = step("1.4B-sparse", 2.0, busy=0.342 / 2)
    (change,) = tables.against(stored(slower), stored(top_k), "before").rows
    assert [tables.cell_text(cell) for cell in change if tables.cell_text(cell) in ("slower", "host")] == [
        "slower", "host"
    ]  # fmt: skip


def test_a_status_stands_where_the_rate_would(tmp_path: Path) -> None:
    rows = [step(busy=0.9), failed("out_of_memory", "3 GiB", implementation="scattermoe")]
    rows.append(step(implementation="megablocks", unstable="something compiled"))
    out = io.StringIO()
    terminal.render(Console(file=out, width=80), build(store(tmp_path, rows, FILE)))
    text = out.getvalue().split("Training\n")[1].split("many GPUs")[0]
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.split()}
    assert lines["scattermoe"] == ["top_k", "out_of_memory", "–", "–", "–"]
    assert lines["sonicmoe_triton"][-3:] == ["90", "%", "100.0"] and "unstable" in text


def test_projected(tmp_path: Path) -> None:
    rows = [*session(), step(implementation="megablocks", layers=8, world=2)]
    found = titled(build(store(tmp_path, rows, FILE)), training.PROJECTION)
    titles = ("implementation", "recomputing", "GPUs", "sharded over")
    who = list(zip(*(column(found, title) for title in titles), strict=True))
    steps = [(OURS, "yes"), (OURS, "no"), ("sonicmoe_official", "yes"), ("scattermoe", "yes")]
    assert sorted(who) == sorted(
        (*step, gpus, over) for step in steps for gpus in ("64", "96") for over in ("8", "all")
    )
    assert column(found, "paper, H100") == (["213 (SonicMoE)"] * 2 + ["225 (ScatterMoE)"] * 2) * 4
    sources = column(found, "computation from")
    assert "43 layers and 4 micro-batches, divided by FLOPs" in sources[who.index((OURS, "yes", "64", "8"))]
    assert "20, 24 layers and 4 micro-batches, carried on to 43" in sources[who.index((OURS, "no", "64", "all"))]
    assert "Each GPU has the memory" in found.about and "80% of 450 GB/s" in found.about


def test_several_gpus(tmp_path: Path) -> None:
    """Shares of communication, and the projection beside what was measured."""
    rows = [step(layers=8, batch=24), step(layers=8, batch=96, world=4, communication=(0.31, 0.052))]
    made = build(store(tmp_path, rows, FILE))
    assert sorted(column(titled(made, training.NAME), "communication (exposed)")) == ["31.0 % (5.2 %)", "–"]
    assert "4 processes: projected / measured = " in titled(made, training.PROJECTION).about
    only = build(store(tmp_path / "only", rows[1:], FILE))
    assert not titled(only, training.PROJECTION).rows


def test_what_cannot_be_projected_says_why(tmp_path: Path) -> None:
    rows = [step(layers=8, gpu="NVIDIA A100"), step(layers=4, slower=9.0, gpu="NVIDIA A100")]
    found = titled(build(store(tmp_path, rows, FILE)), training.PROJECTION)
    assert column(found, "computation from") == ["no rates are recorded for NVIDIA A100 (harness/gpus.py)"]
    assert column(found, "B tokens/day") == ["–"]


@pytest.mark.parametrize("width", [80, 200])
def test_on_a_terminal(tmp_path: Path, width: int) -> None:
    out = io.StringIO()
    terminal.render(
        Console(file=out, width=width), build(store(tmp_path, [*session(), step(validation_loss=3.2)], FILE))
    )
    text = " ".join(out.getvalue().split())
    for said in ("2.52 [2.51, 2.54]", "nearest to 128", "1.414 [1.400, 1.428]", "213 (SonicMoE)", "carried on to 43"):
        assert said in text
    # A run for its losses alone has nothing to say there.
    assert "not a measurement" in text and text.count("… 1 more in the other forms") == 1
    assert text.count("out_of_memory") == 4 and " – –" not in text.split("Training")[1].split("24 sequences")[0]

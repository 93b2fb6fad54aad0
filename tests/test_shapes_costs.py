"""Shapes and cost models against hand counts and the paper's own bars."""

from __future__ import annotations

import csv

import pytest
from conftest import ROOT

from harness.costs import (
    algorithm_bytes,
    arithmetic_intensity,
    boundary_bytes,
    floors_ms,
    held_bytes_sonicmoe,
    layer_bytes_sonicmoe,
    model_flops,
    weight_bytes,
)
from harness.errors import UserError
from harness.estimate import job_seconds
from harness.gpus import rates_of
from harness.interface import Point
from harness.shapes import MoEShape
from harness.timing import TimingSettings

HEADLINE = MoEShape(24576, 1536, 256, 128, 8)


def test_a_shape_reads_what_it_writes() -> None:
    assert MoEShape.parse("24576,1536,256,128,8") == HEADLINE == MoEShape.parse(str(HEADLINE))
    assert MoEShape(**HEADLINE.as_dict()) == HEADLINE
    assert (HEADLINE.granularity, HEADLINE.activation_ratio, HEADLINE.routed_rows) == (6.0, 1 / 16, 196608)
    assert MoEShape.parse("0,8,8,2,2").routed_rows == 0


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("0,1,2", "five whole numbers"),
        ("T,d", "five whole numbers"),
        ("", "five whole numbers"),
        ("1,2,3,4,5,6", "five whole numbers"),
        ("64,64,32,8,2.5", "five whole numbers"),
        ("64,64,32,4,8", "exceed E=4"),
        ("-1,64,32,8,2", "T=-1"),
        ("64,64,32,8,0", "K=0"),
        ("64,0,32,8,2", "d=0"),
    ],
)
def test_bad_shapes_are_refused_with_what_is_wrong(text: str, part: str) -> None:
    with pytest.raises(UserError, match=part):
        MoEShape.parse(text)


@pytest.mark.parametrize("value", [True, 8.0, "8", None])
def test_fields_must_be_whole_numbers(value: object) -> None:
    with pytest.raises(UserError, match="whole number"):
        MoEShape(64, 64, 32, value, 2)  # type: ignore[arg-type]


def test_flops_are_those_of_the_gemms_one_by_one() -> None:
    shape = MoEShape(60, 24, 10, 6, 2)
    rows, d, n = 120, 24, 10
    # (rows, columns, contraction) of each GEMM of the layer.
    forward = [(rows, n, d), (rows, n, d), (rows, d, n)]
    backward = [(rows, n, d), (d, n, rows), (rows, d, n), (rows, d, n), (n, d, rows), (n, d, rows)]
    counted = {"forward": forward, "backward": backward, "forward_backward": forward + backward}
    for pass_, gemms in counted.items():
        assert model_flops(shape, pass_) == sum(2 * m * k * c for m, k, c in gemms)
    assert model_flops(shape, "forward") == 6 * rows * n * d
    assert model_flops(shape, "forward", rows=384) == 6 * 384 * n * d


def test_held_bytes_of_the_algorithm() -> None:
    T, d, n, E, K = 24576, 1536, 256, 128, 8
    metadata = held_bytes_sonicmoe(HEADLINE) - (2 * T * d + 4 * T * K * n)
    assert 16 * T * K <= metadata <= 16 * T * K + 8 * E
    # It grows with nK, not with granularity.
    fine, coarse = MoEShape(T, d, 64, 512, 32), MoEShape(T, d, 1024, 32, 2)
    assert held_bytes_sonicmoe(fine) <= 1.05 * held_bytes_sonicmoe(coarse)


def test_layer_bytes_are_the_papers_bars() -> None:
    with (ROOT / "results/paper/figure13_activation_memory.csv").open() as file:
        bars = [row for row in csv.DictReader(file) if row["implementation"] == "SonicMoE"]
    assert len(bars) == 12
    for bar in bars:
        shape = MoEShape(*(int(bar[key]) for key in ("T", "d", "n", "E", "K")))
        assert layer_bytes_sonicmoe(shape) / 2**30 == pytest.approx(float(bar["gib"]), rel=0.015), str(shape)


def test_bytes_by_hand() -> None:
    shape = MoEShape(4, 8, 2, 3, 2)
    weights = 2 * (3 * 3 * 8 * 2 + 3 * 8)
    assert weight_bytes(shape) == weights
    assert boundary_bytes(shape, "forward") == 2 * (2 * 4 * 8) + weights
    assert boundary_bytes(shape, "backward") == 2 * (3 * 4 * 8) + 2 * weights
    # Router reads X; up reads X, writes H (8, 4) and A (8, 2); down reads A, writes Y (8, 8); aggregation reads Y,
    # writes O.
    assert algorithm_bytes(shape, "forward") == 2 * (32 + 32 + 32 + 16 + 16 + 64 + 64 + 32) + weights


@pytest.mark.parametrize("b", [2, 4])
@pytest.mark.parametrize("text", ["24576,1536,256,128,8", "40960,768,1024,32,2", "64,64,32,8,1"])
def test_an_algorithm_moves_more_than_crosses_the_boundary(text: str, b: int) -> None:
    shape = MoEShape.parse(text)
    for pass_ in ("forward", "backward", "forward_backward"):
        assert algorithm_bytes(shape, pass_, b) > boundary_bytes(shape, pass_, b)
    for cost in (algorithm_bytes, boundary_bytes):
        assert cost(shape, "forward", b) + cost(shape, "backward", b) == cost(shape, "forward_backward", b)


def test_arithmetic_intensity_by_hand() -> None:
    # G = 6, rho = 1/16, tokens of one expert 1536: 3 / (2/1536 + 12/1536 + 3/1536).
    intensity = arithmetic_intensity(HEADLINE)
    assert intensity["paper"] == pytest.approx(3 * 1536 / 17)
    assert intensity["training"] == pytest.approx(3 * 1536 / 19)


def test_floors() -> None:
    rates = rates_of("NVIDIA H200")
    assert rates is not None and rates_of("a toaster") is None
    floors = floors_ms(989_400_000_000_000, 4_800_000_000_000, "bfloat16", rates)
    assert floors == {"compute": pytest.approx(1000.0), "memory": pytest.approx(1000.0)}


def test_a_jobs_estimate_knows_heating_and_rests() -> None:
    point = Point("moe_layer", "torch_loop", HEADLINE, device="cuda")
    burst = job_seconds("point", point)
    assert job_seconds("point", point, TimingSettings()) == burst
    assert job_seconds("point", point, TimingSettings(mode="sustained", heat_s=3.0)) == pytest.approx(burst + 6.0)
    assert job_seconds("ratio", point, TimingSettings(mode="sustained", heat_s=3.0)) == pytest.approx(
        job_seconds("ratio", point) + 3.0
    )
    # All but the fixed second takes four times as long, and both kinds of samples begin with a rest.
    paced = job_seconds("point", point, TimingSettings(mode="paced"))
    assert paced == pytest.approx(1.0 + 4.0 * (burst - 1.0) + 0.4)
    assert job_seconds("account", point, TimingSettings(mode="paced")) == job_seconds("account", point)

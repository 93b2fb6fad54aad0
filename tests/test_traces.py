"""Routing by a trace's file: what is read and refused, that counts are reached, and that rows tell one file from
another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import point_of
from test_cli import assert_refused
from test_record import ratio
from test_sweep import REGISTRY

from harness import accounts, check, store, traces
from harness.errors import UserError
from harness.interface import Point, Problem
from harness.operations import OPERATIONS, get_operation
from harness.points import point_from_dict, point_to_dict, row_fields
from harness.record import validate
from harness.registry import default_registry
from harness.routing import choose_experts, expert_counts
from harness.shapes import MoEShape
from harness.sweep import load_sweep

pytestmark = pytest.mark.usefixtures("forked_workers")

SHAPE = "64,32,16,8,2"
#: 128 rows, so as they are at that shape; two experts without any.
COUNTS = [40, 30, 0, 3, 20, 0, 10, 25]
EXPERTS = np.stack([np.random.default_rng(seed).permutation(8)[:2] for seed in range(64)])


def counts_file(folder: Path, counts: Any = COUNTS, name: str = "real.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(counts))
    return path


def experts_file(folder: Path, experts: Any = EXPERTS) -> Path:
    np.save(folder / "real.npy", experts)
    return folder / "real.npy"


def traced(path: Path, shape: str = SHAPE, **more: Any) -> Point:
    """A point by a trace, after it has gone to the worker."""
    point = point_of(shape, **more)
    point = replace(point, routing=traces.parse(f"trace:{path}"))
    return point_from_dict(json.loads(json.dumps(point_to_dict(point))))


def made(point: Point, input_set: int = 0) -> Problem:
    return get_operation(point.operation).make_problem(point, "cpu", input_set)


# Counts.


def test_largest_remainders() -> None:
    # Shares of 10 rows: 4.5, 3.5, 2, 0; the first of equal remainders gets the row that is left.
    assert traces.scaled([9, 7, 4, 0], 10) == [5, 3, 2, 0]
    assert traces.scaled(COUNTS, 128) == COUNTS
    assert traces.scaled([2**63 - 1, 1], 3) == [3, 0] and traces.scaled([1, 1], 0) == [0, 0]
    generator = np.random.default_rng(0)
    for _ in range(50):
        counts = [int(count) for count in generator.integers(0, 1000, 16) * generator.integers(0, 2, 16)] + [1]
        for rows in (7, 128, 10_007):
            found = traces.scaled(counts, rows)
            exact = [count * rows / sum(counts) for count in counts]
            assert sum(found) == rows and all(abs(a - b) < 1 for a, b in zip(found, exact, strict=True))
            assert all(a == 0 for a, count in zip(found, counts, strict=True) if count == 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [SHAPE, "200,8,16,8,2", "1000,32,16,8,3"])
def test_planted_counts_are_reached(tmp_path: Path, shape: str, dtype: str) -> None:
    point = traced(counts_file(tmp_path), shape, dtype=dtype)
    expected = traces.scaled(COUNTS, point.shape.routed_rows)
    for input_set in (0, 1):
        problem = made(point, input_set)
        found = choose_experts(problem.x, problem.router, point.shape.K)
        assert expert_counts(found, 8).tolist() == expected


def test_planted_experts_are_those_of_the_file(tmp_path: Path) -> None:
    problem = made(traced(experts_file(tmp_path)))
    found = choose_experts(problem.x, problem.router, 2).sort(1).values
    assert torch.equal(found, torch.from_numpy(EXPERTS).sort(1).values)


@pytest.mark.parametrize("operation", [name for name, its in OPERATIONS.items() if its.takes_routing])
def test_a_given_routing_leaves_the_data_as_it_is(tmp_path: Path, operation: str) -> None:
    """More experts than features, which no planter could do; with the same tokens as under uniform routing."""
    variant = OPERATIONS[operation].variants[0]
    for path in (counts_file(tmp_path), experts_file(tmp_path)):
        point = traced(path, "64,4,16,8,2", operation=operation, variant=variant)
        assert get_operation(operation).unsupported_reason(point) is None
        problem = made(point)
        if problem.rows is not None:
            experts, counts = problem.rows.indices.flatten(), problem.rows.expert_offsets.diff()
        else:
            assert problem.routing is not None
            experts, counts = problem.routing.experts, expert_counts(problem.routing.experts, 8)
            uniform = made(replace(point, routing=point_of(SHAPE).routing))
            assert torch.equal(problem.x, uniform.x) and torch.equal(problem.router, uniform.router)
        assert counts.tolist() == (COUNTS if path.suffix == ".json" else np.bincount(EXPERTS.flatten()).tolist())
        if path.suffix == ".npy":
            assert torch.equal(experts.view(64, 2).sort(1).values.long(), torch.from_numpy(EXPERTS).sort(1).values)


def test_what_plants_needs_as_many_features_as_experts(tmp_path: Path) -> None:
    for operation in ("moe_layer", "topk_router"):
        reason = get_operation(operation).unsupported_reason(
            traced(counts_file(tmp_path), "64,4,16,8,2", operation=operation)
        )
        assert reason is not None and "E=8 exceeds d=4" in reason
    bound = get_operation("dense_bound").unsupported_reason(
        traced(counts_file(tmp_path), operation="dense_bound", variant="gemm")
    )
    assert bound == "the dense bound's experts are balanced: it goes by no trace"


@pytest.mark.parametrize(
    ("name", "operation", "variant"),
    [
        ("torch_loop", "moe_layer", ""),
        ("sonicmoe_torch", "moe_layer", ""),
        ("torch_loop", "routed_experts", ""),
        ("torch_kernels", "grouped_gemm_gather_k", "dW1"),
        ("torch_kernels", "topk_router", ""),
    ],
)
def test_layers_pass_the_gate_under_a_trace(tmp_path: Path, name: str, operation: str, variant: str) -> None:
    for path in (counts_file(tmp_path), experts_file(tmp_path)):
        point = traced(path, operation=operation, variant=variant, name=name)
        problem = made(point)
        result = get_operation(operation).check(default_registry().get(name).build(problem), problem)
        assert result.reason is None and result.errors
        if operation != "topk_router":
            assert result.counts is not None
            expected = COUNTS if path.suffix == ".json" else np.bincount(EXPERTS.flatten()).tolist()
            assert result.counts.tolist() == expected


def test_counted_rows_are_the_traces(tmp_path: Path) -> None:
    point = traced(counts_file(tmp_path), operation=accounts.OPERATION, name=accounts.NAME)
    tile = replace(point.routing, m_tile=16)
    found = accounts.account(replace(point, routing=tile))["routing"]
    padded = sum(-(-count // 16) * 16 for count in COUNTS)
    assert found == {"routed_rows": 128, "padded_rows": padded, "dropped": 0, "added": 0, "empty_experts": 2}
    chosen = accounts.account(replace(point, routing=replace(tile, method="expert_choice")))["routing"]
    assert chosen["routed_rows"] == 128 and chosen["dropped"] == chosen["added"] > 0
    rounded = accounts.account(replace(point, routing=replace(tile, method="nearest")))["routing"]
    assert rounded["padded_rows"] == rounded["routed_rows"]


# Files.


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "40,30,0,3\n20, 0 ,10,25\n"),
        ("a.txt", "40 30 0 3\r\n20;0\t10 25"),
        ("a.TXT", "\ufeff40 30 0 3 20 0 10 25"),
    ],
)
def test_texts(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    trace = traces.read(tmp_path / name)
    assert trace.counts == tuple(COUNTS) and traces.FORM.fullmatch(trace.distribution)


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.json", b"[1, 2", "not valid JSON"),
        ("a.json", b'{"counts": [1]}', "must hold a list of whole numbers"),
        ("a.json", b"[]", "must hold a list of whole numbers"),
        ("a.json", b"[1, 2.0]", "expert 1: must be a whole number of at least 0, not '2.0'"),
        ("a.json", b"[1, true]", "expert 1: must be"),
        ("a.json", b"[-1, 3]", "expert 0: must be"),
        ("a.json", b"[0, 0]", "no expert has a row"),
        ("a.csv", b"expert,rows\n0,4\n", "must hold whole numbers, one for each expert, not 'expert'"),
        ("a.txt", b"9" * 20, "must hold whole numbers"),
        ("a.txt", b"9" * 19, "must be a whole number"),
        ("a.txt", b"", "must hold a list"),
        ("a.npy", b"no array", "not valid NumPy"),
        ("a.npy", b"", "not valid NumPy"),
        ("a.bin", b"1 2", "ends in .json, .csv, .txt or .npy"),
        ("a\n.txt", b"1 2", "give it another name"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes, part: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as refused:
        traces.read(tmp_path / name)
    assert part in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("experts", "part"),
    [
        (EXPERTS[0], "must hold (T, K) whole numbers, not (2,) int64"),
        (EXPERTS.astype(float), "must hold (T, K) whole numbers, not (64, 2) float64"),
        (EXPERTS - 1, "numbers from 0 to E - 1, not -1 to"),
        (np.full((2, 1), 2**64 - 1, np.uint64), "numbers from 0 to E - 1"),
        (np.array([[1, 2], [3, 3]]), "token 1 has an expert twice"),
        (np.array([["a", "b"]], dtype=object), "not valid NumPy"),
    ],
)
def test_bad_experts_are_refused(tmp_path: Path, experts: Any, part: str) -> None:
    with pytest.raises(UserError) as refused:
        traces.read(experts_file(tmp_path, experts))
    assert part in str(refused.value)


@pytest.mark.parametrize(
    ("counts", "shape", "part"),
    [
        (COUNTS, "64,32,16,9,2", "holds 8 counts, but the shape 64,32,16,9,2 has E=9"),
        ([100, 1, 1, 1], "50,32,16,4,2", "expert 0 would have 97 rows at the shape 50,32,16,4,2, more than its T=50"),
        (None, "65,32,16,8,2", "holds experts of (T, K) = (64, 2), but the shape 65,32,16,8,2 has (65, 2)"),
        (None, "64,32,16,8,1", "holds experts of (T, K) = (64, 2)"),
        (None, "64,32,16,7,2", "names expert 7, but the shape 64,32,16,7,2 has E=7"),
    ],
)
def test_a_trace_that_does_not_fit(tmp_path: Path, counts: Any, shape: str, part: str) -> None:
    path = experts_file(tmp_path) if counts is None else counts_file(tmp_path, counts)
    with pytest.raises(UserError) as refused:
        traces.check(traces.parse(f"trace:{path}"), MoEShape.parse(shape))
    assert part in str(refused.value)


def test_no_tokens(tmp_path: Path) -> None:
    problem = made(traced(counts_file(tmp_path), "0,32,16,8,2"))
    assert problem.x.shape == (0, 32)


# Rows and resume keys.


def test_rows_name_the_file_and_its_content_and_not_its_place(tmp_path: Path) -> None:
    path = counts_file(tmp_path)
    point = traced(path)
    fields = row_fields(point)
    name, _, digest = point.routing.distribution.rpartition("@")
    assert name == "trace:real.json" and len(digest) == 16
    assert str(tmp_path) not in json.dumps(fields) and str(tmp_path) not in json.dumps(store.point_inputs(point))
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    key = store.point_inputs(point)
    assert store.point_inputs(traced(counts_file(moved))) == key
    counts_file(tmp_path, [*COUNTS[:-2], 11, 24])
    other = traced(path)
    assert store.point_inputs(other) != key
    rows = [{**row_fields(one), "pass": "forward"} for one in (point, other)]
    assert len({store.identity(row, None) for row in rows}) == 2  # type: ignore[arg-type]


def test_other_rows_have_no_new_field() -> None:
    point = point_of(SHAPE)
    assert set(row_fields(point)["routing"]) == {"method", "distribution", "seed", "m_tile"}
    assert set(store.point_inputs(point)["routing"]) == {"method", "distribution", "seed", "m_tile"}


def test_a_file_that_changes_after_it_was_named_is_not_measured(tmp_path: Path) -> None:
    path = counts_file(tmp_path)
    point = traced(path)
    counts_file(tmp_path, [*COUNTS[:-2], 11, 24])
    with pytest.raises(UserError, match=r"has changed: it is trace:real\.json@.* now, not trace:real\.json@"):
        made(point)
    path.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        made(point)


def test_a_rows_trace_is_validated() -> None:
    row = ratio()
    good = traces.PREFIX + "a@b c.json@0123456789abcdef"
    for field in ("routing", "denominator_routing"):
        own = {**row["routing"], "distribution": good}
        assert validate({**row, field: own}) == []
        for bad in ("trace", "trace:a.json", "trace:@0123456789abcdef", "trace:a.json@0123456789ABCDEF"):
            (problem,) = validate({**row, field: {**own, "distribution": bad}})
            assert problem.startswith(f"{field}.distribution") and "trace:NAME@HASH" in problem


# Where a user names one.

POINTS = '[sweep]\ndescription = "x"\n[[points]]\nimplementations = "torch_loop"\ndevice = "cpu"\n'


def test_a_sweep_finds_it_beside_itself(tmp_path: Path) -> None:
    counts_file(tmp_path)
    lines = f'shapes = "{SHAPE}"\ndistributions = ["uniform", "trace:real.json"]\nseed = 3\nm_tile = 16\n'
    more = f'[[routing]]\nmethods = ["top_k", "nearest"]\n{lines}'
    ratios = f'[[ratios]]\nnumerator = "torch_loop"\ndenominator = "torch_loop"\n{lines}'
    (tmp_path / "mine.toml").write_text(POINTS + lines + more + ratios)
    sweep = load_sweep(tmp_path / "mine.toml", REGISTRY)
    routings = [point.routing for point in sweep.points]
    assert [routing.distribution.partition("@")[0] for routing in routings] == ["uniform", "trace:real.json"]
    assert {(routing.seed, routing.m_tile, routing.method) for routing in routings} == {(3, 16, "top_k")}
    assert made(sweep.points[1]).x.shape == (64, 32)
    assert len(sweep.accounts) == 4 and [one.point.routing for one in sweep.ratios] == routings


@pytest.mark.parametrize("entry", ["points", "routing", "ratios"])
def test_a_sweep_with_a_trace_that_does_not_fit(tmp_path: Path, entry: str) -> None:
    counts_file(tmp_path)
    kinds = {
        "points": 'implementations = "torch_loop"',
        "routing": 'methods = "up"',
        "ratios": 'numerator = "torch_loop"\ndenominator = "torch_loop"',
    }
    head = f'[sweep]\ndescription = "x"\n[[{entry}]]\n{kinds[entry]}\nshapes = "64,32,16,9,2"\n'
    for distribution, part in (("trace:real.json", "holds 8 counts"), ("trace:none.json", "cannot be read")):
        (tmp_path / "mine.toml").write_text(f'{head}distributions = ["{distribution}"]\n')
        with pytest.raises(UserError) as refused:
            load_sweep(tmp_path / "mine.toml", REGISTRY)
        text = str(refused.value)
        assert text.startswith(f"{tmp_path / 'mine.toml'}: {entry}[1].distributions: ") and part in text


def test_check_and_profile_refuse_a_bad_one(command_line: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    for command in ("check", "profile"):
        for name, part in (("real.json", "holds 8 counts"), ("none.json", "none.json: cannot be read")):
            option = f"trace:{counts_file(tmp_path).with_name(name)}"
            answer = command_line(command, "torch_loop", "--shape", "64,32,16,9,2", "--distribution", option)
            assert_refused(answer, f"--distribution {option}: ", part)
        assert_refused(command_line(command, "torch_loop", "--distribution", "trce:x"), "trace:FILE")


def test_check_hands_it_to_the_worker(
    command_line: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Point] = []

    class Worker:
        untuned = False

        def __init__(self, stop: None) -> None:
            """Nothing is started."""

        def run(self, job: dict[str, Any], limit_s: float) -> Iterator[dict[str, Any]]:
            point = point_from_dict(json.loads(json.dumps(job["point"])))
            asked.append(point)
            problem = made(point)
            result = get_operation(point.operation).check(
                default_registry().get(point.implementation).build(problem), problem
            )
            yield {"event": "checked", "reason": result.reason, "errors": result.errors}
            yield {"event": "done", "poisoned": False}

        def close(self, patience_s: float) -> None:
            """As little is ended."""

    monkeypatch.setattr(check, "WorkerProcess", Worker)
    option = f"trace:{experts_file(tmp_path)}"
    code, out, err = command_line("check", "torch_loop", "sonicmoe_torch", "--shape", SHAPE, "--distribution", option)
    lines = [line.split() for line in out.splitlines()[1:]]
    assert (code, err) == (0, "") and [line[0] for line in lines] == ["torch_loop", "torch_loop", "sonicmoe_torch"]
    assert all(traces.parse(option).distribution in line and "ok" in line for line in lines)
    # What a trace gives to whom is not to be changed by another method.
    assert [(point.operation, point.routing) for point in asked] == [
        (operation, traces.parse(option)) for operation in ("moe_layer", "routed_experts", "moe_layer")
    ]

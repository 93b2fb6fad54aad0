"""The conformance suite: no report is left out, and every implementation that a CPU runs meets every case."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from fake_conformance import MET

from harness.conformance import CASES, COVERED, IN_PART, LINES, Case, get_case, suite
from harness.conformance.checks import CHECKS
from harness.conformance.inputs import case_problem
from harness.conformance.measure import meet
from harness.errors import UserError
from harness.measure import Context
from harness.registry import default_registry
from harness.routing import assign, choose_experts, expert_counts
from harness.sweep import load_sweep

pytestmark = pytest.mark.usefixtures("forked_workers")

#: The reports that the suite was made of; what has no report is tried besides.
REPORTS = {
    "pytorch": {"#152668", "#172439", "#192497", "#186365", " PR#150374", "#163425"},
    "MSLK": {"#158"},
    "transformers": {"#48205"},
    "sonic-moe": {"#63", "#21", " PR#15", "#45", " sources"},
    "megablocks": {"#170", "#178", "#114", "#62", "#166"},
    "scattermoe": {"#5", "#12", " PR#23"},
    "DeepGEMM": {" PR#450", " PR#103", "#136", " PR#116", " PR#302"},
    "tritonbench": {"#346", "#143"},
    "flashinfer": {"#2187", " PR#2213"},
    "vllm": {"#56887"},
    "also:": {f" {item}" for item in ("K = 1", "K = E", "T = 1", "T below a tile", "T = 0", "one expert",
                                      "ragged widths", "tied scores", "NaN in x", "inf in x", "fp16", "fp32")},
}  # fmt: skip
#: What an implementation refuses in words, or what PyTorch's own kernel fails; all else must be ok.
REFUSED = {
    ("torch_grouped_mm", "stride-of-100"): ("unsupported", "multiples of 8"),
    ("torch_grouped_mm", "torch-compile"): ("crashed", "Expected inputs of BF16 type"),
}
ON_CPU = [plugin.name for plugin in default_registry().offering("moe_layer", "cpu")]


# No report is left out.


def test_every_report_is_there() -> None:
    wanted = {f"{project}{number}" for project, numbers in REPORTS.items() for number in numbers}
    assert {line.name for line in LINES} == wanted and len(LINES) == len(wanted)


def test_every_report_has_a_case_or_a_test() -> None:
    by_cases = {line for case in CASES for line in case.lines}
    by_tests = {covered.line for covered in COVERED}
    assert by_cases | by_tests == {line.name for line in LINES}
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.check for case in CASES} == set(CHECKS)


def test_a_report_that_is_met_in_part_says_so() -> None:
    (part,) = IN_PART
    # No test here times a grouped GEMM beside a loop: the case sees the result alone, and a sweep compares times.
    assert part.line == "pytorch#163425" and part.line in get_case(part.case).lines
    assert part.line not in {covered.line for covered in COVERED}
    (sweep,) = re.findall(r"moebench run (\w+)", part.what)
    ratios = load_sweep(sweep, default_registry()).ratios
    asked = [ratio for ratio in ratios if str(ratio.point.shape) == get_case(part.case).shape]
    assert {(one.numerator, one.point.routing.distribution) for one in asked} >= {("torch_loop", "skewed")}


def test_the_tests_that_stand_for_a_report_exist() -> None:
    for covered in COVERED:
        for test in covered.tests:
            path, name = test.split("::")
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def test_addresses_of_reports() -> None:
    urls = {line.name: line.url for line in LINES}
    assert urls["pytorch#152668"] == "https://github.com/pytorch/pytorch/issues/152668"
    assert urls["scattermoe PR#23"] == "https://github.com/shawntan/scattermoe/pull/23"
    assert {name for name, url in urls.items() if not url} == {
        name for name in urls if name.startswith("also: ") or name == "sonic-moe sources"
    }


def test_an_unknown_case_is_an_error() -> None:
    with pytest.raises(UserError, match="did you mean no-token"):
        get_case("no-tokens")


# Inputs.


@pytest.mark.parametrize("case", [case for case in CASES if case.counts], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_counts_are_those_of_the_report(case: Case, dtype: str) -> None:
    problem = case_problem(case, replace(case.point("test", (dtype,), "cpu"), dtype=dtype), "cpu")
    chosen = choose_experts(problem.x, problem.router, problem.shape.K)
    assert expert_counts(chosen, problem.shape.E).tolist() == list(case.counts)
    other = case_problem(case, problem.point, "cpu", input_set=1)
    assert torch.equal(other.router, problem.router) and not torch.equal(other.x, problem.x)


def test_assigned_experts_are_distinct_and_counts_must_fit() -> None:
    chosen = assign((5, 0, 3, 4), 6, 2)
    assert torch.bincount(chosen.flatten(), minlength=4).tolist() == [5, 0, 3, 4]
    assert all(len(set(row)) == 2 for row in chosen.tolist())
    for counts in ((7, 5), (5, 5)):
        with pytest.raises(ValueError, match="no routing of 6 tokens"):
            assign(counts, 6, 2)


def test_scores_tie_exactly() -> None:
    problem = case_problem(get_case("tied-scores"), get_case("tied-scores").point("test", ("float32",), "cpu"), "cpu")
    logits = problem.x @ problem.router.T
    top = logits.topk(4).values
    # Of four, two pairs; K = 3 cuts through the second.
    assert torch.equal(top[:, 0], top[:, 1]) and torch.equal(top[:, 2], top[:, 3])


# Every implementation of a CPU meets every case.


@pytest.mark.parametrize("case", MET, ids=lambda case: case.name)
@pytest.mark.parametrize("name", ON_CPU)
def test_implementations_on_a_cpu(name: str, case: Case, tmp_path: Path) -> None:
    plugin = default_registry().get(name)
    point = case.point(name, tuple(plugin.dtypes), "cpu")
    expected = REFUSED.get((name, case.name))
    if expected and expected[0] == "unsupported":
        status, reason = suite.Suite([plugin], [case], "cpu", tmp_path / "rows").refusal(plugin, case, point) or (
            "",
            "",
        )
        assert (status, expected[1] in reason) == ("unsupported", True)
    elif expected:
        with pytest.raises(Exception, match=expected[1]):
            meet(case, point, plugin, Context(lambda phase: None))
    else:
        verdict, _, _ = meet(case, point, plugin, Context(lambda phase: None))
        assert verdict.status == "ok", verdict.reason
        assert verdict.correctness is not None and verdict.correctness.errors

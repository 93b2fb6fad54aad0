"""Points of layers with token rounding inside: who offers them, and which ones a sweep takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rounded_layers import LOOP, Plain, rounded
from test_method_ratios import REGISTRY
from test_sweep import METHODS_HEAD, load

from harness.errors import UserError
from harness.interface import Implementation, Point
from harness.points import point_from_dict, point_to_dict
from harness.problem import make_problem
from harness.token_rounding import METHODS, ROUNDINGS, TOP_K

#: Offered by no layer with a router of its own.
OTHERS = tuple(method for method in METHODS if method not in (TOP_K, *ROUNDINGS))


# Who offers it


def on(plugin: Implementation, point: Point) -> Point:
    """The point where the plugin would run it."""
    return replace(point, device=plugin.devices[0], dtype=plugin.dtypes[0])


def test_plugins_refuse_the_methods_that_they_do_not_offer_in_words() -> None:
    refused = set()
    for plugin in REGISTRY.all():
        if "moe_layer" not in plugin.operations:
            continue
        assert TOP_K in plugin.routing_methods and set(plugin.routing_methods) <= {TOP_K, *ROUNDINGS}
        for method in METHODS:
            reason = plugin.unsupported_reason(on(plugin, rounded("64,64,64,8,2", method)))
            if method not in plugin.routing_methods:
                assert reason == f"{plugin.label} has no moe_layer with the routing method {method}"
                refused.add(plugin.name)
            else:
                assert reason is None or "routing method" not in reason
    assert len(refused) > 3


def test_a_plugin_offers_top_k_unless_it_says_more() -> None:
    class Silent(Plain):
        routing_methods = Implementation.routing_methods  # type: ignore[assignment]

    assert Silent().unsupported_reason(rounded(method=TOP_K)) is None
    for method in METHODS[1:]:
        reason = Silent().unsupported_reason(rounded(method=method))
        assert reason == f"plain has no moe_layer with the routing method {method}"


def test_the_loop_offers_every_rounding_and_nothing_else() -> None:
    for method in METHODS:
        for device in ("cpu", "cuda"):
            reason = LOOP.unsupported_reason(replace(rounded(method=method), device=device))
            assert (reason is None) == (method in (TOP_K, *ROUNDINGS)), method
        # It is handed a routing there, by any method.
        assert LOOP.unsupported_reason(replace(rounded(method=method), operation="routed_experts")) is None


def test_a_bound_has_top_k_alone() -> None:
    bound = REGISTRY.get("cublas_bound")
    for method in METHODS:
        point = on(bound, replace(rounded("64,64,64,8,2", method), operation="dense_bound", variant="gemm"))
        sentence = f"{bound.label} has no dense_bound with the routing method {method}"
        assert bound.unsupported_reason(point) == (None if method == TOP_K else sentence)

    class Boasting(Plain):
        """Its layers' methods are not its bound's."""

        operations = ("moe_layer", "dense_bound")

    assert Boasting().unsupported_reason(rounded()) is None
    assert "no dense_bound" in str(Boasting().unsupported_reason(replace(rounded(), operation="dense_bound")))


def test_the_loop_builds_a_layer_of_the_points_method() -> None:
    problem = make_problem(rounded(), "cpu")
    plain = replace(problem, point=rounded(method=TOP_K))
    outputs = [LOOP.build(its).forward(problem.x) for its in (problem, plain)]
    assert LOOP.build(plain).kept_pairs(problem.x) is None and not torch.equal(*outputs)


@pytest.mark.parametrize("method", METHODS)
def test_points_survive_the_pipe(method: str) -> None:
    point = rounded(method=method, m_tile=64)
    assert point_from_dict(point_to_dict(point)) == point


# Sweeps


def test_a_sweep_takes_the_roundings_of_a_layer(tmp_path: Path) -> None:
    methods = ", ".join(f'"{method}"' for method in (TOP_K, *ROUNDINGS))
    text = f'[[points]]\nimplementations = "torch_loop"\nshapes = ["one"]\nm_tile = 16\nmethods = [{methods}]\n'
    for operation in ("", 'operation = "moe_layer"\n'):
        points = load(tmp_path, METHODS_HEAD + text + operation).points
        assert [point.routing.method for point in points] == [TOP_K, *ROUNDINGS]
        assert {(point.operation, point.routing.m_tile) for point in points} == {("moe_layer", 16)}


#: Every sweep with ratios needs one of an implementation with itself.
A_A = """
[[ratios]]
numerator = "torch_loop"
denominator = "torch_loop"
shapes = ["one"]
"""


def test_a_sweep_takes_ratios_of_a_layers_roundings(tmp_path: Path) -> None:
    text = """
[[ratios]]
numerator = "torch_loop"
denominator = "sonicmoe_triton"
shapes = ["one"]
methods = ["top_k", "nearest"]
denominator_method = "nearest"
"""
    _, first, second = load(tmp_path, METHODS_HEAD + A_A + text).ratios
    assert (first.point.operation, first.point.routing.method) == ("moe_layer", TOP_K)
    assert first.denominator_point.routing.method == second.denominator_point.routing.method == "nearest"
    assert second.point.routing.method == "nearest"
    # And one of a rounding without a method of the denominator's own.
    text = text.replace('"top_k", ', "").replace("denominator_method", "#")
    _, alone = load(tmp_path, METHODS_HEAD + A_A + text).ratios
    assert alone.point.routing == alone.denominator_point.routing and alone.point.routing.method == "nearest"


TAKES = rf"moe_layer takes {', '.join((TOP_K, *ROUNDINGS))}, not "


@pytest.mark.parametrize("method", OTHERS)
def test_a_sweep_refuses_methods_that_are_no_roundings(tmp_path: Path, method: str) -> None:
    point = f'[[points]]\nimplementations = "torch_loop"\nshapes = ["one"]\nmethods = ["up", "{method}"]\n'
    with pytest.raises(UserError, match=rf"points\[1\].methods: {TAKES}{method}"):
        load(tmp_path, METHODS_HEAD + point)
    routed = point.replace("torch_loop", "sonicmoe_triton") + 'operation = "routed_experts"\n'
    assert load(tmp_path, METHODS_HEAD + routed).points
    head = '[[ratios]]\nnumerator = "torch_loop"\ndenominator = "torch_loop"\nshapes = ["one"]\n'
    for key in ("methods", "denominator_method"):
        with pytest.raises(UserError, match=rf"ratios\[1\].{key}: {TAKES}{method}"):
            load(tmp_path, METHODS_HEAD + head + f'{key} = "{method}"\n')


@pytest.mark.parametrize("method", METHODS[1:])
def test_a_sweep_refuses_bounds_of_other_methods(tmp_path: Path, method: str) -> None:
    points = '[[points]]\noperation = "dense_bound"\nimplementations = "cublas_bound"\nshapes = ["one"]\n'
    assert load(tmp_path, METHODS_HEAD + points).points
    with pytest.raises(UserError, match=rf"points\[1\].methods: dense_bound takes top_k, not {method}"):
        load(tmp_path, METHODS_HEAD + points + f'methods = "{method}"\n')
    ratios = (
        A_A + '[[ratios]]\nnumerator = "torch_loop"\ndenominator = "cublas_bound"\nbound = "gemm"\nshapes = ["one"]\n'
    )
    assert load(tmp_path, METHODS_HEAD + ratios).ratios
    where = (
        rf"ratios\[2\].methods: {TAKES}" if method in OTHERS else r"ratios\[2\].bound: the bound multiplies T\*K rows"
    )
    for methods in (f'"{method}"', f'["top_k", "{method}"]'):
        with pytest.raises(UserError, match=where):
            load(tmp_path, METHODS_HEAD + ratios + f"methods = {methods}\n")

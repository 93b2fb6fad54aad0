"""MoMoE, Liger-Kernel and Megatron on the CPU: weight layouts, what their packages are handed, and all gradients. The
packages, which need a GPU, are replaced by plain torch that asserts what the real ones ask for."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.interface import DISTRIBUTIONS, ROUTER_CONVENTIONS, Implementation, Layer, LayerSpec, Point, RoutingSpec
from harness.operations import get_operation
from harness.problem import make_problem
from harness.registry import installed_reason
from harness.shapes import MoEShape
from harness.training.experts import Bound
from implementations.liger import Liger
from implementations.megatron import Megatron
from implementations.momoe import SAVE_PERCENT, MoMoE
from implementations.scattermoe import ScatterMoE

PLUGINS: dict[str, Implementation] = {"momoe": MoMoE(), "liger": Liger(), "megatron": Megatron()}
SHAPES = ("64,48,32,8,2", "50,64,40,6,1", "20,32,48,4,4", "33,64,32,1,1")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class FakeMoMoE(nn.Module):
    """Takes weights (E, d, 2n), up then gate, and (E, n, d); tokens (B, S, d); mask int32 and scores fp32 by expert."""

    def __init__(
        self,
        embedding_dim: int,
        intermediate_dim: int,
        num_experts: int,
        num_chosen_experts: int,
        save_percent: int = 0,
        Wl1_ND2H: Tensor | None = None,
        Wl2_NHD: Tensor | None = None,
    ) -> None:
        super().__init__()
        assert Wl1_ND2H is not None and Wl2_NHD is not None
        assert Wl1_ND2H.shape == (num_experts, embedding_dim, 2 * intermediate_dim) and Wl1_ND2H.is_contiguous()
        assert Wl2_NHD.shape == (num_experts, intermediate_dim, embedding_dim) and Wl2_NHD.is_contiguous()
        assert save_percent == SAVE_PERCENT
        self.k = num_chosen_experts
        self.Wl1_ND2H, self.Wl2_NHD = nn.Parameter(Wl1_ND2H.clone().detach()), nn.Parameter(Wl2_NHD.clone().detach())

    def forward(self, x: Tensor, mask: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        batch, tokens, d = x.shape
        experts = self.Wl1_ND2H.shape[0]
        assert mask.shape == scores.shape == (experts, batch * tokens)
        assert mask.dtype == torch.int32 and scores.dtype == torch.float32
        assert (mask.sum(0) == self.k).all() and not scores[mask == 0].any()
        rows, out = x.reshape(-1, d).float(), torch.zeros(batch * tokens, d)
        for e in range(experts):
            up, gate = (rows @ self.Wl1_ND2H[e].float()).chunk(2, dim=1)
            out = out + (scores[e] * mask[e])[:, None] * (swiglu(gate, up) @ self.Wl2_NHD[e].float())
        return out.view(x.shape).to(x.dtype), mask.sum(1)


def fake_liger_experts(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, scores: Tensor) -> Tensor:
    """Takes weights (E, 2n, d), gate then up, and (E, d, n); indices int32 and scores by token."""
    assert indices.dtype == torch.int32 and indices.shape == scores.shape == (x.shape[0], indices.shape[1])
    assert gate_up.shape[1:] == (2 * down.shape[2], x.shape[1]) and down.shape[1] == x.shape[1]
    weights = torch.zeros(x.shape[0], down.shape[0]).scatter(1, indices.long(), scores.float())
    out = torch.zeros(x.shape)
    for e in range(down.shape[0]):
        gate, up = (x.float() @ gate_up[e].float().T).chunk(2, dim=1)
        out = out + weights[:, e, None] * (swiglu(gate, up) @ down[e].float().T)
    return out.to(x.dtype)


class FakeGroupedLinear(nn.Module):
    """One weight (out, in) for each group of rows, given by a list of their counts."""

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, bias: bool, params_dtype: Any, device: Any
    ) -> None:
        super().__init__()
        assert not bias
        self.num_gemms = num_gemms
        for e in range(num_gemms):
            weight = torch.full((out_features, in_features), float("nan"), dtype=params_dtype, device=device)
            self.register_parameter(f"weight{e}", nn.Parameter(weight))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        assert len(counts) == self.num_gemms and all(type(count) is int for count in counts)
        weights = [getattr(self, f"weight{e}") for e in range(self.num_gemms)]
        parts = zip(rows.split(counts), weights, strict=True)
        return torch.cat([(part.float() @ weight.float().T).to(rows.dtype) for part, weight in parts])


def fake_permute(x: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows by expert, then by token; the map tells each row's token."""
    assert x.is_contiguous() and probs.dtype == torch.float32 and routing_map.dtype == torch.int32
    assert probs.shape == routing_map.shape == (x.shape[0], probs.shape[1])
    assert num_out_tokens == int(routing_map.sum()) > 0
    expert, token = routing_map.T.nonzero(as_tuple=True)
    return x[token], probs[token, expert], token


def fake_unpermute(rows: Tensor, row_map: Tensor, restore_shape: torch.Size, map_type: str) -> Tensor:
    assert map_type == "mask"
    return torch.zeros(restore_shape).index_add(0, row_map, rows.float()).to(rows.dtype)


def module(name: str, **members: object) -> ModuleType:
    made = ModuleType(name)
    made.__path__ = []
    vars(made).update(members)
    return made


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    te = module(
        "transformer_engine.pytorch",
        GroupedLinear=FakeGroupedLinear,
        moe_permute_with_probs=fake_permute,
        moe_unpermute=fake_unpermute,
    )
    function = type("LigerFusedMoEFunction", (), {"apply": staticmethod(fake_liger_experts)})
    ops = module("liger_kernel.ops", LigerFusedMoEFunction=function)
    for found in (
        module("momoe", MoMoE=FakeMoMoE),
        module("liger_kernel", ops=ops),
        ops,
        module("transformer_engine", pytorch=te),
        te,
    ):
        monkeypatch.setitem(sys.modules, found.__name__, found)


def check(name: str, shape: str, distribution: str = "uniform", convention: str = "topk_softmax") -> None:
    layer, routing = LayerSpec(router_convention=convention), RoutingSpec(distribution=distribution)
    point = Point("moe_layer", name, MoEShape.parse(shape), "bfloat16", layer, routing)
    assert PLUGINS[name].unsupported_reason(point) is None
    problem = make_problem(point, "cpu")
    before = [t.clone() for t in (problem.gate, problem.up, problem.down, problem.router)]
    built: Layer = PLUGINS[name].build(problem)
    assert all(p.is_leaf and p.requires_grad for p in built.parameters())
    result = get_operation("moe_layer").check(built, problem)
    assert result.reason is None, result.reason
    after = (problem.gate, problem.up, problem.down, problem.router)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


every_plugin = pytest.mark.parametrize("name", list(PLUGINS))


@every_plugin
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradients(name: str, shape: str) -> None:
    check(name, shape)


@every_plugin
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_distributions(name: str, distribution: str) -> None:
    check(name, "48,64,32,8,2", distribution)


@every_plugin
@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
def test_conventions(name: str, convention: str) -> None:
    check(name, "48,64,32,8,3", convention=convention)


@every_plugin
def test_gradients_may_have_any_strides(name: str) -> None:
    problem = make_problem(Point("moe_layer", name, MoEShape.parse("40,64,32,4,2"), "bfloat16"), "cpu")
    layer = PLUGINS[name].build(problem)
    x = torch.zeros(40, 128, dtype=torch.bfloat16)
    x[:, ::2] = problem.x
    leaf = x.requires_grad_()
    out = layer.forward(leaf[:, ::2])
    grads = torch.autograd.grad(out, [leaf, *layer.parameters()], problem.grad_output.T.contiguous().T)
    assert all(grad.isfinite().all() for grad in grads)
    assert grads[0][:, ::2].any()


@pytest.mark.parametrize("shape", ["64,1048576,64,2048,8", "262144,8256,64,64,1"])
def test_momoe_stays_within_its_offsets(shape: str) -> None:
    reason = PLUGINS["momoe"].unsupported_reason(Point("moe_layer", "momoe", MoEShape.parse(shape)))
    assert reason is not None and "32-bit offsets" in reason


@pytest.mark.parametrize("shape", ["32768,4096,256,256,16", "32768,4096,2048,64,4"])
def test_momoe_takes_the_papers_largest_layers(shape: str) -> None:
    assert PLUGINS["momoe"].unsupported_reason(Point("moe_layer", "momoe", MoEShape.parse(shape))) is None


@pytest.mark.parametrize("name", ["momoe", "megatron"])
def test_no_tokens_are_refused(name: str) -> None:
    reason = PLUGINS[name].unsupported_reason(Point("moe_layer", name, MoEShape(0, 64, 32, 4, 2)))
    assert reason is not None and "without tokens" in reason


@every_plugin
def test_what_is_missing_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = PLUGINS[name]
    for module_name in plugin.requires:
        monkeypatch.delitem(sys.modules, module_name.partition(".")[0], raising=False)
    monkeypatch.setattr(sys, "path", [])
    reason = installed_reason(plugin)
    assert reason is not None and "requirements/" in reason
    assert all(package in reason for package in plugin.requires)


@pytest.mark.parametrize("plugin", [MoMoE(), ScatterMoE()], ids=lambda plugin: plugin.name)
def test_a_checkout_that_lacks_a_part_is_not_installed(
    plugin: Implementation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, plugin.name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    files = [tmp_path.joinpath(*part.split(".")).with_suffix(".py") for part in plugin.requires if "." in part]
    for file in {tmp_path / plugin.name / "__init__.py", *(file.with_name("__init__.py") for file in files), *files}:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("raise AssertionError('imported')")
    (tmp_path / "einops.py").touch()
    assert installed_reason(plugin) is None
    for file in files:
        source = file.read_text()
        file.unlink()
        importlib.invalidate_caches()
        part = ".".join(file.relative_to(tmp_path).with_suffix("").parts)
        assert (installed_reason(plugin) or "").startswith(f"the package {part} is missing; get it with: clone https")
        file.write_text(source)
        importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("name", "kernel", "role"),
    [
        ("momoe", "lin1_kernel", "up"),
        ("momoe", "lin2_kernel", "down"),
        ("momoe", "lin1_backward_kernel", "dX"),
        ("momoe", "making_nice_scatter_kernel", "gather"),
        ("momoe", "scatter_cols_kernel", "router"),
        ("liger", "_fused_up_proj_swiglu_kernel", "up"),
        ("liger", "_fused_down_proj_kernel", "down"),
        ("liger", "_moe_bwd_down_proj_kernel", "dH"),
        ("liger", "_moe_bwd_dW1_kernel", "dW1"),
        ("liger", "_moe_bwd_dX_expanded_kernel", "dX"),
        ("liger", "_token_gather_weighted_sum_kernel", "aggregation"),
        ("megatron", "_permute_kernel", "gather"),
        ("megatron", "_unpermute_kernel", "aggregation"),
        ("megatron", "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "gemm"),
    ],
)
def test_kernel_roles(name: str, kernel: str, role: str) -> None:
    assert PLUGINS[name].kernel_role(kernel) == role


@every_plugin
def test_a_layer_goes_by_the_weights_that_it_is_given(name: str) -> None:
    """As while training, where FSDP-2 hands out other tensors in each forward."""
    given, other = (
        make_problem(Point("moe_layer", name, MoEShape.parse("40,64,32,4,2"), routing=RoutingSpec(seed=seed)), "cpu")
        for seed in (0, 1)
    )
    weights = [w.detach().clone().requires_grad_() for w in PLUGINS[name].build(given).parameters()]
    bound = Bound(PLUGINS[name].build(other), len(weights), name)
    bound.use(weights)
    out = bound.layer.forward(given.x)
    assert torch.equal(out, PLUGINS[name].build(given).forward(given.x))
    assert all(grad.any() for grad in torch.autograd.grad(out, weights, given.grad_output))

"""The Triton layer inside the model that `moebench train` trains, on the interpreter, beside the loop over experts."""

from __future__ import annotations

import pytest
import torch

from harness.registry import default_registry
from harness.training.config import Config, load_config
from harness.training.model import Transformer
from implementations.sonicmoe_triton import SonicMoETriton


def small(**changes: object) -> Config:
    sizes = {
        "layers": 1,
        "d": 16,
        "heads": 2,
        "n": 8,
        "E": 6,
        "sequence": 20,
        "batch": 2,
        "micro_batch": 2,
        "m_tile": 8,
    }
    return load_config("tiny", {**sizes, **changes})


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SonicMoETriton, "devices", ("cpu",))
    monkeypatch.setattr(SonicMoETriton, "dtypes", ("float32",))


@pytest.mark.parametrize("routing", ["top_k", "nearest", "expert_choice"])
def test_it_trains_as_the_loop_does(routing: str) -> None:
    drawn = torch.randint(256, (2, 21), generator=torch.Generator().manual_seed(0))
    found = {}
    for name in ("torch_loop", "sonicmoe_triton"):
        model = Transformer(
            small(routing=routing, implementation=name), default_registry().get(name), torch.device("cpu")
        )
        loss, balance = model(drawn[:, :-1], drawn[:, 1:])
        (loss + balance).backward()
        experts = model.blocks[0].experts
        router = experts.router if experts.given else experts.weights[-1]
        grads = {key: p.grad for key, p in model.named_parameters() if ".weights." not in key}
        down = experts.weights[2 if name == "torch_loop" else 1].grad
        with torch.no_grad():
            evaluated = model.eval()(drawn[:, :-1], drawn[:, 1:])[0]
        found[name] = loss, balance, evaluated, router.grad, down, grads
    torch.testing.assert_close(found["sonicmoe_triton"], found["torch_loop"], rtol=1e-3, atol=1e-6)
    assert found["torch_loop"][3].abs().max() > 1e-4


def test_the_routers_logits_cost_no_second_product(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(implementation="sonicmoe_triton")
    model = Transformer(config, default_registry().get("sonicmoe_triton"), torch.device("cpu"))
    experts = model.blocks[0].experts
    monkeypatch.setattr(experts, "_router_of", None)
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(1))
    out, balance = experts(x)
    layer = experts.training_layer.layer
    torch.testing.assert_close(out, layer.forward(x))
    assert 1 <= balance.item() < 3

"""The parts of training: model, experts, routing, data, configurations, costs, rows; on one process, without FSDP."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.errors import UserError
from harness.record import validate
from harness.registry import default_registry
from harness.sweep import load_sweep
from harness.token_rounding import TOP_K
from harness.training import costs, rows
from harness.training.config import FREE, Config, configuration_names, difference, load_config
from harness.training.data import Corpus, HubStream, PythonText, open_corpus, python_text
from harness.training.experts import Bound, load_balancing_loss
from harness.training.loop import learning_rate
from harness.training.model import Transformer, rotary_table, rotate
from harness.training.processes import Sharding

CPU = torch.device("cpu")


def tiny(**changes: Any) -> Config:
    return load_config("tiny", changes)


def model_of(config: Config) -> Transformer:
    return Transformer(config, default_registry().get(config.implementation), CPU)


def tokens(config: Config, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(config.vocabulary, (config.micro_batch, config.sequence + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


# The load-balancing loss.


def test_an_even_router_has_a_balance_of_one() -> None:
    logits = torch.eye(4).repeat(5, 1) + torch.eye(4).roll(1, 1).repeat(5, 1)
    assert load_balancing_loss(logits, 2).item() == pytest.approx(1.0)


def test_a_router_that_sends_all_to_one_expert_has_the_most() -> None:
    assert load_balancing_loss(torch.tensor([[50.0, 0.0, 0.0, 0.0]] * 3), 1).item() == pytest.approx(4.0)


def test_gradient_of_the_balance() -> None:
    logits = torch.randn(12, 6, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    # By the definition, with the shares held fixed; the loss itself is in fp32.
    chosen = torch.zeros_like(logits).scatter(1, logits.topk(2).indices, 1.0).detach()
    (expected,) = torch.autograd.grad(6 * (chosen.sum(0) / 24 * logits.softmax(1).mean(0)).sum(), logits)
    (found,) = torch.autograd.grad(load_balancing_loss(logits, 2), logits)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)
    assert expected.abs().max() > 1e-3


def test_the_balance_is_that_of_our_layer() -> None:
    pytest.importorskip("triton")
    from implementations.sonicmoe_triton import RouterOutput
    from implementations.sonicmoe_triton import load_balancing_loss as ours

    logits = torch.randn(20, 8, generator=torch.Generator().manual_seed(2))
    counts = torch.bincount(logits.topk(3).indices.flatten(), minlength=8).int()
    torch.testing.assert_close(load_balancing_loss(logits, 3), ours(RouterOutput(logits, counts)))


def test_the_balance_moves_the_router() -> None:
    config = tiny()
    model = model_of(config)
    _, balance = model(*tokens(config))
    balance.backward()
    experts = model.blocks[-1].experts  # of the others' weights the last router's logits are made
    router = experts.weights[2]
    assert router.shape == (config.E, config.d) and router.grad.abs().max() > 0
    assert experts.weights[1].grad is None


# The experts in the model.


@pytest.mark.parametrize("name", ["torch_loop", "torch_grouped_mm", "template"])
def test_every_implementation_starts_from_the_same_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from implementations._template import TemplateMoE

    expected = model_of(tiny())
    plugin = TemplateMoE() if name == "template" else default_registry().get(name)
    found = Transformer(tiny(implementation=name), plugin, CPU)
    ends = []
    for model in (expected, found):
        loss, balance = model(*tokens(tiny()))
        (loss + balance).backward()
        grads = {key: p.grad for key, p in model.named_parameters() if "experts.weights" not in key}
        ends.append((loss, balance, grads))
    torch.testing.assert_close(ends[1][0], ends[0][0])
    torch.testing.assert_close(ends[1][1], ends[0][1])
    assert set(ends[1][2]) == set(ends[0][2])
    torch.testing.assert_close(ends[1][2], ends[0][2], rtol=1e-3, atol=1e-6)


def test_a_layer_in_bfloat16_trains_float32_weights() -> None:
    model = model_of(tiny(dtype="bfloat16"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


class Holding:
    """A layer that holds its weight in a list within a dict, a module, and as an attribute; or in a tuple."""

    def __init__(self, kind: str) -> None:
        weight = torch.nn.Parameter(torch.ones(2))
        if kind == "tuple":
            self.kept = (weight,)
        elif kind == "module":
            self.kept = torch.nn.ParameterList([weight])
        else:
            self.kept = {"inner": [weight]}
            self.again = weight
        self.get = lambda: self.kept["inner"][0] if kind == "list" else self.kept[0]

    def parameters(self) -> list[Tensor]:
        return [self.get()]


@pytest.mark.parametrize("kind", ["list", "module"])
def test_weights_are_found_where_a_layer_holds_them(kind: str) -> None:
    layer = Holding(kind)
    bound = Bound(layer, 1, "Test")  # type: ignore[arg-type]
    assert layer.parameters()[0].numel() == 0, "the weights that it was built with are kept"
    fresh = torch.nn.Parameter(torch.zeros(2))
    bound.use([fresh])
    assert layer.parameters()[0] is fresh and getattr(layer, "again", fresh) is fresh


def test_weights_that_cannot_be_replaced_are_refused() -> None:
    with pytest.raises(UserError, match="Test cannot be trained: it holds parameter 0"):
        Bound(Holding("tuple"), 1, "Test")  # type: ignore[arg-type]


# Routing while training, top-K in validation.


@pytest.mark.parametrize("routing", ["nearest", "stochastic", "expert_choice", "token_drop"])
def test_validation_goes_by_top_k(routing: str) -> None:
    config = tiny(implementation="torch_loop", routing=routing)
    given = tokens(config)
    model, top_k = model_of(config), model_of(tiny(implementation="torch_loop"))
    with torch.no_grad():
        expected = top_k(*given)[0]
        assert abs(model(*given)[0] - expected) > 1e-5
        torch.testing.assert_close(model.eval()(*given)[0], expected)


@pytest.mark.parametrize("routing", ["nearest", "expert_choice"])
def test_a_routing_trains_every_weight(routing: str) -> None:
    config = tiny(implementation="torch_loop", routing=routing)
    model = model_of(config)
    model(*tokens(config))[0].backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not without


def test_expert_choice_gives_each_expert_as_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(implementation="torch_loop", routing="expert_choice")
    model = model_of(config)
    layer = model.blocks[0].experts.training_layer.layer
    routings = []
    monkeypatch.setattr(layer, "use_routing", lambda routing: routings.append(routing))
    monkeypatch.setattr(layer, "forward", lambda x: x)
    model(*tokens(config))
    counts = torch.bincount(routings[0].experts, minlength=config.E)
    assert counts.tolist() == [config.shape.T * config.K // config.E] * config.E


def test_stochastic_rounding_draws_anew_and_recomputes_alike() -> None:
    config = tiny(implementation="torch_loop", routing="stochastic", recompute=True)
    given = tokens(config)
    model, plain = model_of(config), model_of(replace(config, recompute=False))
    losses, grads = [], []
    for seed, used in ((0, model), (0, plain), (1, plain)):
        torch.manual_seed(seed)
        used.zero_grad()
        loss, _ = used(*given)
        loss.backward()
        losses.append(loss.item())
        grads.append(torch.cat([p.grad.flatten() for p in used.parameters()]))
    assert losses[0] == losses[1] != losses[2]
    torch.testing.assert_close(grads[0], grads[1])


# The transformer.


def test_a_token_sees_none_that_follow_it() -> None:
    config = tiny()
    model = model_of(config).eval()
    given, _ = tokens(config)
    other = given.clone()
    other[:, 40:] = (other[:, 40:] + 1) % 256
    hidden: list[Tensor] = []
    model.norm.register_forward_hook(lambda _module, inputs, _output: hidden.append(inputs[0]))
    with torch.no_grad():
        model(given, given)
        model(other, given)
    torch.testing.assert_close(hidden[0][:, :40], hidden[1][:, :40])
    assert (hidden[0][:, 40:] - hidden[1][:, 40:]).abs().max() > 1e-3


def test_rotated_products_depend_on_the_distance_alone() -> None:
    table = rotary_table(32, 8, 100.0, CPU)
    query, key = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    q, k = (rotate(v.expand(1, 1, 32, 8), table)[0, 0] for v in (query, key))
    products = q @ k.T
    for distance in (0, 3, 17):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert products.diagonal(-3)[0] != pytest.approx(products[0, 0].item(), abs=1e-3)


def test_an_untrained_model_knows_nothing() -> None:
    config = tiny()
    assert model_of(config)(*tokens(config))[0].item() == pytest.approx(math.log(256), abs=0.1)


# Data.


def together(corpora: list[Corpus], step: int) -> list[Tensor]:
    """The micro-batches of a step in the order of their numbers."""
    dealt = [list(corpus.batches(step)) for corpus in corpora]
    return [batch for group in zip(*dealt, strict=True) for batch in group]


def test_data_does_not_depend_on_the_number_of_processes() -> None:
    config = tiny(batch=16)
    one, two = ([PythonText(config, rank, world) for rank in range(world)] for world in (1, 2))
    for step in (0, 7, 1_000_000):
        for a, b in zip(together(one, step), together(two, step), strict=True):
            assert torch.equal(a, b)
    assert not torch.equal(together(one, 0)[0], together(one, 1)[0])
    other = PythonText(replace(config, seed=1), 0, 1)
    assert not torch.equal(together(one, 0)[0], together([other], 0)[0])


def test_an_epoch_holds_every_window_once() -> None:
    config = tiny(sequence=65536, batch=4, micro_batch=2)
    corpus = PythonText(config, 0, 1)
    steps = corpus.windows // 4
    starts = [tuple(row[:200].tolist()) for s in range(steps) for batch in corpus.batches(s) for row in batch]
    assert len(set(starts)) == len(starts) == steps * 4 > 100


def test_training_text_holds_hardly_anything_of_the_validation_text() -> None:
    training, validation = python_text()
    assert len(training) > 5 * len(validation) > 1_000_000
    whole, held_out = bytes(training.numpy()), bytes(validation.numpy())
    probes = [held_out[i : i + 400] for i in range(0, len(held_out) - 400, len(held_out) // 100)]
    # Modules repeat a licence, or a sibling's docstring.
    assert sum(probe in whole for probe in probes) <= 2


def test_validation_is_dealt_out_with_weights() -> None:
    config = tiny(validation_sequences=12)  # three micro-batches
    expected = [batch for batch, _ in PythonText(config, 0, 1).validation()]
    dealt = [list(PythonText(config, rank, 2).validation()) for rank in range(2)]
    assert [len(its) for its in dealt] == [2, 2]
    weighty = [batch for group in zip(*dealt, strict=True) for batch, weight in group if weight]
    assert all(torch.equal(a, b) for a, b in zip(expected, weighty, strict=True))


def test_a_step_must_divide_among_the_processes() -> None:
    with pytest.raises(UserError, match="make --batch a multiple of 12 sequences"):
        open_corpus(tiny(), 0, 3)


class FakeStream:
    """Numbered documents, as `datasets` streams them."""

    def __init__(self, first: int = 0, stride: int = 1, end: int = 4000) -> None:
        self.first, self.stride, self.end, self.given = first, stride, end, 0

    def __iter__(self) -> Iterator[dict[str, str]]:
        while (number := self.first + self.given * self.stride) < self.end:
            self.given += 1
            yield {"text": f"{number} " * (number % 5 + 1)}

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class FakeTokenizer:
    @staticmethod
    def from_pretrained(name: str) -> FakeTokenizer:
        assert name == "gpt2"
        return FakeTokenizer()

    def get_vocab_size(self) -> int:
        return 5000

    def token_to_id(self, token: str) -> int:
        assert token == "<|endoftext|>"
        return 4999

    def encode(self, text: str) -> Any:
        return type("Encoding", (), {"ids": [int(part) for part in text.split()]})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Config:
    """A configuration on a hub whose packages are replaced."""

    def load_dataset(name: str, subset: str | None, split: str, streaming: bool) -> FakeStream:
        assert (name, subset, split, streaming) == ("team/text", "small", "train", True)
        return FakeStream()

    def split_by_node(stream: FakeStream, rank: int, world_size: int) -> FakeStream:
        return FakeStream(stream.first + rank, world_size, stream.end)

    modules = {
        "datasets": {"load_dataset": load_dataset},
        "datasets.distributed": {"split_dataset_by_node": split_by_node},
        "tokenizers": {"Tokenizer": FakeTokenizer},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return tiny(corpus="team/text:small", vocabulary=5000, sequence=8, batch=4, micro_batch=1)


def test_a_stream_goes_on_where_it_stopped(hub: Config) -> None:
    undisturbed, stopped = HubStream(hub, 1, 2), HubStream(hub, 1, 2)
    expected = [batch for step in range(6) for batch in undisturbed.batches(step)]
    found = [batch for step in range(3) for batch in stopped.batches(step)]
    state = stopped.state()
    again = HubStream(hub, 1, 2)
    again.restore(state)
    found += [batch for step in range(3, 6) for batch in again.batches(step)]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    flat = torch.cat(expected)
    assert torch.equal(flat[:-1, -1], flat[1:, 0]), "sequences follow each other by one token"
    with pytest.raises(UserError, match="continue with as many, not 3"):
        HubStream(hub, 0, 3).restore(state)


def test_a_streams_documents_go_to_one_place_each(hub: Config) -> None:
    seen = []
    for corpus in (HubStream(hub, rank, 2) for rank in range(2)):
        seen.append({int(t) for step in range(120) for b in corpus.batches(step) for t in b.flatten()} - {4999})
    corpus = HubStream(replace(hub, validation_sequences=4), 0, 1)
    validation, again = ({int(t) for b, _ in corpus.validation() for t in b.flatten()} - {4999} for _ in range(2))
    assert validation == again and max(validation) < max(seen[0] | seen[1]), "none were passed over"
    assert all(seen) and validation and not (seen[0] & seen[1]) and not (validation & (seen[0] | seen[1]))


def test_what_a_stream_needs(hub: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="vocabulary = 256: the corpus team/text:small needs 5000"):
        HubStream(replace(hub, vocabulary=256), 0, 1)
    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", lambda *_, **__: open("/nowhere/at/all"))
    with pytest.raises(UserError, match="corpus team/text:small: cannot be opened"):
        HubStream(hub, 0, 1)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"needs the package tokenizers: pip install -e '.\[training\]'"):
        HubStream(hub, 0, 1)


# Configurations and costs.


def test_the_papers_configurations_have_the_papers_layers_and_names() -> None:
    paper = {str(point.shape) for point in load_sweep("paper_layers", default_registry()).points}
    for name, size in (("1.4B", 1.4e9), ("7B", 7e9)):
        config = load_config(name)
        assert str(config.shape) in paper
        assert costs.parameters(config) == pytest.approx(size, rel=0.02)


def test_the_sparse_one_has_as_many_parameters_and_two_tiles_an_expert() -> None:
    config = load_config("1.4B-sparse")
    assert costs.parameters(config) == pytest.approx(1.4e9, rel=0.01)
    assert config.shape.T * config.K == 2 * 128 * config.E


@pytest.mark.parametrize("name", configuration_names())
def test_configurations_load(name: str) -> None:
    assert load_config(name).name == name


def test_parameters_are_counted() -> None:
    config = tiny()
    assert costs.parameters(config) == sum(p.numel() for p in model_of(config).parameters())


def test_model_flops_by_hand() -> None:
    config = tiny()
    block = 3 * 2 * 32 * 64 + 8 * 64 + 4 * 64 * 64
    assert costs.active_parameters(config) == 2 * block + 256 * 64
    assert costs.model_flops(config) == 6 * (2 * block + 256 * 64) + 6 * 2 * 64 * 64
    seven = load_config("7B")
    per_s = costs.utilisation(seven, 1e5, 2, "NVIDIA H200")
    assert per_s == pytest.approx(1e5 * costs.model_flops(seven) / (2 * 989.4e12))
    assert costs.utilisation(seven, 1e5, 2, None) is None and costs.utilisation(seven, 1e5, 2, "unheard of") is None


def test_the_learning_rate_rises_and_falls() -> None:
    config = tiny()
    rates = [learning_rate(config, step) for step in range(config.steps)]
    assert rates[0] == pytest.approx(6e-4) and max(rates) == pytest.approx(6e-3) == rates[config.warmup]
    assert rates[-1] == pytest.approx(6e-4)
    assert all(a < b for a, b in pairwise(rates[:10])) and all(a > b for a, b in pairwise(rates[10:]))


def test_a_configuration_of_ones_own(tmp_path: Path) -> None:
    text = (Path(costs.__file__).parent / "configurations" / "tiny.toml").read_text()
    path = tmp_path / "mine.toml"
    for old, new, said in (
        ("layers = 2", "layer = 2", r"unknown field 'layer'.*did you mean layers"),
        ("layers = 2\n", "", "lacks layers"),
        ("layers = 2", "layers = 2.5", "layers = 2.5 must be of type int"),
        ("layers = 2", "layers = ", "not valid TOML"),
        ("layers = 2", f"layers = {2**64}", r"model\.layers: a whole number beyond 64 bits"),
        ("heads = 4", "heads = 5", "d = 64 must divide into heads = 5"),
        ("warmup = 10", "warmup = 10\nlayers = 2", "layers is given twice"),
        ("K = 2", "K = 9", "K=9 experts per token exceed"),
    ):
        path.write_text(text.replace(old, new))
        with pytest.raises(UserError, match=said):
            load_config(str(path))
    path.write_text(text)
    assert replace(load_config(str(path)), name="tiny") == tiny()


def test_what_makes_a_checkpoint_another_runs() -> None:
    saved = tiny().as_dict()
    assert difference(saved, tiny(recompute=True, shard=2, checkpoint_every=7, keep=9)) is None
    assert difference(saved, tiny(layers=3)) == "layers = 2 there, 3 here"
    assert set(saved) >= FREE


def test_parameters_are_divided_evenly_where_they_can_be() -> None:
    sharding = object.__new__(Sharding)
    for world, shape, dim in ((64, (128, 512, 1536), 0), (96, (128, 512, 1536), 2), (96, (1000, 7), 0)):
        sharding.over = world
        assert sharding._along(torch.nn.Parameter(torch.empty(shape, device="meta"))).dim == dim


# Rows.


def step_row(**training: Any) -> dict[str, Any]:
    config = tiny()
    plugin = default_registry().get(config.implementation)
    row = rows.measured_row(rows.base_row(config, plugin, 1, "cpu"), config, 1, [5.0, 4.0], 2.5, None, None, [], None)
    row["training"] |= training
    return row


def test_rows_of_steps_are_valid_and_apart() -> None:
    assert validate(step_row()) == []
    variants = {
        rows.variant(replace(tiny(), **changes), world)
        for world in (1, 2)
        for changes in ({}, {"layers": 3}, {"recompute": True}, {"batch": 16}, {"steps": 9})
    }
    assert len(variants) == 10
    said = [rows.variant(tiny(shard=shard), 4) for shard in (0, 4, 2)]
    assert said[0] == said[1] and [rows.asked(text).shard for text in said] == [0, 0, 2]
    assert rows.asked(said[2]).rest == "8 sequences, sharded over 2"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tokens_per_s": 0.0}, "training.tokens_per_s 0.0: must be greater than zero"),
        ({"mfu": "much"}, "training.mfu: must be a number"),
        ({"layers": 0}, "training.layers 0: must be at least 1"),
        ({"loss": None}, "training.loss: missing"),
        ({"more": 1}, "training: must be an object with"),
    ],
)
def test_rows_of_steps_that_are_refused(wrong: dict[str, Any], said: str) -> None:
    assert any(problem.startswith(said) for problem in validate(step_row(**wrong)))


def test_rates_come_from_times() -> None:
    row = step_row()
    for key in ("tokens_per_s", "tokens_per_day_per_gpu"):
        assert f"training.{key}: missing" in validate(step_row(**{key: None}))
        alone = {name: value for name, value in row.items() if name != "latency_ms"}
        assert f"training.{key} {row['training'][key]!r}: must be null without latency_ms" in validate(alone)


def test_training_numbers_belong_to_training_steps() -> None:
    row = step_row()
    assert "training: belongs to the operation training_step only" in validate({**row, "operation": "moe_layer"})
    row.pop("training")
    assert "training: missing" in validate(row)
    config = tiny()
    base = rows.base_row(config, default_registry().get(config.implementation), 1, "cpu")
    assert validate(rows.failed_row(base, "out_of_memory", "no memory")) == []


def test_top_k_is_the_default() -> None:
    assert {load_config(name).routing for name in configuration_names()} == {TOP_K}

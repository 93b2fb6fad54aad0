"""A plugin's layer as a torch module inside a model.

A plugin's `Layer` owns its weights. Here they become parameters of a module, in the plugin's own layout, so that
FSDP-2 may shard them, cast them and hand them back for the time of a forward: before each forward the layer is given
the tensors to go by, wherever it holds its own. Every implementation starts from the same weights: they are drawn in
canonical layout in float32 and laid out by the plugin's own `build`.
"""

from __future__ import annotations

import types
import zlib
from collections.abc import Callable, MutableMapping, MutableSequence, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from harness.errors import UserError
from harness.interface import DTYPES, Implementation, Layer, Point, Problem, RoutingSpec
from harness.registry import refusal
from harness.routing import expert_counts
from harness.token_rounding import TOP_K, route_by
from harness.training.config import Config


def draw(seed: int, name: str, size: Sequence[int], std: float, device: torch.device) -> Tensor:
    """Normal numbers, float32, that depend on seed, name and kind of device alone: not on what else is drawn."""
    generator = torch.Generator(device=device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.empty(*size, device=device).normal_(0.0, std, generator=generator)


def load_balancing_loss(logits: Tensor, k: int) -> Tensor:
    """E · Σ_e f_e · p_e (Switch Transformer, arXiv 2101.03961, eq. 4, over K choices): f_e is expert e's share of all
    top-K pairs, p_e its mean probability. 1 for a perfectly even router; a scalar in fp32, differentiable by p_e.

    Args:
        logits: (T, E), the router's; T at least 1.
    """
    tokens, experts = logits.shape
    logits = logits.float()
    share = expert_counts(torch.topk(logits.detach(), k, dim=-1).indices, experts) / (tokens * k)
    return experts * (share * torch.softmax(logits, dim=-1).mean(0)).sum()


class Bound:
    """A layer whose `parameters` can be replaced.

    Raises:
        UserError: a parameter does not lie in an attribute, dict or list of the layer or of what it holds.
    """

    def __init__(self, layer: Layer, count: int, label: str) -> None:
        """
        Args:
            count: how many of `parameters`, the first ones, are replaced.
            label: the implementation's, for messages.
        """
        self.layer = layer
        given = list(layer.parameters())[:count]
        self._places = _places(layer, given)
        if not all(self._places):
            raise UserError(
                f"{label} cannot be trained: it holds parameter {self._places.index([])} where it cannot be replaced; "
                "keep it in an attribute of the layer or of a module in it"
            )
        self.release(given)
        if any(own is other for own, other in zip(layer.parameters(), given, strict=False)):
            raise UserError(f"{label} cannot be trained: its layer's `parameters` are copies of what it computes with")

    def use(self, weights: Sequence[Tensor]) -> None:
        """Let the layer go by these tensors: order, shapes and layout of `parameters`."""
        for places, weight in zip(self._places, weights, strict=True):
            for holder, key in places:
                holder[key] = weight

    def release(self, weights: Sequence[Tensor]) -> None:
        """Let go of the tensors that the layer was built with."""
        self.use([nn.Parameter(weight.new_empty(0), requires_grad=False) for weight in weights])


def _places(layer: Layer, parameters: Sequence[Tensor]) -> list[list[tuple[Any, Any]]]:
    """Of each parameter the dicts (those of attributes, too) and lists that hold it, with its key there."""
    numbers = {id(parameter): i for i, parameter in enumerate(parameters)}
    found: list[list[tuple[Any, Any]]] = [[] for _ in parameters]
    waiting: list[Any] = [layer]
    seen: set[int] = set()
    while waiting:
        holder = waiting.pop()
        if id(holder) in seen or isinstance(holder, (Tensor, type, types.ModuleType, types.FunctionType)):
            continue
        if type(holder).__module__.startswith("triton"):  # a kernel: knows the globals of its module, and no weights
            continue
        seen.add(id(holder))
        if isinstance(holder, MutableMapping):
            entries = list(holder.items())
        elif isinstance(holder, MutableSequence) and not isinstance(holder, bytearray):
            entries = list(enumerate(holder))
        elif isinstance(holder, tuple):
            waiting += holder
            continue
        else:
            waiting += [vars(holder)] if hasattr(holder, "__dict__") else []
            continue
        for key, value in entries:
            if id(value) in numbers:
                found[numbers[id(value)]].append((holder, key))
            else:
                waiting.append(value)
    return found


class MoE(nn.Module):
    """The MoE layer of one block, by any implementation: (T, d) -> (T, d) and the load-balancing loss.

    Trains with the configuration's routing, evaluates with top-K. A routing that the plugin's whole layer does not
    offer goes through its ``routed_experts``, where it has them: logits and routing are then PyTorch's
    (`harness.token_rounding`), whose counting waits for the device.

    The loss needs the router's logits. Where the plugin hands them out, they cost nothing but being kept; else they are
    multiplied once more: 2TEd FLOPs forward, 4TEd backward, and a second top-K.

    Attributes:
        weights: in the plugin's layout, float32.
        router: (E, d), float32, with ``routed_experts``; else among ``weights``.
    """

    def __init__(self, config: Config, plugin: Implementation, number: int, device: torch.device) -> None:
        """
        Args:
            number: of the block, counted from 0.

        Raises:
            UserError: the implementation cannot run here, has no such routing, or cannot be trained.
        """
        super().__init__()
        self.config = config
        self.given = operation_of(plugin, config) == "routed_experts"
        canonical = _canonical(config, number, device)
        training = self._build(config, plugin, canonical, config.routing)
        built = list(training.parameters())
        count = len(built) - self.given
        self.weights = nn.ParameterList(nn.Parameter(w.detach().to(torch.float32, copy=True)) for w in built[:count])
        # Rounded once, as the weights are that went through the plugin's dtype.
        router = canonical["router"].to(DTYPES[config.dtype]).float()
        self.router = nn.Parameter(router) if self.given else None
        self._router_of = self._find_router(training)
        self.notes = list(training.notes)
        self.training_layer = self.evaluation_layer = Bound(training, count, plugin.label)
        if not self.given and config.routing != TOP_K:
            evaluation = self._build(config, plugin, canonical, TOP_K)
            self.evaluation_layer = Bound(evaluation, count, plugin.label)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(T, d) -> (T, d), and the load-balancing loss, a scalar in fp32."""
        bound = self.training_layer if self.training else self.evaluation_layer
        bound.use(list(self.weights))
        layer, config = bound.layer, self.config
        found = None if self.given else layer.forward_with_router(x)
        if found is not None:
            out, logits = found
            return out, load_balancing_loss(logits, config.K)
        logits = x @ (self._router_of() if self.router is None else self.router).T
        if self.given:
            layer.use_routing(route_by(logits, config.K, config.routing if self.training else TOP_K, config.m_tile))
        return layer.forward(x), load_balancing_loss(logits, config.K)

    @staticmethod
    def _build(config: Config, plugin: Implementation, canonical: dict[str, Tensor], routing: str) -> Layer:
        """The plugin's layer from these weights, on random tokens, on which it may compile and tune."""
        device = canonical["router"].device
        point = point_of(plugin, config, device.type, routing)
        dtype = DTYPES[config.dtype]
        tokens = draw(config.seed, "tokens", (2, config.shape.T, config.d), 1.0, device).to(dtype)
        gate, up, down, router = (canonical[name].to(dtype, copy=True) for name in ("gate", "up", "down", "router"))
        problem = Problem(point, tokens[0], gate, up, down, router, grad_output=tokens[1])
        if point.operation == "routed_experts":
            logits = problem.x @ problem.router.T
            problem = replace(problem, routing=route_by(logits, config.K, routing, config.m_tile))
        return plugin.build(problem)

    def _find_router(self, layer: Layer) -> Callable[[], Tensor]:
        """How to get at the router (E, d): a parameter as it is, or what the plugin makes of its parameters."""
        built = [parameter.detach() for parameter in layer.parameters()]
        router = layer.canonical_gradients(built).get("grad_router")
        for i, weight in enumerate(built):
            if router is not None and weight.data_ptr() == router.data_ptr() and weight.shape == router.shape:
                return lambda: self.weights[i]
        return lambda: layer.canonical_gradients(list(self.weights))["grad_router"]


def operation_of(plugin: Implementation, config: Config) -> str:
    """Whether the plugin's whole layer trains with the configuration's routing, or its experts with a routing given.

    A plugin's ``stochastic`` rounding draws the same numbers in every call, so that its rows can be repeated; training
    needs others each time, and gives it the routing where that can be.
    """
    own = config.routing in plugin.routing_methods and "moe_layer" in plugin.operations
    if own and not (config.routing == "stochastic" and "routed_experts" in plugin.operations):
        return "moe_layer"
    return "routed_experts" if "routed_experts" in plugin.operations else "moe_layer"


def point_of(plugin: Implementation, config: Config, device: str, routing: str) -> Point:
    """The MoE layer as the plugin is asked for it.

    Raises:
        UserError: the implementation is not installed, or does not offer this.
    """
    operation = operation_of(plugin, config)
    spec = RoutingSpec(routing, seed=config.seed, m_tile=config.m_tile)
    point = Point(operation, plugin.name, config.shape, config.dtype, routing=spec, device=device)
    refused = refusal(plugin, point)
    if refused:
        raise UserError(f"--implementation {plugin.name}: {refused[1]}")
    return point


def _canonical(config: Config, number: int, device: torch.device) -> dict[str, Tensor]:
    """Weights of one layer, float32: of variance 1 / fan-in, the last ones smaller by the root of twice the number of
    blocks, since each block adds two terms to the residual stream (GPT-2's rule)."""
    E, n, d = config.E, config.n, config.d

    def normal(name: str, *size: int, std: float) -> Tensor:
        return draw(config.seed, f"block {number} {name}", size, std, device)

    return {
        "gate": normal("gate", E, n, d, std=d**-0.5),
        "up": normal("up", E, n, d, std=d**-0.5),
        "down": normal("down", E, d, n, std=(2 * config.layers * n) ** -0.5),
        "router": normal("router", E, d, std=d**-0.5),
    }

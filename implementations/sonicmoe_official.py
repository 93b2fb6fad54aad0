"""SonicMoE as its authors publish it: grouped GEMMs in CuTe DSL (quack), routing and aggregation in Triton."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.documents import load_json
from harness.errors import UserError
from harness.interface import KERNELS, Implementation, Layer, Point, Problem
from harness.shapes import MoEShape
from harness.token_rounding import GeneralRouting
from harness.tuners import QUACK_CACHE, take_first, tiles_note
from implementations import _sonicmoe_official_kernels

#: Part of a kernel's name (lower case) -> role; the first match wins. Down, dX, dW1 and dW2 are one kernel class,
#: whose names differ by tile only; the aggregation kernel also sums dX; torch's small kernels permute S and dS.
ROLES = {"gemmgated": "up", "gemmdgated": "dH", "gemmdefault": "grouped_gemm", "token_gather_sum": "aggregation"}
ROLES |= {"cudafunctor_add": "dX", "memset": "fill"}
ROLES |= dict.fromkeys(("topk", "partial_sum", "metadata", "searchsorted", "at::native", "cub::"), "router")
ROLES |= dict.fromkeys(("nvjet", "gemm", "cublas"), "router")
#: Router convention -> (softmax over the chosen logits only, divide the chosen probabilities by their sum).
CONVENTIONS = {
    "topk_softmax": (True, False),
    "softmax_topk": (False, False),
    "softmax_topk_renormalised": (False, True),
}


#: The table's lists, with what each of their entries must have: (key, type).
_ENTRIES: dict[str, tuple[tuple[str, type], ...]] = {
    "aggregation": (("key", list), ("config", dict)),
    "winners": (("shape", str), ("gemm", str), ("file", str), ("key", list), ("configs_timings", list)),
}


def committed_tuning(gpu: str) -> tuple[Path, dict[str, Any]]:
    """The committed tile choices for a GPU: where they lie below the repository's root, and what they say; nothing
    where there are none.

    Raises:
        UserError: the file is not such a table; the message names it.
    """
    root = Path(__file__).resolve().parent.parent
    path = root / "results" / gpu.lower().replace(" ", "_") / "tuning" / "sonicmoe_official.json"
    return path.relative_to(root), read_tuning(path) if path.is_file() else {}


def read_tuning(path: Path) -> dict[str, Any]:
    """The table in a file. Raises `UserError` as `committed_tuning`."""
    table = load_json(path)
    if not isinstance(table, dict) or not isinstance(table.get("packages"), dict):
        raise UserError(f"{path}: no table of tuned tiles: must be an object with the packages' versions")
    for name, wanted in _ENTRIES.items():
        entries = table.get(name, [])
        if not isinstance(entries, list):
            raise UserError(f"{path}: {name}: must be a list")
        for number, entry in enumerate(entries, 1):
            for key, kind in wanted:
                if not isinstance(entry, dict) or not isinstance(entry.get(key), kind):
                    raise UserError(f"{path}: {name}[{number}]: {key} is missing or malformed")
    for number, winner in enumerate(table.get("winners", []), 1):
        if type(winner.get("routed_rows", 0)) is not int:
            raise UserError(f"{path}: winners[{number}]: routed_rows is malformed")
        try:
            winner_of(winner)
        except UserError as error:
            raise UserError(f"{path}: winners[{number}]: {error}") from None
    return table


def cache_folder() -> Path:
    """Where quack keeps its choices and compiled kernels. It reads the folder's name while it is imported, and each
    entry when its shapes first occur."""
    return Path(os.environ.setdefault("QUACK_CACHE_DIR", str(Path.home() / ".cache" / "moebench" / "quack")))


def rows_of(problem: Problem) -> int:
    """How many routed rows a problem's grouped GEMMs have."""
    return problem.shape.routed_rows if problem.routing is None else problem.routing.experts.numel()


def winner_of(winner: Mapping[str, Any]) -> tuple[str, int]:
    """What layer a tile in the table was chosen for: its shape, and its number of routed rows, of which an entry says
    nothing where they are those of top-K."""
    shape = MoEShape.parse(winner["shape"])
    return str(shape), int(winner.get("routed_rows", shape.routed_rows))


def winners_at(tuning: Mapping[str, Any], shape: MoEShape, rows: int) -> list[dict[str, Any]]:
    """The tiles for a shape with so many routed rows; every number of rows is another problem to quack's tuner."""
    return [winner for winner in tuning.get("winners", ()) if winner_of(winner) == (str(shape), rows)]


class SonicMoEOfficialLayer(Layer):
    """The functional layer in training mode. Weights: rows g0, u0, g1, u1, ... (E, 2n, d); down (E, d, n)."""

    def __init__(self, problem: Problem) -> None:
        from sonicmoe import moe_TC_softmax_topk_layer
        from sonicmoe.functional import TC_Softmax_Topk_Router_Function

        self.layer, self.choose = moe_TC_softmax_topk_layer, TC_Softmax_Topk_Router_Function.apply
        self.k, self.flags = problem.shape.K, CONVENTIONS[problem.point.layer.router_convention]
        self.gate_up = torch.stack((problem.gate, problem.up), dim=2).flatten(1, 2).requires_grad_()
        self.down, self.router = problem.down.detach().requires_grad_(), problem.router.detach().requires_grad_()
        self.stream = torch.cuda.current_stream().cuda_stream

    def parameters(self) -> Sequence[Tensor]:
        return [self.gate_up, self.down, self.router]

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.gate_up.permute(1, 2, 0), self.down.permute(1, 2, 0)
        # False: training, so the pre-activation H is stored for the backward.
        out: Tensor = self.layer(
            x, self.router, up, None, down, None, self.k, self.stream, "swiglu", False, *self.flags
        )[0]
        return out

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        up, down, router = gradients
        return {"grad_gate": up[:, 0::2], "grad_up": up[:, 1::2], "grad_down": down, "grad_router": router}

    def expert_indices(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            indices: Tensor = self.choose(F.linear(x, self.router), self.router.shape[0], self.k, *self.flags)[1]
        return indices.long()


class SonicMoEOfficialExperts(Layer):
    """The package's path for general routing, pairs ordered by token. Weights as above; scores (P,)."""

    def __init__(self, problem: Problem) -> None:
        from sonicmoe import moe_general_routing_inputs
        from sonicmoe.enums import ActivationType

        routing = problem.routing
        assert routing is not None
        self.layer, self.activation, self.count = moe_general_routing_inputs, ActivationType.SWIGLU, problem.shape.E
        self.gate_up = torch.stack((problem.gate, problem.up), dim=2).flatten(1, 2).requires_grad_()
        self.down = problem.down.detach().requires_grad_()
        self.use_routing(routing._replace(scores=routing.scores.detach().requires_grad_()))
        self.stream = torch.cuda.current_stream().cuda_stream

    def use_routing(self, routing: GeneralRouting) -> None:
        self.scores, self.experts = routing.scores, routing.experts
        tokens = torch.arange(routing.token_offsets.numel() - 1, device=self.experts.device, dtype=torch.int32)
        self.tokens = torch.repeat_interleave(tokens, routing.token_offsets.long().diff())

    def parameters(self) -> Sequence[Tensor]:
        return [self.gate_up, self.down, self.scores]

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.gate_up.permute(1, 2, 0), self.down.permute(1, 2, 0)
        pairs = (self.scores, self.tokens, self.experts)
        out: Tensor = self.layer(x, *pairs, up, None, down, None, self.count, self.stream, self.activation, False)[0]
        return out

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        up, down, scores = gradients
        return {"grad_gate": up[:, 0::2], "grad_up": up[:, 1::2], "grad_down": down, "grad_scores": scores}


class SonicMoEOfficial(Implementation):
    name = "sonicmoe_official"
    label = "SonicMoE (official)"
    upstream = "https://github.com/Dao-AILab/sonic-moe"
    licence = "Apache-2.0"
    requires = dict.fromkeys(
        ("sonicmoe", "quack", "cutlass", "tvm_ffi"),
        "pip install --no-deps -r requirements/sonicmoe_official.txt (Python >= 3.12)",
    )
    distributions = ("sonic-moe", "quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi", "triton")
    operations = ("moe_layer", "routed_experts", *KERNELS)
    conventions = tuple(CONVENTIONS)
    kernel_roles = tuple(ROLES.items())

    def restriction(self, point: Point) -> str | None:
        shape = point.shape
        if shape.T == 0:
            return "SonicMoE (official) launches an empty grid without tokens: T must be at least 1"
        if shape.d % 8 or shape.n % 8:
            return f"SonicMoE (official) needs rows of whole 16 bytes: d={shape.d} and n={shape.n} must divide by 8"
        if shape.K > 1024 or shape.E > 32768:
            return f"SonicMoE (official) routes to at most K=1024 of E=32768 experts, not K={shape.K} of E={shape.E}"
        # Rounding up adds less than a tile to each expert.
        most = shape.routed_rows + (point.routing.method != "top_k") * shape.E * (point.routing.m_tile - 1)
        if (elements := most * shape.d) > 2**32:
            return f"SonicMoE (official) aggregates with 32-bit offsets, but T*K*d={elements} is more than 2^32"
        return None

    def build(self, problem: Problem) -> Layer:
        shape = problem.shape
        path, tuning = committed_tuning(torch.cuda.get_device_name())
        cache = cache_folder()
        winners = winners_at(tuning, shape, rows_of(problem))
        for winner in winners:
            entry = cache / winner["file"]
            entry.parent.mkdir(parents=True, exist_ok=True)
            fresh = entry.with_suffix(f".{os.getpid()}")
            fresh.write_text(json.dumps(winner))
            fresh.replace(entry)
        before = set(cache.glob("*/*.autotune.json"))
        untimed = take_first("quack.autotuner")

        layer: Layer
        if problem.forward_only:
            layer = _sonicmoe_official_kernels.build(problem, CONVENTIONS[problem.point.layer.router_convention])
            path_note = "upstream's kernel as its layer calls it, the routing's metadata made before"
        elif problem.routing is not None:
            layer = SonicMoEOfficialExperts(problem)
            path_note = "upstream's path for general routing, its sorting of the pairs included, in training mode"
        else:
            layer = SonicMoEOfficialLayer(problem)
            path_note = "functional layer in training mode, without the load-balancing loss of upstream's module"
        import triton
        from sonicmoe.functional.reduction_over_k_gather import token_gather_sum_kernel as aggregation

        for choice in tuning.get("aggregation", ()):
            aggregation.cache[tuple(choice["key"])] = triton.Config(**choice["config"])
        aggregation.cache_results = True  # another width or K is then timed once on a machine, not in every process
        layer.call_once(problem)

        tuned = len(set(cache.glob("*/*.autotune.json")) - before)
        source = path if winners else QUACK_CACHE
        tiles = tiles_note(tuned, source)
        if untimed:
            tiles = "tiles of the six GEMMs: the first of the tuner's that ran, none timed"
        layer.notes = [path_note, tiles]
        routes = problem.point.operation in ("moe_layer", "topk_router")
        if routes and (shape.E % 8 or shape.E > 4096 or shape.K > 16):
            layer.notes.append("top-K by torch: upstream's own kernel takes E % 8 = 0, E <= 4096 and K <= 16")
        return layer

"""A complete plugin to copy: `cp implementations/_template.py implementations/my_moe.py`, then change each CHANGE.

Files with a leading underscore are not registered, all others are. Import only the standard library, torch and the
harness up here; import your own package inside `build`. Then: `moebench check my_moe`.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.interface import Implementation, Layer, Point, Problem
from harness.routing import router_scores


class _TemplateLayer(Layer):
    def __init__(self, problem: Problem) -> None:
        self.k = problem.shape.K
        # CHANGE: copy the weights into your layout here (e.g. torch.cat([gate, up], 1)); detached leaves, not timed.
        weights = (problem.gate, problem.up, problem.down, problem.router)
        self.gate, self.up, self.down, self.router = (w.detach().requires_grad_() for w in weights)

    def parameters(self) -> Sequence[Tensor]:
        return [self.gate, self.up, self.down, self.router]

    def forward(self, x: Tensor) -> Tensor:
        # CHANGE: call your kernels. This one lets every expert see every token and masks what was not chosen.
        logits = (x @ self.router.T).float()
        indices = torch.topk(logits, self.k, dim=-1).indices
        scores = torch.zeros_like(logits).scatter(1, indices, router_scores(logits, indices, "topk_softmax"))
        out = torch.zeros_like(x, dtype=torch.float32)
        for e, (gate, up, down) in enumerate(
            zip(self.gate.unbind(), self.up.unbind(), self.down.unbind(), strict=True)
        ):
            out = out + scores[:, e, None] * F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
        return out.to(x.dtype)

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        # CHANGE: undo your layout; gradients come in the order of `parameters`. Views where possible.
        return dict(zip(("grad_gate", "grad_up", "grad_down", "grad_router"), gradients, strict=True))

    # If your kernels choose the experts another way than top-K of x @ router.T, override `expert_indices` too.


class TemplateMoE(Implementation):
    name = "template"  # CHANGE: as the file is named
    label = "Template"  # CHANGE: as figures show it
    upstream, licence = "where it comes from", "its licence"  # CHANGE
    requires: ClassVar[dict[str, str]] = {}  # CHANGE: e.g. {"my_package": "pip install my-package"}
    devices, dtypes = ("cuda", "cpu"), ("bfloat16", "float16", "float32")  # CHANGE: what it really runs on
    fake_tensors = True  # CHANGE: False unless all of it traces under FakeTensorMode

    def restriction(self, point: Point) -> str | None:
        return None  # CHANGE: e.g. f"my_moe needs d % 64 == 0, not d={point.shape.d}" where it cannot run

    def build(self, problem: Problem) -> Layer:
        return _TemplateLayer(problem)  # CHANGE: `import my_package` here, compile and tune here

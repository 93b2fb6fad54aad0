"""The Gluon kernels' wrappers up to the launch: real compilation, a driver that only notes, and somebody who listens to
compilations (as the harness does while it times)."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
from test_launching import NotingDriver, noting  # noqa: F401
from triton import knobs

from implementations.sonicmoe_triton import (
    gluon_contiguous,
    gluon_hidden_gradient,
    gluon_up_projection,
    gluon_weight_gradient,
)
from implementations.sonicmoe_triton.metadata import make_routing

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted, not built")

T, D, N, E, K = 64, 128, 64, 4, 2
ROWS = T * K
KERNELS = (
    gluon_contiguous.contiguous_kernel,
    gluon_hidden_gradient.hidden_gradient_kernel,
    gluon_up_projection.up_projection_kernel,
    gluon_weight_gradient.weight_gradient_kernel,
)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels whose compilation was told to a hook."""
    names: list[str] = []

    def compiled(*_: Any, fn: Any, compile: Any, **__: Any) -> None:
        assert json.loads(compile["specialization_data"])
        names.append(fn.name)

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", compiled)
    return names


def test_every_wrapper_launches_and_tells_its_name(
    noting: NotingDriver,  # noqa: F811
    heard: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    routing = make_routing(torch.zeros(T, K, dtype=torch.int32), E)
    heard.clear()
    noting.launches.clear()

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16)

    x, w1, w2, h, a = empty(T, D), empty(E, 2 * N, D), empty(E, D, N), empty(ROWS, 2 * N), empty(ROWS, N)
    scores = torch.empty(ROWS)
    try:
        for _ in range(2):
            gluon_up_projection.up_projection(x, w1, routing, "swiglu")
            gluon_contiguous.down_projection(a, w2, routing)
            gluon_hidden_gradient.hidden_gradient(x, w2, h, scores, routing, "swiglu")
            gluon_contiguous.input_gradient(h, w1, routing)
            gluon_weight_gradient.up_weight_gradient(h, x, routing)
            gluon_weight_gradient.down_weight_gradient(x, a, routing)
    finally:
        for kernel in KERNELS:
            kernel.device_caches.clear()
        for module in (gluon_contiguous, gluon_hidden_gradient, gluon_up_projection, gluon_weight_gradient):
            module._launcher.cache_clear()
    assert len(heard) == 6
    assert len(noting.launches) == 12
    assert [line[2] for line in noting.launches[:6]] == [line[2] for line in noting.launches[6:]]

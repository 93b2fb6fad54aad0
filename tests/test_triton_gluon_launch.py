"""The wrappers of the grouped GEMMs up to the launch, Gluon kernels and plain twins: real compilation, a driver that
only notes, and somebody who listens to compilations (as the harness does while it times)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_launching import NotingDriver, asked, noting  # noqa: F401
from triton import knobs

from implementations.sonicmoe_triton import (
    contiguous_gemm,
    gluon_contiguous,
    gluon_hidden_gradient,
    gluon_up_projection,
    gluon_weight_gradient,
    hidden_gradient,
    up_projection,
    weight_gradient,
)
from implementations.sonicmoe_triton.metadata import make_routing
from implementations.sonicmoe_triton.operands import RouterTerm

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted, not built")

T, D, N, E, K = 64, 128, 64, 4, 2
ROWS = T * K
GLUON = (gluon_up_projection, gluon_contiguous, gluon_hidden_gradient, gluon_weight_gradient)
PLAIN = (up_projection, contiguous_gemm, hidden_gradient, weight_gradient)
KERNELS = (
    gluon_contiguous.contiguous_kernel,
    gluon_hidden_gradient.hidden_gradient_kernel,
    gluon_up_projection.up_projection_kernel,
    gluon_weight_gradient.weight_gradient_kernel,
    contiguous_gemm.down_projection_kernel,
    contiguous_gemm.input_gradient_kernel,
    hidden_gradient.hidden_gradient_kernel,
    up_projection.up_projection_kernel,
    weight_gradient.up_weight_gradient_kernel,
    weight_gradient.down_weight_gradient_kernel,
)
CACHES: tuple[Callable[..., Any], ...] = tuple(module._launcher for module in GLUON)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels whose compilation was told to a hook."""
    names: list[str] = []

    def compiled(*_: Any, fn: Any, compile: Any, **__: Any) -> None:
        assert json.loads(compile["specialization_data"])
        names.append(fn.name)

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", compiled)
    return names


@pytest.fixture
def _nothing_kept() -> Iterator[None]:
    """What was compiled for the noting driver must not be launched by another, nor the other way round."""

    def forget() -> None:
        for kernel in KERNELS:
            kernel.device_caches.clear()
        for cache in CACHES:
            cache.cache_clear()

    forget()
    yield
    forget()


@pytest.mark.usefixtures("_nothing_kept")
@pytest.mark.parametrize("modules", [GLUON, PLAIN], ids=["gluon", "plain"])
def test_every_wrapper_asks_triton_once_and_tells_its_name(
    noting: NotingDriver,  # noqa: F811
    asked: list[str],  # noqa: F811
    heard: list[str],
    modules: tuple[Any, ...],
) -> None:
    up, contiguous, hidden, weights = modules
    routing = make_routing(torch.zeros(T, K, dtype=torch.int32), E)
    for notes in (asked, heard, noting.launches):
        notes.clear()

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16)

    x, w1, w2, h, a = empty(T, D), empty(E, 2 * N, D), empty(E, D, N), empty(ROWS, 2 * N), empty(ROWS, N)
    scores, router = torch.empty(ROWS), empty(E, D)
    for _ in range(2):
        up.up_projection(x, w1, routing, "swiglu")
        contiguous.down_projection(a, w2, routing)
        hidden.hidden_gradient(x, w2, h, scores, routing, "swiglu")
        contiguous.input_gradient(h, w1, routing, RouterTerm(scores, router))
        weights.up_weight_gradient(h, x, routing)
        weights.down_weight_gradient(x, a, routing)
    assert len(heard) == len(asked) == 6
    assert len(noting.launches) == 12
    assert [line[2] for line in noting.launches[:6]] == [line[2] for line in noting.launches[6:]]

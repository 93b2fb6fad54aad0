"""Who looks on? Decides between a plain `autograd.Function`, which costs the host little, and an operator."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.nn import Parameter

_PLAIN = frozenset({Tensor, Parameter, type(None)})


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether nobody looks on who could not see through an `autograd.Function` that launches kernels: no compiler, no
    fake or other subclass of tensors, no dispatch mode, no functional transform."""
    x = tensors[0]
    if torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active():
        _refuse_functional_derivatives()
    return (
        _PLAIN.issuperset(map(type, tensors))
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and x is not None
        and not x.is_meta
    )


def _refuse_functional_derivatives() -> None:
    """An operator's gradient is unknown to functorch, which would drop the tangent of one without a word."""
    active = {interpreter.key() for interpreter in retrieve_all_functorch_interpreters()}
    if active & {TransformType.Grad, TransformType.Jvp}:
        raise NotImplementedError("torch.func.grad and jvp do not know this layer; use torch.autograd.grad or backward")

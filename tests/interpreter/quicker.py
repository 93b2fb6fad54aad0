"""Triton's interpreter without some things that it does again and again: most of these tests' time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.language.standard import _xor_combine
from triton.runtime import interpreter


def _patch_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`triton.language` is patched at a launch, which is undone, and again at each call of a device function inside."""
    patched: set[frozenset[str]] = set()

    def once(fn: Any) -> Any:
        languages = frozenset(module.__name__ for module in (tl, tl.core) if module in fn.__globals__.values())
        if languages in patched:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        restore = scope.restore

        def restore_and_forget() -> None:
            restore()
            patched.clear()

        patched.add(languages)
        scope.restore = restore_and_forget
        return scope

    return once


def _patch_builtins_of(patch: Callable[..., None]) -> Callable[..., None]:
    """A patch looks through all that a module or class has, hundreds of names, for the few that are builtins."""
    known: dict[Any, list[str]] = {}

    def patch_these(place: Any, builder: Any, scope: Any) -> None:
        if place not in known:
            before = len(scope._changes)
            patch(place, builder, scope)
            known[place] = [name for _, name, _ in scope._changes[before:]]
            return
        for name in known[place]:
            member = getattr(place, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(place, name, member, builder, scope)

    return patch_these


def _block_type_of(init: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """Every operation makes types of blocks anew: sizes are unwrapped and checked, and a name is written out."""
    known: dict[tuple[object, ...], dict[str, Any]] = {}

    def remembered(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[size.value if type(size) is tl.constexpr else size for size in shape])
        if key not in known:
            init(self, element_ty, shape)
            known[key] = dict(self.__dict__)
        self.__dict__.update(known[key], element_ty=element_ty)

    return remembered


def _tensor_of(init: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """So does every tensor with its shape."""
    known: dict[str, tuple[Any, Any]] = {}

    def remembered(self: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            init(self, handle, type)
            known[type.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[type.name]

    return remembered


def _numpy_dtype_of(numpy_of: Callable[[Any], numpy.dtype]) -> Callable[[Any], numpy.dtype]:
    """A table of all of them is made to look up one."""
    known: dict[str, numpy.dtype] = {}

    def remembered(dtype: Any) -> numpy.dtype:
        if type(dtype) is not tl.dtype:
            return numpy_of(dtype)
        if dtype.name not in known:
            known[dtype.name] = numpy_of(dtype)
        return known[dtype.name]

    return remembered


def _overflow_check_of(check: Callable[[Any, Any, Any, Any], None]) -> Callable[[Any, Any, Any, Any], None]:
    """Sums and products of integers are computed once more, in 64 bits, for an assertion that is made only if debugging
    is asked for."""

    def where_it_is_made(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        if self.builder.options.debug:
            check(self, lhs, rhs, operation)

    return where_it_is_made


def _operands_of(promoted: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Operands of one type need neither promotion nor broadcasting, which is found out at length."""

    def unless_they_are_alike(self: Any, lhs: Any, rhs: Any, *rules: bool, **named: bool) -> tuple[Any, Any]:
        plain = type(lhs) is tl.tensor and type(rhs) is tl.tensor and not named.get("div_or_mod") and len(rules) < 4
        if plain and lhs.type.name == rhs.type.name and not lhs.dtype.is_ptr():
            return lhs, rhs
        return promoted(self, lhs, rhs, *rules, **named)

    return unless_they_are_alike


def _broadcast_of(broadcast: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Blocks of one shape stay as they are, which is found out size by size."""

    def unless_they_are_alike(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        blocks = lhs.type.is_block(), rhs.type.is_block()
        if blocks[0] == blocks[1] and lhs.handle.data.shape == rhs.handle.data.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return unless_they_are_alike


def _reduction_of(apply: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Reductions that NumPy has are left to it, but for the exclusive or: a sort's comparisons."""

    def with_exclusive_or(self: Any, tensors: Any) -> Any:
        if self.combine_fn is not _xor_combine:
            return apply(self, tensors)
        (tensor,) = tensors
        found = numpy.bitwise_xor.reduce(tensor.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(found, tensor.dtype)

    return with_exclusive_or


#: Where, what, and what makes the quicker one of Triton's own.
_CHANGES: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (interpreter, "_patch_lang", _patch_once),
    (interpreter, "_patch_builtin", _patch_builtins_of),
    (tl.block_type, "__init__", _block_type_of),
    (tl.tensor, "__init__", _tensor_of),
    (interpreter, "_get_np_dtype", _numpy_dtype_of),
    (TritonSemantic, "binary_op_sanitize_overflow_impl", _overflow_check_of),
    (TritonSemantic, "binary_op_type_checking_impl", _operands_of),
    (TritonSemantic, "broadcast_impl_value", _broadcast_of),
    (interpreter.ReduceOps, "apply_impl", _reduction_of),
)
#: Where, what, Triton's own.
ORIGINALS = tuple((place, name, getattr(place, name)) for place, name, _ in _CHANGES)


@contextmanager
def quicker_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for place, name, quicker_than in _CHANGES:
            monkeypatch.setattr(place, name, quicker_than(getattr(place, name)))
        yield

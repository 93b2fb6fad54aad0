"""Triton's interpreter without four things that it does again and again: half of these tests' time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import triton.language as tl
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


#: Where, what, and what makes the quicker one of Triton's own.
_CHANGES: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (interpreter, "_patch_lang", _patch_once),
    (tl.block_type, "__init__", _block_type_of),
    (tl.tensor, "__init__", _tensor_of),
    (interpreter, "_get_np_dtype", _numpy_dtype_of),
)
#: Where, what, Triton's own.
ORIGINALS = tuple((place, name, getattr(place, name)) for place, name, _ in _CHANGES)


@contextmanager
def quicker_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for place, name, quicker_than in _CHANGES:
            monkeypatch.setattr(place, name, quicker_than(getattr(place, name)))
        yield

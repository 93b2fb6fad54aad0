"""Hypothesis strategies for what a file may hold in place of what it should: values, and trees with parts replaced."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

#: The same examples each time, so that the suite says the same each time; on a loaded machine any one may be slow.
SAME = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
TEXTS = [
    "", " ", "x", "ok", "0", "-1", "nan", "1e999", "\n", "a\nb", "\x00", "\x1b[31m", "\u202e", "\ud800", "\ufffe", "é",
    "💥", "../x", "/", "*", "[red]", "</script>", "%s", "{}", "null", "9" * 400, "x" * 5000, "8,8,8,4,2", "T,d,n,E,K",
    "median:5%", "top_k", "cuda", "2026-01-31T12:00:00+00:00", "2026-01-31", "20260131T120000Z",
]  # fmt: skip
NUMBERS = [
    0, 1, -1, 2, 3.5, -0.0, 1e-320, 1e308, -1e308, 0.1, 2**31 - 1, 2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**63, -(2**63),
    2**64, 2**70, 10**30, 10**400, 10**4000, float("nan"), float("inf"), float("-inf"),
]  # fmt: skip


def as_json(value: Any) -> bytes:
    """As JSON, with NaN and the like as Python writes and reads them."""
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b'{"a":' * 5000


def nested(depth: int, inside: Any, table: bool = False) -> Any:
    """``inside`` within that many lists or tables."""
    for _ in range(depth):
        inside = {"a": inside} if table else [inside]
    return inside


scalars = st.one_of(st.sampled_from([None, True, False]), st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.text())
deep = st.builds(nested, st.sampled_from([1, 2, 20, 40, 400, 900]), scalars, st.booleans())
values = st.one_of(
    scalars,
    st.sampled_from([[], {}, [1.0, 2.0], [2.0, 1.0], [0.0, 1.0], [[]], [{}], [None], ["x"], {"a": 1}]),
    st.lists(scalars, max_size=3),
    st.dictionaries(st.text(max_size=5), scalars, max_size=3),
    deep,
)


def alike(value: Any) -> st.SearchStrategy[Any]:
    """Values of the same type."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, str):
        return st.one_of(st.sampled_from(TEXTS), st.text(max_size=20))
    if isinstance(value, int):
        return st.one_of(st.integers(-2, 300), st.sampled_from([its for its in NUMBERS if isinstance(its, int)]))
    if isinstance(value, float):
        return st.one_of(st.floats(0, 1e4), st.sampled_from(NUMBERS), st.sampled_from([5e-324, 1.7e308]))
    if isinstance(value, list):
        return st.lists(st.sampled_from(value), max_size=3) if value else st.just([])
    return st.just(value)


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside tables and lists."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inner:
        yield (*path, key)
        yield from places(value, (*path, key))


@st.composite
def spoiled(draw: st.DrawFn, tree: Any, replacements: st.SearchStrategy[Any] = values, most: int = 3) -> Any:
    """The tree with up to ``most`` of its values replaced, taken away, renamed, doubled, or swapped with another;
    half of the replacements are of the same type, so that much gets through the first checks."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, most))):
        every = list(places(tree))
        if not every:
            return tree
        path = draw(st.sampled_from(every))
        parent = tree
        for key in path[:-1]:
            parent = parent[key]
        kind = draw(st.sampled_from(["replace"] * 3 + ["alike"] * 4 + ["delete", "rename", "double", "swap"]))
        if kind == "replace":
            parent[path[-1]] = draw(replacements)
        elif kind == "alike":
            parent[path[-1]] = draw(alike(parent[path[-1]]))
        elif kind == "delete":
            del parent[path[-1]]
        elif kind == "rename" and isinstance(parent, dict):
            names = [key for place in every for key in place if isinstance(key, str)]
            parent[draw(st.sampled_from([*TEXTS, *names]))] = parent.pop(path[-1])
        elif kind == "double" and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[path[-1]]))
        elif kind == "swap":
            other = tree
            for key in draw(st.sampled_from(every)):
                other = other[key]
            parent[path[-1]] = copy.deepcopy(other)
    return tree

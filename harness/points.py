"""Points as plain dictionaries: for the pipe to the worker, for rows, and for resume keys."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from harness.interface import LayerSpec, Point, RoutingSpec
from harness.record import point_fields
from harness.shapes import MoEShape


def point_to_dict(point: Point) -> dict[str, Any]:
    """Every input of the point, JSON-ready."""
    return asdict(point)


def point_from_dict(data: dict[str, Any]) -> Point:
    """The inverse of `point_to_dict`."""
    return Point(
        **{
            **data,
            "shape": MoEShape(**data["shape"]),
            "layer": LayerSpec(**data["layer"]),
            "routing": RoutingSpec(**data["routing"]),
        }
    )


def row_fields(point: Point) -> dict[str, Any]:
    """The fields of a row that repeat the point's inputs, whoever implements it."""
    fields = point_fields(point)
    del fields["implementation"]
    return fields

"""Ablation: scattered stores in place of gather-and-sum. The down-projection stores each row at its token's place, as
ScatterMoE does, and the sum then reads rows in order.

The scattering kernel is a plain one, in tl.dot. What it is compared with is the plain contiguous kernel before our
gather-and-sum, so that the ratio does not compare a warp-specialised kernel with a plain one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from implementations._ablation import Ablation


class AblationScatter(Ablation):
    """As many bytes as with the gather-and-sum, in another order."""

    name = "ablation_scatter"
    label = "ours, scattered stores"
    differences: ClassVar[Mapping[str, str]] = {
        "down_aggregation": (
            "the plain down-projection stores row (t, k) at t·K + k; the sum reads each token's rows in order; the "
            "rows' places are made before the call"
        ),
    }
    operations = tuple(differences)


class AblationPlain(Ablation):
    """The fair twin of the scattered stores."""

    name = "ablation_plain"
    label = "ours, plain down-projection"
    differences: ClassVar[Mapping[str, str]] = {
        "down_aggregation": "the down-projection is the plain kernel on any GPU; the gather-and-sum is the layer's",
    }
    operations = tuple(differences)

"""What the algorithms of four SwiGLU MoE layers hold between the passes and move to and from memory.

`ALGORITHMS` names them: SonicMoE, ScatterMoE, MoMoE (which recomputes, or stores) and the standard layer of grouped
GEMMs between gathered rows. R is the number of routed rows (T·K), b the bytes of one element (2 for bf16 and fp16),
W1 and W2 the experts' weights (2b·E·d·n and b·E·d·n).

Bytes are counted as in `costs.algorithm_bytes`: of every kernel each tensor once, a gathered tensor as its T·d source
(re-reads are taken to hit the L2 cache). Indices, scores and logits are left out. The router is the same for all: X
and its weights are read once a pass, its gradient is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness.costs import algorithm_bytes, held_bytes_grouped_mm, held_bytes_sonicmoe, weight_bytes
from harness.shapes import MoEShape


@dataclass(frozen=True)
class Algorithm:
    """One algorithm's cost models.

    Attributes:
        label: its name in figures.
        held: (shape, b) -> bytes that the layer allocates in the forward and holds until the backward, its output
            included, X and the weights not.
        moved: (shape, pass, b) -> bytes that its kernels read and write.
        source: where the algorithm is published.
        implementations: the plugins that follow it.
        paper: its name in the paper's figures where it has no plugin here.
    """

    name: str
    label: str
    held: Callable[[MoEShape, int], int]
    moved: Callable[[MoEShape, str, int], int]
    source: str
    implementations: tuple[str, ...] = ()
    paper: str = ""


def held_bytes_scattermoe(shape: MoEShape, b: int = 2) -> int:
    """Bytes that ScatterMoE's gated MLP and the router before it hold between forward and backward.

    O (b·T·d). Of every routed row: Y, unweighted, for the scores' gradient (b·d); H, whose halves SiLU and the product
    keep (2b·n); SiLU of one half (b·n); A (b·n); its weight in fp32 and in the layer's dtype (4 + b), the router's
    index, the sorted expert and the place (int64 each): 28 + b. The experts' offsets (int64): 8·E.
    Gathered X and dO are made in the backward, dX~ in the memory of gathered X.

    Source: github.com/shawntan/scattermoe, `parallel_experts.py` and `GLUMLP` in `mlp.py` (version 0.3.0).
    Measured: within 0.1 %; the allocator rounds every tensor up to 512 bytes, large ones up to 2 MiB.
    The paper's bars are smaller than this with weights and X, by R·n and T·d elements (within 0.4 %): an activation
    that keeps no SiLU, and one T·d tensor less than its bars of SonicMoE hold.
    """
    R, T, d, n = shape.routed_rows, shape.T, shape.d, shape.n
    return b * T * d + b * R * (d + 4 * n) + (28 + b) * R + 8 * shape.E


def held_bytes_momoe(shape: MoEShape, b: int = 2, stored: bool = False) -> int:
    """Bytes that MoMoE's experts hold between forward and backward, with the routing given.

    O (b·T·d); the routing weights as a matrix of all experts and tokens in fp32 (4·T·E); for each routed row its token
    and slot (int32 each): 8·R; the offsets of the experts (int32) and their counts (int64): 12·E + 4. ``stored``
    (the package's save_percent = 100; its default is 0) adds gate and up (2b·R·n) and unweighted Y (b·R·d), which the
    backward otherwise recomputes. The package's sample router keeps another 8·T·E + 8·T, which is not counted.

    Source: github.com/tilde-research/MoMoE-impl, `MoEFunction` in `momoe.py`.
    The paper's Figure 13 fits MoMoE with everything stored: with the experts' weights, and without X, this is within
    0.8 % of its twelve bars; recomputing would be 38 to 78 % below them. With X it would be 3 to 11 % above: the bars
    of the baselines hold one T·d tensor less than SonicMoE's.
    """
    R, T, d, n, E = shape.routed_rows, shape.T, shape.d, shape.n, shape.E
    return b * T * d + 4 * T * E + 8 * R + 12 * E + 4 + stored * b * R * (2 * n + d)


def _of_pass(forward: int, backward: int, pass_: str) -> int:
    return {"forward": forward, "backward": backward, "forward_backward": forward + backward}[pass_]


def moved_bytes_grouped_mm(shape: MoEShape, pass_: str, b: int = 2) -> int:
    """Bytes that the standard layer moves: gather, grouped GEMM, SwiGLU, grouped GEMM, weighted sum, each a kernel.

    Forward: router reads X; gather reads X, writes Xg (R·d); up-projection reads Xg and W1, writes H (2·R·n); SwiGLU
    reads H, writes A (R·n); down-projection reads A and W2, writes Y (R·d); aggregation reads Y, writes O.
    Backward: the aggregation's reads dO and Y, writes dY (R·d); dA reads dY and W2, writes dA (R·n); dW2 reads dY and
    A; SwiGLU's reads dA and H, writes dH (2·R·n); dX~ reads dH and W1, writes R·d; dW1 reads dH and Xg; the reduction
    reads dX~, writes dX; the router's gradients read X.

    Source: `implementations/torch_grouped_mm.py`, glue fused as its compiler fuses it.
    """
    R, T, d, n = shape.routed_rows, shape.T, shape.d, shape.n
    weights = weight_bytes(shape, b)
    forward = b * (T * d + (T + R) * d + (R * d + 2 * R * n) + 3 * R * n + (R * n + R * d) + (R + T) * d) + weights
    aggregation = (T + R + R) * d
    da, dw2 = R * d + R * n, R * d + R * n
    swiglu = R * n + 2 * R * n + 2 * R * n
    dx, dw1 = 2 * R * n + R * d, 2 * R * n + R * d
    backward = b * (aggregation + da + dw2 + swiglu + dx + dw1 + (R + T) * d + T * d) + 2 * weights
    return _of_pass(forward, backward, pass_)


def moved_bytes_scattermoe(shape: MoEShape, pass_: str, b: int = 2) -> int:
    """Bytes that ScatterMoE moves, its activation by PyTorch one operator at a time (K above 1).

    Forward: router reads X; up-projection reads X and W1, writes H (2·R·n); SiLU reads half of H, writes R·n; the
    product reads that and the other half, writes A (R·n); down-projection reads A and W2, writes Y (R·d) in the
    tokens' order; the weighted sum reads Y, writes O.
    Backward: dS reads Y and dO; grouping reads dO, writes dY (R·d); dW2 reads dY and A; dA reads dY and W2, writes
    R·n; the product's gradients read dA and the other factor and write R·n, twice; SiLU's reads its gradient and half
    of H, writes R·n; joining the halves reads and writes dH (2·R·n each); grouping reads X, writes Xg (R·d); dW1 reads
    dH and Xg; dX~ reads dH and W1, writes R·d; the sum reads that, writes dX; the router's gradients read X. The
    experts' gradients are filled with zeros before they are written.

    Source: github.com/shawntan/scattermoe, `parallel_experts.py`, `kernels/ops.py` and `mlp.py` (version 0.3.0).
    """
    R, T, d, n = shape.routed_rows, shape.T, shape.d, shape.n
    weights = weight_bytes(shape, b)
    forward = b * (T * d + (T * d + 2 * R * n) + 2 * R * n + 3 * R * n + (R * n + R * d) + (R + T) * d) + weights
    ds, group_dy = (R + T) * d, (T + R) * d
    dw2, da = R * d + R * n, R * d + R * n
    activation = 2 * (3 * R * n) + 3 * R * n + 4 * R * n
    group_x, dw1, dx = (T + R) * d, 2 * R * n + R * d, 2 * R * n + R * d
    elements = ds + group_dy + dw2 + da + activation + group_x + dw1 + dx + (R + T) * d + T * d
    backward = b * elements + 2 * weights + weight_bytes(shape, b, router=False)
    return _of_pass(forward, backward, pass_)


def moved_bytes_momoe(shape: MoEShape, pass_: str, b: int = 2, stored: bool = False) -> int:
    """Bytes that MoMoE moves; ``stored`` as in `held_bytes_momoe`.

    Forward: router reads X; its first kernel reads X and W1, writes A (R·n); the second reads A and W2, writes the
    weighted Y (R·d) by token and slot; the sum reads that, writes O. Stored: gate and up (2·R·n) and Y (R·d) are
    written too.
    Backward: gathering reads X and dO, writes Xg and the weighted dO (R·d each); the activation's kernel reads the
    latter and W2, and Xg and W1 to recompute H (stored: H), writes dH (2·R·n) and A (R·n); dW2 reads weighted dO and
    A; dW1 reads dH and Xg; the kernel of dX~ reads dH and W1, and A and W2 to recompute Y (stored: Y), and dO, writes
    R·d; the sum reads that, writes dX; the router's gradients read X.

    Source: github.com/tilde-research/MoMoE-impl, `momoe.py`.
    """
    R, T, d, n = shape.routed_rows, shape.T, shape.d, shape.n
    weights, experts = weight_bytes(shape, b), weight_bytes(shape, b, router=False)
    first, second = T * d + R * n + stored * 2 * R * n, R * n + R * d + stored * R * d
    forward = b * (T * d + first + second + (R + T) * d) + weights
    gather = 2 * T * d + 2 * R * d
    activation = R * d + (2 * R * n if stored else R * d) + 3 * R * n
    dw2, dw1 = R * d + R * n, 2 * R * n + R * d
    dx = 2 * R * n + (R * d if stored else R * n) + T * d + R * d
    elements = gather + activation + dw2 + dw1 + dx + (R + T) * d + T * d
    backward = b * elements + 2 * weights + (0 if stored else experts)
    return _of_pass(forward, backward, pass_)


def _held_momoe_stored(shape: MoEShape, b: int = 2) -> int:
    return held_bytes_momoe(shape, b, stored=True)


def _moved_momoe_stored(shape: MoEShape, pass_: str, b: int = 2) -> int:
    return moved_bytes_momoe(shape, pass_, b, stored=True)


#: By name, in the order of figures.
ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("sonicmoe", "SonicMoE", held_bytes_sonicmoe, algorithm_bytes, "arXiv 2512.14080",
                  ("sonicmoe_official", "sonicmoe_triton", "sonicmoe_torch")),
        Algorithm("scattermoe", "ScatterMoE", held_bytes_scattermoe, moved_bytes_scattermoe,
                  "github.com/shawntan/scattermoe", ("scattermoe",)),
        Algorithm("momoe", "MoMoE, recomputing", held_bytes_momoe, moved_bytes_momoe,
                  "github.com/tilde-research/MoMoE-impl"),
        Algorithm("momoe_stored", "MoMoE, storing", _held_momoe_stored, _moved_momoe_stored,
                  "github.com/tilde-research/MoMoE-impl", paper="MoMoE"),
        Algorithm("grouped_mm", "standard grouped GEMM", held_bytes_grouped_mm, moved_bytes_grouped_mm,
                  "github.com/pytorch/pytorch", ("torch_grouped_mm",)),
    )
}  # fmt: skip

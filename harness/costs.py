"""Cost models of a SwiGLU MoE layer: FLOPs, bytes moved, floors, arithmetic intensity, activation memory.

R is the number of routed rows (T·K under top-K routing), b the bytes of one element (2 for bf16 and fp16).
"""

from __future__ import annotations

from harness.gpus import GpuRates
from harness.shapes import MoEShape

PASSES = ("forward", "backward", "forward_backward")
_GEMMS = {"forward": 3, "backward": 6, "forward_backward": 9}
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def model_flops(shape: MoEShape, pass_: str, rows: int | None = None) -> int:
    """FLOPs that the layer's definition needs: 6·R·n·d forward, 12·R·n·d backward, 18·R·n·d both.

    Only the experts' GEMMs count, as in the paper; the router's 2·T·d·E and the elementwise work do not.
    ``rows`` replaces R = T·K, e.g. by the padded rows to give hardware FLOPs.
    """
    return 2 * _GEMMS[pass_] * (shape.routed_rows if rows is None else rows) * shape.n * shape.d


def weight_bytes(shape: MoEShape, b: int = 2, router: bool = True) -> int:
    """Bytes of the experts' and the router's weights: b·(3·E·d·n + E·d), without a router 3·b·E·d·n."""
    return b * (3 * shape.E * shape.d * shape.n + shape.E * shape.d * router)


def boundary_bytes(shape: MoEShape, pass_: str, b: int = 2, router: bool = True) -> int:
    """Bytes that cross the layer's boundary, each tensor once: inputs, weights, outputs.

    Forward: X and the weights in, O out. Backward: X, dO and the weights in, dX and the weights' gradients out.
    Nothing between the two passes is counted, so this is less than any implementation moves.
    """
    tokens = b * shape.T * shape.d
    forward = 2 * tokens + weight_bytes(shape, b, router)
    backward = 3 * tokens + 2 * weight_bytes(shape, b, router)
    return {"forward": forward, "backward": backward, "forward_backward": forward + backward}[pass_]


def algorithm_bytes(shape: MoEShape, pass_: str, b: int = 2, rows: int | None = None, router: bool = True) -> int:
    """Bytes that SonicMoE's kernels as designed must move, every tensor of a kernel once (a gathered tensor counts
    as its T·d source: re-reads are taken to hit the L2 cache).

    Forward: router reads X; up-projection reads X and W1, writes H (2·R·n) and A (R·n); down-projection reads A and
    W2, writes Y (R·d); aggregation reads Y, writes O. Backward: dH reads dO, W2 and H, writes A' and dH; dW2 reads A'
    and dO; dX~ reads dH and W1, writes R·d; the reduction reads that and writes dX; dW1 reads dH and X; the router's
    gradients read X. Metadata and scores (about 16·R bytes a pass) are left out. ``rows`` replaces
    R = T·K; without ``router`` its reads of X (one a pass) and its weights are not there.
    """
    R, T, d, n = shape.routed_rows if rows is None else rows, shape.T, shape.d, shape.n
    weights = weight_bytes(shape, b, router)
    forward = b * ((1 + router) * T * d + 2 * R * n + R * n + R * n + R * d + R * d + T * d) + weights
    dh = T * d + 2 * R * n + R * n + 2 * R * n
    dw2 = R * n + T * d
    dx = 2 * R * n + R * d + R * d + T * d
    dw1 = 2 * R * n + T * d
    backward = b * (dh + dw2 + dx + dw1 + router * T * d) + 2 * weights
    return {"forward": forward, "backward": backward, "forward_backward": forward + backward}[pass_]


def floors_ms(flops: int, bytes_: int, dtype: str, rates: GpuRates) -> dict[str, float]:
    """The two least times in ms: ``compute`` (FLOPs over the tensor cores' peak) and ``memory`` (bytes over the
    memory's peak bandwidth)."""
    return {"compute": flops / rates.tflops[dtype] / 1e9, "memory": bytes_ / rates.bytes_per_s * 1e3}


def arithmetic_intensity(shape: MoEShape) -> dict[str, float]:
    """FLOPs per byte moved by one expert's forward, at two bytes an element: as the authors write it, and as training
    has it.

    ``paper``: 3 / (2/d + 2G/d + 3/(T·rho)) with G = d/n and rho = K/E (arXiv 2512.14080). ``training``: H is written
    and A is written and read there, which makes the first term 4/d; the authors' value is an upper bound.
    """
    tail = 2 * shape.granularity / shape.d + 3 / (shape.T * shape.activation_ratio)
    return {"paper": 3 / (2 / shape.d + tail), "training": 3 / (4 / shape.d + tail)}


def held_bytes_sonicmoe(shape: MoEShape, b: int = 2) -> int:
    """Bytes that SonicMoE's algorithm allocates and holds between forward and backward.

    O (b·T·d), H (2b·R·n), and for each routed row its score (fp32), expert, token and place (int32 each): 16·R; the
    E+1 offsets of the experts (int32). X is the caller's. Source: `arXiv 2512.14080`, the memory-efficient backward.
    Measured: ours within 0.01 %; the official package holds 52 bytes of metadata for each row instead of 16, at most
    3 % more in all at the paper's twelve layers.
    """
    R = shape.routed_rows
    return b * shape.T * shape.d + 2 * b * R * shape.n + 16 * R + 4 * (shape.E + 1)


def held_bytes_grouped_mm(shape: MoEShape, b: int = 2) -> int:
    """Bytes that `torch_grouped_mm` holds between forward and backward (router convention ``topk_softmax``).

    O (b·T·d); gathered X, H, A and Y (b·R·(2d + 3n)); for each routed row its score (fp32), expert (int64), token and
    place (int32 each): 20·R; the logits (T·E, fp32), which autograd's gather keeps; the experts' offsets (int32).
    """
    R, T, d, n = shape.routed_rows, shape.T, shape.d, shape.n
    return b * T * d + b * R * (2 * d + 3 * n) + 20 * R + 4 * T * shape.E + 4 * (shape.E + 1)


def held_bytes_loop(shape: MoEShape, b: int = 2) -> int:
    """Bytes that `torch_loop` holds between forward and backward (router convention ``topk_softmax``).

    O (b·T·d); of every routed row its x and Y (2b·d), gate, silu(gate), up and their product (4b·n) and the weighted Y
    in fp32 (4·d), which autograd keeps for its shape alone; score and weight (fp32 each), expert (int64), token and
    slot (int32 each): 24·R; the logits (T·E, fp32).
    """
    R, T, d, n = shape.routed_rows, shape.T, shape.d, shape.n
    return b * T * d + b * R * (2 * d + 4 * n) + 4 * R * d + 24 * R + 4 * T * shape.E


def layer_bytes_sonicmoe(shape: MoEShape, b: int = 2) -> int:
    """Weights, input and held bytes: the paper's Figure 13."""
    return weight_bytes(shape, b) + b * shape.T * shape.d + held_bytes_sonicmoe(shape, b)

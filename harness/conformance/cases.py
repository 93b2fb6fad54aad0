"""The public reports, and the case that each has become: data alone.

A report's input is partly inferred: a report on a grouped GEMM is met here through a layer whose experts receive as
many rows as the GEMM's groups had.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.errors import UserError
from harness.interface import Point, RoutingSpec
from harness.registry import choices
from harness.shapes import MoEShape

_REPOSITORIES = {
    "pytorch": "pytorch/pytorch",
    "MSLK": "meta-pytorch/MSLK",
    "transformers": "huggingface/transformers",
    "sonic-moe": "Dao-AILab/sonic-moe",
    "megablocks": "databricks/megablocks",
    "scattermoe": "shawntan/scattermoe",
    "DeepGEMM": "deepseek-ai/DeepGEMM",
    "tritonbench": "meta-pytorch/tritonbench",
    "flashinfer": "flashinfer-ai/flashinfer",
    "vllm": "vllm-project/vllm",
}
#: Where the reports' items that no one has reported, but that break kernels, come from.
ALSO = "also: "


@dataclass(frozen=True)
class Line:
    """A report, ``pytorch#152668`` or (a pull request) ``scattermoe PR#23``, or an input that is tried besides."""

    name: str
    symptom: str

    @property
    def url(self) -> str:
        """The report's address; empty where there is none."""
        project, _, number = self.name.partition("#")
        kind = "pull" if project.endswith(" PR") else "issues"
        repository = _REPOSITORIES.get(project.removesuffix(" PR"))
        return f"https://github.com/{repository}/{kind}/{number}" if repository and number.isdigit() else ""


LINES = (
    Line("pytorch#152668", "the backward of a grouped GEMM hangs on an empty expert"),
    Line("pytorch#172439", "weight gradients of empty experts are not zero"),
    Line("MSLK#158", "NaN in dW, from an output that nobody initialised"),
    Line("pytorch#192497", "a contraction of length zero is refused"),
    Line("transformers#48205", "NaN at the second step only, from dirty rows behind the routed ones"),
    Line("pytorch#186365", "identical calls disagree"),
    Line("pytorch PR#150374", "silently wrong where a stride is no multiple of 8"),
    Line("sonic-moe#63", "a wrong SwiGLU, unseen by a test with tiny inputs and a loose absolute tolerance"),
    Line("sonic-moe#21", "torch.compile of the layer breaks"),
    Line("sonic-moe PR#15", "capture in a CUDA graph breaks on a synchronisation across streams"),
    Line("sonic-moe#45", "gate and up weights interleaved against side by side"),
    Line("megablocks#170", "the block-sparse path raises with a newer Triton"),
    Line("megablocks#178", "the block-sparse path raises with a newer Triton"),
    Line("megablocks#114", "n must divide by the block"),
    Line("megablocks#62", "an asynchronous illegal access surfaces at a later call"),
    Line("megablocks#166", "out of memory where experts are fine"),
    Line("scattermoe#5", "an error of 0.1 to 0.5 against a plain layer"),
    Line("scattermoe#12", "the layer cannot be compiled"),
    Line("scattermoe PR#23", "bad addresses in the backward with weights that are not contiguous"),
    Line("DeepGEMM PR#450", "silent corruption where groups are packed to another alignment"),
    Line("DeepGEMM PR#103", "a hang with padding rows of index -1"),
    Line("DeepGEMM#136", "5 % slower on H100, found by a user"),
    Line("DeepGEMM PR#116", "TFLOPS measured on inputs of ones"),
    Line("DeepGEMM PR#302", "two processes race for the cache of compiled kernels"),
    Line("tritonbench#346", "times twice too long, from a compilation inside the timed region"),
    Line("tritonbench#143", "4 % between days"),
    Line("flashinfer#2187", "a cold L2 that is warm under CUDA graphs, whose tensors a closure had captured"),
    Line("flashinfer PR#2213", "a cold L2 that is warm under CUDA graphs, whose tensors a closure had captured"),
    Line("vllm#56887", "atomic additions in bf16 are not deterministic"),
    Line("pytorch#163425", "a grouped GEMM slower than a loop on unbalanced groups"),
    Line("sonic-moe sources", "E that is no multiple of 4 or 8, and K above 16"),
    Line(f"{ALSO}K = 1", "one expert for each token"),
    Line(f"{ALSO}K = E", "every expert for each token"),
    Line(f"{ALSO}T = 1", "one token"),
    Line(f"{ALSO}T below a tile", "fewer tokens than a tile has rows"),
    Line(f"{ALSO}T = 0", "no token"),
    Line(f"{ALSO}one expert", "all tokens to one expert"),
    Line(f"{ALSO}ragged widths", "d or n no multiple of the tile"),
    Line(f"{ALSO}tied scores", "scores that are exactly equal"),
    Line(f"{ALSO}NaN in x", "a NaN reaches other tokens, or becomes a number"),
    Line(f"{ALSO}inf in x", "an infinity reaches other tokens, or becomes a number"),
    Line(f"{ALSO}fp16", "half precision"),
    Line(f"{ALSO}fp32", "single precision"),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One input and what is checked of it.

    Attributes:
        name: what the command line, rows and tables call it.
        lines: the reports behind it.
        shape: T,d,n,E,K.
        check: a function of `harness.conformance.checks`; ``gate``: output and all gradients against the reference. All
            others include it.
        counts: rows of each expert, planted through X and Wr; empty: as ``distribution`` says.
        dtype: empty: the device's usual one, bfloat16 on a GPU and float32 on a CPU.
        seed: of the inputs.
        tied: every second expert's router row is its neighbour's, so that logits tie exactly.
        second_shape: of the check ``two_shapes``.
        cpu_shape: in place of ``shape`` on a CPU; ``cpu_reason`` says why it is smaller.
        cuda_only: why it cannot be met on a CPU; empty where it can.
    """

    name: str
    lines: tuple[str, ...]
    shape: str
    check: str = "gate"
    counts: tuple[int, ...] = ()
    distribution: str = "uniform"
    dtype: str = ""
    seed: int = 0
    tied: bool = False
    second_shape: str = ""
    cpu_shape: str = ""
    cpu_reason: str = ""
    cuda_only: str = ""

    def point(self, implementation: str, dtypes: tuple[str, ...], device: str) -> Point:
        """The point of an implementation that computes in ``dtypes``."""
        usual = ("bfloat16", "float16", "float32") if device == "cuda" else ("float32", "bfloat16", "float16")
        dtype = self.dtype or next((name for name in usual if name in dtypes), usual[0])
        shape = self.cpu_shape if device == "cpu" and self.cpu_shape else self.shape
        distribution = "counts" if self.counts else self.distribution
        routing = RoutingSpec(distribution=distribution, seed=self.seed)
        return Point("moe_layer", implementation, MoEShape.parse(shape), dtype, routing=routing, device=device)


@dataclass(frozen=True)
class Covered:
    """A report that concerns measuring, or more of our own kernels than a case can ask of all implementations: the
    tests that stand for it."""

    line: str
    tests: tuple[str, ...]
    how: str


@dataclass(frozen=True)
class InPart:
    """A report of which the suite meets a part only, by a case: ``what`` says which, and who asks for the rest."""

    line: str
    case: str
    what: str

    def __str__(self) -> str:
        return f"{self.line} ({self.case} {self.what})"


#: Most cases share its widths, so that kernels are compiled once for them.
_BASE = "256,128,64,8,2"
_MEMORY = "scaled down on a CPU: memory and time"

CASES = (
    Case("empty-expert", ("pytorch#152668",), "16,128,64,3,1", counts=(8, 0, 8)),
    Case(
        "gradients-of-empty-experts",
        ("pytorch#172439",),
        "3268,2048,768,6,1",
        counts=(162, 0, 2577, 446, 0, 83),
        cpu_shape="3268,128,48,6,1",
        cpu_reason=_MEMORY,
    ),
    Case("poisoned-allocator", ("MSLK#158",), _BASE, "poisoned", counts=(64, 64, 64, 0, 96, 96, 64, 64)),
    Case("zero-length-contraction", ("pytorch#192497",), "0,224,256,4,1"),
    Case("two-optimiser-steps", ("transformers#48205",), "200,128,64,8,2", "two_steps"),
    Case("identical-calls", ("pytorch#186365",), "1000,128,64,8,2", "repeated", distribution="skewed"),
    Case("stride-of-100", ("pytorch PR#150374",), "256,100,100,8,2", dtype="bfloat16"),
    Case("ordinary-inputs", ("sonic-moe#63",), "512,128,64,8,2"),
    Case("weight-layout", ("sonic-moe#45",), _BASE, "layout"),
    Case("block-sparse-widths", ("megablocks#170", "megablocks#178"), "256,128,128,8,2"),
    Case("n-of-192", ("megablocks#114",), "256,128,192,8,2"),
    Case("many-calls", ("megablocks#62",), "1024,128,64,64,4", "many_calls"),
    Case(
        "fine-grained",
        ("megablocks#166",),
        "8192,1536,128,48,24",
        cpu_shape="64,192,16,48,24",
        cpu_reason=_MEMORY,
    ),
    Case("five-wide-tokens", ("scattermoe#5",), "5,4096,128,8,2"),
    Case(
        "non-contiguous-weights",
        ("scattermoe PR#23",),
        "65536,512,1024,16,2",
        "strided_weights",
        cpu_shape="256,64,128,16,2",
        cpu_reason=_MEMORY,
    ),
    Case("groups-of-any-alignment", ("DeepGEMM PR#450",), "323,128,128,3,1", counts=(128, 130, 65)),
    Case("padded-group", ("DeepGEMM PR#103",), "441,128,128,4,1", counts=(128, 128, 57, 128)),
    Case("partial-sums", ("vllm#56887",), "256,1024,64,8,3", "repeated"),
    Case(
        "unbalanced-groups",
        ("pytorch#163425",),
        "65536,2048,3072,32,1",
        distribution="skewed",
        cpu_shape="512,64,96,32,1",
        cpu_reason=_MEMORY,
    ),
    Case("experts-10", ("sonic-moe sources",), "256,128,64,10,3"),
    Case("experts-12", ("sonic-moe sources",), "256,128,64,12,3"),
    Case("k-of-22", ("sonic-moe sources",), "256,128,64,32,22"),
    Case("k-of-1", (f"{ALSO}K = 1",), "256,128,64,8,1"),
    Case("k-of-all", (f"{ALSO}K = E",), "256,128,64,8,8"),
    # One token's router gradient is a difference that nearly cancels in some draws; this is not such a draw.
    Case("one-token", (f"{ALSO}T = 1",), "1,128,64,8,2", seed=2),
    Case("less-than-a-tile", (f"{ALSO}T below a tile",), "7,128,64,8,2"),
    Case("no-token", (f"{ALSO}T = 0",), "0,128,64,8,2"),
    Case("all-to-one-expert", (f"{ALSO}one expert",), "300,128,64,8,1", counts=(0, 0, 0, 300, 0, 0, 0, 0)),
    Case("ragged-widths", (f"{ALSO}ragged widths",), "256,136,72,8,2"),
    Case("tied-scores", (f"{ALSO}tied scores",), "256,128,64,8,3", tied=True),
    Case("nan-in-x", (f"{ALSO}NaN in x",), _BASE, "nan"),
    Case("inf-in-x", (f"{ALSO}inf in x",), _BASE, "infinity"),
    Case("float16", (f"{ALSO}fp16",), _BASE, dtype="float16"),
    Case("float32", (f"{ALSO}fp32",), _BASE, dtype="float32"),
    Case("two-shapes", ("tritonbench#346",), _BASE, "two_shapes", second_shape="384,192,64,8,2"),
    Case(
        "cold-caches",
        ("DeepGEMM PR#302",),
        _BASE,
        "cold_caches",
        cuda_only="on a CPU no implementation compiles kernels, so no two processes race for a cache",
    ),
    Case(
        "torch-compile",
        ("sonic-moe#21", "scattermoe#12"),
        _BASE,
        "compiled",
        cpu_shape="64,64,32,3,2",
        cpu_reason="scaled down on a CPU: a loop over experts is traced expert by expert",
    ),
    # A capture that fails spoils the process: the last of all.
    Case("cuda-graph", ("sonic-moe PR#15",), _BASE, "graph", cuda_only="a CUDA graph needs a GPU"),
)  # fmt: skip

COVERED = (
    Covered(
        "DeepGEMM#136",
        ("tests/test_regress.py::test_slower_and_confirmed_names_the_kernel",),
        "moebench regress finds what got slower",
    ),
    Covered(
        "DeepGEMM PR#116",
        ("tests/test_problem_reference.py::test_inputs_have_the_scale_of_a_trained_layer",),
        "inputs are random, never zeros or ones",
    ),
    Covered(
        "tritonbench#143",
        ("tests/test_profiling_timing.py::test_a_against_a_is_one_however_the_clock_drifts",),
        "faster is said of pairs that take turns in one process, with an interval",
    ),
    *(
        Covered(
            line,
            ("tests/gpu/test_conformance.py::test_a_replayed_graph_finds_a_cold_l2",),
            "replays after an eviction take longer than replays without",
        )
        for line in ("flashinfer#2187", "flashinfer PR#2213")
    ),
    Covered(
        "DeepGEMM PR#103",
        ("tests/interpreter/test_layer.py::test_pairs_without_an_expert_and_behind_the_last_token",),
        "indices of -1 among and behind the routed pairs, in our own kernels",
    ),
    Covered(
        "sonic-moe#45",
        ("tests/interpreter/test_layer.py::test_leading_sizes_and_layouts",),
        "our layer takes gate and up weights in either order",
    ),
)

IN_PART = (
    InPart(
        "pytorch#163425",
        "unbalanced-groups",
        "checks the result and not the time; moebench run skew compares a loop with grouped GEMMs at this size",
    ),
)


def get_case(name: str) -> Case:
    """The case of that name; `UserError` lists the known ones."""
    for case in CASES:
        if case.name == name:
            return case
    raise UserError(f"unknown case {name!r}; {choices(name, [case.name for case in CASES])}")

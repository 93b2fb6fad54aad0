"""Sweeps: what the committed ones ask for, and one clear line for every mistake in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import UserError
from harness.interface import DISTRIBUTIONS, KERNELS, Implementation, Layer, Point, Problem
from harness.record import PASSES
from harness.registry import BrokenPlugin, Registry
from harness.shapes import MoEShape
from harness.sweep import SWEEPS, Sweep, load_sweep, sweep_names
from harness.token_rounding import METHODS, ROUNDINGS


def stub(plugin: str, **attributes: object) -> type[Implementation]:
    """A plugin class that can be listed and asked, and never built."""

    class Stub(Implementation):
        name = plugin
        label = plugin
        upstream = "none"
        licence = "none"

        def build(self, problem: Problem) -> Layer:
            raise NotImplementedError

    for key, value in attributes.items():
        setattr(Stub, key, value)
    return Stub


def make_registry() -> Registry:
    both = {"devices": ("cuda", "cpu"), "dtypes": ("bfloat16", "float16", "float32"), "fake_tensors": True}
    gpu_only = ("scattermoe", "momoe", "megablocks", "megatron", "deepgemm", "deepgemm_pp", "liger")
    classes = {name: stub(name) for name in gpu_only}
    experts = {"operations": ("moe_layer", "routed_experts", *KERNELS)}
    classes |= {name: stub(name, **experts) for name in ("sonicmoe_official", "sonicmoe_triton")}
    classes |= {name: stub(name, **both) for name in ("sonicmoe_torch", "torch_grouped_mm", "torch_loop")}
    ablations = ("gather", "activation", "epilogue", "plain", "scatter")
    classes |= {f"ablation_{name}": stub(f"ablation_{name}", operations=KERNELS) for name in ablations}
    classes["torch_kernels"] = stub("torch_kernels", **{**both, "fake_tensors": False, "operations": KERNELS})
    bound = {**both, "fake_tensors": False, "operations": ("dense_bound",)}
    classes["cublas_bound"] = stub("cublas_bound", **bound, variants={"dense_bound": ("gemm", "gemm_glue")})
    return Registry(classes, [BrokenPlugin("halfway", "cannot be imported: SyntaxError", "halfway.py")])


REGISTRY = make_registry()
BASE = '[sweep]\ndescription = "x"\n'


def load(tmp_path: Path, text: str, name: str = "mine", **filters) -> Sweep:
    path = tmp_path / f"{name}.toml"
    path.write_text(text)
    return load_sweep(path, REGISTRY, **filters)


def paper_shapes() -> list[MoEShape]:
    sizes = {
        (40960, 768): ((256, 128, 8), (512, 64, 4), (1024, 32, 2)),
        (24576, 1536): ((256, 128, 8), (512, 64, 4), (1024, 32, 2)),
    }
    shapes = [MoEShape(T, d, *rest) for (T, d), layers in sizes.items() for rest in layers]
    shapes += [MoEShape(32768, 4096, *rest) for rest in ((256, 256, 16), (512, 128, 8), (1024, 64, 4))]
    shapes += [MoEShape(32768, 4096, *rest) for rest in ((512, 256, 16), (1024, 128, 8), (2048, 64, 4))]
    return shapes


def test_committed_sweeps() -> None:
    names = ("ablations", "breakdown", "ci", "cpu", "granularity", "kernels", "open_models", "paper_layers")
    assert sweep_names() == [*names, "skew", "smoke", "sparsity", "token_rounding"]
    for name in sweep_names():
        sweep = load_sweep(name, REGISTRY)
        assert sweep.name == name and sweep.points
        assert any(ratio.is_a_a for ratio in sweep.ratios) == bool(sweep.ratios)
        assert all(point.device == "cpu" for point in sweep.fakes)


def test_paper_layers() -> None:
    sweep = load_sweep("paper_layers", REGISTRY)
    layers = [point for point in sweep.points if point.operation == "moe_layer"]
    assert list(dict.fromkeys(point.shape for point in layers)) == paper_shapes()
    assert len(layers) == 12 * 12 and {point.dtype for point in layers} == {"bfloat16"}
    bound = [point for point in sweep.points if point.operation == "dense_bound"]
    assert len(bound) == 24 and {point.variant for point in bound} == {"gemm", "gemm_glue"}
    pairs = [(ratio.numerator, ratio.denominator) for ratio in sweep.ratios]
    for numerator in ("scattermoe", "deepgemm", "torch_grouped_mm"):
        assert pairs.count((numerator, "sonicmoe_official")) == 12
    for denominator, count in (("sonicmoe_triton", 12), ("cublas_bound", 24)):
        assert pairs.count(("sonicmoe_official", denominator)) == count
    a_a = [ratio for ratio in sweep.ratios if ratio.is_a_a]
    assert [str(ratio.point.shape) for ratio in a_a] == ["24576,1536,256,128,8", "32768,4096,1024,128,8"]
    assert all(ratio.passes == PASSES for ratio in sweep.ratios if ratio.bound != "gemm")
    assert len(sweep.fakes) == 36 and {point.shape for point in sweep.fakes} == set(paper_shapes())
    assert sweep.options.passes == PASSES and sweep.options.mode == "burst"


def test_granularity_and_sparsity_hold_their_constants() -> None:
    shapes = load_sweep("granularity", REGISTRY).shapes
    assert [shape.n for shape in shapes] == [64, 128, 256, 512, 1024]
    assert {(s.T, s.d, s.n * s.K, s.n * s.E) for s in shapes} == {(24576, 1536, 2048, 32768)}
    shapes = load_sweep("sparsity", REGISTRY).shapes
    assert [shape.E for shape in shapes if shape.n == 256] == [32, 64, 128, 256, 512]
    assert {(s.T, s.d, s.n, s.K) for s in shapes} == {(24576, 1536, 256, 8)}


def test_skew_compares_implementations_under_every_distribution() -> None:
    sweep = load_sweep("skew", REGISTRY)
    found: dict[tuple[str, str, str], list[str]] = {}
    for ratio in sweep.ratios:
        key = (ratio.numerator, ratio.denominator, str(ratio.point.shape))
        found.setdefault(key, []).append(ratio.point.routing.distribution)
        assert ratio.denominator_point.routing == ratio.point.routing and ratio.passes == PASSES
    headline, unbalanced = "24576,1536,256,128,8", "65536,2048,3072,32,1"
    assert found == {
        ("sonicmoe_official", "sonicmoe_triton", headline): list(DISTRIBUTIONS),
        ("scattermoe", "sonicmoe_triton", headline): list(DISTRIBUTIONS),
        ("torch_loop", "torch_grouped_mm", unbalanced): ["uniform", "skewed"],
        ("torch_loop", "sonicmoe_triton", unbalanced): ["uniform", "skewed"],
        ("sonicmoe_triton", "sonicmoe_triton", headline): ["uniform", "skewed"],
    }
    assert len(sweep.points) == 3 * len(DISTRIBUTIONS)


def test_cpu_sweep() -> None:
    sweep = load_sweep("cpu", REGISTRY)
    assert {point.device for point in sweep.points} == {"cpu"}
    assert {point.dtype for point in sweep.points} == {"float32", "bfloat16"}
    assert {point.routing.distribution for point in sweep.points} == {
        *("uniform", "skewed", "one_group", "empty_experts"),
    }
    assert {point.implementation for point in sweep.points} == {
        *("sonicmoe_torch", "torch_grouped_mm", "torch_loop", "cublas_bound"),
    }
    assert {point.shape for point in sweep.fakes} == set(paper_shapes())
    assert {point.routing.distribution for point in sweep.fakes} == {"uniform"}


def test_defaults_entries_and_tables(tmp_path: Path) -> None:
    sweep = load(
        tmp_path,
        BASE
        + """
[defaults]
dtype = ["float32", "float16"]
device = "cpu"
passes = ["backward", "forward"]
mode = "paced"
sampling_s = 2
pace_below_s = 0.01
seed = 3
[shapes]
all = ["few", "16,8,8,4,1"]
few = ["8,8,8,4,1"]
[[points]]
implementations = "*"
shapes = ["all", "8,8,8,4,1"]
conventions = ["softmax_topk"]
[[points]]
implementations = ["scattermoe"]
dtype = "bfloat16"
device = "cuda"
[[points.shapes]]
T = 8
d = 8
n = 8
E = 4
K = 2
[[ratios]]
numerator = ["torch_loop", "sonicmoe_torch"]
denominator = "torch_loop"
dtype = "float32"
passes = ["forward"]
""",
    )
    assert sweep.name == "mine"
    assert len(sweep.points) == 2 * 2 * 3 + 1
    assert sweep.points[0] == Point(
        "moe_layer",
        "sonicmoe_torch",
        MoEShape(8, 8, 8, 4, 1),
        "float32",
        layer=sweep.points[0].layer,
        routing=sweep.points[0].routing,
        device="cpu",
    )
    assert sweep.points[0].layer.router_convention == "softmax_topk" and sweep.points[0].routing.seed == 3
    assert sweep.points[-1].implementation == "scattermoe" and sweep.points[-1].device == "cuda"
    assert sweep.options.passes == ("forward", "backward")
    assert sweep.options.settings() == {"mode": "paced", "time_limit_s": 2, "pace_below_s": 0.01}
    assert len(sweep.ratios) == 2 * 3 and sweep.ratios[0].is_a_a
    ratio = sweep.ratios[1]
    assert ratio.numerator_point.implementation == "sonicmoe_torch"
    assert ratio.denominator_point.implementation == "torch_loop"
    assert ratio.numerator_point.shape == ratio.denominator_point.shape


def test_a_broken_plugin_stays_in_the_sweep(tmp_path: Path) -> None:
    sweep = load(tmp_path, BASE + '[[points]]\nimplementations = ["halfway"]\nshapes = ["8,8,8,4,1"]\n')
    assert [point.implementation for point in sweep.points] == ["halfway"]


def test_the_shared_groups_serve_files_elsewhere(tmp_path: Path) -> None:
    sweep = load(tmp_path, BASE + '[[points]]\nimplementations = ["scattermoe"]\nshapes = "paper"\n')
    assert sweep.shapes == paper_shapes()


POINTS = '[[points]]\nimplementations = ["torch_loop"]\nshapes = ["8,8,8,4,1"]\n'
A_A = '[[ratios]]\nnumerator = "torch_loop"\ndenominator = "torch_loop"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[sweep\n", "not valid TOML"),
        (POINTS, "sweep.description: missing"),
        (BASE, "asks for nothing"),
        (
            BASE + "[[point]]\n",
            "point: unknown key; choose from sweep, defaults, shapes, points, ratios, fake, routing (did you",
        ),
        (
            '[sweep]\ndescription = "x"\nnam = "y"\n',
            "sweep.nam: unknown key; choose from name, description, figure (did you mean",
        ),
        (BASE + '[defaults]\ndtypes = "float32"\n' + POINTS, "defaults.dtypes: unknown key"),
        (BASE + POINTS + 'routings = "uniform"\n', "points[1].routings: unknown key"),
        (
            BASE + POINTS + 'dtype = "bfloat"\n',
            "points[1].dtype: unknown dtype 'bfloat'; choose from bfloat16, float16",
        ),
        (BASE + POINTS + 'dtype = "bfloat"\n', "did you mean bfloat16?"),
        (BASE + '[defaults]\ndtype = "half"\n' + POINTS, "defaults.dtype: unknown dtype 'half'"),
        (BASE + POINTS + 'distributions = ["skew"]\n', "distributions: unknown distribution 'skew'"),
        (BASE + POINTS + 'conventions = ["softmax"]\n', "unknown router convention 'softmax'"),
        (BASE + POINTS + 'operation = "moe_layr"\n', "did you mean moe_layer?"),
        (BASE + POINTS + 'operation = "dense_bound"\n', "torch_loop does not offer the operation dense_bound"),
        (BASE + POINTS + 'device = "tpu"\n', "unknown device 'tpu'; choose from cuda, cpu"),
        (BASE + POINTS + 'variants = ["gemm"]\n', "variants: unknown variant 'gemm'"),
        ('[sweep]\nname = "../x"\ndescription = "x"\n' + POINTS, "sweep.name: '../x' cannot be a file's name"),
        (
            '[sweep]\nname = "x_planted"\ndescription = "x"\n' + POINTS,
            "sweep.name: 'x_planted' ends as files",
        ),
        (BASE + "[defaults]\ntime_limit_s = inf\n" + POINTS, "defaults.time_limit_s: must be a finite number"),
        (BASE + "[defaults]\ntarget_width = nan\n" + POINTS, "defaults.target_width: must be a finite number"),
        (BASE + "[defaults]\nmin_samples = 99\n" + POINTS, "defaults.min_samples: 99 exceeds max_samples = 50"),
        (BASE + POINTS + "seed = -1\n", "points[1].seed: must be a finite number of at least 0"),
        (BASE + POINTS + "dtype = 3\n", "points[1].dtype: must be a text, not 3"),
        (BASE + POINTS + "dtype = []\n", "points[1].dtype: is empty"),
        (BASE + POINTS.replace("torch_loop", "torch_lop"), "unknown implementation 'torch_lop'; choose from"),
        (BASE + POINTS.replace("torch_loop", "torch_lop"), "did you mean torch_loop?"),
        (BASE + POINTS.replace("8,8,8,4,1", "8,8,8,4"), "points[1].shapes: shape '8,8,8,4': expected five"),
        (BASE + POINTS.replace("8,8,8,4,1", "8,8,8,4,9"), "exceed E=4"),
        (BASE + POINTS.replace("8,8,8,4,1", "papers"), "unknown group of shapes 'papers'"),
        (BASE + POINTS.replace('["8,8,8,4,1"]', "[{T = 8, d = 8}]"), "needs exactly the keys T, d, n, E, K, not T, d"),
        (BASE + POINTS.replace('["8,8,8,4,1"]', "[{T = 8, d = 8, n = 8, E = 4, K = 1.5}]"), "K=1.5"),
        (BASE + POINTS.replace('["8,8,8,4,1"]', "[]"), "points[1].shapes: is empty"),
        (BASE + POINTS.replace('["8,8,8,4,1"]', "8"), "points[1].shapes: must be texts"),
        (BASE + '[shapes]\na = ["b"]\nb = ["a"]\n' + POINTS, "shapes.a: names itself (a -> b -> a)"),
        (BASE + '[[points]]\nimplementations = "*"\n', "points[1].shapes: missing"),
        (BASE + '[[points]]\nshapes = "paper"\n', "points[1].implementations: missing"),
        (
            BASE + '[defaults]\nmode = "fast"\n' + POINTS,
            "defaults.mode: unknown mode 'fast'; choose from burst, sustained, paced",
        ),
        (BASE + '[defaults]\npasses = ["fwd"]\n' + POINTS, "defaults.passes: unknown pass 'fwd'"),
        (BASE + '[defaults]\ntime_limit_s = "long"\n' + POINTS, "defaults.time_limit_s: must be a number"),
        (BASE + "[defaults]\nmax_samples = 2.5\n" + POINTS, "defaults.max_samples: must be a whole number"),
        (BASE + POINTS + A_A.replace('"torch_loop"', '"scattermoe"', 1), "ratios: no A/A ratio"),
        (BASE + A_A, "ratios[1].shapes: missing, and no [[points]]"),
        (BASE + POINTS + '[[ratios]]\nnumerator = "torch_loop"\n', "ratios[1].denominator: missing"),
        (BASE + "points = 3\n", "unknown key"),
        ("points = 3\n" + BASE, "points: must be an array of tables"),
        (
            BASE + POINTS + '[[fake]]\nimplementations = "*"\nshapes = "paper"\ndevice = "cpu"\n',
            "fake[1].device: unknown",
        ),
    ],
)
def test_mistakes_get_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "mine.toml"))
    assert "\n" not in str(caught.value)


def test_unknown_sweeps(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown sweep 'smok'; choose from ablations, .* \(did you mean smoke\?\)"):
        load_sweep("smok", REGISTRY)
    with pytest.raises(UserError, match="no such file"):
        load_sweep(tmp_path / "none.toml", REGISTRY)
    with pytest.raises(UserError, match="unknown sweep 'shapes'"):
        load_sweep("shapes", REGISTRY)
    assert load_sweep(SWEEPS / "smoke.toml", REGISTRY) == load_sweep("smoke", REGISTRY)


def test_filters() -> None:
    sweep = load_sweep("paper_layers", REGISTRY, only=["sonicmoe_official", "scattermoe"], shape="headline")
    assert sweep.implementations == ["scattermoe", "sonicmoe_official"]
    assert [(ratio.numerator, ratio.is_a_a) for ratio in sweep.ratios] == [
        ("scattermoe", False),
        ("sonicmoe_official", True),
    ]
    assert len(sweep.points) == 2 and not sweep.fakes
    sweep = load_sweep("paper_layers", REGISTRY, skip=["sonicmoe_official"], shape=["32768,4096,512,256,16"])
    assert [(ratio.numerator, ratio.denominator) for ratio in sweep.ratios] == [
        ("sonicmoe_triton", "cublas_bound"),
        ("sonicmoe_triton", "cublas_bound"),
    ]
    assert "sonicmoe_official" not in sweep.implementations
    for filters, message in (
        ({"only": ["scatermoe"]}, r"--only scatermoe: not in sweep paper_layers; .*did you mean scattermoe"),
        ({"skip": ["none"]}, "--skip none"),
        ({"shape": "1,2,3,4,1"}, "--shape 1,2,3,4,1: not in sweep"),
        ({"shape": "headlin"}, "did you mean headline"),
        ({"shape": "1,2"}, "expected five whole numbers"),
        ({"only": ["scattermoe"], "skip": ["scattermoe"]}, "leave nothing"),
    ):
        with pytest.raises(UserError, match=message):
            load_sweep("paper_layers", REGISTRY, **filters)


def test_a_ratio_over_a_bound() -> None:
    sweep = load_sweep("paper_layers", REGISTRY)
    bounds = [ratio for ratio in sweep.ratios if ratio.bound]
    cases = [(name, bound) for name in ("sonicmoe_official", "sonicmoe_triton") for bound in ("gemm_glue", "gemm")]
    for case in cases:
        own = [ratio for ratio in bounds if (ratio.numerator, ratio.bound) == case]
        assert [ratio.point.shape for ratio in own] == paper_shapes()
        assert {ratio.passes for ratio in own} == {("forward",) if case[1] == "gemm" else PASSES}
    assert len(bounds) == len(cases) * len(paper_shapes())
    for ratio in bounds:
        assert ratio.denominator == "cublas_bound"
        assert ratio.point.operation == "moe_layer" and not ratio.point.variant
        other = ratio.denominator_point
        assert (other.operation, other.variant, other.implementation) == ("dense_bound", ratio.bound, "cublas_bound")
        assert other.shape == ratio.point.shape and not ratio.is_a_a


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ('bound = "gem"', "did you mean gemm"),
        ('bound = ["gemm", "gemm_glue"]', "one variant"),
        ('bound = "gemm"\nnumerator = "cublas_bound"', "does not offer the operation moe_layer"),
    ],
)
def test_a_bad_bound_is_refused(tmp_path: Path, line: str, part: str) -> None:
    numerator = "" if "numerator" in line else 'numerator = "torch_loop"'
    text = f"""
[sweep]
description = "x"

[[ratios]]
{numerator}
denominator = "cublas_bound"
shapes = ["8,16,8,4,2"]
{line}
"""
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UserError, match=part):
        load_sweep(tmp_path / "mine.toml", REGISTRY)


def test_works_of_a_bound_know_both_points() -> None:
    from harness.session import works_of

    work = next(work for work in works_of(load_sweep("paper_layers", REGISTRY)) if work.bound)
    assert work.points[0].operation == "moe_layer" and work.points[1].operation == "dense_bound"
    assert work.bound == "gemm_glue" and "gemm_glue" in work.title


# Routing methods.

METHODS_HEAD = """
[sweep]
description = "x"

[shapes]
one = ["64,16,8,4,2"]
"""


def test_token_rounding_counts_every_method_and_times_the_roundings() -> None:
    sweep = load_sweep("token_rounding", REGISTRY)
    assert sweep.figure == "token_rounding"
    assert {point.routing.method for point in sweep.accounts} == set(METHODS)
    assert {(point.operation, point.implementation, point.device) for point in sweep.accounts} == {
        ("token_rounding", "routing", "cpu")
    }
    assert len(sweep.accounts) == len(set(sweep.accounts)) == 8 * 9 * 2
    sizes = {(point.shape.T, point.shape.E) for point in sweep.accounts}
    assert {E for T, E in sizes if T == 16384} == {32, 64, 128, 256, 512}
    assert {T for T, E in sizes if E == 256} == {4096, 8192, 16384, 32768, 65536}
    assert {point.routing.method for point in sweep.points} == {"top_k", *ROUNDINGS}
    for ratio in sweep.ratios:
        assert ratio.point.operation in ("routed_experts", "moe_layer") and ratio.numerator == ratio.denominator
        assert ratio.point.routing.method == "top_k"
        assert ratio.denominator_point.routing.method == ("top_k" if ratio.is_a_a else "nearest")
    assert sum(ratio.is_a_a for ratio in sweep.ratios) == 1


def test_methods_multiply_points(tmp_path: Path) -> None:
    text = (
        METHODS_HEAD
        + """
[defaults]
methods = ["top_k", "up"]
m_tile = 16

[[points]]
operation = "routed_experts"
implementations = ["sonicmoe_triton"]
shapes = ["one"]

[[routing]]
methods = "down"
shapes = ["one"]
distributions = ["uniform", "skewed"]
m_tile = 4
"""
    )
    sweep = load(tmp_path, text)
    assert [(p.routing.method, p.routing.m_tile) for p in sweep.points] == [("top_k", 16), ("up", 16)]
    found = [(p.routing.method, p.routing.distribution, p.routing.m_tile) for p in sweep.accounts]
    assert found == [("down", "uniform", 4), ("down", "skewed", 4)]
    assert not sweep.filter(only=["routing"]).points and len(sweep.filter(only=["routing"]).accounts) == 2


def test_works_of_two_methods_know_both_points() -> None:
    from harness.session import works_of

    works = works_of(load_sweep("token_rounding", REGISTRY))
    assert {work.kind for work in works} == {"point", "ratio", "account"}
    work = next(work for work in works if work.denominator_routing)
    assert [point.routing.method for point in work.points] == ["top_k", "nearest"]
    assert "(top_k / nearest)" in work.title
    (same,) = (work for work in works if work.kind == "ratio" and not work.denominator_routing)
    assert same.points[0] == same.points[1]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('[[routing]]\nshapes = ["one"]', "methods: missing; choose from top_k"),
        ('[[routing]]\nmethods = ["nearest"]', "shapes: missing"),
        ('[[routing]]\nmethods = ["neares"]\nshapes = ["one"]', "did you mean nearest"),
        ('[[routing]]\nmethods = ["up"]\nshapes = ["one"]\ndtype = "float16"', "dtype: unknown key"),
        (
            '[[points]]\nimplementations = "torch_loop"\nshapes = ["one"]\nmethods = ["top_k", "expert_choice"]',
            r"points\[1\].methods: moe_layer takes top_k, nearest, .*, not expert_choice",
        ),
        (
            '[[fake]]\nimplementations = "torch_loop"\nshapes = ["one"]\noperation = "routed_experts"',
            "cannot be traced",
        ),
        ('[defaults]\nmethods = ["x"]\n[[points]]\nimplementations = "torch_loop"\nshapes = ["one"]', "routing method"),
    ],
)
def test_bad_methods_are_named(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(UserError, match=part):
        load(tmp_path, METHODS_HEAD + text)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ('denominator_method = "neares"', "did you mean nearest"),
        ('denominator_method = ["up", "down"]', "must be one method"),
        ('denominator_method = "up"\nbound = "gemm"', r"bound: the bound multiplies T\*K rows"),
        ('denominator_method = "token_drop"\noperation = "moe_layer"', "moe_layer takes .*, not token_drop"),
    ],
)
def test_a_bad_denominators_method_is_named(tmp_path: Path, line: str, part: str) -> None:
    denominator = "cublas_bound" if "bound" in line else "sonicmoe_triton"
    operation = "" if "operation" in line else 'operation = "routed_experts"'
    text = f"""
[[ratios]]
{operation}
numerator = "sonicmoe_triton"
denominator = "{denominator}"
shapes = ["one"]
{line}
"""
    with pytest.raises(UserError, match=part):
        load(tmp_path, METHODS_HEAD + text)


def test_a_trace_has_top_k_whatever_the_defaults_say(tmp_path: Path) -> None:
    text = (
        METHODS_HEAD
        + """
[defaults]
methods = ["top_k", "nearest"]

[[points]]
operation = "routed_experts"
implementations = "sonicmoe_triton"
shapes = ["one"]

[[fake]]
implementations = "torch_loop"
shapes = ["one"]
"""
    )
    assert [point.routing.method for point in load(tmp_path, text).fakes] == ["top_k"]


def test_a_figure_must_exist(tmp_path: Path) -> None:
    text = '[sweep]\ndescription = "x"\nfigure = "token_roundin"\n[[routing]]\nmethods = "up"\nshapes = ["8,8,8,4,2"]\n'
    with pytest.raises(UserError, match="did you mean token_rounding"):
        load(tmp_path, text)

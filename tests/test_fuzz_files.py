"""Sweeps, claims, baselines, tuned choices and options with anything in them: a value, or one line that says what is
wrong."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hostile import NUMBERS, SAME, TEXTS, as_json, spoiled, values
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sweep import REGISTRY

from harness import accounts, session, traces
from harness.claims import engine
from harness.claims.paper import CLAIMS, load_entries
from harness.documents import WHOLE, load_json, load_toml, save
from harness.errors import UserError
from harness.estimate import job_seconds
from harness.interface import Point, RoutingSpec
from harness.regress import baseline
from harness.shapes import MoEShape
from harness.sweep import MOST_SEED, SHAPES_FILE, SWEEPS, load_sweep, sweep_names
from harness.token_rounding import METHODS, MOST_M_TILE, method_counts, token_drop
from harness.training import costs, log, power
from harness.training.config import CONFIGURATIONS, Config, configuration_names, load_config
from harness.training.loop import learning_rate
from implementations.sonicmoe_triton import tuned
from plots import runs as plot_runs
from plots import training_curves


def toml(value: Any) -> str:
    """A value as TOML writes it, on one line; None, which TOML does not have, as a word."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return hex(value * value) if value > 10**300 else str(value)  # beyond the digits that Python takes
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml, value)) + "]"
    return "nothing"


def written(tables: Any) -> bytes:
    try:
        lines = [f"{json.dumps(key)} = {toml(value)}" for key, value in tables.items()]
    except RecursionError:
        lines = ["x = " + "[" * 5000]
    return "\n".join(lines).encode(errors="surrogatepass")


def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The file as it is, cut, with bytes replaced, or another one altogether."""
    kind = draw(st.sampled_from(["whole"] * 10 + ["cut", "bytes", "bytes", "raw", "mark"]))
    if kind == "cut":
        return content[: draw(st.integers(0, len(content)))]
    if kind == "bytes":
        place = draw(st.integers(0, len(content)))
        return content[:place] + draw(st.binary(max_size=4)) + content[place + draw(st.integers(0, 4)) :]
    if kind == "raw":
        return draw(st.one_of(st.binary(max_size=80), st.text(max_size=80).map(str.encode)))
    return b"\xef\xbb\xbf" + content if kind == "mark" else content


def one_line_or_value(read: Callable[[], Any], name: str = "") -> Any:
    """What ``read`` gives; None where it refuses in one line that names the file."""
    try:
        return read()
    except UserError as error:
        text = str(error)
        assert text and "\n" not in text and text.isprintable() and len(text) < 5000 and name in text
        return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


SWEEP_TREES = [tomllib.loads((SWEEPS / f"{name}.toml").read_text(encoding="utf-8")) for name in sweep_names()]
SWEEP_TREES.append({
    "sweep": {"name": "all", "description": "Every key", "figure": "token_rounding"},
    "defaults": {
        "dtype": "bfloat16", "distributions": ["uniform"], "conventions": ["topk_softmax"], "methods": ["top_k"],
        "seed": 0, "device": "cpu", "m_tile": 128, "passes": ["forward"], "mode": "burst", "time_limit_s": 600,
        "min_samples": 10, "max_samples": 50, "target_width": 0.01, "sampling_s": 1.0,
        "pace_below_s": 0.01,
    },
    "shapes": {"small": ["256,64,32,8,2"], "both": ["small", {"T": 8, "d": 8, "n": 8, "E": 4, "K": 2}]},
    "points": [{"implementations": ["torch_loop"], "shapes": ["both"]}, {"implementations": "*", "shapes": "small"}],
    "ratios": [{"numerator": "torch_loop", "denominator": ["torch_loop", "sonicmoe_torch"]},
               {"numerator": "torch_loop", "denominator": "cublas_bound", "bound": "gemm", "passes": ["forward"]},
               {"operation": "routed_experts", "numerator": "sonicmoe_triton", "denominator": "sonicmoe_triton",
                "denominator_method": "nearest", "shapes": ["small"]}],
    "fake": [{"implementations": "torch_loop", "shapes": ["small"], "dtype": "float32"}],
    "routing": [{"methods": ["top_k", "nearest"], "shapes": "both", "distributions": ["skewed"], "m_tile": 64}],
})  # fmt: skip


@st.composite
def sweeps(draw: st.DrawFn) -> bytes:
    return damaged(draw, written(draw(spoiled(draw(st.sampled_from(SWEEP_TREES)), values))))


@given(sweeps(), sweeps())
@settings(SAME, max_examples=300)
def test_any_sweep_is_read_or_refused(folder: Path, content: bytes, shared: bytes) -> None:
    path = folder / "mine.toml"
    path.write_bytes(content)
    (folder / SHAPES_FILE).unlink(missing_ok=True)
    sweep = one_line_or_value(lambda: load_sweep(path, REGISTRY), ".toml")
    if sweep is not None:
        for work in session.works_of(sweep):
            assert work.title and all(point.shape.routed_rows >= 0 for point in work.points)
            assert job_seconds(work.kind, work.point) >= 0
    (folder / SHAPES_FILE).write_bytes(shared)
    one_line_or_value(lambda: load_sweep(path, REGISTRY, shape="small"))


number_texts = st.one_of(
    st.integers().map(str),
    st.sampled_from([str(number) for number in NUMBERS] + TEXTS + ["1_0", "+8", " 8 ", "٣", "8.0", "0x8", "-0", "2²"]),
)
sizes = st.sampled_from([0, 1, 2, 8, 64, 2**31 - 2, 2**31 - 1, 2**31, 2**63, 10**400])
shape_texts = st.one_of(
    st.lists(number_texts, max_size=7).map(",".join),
    st.lists(sizes.map(str), min_size=5, max_size=5).map(",".join),
    st.sampled_from(["8,16,8,4,2", "paper", "headline", "0,1,1,1,1", ",,,,", "8;16;8;4;2"]),
    st.text(max_size=30),
)


@given(shape_texts)
@settings(SAME, max_examples=300)
def test_any_shape_is_read_or_refused(text: str) -> None:
    shape = one_line_or_value(lambda: MoEShape.parse(text))
    if shape is not None:
        assert MoEShape.parse(str(shape)) == shape and shape.routed_rows >= 0
        assert shape.granularity > 0 and 0 < shape.activation_ratio <= 1


@given(st.lists(st.one_of(sizes, values), min_size=5, max_size=5))
@settings(SAME, max_examples=150)
def test_a_shape_of_anything_is_one_or_refused(its: list[Any]) -> None:
    one_line_or_value(lambda: MoEShape(*its))


def test_a_size_of_more_digits_than_python_writes_is_refused() -> None:
    with pytest.raises(UserError, match="shape d: must be at most 2147483647"):
        MoEShape(8, 10**5000, 8, 4, 2)


@given(st.one_of(shape_texts, st.text(max_size=20), number_texts.map("median:{}%".format)))
@settings(SAME, max_examples=200)
def test_any_threshold_is_read_or_refused(text: str) -> None:
    found = one_line_or_value(lambda: baseline.parse_threshold(text), "--threshold")
    if found is not None:
        assert 0 < found.fraction <= 10 and baseline.parse_threshold(str(found)) == found


CLAIM_TREE = tomllib.loads(CLAIMS.read_text(encoding="utf-8"))


@st.composite
def claim_files(draw: st.DrawFn) -> bytes:
    return damaged(draw, written(draw(spoiled(CLAIM_TREE, values))))


@given(claim_files())
@settings(SAME, max_examples=200)
def test_any_file_of_claims_is_read_or_refused(folder: Path, content: bytes) -> None:
    path = folder / "claims.toml"
    path.write_bytes(content)
    entries = one_line_or_value(lambda: load_entries(path), "claims.toml")
    if entries is not None:
        one_line_or_value(lambda: engine.judge([], path), "claims.toml")


BASELINE_TREE = {
    "schema": 1, "gpu": "NVIDIA H200", "made": "2026-01-31T12:00:00+00:00",
    "environment": {"gpu": "NVIDIA H200", "driver": "1", "torch": None}, "threshold": "median:5%",
    "points": [
        {"what": what, "implementation": "a", "shape": "8,16,8,4,2", "pass": "forward", "threshold": "median:2.5%",
         "device_ms": {"basis": "graph", "median": 1.0, "ci95": [0.9, 1.1]}, "kernels": {"up": 3.5, "down": 2},
         "reference": {"basis": "graph", "value": 1.2, "ci95": [1.1, 1.3]}, "key": what}
        for what in ("one", "two")
    ],
}  # fmt: skip


@st.composite
def json_files(draw: st.DrawFn, tree: Any) -> bytes:
    return damaged(draw, as_json(draw(spoiled(tree, values))))


@given(json_files(BASELINE_TREE))
@settings(SAME, max_examples=300)
def test_any_baseline_is_read_or_refused(folder: Path, content: bytes) -> None:
    path = folder / "baseline.json"
    path.write_bytes(content)
    found = one_line_or_value(lambda: baseline.read(path), "baseline.json")
    if found is not None:
        # What it says of its environment goes into reports, and all of it into the next baseline.
        baseline.write(folder / "again.json", found)
        assert baseline.read(folder / "again.json").as_dict() == found.as_dict()


TUNED_TREE = json.loads(tuned.TABLE.read_text(encoding="utf-8"))
TUNED_TREE["choices"] = [*TUNED_TREE["choices"][:4], {**TUNED_TREE["choices"][0], "options": {"plain": True}}]


@given(json_files(TUNED_TREE))
@settings(SAME, max_examples=200)
def test_any_table_of_tuned_choices_is_read_or_refused(folder: Path, content: bytes) -> None:
    path = folder / "tuned.json"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(tuned, "TABLE", path)
        tuned._choices.cache_clear()
        one_line_or_value(lambda: tuned.overrides("down_projection", 768, 256, 12), "tuned.json")
    tuned._choices.cache_clear()


def array_file(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


small = st.integers(0, 4).flatmap(lambda T: st.lists(st.lists(st.integers(-1, 9), min_size=2, max_size=2), min_size=T))
ARRAYS = st.one_of(
    small.map(lambda its: np.array(its, dtype=np.int64).reshape(-1, 2)),
    st.sampled_from(["int8", "uint64", "float32", "bool", "U1", "datetime64[s]", "i4,i4"]).map(
        lambda kind: np.zeros((3, 2), kind)
    ),
    st.sampled_from([(), (0,), (3, 0), (0, 2), (2, 2, 2)]).map(lambda shape: np.zeros(shape, np.int32)),
)


@st.composite
def trace_files(draw: st.DrawFn) -> tuple[str, bytes]:
    """The end of a file's name, and what it holds."""
    form = draw(st.sampled_from([".json", ".csv", ".txt", ".npy", ".bin"]))
    counts = st.lists(st.one_of(st.integers(0, 50), sizes), min_size=1, max_size=5)
    if form == ".json":
        content = as_json(draw(spoiled(draw(counts), values)))
    elif form == ".npy":
        content = array_file(draw(ARRAYS))
    else:
        content = ", ".join(map(str, draw(counts))).encode()
    return form, damaged(draw, content)


@given(trace_files(), st.sampled_from(["8,16,8,4,2", "3,16,8,4,2", "0,16,8,3,1", "2147483647,1,1,3,2"]))
@settings(SAME, max_examples=300)
def test_any_trace_is_read_or_refused(folder: Path, file: tuple[str, bytes], shape: str) -> None:
    path, size = folder / f"trace{file[0]}", MoEShape.parse(shape)
    path.write_bytes(file[1])
    trace = one_line_or_value(lambda: traces.read(path), path.name)
    if trace is None or one_line_or_value(lambda: trace.check(size) or True, path.name) is None:
        return
    assert traces.FORM.fullmatch(trace.distribution)
    if trace.counts is not None:
        counts = trace.counts_at(size)
        assert sum(counts) == size.routed_rows and min(counts) >= 0 and max(counts) <= size.T
    if size.T < 100:
        chosen = trace.experts(size).sort(1).values
        assert chosen.shape == (size.T, size.K) and not bool((chosen[:, 1:] == chosen[:, :-1]).any())


@given(st.one_of(st.binary(max_size=60), st.binary(max_size=10).map(lambda part: part * 2000)))
@settings(SAME, max_examples=200)
def test_any_bytes_are_a_document_or_refused(folder: Path, content: bytes) -> None:
    path = folder / "document"
    path.write_bytes(content)
    for load in (load_toml, load_json):
        one_line_or_value(lambda load=load: load(path), "document")


def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="pipe: cannot be written: not a file"):
        save(pipe, "text")
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_what_the_disk_does_not_take_whole_changes_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept.json"
    save(path, "before")

    def half(self: Path, text: str, encoding: str) -> None:
        self.write_bytes(text[:2].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(UserError, match=r"kept\.json: cannot be written: No space left"):
        save(path, "after")
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


@given(
    method=st.sampled_from(METHODS),
    m_tile=st.one_of(st.integers(1, 300), st.sampled_from([2**30, MOST_M_TILE - 1, MOST_M_TILE])),
    seed=st.one_of(st.integers(0, 99), st.sampled_from([MOST_SEED - 1, MOST_SEED])),
    tokens=st.integers(0, 40),
)
@settings(SAME, max_examples=100)
def test_every_tile_and_seed_that_a_sweep_may_name_can_be_counted(
    method: str, m_tile: int, seed: int, tokens: int
) -> None:
    routing = RoutingSpec(method, "uniform", seed, m_tile)
    point = Point(accounts.OPERATION, accounts.NAME, MoEShape(tokens, 8, 8, 4, 2), routing=routing, device="cpu")
    found = accounts.account(point)["routing"]
    assert 0 <= found["routed_rows"] <= found["padded_rows"] <= 4 * max(m_tile, tokens + m_tile - 1)


@pytest.mark.parametrize("m_tile", [0, -1, MOST_M_TILE + 1, 2**63, 2**70, 2**999], ids=lambda tile: f"{tile:.0e}")
@pytest.mark.parametrize("method", METHODS)
def test_a_tile_beyond_what_can_be_counted_is_refused(tmp_path: Path, method: str, m_tile: int) -> None:
    with pytest.raises(ValueError, match=r"m_tile must be in 1\.\.2147483647"):
        method_counts(torch.tensor([3, 1]), 4, 1, method, m_tile)
    path = tmp_path / "tile.toml"
    tile = hex(m_tile) if m_tile > 0 else m_tile
    entry = f'methods = "{method}"\nshapes = "8,8,8,2,1"\nm_tile = {tile}'
    path.write_text(f'[sweep]\ndescription = "x"\n[[routing]]\n{entry}')
    with pytest.raises(UserError, match="m_tile: "):
        load_sweep(path, REGISTRY)


@pytest.mark.parametrize("factor", [1e3, 1e30, 1e300])
def test_a_capacity_beyond_all_tokens_drops_none(factor: float) -> None:
    counts = torch.tensor([3, 1])
    assert method_counts(counts, 4, 1, "token_drop", 1, factor).tolist() == [3, 1]
    assert len(token_drop(torch.zeros(4, 2), 1, factor).experts) == 4


CONFIGURATION_TREES = [
    tomllib.loads((CONFIGURATIONS / f"{name}.toml").read_text(encoding="utf-8")) for name in configuration_names()
]
#: A tree with every field.
CONFIGURATION_TREES.append({
    "all": {key: value for key, value in load_config("tiny").as_dict().items() if key != "name"}
})  # fmt: skip


@st.composite
def configurations(draw: st.DrawFn) -> bytes:
    return damaged(draw, written(draw(spoiled(draw(st.sampled_from(CONFIGURATION_TREES)), values))))


def usable(config: Config) -> None:
    """What is computed of a configuration before and while it trains."""
    rates = [learning_rate(config, step) for step in (0, config.warmup, config.steps // 2, config.steps - 1)]
    assert all(0 <= rate <= config.learning_rate for rate in rates)
    assert costs.parameters(config) > 0 and costs.model_flops(config) > 0 and config.micro_batches >= 1
    torch.Generator().manual_seed(1_000_003 * config.seed + 2**31)
    torch.zeros(2).add_(torch.ones(2), alpha=-config.learning_rate / (1 - config.beta1))
    torch.zeros(2).mul_(1 - config.learning_rate * config.weight_decay)


@given(configurations())
@settings(SAME, max_examples=300)
def test_any_configuration_is_read_or_refused(folder: Path, content: bytes) -> None:
    path = folder / "mine.toml"
    path.write_bytes(content)
    config = one_line_or_value(lambda: load_config(str(path)), "mine")
    if config is not None:
        usable(config)


NUMBER_FIELDS = [name for name, value in load_config("tiny").as_dict().items() if type(value) in (int, float)]


@given(st.sampled_from(NUMBER_FIELDS), st.sampled_from([its for its in NUMBERS if type(its) is float or its <= WHOLE]))
@settings(SAME, max_examples=400)
def test_any_number_of_a_configuration_is_taken_or_refused(name: str, number: float) -> None:
    config = one_line_or_value(lambda: load_config("tiny", {name: number}), "tiny")
    if config is not None:
        usable(config)


#: Of a run: its lines and its configuration.
RUN_TREE = {
    "lines": [
        *({"step": step, "loss": 5.0 / step, "balance": 1.0, "gradient_norm": 0.5, "learning_rate": 1e-3,
           "tokens": 64 * step, "seconds": 0.25} for step in (1, 2, 3)),
        {"step": 3, "validation_loss": 2.5},
    ],
    "config": load_config("tiny", {"routing": "nearest"}).as_dict(),
}  # fmt: skip


@st.composite
def runs(draw: st.DrawFn) -> tuple[bytes, bytes]:
    part = draw(st.sampled_from(["lines", "lines", "config"]))
    tree = {**RUN_TREE, part: draw(spoiled(RUN_TREE[part], values))}
    lines = b"".join(as_json(line) + b"\n" for line in tree["lines"])
    return damaged(draw, lines), damaged(draw, as_json(tree["config"]))


@given(runs())
@settings(SAME, max_examples=400)
def test_any_run_is_read_or_refused(folder: Path, its: tuple[bytes, bytes]) -> None:
    places = [folder / "run-0", folder / "run-1"]
    config = {**RUN_TREE["config"], "routing": "top_k"}
    for place, lines, kept in ((places[0], RUN_TREE["lines"], config), (places[1], None, None)):
        place.mkdir(exist_ok=True)
        content = its if lines is None else (b"".join(as_json(line) + b"\n" for line in lines), as_json(kept))
        for name, text in zip((log.FILE, log.CONFIG_FILE), content, strict=True):
            (place / name).write_bytes(text)
    arms = one_line_or_value(lambda: power.arms_of(places), "run-1")
    if arms is not None:
        assert all(line.isprintable() for line in power.table(arms))
        curves = training_curves.curves_of(places)
        assert all(len(tokens) == len(losses) for runs in curves.values() for tokens, losses in runs.values())
    power.sets_of(places)


def test_a_line_of_the_curves_with_a_text_for_a_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / log.CONFIG_FILE).write_bytes(as_json(RUN_TREE["config"]))
    (tmp_path / log.FILE).write_bytes(b'{"step":3,"validation_loss":"q"}\n')
    for main in (power.main, lambda given: plot_runs.main([*given, "--output", str(tmp_path)])):
        with pytest.raises(SystemExit) as end:
            main([str(tmp_path)])
        said = capsys.readouterr().err
        assert end.value.code == 2 and f"{tmp_path / log.FILE}:1: damaged: validation_loss must be a number" in said


plan_numbers = st.one_of(st.sampled_from([str(number) for number in NUMBERS if number < 10**400]), number_texts)


@given(plan_numbers, plan_numbers)
@settings(SAME, max_examples=150)
def test_any_plan_is_told_or_refused(deviation: str, seeds: str) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as error, contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            power.main(["--plan", "--", deviation, seeds])
        except SystemExit as end:
            assert end.code == 2
    assert bool(out.getvalue()) != bool(error.getvalue()) and "Traceback" not in error.getvalue()
    assert "inf" not in out.getvalue() and "nan" not in out.getvalue()

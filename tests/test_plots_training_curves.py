"""The curves of runs that differ in routing and seed, drawn by name of folder, and as `moebench plot` finds them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import plots
from harness.errors import UserError
from harness.registry import default_registry
from harness.report import figures
from harness.token_rounding import routing_name
from harness.training import log, power, rows
from harness.training.config import load_config
from plots import runs as named
from plots import style, training_curves

GPU, FOLDER = "NVIDIA Imaginary 100", "nvidia_imaginary_100"


def run(folder: Path, routing: str = "top_k", seed: int = 0, ended: bool = True, **changes: object) -> Path:
    """A run of sixty steps, worse by nothing but its seed."""
    config = load_config("tiny", {"routing": routing, "seed": seed, **changes})
    place = folder / f"{routing_name(config.routing, config.m_tile)}-{seed}-{config.layers}"
    its = log.Log(place, 0, config.as_dict())
    for step in range(1, 61):
        its.write(step=step, loss=5.0 / step + seed, tokens=step * 1000)
    if ended:
        its.write(step=60, validation_loss=2.0 + 0.01 * seed)
    its.close()
    return place


def trained(folder: Path) -> Path:
    """The row of a run on the GPU; where such runs lie."""
    config = load_config("tiny")
    base = rows.base_row(config, default_registry().get(config.implementation), 1, "cpu")
    base |= {"measured_on": "cuda", "environment": {**base["environment"], "measured_on": "cuda", "gpu": GPU}}
    rows.append(folder, rows.measured_row(base, config, 1, None, 2.5, 2.0, 10**9, [], None))
    return folder / "training"


@pytest.fixture(autouse=True)
def _no_other_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "FIGURES", {})


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that is saved."""
    found: list[Figure] = []
    save = style.save

    def kept(figure: Figure, folder: Path, name: str) -> list[Path]:
        found.append(figure)
        return save(figure, folder, name)

    monkeypatch.setattr(style, "save", kept)
    return found


def test_the_figure_of_the_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str], made: list[Figure]) -> None:
    runs = [run(tmp_path, routing, seed) for routing in ("nearest", "top_k", "expert_choice") for seed in range(2)]
    runs += [run(tmp_path, "up")]
    curves = training_curves.curves_of(runs)
    assert [(arm, len(its)) for arm, its in curves.items()] == [
        ("top_k", 2), ("expert_choice", 2), ("nearest-16", 2), ("up-16", 1)
    ]  # fmt: skip
    named.main([*map(str, runs), "--output", str(tmp_path / "figures")])
    assert (tmp_path / "figures" / "training_curves.svg").is_file()
    assert capsys.readouterr().out.count("wrote ") == 2
    left, right = made[0].axes
    # On the right a mean for each arm but top-K, a band for those with two seeds, and zero.
    assert len(left.lines) == 7 and len(right.lines) == 4 and len(right.collections) == 2
    training_curves.draw(runs[:1], tmp_path / "one")  # neither top-K nor a second seed
    (tmp_path / "file").touch()
    for folder, output, said in (
        (tmp_path, tmp_path, "holds no run"),
        (runs[0], tmp_path / "file" / "below", "cannot be written"),
    ):
        with pytest.raises(SystemExit, match=r"^2$"):
            named.main([str(folder), "--output", str(output)])
        error = capsys.readouterr().err
        assert error.startswith("runs: ") and said in error and error.count("\n") == 1


def test_the_mean_over_seeds_and_its_range(tmp_path: Path, made: list[Figure]) -> None:
    runs = [run(tmp_path, "top_k", seed) for seed in range(2)] + [run(tmp_path, "nearest", seed) for seed in range(2)]
    lines = log.read(runs[-1])
    its = log.Log(runs[-1], 0, log.read_config(runs[-1]))
    for line in lines:
        its.write(**({**line, "loss": line["loss"] + 0.5} if "loss" in line else line))
    its.close()
    training_curves.draw(runs, tmp_path)
    right = made[0].axes[1]
    assert right.lines[0].get_ydata() == pytest.approx(0.25)
    band = right.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((0.0, 0.5))


def test_no_two_arms_look_alike() -> None:
    arms = ["top_k", *(f"{name}-128" for name in "abcdefghijkl")]
    looks = training_curves._looks(arms)
    assert len({tuple(sorted(look.items())) for look in looks.values()}) == len(looks) == len(arms)


def test_averages_of_neighbours() -> None:
    assert training_curves.smooth([1.0, 3.0, 5.0, 7.0], 2).tolist() == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("place", [FOLDER, f"local/{FOLDER}", "of_my_own"])
def test_runs_beside_a_gpus_rows_are_drawn(
    tmp_path: Path, command_line: Callable[..., tuple[int, str, str]], place: str
) -> None:
    folder = trained(tmp_path / place)
    for routing in ("top_k", "nearest"):
        run(folder, routing)
    code, said, error = command_line("plot", "--results", tmp_path, "--output", tmp_path / "out")
    assert code == 0 and not error and said.count("wrote ") == 2
    assert {path.name for path in (tmp_path / "out" / FOLDER).iterdir()} == {
        "training_curves.svg",
        "training_curves.png",
    }
    found, problems = figures.draw(tmp_path, tmp_path / "report")
    assert not problems and [(one.name, one.folder) for one in found] == [("training_curves", FOLDER)]
    assert found[0].caption.startswith("Loss curves") and "<path" in figures.inline(found[0])


BOTH = [("top_k", 0), ("nearest", 0)]


@pytest.mark.parametrize(
    ("arms", "place", "ended"),
    [
        ([], FOLDER, True),
        ([("top_k", 0), ("top_k", 1)], FOLDER, True),
        ([("nearest", 0), ("up", 0)], FOLDER, True),
        (BOTH, FOLDER, False),
        (BOTH, "cpu", True),
    ],
)
def test_nothing_is_drawn_without_runs_to_compare(
    tmp_path: Path, arms: list[tuple[str, int]], place: str, ended: bool
) -> None:
    folder = trained(tmp_path / FOLDER)
    for routing, seed in arms:
        run(tmp_path / place / "training", routing, seed, ended)
    for name, text in (("a", "{}"), ("b", "[1]"), ("c", "{")):  # no runs
        (folder / name).mkdir(parents=True)
        (folder / name / log.CONFIG_FILE).write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plots.draw(tmp_path, tmp_path / "out") == ([], [])


def test_the_largest_set_is_drawn(tmp_path: Path, made: list[Figure]) -> None:
    folder = trained(tmp_path / FOLDER)
    small = [run(folder, routing, layers=3) for routing in ("top_k", "nearest")]
    # Copies of the same runs count once.
    more = [run(tmp_path / "local" / FOLDER / "training", routing, layers=3) for routing in ("top_k", "nearest")]
    large = [run(folder, "top_k"), run(folder, "nearest"), run(folder, "nearest", 1)]
    assert sorted(map(len, power.sets_of([*small, *more, *large]))) == [3, 4]
    plots.draw(tmp_path, tmp_path / "out")
    assert len(made) == 1 and any("2 layers" in text.get_text() for text in made[0].texts)
    with pytest.raises(UserError, match="layers = 2, 3 in the runs before"):
        training_curves.draw([*small, *large], tmp_path)

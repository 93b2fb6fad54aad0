"""Discovery: good plugins are found, bad ones reported, and nothing heavy is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import registry as module
from harness import registry as registry_of
from harness.errors import UserError
from harness.interface import Point
from harness.registry import code_hash, harness_hash, installed_reason, load_registry, plugin_hash, refusal
from harness.shapes import MoEShape

PLUGIN = """
from harness.interface import Implementation
{imports}

class {cls}(Implementation):
    name = "{name}"
    label = "Label of {name}"
    upstream = "none"
    licence = "none"
    requires = {requires}
    devices = ("cpu",)
    {extra}

    def build(self, problem):
        {body}
"""


def write(path: Path, name: str, cls: str = "Plugin", imports: str = "", requires: str = "{}", **more: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    body, extra = more.get("body", "raise NotImplementedError"), more.get("extra", "")
    path.write_text(PLUGIN.format(name=name, cls=cls, imports=imports, requires=requires, body=body, extra=extra))
    return path


def load(folder: Path, *extra: Path):
    return load_registry(folder, extra, entry_points=False)


def reasons(registry) -> dict[str, str]:
    return {entry.name: entry.reason for entry in registry.broken}


def test_files_and_packages_are_found(tmp_path: Path) -> None:
    write(tmp_path / "beta.py", "beta")
    write(tmp_path / "alpha" / "__init__.py", "alpha", imports="from .parts import helper")
    (tmp_path / "alpha" / "parts.py").write_text("helper = 1\n")
    write(tmp_path / "_template.py", "template")
    write(tmp_path / "_private" / "__init__.py", "private")
    (tmp_path / "data").mkdir()
    found = load(tmp_path)
    assert found.names() == ["alpha", "beta"] and not found.broken
    assert [implementation.name for implementation in found] == ["alpha", "beta"]
    assert found.get("beta") is found.get("beta")
    assert "beta" in found and len(found) == 2
    assert [i.name for i in found.offering("moe_layer", "cpu")] == ["alpha", "beta"]
    assert found.offering("moe_layer", "cuda") == [] and found.offering("topk_router") == []


def test_a_class_of_a_submodule_and_a_shared_base(tmp_path: Path) -> None:
    write(tmp_path / "pack" / "plugin.py", "packed")
    (tmp_path / "pack" / "__init__.py").write_text("from .plugin import Plugin\n")
    write(tmp_path / "base.py", "base_one", cls="Base")
    (tmp_path / "derived.py").write_text("from .base import Base\n\nclass Derived(Base):\n    name = 'derived_one'\n")
    assert load(tmp_path).names() == ["base_one", "derived_one", "packed"]


def test_broken_plugins_stop_nothing(tmp_path: Path) -> None:
    write(tmp_path / "good.py", "good")
    write(tmp_path / "twin.py", "good", cls="Twin")
    (tmp_path / "syntax.py").write_text("def broken(:\n")
    (tmp_path / "raises.py").write_text("raise RuntimeError('two\\nlines')\n")
    (tmp_path / "mute.py").write_text("class Mute(Exception):\n    def __str__(self): 1 / 0\n\nraise Mute\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "empty.py").write_text("")
    write(tmp_path / "nameless.py", "")
    write(tmp_path / "spelling.py", "Bad Name")
    write(tmp_path / "heavy.py", "heavy", imports="import numpy.linalg")
    write(tmp_path / "indirect.py", "indirect", imports="from ._deep import x")
    (tmp_path / "_deep.py").write_text("if True:\n    from scipy import special as x\n")
    write(tmp_path / "raising.py", "raising", extra="def __init__(self): raise ValueError('no')")
    found = load(tmp_path)
    assert found.names() == ["good", "raising"]
    told = reasons(found)
    assert set(told) == {
        *("twin", "syntax", "raises", "mute", "leaves", "empty", "nameless", "spelling", "heavy", "indirect"),
    }
    assert "already taken by" in told["twin"] and "good.py" in told["twin"]
    assert "SyntaxError" in told["syntax"]
    assert told["raises"] == "cannot be imported: RuntimeError: two lines"
    assert told["mute"] == "cannot be imported: Mute"
    assert "no Implementation" in told["empty"]
    assert "has no name" in told["nameless"]
    assert "imports numpy at module level (heavy.py, line 3)" in told["heavy"]
    assert "imports scipy at module level (_deep.py" in told["indirect"]
    with pytest.raises(UserError, match="twin is broken: name 'good'"):
        found.get("twin")
    with pytest.raises(UserError, match="raising is broken: cannot be instantiated: ValueError: no"):
        found.get("raising")
    assert found.names() == ["good"] and "instantiated" in (found.broken_reason("raising") or "")
    assert found.broken_reason("good") is None and found.broken_reason("unheard") is None


@pytest.mark.parametrize(
    ("declaration", "part"),
    [
        ('devices = "cpu"', "devices must be a tuple of names, not 'cpu'"),
        ('devices = ("gpu",)', "devices names 'gpu'; choose from cuda, cpu"),
        ('dtypes = ("bf16",)', "dtypes names 'bf16'; choose from bfloat16"),
        ('operations = ("moe_lyer",)', "did you mean moe_layer?"),
        ('conventions = ("softmax",)', "conventions names 'softmax'"),
        ('requires = ("package",)', "requires must be a dictionary"),
    ],
)
def test_a_declaration_that_nothing_could_act_on_is_broken(tmp_path: Path, declaration: str, part: str) -> None:
    write(tmp_path / "odd.py", "odd", extra=declaration)
    write(tmp_path / "good.py", "good")
    found = load(tmp_path)
    assert found.names() == ["good"] and part in reasons(found)["odd"]


def test_a_restriction_that_fails_is_its_plugins_failure(tmp_path: Path) -> None:
    point = Point("moe_layer", "odd", MoEShape(8, 8, 8, 4, 1), device="cpu")
    for number, (body, expected) in enumerate(
        [
            ("1 / 0", ("crashed", "its restriction raised ZeroDivisionError: division by zero")),
            ("exit()", ("crashed", "its restriction raised SystemExit: None")),
            ("True", ("crashed", "its restriction returned True, expected a sentence or None")),
            ("'too small'", ("unsupported", "too small")),
            ("None", None),
        ]
    ):
        extra = f"restriction = lambda self, point: {body}"
        write(tmp_path / f"odd{number}.py", f"odd{number}", extra=extra)
        assert refusal(load(tmp_path).get(f"odd{number}"), point) == expected


def test_type_checking_and_function_imports_are_allowed(tmp_path: Path) -> None:
    imports = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy\n"
    write(tmp_path / "good.py", "good", imports=imports, body="import scipy")
    assert not load(tmp_path).broken


def test_unknown_names_get_a_suggestion(tmp_path: Path) -> None:
    write(tmp_path / "scattermoe.py", "scattermoe")
    with pytest.raises(UserError, match=r"choose from scattermoe \(did you mean scattermoe\?\)"):
        load(tmp_path).get("scatermoe")


def test_extra_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "one" / "first.py", "first")
    write(tmp_path / "two" / "second.py", "second", imports="from ._help import x")
    (tmp_path / "two" / "_help.py").write_text("x = 2\n")
    monkeypatch.setenv("MOEBENCH_PLUGINS", f"{tmp_path / 'two'}:{tmp_path / 'missing'}")
    found = load_registry(tmp_path / "one", entry_points=False)
    assert found.names() == ["first", "second"]
    assert "no such folder" in reasons(found)["missing"]


def test_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "local.py", "local")
    found = load(tmp_path).get("local")
    outside = type("Outside", (type(found),), {"name": "outside", "__module__": "elsewhere"})

    def fail() -> None:
        raise ImportError("no module")

    points = [
        SimpleNamespace(name="outside", value="x:y", load=lambda: outside),
        SimpleNamespace(name="odd", value="x:z", load=lambda: int),
        SimpleNamespace(name="gone", value="x:q", load=fail),
    ]
    monkeypatch.setattr(module.importlib.metadata, "entry_points", lambda group: points)
    found_all = load_registry(tmp_path, ())
    assert found_all.names() == ["local", "outside"]
    assert set(reasons(found_all)) == {"odd", "gone"}


def test_installed_reason_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packages" / "explosive" / "inner").mkdir(parents=True)
    for folder in ("explosive", "explosive/inner"):
        (tmp_path / "packages" / folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    requires = "{'explosive': 'a', 'explosive.inner': 'b', 'json.decoder': 'c'}"
    write(tmp_path / "plugins" / "fine.py", "fine", requires=requires)
    requires = "{'no_such_module': 'pip install x', 'explosive.absent': 'ask around', 'json.absent.deeper': 'z'}"
    write(tmp_path / "plugins" / "lacking.py", "lacking", requires=requires)
    found = load(tmp_path / "plugins")
    assert installed_reason(found.get("fine")) is None
    reason = installed_reason(found.get("lacking")) or ""
    assert "the package no_such_module is missing; get it with: pip install x" in reason
    assert "explosive.absent" in reason and "json.absent.deeper" in reason
    assert "explosive" not in sys.modules


def test_plugin_hash_follows_local_code(tmp_path: Path) -> None:
    def hashes(folder: str, helper: str = "x = 1\n", table: str = "{}", unrelated: str = "") -> tuple[str, str]:
        place = tmp_path / folder
        write(place / "single.py", "single", body="from ._help import x")
        write(place / "pack" / "__init__.py", "pack", imports="import importlib")
        (place / "_help.py").write_text(helper)
        (place / "pack" / "tiles.json").write_text(table)
        (place / "_unrelated.py").write_text(unrelated)
        found = load(place)
        assert not found.broken
        return plugin_hash(found.get("single")), plugin_hash(found.get("pack"))

    single, pack = hashes("a")
    assert hashes("b", unrelated="y = 1\n") == (single, pack)
    other_single, other_pack = hashes("c", helper="x = 2\n")
    assert other_single != single and other_pack == pack
    other_single, other_pack = hashes("d", table="{ }")
    assert other_single == single and other_pack != pack


def test_plugin_hash_follows_imports_from_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IMPLEMENTATIONS", (tmp_path / "project").resolve())
    (tmp_path / "project").mkdir()
    found = {}
    for content in ("x = 1\n", "x = 2\n"):
        (tmp_path / "project" / "_shared.py").write_text(content)
        place = tmp_path / f"own{content[4]}"
        write(place / "mine.py", "mine", body="from implementations._shared import x")
        found[content] = plugin_hash(load(place).get("mine"))
    assert len(set(found.values())) == 2


def test_code_hash(tmp_path: Path) -> None:
    write(tmp_path / "one.py", "one")
    one = load(tmp_path).get("one")
    assert len({plugin_hash(one), harness_hash(), code_hash(one)}) == 3
    assert code_hash(one) == code_hash(type(one))


def test_the_projects_plugins_load_without_their_packages() -> None:
    """In a process of its own: nothing but torch and the harness is imported, and CUDA stays untouched."""
    program = (
        "import sys\n"
        "from harness.registry import load_registry, installed_reason, code_hash\n"
        "found = load_registry(extra_folders=(), entry_points=False)\n"
        "for implementation in found: installed_reason(implementation), code_hash(implementation)\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "heavy = {'sonicmoe', 'quack', 'cutlass', 'scattermoe', 'megablocks', 'grouped_gemm', 'deep_gemm', 'stk'}\n"
        "heavy |= {'triton', 'momoe', 'liger_kernel', 'transformer_engine'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        # Nor does a command wait for what draws a sweep's figure until it is drawn.
        "from harness import cli, session\n"
        "from harness.sweep import load_sweep\n"
        "assert load_sweep('granularity', found).figure == 'granularity'\n"
        "drawing = {'pandas', 'matplotlib', 'scipy'}\n"
        "assert not drawing & set(sys.modules), drawing & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[1])


def test_what_does_not_measure_is_there() -> None:
    """A name that nothing has any more would one day be given to something that measures."""
    folder = Path(registry_of.__file__).parent
    found = {path.stem for path in folder.glob("*.py")} | {path.name for path in folder.iterdir() if path.is_dir()}
    assert found > registry_of._NOT_MEASURING

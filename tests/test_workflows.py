"""The workflow files: what they call exists, and what must not happen on our own machines cannot."""

from __future__ import annotations

import re
import shlex
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from conftest import ROOT

from harness.cli import app

FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))
each = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


@cache
def workflow(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    # YAML 1.1 takes the key `on` for a truth value.
    return {"on" if key is True else key: value for key, value in found.items()}


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in workflow(path)["jobs"].values() for step in job["steps"]]


def commands(path: Path) -> list[list[str]]:
    """The words of every line of every step."""
    return [shlex.split(line) for step in steps(path) for line in step.get("run", "").splitlines() if line.strip()]


def targets() -> set[str]:
    (line,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return set(line.split())


def recipe(target: str) -> str:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", text, re.MULTILINE)[0]


def options(command: str) -> dict[str, Any]:
    """Option of a `moebench` command -> what it takes."""
    group = typer.main.get_command(app)
    found = group.commands[command]  # type: ignore[attr-defined]
    return {option: parameter for parameter in found.params for option in parameter.opts if option.startswith("--")}


def test_there_is_one_without_and_one_with_a_gpu() -> None:
    assert [path.stem for path in WORKFLOWS] == ["gpu", "tests"]


@each
def test_every_target_and_option_exists(path: Path) -> None:
    called = []
    for words in commands(path):
        if words[0] == "make":
            called += [word for word in words[1:] if "=" not in word]
            for name, value in (word.split("=", 1) for word in words[1:] if "=" in word):
                command = name.lower()
                assert f"moebench {command} $({name})" in recipe(command), f"{name}: not handed on by the Makefile"
                check_options(command, shlex.split(value))
        elif Path(words[0]).name == "moebench":
            check_options(words[1], words[2:])
    assert called and set(called) <= targets(), called


def check_options(command: str, words: list[str]) -> None:
    known = options(command)
    given = iter(words)
    for word in given:
        assert word in known, f"moebench {command} has no {word}"
        if not getattr(known[word], "is_flag", False):
            assert not next(given).startswith("--"), f"{word}: no value"


def test_the_suite_and_the_checks_run_without_a_gpu() -> None:
    assert commands(FOLDER / "tests.yml") == [["make", "test"], ["make", "check"]]
    (job,) = workflow(FOLDER / "tests.yml")["jobs"].values()
    assert "self-hosted" not in job["runs-on"]


def test_the_pages_tests_have_what_they_need() -> None:
    (job,) = workflow(FOLDER / "tests.yml")["jobs"].values()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(job["env"]["EXTRAS"].split(",")) == {"dev", "browser"} <= set(extras)
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "EXTRAS ?= dev\n" in text and "-e '.[$(EXTRAS)]'" in text


def test_each_night_runs_everything_whatever_failed_before() -> None:
    path = FOLDER / "gpu.yml"
    nightly = [step for step in steps(path) if "schedule" in step.get("if", "")]
    assert [step["name"] for step in nightly] == ["conformance", "tests", "throughput"]
    (upload,) = (step for step in steps(path) if step.get("uses", "").startswith("actions/upload-artifact"))
    (job,) = workflow(path)["jobs"].values()
    left = job["timeout-minutes"] - sum(step["timeout-minutes"] for step in nightly)
    assert left >= 15  # for the gate itself
    for step in nightly:
        assert step["if"] == "${{ !cancelled() && github.event_name == 'schedule' }}"
        words = shlex.split(step["run"])
        kept = [word.split("=")[-1] for word in words if "results/local/" in word]
        assert len(kept) == 1 and kept[0].startswith(upload["with"]["path"])
        if Path(words[0]).name == "python":
            assert words[1:3] == ["-m", "pytest"] and list((ROOT / words[3]).glob("test_*.py"))
    names = [step.get("name") for step in steps(path)]
    assert names.index("regress") < names.index("conformance") < names.index("throughput") < names.index("summary")


@each
def test_least_permissions_limits_and_concurrency(path: Path) -> None:
    found = workflow(path)
    assert found["permissions"] == {"contents": "read"}
    assert found["concurrency"]["group"]
    for job in found["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 60 and "permissions" not in job
    for step in steps(path):
        uses = step.get("uses", "")
        assert not uses or re.fullmatch(r"actions/[a-z-]+@v\d+", uses), uses
        assert not uses.startswith("actions/checkout") or step["with"]["persist-credentials"] is False
        # What somebody else may choose (a branch's name, a title) must not become part of a command.
        assert "${{" not in step.get("run", "")


@each
def test_no_code_of_a_fork_reaches_our_machine(path: Path) -> None:
    own = any("self-hosted" in job["runs-on"] for job in workflow(path)["jobs"].values())
    assert own == (path.stem == "gpu")
    if own:
        assert set(workflow(path)["on"]) == {"push", "schedule", "workflow_dispatch"}
    assert "pull_request_target" not in path.read_text(encoding="utf-8")


def test_one_gpu_serves_one_job_and_none_is_cut_off() -> None:
    found = workflow(FOLDER / "gpu.yml")
    assert found["concurrency"] == {"group": "gpu", "cancel-in-progress": False}
    assert len(found["jobs"]) == 1 and "strategy" not in found["jobs"]["regress"]


def test_the_gates_findings_reach_the_summary_and_the_artefact() -> None:
    path = FOLDER / "gpu.yml"
    (gate,) = (words for words in commands(path) if words[:2] == ["make", "regress"])
    given = shlex.split(gate[2].removeprefix("REGRESS="))
    files = {given[given.index(option) + 1] for option in ("--json", "--junit", "--markdown", "--output")}
    markdown = given[given.index("--markdown") + 1]
    (summary,) = (step for step in steps(path) if "GITHUB_STEP_SUMMARY" in step.get("run", ""))
    assert f'cat {markdown} >> "$GITHUB_STEP_SUMMARY"' in summary["run"] and summary["if"] == "always()"
    (upload,) = (step for step in steps(path) if step.get("uses", "").startswith("actions/upload-artifact"))
    assert upload["if"] == "always()"
    assert all(file.startswith(upload["with"]["path"]) for file in files)
    # The rows' commit counts as changed where git sees new files.
    assert upload["with"]["path"].startswith("results/local/")
    assert workflow(path)["jobs"]["regress"]["env"]["REPEAT"].startswith("${{ github.event_name == 'schedule' && '3'")
    assert given[given.index("--repeat") + 1] == "$REPEAT"

"""Files around the code agree with it: workflows, templates, versions, dependency groups."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import megatrain
from megatrain.run import folder

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))
FORMS = [GITHUB / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "gpu_figures.yml")]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CI = (ROOT / ".ci" / "run").read_text()


def _name(path: Path) -> str:
    return path.name


def _read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def _commands(path: Path) -> list[str]:
    """Return the shell commands of a workflow."""
    jobs = _read(path)["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=_name)
def test_a_workflow_may_only_read_and_ends(path: Path) -> None:
    workflow = _read(path)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert "timeout-minutes" in job, name


def test_ci_runs_the_script_of_contributors() -> None:
    assert _commands(GITHUB / "workflows" / "ci.yml") == ["bash .ci/run"]


def test_ci_builds_the_site_strictly() -> None:
    """With --quiet mkdocs does not count warnings, and --strict has no effect."""
    (options,) = re.findall(r"-m mkdocs build(.*?)(?:  #.*)?$", CI, re.M)
    assert options.split() == ["--strict"]


def test_merges_and_nights_run_their_tiers() -> None:
    assert _commands(GITHUB / "workflows" / "merge.yml") == ["bash .ci/run merge"]
    assert "bash .ci/run night" in _commands(GITHUB / "workflows" / "nightly.yml")


def test_nights_run_every_part_of_make_long() -> None:
    job = _read(GITHUB / "workflows" / "nightly.yml")["jobs"]["proof"]
    (parts,) = re.findall(r"^long: (.*?)  ##", (ROOT / "Makefile").read_text(), re.M)
    assert job["strategy"]["matrix"]["part"] == parts.split()
    assert "make ${{ matrix.part }}" in [step.get("run") for step in job["steps"]]


def test_nights_try_every_python_with_the_lowest_and_the_newest_versions() -> None:
    job = _read(GITHUB / "workflows" / "nightly.yml")["jobs"]["versions"]
    named = "Programming Language :: Python :: 3."
    classifiers = PYPROJECT["project"]["classifiers"]
    pythons = [each[len(named) - 2 :] for each in classifiers if each.startswith(named)]
    assert job["strategy"]["matrix"] == {"python": pythons, "which": ["lowest", "newest"]}
    assert job["steps"][-1]["run"] == "python .ci/versions.py ${{ matrix.which }} -n 2"


def test_wheels_are_tried_by_the_script_that_tries_the_sdist() -> None:
    assert "python .ci/smoke.py" in _commands(GITHUB / "workflows" / "wheels.yml")
    assert PYPROJECT["tool"]["cibuildwheel"]["test-command"] == "python {project}/.ci/smoke.py"
    assert (ROOT / ".ci" / "smoke.py").exists()


def test_the_runner_with_a_gpu_runs_the_commands_of_the_page() -> None:
    commands = " ".join(_commands(GITHUB / "workflows" / "gpu.yml"))
    page = (ROOT / "docs" / "gpu.md").read_text()
    for command in ("megatrain doctor --gpu", "pytest tests/gpu -m gpu --device"):
        assert command in commands
        assert command in page


def test_hooks_run_the_commands_of_ci() -> None:
    hooks = _read(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    entries = [hook["entry"].removeprefix(".venv/bin/python ") for hook in hooks]
    in_ci = re.findall(r'"\$python" (-m (?:ruff|mypy).*?)(?: --cache-dir .*)?$', CI, re.M)
    assert entries == in_ci


@pytest.mark.parametrize("path", FORMS, ids=_name)
def test_a_form_asks_for_the_doctor_and_has_unique_fields(path: Path) -> None:
    form = _read(path)
    assert "megatrain doctor --" in path.read_text()
    fields = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert len(fields) == len(set(fields)) > 2


def test_the_bug_form_names_files_that_a_run_writes() -> None:
    named = set(re.findall(r"`(\w+\.(?:jsonl|json|yaml))`", FORMS[0].read_text()))
    assert named > {folder.EVENTS, "config.yaml"}
    assert all(name in (folder.__doc__ or "") for name in named)


def test_the_version_is_cited_and_in_the_changelog() -> None:
    assert _read(ROOT / "CITATION.cff")["version"] == megatrain.__version__
    assert f"\n## {megatrain.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_lock_file_pins_every_dependency() -> None:
    project, groups = PYPROJECT["project"], PYPROJECT["dependency-groups"]
    wanted = [*project["dependencies"], *groups["docs"], *groups["dev"]]
    names = {re.split(r"[\[>=]", each)[0].lower() for each in wanted if isinstance(each, str)}
    pins = re.findall(r"^([\w-]+)==", (ROOT / "requirements-dev.lock").read_text(), re.M)
    assert names <= {name.lower() for name in pins}


def test_the_lock_file_has_a_hash_for_everything_but_torch() -> None:
    """pip then demands a hash of all it downloads; torch is installed before, in any build."""
    entries = re.split(r"^(?=[\w-]+==)", (ROOT / "requirements-dev.lock").read_text(), flags=re.M)[
        1:
    ]
    without = [entry.strip() for entry in entries if "--hash=sha256:" not in entry]
    assert [entry.partition("==")[0] for entry in without] == ["torch"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=_name)
def test_actions_are_pinned_by_commit(path: Path) -> None:
    used = re.findall(r"uses: (\S+)(.*)", path.read_text())
    others = {name for name, note in used if not re.search(r"@[0-9a-f]{40}$", name) or not note}
    assert others <= {"pypa/gh-action-pypi-publish@release/v1"}, "no pin of it is known here yet"


def test_a_wheel_has_every_file_that_is_not_code() -> None:
    """Tables and marks beside the modules; setup.py builds kernel.c."""
    source = ROOT / "src" / "megatrain"
    globs = PYPROJECT["tool"]["setuptools"]["package-data"]["megatrain"]
    packaged = {path for glob in globs for path in source.glob(glob)}
    code = (".py", ".pyc", ".c", ".so")
    assert {p for p in source.rglob("*") if p.is_file() and p.suffix not in code} == packaged

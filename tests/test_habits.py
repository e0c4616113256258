"""Files around the code agree with it: workflows, templates, versions, dependency groups."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import megatrain

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CI = (ROOT / ".ci" / "run").read_text()


def _name(path: Path) -> str:
    return path.name


def _read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", WORKFLOWS, ids=_name)
def test_a_workflow_may_only_read_and_ends(path: Path) -> None:
    workflow = _read(path)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert "timeout-minutes" in job, name


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
    matrix = dict(job["strategy"]["matrix"])
    beside = [each["which"] for each in matrix.pop("include")]
    assert matrix == {"python": pythons, "which": ["lowest", "newest"]}
    assert [re.sub("==.*", "", which) for which in beside] == ["beside trl", "beside unsloth"]
    assert job["steps"][-1]["run"] == "python .ci/versions.py ${{ matrix.which }} -n 2"


def test_hooks_run_the_commands_of_ci() -> None:
    hooks = _read(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    entries = [hook["entry"].removeprefix(".venv/bin/python ") for hook in hooks]
    in_ci = re.findall(r'"\$python" (-m (?:ruff|mypy).*?)(?: --cache-dir .*)?$', CI, re.M)
    assert entries == in_ci


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

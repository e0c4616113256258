"""Every line of the device code runs on testkit/host_gpu, but those of CUDA's own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from proofs.device_coverage import MODULES, OWN, SOURCE, faults_of, lines_of, watching

ROOT = Path(__file__).parents[2]

TOY = '''"""A module."""
from typing import Protocol


class Shape(Protocol):
    def area(self) -> int:
        """Nobody runs this."""


def chosen(first):
    if first:
        return 1
    return 2
'''


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    path = tmp_path / "toy.py"
    path.write_text(TOY)
    return path


def ran_lines(path: Path, *answers: bool) -> set[int]:
    """Return the lines that calls in other threads run."""
    spec: Any = importlib.util.spec_from_file_location("toy", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    seen: dict[str, set[int]] = defaultdict(set)
    with watching({str(path): "toy"}, seen):
        for answer in answers:
            thread = threading.Thread(target=module.chosen, args=(answer,))
            thread.start()
            thread.join()
    return seen["toy"]


def test_lines_are_those_of_functions(toy: Path) -> None:
    assert lines_of(toy) == {11, 12, 13}


def test_a_line_that_did_not_run_is_told_unless_it_is_named(toy: Path) -> None:
    assert faults_of("toy", toy, ran_lines(toy, True, False), {}) == []
    seen = ran_lines(toy, True)
    assert faults_of("toy", toy, seen, {}) == ["toy:13 did not run: return 2"]
    assert faults_of("toy", toy, seen, {"return 2": "a reason"}) == []
    assert faults_of("toy", toy, seen, {"return 2": "", "x": ""}) == ["toy has no line: x"]


def test_what_is_named_is_there() -> None:
    for name in MODULES:
        everything = lines_of(SOURCE / name)
        assert faults_of(name, SOURCE / name, everything, OWN.get(name, {})) == []


@pytest.mark.night
def test_every_line_runs() -> None:
    pytest.importorskip("testkit.host_gpu", exc_type=ImportError)
    # A new process: lines that run at the import have run here if another test came first.
    done = subprocess.run(
        [sys.executable, "-m", "proofs.device_coverage"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]

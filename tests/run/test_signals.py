"""The short form of `python -m proofs.signals`, and its power."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from proofs import signals
from testkit.patience import HANG_S
from testkit.warm_python import warm_python

ROOT = Path(signals.__file__).parents[1]
SPOILT = (
    "import sys; from proofs import signals\n"
    "from megatrain.run.opening.training_data import TrainingData\n"
    "TrainingData.seek = lambda *_: None\n"
    "sys.argv = ['signals', '--count', '5', '--json']; signals.main()\n"
)


def _play(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*warm_python().command, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=4 * HANG_S,
        check=False,
    )


@pytest.mark.merge
def test_runs_that_were_signaled_end_as_one_that_was_not() -> None:
    done = _play("-m", "proofs.signals", "--count", "5", "--json")
    result = json.loads(done.stdout)
    assert result["failures"] == []
    assert result["in_time"] == result["bitwise"] == 5
    assert done.returncode == 0


@pytest.mark.merge
def test_a_resume_that_forgets_its_place_would_be_noticed() -> None:
    done = _play("-c", SPOILT)
    assert done.returncode == 1
    assert json.loads(done.stdout)["bitwise"] < 5

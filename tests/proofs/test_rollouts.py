"""Short forms of `python -m proofs.rollouts`: a real vLLM, and that what is spoiled is noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proofs import rollouts

pytestmark = [
    pytest.mark.night,
    pytest.mark.skipif(
        rollouts.PYTHON not in os.environ,
        reason=f"{rollouts.PYTHON} names no Python of an environment that has vLLM",
    ),
]
ROOT = Path(rollouts.__file__).parents[1]


def proved(*words: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "proofs.rollouts", "--json", *words]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    return ended.returncode, json.loads(ended.stdout)


def test_weights_are_proved_and_no_answer_is_mixed() -> None:
    code, found = proved("--updates", "5", "--trainers", "6", "--servers", "3", "--restarts", "1")
    assert (found["updates"], found["digests_wrong"], found["mixed"]) == (5, 0, 0)
    assert found["trainers"]["killed"] == 6
    assert found["servers"]["killed"] == 3
    assert code == 0


def test_what_is_spoiled_is_noticed() -> None:
    code, found = proved("--spoiled")
    assert found["digests_wrong"] == found["updates"] == 2
    assert found["mixed"] > 0
    assert code == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_weights_go_over_tcp_and_no_answer_is_mixed() -> None:
    code, found = proved("--far", "--updates", "3", "--trainers", "3", "--gates", "3")
    assert (found["updates"], found["digests_wrong"], found["mixed"]) == (3, 0, 0)
    assert found["gates"]["killed"] == 3
    assert found["sent_bytes"] > (found["taken"] + found["updates"]) * found["copy_bytes"]
    assert code == 0

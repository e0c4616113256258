"""The short form of `python -m proofs.notice`, and that it would notice a step that is finished."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import proofs
from testkit.patience import HANG_S

pytestmark = pytest.mark.night
ROOT = Path(proofs.__file__).parents[1]


def _found(*words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "proofs.notice", "--json", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=5 * HANG_S)
    assert done.stdout, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_process_ends_in_time_and_loses_nothing() -> None:
    found = _found("--count", "6")
    assert (found["notices"], found["late"], found["lost"], found["different"]) == (6, 0, 0, 0)
    assert found["failures"] == []


def test_a_step_that_is_finished_would_be_noticed() -> None:
    assert _found("--count", "4", "--spoil", "finish")["late"] > 0

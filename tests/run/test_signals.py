"""The short form of `python -m proofs.signals`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from proofs import signals
from testkit.patience import HANG_S
from testkit.warm_python import warm_python

ROOT = Path(signals.__file__).parents[1]


@pytest.mark.merge
def test_runs_that_were_signaled_end_as_one_that_was_not() -> None:
    command = [*warm_python().command, "-m", "proofs.signals", "--count", "5", "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=4 * HANG_S, check=False
    )
    result = json.loads(done.stdout)
    assert result["failures"] == []
    assert result["in_time"] == result["bitwise"] == 5
    assert done.returncode == 0

"""A short form of `python -m proofs.soak`.

Programs of both legs are forks of a warm interpreter here; the proof itself starts the first anew.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from proofs import soak
from testkit.patience import HANG_S
from testkit.warm_python import warm_python

pytestmark = pytest.mark.merge

ROOT = Path(soak.__file__).parents[2]
SHORT = """
import sys
from proofs.soak import __main__ as soak, flat
flat.PROGRAM = {program!r}
sys.argv = ["soak", "--steps", "110", "--json"]
soak.main()
"""


def test_a_run_with_every_fault_ends_as_one_without() -> None:
    command = warm_python().command
    done = subprocess.run(
        [*command, "-c", SHORT.format(program=[*command, "-m", "proofs.soak.process"])],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=8 * HANG_S,
        check=False,
    )
    assert done.stdout, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failures"] == []
    assert done.returncode == 0
    assert result["torn"] == result["lost"] == 0
    assert result["bitwise"]
    assert result["faults"] == 8
    kinds = {name.split(":")[0] for name in result["outcomes"]} | result["skipped"].keys()
    assert len(kinds) == 8, "one of each"
    assert result["most_repeated"] < 40
    assert result["undisturbed"]["rss_growth"] < 0.05

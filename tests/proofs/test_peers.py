"""The short forms of `python -m proofs.peers` and of its audit, and that they would notice."""

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


def _found(module: str, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", module, "--json", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=5 * HANG_S)
    assert done.stdout, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_honest_peers_have_one_anchor() -> None:
    found = _found("proofs.peers", "--kills", "10", "--bad", "10")
    assert (found["anchors_differ"], found["bad_entered"], found["lost"]) == (0, 0, 0)


def test_frauds_are_found_and_honest_rounds_are_true() -> None:
    found = _found("proofs.peers.audited", "--count", "4")
    assert (found["frauds"], found["missed"], found["accused"]) == (4, 0, 0)


def test_a_fraud_that_is_not_found_would_be_noticed() -> None:
    assert _found("proofs.peers.audited", "--count", "2", "--spoil")["missed"] == 2

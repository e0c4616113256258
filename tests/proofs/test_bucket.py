"""The short form of `python -m proofs.bucket`, and that it would notice what it is there for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proofs import bucket
from testkit.patience import HANG_S

pytest.importorskip("obstore", reason="obstore is not installed")
pytest.importorskip("moto", reason="moto is not installed")
pytestmark = pytest.mark.merge
ROOT = Path(bucket.__file__).parents[2]


def _found(*words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "proofs.bucket", "--json", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_nothing_acknowledged_is_lost_or_mixed() -> None:
    found = _found("--count", "12")
    assert (found["lost"], found["mixed"]) == (0, 0), found
    assert found["disturbances"] >= 12
    assert found["failures"] == []
    assert found["told acknowledged"] > 10


@pytest.mark.parametrize(("spoil", "key"), [("order", "mixed"), ("fence", "lost")])
def test_what_is_broken_would_be_noticed(spoil: str, key: str) -> None:
    found = _found("--count", "48", "--spoil", spoil)
    assert found[key] > 0, found

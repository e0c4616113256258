"""Proofs as commands, called by the tests of their short forms."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def found_by(module: str, *words: str, limit_s: float) -> dict[str, Any]:
    """Return what `python -m module --json` prints with these words."""
    command = [sys.executable, "-m", module, "--json", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
    assert done.stdout, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found

"""Findings: every cause can be found, and nothing personal is in them."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest

from megatrain.doctor.gpu_check import findings as module
from megatrain.doctor.gpu_check.findings import CAUSES, anonymous

SOURCE = Path(module.__file__).parent


def test_every_cause_is_found_by_some_check() -> None:
    texts = "".join(path.read_text() for path in SOURCE.glob("*.py") if path.name != "findings.py")
    named = set(re.findall(r'"([a-z0-9 ]+)"', texts))
    assert set(CAUSES) <= named
    assert all(cause.tries for cause in CAUSES.values())


def test_nothing_personal_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_user", lambda: "ada")
    monkeypatch.setattr(platform, "node", lambda: "analytical-engine")
    text = "ada at analytical-engine: /home/ada/runs/x.py, line 3; 12.5 GB/s in/out, a/b, adamw"
    assert anonymous(text) == "(user) at (host): (path), line 3; 12.5 GB/s in/out, a/b, adamw"

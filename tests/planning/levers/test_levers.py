"""A lever is one file: what walks the levers knows none of them by name."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from megatrain.planning.levers import LEVERS
from megatrain.step.settings import StepSettings

PLANNING = Path(__file__).parents[3] / "src" / "megatrain" / "planning"
NAMES = tuple(lever.name for lever in LEVERS if "_" in lever.name)
"""Names that are no ordinary words, so that a search for them finds the lever and nothing else."""
MICRO = "micro_batch_tokens"
"""A step is cut into micro-batches everywhere: the one name that others may read."""


def _knows(source: str) -> set[str]:
    return {name for name in NAMES if name != MICRO and re.search(rf"\b{name}\b", source)}


def test_every_lever_is_a_setting_of_a_step() -> None:
    assert {lever.name for lever in LEVERS} <= {field.name for field in fields(StepSettings)}
    assert len({lever.name for lever in LEVERS}) == len(LEVERS)


def test_search_ledger_and_fixes_know_no_lever_by_name() -> None:
    others = [path for path in PLANNING.rglob("*.py") if path.parent.name != "levers"]
    known = {path.name: _knows(path.read_text()) for path in others}
    assert {name: found for name, found in known.items() if found} == {}

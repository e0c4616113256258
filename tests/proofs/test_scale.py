"""The short form of `python -m proofs.scale`, and that it would notice another order."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proofs import scale

NUM_TOKENS = 40_000_000


def _resumed(spoil: str) -> tuple[dict[str, Any], dict[str, Any]]:
    walked = scale.play_walk(NUM_TOKENS)
    return walked, scale.play_resume(NUM_TOKENS, json.dumps(walked["state"]), spoil)


@pytest.mark.merge
def test_a_resume_is_exact_and_reads_its_own_windows() -> None:
    walked, resumed = _resumed("none")
    assert resumed["steps"] == walked["steps"]
    assert resumed["reads"] <= 3 * 32 < resumed["chunks"]
    assert len(set(walked["steps"])) == scale.NUM_COMPARED


@pytest.mark.merge
def test_another_order_would_be_noticed() -> None:
    walked, resumed = _resumed("order")
    assert not set(resumed["steps"]) & set(walked["steps"])

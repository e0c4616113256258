"""The policy-gradient loss at a sampling temperature, against TRL's own GRPOTrainer."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from proofs.policy_gradient import TOLERANCE, compare

pytestmark = [
    pytest.mark.merge,
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None,
        reason="trl is not installed; run this in the environment of `python -m proofs.trainers`",
    ),
]


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_norms_of_gradients_at_a_temperature_are_those_of_trl(tmp_path: Path, kl: float) -> None:
    found = compare(tmp_path, "grpo", kl, kl_ratio=True, temperature=0.7)
    assert max(found["norm"], found["gradient"], found["loss"]) <= TOLERANCE
    assert found["clipped"] > 0


def test_a_loss_that_ignores_the_temperature_would_be_noticed(tmp_path: Path) -> None:
    found = compare(tmp_path, "grpo", 0.0, kl_ratio=True, temperature=0.7, loss_temperature=1.0)
    assert found["norm"] > 100 * TOLERANCE

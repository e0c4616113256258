"""The benchmark of optimizer states: its sides do the same work, and rounding to nearest fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import states
from benchmarks.states import FP32, OURS, falling_distances, measure_seed, ours, theirs

NUM_UPDATES = 800


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    few = states.evaluation_rows()[:8]
    monkeypatch.setattr(states, "evaluation_rows", lambda: few)


@pytest.mark.merge
def test_all_sides_do_the_same_work(tmp_path: Path) -> None:
    contestants = {name: ours(OURS[name]) for name in ("bf16", "int8")}
    contestants["torch"] = theirs(torch.optim.AdamW)
    ratios, losses = measure_seed(tmp_path, 0, 4, contestants)
    assert ratios["torch_loss_ratio"] == pytest.approx(1, abs=1e-5)
    assert ratios["torch_distance_ratio"] == pytest.approx(1, abs=1e-4)
    assert ratios["bf16_distance_ratio"] == pytest.approx(1, abs=1e-3)
    assert ratios["int8_distance_ratio"] == pytest.approx(1, abs=1e-2)
    assert ratios["other_batches_loss_ratio"] != 1
    assert len({len(curve) for curve in losses.values()}) == 1


def test_v_follows_gradients_down_unless_it_is_rounded_to_nearest() -> None:
    exact = falling_distances(FP32, NUM_UPDATES)[-1]
    assert falling_distances(OURS["bf16"], NUM_UPDATES)[-1] == pytest.approx(exact, rel=0.005)
    assert falling_distances(OURS["int8"], NUM_UPDATES)[-1] == pytest.approx(exact, rel=0.015)
    assert falling_distances(OURS["bf16_nearest"], NUM_UPDATES)[-1] < 0.97 * exact

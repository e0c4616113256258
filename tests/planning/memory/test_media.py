"""The device memory of steps with images is that of the plan within 3 %, whatever is trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.plan import media as measuring
from benchmarks.plan.media import FAMILIES, MediaConfiguration, device_bytes
from benchmarks.plan.memory import MEMORY_TARGETS
from megatrain.models.towers import MediaTraining
from megatrain.planning.model.shapes import MediaShape
from megatrain.run.opening.media_shape import media_shape

pytest.importorskip("testkit.host_gpu", exc_type=ImportError)

from testkit.host_gpu import control

pytestmark = [pytest.mark.hostgpu, pytest.mark.merge]


def planned_over_measured(family: str, media: MediaTraining, **sizes: int) -> float:
    control.start_anew()
    torch.accelerator.reset_peak_memory_stats(1)
    asked = MediaConfiguration(family=family, media=media, device="hostgpu", **sizes)
    planned, measured = device_bytes(asked)
    return planned / measured


@pytest.mark.parametrize("media", ["frozen", "projector", "all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_peak_of_steps_with_images_is_planned(family: str, media: MediaTraining) -> None:
    found = planned_over_measured(family, media, tower=256, tower_layers=4)
    assert found == pytest.approx(1, abs=MEMORY_TARGETS["worst"])


def test_activations_of_a_tower_that_are_not_counted_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without(*args: Any) -> MediaShape:
        return replace(counted(*args), held_bytes=(0, 0, 0))

    counted = media_shape
    monkeypatch.setattr(measuring, "media_shape", without)
    assert planned_over_measured("qwen2_5_vl", "all") < 1 - MEMORY_TARGETS["worst"]

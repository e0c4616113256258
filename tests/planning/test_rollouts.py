"""Laws of rollouts.py."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatrain.engine.residence import MOST_READ, choose_residence, room_for
from megatrain.errors import ConfigError
from megatrain.planning.estimate import Estimate, estimate
from megatrain.planning.prediction import predicted_speed, predicted_time
from megatrain.planning.rollouts import BETWEEN_STEPS, RolloutPlan


def drawn(rollouts: str = "64x1024", model: str = "Qwen/Qwen3-8B", **asked: Any) -> RolloutPlan:
    found = planned(rollouts, model, **asked).rollouts
    assert found is not None
    return found


def planned(rollouts: str, model: str = "Qwen/Qwen3-8B", **asked: Any) -> Estimate:
    return estimate(model, rollouts=rollouts, **{"gpu": "4090", "ram": "192GB", **asked})


def test_a_step_of_64_answers_of_an_8b_model_takes_three_minutes_at_most() -> None:
    found = drawn()
    assert found.step_s <= 180
    assert found.resident_layers == found.num_layers == 36
    assert found.num_passes == 1024 * -(-64 // found.at_once)
    assert found.draw_s > found.num_passes * found.pass_s
    assert found.step_s == found.draw_s + found.train_s


def test_a_reference_takes_a_forward_more() -> None:
    asked = planned("64x1024", ram="256GB", overrides=["loss.kl=0.04"])
    found, plain = asked.rollouts, drawn(ram="256GB")
    assert found is not None
    assert plain.reference_s == 0
    assert found.train_s / 5 < found.reference_s < found.train_s / 2
    assert found.step_s == found.draw_s + found.reference_s + found.train_s
    assert f"then the reference in {predicted_time(found.reference_s)}, then" in asked.text()


@pytest.mark.merge
def test_a_32b_model_waits_for_the_link() -> None:
    found = drawn(model="Qwen/Qwen3-32B", ram="512GB")
    assert found.limit == "link"
    assert found.resident_layers == 0
    assert found.pass_s == pytest.approx(2.6, abs=0.1)
    assert 3600 < found.step_s < 6000
    narrow = drawn(model="Qwen/Qwen3-32B", ram="512GB", lora=16, base="nf4")
    assert narrow.step_s < 0.6 * found.step_s


@pytest.mark.parametrize("more", ["96x1024", "64x2048"])
def test_more_answers_and_longer_ones_take_longer(more: str) -> None:
    assert drawn(more).draw_s > drawn().draw_s


def test_what_stays_is_what_the_engine_would_choose() -> None:
    asked = planned("64x1024")
    found, plan = asked.rollouts, asked.plan
    assert found is not None
    model = plan.workload.model
    free = plan.profile.device_bytes - sum(
        line.num_bytes
        for line in plan.ledger.lines
        if line.place == "device" and line.purpose in BETWEEN_STEPS
    )
    chosen = choose_residence(
        room_for(free, MOST_READ * 2 * model.hidden),
        num_layers=36,
        layer_bytes=model.structures[0].weight_bytes("bf16"),
        token_bytes=36 * 8 * 256 * 2,
        wanted_tokens=64 * 1280,
        longest=1280,
    )
    assert chosen.num_layers == found.resident_layers
    assert chosen.cached_tokens // 1280 == found.at_once
    taken = found.resident_bytes + found.cached_bytes
    assert taken < free


def test_the_estimate_prints_it_and_gives_it_as_json() -> None:
    asked = planned("64x1024")
    text = asked.text()
    assert "rollouts" in text
    assert "36 of 36 layers stay on the device" in text
    assert "..." not in text, "no line is cut"
    assert json.loads(asked.to_json())["rollouts"]["at_once"] == drawn().at_once
    assert json.loads(estimate("Qwen/Qwen3-8B", gpu="4090").to_json())["rollouts"] is None


@pytest.mark.parametrize("iterations", [1, 4])
def test_all_tokens_take_the_steps_that_they_are_in(iterations: int) -> None:
    """Drawing is in the time and the price; steps on the same answers share it."""
    changed = [f"rollouts.iterations={iterations}"]
    asked = planned("64x1024", tokens="1e8", price=0.34, overrides=changed)
    found = asked.rollouts
    assert found is not None
    assert found.step_s == found.draw_s / iterations + found.train_s
    num_steps = 1e8 / (64 * 1280)
    assert asked.seconds == pytest.approx(num_steps * found.step_s)
    assert asked.cost == pytest.approx(num_steps * found.step_s / 3600 * 0.34)
    first, *others = str(asked).splitlines()
    assert f"{predicted_speed(64 * 1280 / found.step_s)}, 100M tokens in" in first
    assert "with drawing for $" in first
    assert any(f"{iterations} steps of" in line for line in others) == (iterations > 1)


def test_a_server_draws_in_a_time_that_nobody_knows() -> None:
    changed = ["rollouts.engine=vllm"]
    asked = planned("64x1024", tokens="1e8", overrides=changed)
    assert asked.rollouts is None
    assert "without drawing" in str(asked).splitlines()[0]


@pytest.mark.parametrize("word", ["64", "0x8", "64 by 8", "1x8"])
def test_what_is_no_number_of_answers_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="rollouts"):
        planned(word)

"""The step that `auto` takes: from config and data, never from the machine."""

from __future__ import annotations

import pytest

from megatrain.config import Config
from megatrain.planning import step_size
from megatrain.planning.estimate import estimate
from megatrain.planning.from_config import step_size_of
from megatrain.planning.step_size import DEFAULT_TOKENS, LEAST_STEPS, StepSize, default_step


@pytest.mark.parametrize("epoch", [1, 2047, 49 * 2048, 50 * 2048, 10**6, 10**7, 10**9])
def test_an_epoch_has_fifty_steps_where_the_data_allow(epoch: int) -> None:
    size = default_step(2048, epoch)
    assert -(-epoch // size.tokens) >= LEAST_STEPS or size.tokens == 2048
    if size.tokens < DEFAULT_TOKENS:
        assert -(-epoch // (2 * size.tokens)) < LEAST_STEPS, "no shorter than it must be"
        assert "epoch" in size.reason


def test_a_rule_of_more_steps_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = default_step(2048, 10**6).tokens
    monkeypatch.setattr(step_size, "LEAST_STEPS", 2 * LEAST_STEPS)
    assert default_step(2048, 10**6).tokens < before


@pytest.mark.parametrize("row", [512, 3000, 32768, 65536, 100_000])
def test_steps_are_whole_rows_and_as_long_as_the_default_allows(row: int) -> None:
    size = default_step(row)
    assert size.tokens % row == 0
    assert size.tokens <= max(row, DEFAULT_TOKENS) < 2 * max(size.tokens, DEFAULT_TOKENS)
    assert size.reason == ("one row" if row > DEFAULT_TOKENS else "the default")


def test_a_micro_batch_that_is_given_fits_the_step() -> None:
    config = Config(model="a", data="b", train={"micro_batch_tokens": 24576})
    assert step_size_of(config, 1) == StepSize(tokens=24576, reason="one row: an epoch is short")


def test_a_config_with_its_own_step_keeps_it() -> None:
    for given in ({"batch_tokens": "64k"}, {"batch_rows": 8}):
        assert step_size_of(Config(model="a", data="b", train=given)) is None
    found = estimate("Qwen3-8B", gpu="4090", ram="192GB", batch_tokens="64k").plan
    assert found.workload.step_tokens == 65536
    assert "batch_tokens" not in found.reasons
    assert "auto:" not in str(found)


def test_the_reason_is_printed_and_recorded() -> None:
    found = estimate("Qwen3-8B", gpu="4090", ram="192GB")
    reason = found.plan.facts()["reasons"]["batch_tokens"]
    assert f"\n          auto: {reason}\n" in str(found)
    assert "\nbatch_tokens " not in str(found), "it is no setting of a step"

"""Ranks that differ do not train together."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run.together.installed import installed_facts
from megatrain.run.together.sameness import facts_of, require_same
from testkit.rank_threads import Together


def _refusals(facts: list[dict[str, Any]]) -> list[str]:
    texts: list[str] = []

    def work(ranks: Ranks) -> None:
        with pytest.raises(ConfigError) as failure:
            require_same(ranks, facts[ranks.owner.rank])
        texts.append(str(failure.value))

    Together(len(facts)).run(work)
    return texts


def test_equal_facts_pass() -> None:
    Together(3).run(lambda ranks: require_same(ranks, {"a": 1, "b": [1, None]} | installed_facts()))
    require_same(ALONE, {"a": 1})


def test_a_difference_is_named_on_all_ranks() -> None:
    first, second, third = _refusals([{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1, "b": 2}])
    assert first == second == third
    assert "\n  b: 2 on ranks 0, 2; 3 on rank 1\n" in first
    assert "a:" not in first


def test_a_missing_fact_is_a_difference() -> None:
    assert "\n  b: 2 on rank 0; nothing on rank 1\n" in _refusals([{"b": 2}, {}])[0]


def test_settings_differ_by_their_keys() -> None:
    settings = [Config(model="m", data="d", train={"epochs": count}) for count in (1, 2)]
    (text, _) = _refusals([facts_of(config) for config in settings])
    assert "\n  train.epochs: 1.0 on rank 0; 2.0 on rank 1\n" in text

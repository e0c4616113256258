"""Laws of stragglers.py."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatrain.lanes.trace import Span
from megatrain.ranks.ownership import Owner
from megatrain.ranks.ranks import ALONE, Said
from megatrain.run import stragglers as module
from megatrain.run.stragglers import WINDOW, Stragglers, own_pace
from megatrain.run.trainer import Trainer
from megatrain.step.ops import Op, OpKind
from testkit.rank_runs import run_on_ranks
from testkit.runs import NUM_STEPS, Setting, config_of, lines_of

OP = Op(kind=OpKind.FORWARD, block=1, micro=0)


def named(paces: Sequence[Sequence[float | None]]) -> list[tuple[int, int]]:
    """Return step and rank of each event, for the paces of each step."""
    found = Stragglers(Owner(rank=0, size=len(paces[0])))
    return [
        (event["step"], event["rank"])
        for step, of_ranks in enumerate(paces, 1)
        for event in found.hear(step, [{"pace": pace, "host": "h"} for pace in of_ranks])
    ]


def noisy(rng: random.Random, num_steps: int, *slow: float) -> list[list[float]]:
    return [[times * rng.gauss(1.0, 0.1) for times in slow] for _ in range(num_steps)]


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_a_slow_rank_is_named_within_20_steps_once(num_ranks: int) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        usual = [1.0] * (num_ranks - 1)
        ((step, rank),) = named(noisy(rng, 200, *usual, 1.3))
        assert (step <= 20, rank) == (True, num_ranks - 1)


def test_noise_names_nobody() -> None:
    for seed in range(20):
        assert named(noisy(random.Random(seed), 200, *[1.0] * 4)) == []


def test_a_rank_is_named_again_after_it_was_fast() -> None:
    slow, fast = [[1.0, 1.5]] * WINDOW, [[1.0, 1.0]] * WINDOW
    assert [rank for _, rank in named([*slow, *fast, *slow])] == [1, 1]
    assert [rank for _, rank in named([*slow, *slow])] == [1]


def test_a_step_without_work_for_a_rank_is_not_compared() -> None:
    assert named([[1.0, None]] * 40) == []
    assert named([[1.0]] * 40) == []


def test_a_pace_is_own_compute_per_token() -> None:
    spans = [
        Span(1, "compute", OP, 0, 3 * 10**9),
        Span(1, "compute", OP, 3 * 10**9, 9 * 10**9, awaited=OP),
        Span(1, "comm", OP, 0, 9 * 10**9),
    ]
    assert own_pace(spans, 6) == 0.5
    assert own_pace(spans, 0) is None
    assert own_pace([], 6) is None


def test_one_process_alone_says_nothing() -> None:
    alone = Stragglers(ALONE.owner)
    alone.measure([Span(1, "compute", OP, 0, 9)], [])
    assert alone.says() == {}
    assert list(alone.hear(1, [{}])) == []


@pytest.mark.merge
@pytest.mark.usefixtures("cache_in_world")
def test_a_slow_rank_of_a_run_is_in_its_events(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WINDOW", 4)
    says = Stragglers.says

    def slowly(found: Stragglers) -> Said:
        assert "pace" in says(found)
        return {"pace": 1.0 + 0.4 * found._owner.rank, "host": "h"}

    def train(trainer: Trainer) -> int:
        return trainer.train().num_steps

    monkeypatch.setattr(Stragglers, "says", slowly)
    config = config_of(world, tmp_path / "run", Setting(save_every=None, eval_every=None))
    assert run_on_ranks(2, config, train) == [NUM_STEPS, NUM_STEPS]
    (event,) = [e for e in lines_of(tmp_path / "run", "events.jsonl") if e["event"] == "slow rank"]
    assert (event["rank"], event["times"]) == (1, 1.4)
    assert event["text"].startswith("rank 1 on h takes 1.40 times as long")

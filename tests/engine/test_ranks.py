"""Several ranks train to the bits of one process that has all of their micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatrain.engine.engine import Engine
from megatrain.engine.gradients.slot_sums import SlotSums
from megatrain.engine.results import StepResult
from megatrain.errors import NonFiniteStep
from megatrain.lanes.player import LANE_DEADLINE_S, Player
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.models.build import build_decoder
from megatrain.optim.states import WITH_CLIP
from megatrain.ranks.ranks import ALONE, Alone, Ranks
from testkit.families import tiny_config
from testkit.plain import make_batch
from testkit.rank_threads import ONE_AT_A_TIME, Together
from testkit.rank_training import RankCase, differing, engine_of, joined, ranks_of, state_of
from testkit.virtual_ranks import State

EACH = RankCase(size=3, shapes=((2, 24), (1, 40), (2, 16)), evaluates=True)
"""A micro-batch for each rank."""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("update", "settings", "num_micro"),
    [
        ("late", {}, 3),
        ("in_backward", {"tape": "host"}, 3),
        ("late", {"tile_tokens": 16, "chunk_tokens": 16}, 1),  # the tiles of a row are one sum
    ],
)
def test_with_a_micro_batch_each_at_most_ranks_have_the_bits_of_one_process(
    update: Any, settings: dict[str, Any], num_micro: int
) -> None:
    shapes = EACH.shapes[:num_micro]
    case = replace(EACH, shapes=shapes, update=update, settings=tuple(settings.items()))
    (alone,) = ranks_of(replace(case, size=1))
    found = ranks_of(case)
    for one in found:
        assert one.evaluated == alone.evaluated
        for result, expected in zip(one.results, alone.results, strict=True):
            assert result.micro_losses == expected.micro_losses
            if update == "late":
                assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-12)
    assert differing(joined(found), alone.state) == []


def test_two_micro_batches_of_a_rank_have_other_bits() -> None:
    """They are rounded as one sum, so the equality above is not of any division at all."""
    case = replace(EACH, size=2)
    assert differing(joined(ranks_of(case)), joined(ranks_of(replace(case, size=1)))) != []


@pytest.mark.few(1)
@pytest.mark.parametrize("tape", ["device", "host"])
def test_a_rank_may_have_no_micro_batch(tape: str) -> None:
    found = ranks_of(replace(EACH, size=4, settings=(("tape", tape),)))
    assert all(one.results == found[0].results for one in found)
    assert all(one.evaluated == found[0].evaluated for one in found)


# A gradient that is not finite.

SPOILT = 17
"""A token whose row of the embedding is not finite."""
GUARDED = RankCase(size=3, shapes=((2, 9), (1, 8), (3, 7), (1, 9)), num_steps=1)


def guarded_by(ranks: Ranks, case: RankCase) -> tuple[StepResult | str, bool]:
    """Step on a batch with one bad document; return the result, and whether the state changed."""
    with ONE_AT_A_TIME:
        model = case.model()
    model.get_input_embeddings().weight.data[SPOILT] = torch.nan
    engine, store = engine_of(case, ranks, model)
    batch = make_batch(case.shapes)
    for micro in batch:
        micro.input_ids[micro.input_ids == SPOILT] = SPOILT + 1
        micro.labels[micro.labels == SPOILT] = SPOILT + 1
    batch[2].input_ids[1, 4] = SPOILT
    before = state_of(store)
    with engine:
        try:
            found: StepResult | str = engine.step(batch)
        except NonFiniteStep as error:
            found = str(error)
    return found, bool(_changed(before, state_of(store)))


def _changed(before: State, after: State) -> list[str]:
    """Return what differs in its bytes: the spoilt row is never equal to itself."""
    return differing(
        {name: part.view(torch.uint8) for name, part in before.items()},
        {name: part.view(torch.uint8) for name, part in after.items()},
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("on_nonfinite", ["skip", "stop"])
def test_a_fault_of_one_rank_is_seen_and_located_by_all(on_nonfinite: str) -> None:
    case = replace(GUARDED, settings=(("on_nonfinite", on_nonfinite),))
    found = Together(case.size).run(lambda ranks: guarded_by(ranks, case))
    assert {changed for _, changed in found} == {False}
    results = [result for result, _ in found]
    for result in results:
        if isinstance(result, str):
            assert on_nonfinite == "stop"
            assert result.startswith("step 1: the gradient is not finite in blocks ")
            assert result.endswith("; micro-batch 2, documents 1")
        else:
            assert on_nonfinite == "skip"
            assert not result.applied
            assert result.nonfinite is not None
            assert (result.nonfinite.micro, result.nonfinite.documents) == (2, (1,))
    assert len(set(map(str, results))) == 1


@pytest.fixture
def spoilt_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Spoil one element of a layer's gradient, on whichever rank adds to it first."""
    left, add = [1], SlotSums.add

    def spoiling(
        self: SlotSums, slot: Any, tenant: int, grads: Any, first_row: int | None = None
    ) -> None:
        if tenant == 2 and left and left.pop():
            next(iter(grads.values())).view(-1)[0] = torch.nan
        add(self, slot, tenant, grads, first_row)

    monkeypatch.setattr(SlotSums, "add", spoiling)
    return left


def test_a_fault_that_is_gone_when_run_again_is_told_by_all(spoilt_once: list[int]) -> None:
    found = ranks_of(replace(GUARDED, num_steps=2))
    assert not spoilt_once
    first, second = found[0].results
    assert (
        str(first.nonfinite)
        == "not finite in blocks 2; finite when run again: suspect the hardware"
    )
    assert (first.applied, second.applied, second.nonfinite) == (True, True, None)
    assert all(one.results == found[0].results for one in found)


def test_in_backward_all_ranks_leave_the_same_block_out(spoilt_once: list[int]) -> None:
    case = replace(GUARDED, update="in_backward", settings=(("on_nonfinite", "skip"),))
    found = ranks_of(case)
    assert not spoilt_once
    assert all(one.results == found[0].results for one in found)
    fault = found[0].results[0].nonfinite
    assert fault is not None
    assert fault.blocks == (2,)
    moved = {name.split("layers.")[1][0] for name, part in joined(found).items()
             if name.startswith("m.") and "layers." in name and part.any()}  # fmt: skip
    assert moved == {"0", "2", "3"}


def test_a_lane_waits_longer_for_a_rank_than_the_rank_may_be_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that the rank is named, and the lane is not called stuck."""

    class Patient(Alone):
        patience_s = 7000.0

    decoder = build_decoder(tiny_config("llama"), "bf16")
    deadlines: list[float] = []
    monkeypatch.setattr(
        "megatrain.engine.engine.Player",
        lambda lanes, deadline_s, trace: deadlines.append(deadline_s) or Player(lanes),  # type: ignore[func-returns-value]
    )
    for ranks in (ALONE, Patient()):
        Engine(decoder, Store(build_layout(decoder.blocks, WITH_CLIP)), ranks=ranks).close()
    assert deadlines == [LANE_DEADLINE_S, LANE_DEADLINE_S + 7000.0]

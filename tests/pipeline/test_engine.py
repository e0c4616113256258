"""Laws of engine.py: lanes give the bits of the reference, and weights are there when promised.

Its failures are in test_engine_failures.py, its updates in test_engine_updates.py, its memory in
test_engine_memory.py. The same cases by the ten thousand: python -m benchmarks.interleavings.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.interleavings import (
    SORTS,
    Case,
    Outcome,
    Shapes,
    Sort,
    World,
    case_of,
    faults_of,
    make_batch,
    world_of,
)
from megatrain.errors import BatchError
from megatrain.memory.layout import Kind
from megatrain.pipeline.batch import MicroBatch
from megatrain.pipeline.engine import Update
from megatrain.pipeline.hazards import Hazards
from megatrain.pipeline.lanes import Lane
from megatrain.pipeline.ops import LANES, OpKind

MICRO_BATCHES: Shapes = ((1, 4), (2, 3), (1, 6), (1, 3))
STATE = (Kind.HI, Kind.LO, Kind.M, Kind.V)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


def steps_of(num_micro: int) -> tuple[Shapes, ...]:
    """Three steps of unequal micro-batches, in a new order each."""
    chosen = MICRO_BATCHES[:num_micro]
    return tuple(chosen[turn:] + chosen[:turn] for turn in (0, 1 % num_micro, 2 % num_micro))


# Law 1: lanes give the bits of the reference, whatever their timing.

Group = tuple[str, Update, str, bool]
UPDATES: tuple[Update, ...] = ("none", "in_backward", "late")


def grid() -> dict[Group, list[Case]]:
    groups: dict[Group, list[Case]] = {}
    sorts = ("llama of 2 layers", "gemma, tied", "mixtral")
    for sort, update, tape, copying in product(sorts, UPDATES, ("device", "host"), (True, False)):
        slots = (2, 3, 4) if copying else (2,)  # views need none
        groups[sort, update, tape, copying] = [
            Case(
                sort=sort,
                steps=steps_of(num_micro),
                update=update,
                tape=tape,  # type: ignore[arg-type]
                copying=copying,
                num_slots=num_slots,
                num_tape_slots=num_slots,
                timing=hash((num_slots, num_micro)),
            )
            for num_slots, num_micro in product(slots, (1, 2, 3, 4))
        ]
    return groups


GRID = grid()
RANDOM = range(40)


@functools.cache
def expected(sort: str, update: Update, num_micro: int) -> Outcome:
    """What the reference gives: the same wherever things are kept (see below)."""
    case = Case(sort=sort, steps=steps_of(num_micro), update=update, copying=False)
    return world_of(sort).play(case, reference=True)


@pytest.mark.parametrize("group", GRID, ids=str)
def test_lanes_give_the_bits_of_the_reference(group: Group) -> None:
    for case in GRID[group]:
        reference = expected(case.sort, case.update, len(case.steps[0]))
        assert world_of(case.sort).play(case).differences(reference) == [], case


@pytest.mark.parametrize("first", RANDOM[::5])
def test_random_cases_give_the_bits_of_the_reference(first: int) -> None:
    """Changing numbers of micro-batches, evaluations between, frozen parts, dropout."""
    for number in RANDOM[first : first + 5]:
        assert faults_of(number) == [], case_of(number)


def test_there_are_enough_cases() -> None:
    assert sum(map(len, GRID.values())) + len(RANDOM) >= 300


@pytest.mark.parametrize("update", UPDATES)
def test_the_reference_gives_the_same_wherever_things_are_kept(update: Update) -> None:
    for group in GRID:
        if group[:2] == ("gemma, tied", update):
            case = GRID[group][-1]
            found = world_of(case.sort).play(case, reference=True)
            assert found.differences(expected(case.sort, update, 4)) == []


def slow_lanes(*slow: str) -> list[Lane]:
    return [Lane(name, delay=(lambda op: 1e-2) if name in slow else None) for name in LANES]


@pytest.mark.parametrize(
    ("kind", "slow", "update"),
    [
        (OpKind.FETCH, "host", "late"),
        (OpKind.FORWARD, "in", "late"),
        (OpKind.STASH, "compute", "late"),
        (OpKind.HEAD, "in", "late"),
        (OpKind.RESTORE, "out", "late"),
        (OpKind.BACKWARD, "in", "late"),
        (OpKind.DRAIN, "compute", "late"),
        (OpKind.CLIP, "out", "late"),
        (OpKind.UPDATE, "out", "in_backward"),
    ],
)
def test_ops_of_a_kind_that_do_not_wait_would_be_noticed(
    kind: OpKind, slow: str, update: Update, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(sort="gemma, tied", steps=steps_of(2), update=update, tape="host", copying=True)
    reference = expected(case.sort, update, 2)
    assert world_of(case.sort).play(case, lanes=slow_lanes(slow)).differences(reference) == []

    feed = Hazards.feed

    def forgetful(self: Hazards, op):  # type: ignore[no-untyped-def]
        ticket, waits = feed(self, op)
        return ticket, [] if op.kind is kind else waits

    monkeypatch.setattr(Hazards, "feed", forgetful)
    try:
        found = world_of(case.sort).play(case, lanes=slow_lanes(slow))
    except Exception:  # something was not there yet
        return
    assert found.differences(reference) != []


# Law 3: late updates are finished before anyone reads weights.

LATE = Case(sort="llama of 2 layers", steps=steps_of(2), update="late")


def state_of(world: World) -> dict[str, torch.Tensor]:
    return world.bytes_of(*STATE)


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(part, second[name]) for name, part in first.items())


@functools.cache
def state_after(case: Case, num_steps: int) -> dict[str, torch.Tensor]:
    """The textbook state: by the reference, settled after each step."""
    world = world_of(case.sort)
    with world.engine(case, reference=True) as engine:
        for number in range(num_steps):
            engine.step(make_batch(case.steps[number], seed=number))
            engine.settle()
        return state_of(world)


@pytest.mark.parametrize("finish", ["settle", "evaluate", "close"])
def test_settle_evaluate_and_close_finish_late_updates(finish: str) -> None:
    world = world_of(LATE.sort)
    engine = world.engine(LATE, lanes=slow_lanes("host"))
    with engine:
        for number in range(2):
            batch = make_batch(LATE.steps[number], seed=number)
            engine.step(batch)
        if finish != "close":
            engine.settle() if finish == "settle" else engine.evaluate(batch)
            assert same(state_of(world), state_after(LATE, 2))
    assert same(state_of(world), state_after(LATE, 2))
    engine.close()


def test_a_late_update_is_not_there_before() -> None:
    world = world_of(LATE.sort)
    with world.engine(LATE) as engine:
        engine.step(make_batch(LATE.steps[0], seed=0))
        assert same(state_of(world), state_after(LATE, 0))
        assert not same(state_after(LATE, 1), state_after(LATE, 0))


def test_settling_twice_or_before_any_step_changes_nothing() -> None:
    world = world_of(LATE.sort)
    with world.engine(LATE) as engine:
        engine.settle()
        engine.step(make_batch(LATE.steps[0], seed=0))
        engine.settle()
        engine.settle()
        assert same(state_of(world), state_after(LATE, 1))


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("update", ["in_backward", "late"])
def test_evaluations_between_steps_change_nothing(sort: str, update: Update) -> None:
    case = Case(sort=sort, steps=steps_of(2), update=update, tape="host")
    between = Case(sort=sort, steps=steps_of(2), update=update, tape="host", evaluates_after=(0, 1))
    with_evaluations = world_of(sort).play(between)
    without = world_of(sort).play(case, reference=True)
    without.numbers = with_evaluations.numbers
    assert with_evaluations.differences(without) == []


# Evaluation.


def plain_model(world: World) -> PreTrainedModel:
    """The resident model with the store's weights."""
    model = AutoModelForCausalLM.from_config(world.decoder.config, dtype=world.decoder.model.dtype)
    with torch.no_grad():
        for param in world.decoder.params:
            model.get_parameter(param.name).copy_(world.store.param(param.name, Kind.HI))
    return model.eval()


def plain_evaluation(model: PreTrainedModel, batch: list[MicroBatch]) -> tuple[float, int]:
    total, count = 0.0, 0
    for micro in batch:
        with torch.no_grad():
            logits = model(**micro.inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
        targets = micro.labels[:, 1:].flatten()
        losses = F.cross_entropy(logits.float(), targets, reduction="none")
        total += float(losses.double().sum())
        count += int((targets != -100).sum())
    return total, count


@pytest.mark.parametrize("sort", SORTS)
def test_evaluate_gives_the_plain_loss(sort: str) -> None:
    world = world_of(sort)
    case = Case(sort=sort, steps=steps_of(3), update="late", tape="host")
    batch = make_batch(MICRO_BATCHES, seed=5)
    with world.engine(case) as engine:
        assert engine.evaluate(batch) == pytest.approx(
            plain_evaluation(plain_model(world), batch), rel=1e-12
        )
        engine.step(make_batch(case.steps[0], seed=0))
        engine.step(make_batch(case.steps[1], seed=1))
        found = engine.evaluate(batch)  # the plain model then reads settled weights
        assert found == pytest.approx(plain_evaluation(plain_model(world), batch), rel=1e-12)


def test_an_evaluation_with_dropout_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of("gpt2, tied, with dropout")
    case = Case(sort="gpt2, tied, with dropout", steps=(), update="none")
    batch = make_batch(MICRO_BATCHES, seed=5)
    model = world.decoder.model
    monkeypatch.setattr(model, "eval", lambda: model)
    with world.engine(case) as engine:
        assert engine.evaluate(batch)[0] != pytest.approx(
            plain_evaluation(plain_model(world), batch)[0], rel=1e-6
        )


def test_training_goes_on_with_dropout_behind_an_evaluation_that_failed() -> None:
    world = world_of("gpt2, tied, with dropout")
    case = Case(sort="gpt2, tied, with dropout", steps=(), update="none")
    with world.engine(case) as engine:
        engine.device.meter.add = lambda *_: 1 / 0
        with pytest.raises(ZeroDivisionError):
            engine.evaluate(make_batch(((1, 4),), seed=0))
    assert world.decoder.model.training


# Micro-batches.


@pytest.mark.parametrize("cut", [(1, 1, 1, 1), (1, 3), (2, 2)])
def test_micro_batches_add_up_to_one_batch(cut: tuple[int, ...]) -> None:
    """fp32, unequal numbers of trained tokens: the mean is over the tokens of the step."""
    world = world_of("llama in fp32")
    (whole,) = make_batch(((4, 6),), seed=3)
    whole.labels[0, :5] = -100
    rows = torch.tensor(range(4)).split(cut)
    parts = [MicroBatch(input_ids=whole.input_ids[r], labels=whole.labels[r]) for r in rows]
    found = []
    for batch in ([whole], parts):
        with world.engine(Case(sort="", steps=(), update="none", tape="host")) as engine:
            loss = engine.step(batch).loss
            engine.settle()
            found.append(
                (loss, {n: world.store.param(n, Kind.GRAD).clone() for n in trained(world)})
            )
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, rtol=0, atol=1e-6)


# What a step gives back, and what it leaves alone.


def test_a_step_tells_what_it_did() -> None:
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, 4:] = 0
    ids = torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(0))
    padded = MicroBatch(input_ids=ids, labels=ids.where(mask > 0, -100), attention_mask=mask)
    whole = MicroBatch(input_ids=ids, labels=ids)
    with world_of(LATE.sort).engine(LATE) as engine:
        result = engine.step([padded, whole])
    assert (result.num_tokens, result.num_trained) == (10 + 12, 8 + 10)
    assert result.loss == sum(result.micro_losses)
    assert result.grad_norm is not None
    assert result.grad_norm > 0
    model = plain_model(world_rewound(LATE.sort))
    total = sum(plain_evaluation(model, [micro])[0] for micro in (padded, whole))
    assert result.loss == pytest.approx(total / 18, rel=1e-6)


def world_rewound(sort: str) -> World:
    world = world_of(sort)
    world.rewind()
    return world


def test_a_bad_batch_is_refused_before_anything_is_touched() -> None:
    world = world_of(LATE.sort)
    good = make_batch(LATE.steps[0], seed=0)
    ids = torch.full((1, 4), 64)
    with world.engine(LATE) as engine:
        engine.step(good)
        with pytest.raises(BatchError, match="token 64 in input_ids is outside"):
            engine.step([MicroBatch(input_ids=ids, labels=ids)])
        with pytest.raises(BatchError, match="at least one micro-batch"):
            engine.evaluate([])
        assert not engine.torn
        engine.step(make_batch(LATE.steps[1], seed=1))
    assert same(state_of(world), state_after(LATE, 2))


def draws_around_a_step(reference: bool) -> list[float]:
    case = Case(sort="gpt2, tied, with dropout", steps=(), update="none")
    batch = make_batch(((1, 4),), seed=0)
    with world_of(case.sort).engine(case, reference=reference) as engine:
        torch.manual_seed(3)
        before = torch.rand(2).tolist()
        engine.step(batch)
        engine.evaluate(batch)
        return before + torch.rand(2).tolist()


@pytest.mark.parametrize("reference", [True, False])
def test_the_callers_random_numbers_are_not_disturbed(
    reference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    alone = [*torch.rand(2).tolist(), *torch.rand(2).tolist()]
    assert draws_around_a_step(reference) == alone
    monkeypatch.setattr(torch, "set_rng_state", lambda state: None)
    assert draws_around_a_step(reference) != alone


def test_dropout_differs_by_step_micro_batch_and_seed_and_is_off_without() -> None:
    sort = "gpt2, tied, with dropout"
    case = Case(sort=sort, steps=(), update="none")
    twins = make_batch(((1, 5),), seed=0) * 2
    losses: list[float] = []
    for seed in (7, 8):
        with world_of(sort).engine(case, seed=seed) as engine:
            for _ in range(2):
                losses += engine.step(twins).micro_losses
    assert len(set(losses)) == 8
    with world_of(LATE.sort).engine(case) as engine:
        assert len({*engine.step(twins).micro_losses, *engine.step(twins).micro_losses}) == 1


FROZEN = {
    "embedding": (SORTS["llama of 2 layers"].config, ("model.embed_tokens.*",)),
    "head": (SORTS["llama of 2 layers"].config, ("model.norm.*", "lm_head.*")),
    "all but the head": (SORTS["llama of 5 layers"].config, ("model.embed*", "model.layers.*")),
    "all but one layer": (
        SORTS["llama of 5 layers"].config,
        ("model.embed*", "model.layers.[0134].*", "model.norm.*", "lm_head.*"),
    ),
    "matrices": (SORTS["llama of 5 layers"].config, ("*proj.weight", "lm_head.*", "*embed*")),
    "tied table": (SORTS["gemma, tied"].config, ("model.embed_tokens.*",)),
    "tied table beside trained positions": (
        SORTS["gpt2, tied, with dropout"].config,
        ("transformer.wte.*",),
    ),
    "tied table's neighbours": (
        SORTS["gpt2, tied, with dropout"].config,
        ("transformer.wpe.*", "transformer.ln_f.*"),
    ),
}


@pytest.mark.parametrize("what", FROZEN)
def test_freezing_changes_no_other_gradient_and_no_frozen_weight(what: str) -> None:
    config, frozen = FROZEN[what]
    whole, part = World(Sort(config=config)), World(Sort(config=config, frozen=frozen))
    case = Case(sort="", steps=steps_of(2), update="none", tape="host")
    gradients = []
    for world in (whole, part):
        with world.engine(case) as engine:
            for number in range(2):  # the second finds what the first left in its places
                engine.step(make_batch(case.steps[number], seed=number))
            engine.settle()
            gradients.append({name: world.store.param(name, Kind.GRAD) for name in trained(world)})
    assert 0 < len(gradients[1]) < len(gradients[0])
    for name, gradient in gradients[1].items():
        assert gradient.any(), name
        assert torch.equal(gradient, gradients[0][name]), name

    before = {p.name: part.store.param(p.name, Kind.HI).clone() for p in part.decoder.params}
    with part.engine(Case(sort="", steps=(), update="late")) as engine:
        engine.step(make_batch(case.steps[0], seed=0))
    for name, weight in before.items():
        moved = not torch.equal(part.store.param(name, Kind.HI), weight)
        assert moved == (name in gradients[1]), name


def trained(world: World) -> list[str]:
    return [param.name for param in world.decoder.params if param.trained]


def test_a_trace_shows_every_kind_of_op(tmp_path: Path) -> None:
    case = Case(sort=LATE.sort, steps=steps_of(2), update="late", tape="host")
    with world_of(case.sort).engine(case, trace=True) as engine:
        engine.step(make_batch(case.steps[0], seed=0))
        engine.settle()
        engine.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())
    names = json.dumps(events)
    assert all(f'"{kind.name}(' in names or f'"{kind.name}"' in names for kind in OpKind)

"""Laws of updates ahead of the norm: the bits of late updates, in steps that are clipped or not, or
that are not finite; and nobody sees a guess."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain import AdamW, load_model
from megatrain.engine.actions import StepActions
from megatrain.engine.snapshot import Gate, Snapshot
from megatrain.engine.undo_log import UndoLog
from megatrain.engine.updates import Updates
from megatrain.errors import ScheduleError
from megatrain.memory.kinds import Kind, store_kinds
from megatrain.models.decoder import COMPUTE_DTYPES
from megatrain.optim.states import STATES
from megatrain.step.ops import Op, OpKind
from megatrain.step.shape import StepShape
from proofs.races import Run, play, simulator_of
from proofs.races import world_of as races_world
from testkit.engines import make_engine
from testkit.families import save_tiny
from testkit.patience import HANG_S
from testkit.plain import make_batch
from testkit.rank_training import RankCase, ranks_of
from testkit.simulated.watched import WatchedOptimizer
from testkit.states import State, same, state_of, steps_of
from testkit.worlds import SORTS, Case, world_of
from testkit.worlds import make_batch as small_batch

SORT = "llama of 5 layers"
ALL = 99
"""More blocks than any model here has."""
WAYS: tuple[dict[str, Any], ...] = (
    {"tape": "device", "copying": True, "slots": 2},
    {"tape": "host", "copying": True, "slots": 3, "grad_slots": 1},
    {"tape": "device", "copying": False, "kept_layers": 1},
)
CLIPS = {"never": 1e3, "always": 1e-2, "sometimes": 5.0}
"""Limits of the norm by how often a step here is above."""


class Counts:
    """How often something was taken back, or stayed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.restored = self.stayed = 0
        restore, forget = UndoLog.restore, UndoLog.forget

        def counted_restore(log: UndoLog, block: int) -> None:
            self.restored += 1
            restore(log, block)

        def counted_forget(log: UndoLog, block: int) -> None:
            self.stayed += 1
            forget(log, block)

        monkeypatch.setattr(UndoLog, "restore", counted_restore)
        monkeypatch.setattr(UndoLog, "forget", counted_forget)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch)


def limited(sort: str, clip: float) -> dict[str, Any]:
    return {"optimizer": world_of(sort).optimizer(max_grad_norm=clip)}


@pytest.mark.few(5)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("num_micro", [1, 3])
@pytest.mark.parametrize("sort", SORTS)
def test_steps_are_those_of_late_updates(
    sort: str, num_micro: int, way: dict[str, Any], clip: str
) -> None:
    world, limit = world_of(sort), limited(sort, CLIPS[clip])
    late = Case(sort=sort, steps=steps_of(num_micro), update="late", evaluates_after=(1,), **way)
    expected = world.play(late, **limit)
    few, every = (replace(late, speculated_blocks=blocks) for blocks in (2, ALL))
    assert world.play(few, **limit).differences(expected) == []
    assert world.play(every, **limit).differences(expected) == []
    assert world.play(every, reference=True, **limit).differences(expected) == []


@pytest.mark.parametrize("clip", CLIPS)
def test_a_guess_is_taken_back_exactly_when_a_step_is_clipped(clip: str, counts: Counts) -> None:
    """With a limit that every step exceeds, the first one alone is guessed at."""
    case = Case(sort=SORT, steps=steps_of(2) * 2, update="late", speculated_blocks=ALL)
    result = world_of(SORT).play(case, **limited(SORT, CLIPS[clip]))
    norms = [norm for norm in result.numbers[3::4] if norm is not None]
    clipped = [norm > CLIPS[clip] for norm in norms]
    guessed = [not (step and clipped[step - 1]) for step in range(len(clipped))]
    num_blocks = 6
    assert counts.restored == num_blocks * sum(
        g and c for g, c in zip(guessed, clipped, strict=True)
    )
    assert counts.stayed == num_blocks * sum(
        g and not c for g, c in zip(guessed, clipped, strict=True)
    )
    assert counts.restored + counts.stayed > 0


@pytest.mark.few(2)
@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_states_of_every_form_come_back(dtype: Any, state: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "qwen3", COMPUTE_DTYPES[dtype])
    for clip in CLIPS.values():
        late, ahead = (_trained(folder, dtype, state, clip, blocks) for blocks in (0, ALL))
        assert ahead[0] == late[0]
        assert [name for name in late[1] if not torch.equal(late[1][name], ahead[1][name])] == []


def _trained(folder: Path, dtype: Any, state: str, clip: float, blocks: int) -> tuple[Any, Any]:
    kinds = store_kinds(STATES["adamw"][state], waits=True)
    home = load_model(folder, dtype=dtype, kinds=kinds)
    optimizer = AdamW(learning_rate=1e-2, max_grad_norm=clip, state=state)
    numbers = []
    with make_engine(
        home.decoder, home.store, optimizer=optimizer, speculated_blocks=blocks
    ) as engine:
        for step in range(3):
            result = engine.step(make_batch([(2, 12), (1, 9)], seed=step))
            numbers.append((result.micro_losses, result.grad_norm))
    states = {
        f"{kind} {block}": home.store.block_bytes(block, kind).clone()
        for block in range(len(home.decoder.blocks))
        for kind in kinds
        if kind is not Kind.GRAD
    }
    return numbers, states


def test_an_update_that_is_not_taken_back_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(sort=SORT, steps=steps_of(1), update="late")
    expected = world_of(SORT).play(case, **limited(SORT, CLIPS["always"]))
    monkeypatch.setattr(UndoLog, "restore", UndoLog.forget)
    ahead = world_of(SORT).play(
        replace(case, speculated_blocks=ALL), **limited(SORT, CLIPS["always"])
    )
    assert ahead.differences(expected) != []


def _with_a_broken_step(blocks: int, broken: int, **changes: Any) -> tuple[State, list[State]]:
    """Play a good step, one whose block `broken` has a weight that is not finite, and a good one.

    Returns the last state, and those before and after the second step.
    """
    world, batch = world_of(SORT), small_batch(((2, 8), (1, 5)), seed=0)
    case = Case(sort=SORT, steps=steps_of(1), update="late", speculated_blocks=blocks)
    with world.engine(case, **limited(SORT, CLIPS["never"]), **changes) as engine:
        engine.step(batch)
        engine.settle()
        weight = world.store.param(world.decoder.blocks[broken].params[0].name, Kind.HI).view(-1)
        good = weight.clone()
        weight.fill_(math.inf)
        around = [state_of(world)]
        result = engine.step(batch)
        assert not result.applied
        assert result.fault is not None
        around.append(state_of(world))
        weight.copy_(good)
        engine.step(small_batch(((1, 6),), seed=1))
        engine.settle()
        return state_of(world), around


@pytest.mark.few(3)
@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("broken", [0, 3, 6])
def test_a_step_that_is_not_finite_changes_nothing(broken: int, reference: bool) -> None:
    expected, _ = _with_a_broken_step(0, broken, reference=True)
    found, (before, after) = _with_a_broken_step(ALL, broken, reference=reference)
    assert same(before, after)
    assert same(found, expected)


@pytest.mark.parametrize("block", [0, 2])
def test_a_fault_that_goes_away_leaves_the_bits_of_a_step_without(
    block: int, monkeypatch: pytest.MonkeyPatch, counts: Counts
) -> None:
    """Others are ahead of the norm when that is not finite; the step is repeated."""
    case = Case(sort=SORT, steps=steps_of(2), update="late", speculated_blocks=ALL)
    expected = world_of(SORT).play(replace(case, speculated_blocks=0), **limited(SORT, 1e3))
    measure, spoiled = Updates.measure, list[Op]()

    def spoils_once(self: Updates, op: Op, gradient: Any, step: int) -> None:
        if op.block == block and step == 2 and not spoiled:
            spoiled.append(op)
            gradient[0][1].view(-1)[0] = math.nan
        measure(self, op, gradient, step)

    monkeypatch.setattr(Updates, "measure", spoils_once)
    found = world_of(SORT).play(case, **limited(SORT, 1e3))
    assert found.differences(expected) == []
    assert counts.restored == (6 if block == 0 else 5)  # its own gradient is not finite


@pytest.mark.few(1)
@pytest.mark.parametrize("clip", ["never", "always"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_the_bits_of_their_late_updates(size: int, clip: str) -> None:
    case = RankCase(size=size, max_grad_norm=CLIPS[clip])
    late, ahead = (
        ranks_of(replace(case, settings=(("speculated_blocks", blocks),))) for blocks in (0, ALL)
    )
    for expected, found in zip(late, ahead, strict=True):
        assert [r.grad_norm for r in found.results] == [r.grad_norm for r in expected.results]
        for name, values in found.state.items():
            assert torch.equal(values, expected.state[name]), name


def test_a_step_that_fails_in_backward_leaves_the_store_whole(
    monkeypatch: pytest.MonkeyPatch, counts: Counts
) -> None:
    """All that was done ahead of the norm is taken back, so nothing is torn."""
    world, batch = world_of(SORT), small_batch(((2, 8),), seed=0)
    case = Case(sort=SORT, steps=steps_of(1), update="late", speculated_blocks=ALL)
    with world.engine(case, **limited(SORT, CLIPS["never"])) as engine:
        engine.step(batch)
        engine.settle()
        before = state_of(world)
        _break(monkeypatch, OpKind.NORM, 0)
        with pytest.raises(RuntimeError, match="planted"):
            engine.step(batch)
        assert counts.restored == 6
        assert not engine.torn
        assert same(state_of(world), before)


def _break(monkeypatch: pytest.MonkeyPatch, kind: OpKind, block: int) -> None:
    table = StepActions.table

    def broken(action: Callable[[Op], int | None], op: Op) -> int | None:
        if op.block == block:
            raise RuntimeError("planted")
        return action(op)

    def broken_table(self: StepActions) -> Any:
        actions = table(self)
        return actions | {kind: functools.partial(broken, actions[kind])}

    monkeypatch.setattr(StepActions, "table", broken_table)


def _read_while_training(held_for: int) -> tuple[State, State, State]:
    """Take a snapshot after two steps, and let it go when `held_for` more are done.

    Returns what it read, the state after two steps, and the state at the end.
    """
    world = world_of(SORT)
    case = Case(sort=SORT, steps=steps_of(2), update="late", speculated_blocks=ALL)
    batches = [small_batch(((1, 6), (1, 5)), seed=seed) for seed in range(4)]
    with world.engine(case, **limited(SORT, CLIPS["never"])) as engine:
        for batch in batches[:2]:
            engine.step(batch)
        engine.settle()
        expected = state_of(world)
    with world.engine(case, **limited(SORT, CLIPS["never"])) as engine:
        for batch in batches[:2]:
            engine.step(batch)
        snapshot, read, go = engine.snapshot(), [], threading.Event()
        reader = threading.Thread(target=lambda: read.append(_read(snapshot, go)))
        reader.start()
        for number, batch in enumerate(batches[2:]):
            if number == held_for:
                go.set()
            engine.step(batch)
        go.set()
        engine.settle()
        reader.join(HANG_S)
        return read[0], expected, state_of(world)


def _read(snapshot: Snapshot, go: threading.Event) -> State:
    world, state = world_of(SORT), State()
    for block in snapshot.order:
        snapshot.wait(block)
        go.wait(HANG_S)
        state |= {
            name: value for name, value in state_of(world).items() if name.endswith(f" {block}")
        }
        snapshot.let_go(block)
    snapshot.close()
    return state


@pytest.mark.parametrize("held_for", [0, 1])
def test_a_snapshot_never_reads_a_guess_and_no_guess_waits_for_it(held_for: int) -> None:
    """The blocks that it holds are updated behind the norm: the step ends, whoever reads."""
    read, expected, _ = _read_while_training(held_for)
    assert same(expected, read)


def test_guesses_that_do_not_ask_a_snapshot_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Gate, "number_if_free", lambda self, block: self.num_updates[block] + 1)
    read, expected, _ = _read_while_training(1)
    assert not same(expected, read)


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", ["late", "random", "early"])
@pytest.mark.parametrize("clip", ["never", "always"])
def test_a_device_finds_no_race(clip: str, policy: Any) -> None:
    steps = (((1, 5), (2, 4)), ((1, 5), (2, 4)))
    case = Case(sort="", steps=steps, update="late", speculated_blocks=ALL, tape="host")
    run = Run(family="llama", dtype="bf16", case=case, policy=policy, seed=3)
    simulator, world = simulator_of(run), races_world("llama", "bf16")
    optimizer = world.optimizer(max_grad_norm=CLIPS[clip])
    found = play(run, simulator, optimizer=WatchedOptimizer(optimizer, simulator))
    late = replace(case, speculated_blocks=0)
    assert found.differences(world.play(late, reference=True, optimizer=optimizer)) == []
    assert simulator.races == []
    assert simulator.failures == []


@pytest.mark.parametrize(
    ("speculated", "blocks"),
    [
        (0, []),
        (1, [6]),
        (2, [3, 6]),
        (3, [2, 4, 6]),
        (5, [2, 3, 4, 5, 6]),
        (6, [1, 2, 3, 4, 5, 6]),
        (ALL, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_blocks_are_spread_evenly_from_the_first_to_arrive(
    speculated: int, blocks: list[int]
) -> None:
    shape = StepShape(num_blocks=7, update="late", speculated=speculated)
    assert shape.speculated_blocks == blocks


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"update": "in_backward"}, 'not update="in_backward"'),
        ({"update": "second_backward"}, 'not update="second_backward"'),
        ({"update": "late", "tier": "states"}, "on disk"),
    ],
)
def test_other_policies_and_a_disk_are_refused(other: dict[str, Any], text: str) -> None:
    with pytest.raises(ScheduleError, match=text):
        StepShape(num_blocks=4, speculated=1, **other)

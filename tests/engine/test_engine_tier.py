"""Masters, moments and gradients on disk: the bits of an engine that has all of them in memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megatrain.engine.engine import Engine
from megatrain.engine.snapshot import Snapshot
from megatrain.engine.updates import Updates
from megatrain.errors import ConfigError, DiskError, ScratchFileCorrupted
from megatrain.lanes.lane import Lane
from megatrain.memory.kinds import TensorKind, kinds_on_disk, store_kinds
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.memory.tier.ring import TierRing
from megatrain.memory.tier.scratch_file import Tier, TierRegions
from megatrain.optim.adamw import AdamW
from megatrain.optim.states import STATES, M, V
from megatrain.step.ops import LANES, Op, OpKind
from megatrain.step.shape import Update
from testkit.engines import make_engine
from testkit.patience import HANG_S
from testkit.schedules import lose_waits
from testkit.slow_lane import SlowLane
from testkit.states import steps_of
from testkit.worlds import Case, Outcome, Tiered, block_bytes, make_batch, world_of

MODES: list[tuple[Update, Tiered]] = [
    ("in_backward", "states"),
    ("late", "states"),
    ("second_backward", "states"),
]
CASE = Case(sort="llama of 5 layers", steps=steps_of(2), update="late", tier="states")
KINDS = (TensorKind.HI, TensorKind.LO, M, V)


def in_memory(case: Case) -> Outcome:
    return world_of(case.sort).play(replace(case, tier="none"), reference=True)


def slow(name: str) -> list[Lane]:
    return [SlowLane(lane, delay=(lambda op: 5e-3) if lane == name else None) for lane in LANES]


def held(until: threading.Event, name: str, *, at: int = 1) -> list[Lane]:
    """Return lanes that hold the `at`-th op of that name until the event."""
    seen: list[Op] = []

    def hold(op: Op) -> float:
        if str(op) == name:
            seen.append(op)
            if len(seen) == at:
                until.wait(HANG_S)
        return 0.0

    return [SlowLane(lane, delay=hold) for lane in LANES]


@pytest.mark.few(3)
@pytest.mark.parametrize(("update", "tier"), MODES)
@pytest.mark.parametrize(
    ("sort", "copying"),
    [
        ("llama of 5 layers", True),
        ("llama in fp32", False),
        ("gpt2, tied, with dropout", True),
        ("llama, partly frozen", False),
    ],
)
def test_what_is_on_disk_changes_no_bit(
    sort: str, copying: bool, update: Update, tier: Tiered
) -> None:
    case = replace(CASE, sort=sort, copying=copying, update=update, tier=tier, evaluates_after=(1,))
    expected = in_memory(case)
    world = world_of(sort)
    assert world.play(case).differences(expected) == []
    assert world.play(case, reference=True).differences(expected) == []


def trained_with(state: str, case: Case, tier: Tiered, folder: Path) -> dict[str, Tensor]:
    """Return all that three steps leave of a model whose moments are kept in `state`."""
    world = world_of(case.sort)
    kinds = store_kinds(STATES["adamw"][state], waits=True)
    layout, on_disk = build_layout(world.decoder.blocks, kinds), kinds_on_disk(kinds, tier)
    store = Store(layout, Tier(folder, TierRegions(layout, on_disk)) if on_disk else None)
    for block in range(layout.num_blocks):
        store.block_bytes(block, TensorKind.HI).copy_(world.store.block_bytes(block, TensorKind.HI))
    optimizer = AdamW(learning_rate=1e-2, max_grad_norm=1.0, state=state, seed=3)
    with make_engine(
        world.decoder, store, optimizer=optimizer, update=case.update, tier=tier, state=state
    ) as engine:
        train(engine, case)
    found = {
        f"{kind} of block {block}": block_bytes(store, block, kind)
        for kind in kinds
        if kind is not TensorKind.GRAD
        for block in range(layout.num_blocks)
    }
    store.close()
    return found


@pytest.mark.few(4)
@pytest.mark.parametrize("state", ["bf16", "8bit"])
@pytest.mark.parametrize(("update", "tier"), MODES)
def test_rounded_moments_on_disk_change_no_bit(
    state: str, update: Update, tier: Tiered, tmp_path: Path
) -> None:
    case = replace(CASE, update=update)
    world_of(case.sort).rewind()
    expected = trained_with(state, case, "none", tmp_path)
    found = trained_with(state, case, tier, tmp_path)
    assert found.keys() == expected.keys()
    assert [name for name, part in found.items() if not part.equal(expected[name])] == []


@pytest.mark.parametrize(("update", "tier"), MODES)
def test_an_update_that_does_not_wait_for_the_disk_would_be_noticed(
    update: Update, tier: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, updated = replace(CASE, update=update, tier=tier), threading.Event()
    apply, expected = Updates.apply, in_memory(case)

    def noted(self: Updates, op: Op, *rest: Any) -> int:
        num_bytes = apply(self, op, *rest)
        if op.block == 3:
            updated.set()
        return num_bytes

    lose_waits(monkeypatch, OpKind.READ, writes=("tier_slot",))
    monkeypatch.setattr(Updates, "apply", noted)
    lanes = held(updated, "READ(3)")
    with suppress(ScratchFileCorrupted):  # it changed what was being written
        assert world_of(case.sort).play(case, lanes=lanes).differences(expected)


# Failures: their own error, and the weights are those of a step, or known not to be.


def failing(monkeypatch: pytest.MonkeyPatch, name: str, *, at: int) -> None:
    """Let the `at`-th call of a method of the ring fail."""
    method: Callable[..., int] = getattr(TierRing, name)
    calls: list[Op] = []

    def fails(self: TierRing, op: Op, *rest: object) -> int:
        calls.append(op)
        if len(calls) == at:
            raise DiskError("the disk is gone")
        return method(self, op, *rest)

    monkeypatch.setattr(TierRing, name, fails)


def train(engine: Engine, case: Case) -> None:
    for number, shapes in enumerate(case.steps):
        engine.step(make_batch(shapes, seed=number))
    engine.synchronize()


@pytest.mark.parametrize(
    ("update", "tier", "name", "at", "torn"),
    [
        ("late", "states", "read", 1, False),
        ("late", "states", "write", 1, True),
        ("late", "states", "write", 7, True),
        ("in_backward", "states", "read", 2, False),
        ("in_backward", "states", "write", 7, True),
    ],
)
def test_a_failure_of_the_disk_is_raised_and_tells_whether_a_step_is_half_done(
    update: Update, tier: Tiered, name: str, at: int, torn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(CASE, update=update, tier=tier)
    failing(monkeypatch, name, at=at)
    engine = world_of(case.sort).engine(case)
    with engine:
        with pytest.raises(DiskError, match="the disk is gone"):
            train(engine, case)
        assert engine.weights_inconsistent == torn


@pytest.mark.parametrize(("update", "tier"), MODES)
def test_a_block_that_is_left_out_is_not_written(
    update: Update, tier: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(CASE, update=update, tier=tier)
    world, written = world_of(case.sort), list[OpKind]()
    write = TierRing.write

    def noted(self: TierRing, op: Op) -> int:
        written.append(op.kind)
        return write(self, op)

    monkeypatch.setattr(TierRing, "write", noted)
    with world.engine(case) as engine:
        with pytest.MonkeyPatch.context() as spoiled:
            spoiled.setattr(AdamW, "squared_norm", lambda self, gradient: math.inf)
            assert not engine.step(make_batch(case.steps[0], seed=0)).applied
        engine.synchronize()
        assert written == []
        assert engine.step(make_batch(case.steps[1], seed=1)).applied
        engine.synchronize()
    assert len(written) == len(world.decoder.blocks)


# Snapshots: a reader finds on disk what belongs to the weights.


def read_during_training(
    case: Case, lanes: list[Lane], first_is_read: threading.Event | None = None
) -> dict[str, bool]:
    """Return, by kind and block, whether a snapshot after two steps reads the state after them."""
    world = world_of(case.sort)
    with world.engine(case, reference=True) as engine:
        for number, shapes in enumerate(case.steps[:2]):
            engine.step(make_batch(shapes, seed=number))
        engine.synchronize()
        expected = world.bytes_of(*KINDS, tier=case.tier)
    found: dict[str, bool] = {}

    def read(snapshot: Snapshot) -> None:
        for block in snapshot.order:
            snapshot.wait(block)
            now = world.bytes_of(*KINDS, tier=case.tier, blocks=[block])
            found.update({name: part.equal(expected[name]) for name, part in now.items()})
            if block == 0 and first_is_read is not None:
                first_is_read.set()
            snapshot.let_go(block)
        snapshot.close()

    with world.engine(case, lanes=lanes) as engine:
        for number, shapes in enumerate(case.steps):
            engine.step(make_batch(shapes, seed=number))
            if number == 1:
                reader = threading.Thread(target=read, args=[engine.snapshot()])
                reader.start()
        engine.synchronize()
        reader.join(HANG_S)
    assert found.keys() == expected.keys()
    return found


@pytest.mark.few(3)
@pytest.mark.parametrize(("update", "tier"), MODES)
@pytest.mark.parametrize("lane", ["disk", "host"])
def test_a_snapshot_reads_a_block_when_it_is_back_on_disk(
    update: Update, tier: Tiered, lane: str
) -> None:
    case = replace(CASE, update=update, tier=tier)
    assert all(read_during_training(case, slow(lane)).values())


@pytest.mark.parametrize(("update", "tier"), MODES)
def test_an_update_that_counts_before_it_is_written_would_be_noticed(
    update: Update, tier: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply, write_back = Updates.apply, Updates.write_back

    # Of block 0 alone: others might be read while they are written, which is another fault.
    def early(self: Updates, op: Op, *rest: Any) -> int:
        num_bytes = apply(self, op, *rest)
        if op.block == 0:
            self._gate.leave(0)
        return num_bytes

    def without_leaving(self: Updates, op: Op, ring: TierRing) -> int:
        return ring.write(op) if op.block == 0 else write_back(self, op, ring)

    monkeypatch.setattr(Updates, "apply", early)
    monkeypatch.setattr(Updates, "write_back", without_leaving)
    case, is_read = replace(CASE, update=update, tier=tier), threading.Event()
    lanes = held(is_read, "WRITE(0)", at=2)
    found = read_during_training(case, lanes, is_read)
    assert not found["m of block 0"]


def test_a_store_with_other_kinds_on_disk_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        world_of(CASE.sort).engine(replace(CASE, tier="none"), tier="states")
    assert str(caught.value) == (
        "the store has nothing on disk, but StepSettings.tier is 'states': it needs lo, m, v there"
    )

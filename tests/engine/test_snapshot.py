"""What a snapshot reads is the state after its step, whatever training does meanwhile."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain import AdamW, Engine, HostModel, load_model
from megatrain.engine.snapshot import Gate, Snapshot
from megatrain.errors import CheckpointMismatch, SnapshotLost
from megatrain.memory.kinds import TensorKind
from megatrain.optim.states import M, V
from testkit.engines import make_engine
from testkit.families import save_tiny
from testkit.patience import HANG_S
from testkit.plain import make_batch

KINDS = (TensorKind.HI, TensorKind.LO, M, V)
BATCHES = [make_batch([(1, 6), (1, 5)], seed=seed) for seed in range(5)]
SAVED = 2
"""The snapshot is taken after so many steps."""
State = dict[tuple[int, TensorKind], torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), "llama", torch.bfloat16)


def _engine(folder: Path, update: Any, **settings: Any) -> tuple[HostModel, Engine]:
    home = load_model(folder)
    rate = 0.01
    optimizer = AdamW(learning_rate=rate, max_grad_norm=1.0 if update == "late" else None)
    return home, make_engine(
        home.decoder, home.store, optimizer=optimizer, update=update, **settings
    )


def _block(home: HostModel, block: int) -> State:
    return {(block, kind): home.store.block_bytes(block, kind).clone() for kind in KINDS}


def _read(home: HostModel, snapshot: Snapshot, source: random.Random) -> State:
    """Read as a saver would, at a random pace."""
    state: State = {}
    for block in snapshot.order:
        snapshot.wait(block)
        time.sleep(source.choice([0, 0, 0.003, 0.02]))
        state |= _block(home, block)
        snapshot.let_go(block)
    snapshot.close()
    return state


def _state_after(folder: Path, update: str, num_steps: int) -> State:
    home, engine = _engine(folder, update)
    with engine:
        for batch in BATCHES[:num_steps]:
            engine.step(batch)
        engine.synchronize()
        blocks = range(len(home.decoder.blocks))
        return {key: value for block in blocks for key, value in _block(home, block).items()}


def _read_during_training(folder: Path, update: str, seed: int) -> State:
    home, engine = _engine(folder, update)
    found: list[State] = []
    source = random.Random(seed)
    with engine:
        for batch in BATCHES[:SAVED]:
            engine.step(batch)
        snapshot = engine.snapshot()
        assert snapshot.num_steps == SAVED
        reader = threading.Thread(target=lambda: found.append(_read(home, snapshot, source)))
        reader.start()
        for batch in BATCHES[SAVED:]:
            engine.step(batch)
        engine.synchronize()
        reader.join(HANG_S)
    return found[0]


def _same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.few(2)
@pytest.mark.parametrize("update", ["in_backward", "late"])
@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_state_after_the_step(folder: Path, update: str, seed: int) -> None:
    expected = _state_after(folder, update, SAVED)
    assert _same(_read_during_training(folder, update, seed), expected)
    assert not _same(_state_after(folder, update, SAVED + 1), expected)


@pytest.mark.parametrize("update", ["in_backward", "late"])
def test_updates_that_do_not_wait_would_be_noticed(
    folder: Path, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gate, "enter", lambda self, block: self.num_updates[block] + 1)
    home, engine = _engine(folder, update)
    with engine:
        for batch in BATCHES[:SAVED]:
            engine.step(batch)
        snapshot = engine.snapshot()
        for batch in BATCHES[SAVED:]:
            engine.step(batch)
        found = _read(home, snapshot, random.Random(0))
    assert not _same(found, _state_after(folder, update, SAVED))


def test_a_reader_that_does_not_wait_for_late_updates_would_be_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gate, "wait", lambda *_: None)
    home, engine = _engine(folder, "late")
    with engine:
        for batch in BATCHES[:SAVED]:
            engine.step(batch)
        found = _read(home, engine.snapshot(), random.Random(0))
    assert not _same(found, _state_after(folder, "late", SAVED))


def test_training_does_not_wait_for_blocks_that_were_let_go(folder: Path) -> None:
    _, engine = _engine(folder, "in_backward")
    with engine:
        engine.step(BATCHES[0])
        snapshot = engine.snapshot()
        for block in snapshot.order:
            snapshot.wait(block)
            snapshot.let_go(block)
        engine.step(BATCHES[1])
        engine.synchronize()


def test_a_closed_snapshot_holds_nothing(folder: Path) -> None:
    _, engine = _engine(folder, "late")
    with engine:
        engine.step(BATCHES[0])
        engine.snapshot().close()
        engine.step(BATCHES[1])
        engine.synchronize()


def test_a_reader_is_told_when_training_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine = _engine(folder, "late")
    engine.step(BATCHES[0])
    snapshot = engine.snapshot()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(AdamW, "update", fail)
    with pytest.raises(RuntimeError, match="planted"):
        engine.synchronize()
    with pytest.raises(SnapshotLost, match="while its state was being saved"):
        snapshot.wait(0)
    with pytest.raises(SnapshotLost):
        snapshot.let_go(0)
    engine.close()


@pytest.mark.parametrize("update", ["in_backward", "late"])
def test_restore_goes_on_where_the_snapshot_was(folder: Path, update: str) -> None:
    home, engine = _engine(folder, update)
    with engine:
        for batch in BATCHES[:SAVED]:
            engine.step(batch)
        engine.synchronize()
        snapshot = engine.snapshot()
        saved = {k: v for b in snapshot.order for k, v in _block(home, b).items()}
        snapshot.close()
    other, resumed = _engine(folder, update)
    for (block, kind), value in saved.items():
        other.store.block_bytes(block, kind).copy_(value)
    with resumed:
        resumed.restore(snapshot.num_steps, snapshot.num_updates)
        for batch in BATCHES[SAVED:]:
            resumed.step(batch)
        resumed.synchronize()
        ended = {k: v for b in snapshot.order for k, v in _block(other, b).items()}
        with pytest.raises(CheckpointMismatch, match="other blocks were trained"):
            resumed.restore(1, {0: 1})
    assert _same(ended, _state_after(folder, update, len(BATCHES)))

"""Laws of seals: flipped bits are found before anything is acknowledged, and nothing else changes.

Each case trains a tiny model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain import AdamW, Engine, HostModel, Lora, Muon, load_model
from megatrain.engine import seals
from megatrain.engine.seals import Seals
from megatrain.errors import MemoryDamaged
from megatrain.memory.kinds import Kind, store_kinds
from megatrain.optim.states import STATES
from testkit.engines import make_engine
from testkit.families import save_tiny
from testkit.plain import make_batch

BATCHES = [make_batch([(1, 6), (1, 5)], seed=seed) for seed in range(5)]
WAYS: dict[str, dict[str, Any]] = {
    "late": {},
    "in backward": {"update": "in_backward"},
    "second backward": {"update": "second_backward"},
    "ahead of the norm": {"speculated_blocks": 99},
    "8-bit states": {"state": "8bit"},
    "muon": {"muon": True},
    "adapters": {"lora": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), "llama", torch.bfloat16)


def opened(
    folder: Path, *, state: str = "fp32", muon: bool = False, lora: bool = False, **settings: Any
) -> tuple[HostModel, Engine]:
    name, late = "muon" if muon else "adamw", settings.get("update", "late") == "late"
    kinds = store_kinds(STATES[name][state], waits=late)
    home = load_model(folder, kinds=kinds, lora=Lora(rank=2, alpha=4) if lora else None)
    clip = None if settings.get("update") == "in_backward" else 0.5
    optimizer = (Muon if muon else AdamW)(learning_rate=0.01, max_grad_norm=clip, state=state)
    engine = make_engine(home.decoder, home.store, optimizer=optimizer, state=state, **settings)
    return home, engine


def state_after(folder: Path, **way: Any) -> dict[str, Tensor]:
    home, engine = opened(folder, **way)
    with engine:
        for batch in BATCHES[:3]:
            engine.step(batch)
        engine.settle()
        engine.check_memory()
        return {str(kind): home.store.arena(kind).clone() for kind in home.store.kinds}


@pytest.mark.few(2)
@pytest.mark.parametrize("way", WAYS)
def test_seals_change_no_bit_and_raise_no_alarm(way: str, folder: Path) -> None:
    expected = state_after(folder, **WAYS[way])
    found = state_after(folder, check=True, **WAYS[way])
    assert [kind for kind in expected if not torch.equal(expected[kind], found[kind])] == []


def flip(home: HostModel, kind: Kind, *, trained: bool = True, bit: int = 3) -> str:
    """Flip a bit in the last param that has the kind; return its name."""
    place = [p for p in home.store.layout.places.values() if p.param.trained == trained][-1]
    extent = place.extent(kind)
    home.store.arena(kind)[extent.stop - 1] ^= 1 << bit
    return place.param.name


def take_steps(engine: Engine) -> None:
    for batch in BATCHES[1:]:
        engine.step(batch)


def kinds_of(folder: Path, **way: Any) -> list[Kind]:
    home, engine = opened(folder, **way)
    engine.close()
    return list(home.store.kinds)


@pytest.mark.parametrize("state", ["fp32", pytest.param("8bit", marks=pytest.mark.merge)])
def test_a_step_fails_whose_update_finds_a_flipped_bit(state: str, folder: Path) -> None:
    for kind in kinds_of(folder, state=state):
        home, engine = opened(folder, state=state, check=True)
        with engine:
            engine.step(BATCHES[0])
            engine.step(BATCHES[1])  # its gradients wait
            name = flip(home, kind)
            with pytest.raises(MemoryDamaged, match="host memory changed") as raised:
                engine.step(BATCHES[2])
        assert name in str(raised.value)
        assert kind.purpose in str(raised.value)
        assert not raised.value.is_frozen


def test_memory_is_blamed_for_a_gradient_that_is_not_finite(folder: Path) -> None:
    """An exponent that flips may be noticed by the loss before an update looks at it."""
    home, engine = opened(folder, check=True, on_nonfinite="skip")
    with engine:
        engine.step(BATCHES[0])
        engine.settle()
        home.store.param("lm_head.weight", Kind.HI).view(-1)[7] = float("nan")
        with pytest.raises(MemoryDamaged):
            engine.step(BATCHES[1])


def test_without_the_check_nobody_notices(folder: Path) -> None:
    home, engine = opened(folder)
    with engine:
        engine.step(BATCHES[0])
        flip(home, Kind.LO)
        engine.step(BATCHES[1])
        engine.settle()
        engine.check_memory()


def test_a_snapshot_does_not_let_a_damaged_block_go(folder: Path) -> None:
    home, engine = opened(folder, check=True)
    with engine:
        engine.step(BATCHES[0])
        engine.settle()
        snapshot = engine.snapshot()
        name = flip(home, Kind.HI)
        block = home.store.layout.places[name].segment.block
        for other in set(snapshot.order) - {block}:
            snapshot.let_go(other)
        with pytest.raises(MemoryDamaged):
            snapshot.let_go(block)
        snapshot.close()
        with pytest.raises(MemoryDamaged):  # it is not forgotten
            engine.step(BATCHES[1])


def test_the_undo_log_is_sealed_too(folder: Path) -> None:
    """Updates ahead of the norm are taken back in a step that is clipped, and so are their seals.

    A bit that flips meanwhile comes back with them.
    """
    _, engine = opened(folder, check=True, speculated_blocks=99)
    with engine:
        engine.step(BATCHES[0])
        (first, *_) = engine._machine.updates._undo._kept.values()
        (_, copy), *_ = first
        copy.view(torch.uint8)[5] ^= 1
        with pytest.raises(MemoryDamaged):
            engine.step(BATCHES[1])


def test_frozen_weights_are_checked_in_turn_and_stay_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seals, "TOUR_STEPS", 2)
    home, engine = opened(folder, check=True, lora=True)
    with engine:
        engine.step(BATCHES[0])
        name = flip(home, Kind.HI, trained=False)
        with pytest.raises(MemoryDamaged, match=name) as raised:
            take_steps(engine)
        assert raised.value.is_frozen
        engine.restore(1, engine.num_updates)  # a checkpoint of adapters does not heal it
        with pytest.raises(MemoryDamaged):
            engine.check_memory()


def test_a_restored_state_is_taken_for_right(folder: Path) -> None:
    home, engine = opened(folder, check=True)
    with engine:
        engine.step(BATCHES[0])
        engine.settle()
        before, updates = home.store.arena(Kind.LO).clone(), engine.num_updates
        flip(home, Kind.LO)
        with pytest.raises(MemoryDamaged):
            take_steps(engine)
        engine.settle()
        home.store.arena(Kind.LO).copy_(before)
        engine.restore(1, updates)
        engine.step(BATCHES[1])
        engine.settle()
        engine.check_memory()


def test_states_that_were_never_written_are_not_read(folder: Path) -> None:
    """They are not resident: reading them would map every page."""
    home, engine = opened(folder, check=True)
    with engine:
        engine.seal_memory()
        sealed = engine._machine.updates.seals
        assert isinstance(sealed, Seals)
        for segment in home.store.layout.segments:
            for run in sealed._of(segment):
                masters = [kind in (Kind.HI, Kind.LO) for kind in run.kinds]
                assert run.known.tolist() == masters

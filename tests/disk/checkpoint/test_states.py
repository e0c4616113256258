"""A checkpoint holds whatever states its optimizer keeps, by name, and no other optimizer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain import AdamW, HostModel
from megatrain.disk.checkpoint.manifest import read_manifest
from megatrain.disk.checkpoint.parts import checkpoint_parts
from megatrain.disk.checkpoint.restore import restore
from megatrain.disk.hf.safetensors_format import read_entries
from megatrain.errors import CheckpointMismatch
from megatrain.memory.kinds import TensorKind, state, store_kinds
from megatrain.optim.optimizer import HostOptimizer
from megatrain.optim.states import ADAMW
from testkit.engines import make_engine
from testkit.lion import EIGHT_BIT, LION, Lion
from tests.disk.checkpoint.saving import save, tiny_model, train

STATE = "state/block-00001.safetensors"


def model(folder: Path, states: tuple[TensorKind, ...]) -> HostModel:
    return tiny_model(folder, kinds=store_kinds(states, waits=True))


def trained(
    home: HostModel, optimizer: HostOptimizer, first: int, last: int, parent: Path | None = None
) -> Path | None:
    """Train for some steps; return the checkpoint if there is a folder for one."""
    settings: dict[str, Any] = {"optimizer": optimizer, "update": "late"}
    with make_engine(home.decoder, home.store, **settings) as engine:
        engine.restore(first, dict.fromkeys(range(len(home.decoder.blocks)), first))
        train(engine, first, last)
        return None if parent is None else save(engine, checkpoint_parts(home), parent)


def lion() -> Lion:
    return Lion(learning_rate=0.01, weight_decay=0.1, max_grad_norm=1.0)


def state_of(home: HostModel) -> dict[tuple[str, TensorKind], torch.Tensor]:
    places = home.store.layout.places.items()
    kinds = (TensorKind.HI, TensorKind.LO, *LION)
    return {(n, k): home.store.param(n, k).clone() for n, p in places for k in kinds if p.has(k)}


@pytest.mark.parametrize("lost", [False, True])
def test_a_resumed_lion_is_one_that_never_stopped(lost: bool, tmp_path: Path) -> None:
    whole, begun, resumed = (model(tmp_path / name, LION) for name in ("a", "b", "c"))
    trained(whole, lion(), 0, 4)
    checkpoint = trained(begun, lion(), 0, 2, tmp_path / "checkpoints")
    assert checkpoint is not None
    prefixes = {entry.name.partition(".")[0] for entry in read_entries(checkpoint / STATE)}
    assert prefixes == {"m", "lo"}
    restore(checkpoint, read_manifest(checkpoint), checkpoint_parts(resumed))
    if lost:
        resumed.store.arena(*LION).zero_()
    trained(resumed, lion(), 2, 4)
    expected, found = state_of(whole), state_of(resumed)
    assert all(torch.equal(expected[key], found[key]) for key in expected) is not lost


def test_the_states_of_another_optimizer_are_refused_by_name(tmp_path: Path) -> None:
    lions, adams = model(tmp_path / "lion", LION), model(tmp_path / "adamw", ADAMW)
    optimizer = AdamW(learning_rate=0.01)
    for home, other, chosen, message in (
        (lions, adams, lion(), r"holds lo \(I16\), m \(F32\), and .* lo \(I16\), m \(F32\), v"),
        (adams, lions, optimizer, r"m \(F32\), v \(F32\), and .* keeps lo \(I16\), m \(F32\)\."),
    ):
        checkpoint = trained(home, chosen, 0, 1, tmp_path / "checkpoints")
        assert checkpoint is not None
        with pytest.raises(CheckpointMismatch, match=message):
            restore(checkpoint, read_manifest(checkpoint), checkpoint_parts(other))


def test_states_of_equal_size_and_another_name_are_refused(tmp_path: Path) -> None:
    home = model(tmp_path / "lion", LION)
    checkpoint = trained(home, lion(), 0, 1, tmp_path / "checkpoints")
    assert checkpoint is not None
    other = model(tmp_path / "other", (state("q", "another state"),))
    with pytest.raises(CheckpointMismatch, match=r"optimizer keeps lo \(I16\), q \(F32\)"):
        restore(checkpoint, read_manifest(checkpoint), checkpoint_parts(other))


def test_states_of_other_dtypes_and_shared_scales_come_back(tmp_path: Path) -> None:
    """What 8-bit states need of the store and of checkpoints."""
    home = model(tmp_path / "model", EIGHT_BIT)
    for number, kind in enumerate(EIGHT_BIT, start=3):
        home.store.arena(kind).fill_(number)
    with make_engine(home.decoder, home.store) as engine:
        checkpoint = save(engine, checkpoint_parts(home), tmp_path / "checkpoints")
    starts = {e.name.partition(".")[0]: e.start for e in reversed(read_entries(checkpoint / STATE))}
    assert sorted(starts, key=starts.__getitem__) == ["m_scale", "lo", "m"]
    name = home.decoder.blocks[1].params[0].name
    num_elements = home.store.param(name, TensorKind.HI).numel()
    assert home.store.param(name, EIGHT_BIT[1]).shape == (-(-num_elements // 128),)
    other = model(tmp_path / "other", EIGHT_BIT)
    restore(checkpoint, read_manifest(checkpoint), checkpoint_parts(other))
    for param in home.decoder.params:
        for kind in EIGHT_BIT:
            found = other.store.param(param.name, kind)
            assert torch.equal(found, home.store.param(param.name, kind))

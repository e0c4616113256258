"""Masters read from a checkpoint are those that were saved, in every bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatrain.disk.checkpoint.masters import load_masters
from megatrain.disk.checkpoint.parts import checkpoint_parts
from megatrain.disk.hf import weights_file
from megatrain.errors import CheckpointCorrupted
from megatrain.memory.kinds import TensorKind
from tests.disk.checkpoint.saving import save, tiny_model, train, training

FAMILIES = {"llama": (), "mixtral": (), "ernie4_5_moe": ("model.embed_tokens.*",)}
"""Experts that folders store apart; params in fp32, of which the master is the weight; frozen."""


@pytest.mark.parametrize("family", FAMILIES)
def test_masters_keep_every_bit(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_file, "PIECE_ELEMENTS", 100)
    home = tiny_model(tmp_path / "model", family, frozen=FAMILIES[family])
    with training(home) as engine:
        train(engine, 0, 3)
        folder = save(engine, checkpoint_parts(home), tmp_path / "checkpoints")
    expected = {param.name: home.store.master(param.name) for param in home.decoder.params}
    found = load_masters(folder)
    for name, master in expected.items():
        assert torch.equal(found.store.master(name), master), name
    assert found.store.kinds == (TensorKind.HI, TensorKind.LO)
    found.export(tmp_path / "out", masters=True)
    home.export(tmp_path / "bf16")
    wide, narrow = (load_file(tmp_path / f / "model.safetensors") for f in ("out", "bf16"))
    assert wide.keys() == narrow.keys()
    assert {tensor.dtype for tensor in wide.values()} == {torch.float32}
    assert any(not torch.equal(wide[name], narrow[name].float()) for name in wide)


def test_a_changed_byte_of_the_state_is_found(tmp_path: Path) -> None:
    home = tiny_model(tmp_path / "model")
    with training(home) as engine:
        train(engine, 0, 1)
        folder = save(engine, checkpoint_parts(home), tmp_path / "checkpoints")
    path = folder / "state" / "block-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        CheckpointCorrupted, match=r"block-00001\.safetensors: bytes .* do not match"
    ):
        load_masters(folder)

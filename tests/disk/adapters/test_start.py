"""New adapters in a store: the values of the seed, whole or in the parts of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatrain import load_model
from megatrain.disk.hf.model import Precision
from megatrain.memory.kinds import TensorKind
from megatrain.models.adapters.lora import LoraConfig, first_values
from megatrain.ranks.ownership import Owner
from testkit.families import save_tiny

LORA = LoraConfig(rank=4, alpha=8, seed=7)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_masters_are_the_first_values_and_the_base_has_no_master(
    tmp_path: Path, dtype: Precision
) -> None:
    home = load_model(save_tiny(tmp_path), dtype=dtype, lora=LORA)
    adapters = [param for param in home.decoder.params if param.is_adapter]
    assert len(adapters) == 4 * 7 * 2
    for param in adapters:
        assert torch.equal(home.store.master(param.name), first_values(param.name, param.shape, 7))
    for param in home.decoder.params:
        kinds = {
            kind for kind in home.store.kinds if home.store.layout.places[param.name].has(kind)
        }
        assert (kinds == {TensorKind.HI}) != param.is_adapter


def test_the_parts_of_ranks_are_those_of_one(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    whole = load_model(folder, lora=LORA).store
    parts = [
        load_model(folder, lora=LORA, owner=Owner(rank=rank, size=3)).store for rank in range(3)
    ]
    for name, place in whole.layout.places.items():
        for kind in (TensorKind.HI, TensorKind.LO):
            if place.has(kind):
                found = torch.cat([part.param(name, kind).view(-1) for part in parts])
                assert torch.equal(found, whole.param(name, kind).view(-1))

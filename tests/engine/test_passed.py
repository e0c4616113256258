"""What layers get besides hidden states: per-layer embeddings, keys and values of other layers.

That three steps equal the resident model is shown with all families (test_exactness.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain import load_model
from megatrain.devices.device import CpuDevice
from megatrain.memory.kinds import TensorKind
from megatrain.models import passed
from megatrain.models.adapters.lora import LoraConfig
from megatrain.models.passed import LayerCalls, Link
from megatrain.models.template import Template
from testkit.engines import make_engine
from testkit.families import save_tiny
from testkit.plain import load_plain, make_batch, plain_gradients

FAMILY = "gemma4_text"
BATCH = make_batch([(2, 24), (1, 17)], seed=4, padded=True)
WAYS: list[dict[str, Any]] = [
    {"reference": True},
    {"device": CpuDevice(copying=True), "tape": "host", "slots": 3},
    {"device": CpuDevice(copying=True), "kept_layers": 2, "grad_slots": 1},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("passed"), FAMILY, torch.float32)


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    return plain_gradients(load_plain(folder, torch.float32), BATCH)


def _differing(folder: Path, expected: tuple[list[float], dict[str, Tensor]], **way: Any) -> int:
    """Return how many gradients differ from those of the plain model; losses are equal."""
    model = load_model(folder, dtype="fp32")
    with make_engine(model.decoder, model.store, **way) as engine:
        result = engine.step(BATCH)
    assert list(result.micro_losses) == expected[0]
    found = {name: model.store.param(name, TensorKind.GRAD) for name in expected[1]}
    return sum(not torch.equal(found[name], one) for name, one in expected[1].items())


@pytest.mark.parametrize("way", WAYS, ids=("reference", "stashed", "kept"))
def test_gradients_are_those_of_the_resident_model(
    way: dict[str, Any], folder: Path, expected: tuple[list[float], dict[str, Tensor]]
) -> None:
    assert _differing(folder, expected, **way) == 0


def test_most_layers_read_what_others_have_made(folder: Path) -> None:
    decoder = load_model(folder).decoder
    attention = [layer.get_submodule("self_attn") for layer in decoder.layers]
    readers = [bool(one.is_kv_shared_layer) for one in attention]
    assert readers == [False, False, True, True, True, True]
    assert all(len(paths) == 1 for paths in decoder.looked_up)
    assert decoder.passes_more
    assert Template(decoder, tiled=True).cuts == [None] * 6


def _forget(self: LayerCalls, found: Any) -> None:
    pass


def _twice(self: LayerCalls, found: Any) -> None:
    _add(self, found)
    _add(self, found)


_add = LayerCalls._add


@pytest.mark.parametrize("broken", [_forget, _twice])
def test_a_gradient_that_is_lost_or_added_twice_would_be_noticed(
    broken: Any,
    folder: Path,
    expected: tuple[list[float], dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LayerCalls, "_add", broken)
    assert _differing(folder, expected) > 3


def test_a_tensor_that_a_layer_shares_and_that_gets_no_gradient_would_be_noticed(
    folder: Path,
    expected: tuple[list[float], dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Link, "outputs", lambda self: [])
    assert _differing(folder, expected) > 3


def test_adapters_need_no_gradient_of_what_the_front_looked_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    linked = LayerCalls.linked

    def noting(self: LayerCalls, layer: int, *, passes_gradient: bool) -> Link:
        link = linked(self, layer, passes_gradient=passes_gradient)
        kept.append(sum(key[0] == layer for key in link.leaves))
        return link

    monkeypatch.setattr(passed.LayerCalls, "linked", noting)
    lora = LoraConfig(rank=2, alpha=4.0)
    model = load_model(folder, dtype="fp32", lora=lora)
    with make_engine(model.decoder, model.store) as engine:
        engine.step(BATCH)
    assert set(kept) == {0}

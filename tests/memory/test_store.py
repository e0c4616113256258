"""The store: views that are the bytes, arenas that cost what the ledger says and not before."""

from __future__ import annotations

import pytest
import torch

from megatrain.errors import DoesNotFit
from megatrain.memory import store as store_module
from megatrain.memory.arena import map_arena
from megatrain.memory.host import resident_bytes
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import Layout, build_layout
from megatrain.memory.ledger import Ledger, Line
from megatrain.memory.store import Store, store_ledger
from megatrain.models.build import build_decoder
from megatrain.models.decoder import Block, Param
from megatrain.optim.states import WITH_CLIP, WITHOUT_CLIP, M
from megatrain.step.ops import Role
from testkit.families import tiny_config


def _layout(
    num_elements: int,
    dtype: torch.dtype = torch.bfloat16,
    kinds: tuple[TensorKind, ...] = WITH_CLIP,
) -> Layout:
    params = tuple(Param(name=f"w{i}", shape=(num_elements,), dtype=dtype) for i in range(3))
    return build_layout([Block(index=0, role=Role.LAYER, params=params)], kinds)


def test_views_are_disjoint_and_are_the_bytes() -> None:
    layout = build_layout(build_decoder(tiny_config("ernie4_5_moe"), "bf16").blocks, WITH_CLIP)
    store = Store(layout)
    for number, (name, place) in enumerate(layout.places.items()):
        for kind in place.segment.starts:
            store.param(name, kind).fill_(number % 120)
    for number, (name, place) in enumerate(layout.places.items()):
        for kind in place.segment.starts:
            view = store.param(name, kind)
            assert tuple(view.shape) == place.param.shape
            assert (view == number % 120).all(), f"{name} {kind}"


def test_block_bytes_hold_the_params_of_the_block() -> None:
    layout = build_layout(build_decoder(tiny_config("llama"), "bf16").blocks, WITH_CLIP)
    store = Store(layout)
    store.param("model.layers.2.mlp.up_proj.weight", TensorKind.HI).fill_(1)
    touched = [b for b in range(layout.num_blocks) if store.block_bytes(b, TensorKind.HI).any()]
    assert touched == [3]


def test_nothing_is_resident_before_it_is_written() -> None:
    layout = _layout(8 << 20)
    before = resident_bytes()
    store = Store(layout)
    assert resident_bytes() - before < 4 << 20
    store.param("w0", M).fill_(1)
    grown = resident_bytes() - before
    assert 32 << 20 <= grown < 40 << 20


def test_arenas_have_the_bytes_of_the_ledger() -> None:
    layout = _layout(1 << 16)
    assert store_ledger(layout).total("host") == 3 * 14 << 16
    assert store_ledger(_layout(1 << 16, kinds=WITHOUT_CLIP)).total("host") == 3 * 12 << 16
    store = Store(layout)
    for kind in WITH_CLIP:
        assert store.block_bytes(0, kind).numel() == layout.kind_bytes[kind]


def test_the_master_of_each_mode() -> None:
    store = Store(_layout(256))
    store.param("w1", TensorKind.HI).fill_(1.0)
    store.param("w1", TensorKind.LO).fill_(1)
    assert (store.master("w1") == 1.0 + 2.0**-23).all()
    assert not store.master("w0").any()
    store = Store(_layout(256, torch.float32))
    store.param("w1", TensorKind.HI).fill_(0.1)
    assert torch.equal(store.master("w1"), torch.full((256,), 0.1))


def test_a_store_that_does_not_fit_is_refused_before_it_is_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_module, "free_bytes", lambda: 3 << 20)
    monkeypatch.setattr(store_module, "map_arena", lambda *_: pytest.fail("mapped"))
    with pytest.raises(
        DoesNotFit, match=r"host memory: the plan needs 10\.5 MiB, 3\.0 MiB are free"
    ):
        Store(_layout(1 << 18))


def test_a_mapping_the_system_refuses_is_our_error() -> None:
    with pytest.raises(DoesNotFit, match=r"the system refused .* for arena 'm'"):
        map_arena("m", 1 << 62)


def test_an_empty_kind_has_an_empty_arena() -> None:
    assert map_arena("lo", 0).numel() == 0


def test_ledgers_add_and_print() -> None:
    ledger = Ledger([Line(place="host", purpose="weights", num_bytes=3 << 30)])
    ledger += Ledger([Line(place="device", purpose="slots", num_bytes=5 << 20)])
    assert str(ledger).splitlines() == [
        "host    weights                               3.0 GiB",
        "device  slots                                 5.0 MiB",
        "host    total                                 3.0 GiB",
        "device  total                                 5.0 MiB",
    ]
    ledger.require("device", 5 << 20)
    with pytest.raises(DoesNotFit):
        ledger.require("device", (5 << 20) - 1)

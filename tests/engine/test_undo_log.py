"""Laws of undo_log.py: all that was kept comes back, and the log has room for its blocks alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatrain.engine.undo_log import UndoLog
from megatrain.errors import DoesNotFit
from megatrain.memory.kinds import Kind, bytes_per_param, store_kinds
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.models.decoder import Block, Param
from megatrain.optim.states import STATES
from megatrain.step.ops import Role

PARAMS = [
    Param(name=f"{b}", shape=(2, 256), dtype=torch.bfloat16, trained=b != 2) for b in range(4)
]
BLOCKS = [Block(index=b, role=Role.LAYER, params=(p,)) for b, p in enumerate(PARAMS)]


def store_of(state: str) -> Store:
    return Store(build_layout(BLOCKS, store_kinds(STATES["adamw"][state], waits=True)))


def parts_of(store: Store, state: str, block: int) -> list[Tensor]:
    (segment,) = store.layout.trained_segments(block)
    return [store.segment(segment, k) for k in (Kind.HI, Kind.LO, *STATES["adamw"][state])]


@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
def test_what_was_kept_comes_back(state: str) -> None:
    store = store_of(state)
    log = UndoLog(store, STATES["adamw"][state], [1, 3])
    before = {}
    for block in (1, 3):
        for part in parts_of(store, state, block):
            part.view(torch.uint8).random_(generator=torch.Generator().manual_seed(block))
        before[block] = [part.clone() for part in parts_of(store, state, block)]
        log.keep(block, [*parts_of(store, state, block)[:2], None])
        log.keep(block, parts_of(store, state, block)[2:])
        for part in parts_of(store, state, block):
            part.view(torch.uint8).fill_(7)
    assert log.blocks == [1, 3]
    log.forget(3)
    log.restore(1)
    assert log.blocks == []
    for part, kept in zip(parts_of(store, state, 1), before[1], strict=True):
        assert torch.equal(part.view(torch.uint8), kept.view(torch.uint8))
    assert all(bool((part.view(torch.uint8) == 7).all()) for part in parts_of(store, state, 3))


@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
def test_it_has_the_bytes_of_its_blocks(state: str) -> None:
    states = STATES["adamw"][state]
    log = UndoLog(store_of(state), states, [1, 3])
    assert log.num_bytes == 2 * 512 * bytes_per_param(store_kinds(states, waits=False))
    assert UndoLog(store_of(state), states, []).num_bytes == 0


def test_a_log_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of("fp32")
    monkeypatch.setattr("megatrain.engine.undo_log.free_bytes", lambda: 100)
    with pytest.raises(DoesNotFit, match="undo log"):
        UndoLog(store, STATES["adamw"]["fp32"], [1])

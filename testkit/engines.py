"""An engine from plain keywords: its settings by name, its lanes, or the reference."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatrain.devices.device import CpuDevice, Device
from megatrain.engine.engine import Engine
from megatrain.engine.updates import Optimizer
from megatrain.lanes.lane import Lane
from megatrain.lanes.player import Player, Plays
from megatrain.lanes.reference import Reference
from megatrain.lanes.trace import Trace
from megatrain.losses.loss import NEXT_TOKEN, Loss
from megatrain.memory.store import Store
from megatrain.models.decoder import Decoder
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.step.settings import StepSettings


def make_engine(
    decoder: Decoder,
    store: Store,
    *,
    optimizer: Optimizer | None = None,
    loss: Loss = NEXT_TOKEN,
    device: Device | None = None,
    ranks: Ranks = ALONE,
    lanes: Iterable[Lane] | None = None,
    reference: bool = False,
    deadline_s: float = 600.0,
    trace: bool = False,
    **settings: Any,
) -> Engine:
    """Return an engine with these StepSettings, on these lanes or played by the reference."""
    device, spans = device or CpuDevice(), Trace() if trace else None
    player: Plays = (
        Reference(lanes, trace=spans, synchronize=device.synchronize)
        if reference
        else Player(lanes or device.lanes(), deadline_s=deadline_s, trace=spans)
    )
    try:
        return Engine(
            decoder,
            store,
            optimizer=optimizer,
            loss=loss,
            settings=StepSettings(**settings),
            device=device,
            ranks=ranks,
            player=player,
        )
    except BaseException:
        player.close()  # its lanes have started
        raise

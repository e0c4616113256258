"""Peers without a model: stores of a few params, whose steps add numbers that are known."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatrain.config.sections import PeerSettings
from megatrain.memory.kinds import Kind
from megatrain.memory.layout import Layout, build_layout
from megatrain.memory.store import Store
from megatrain.models.decoder import Block, Param
from megatrain.peers.anchor import Masters, pieces_of
from megatrain.peers.compression import Floats
from megatrain.peers.rounds import Rounds
from megatrain.peers.signing import Signer, Unsigned
from megatrain.places import FolderPlace, Place
from megatrain.step.ops import Role

PLAIN = {"outer_rate": 0.7, "momentum": 0.9, "compression": "none"}
SPARSE = {**PLAIN, "compression": "sparse", "density": 1 / 16}


@functools.cache
def toy_layout(num_blocks: int = 3, num_elements: int = 5000) -> Layout:
    """Return params in bf16 and fp32, and one that is frozen."""
    blocks = []
    for index in range(num_blocks):
        params = (
            Param(name=f"{index}.wide", shape=(num_elements,), dtype=torch.bfloat16),
            Param(name=f"{index}.norm", shape=(7,), dtype=torch.float32),
            Param(name=f"{index}.fixed", shape=(9,), dtype=torch.bfloat16, trained=False),
        )
        blocks.append(Block(index=index, role=Role.LAYER, params=params))
    return build_layout(blocks, (Kind.HI, Kind.LO))


def change(name: str, step: int, piece: int, size: int) -> Floats:
    """Return what a step of a peer adds to the weights of a piece."""
    seed = hashlib.sha256(f"{name} {step} {piece}".encode()).digest()
    draw = np.random.default_rng(int.from_bytes(seed[:8], "little"))
    return (0.01 * draw.standard_normal(size)).astype(np.float32)


class ToyPeer:
    """A peer, on a machine with a folder of its own."""

    def __init__(
        self,
        at: Path | Place,
        machine: Path,
        name: str,
        settings: Mapping[str, Any] = PLAIN,
        *,
        signer: Signer | None = None,
        layout: Layout | None = None,
        stops: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name, self.step = name, 0
        self.store = Store(layout or toy_layout())
        self.masters = Masters(self.store)
        self.pieces = pieces_of(self.store.layout)
        self.saved: dict[str, Any] | None = None
        self.said: list[str] = []
        self.events: list[dict[str, Any]] = []
        for piece in self.pieces:
            self.masters.write(piece, change("model", 0, piece.number, piece.num_elements))
        given = {"wait": 5.0, "signed": signer is not None, "inner_steps": 2, **settings}
        self.rounds = Rounds(
            PeerSettings(at="file:///meeting", name=name, **given),
            self.store,
            lambda: None,
            folder=machine / name,
            place=FolderPlace(at) if isinstance(at, Path) else at,
            signer=signer or Unsigned(),
            stops=stops,
        )
        self.rounds.meeting.poll_s = self.rounds.meeting.place.pause_s = 0.002
        self.rounds.say = self.said.append
        self.rounds.note = self.events.append

    def begin(self) -> ToyPeer:
        """Join the others."""
        self.rounds.begin(self.saved, self.step, {"order": self.name})
        return self

    def take(self, num_steps: int, *, is_last: bool = False) -> None:
        """Take steps, and the exchanges that are due."""
        for number in range(num_steps):
            self.step += 1
            for piece in self.pieces:
                values = self.masters.read(piece)
                values += change(self.name, self.step, piece.number, piece.num_elements)
                self.masters.write(piece, values)
            ends = is_last and number + 1 == num_steps
            self.saved = self.rounds.after(self.step, is_last=ends)

    def weights(self) -> list[Floats]:
        """Return the masters of all pieces."""
        return [self.masters.read(piece) for piece in self.pieces]

    def anchors(self) -> dict[int, str]:
        """Return the hash of the anchor after each exchange that this peer has taken."""
        return {e["number"]: e["anchor"] for e in self.events if e["event"] == "exchange"}

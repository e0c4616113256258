"""What a player of schedules offers: Player on lanes, Reference one op at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from megatrain.lanes.lane import Action
from megatrain.lanes.trace import Trace
from megatrain.step.ops import Op, OpKind


class Playing(Protocol):
    """A list of ops that is under way, or done."""

    def wait(self, *kinds: OpKind) -> None:
        """Wait until the list's ops of these kinds are complete; of all kinds if none is named."""


class Plays(Protocol):
    """Plays lists of ops, one behind the other."""

    @property
    def trace(self) -> Trace | None:
        """The trace of the played ops, if it is recorded."""

    def play(self, ops: Sequence[Op], actions: Mapping[OpKind, Action]) -> Playing:
        """Do the ops behind all that were played before."""

    def settle(self) -> None:
        """Wait until everything played so far is complete."""

    def close(self) -> None:
        """End what plays. Raises what made it fail, unless a call has raised that before."""

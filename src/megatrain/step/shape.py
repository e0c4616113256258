"""The shape of a step: all that decides which ops it has, and in which order.

A shape is plain numbers. It knows no model, no bytes and no device, so the plan, the checks and
the simulator can ask for any shape at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatrain.errors import ScheduleError
from megatrain.step.ops import Role

Update = Literal["none", "in_backward", "late", "second_backward"]
"""When the optimizer updates a block: never, as its gradient arrives, once norms are known, or as
its gradient arrives once more, in a second backward behind the one that gave the norms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Blocks 0 (embedding), 1 .. num_blocks-2 (layers), num_blocks-1 (head), and their places."""

    num_blocks: int
    num_micro: int = 1
    """Micro-batches of the step. Each block serves all of them before the next block. A rank may
    have none: it still gathers and exchanges with the others."""
    slots: int = 2
    """Slots that the layers rotate through. Embedding and head have their own slots."""
    grad_slots: int = 2
    """Gradient slots that the layers rotate through. One lets nothing overlap with a drain."""
    tape: Literal["device", "host"] = "device"
    tape_slots: int = 2
    """Device ring between compute and a host tape. No stall if `tape_slots` micro-batches of
    backward last as long as one fetch and two restores."""
    kept_layers: int = 0
    """Top layers whose activations stay on the device from forward to backward; more than there
    are means all. Those that backward does not visit keep nothing."""
    pages: bool = False
    """The experts of layers come in pages while a layer computes: its ops read the store too."""
    copying: bool = True
    """False: unified memory. There are no fetches, compute reads weights in the store."""
    update: Update = "none"
    host_grads: int = 2
    """Host gradient buffers that the layers rotate through, where updates run in a backward and
    no gradient waits in the store."""
    tier: Literal["none", "states"] = "none"
    """The part on disk between updates: nothing, or masters and moments."""
    tier_slots: int = 2
    """Host buffers between disk and updates that the layers rotate through."""
    tied: bool = False
    """The head reads the embedding's weights too, and adds to their gradient before it does."""
    gather_embedding: bool = False
    """Only the rows of the step's tokens visit the device, not the full embedding."""
    divided: bool = False
    """Ranks own a part of each block: weights are gathered, and gradients exchanged."""
    balances: bool = False
    """The layers' routers are counted in forward; backward needs the counts of all of them."""
    trained: tuple[bool, ...] = ()
    """One flag per block; empty means all."""
    matrices: tuple[bool, ...] = ()
    """One flag per block: trained matrices in it are orthogonalized on the device before its
    update, each as a whole. Empty means none."""

    def __post_init__(self) -> None:
        if not self.trained:
            object.__setattr__(self, "trained", (True,) * self.num_blocks)
        if not self.matrices or self.update == "none":
            object.__setattr__(self, "matrices", (False,) * self.num_blocks)
        for name, least in _LEAST.items():
            if (value := getattr(self, name)) < least:
                raise ScheduleError(f"{name} is {value}, must be at least {least}")
        if len(self.trained) != self.num_blocks:
            raise ScheduleError(
                f"trained has {len(self.trained)} flags for {self.num_blocks} blocks"
            )
        if not any(self.trained):
            raise ScheduleError("no block is trained, so a step would have nothing to do")
        if self.num_micro < (0 if self.divided else 1):
            raise ScheduleError(f"num_micro is {self.num_micro}, must be at least 1")
        if self.divided and not self.copying:
            raise ScheduleError(
                "blocks are divided among ranks, so weights need slots to gather in"
            )
        if self.pages and (self.divided or not self.copying):
            raise ScheduleError("pages of experts are for weights that one rank fetches into slots")
        if self.divided and self.gather_embedding:
            raise ScheduleError("the embedding is divided among ranks, so its rows are not here")
        if self.goes_back_twice and self.kept_layers:
            raise ScheduleError("a second backward needs activations that the first used up")
        if len(self.matrices) != self.num_blocks:
            raise ScheduleError(
                f"matrices has {len(self.matrices)} flags for {self.num_blocks} blocks"
            )
        for block in self.matrix_blocks:
            if block not in self.layers or not self.trained[block]:
                raise ScheduleError(f"block {block} is not a trained layer, and has no matrices")
        if self.has_tier and self.update == "none":
            raise ScheduleError("nothing is updated, so nothing is to be read from disk")

    def role(self, block: int) -> Role:
        """Return what a block is for. Ask this and not its number: roles may get more blocks."""
        if block == 0:
            return Role.EMBEDDING
        return Role.HEAD if block == self.head else Role.LAYER

    @property
    def layers(self) -> range:
        return range(1, self.head)

    @property
    def head(self) -> int:
        return self.num_blocks - 1

    @property
    def last_layer(self) -> int:
        return self.num_blocks - 2

    @property
    def lowest(self) -> int:
        """The lowest trained block: backward ends there."""
        return self.trained.index(True)

    @property
    def bottom_layer(self) -> int:
        """The lowest layer that backward visits; the head's number if it visits none."""
        return max(1, self.lowest)

    @property
    def lowest_kept(self) -> int:
        """The lowest layer that keeps its activations; the head's number if none does."""
        return max(self.bottom_layer, self.head - self.kept_layers)

    @property
    def taped_layers(self) -> range:
        """Layers whose inputs go onto the tape: backward visits them and computes them again."""
        return range(self.bottom_layer, self.lowest_kept)

    @property
    def trained_blocks(self) -> list[int]:
        return [block for block, trained in enumerate(self.trained) if trained]

    @property
    def matrix_blocks(self) -> list[int]:
        """The blocks whose matrices are orthogonalized."""
        return [block for block, found in enumerate(self.matrices) if found]

    @property
    def update_order(self) -> list[int]:
        """The trained blocks as the optimizer reaches them: as forward needs, or backward ends."""
        return self.trained_blocks if self.update == "late" else self.trained_blocks[::-1]

    @property
    def goes_back_twice(self) -> bool:
        """Backward runs for the norms, and once more for the updates."""
        return self.update == "second_backward"

    @property
    def updates_in_backward(self) -> bool:
        """A block is updated as its gradient arrives, in the only backward or in the second."""
        return self.update in ("in_backward", "second_backward")

    @property
    def has_tier(self) -> bool:
        return self.tier != "none"


_LEAST = {
    "num_blocks": 3,
    "slots": 2,
    "grad_slots": 1,
    "tape_slots": 2,
    "kept_layers": 0,
    "host_grads": 2,
    "tier_slots": 1,
}

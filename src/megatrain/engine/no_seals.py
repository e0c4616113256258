"""What updates ask of the seals of host memory, where nothing is checked (seals.py checks)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from torch import Tensor

from megatrain.errors import MemoryDamaged
from megatrain.memory.layout import Segment
from megatrain.optim.views import Views

Gradient = Sequence[tuple[Segment, Tensor]]


Changed = Literal["all", "weights", "states"]


class NoSeals:
    """Memory that is not checked."""

    damage: MemoryDamaged | None = None
    """The first damage that was found; None: there is none."""
    is_taken: bool = True
    """Whether memory was sealed since it was filled."""

    @contextmanager
    def changing(
        self,
        segment: Segment,
        views: Views,
        span: slice,
        gradient: Tensor,
        step: int,
        changed: Changed = "all",
    ) -> Iterator[Views]:
        """Yield the views for the update of a run, in `step`, that changes some of its kinds."""
        yield views

    def take_all(self, num_updates: Mapping[int, int]) -> None:
        """Seal all memory as it is now, after so many updates of each block.

        Damage is forgotten, but for that of frozen weights, whose first seals stay.
        """

    def take_gradients(self, gradient: Gradient) -> None:
        """Seal a block's gradient, until it is sealed again or forgotten."""

    def forget_gradient(self, segment: Segment) -> None:
        """Take note that a segment's gradient is no longer one."""

    def tour(self, step: int) -> None:
        """Look for damage in the next chunks of frozen weights."""

    def check_block(self, block: int, step: int) -> None:
        """Raise MemoryDamaged if a block, or anything before it, is not as it was left."""

    def keep(self, block: int) -> None:
        """Keep the seals of a block whose bytes go into the undo log."""

    def restore(self, block: int) -> None:
        """Put kept seals back: so are the bytes."""

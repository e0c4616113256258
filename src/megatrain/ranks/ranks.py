"""What ranks do together, and a process alone.

    wire      moves blocks between the ranks' devices: of lane comm alone
    share     a few numbers of each rank, to all
    agree     a small fact of each rank, to all
    carrier   bytes of host memory from rank to rank: of a save or an export alone

All ranks call the same things in the same order. Wire, carrier, and share with agree each have
their own communicator, so that lanes, the caller of a step and a save never wait for each other.

Laws (tests/ranks/test_torch_ranks.py)
    1. A rank hears what each rank said, in the order of ranks, or gets an error.
    2. No wait is longer than the deadline. The error names the rank that is missing. A carrier's
       wait does not count the time in which a rank is inside a file call and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from megatrain.ranks.ownership import SOLE, Owner

if TYPE_CHECKING:  # a process alone is known before torch is imported
    from torch import Tensor

Said = Mapping[str, Any]
"""Anything that JSON can say."""


class Wire(Protocol):
    """Moves blocks. Inside an op, calls are queued on the lane's stream."""

    def gather(self, parts: Tensor) -> None:
        """Fill the parts of others in `parts`, flat bytes: equal parts, of which one is ours."""

    def exchange(
        self, received: Tensor, sent: Tensor, num_received: Sequence[int], num_sent: Sequence[int]
    ) -> None:
        """Send each rank its elements of `sent`, flat, and get ours of each into `received`.

        Both are in the order of ranks; the numbers say how many elements are for and from each.
        """


class Carrier(Protocol):
    """Moves bytes of host memory from one rank to another."""

    def send(self, data: Tensor, rank: int) -> None:
        """Return when `data`, flat bytes, may change."""

    def receive(self, data: Tensor, rank: int) -> None:
        """Fill `data`, flat bytes, with what that rank sends."""

    def agree(self, facts: Said) -> list[Said]:
        """Do what `Ranks.agree` does, between sends and receives."""

    def storing(self, call: str | None) -> None:
        """Announce that this rank waits for a file call, or None when it no longer does."""


class Ranks(Protocol):
    """All ranks of a run, as one of them sees them."""

    @property
    def owner(self) -> Owner: ...

    @property
    def patience_s(self) -> float:
        """How long a call waits for other ranks before it looks for the one that is lost."""

    @property
    def wire(self) -> Wire: ...

    @property
    def carrier(self) -> Carrier: ...

    def share(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers that each rank gives; all give as many."""

    def agree(self, facts: Said) -> list[Said]:
        """Return what each rank says, once all have said it."""

    def fail(self, error: BaseException) -> None:
        """Let the others know why this rank ends."""

    def close(self) -> None:
        """Leave. The others must leave too."""


class _NoCarrier:
    """Of a process alone: it agrees with itself."""

    def send(self, data: Tensor, rank: int) -> None:
        raise AssertionError("a process alone carries nothing")

    def receive(self, data: Tensor, rank: int) -> None:
        raise AssertionError("a process alone carries nothing")

    def agree(self, facts: Said) -> list[Said]:
        return [facts]

    def storing(self, call: str | None) -> None:
        pass


class Alone:
    """A process that has everything itself."""

    owner, patience_s = SOLE, 0.0

    @property
    def wire(self) -> Wire:
        raise AssertionError("a process alone gathers and exchanges nothing")

    @property
    def carrier(self) -> Carrier:
        return _NoCarrier()

    def share(self, numbers: Sequence[float]) -> list[list[float]]:
        return [list(numbers)]

    def agree(self, facts: Said) -> list[Said]:
        return [facts]

    def fail(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        pass


ALONE = Alone()

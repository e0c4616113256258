"""Who owns what: the elements of a segment, divided among ranks.

    rank      |   0   |   1   |   2   |  3  |      equal parts, cut on `unit` elements;
    segment   [=======|=======|=======|=====]      the last ones may be shorter, or empty

Only this package knows rank and size: all others ask for the part that is theirs, or for all parts.

Laws (tests/ranks/test_ownership.py)
    1. The parts of all ranks are the segment, each element once, in the order of ranks.
    2. No part is larger than `part`, and all but the last that has any are that large.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Owner:
    """One of `size` ranks. A process alone owns all."""

    rank: int = 0
    size: int = 1

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for all."""
        return self.rank == 0

    def part(self, num_elements: int, unit: int) -> int:
        """Return the elements of a part; those of the last ranks may be fewer."""
        num_units = -(-num_elements // unit)
        return -(-num_units // self.size) * unit

    def owned(self, num_elements: int, unit: int) -> range:
        """Return the elements that this rank owns."""
        return self.parts(num_elements, unit)[self.rank]

    def parts(self, num_elements: int, unit: int) -> list[range]:
        """Return the elements of each rank."""
        part = self.part(num_elements, unit)
        bounds = [min(rank * part, num_elements) for rank in range(self.size + 1)]
        return [range(bounds[rank], bounds[rank + 1]) for rank in range(self.size)]


SOLE = Owner()
"""A process alone."""

"""The ledger: every large byte by place and purpose, named before it is allocated.

A run is refused from the ledger, before loading, rather than killed by the kernel hours later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatrain.errors import DoesNotFit


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """So many bytes, in this place, for this purpose."""

    place: str
    """`host`, `pinned`, `device`, `tier` or `disk`."""
    purpose: str
    num_bytes: int


class Ledger:
    """Lines that add up. Immutable."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.lines = tuple(line for line in lines if line.num_bytes)

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger((*self.lines, *other.lines))

    def __str__(self) -> str:
        rows = [
            f"{line.place:7} {line.purpose:32} {gib(line.num_bytes):>12}" for line in self.lines
        ]
        for place in dict.fromkeys(line.place for line in self.lines):
            rows.append(f"{place:7} {'total':32} {gib(self.total(place)):>12}")
        return "\n".join(rows)

    def total(self, place: str) -> int:
        """Return the bytes of all lines in `place`."""
        return sum(line.num_bytes for line in self.lines if line.place == place)

    def require(self, place: str, free_bytes: int) -> None:
        """Raise DoesNotFit unless the lines of `place` fit into `free_bytes`."""
        needed = self.total(place)
        if needed <= free_bytes:
            return
        purposes = "  ".join(
            f"{line.purpose} {line.num_bytes / 2**30:.1f}"
            for line in self.lines
            if line.place == place
        )
        raise DoesNotFit(
            f"{place} memory: the plan needs {gib(needed)}, {gib(free_bytes)} are free.\n"
            f"  {purposes}"
        )


_PLAIN = {
    "weights (hi)": "weights",
    "master remainder (lo)": "fp32 masters, lower halves",
    "gradients (grad)": "gradients",
    "first moment (m)": "first moments of Adam",
    "second moment (v)": "second moments of Adam",
    "scales of m": "scales of first moments",
    "scales of v": "scales of second moments",
    "tape": "inputs of layers",
    "weight slots": "weights of current layers",
    "widening": "weights being widened",
    "gradient slots": "gradients of current layers",
    "outbox": "gradients being copied",
    "gradient rings": "gradients being applied",
    "tier ring": "buffers of the disk",
    "exchange": "buffers between ranks",
}


def plain_purpose(purpose: str) -> str:
    """Return the purpose of a line in words that need no knowledge of the engine."""
    return _PLAIN.get(purpose, purpose)


def gib(num_bytes: int) -> str:
    """Return bytes as people read them."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"

"""Who comes after whom, and who touched which bytes: vector clocks over byte ranges.

An actor is a stream or a host thread. Its clock says how far it has seen every actor. An access is
noted with its actor's own count; a later access to the same bytes, one of the two writing, is a
race unless its actor has seen that count. What is ordered in one run is ordered in every run with
the same order of host calls, whatever the device does: values need not go wrong for a race to show.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Clock = dict[str, int]


def merge(clock: Clock, other: Clock) -> None:
    """Let `clock` have seen all that `other` has seen."""
    for actor, count in other.items():
        if clock.get(actor, -1) < count:
            clock[actor] = count


@dataclass(slots=True, eq=False)
class History:
    """Accesses to one piece of memory that a later one may collide with."""

    name: str
    accesses: dict[tuple[int, int, str, bool], tuple[int, str]] = field(default_factory=dict)
    """By first byte, last byte, actor and whether it writes: the actor's count, and what it did."""

    def touch(
        self, span: tuple[int, int], actor: str, clock: Clock, what: str, *, writes: bool
    ) -> list[str]:
        """Note an access; return the races it makes."""
        low, high = span
        races, covered = [], []
        for key, (count, before) in self.accesses.items():
            old_low, old_high, old_actor, old_writes = key
            if old_low >= high or old_high <= low:
                continue
            if (writes or old_writes) and old_actor != actor and clock.get(old_actor, -1) < count:
                races.append(
                    f"{self.name}: {what} by {actor} {'writes' if writes else 'reads'} what "
                    f"{before} by {old_actor} {'writes' if old_writes else 'reads'}"
                )
            if writes and low <= old_low and old_high <= high:
                covered.append(key)
        for key in covered:
            del self.accesses[key]
        self.accesses[low, high, actor, writes] = (clock[actor], what)
        return races

    def unseen(self, clock: Clock, but: set[str]) -> list[str]:
        """Return the accesses that `clock` has not seen, but for those of some actors."""
        return [
            f"{what} by {actor}"
            for (_, _, actor, _), (count, what) in self.accesses.items()
            if actor not in but and clock.get(actor, -1) < count
        ]

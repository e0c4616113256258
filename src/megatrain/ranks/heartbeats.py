"""Heartbeats of ranks, and what they say of one that is lost.

    heartbeat   host, process, a count that grows, how many collectives were begun on each channel
    fault       why a rank ends; the run's store numbers them, so the first is known

Pure state: the caller passes in heartbeats and elapsed time. Clocks of other hosts are never read:
a rank is silent for as long as we saw no change of its count.

Laws (tests/ranks/test_heartbeats.py)
    1. A rank's own error is the cause, before any that only lost another rank; the first counts.
    2. A rank that has left, or whose count changed within the limit, is not silent.
    3. While the store does not answer, no rank is blamed but the one that has the store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megatrain.errors import MegaTrainError, RankLost, printable
from megatrain.ranks.ownership import Owner
from megatrain.ranks.torch_ranks import NoAnswer, plain_text

MOST_CHARACTERS = 2000
"""Characters of an error's message that are passed on."""
SAME_ORDER = ("comm", "share")
"""The channels on which all ranks begin the same collectives in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFault:
    """Why a rank ends."""

    number: int = 0
    """Its place among the faults of all ranks; given by the store."""
    text: str
    is_loss: bool
    """Whether it ends only because another rank did."""

    @classmethod
    def of(cls, error: BaseException) -> RankFault:
        text = str(error) if isinstance(error, MegaTrainError) else plain_text(error)
        text = f"{type(error).__name__}: {text}"[:MOST_CHARACTERS]
        return cls(text=text, is_loss=isinstance(error, RankLost))


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The heartbeat of a rank, about once a second."""

    host: str
    pid: int
    count: int = 0
    begun: Mapping[str, int] = field(default_factory=dict)
    """Number of collectives that were begun, by channel."""
    doing: str = "joining"
    storing: str | None = None
    """The file call of a save or an export that the rank waits for."""
    fault: RankFault | None = None
    has_left: bool = False

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Beat:
        """Raises ValueError if these are not the words of a rank."""
        try:
            values: dict[str, Any] = json.loads(data)
            fault = values.pop("fault")
            return cls(**values, fault=fault and RankFault(**fault))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a heartbeat: {error}") from error


class Roll:
    """The heartbeats of all ranks, as one of them has received them."""

    def __init__(self, owner: Owner, own: Beat) -> None:
        self.owner = owner
        self.own = own
        self._heard: dict[int, Beat] = {}
        self._silent_s = {rank: 0.0 for rank in range(owner.size) if rank != owner.rank}
        self._store_silent_s = 0.0
        self._store_error: str | None = None

    def hear(self, rank: int, beat: Beat) -> None:
        """Take the heartbeat that the store has of a rank."""
        before = self._heard.get(rank)
        self._heard[rank] = beat
        if before is None or beat.count != before.count:
            self._silent_s[rank] = 0.0

    def hear_store(self, error: BaseException | None = None) -> None:
        """Take note that the store answered, or that it never will again."""
        self._store_silent_s = 0.0
        self._store_error = None if error is None else RankFault.of(error).text

    def counts(self) -> dict[int, int]:
        """Return the count of each other rank that has not left."""
        return {rank: beat.count for rank, beat in self._heard.items() if not beat.has_left}

    @property
    def is_storing(self) -> bool:
        """Whether another rank, which has not left, waits for a file call."""
        beats = self._heard.values()
        return any(beat.storing is not None and not beat.has_left for beat in beats)

    def wait(self, seconds: float) -> None:
        """Take note that so much of our own time has passed."""
        self._store_silent_s += seconds
        for rank in self._silent_s:
            self._silent_s[rank] += seconds

    def cause(self, limit_s: float) -> str | None:
        """Return who is lost and why; None if all may be well.

        `limit_s` is how long a rank or the store may be silent.
        """
        faults = {rank: beat.fault for rank, beat in self._heard.items() if beat.fault is not None}
        first = sorted(faults, key=lambda rank: (faults[rank].is_loss, faults[rank].number))
        if first and not faults[first[0]].is_loss:
            return f"{self._name(first[0])} failed: {faults[first[0]].text}"
        if (gone := self._store_gone(limit_s)) is not None:
            return gone
        silent = [rank for rank in self._silent_s if self._is_silent(rank, limit_s)]
        if silent:
            return "; ".join(self._silence(rank) for rank in silent)
        return f"{self._name(first[0])} ended: {faults[first[0]].text}" if first else None

    def suspicion(self, error: BaseException) -> str:
        """Return who may be to blame for `error`, of a collective, when all ranks are alive."""
        for channel in SAME_ORDER:
            begun = self.own.begun.get(channel, 0)
            counts = {rank: beat.begun.get(channel, 0) for rank, beat in self._heard.items()}
            behind = [rank for rank, count in counts.items() if count < begun]
            if behind:
                return "; ".join(
                    f"{self._name(rank)} is alive but stuck or slow: it has begun {counts[rank]} "
                    f"of {begun} on {channel}; doing: {self._heard[rank].doing}"
                    for rank in behind
                )
        text = RankFault.of(error).text
        if isinstance(error, NoAnswer):
            return f"the network between {self._name(error.rank)} and this rank failed: {text}"
        others = ", ".join(self._name(rank) for rank in self._silent_s)
        return f"the network between this rank and one of {others} failed: {text}"

    def _store_gone(self, limit_s: float) -> str | None:
        has_left = 0 in self._heard and self._heard[0].has_left
        if has_left or (self._store_error is None and self._store_silent_s <= limit_s):
            return None
        why = self._store_error or f"no answer for {self._store_silent_s:.0f} s"
        return (
            f"the run's store is gone or cut off, and with it {self._name(0)} or the launcher "
            f"on its host: {why}"
        )

    def _is_silent(self, rank: int, limit_s: float) -> bool:
        has_left = rank in self._heard and self._heard[rank].has_left
        return not has_left and self._silent_s[rank] > limit_s

    def _silence(self, rank: int) -> str:
        beat = self._heard.get(rank)
        seconds = f"{self._silent_s[rank]:.0f} s"
        if beat is None:
            return f"{self._name(rank)} has not joined within {seconds}"
        return f"{self._name(rank)} is dead or cut off: silent for {seconds}; then: {beat.doing}"

    def _name(self, rank: int) -> str:
        beat = self.own if rank == self.owner.rank else self._heard.get(rank)
        return f"rank {rank}" + ("" if beat is None else f" ({beat.host}, pid {beat.pid})")


def lost(cause: str) -> RankLost:
    """Return the error that ends a rank because of another."""
    return RankLost(
        f"{printable(cause)}\n  Every rank ends. Start the same command again: the run resumes "
        "from its last checkpoint."
    )


def begin(own: Beat, channel: str, doing: str) -> Beat:
    """Return `own` once it has begun one more on a channel."""
    return replace(own, begun={**own.begun, channel: own.begun.get(channel, 0) + 1}, doing=doing)

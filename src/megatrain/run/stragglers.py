"""Slow ranks, by name: all ranks take every step together, so one slow rank slows all.

    rank r    own_pace(trace, tokens) --says--> with the next step --hears--> rank 0: a slow rank

Times of a step are equal on all ranks, because each waits for the others. The pace of a rank is its
own: seconds of its compute ops per token of its own micro-batches, without any wait. It goes along
with the messages that ranks send each other with every step.

Laws (tests/run/test_stragglers.py)
    1. A rank that is 30 % slower than the others is named within 20 steps, once, and again only
       after it was as fast as they.
    2. Noise of 10 % in every step names nobody; nor does another share of the work.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from megatrain.batch import MicroBatch
from megatrain.lanes.trace import Span
from megatrain.ranks.ownership import Owner
from megatrain.ranks.ranks import Said

WINDOW = 16
"""Steps whose median is a rank's pace."""
SLOW, USUAL = 1.2, 1.1
"""Times the pace of the others: a rank is named from the first, and forgotten below the second."""


class Stragglers:
    """Compares the paces of ranks. One process alone says and finds nothing."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._pace: float | None = None
        self._heard: deque[list[float]] = deque(maxlen=WINDOW)
        self._named: set[int] = set()

    def measure(self, spans: Sequence[Span], batch: Sequence[MicroBatch]) -> None:
        """Take note of this rank's pace in a step; the others hear it with the next one."""
        if not self._owner.is_alone:
            own = batch[self._owner.rank :: self._owner.size]
            self._pace = own_pace(spans, sum(micro.num_tokens for micro in own))

    def says(self) -> Said:
        """Return the message of this rank."""
        if self._owner.is_alone:
            return {}
        return {"pace": self._pace, "host": socket.gethostname()}

    def hear(self, step: int, said: Sequence[Said]) -> Iterator[dict[str, Any]]:
        """Yield an event for each rank that has become slow."""
        paces = [one.get("pace") for one in said]
        if len(paces) < 2 or not all(paces):  # a rank without a micro-batch has none
            return
        self._heard.append([float(str(pace)) for pace in paces])
        if len(self._heard) < WINDOW:
            return
        usual = [median(of_rank) for of_rank in zip(*self._heard, strict=True)]
        for rank, pace in enumerate(usual):
            times = pace / median(usual[:rank] + usual[rank + 1 :])
            if times < USUAL:
                self._named.discard(rank)
            elif times >= SLOW and rank not in self._named:
                self._named.add(rank)
                text = (
                    f"rank {rank} on {said[rank].get('host')} takes {times:.2f} times as long as "
                    f"the others to compute a token, over {WINDOW} steps; all wait for it"
                )
                facts = {"step": step, "rank": rank, "times": round(times, 3), "text": text}
                yield {"event": "slow rank", **facts}


def own_pace(spans: Sequence[Span], num_tokens: int) -> float | None:
    """Return seconds of compute per token; None without a token."""
    computed = [span.seconds for span in spans if span.lane == "compute" and span.awaited is None]
    return sum(computed) / num_tokens if num_tokens and computed else None

"""A lane that is slower than its work: for tests of timing, and to play a slower machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from megatrain.lanes.lane import Action, Lane
from megatrain.step.ops import Op


class SlowLane(Lane):
    """A lane that pauses before its ops, or takes a least time for each, or for its bytes."""

    def __init__(
        self,
        name: str,
        *,
        delay: Callable[[Op], float] | None = None,
        least: Callable[[Op], float] | None = None,
        bandwidth: float | None = None,
        **options: Any,
    ) -> None:
        """`delay` gives the seconds before an op, `least` those of an op with its own work in them,
        `bandwidth` is in bytes/s."""
        super().__init__(name, **options)
        self._delay, self._least, self._bandwidth = delay, least, bandwidth

    def act(self, op: Op, action: Action) -> int:
        """Do the op in the caller's thread, as slowly as this lane is; return its bytes."""
        if self._delay is not None:
            time.sleep(self._delay(op))
        start = time.monotonic()
        num_bytes = super().act(op, action)
        least_s = 0.0 if self._least is None else self._least(op)
        if self._bandwidth is not None:
            least_s = max(least_s, num_bytes / self._bandwidth)
        time.sleep(max(0.0, start + least_s - time.monotonic()))
        return num_bytes

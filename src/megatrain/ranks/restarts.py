"""How a rank knows its launch, and how often that has started its ranks again.

The id that a user gives torchrun may be that of another launch (`--rdzv-id 1`, or none at all). So
the first rank 0 leaves a random name in the store of the launcher, which outlives its ranks and
ends with the launcher. A launcher without such a store starts ranks that have no name.

Laws (tests/ranks/test_restarts.py)
    1. All attempts of one launch have the same name, and no other launch has it.
    2. A store that is gone or silent means no name, within a few seconds.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

from megatrain.errors import RankLost
from megatrain.ranks.environment import Seat, agent_seat

_KEY = "megatrain/launch"
_DEADLINE_S = 10.0


def launch_name(
    environment: Mapping[str, str] = os.environ, deadline_s: float = _DEADLINE_S
) -> str | None:
    """Return the random name of the launch; None if it has none. Rank 0 asks."""
    if (seat := agent_seat(environment)) is None:
        return None
    from megatrain.ranks.meeting import answered  # imports torch.distributed

    try:
        return answered(seat, deadline_s, lambda: _name(seat, deadline_s))
    except RankLost:  # started by hand, with the environment of a launch that is over
        return None


def _name(seat: Seat, deadline_s: float) -> str:
    from megatrain.ranks.meeting import reach

    store: Any = reach(seat, deadline_s)
    name: bytes = store.compare_set(_KEY, "", secrets.token_hex(16))  # set if it is not there
    return name.decode()


def num_restarts(environment: Mapping[str, str] = os.environ) -> int:
    """Return how often the launcher has started the ranks again."""
    text = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(text) if text.isdecimal() else 0

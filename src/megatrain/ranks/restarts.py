"""What a launcher that starts ranks again, as torchrun does, says of that in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping


def launch_name(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the launcher's name for all that it starts; the same after a restart."""
    return environment.get("TORCHELASTIC_RUN_ID")


def num_restarts(environment: Mapping[str, str] = os.environ) -> int:
    """Return how often the launcher has started the ranks again."""
    text = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(text) if text.isdecimal() else 0

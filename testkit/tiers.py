"""Runs with a disk tier that would fit without one: the plan's choice is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from megatrain.config import Config
from megatrain.planning import from_config


@contextmanager
def forced_tier(tier: str) -> Iterator[None]:
    """Let every plan have this `StepSettings.tier`; `memory.disk` must name a folder."""
    given = from_config._given

    def with_tier(config: Config) -> dict[str, Any]:
        return given(config) | {"tier": tier}

    with patch.object(from_config, "_given", with_tier):
        yield

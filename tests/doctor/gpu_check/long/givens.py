"""A part's surroundings on the processor, with rates that ask for the smallest models."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.doctor.gpu_check.long.given import Given
from megatrain.doctor.subject import CPU
from megatrain.planning.machine.profile import FlopRate
from testkit.machines import PROCESSOR

SLOW = PROCESSOR.changed(
    unified=False, device_bytes=1 << 33, forward_flops=(FlopRate(32, 64, 1e9),), update_cores=1.0
)


@dataclass
class Kept:
    """What a part has said, kept and attached."""

    said: list[str] = field(default_factory=list)
    found: list[Mapping[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)


def given_on_cpu(kept: Kept, scratch: Path, until: float = float("inf"), **changes: Any) -> Given:
    """Return what a part gets; its time is over at `until`, by time.monotonic."""
    fields: dict[str, Any] = {
        "subject": CPU,
        "known": SLOW,
        "until": until,
        "say": kept.said.append,
        "keep": lambda found: kept.found.append(dict(found)),
        "attach": kept.files.__setitem__,
        "command": (sys.executable, "-m", "megatrain"),
        "scratch": scratch,
    }
    return Given(**fields | changes)

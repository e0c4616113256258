"""What a part of a long check is given: the device, its rates, its time, and where results go."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.doctor.gpu_check.long.results import CannotRun
from megatrain.doctor.subject import Subject
from megatrain.planning.machine.profile import MachineProfile
from megatrain.progress import Say

FAST_FLOPS = 5e12
"""From this rate of products on, a device is measured in full."""
SMALL = 0.05
"""Share of the time that a slower one gets: a processor, or a device that is emulated by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The surroundings of one part."""

    subject: Subject
    known: MachineProfile | None
    """Rates that the first part has measured; None: it has not."""
    until: float
    """When (time.monotonic) the part must end."""
    say: Say
    keep: Callable[[Mapping[str, Any]], None]
    """Writes what was found so far."""
    attach: Callable[[str, bytes], None]
    """Writes a file beside the result."""
    command: tuple[str, ...]
    """The beginning of a command line that runs megatrain as this process does."""
    scratch: Path
    """An empty folder; it is removed afterwards."""

    @property
    def profile(self) -> MachineProfile:
        """The rates. Raises CannotRun where there are none."""
        if self.known is None:
            raise CannotRun("the part `check` has measured no rates, which this one needs")
        return self.known

    @property
    def scale(self) -> float:
        """Share of the usual time that this device is measured for."""
        flops = max(point.flops for point in self.profile.forward_flops)
        return 1.0 if flops >= FAST_FLOPS else SMALL

    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self.until - time.monotonic()

"""The check of host memory at rest (engine/seals.py): sums over what an update reads and writes.

They are made while an update has its bytes in the cache, so they take time of the optimizer's cores
and no memory traffic. Hidden updates stay hidden, and the check is nearly free. Where steps wait
for updates, it is left out if that saves more than MOST_SLOWER. The times of a plan are those
without a check that the plan has chosen, and with one that the user wants.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatrain.planning.levers.lever import Lever
from megatrain.planning.machine.profile import MachineProfile
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.config import Config
    from megatrain.planning.search import Candidate, Search

MOST_SLOWER = 0.03
"""Share of a step that the check may cost."""


class Check(Lever):
    """Whether host memory is checked."""

    name = "check"
    key = "memory.check"

    def given(self, config: Config) -> Any:
        return {"auto": "auto", "on": True, "off": False}[config.memory.check]

    def filled(self, search: Search, best: Candidate) -> Candidate:
        """Return the best without the check, whatever it would cost."""
        return best

    def unused_text(self, profile: MachineProfile, settings: StepSettings) -> str | None:
        """Return nothing for most plans, whose memory is checked."""
        return "" if settings.check else None

    def is_costly(self, settings: StepSettings) -> bool:
        return not settings.check

    def reason(self, search: Search, settings: StepSettings) -> str:
        if settings.check:
            return "a bit that flips is found before it is saved"
        slower = self._slower(search, settings.changed(check=True))
        return f"not checked: steps would take {slower:.1%} longer"

    def _slower(self, search: Search, settings: StepSettings) -> float:
        """Return how much longer steps take with the check, as a share."""
        return search.seconds(settings) / search.seconds(settings.changed(check=False)) - 1


def timed(settings: StepSettings, search: Search) -> StepSettings:
    """Return the settings whose time is that of a plan."""
    return settings if Check.name in search.pins else settings.changed(check=False)

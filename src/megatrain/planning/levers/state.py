"""The optimizer's states: in fp32, in bf16, or in 8 bits. Masters are fp32 in all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatrain.memory.ledger import gib
from megatrain.optim.states import STATES
from megatrain.planning.levers.lever import Lever
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.planning.fixes import Fix
    from megatrain.planning.search import Search

EXACT = "fp32"
"""The state that costs no exactness."""


class State(Lever):
    """How exactly the optimizer keeps its states."""

    name = "state"
    key = "optim.state"
    is_kept = True
    makes_home = True
    fix_cost = 0.9
    fills_gap = True

    def choices(self, search: Search) -> list[str]:
        return list(search.workload.states)

    def is_costly(self, settings: StepSettings) -> bool:
        return settings.state != EXACT

    def reason(self, search: Search, settings: StepSettings) -> str:
        from megatrain.planning.levers.homes import homes_before, lacking

        better = [home for home in homes_before(search, settings) if home.state != settings.state]
        better = [home for home in better if (home.tier == "none") == (settings.tier == "none")]
        better = [home for home in better if home.update == settings.update]
        if not better:
            return "the most exact of them fits"
        return f"{better[-1].state} states are {lacking(search, better[-1])} short"

    def fix(self, start: Fix) -> Fix | None:
        """Give up a state that the user has pinned, for the most exact one that fits."""
        states = list(start.workload.states)
        now = start.settings.state
        lower = states[states.index(now) + 1 :] if self.name in start.pins else []
        ways = [replace(start, settings=start.settings.changed(state=state)) for state in lower]
        if not ways:
            return None
        found = next((way for way in ways if not way.missing), ways[-1])
        saved = start.ledger.total("host") - found.ledger.total("host")
        override = f"{self.key}={found.settings.state}"
        text = f"{override} (now {now}, -{gib(saved)} host)"
        return start.then(text, override, settings=found.settings)

    def read(self, training: Mapping[str, Any]) -> str:
        value = training["state"]
        if not isinstance(value, str) or not any(value in states for states in STATES.values()):
            raise ValueError(f"{str(value)[:40]!r} is not a state of an optimizer")
        return value


STATE = State()

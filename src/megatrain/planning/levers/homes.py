"""Homes: how exactly the optimizer's states are kept, and where, in the order of preference.

A less exact state is never taken for speed, and a disk is never worn while host memory is enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.memory.ledger import gib
from megatrain.planning.levers.state import STATE
from megatrain.planning.levers.tier import TIER
from megatrain.planning.levers.update import UPDATE
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.planning.search import Search


def homes(search: Search) -> list[StepSettings]:
    """Return where states may live and how exactly, the best first, as settings to begin with.

    In host memory, the most exact first; then on disk, where a state that is less exact saves
    hardly any host memory, so that waiting gradients go there before a state is given up.
    """
    tiers, states = TIER.allowed(search), STATE.allowed(search)
    in_memory = [(state, tier) for tier in tiers if tier == "none" for state in states]
    tiered = [(state, tier) for state in states for tier in tiers if tier != "none"]
    update = UPDATE.choices(search)[0]
    return [
        search.settings.changed(state=state, tier=tier, update=update)
        for state, tier in (*in_memory, *tiered)
    ]


def small_homes(search: Search) -> list[StepSettings]:
    """Return the homes that need least: in each tier the last of them."""
    return list({home.tier: home for home in homes(search)}.values())


def homes_before(search: Search, settings: StepSettings) -> list[StepSettings]:
    """Return the homes before that of `settings`, in which nothing fits."""
    found = homes(search)
    names = [(home.state, home.tier) for home in found]
    return found[: names.index((settings.state, settings.tier))]


def lacking(search: Search, home: StepSettings) -> str:
    """Return what the settings that need least in a home lack of host memory."""
    lacks = [search.missing(settings) for settings in search.small_at(home)]
    return gib(min((lack["host"] for lack in lacks if "host" in lack), default=0))

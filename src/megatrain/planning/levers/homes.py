"""Homes: where the optimizer's states are kept and when they are updated, the best first.

All homes compute the same bits. A disk is never worn while host memory is enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.memory.ledger import gib
from megatrain.planning.levers.tier import TIER, has_tier
from megatrain.planning.levers.update import UPDATE, goes_back_twice
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.planning.search import Search


def homes(search: Search) -> list[StepSettings]:
    """Return where states may live, the best first, as settings to begin with.

    In host memory, then there with a second backward, so that no gradient waits; then on disk, in
    the same order.
    """
    return [
        search.settings.changed(tier=tier, update=update)
        for tier in TIER.allowed(search)
        for update in UPDATE.allowed(search)
    ]


def rivals(search: Search, home: StepSettings) -> list[StepSettings]:
    """Return the homes behind one that are taken where they are faster.

    A second backward costs time and nothing else, and so does a disk.
    """
    if not goes_back_twice(home) or has_tier(home):
        return []
    found = homes(search)
    return [other for other in found[found.index(home) + 1 :] if has_tier(other)]


def small_homes(search: Search) -> list[StepSettings]:
    """Return the homes that need least: in each tier the last of them."""
    return list({home.tier: home for home in homes(search)}.values())


def homes_before(search: Search, settings: StepSettings) -> list[StepSettings]:
    """Return the homes before that of `settings`, in which nothing fits."""
    found = homes(search)
    names = [(home.tier, home.update) for home in found]
    return found[: names.index((settings.tier, settings.update))]


def lacking(search: Search, home: StepSettings) -> str:
    """Return what the settings that need least in a home lack of host memory."""
    lacks = [search.missing(settings) for settings in search.small_at(home)]
    return gib(min((lack["host"] for lack in lacks if "host" in lack), default=0))

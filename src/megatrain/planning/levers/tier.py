"""The disk tier: remainders and states are on disk between updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatrain.memory.kinds import TensorKind, kinds_on_disk
from megatrain.memory.ledger import gib
from megatrain.planning.levers.lever import Lever
from megatrain.planning.levers.update import kinds
from megatrain.planning.machine.profile import USUAL_DISK_BYTES
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.planning.fixes import Fix
    from megatrain.planning.machine.profile import MachineProfile
    from megatrain.planning.search import Search

LEAST_SAVED = 1 << 20
"""Bytes: a change that saves less is not offered."""


class Tier(Lever):
    """The kinds that are on disk between updates."""

    name = "tier"
    fix_cost = 2.5
    fills_gap = True

    def applies(self, search: Search) -> bool:
        return bool(search.profile.disk_bytes)

    def choices(self, search: Search) -> Sequence[str]:
        return ["none", "states"] if search.profile.disk_bytes else ["none"]

    def is_costly(self, settings: StepSettings) -> bool:
        return has_tier(settings)

    def unused_text(self, profile: MachineProfile, settings: StepSettings) -> str | None:
        if has_tier(settings):
            return None
        return "memory.disk is not used: host memory is enough" if profile.disk_bytes else ""

    def reason(self, search: Search, settings: StepSettings) -> str:
        from megatrain.planning.levers.homes import homes_before, lacking

        others = [home for home in homes_before(search, settings) if home.tier != settings.tier]
        others = [home for home in others if home.update == settings.update]
        if not others:
            return "host memory is enough, and a disk wears out"
        return f"{settings.state} states are {lacking(search, others[-1])} short in memory"

    def fix(self, start: Fix) -> Fix | None:
        """Keep remainders and states on a drive."""
        if start.profile.disk_bytes or self.name in start.pins:
            return None
        roomy = replace(start, profile=start.profile.changed(disk_bytes=USUAL_DISK_BYTES))
        saved = start.ledger.total("host") - roomy.ledger.total("host")
        if saved < LEAST_SAVED:
            return None
        written = "written" if roomy.missing else f"{gib(roomy.tier_bytes)} written"
        override = "memory.disk=PATH"
        text = f"{override} (on NVMe, {written} each step, -{gib(saved)} host)"
        return start.then(text, override, profile=roomy.profile)


TIER = Tier()


def on_disk(workload: Workload, settings: StepSettings) -> tuple[TensorKind, ...]:
    """Return what of a store is on disk between updates, and so read by each of them."""
    return kinds_on_disk(kinds(workload, settings), settings.tier)


def has_tier(settings: StepSettings) -> bool:
    return settings.tier != "none"

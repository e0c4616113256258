"""Rows ahead: of the embedding, what the next step needs is updated first, and the rest last.

A late update of the whole table is the first that forward waits for, and of a small model the
longest. Where rows are gathered, those of the next step's tokens can be made ahead of it, out of
place, and the table is updated behind the other blocks, where nobody waits for it. The rows are
updated twice, so it pays where a step looks at few of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megatrain.planning.levers.embedding_rows import may_gather
from megatrain.planning.levers.lever import Lever
from megatrain.planning.levers.speculated import has_matrices
from megatrain.planning.levers.tier import has_tier
from megatrain.planning.machine.profile import NOT_MEASURED, MachineProfile
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.planning.search import Candidate, Search

_LEAST_GAIN = 0.01
"""Share of a step."""


class RowsAhead(Lever):
    """Whether rows are made ahead of updates."""

    name = "rows_ahead"

    def seconds(self, search: Search, settings: StepSettings) -> float | None:
        """Return the time of all layers: behind few of them the table would be waited for."""
        return search.whole_seconds(settings) if settings.rows_ahead else None

    def filled(self, search: Search, best: Candidate) -> Candidate:
        """Return the best with rows ahead, if that saves time."""
        pinned = {self.name, "gather_embedding"} & set(search.pins)
        settings = best.settings.changed(gather_embedding=True, rows_ahead=True)
        if pinned or not may_go_ahead(search, settings) or not search.fits(settings):
            return best
        before = search.whole_seconds(best.settings)
        found = search.faster(replace(best, step_s=before), settings)
        return found if found.step_s <= (1 - _LEAST_GAIN) * before else best

    def unused_text(self, profile: MachineProfile, settings: StepSettings) -> str | None:
        """Return nothing for most plans: a table that is updated in its turn needs no word."""
        return None if settings.rows_ahead else ""

    def reason(self, search: Search, settings: StepSettings) -> str:
        without = search.whole_seconds(settings.changed(rows_ahead=False))
        return f"{without / search.whole_seconds(settings) - 1:+.1%}: forward waits for no table"


def may_go_ahead(search: Search, settings: StepSettings) -> bool:
    """Return whether rows of the embedding can be made ahead of late updates."""
    measured = search.profile.source != NOT_MEASURED
    alone = len(search.workload.model.embedding.tensors) == 1
    late = settings.update == "late" and not has_tier(settings)
    late &= not has_matrices(search.workload)
    trained = search.workload.model.embedding.is_trained
    return (
        measured and alone and trained and late and settings.state != "8bit" and may_gather(search)
    )


def rows_made_ahead(workload: Workload) -> int:
    """Return the elements of the rows of one step's tokens."""
    return workload.distinct_tokens() * workload.model.hidden

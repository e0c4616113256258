"""Rows ahead: of the embedding, what the next step needs is updated first, and the rest last.

A late update of the whole table is the first that forward waits for, and of a small model the
longest. Where rows are gathered, those of the next step's tokens can be made ahead of it, out of
place, and the table is updated behind the other blocks, where nobody waits for it. The rows are
updated twice, so it pays where a step looks at few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.planning.levers.lever import Lever
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.planning.search import Candidate, Search


class RowsAhead(Lever):
    """Whether rows are made ahead of updates."""

    name = "rows_ahead"

    def seconds(self, search: Search, settings: StepSettings) -> float | None:
        """Return the time of all layers: behind few of them the table would be waited for."""
        return search.whole_seconds(settings) if settings.rows_ahead else None

    def filled(self, search: Search, best: Candidate) -> Candidate:
        """Return the best without rows ahead, whatever they would save."""
        return best

    def unused_text(self, profile: MachineProfile, settings: StepSettings) -> str | None:
        """Return nothing for most plans: a table that is updated in its turn needs no word."""
        return None if settings.rows_ahead else ""

    def reason(self, search: Search, settings: StepSettings) -> str:
        without = search.whole_seconds(settings.changed(rows_ahead=False))
        return f"{without / search.whole_seconds(settings) - 1:+.1%}: forward waits for no table"


def rows_made_ahead(workload: Workload) -> int:
    """Return the elements of the rows of one step's tokens."""
    return workload.distinct_tokens() * workload.model.hidden

"""How ranks divide a model among them, as numbers: so many hosts, and on each so many ranks.

Law (tests/planning/ranks/test_division.py): parts are those of ranks/ownership.py, of the rank that
owns most.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.planning.model.shapes import PLANNED_ALIGN
from megatrain.ranks.ownership import Owner


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Equal ranks on equal hosts. One on one host is a process alone."""

    num_hosts: int = 1
    per_host: int = 1
    missing: int = 0
    """Ranks that some hosts have fewer than others; memory and speed are those of a full one."""

    @property
    def size(self) -> int:
        """The number of all ranks."""
        return self.num_hosts * self.per_host - self.missing

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    def owned(self, num_elements: int) -> int:
        """Return the elements of a segment that a rank owns; the last ones may own fewer."""
        return min(num_elements, self._part(num_elements))

    def gathered(self, num_elements: int) -> int:
        """Return the elements of a slot that has the parts of all ranks, equal in size."""
        return self.size * self._part(num_elements)

    def _part(self, num_elements: int) -> int:
        return Owner(0, self.size).part(num_elements, PLANNED_ALIGN)

    def __str__(self) -> str:
        if self.num_hosts == 1:
            return f"{self.size} on one host"
        most = "at most " if self.missing else ""
        return f"{self.size} on {self.num_hosts} hosts, {most}{self.per_host} on each"


SOLE_RANK = Division()
"""A process alone."""

"""Parts of host memory that only some runs have, imported when one first has them (late.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.late import imported_late

if TYPE_CHECKING:
    from megatrain.memory.tier import filling as filling

__getattr__ = imported_late(
    __name__,
    "megatrain.memory.tier.filling",
)

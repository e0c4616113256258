"""What a plan says only where it does not fit, or wears a disk (late.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.late import imported_late

if TYPE_CHECKING:
    from megatrain.planning import fixes as fixes
    from megatrain.planning import wear as wear

__getattr__ = imported_late(
    __name__,
    "megatrain.planning.fixes",
    "megatrain.planning.wear",
)

"""Names of other tools, imported when a config has a fault (late.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.late import imported_late

if TYPE_CHECKING:
    from megatrain.config.other_tools import tables as tables

__getattr__ = imported_late(
    __name__,
    "megatrain.config.other_tools.tables",
)

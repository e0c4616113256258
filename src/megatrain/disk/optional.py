"""Parts that only models with adapters have, imported when one first has them (late.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.late import imported_late

if TYPE_CHECKING:
    from megatrain.disk.adapters import export as export
    from megatrain.disk.adapters import folder as folder
    from megatrain.disk.adapters import names as names
    from megatrain.disk.adapters import published as published

__getattr__ = imported_late(
    __name__,
    "megatrain.disk.adapters.export",
    "megatrain.disk.adapters.folder",
    "megatrain.disk.adapters.names",
    "megatrain.disk.adapters.published",
)

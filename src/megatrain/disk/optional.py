"""Parts that only some models have, imported when one first has them (late.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.late import imported_late

if TYPE_CHECKING:
    from megatrain.disk.adapters import export as export
    from megatrain.disk.adapters import folder as folder
    from megatrain.disk.adapters import merge as merge
    from megatrain.disk.adapters import names as names
    from megatrain.disk.adapters import start as start
    from megatrain.disk.hf import multimodal_tensors as multimodal_tensors

__getattr__ = imported_late(
    __name__,
    "megatrain.disk.adapters.export",
    "megatrain.disk.adapters.folder",
    "megatrain.disk.adapters.merge",
    "megatrain.disk.adapters.names",
    "megatrain.disk.adapters.start",
    "megatrain.disk.hf.multimodal_tensors",
)

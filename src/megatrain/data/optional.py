"""What only some rows need, imported when some are read (late.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.late import imported_late

if TYPE_CHECKING:
    from megatrain.data.media import processing as processing
    from megatrain.data.media import store as store
    from megatrain.data.tokens import mismatched as mismatched

__getattr__ = imported_late(
    __name__,
    "megatrain.data.media.processing",
    "megatrain.data.media.store",
    "megatrain.data.tokens.mismatched",
)

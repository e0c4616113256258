"""Parts of models that only some steps need, imported when one first does (late.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.late import imported_late

if TYPE_CHECKING:
    from megatrain import narrow as narrow
    from megatrain.models import balance as balance
    from megatrain.models import compiled as compiled
    from megatrain.models import tiled_layer as tiled_layer
    from megatrain.models import towers as towers
    from megatrain.models import widening as widening
    from megatrain.models.adapters import lora as lora
    from megatrain.models.probing import tile_cuts as tile_cuts

__getattr__ = imported_late(
    __name__,
    "megatrain.models.adapters.lora",
    "megatrain.models.balance",
    "megatrain.models.compiled",
    "megatrain.models.probing.tile_cuts",
    "megatrain.models.tiled_layer",
    "megatrain.models.towers",
    "megatrain.models.widening",
    "megatrain.narrow",
)

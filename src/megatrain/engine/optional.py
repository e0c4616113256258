"""Parts of the engine that only some steps have, imported when one first has them (late.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.late import imported_late

if TYPE_CHECKING:
    from megatrain.devices import deterministic as deterministic
    from megatrain.engine import exchange as exchange
    from megatrain.engine import open_step as open_step
    from megatrain.engine import pages as pages
    from megatrain.engine import residence as residence
    from megatrain.engine.compute import drawing as drawing
    from megatrain.engine.compute import fused as fused
    from megatrain.engine.compute import kept as kept
    from megatrain.engine.compute import products as products
    from megatrain.engine.gradients import directions as directions
    from megatrain.lanes import reference as reference
    from megatrain.memory.tier import ring as ring
    from megatrain.models import balance as balance
    from megatrain.models import experts as experts
    from megatrain.models import key_values as key_values
    from megatrain.models import tiled_layer as tiled_layer
    from megatrain.models import towers as towers
    from megatrain.models import widening as widening
    from megatrain.models.adapters import lora as lora

__getattr__ = imported_late(
    __name__,
    "megatrain.devices.deterministic",
    "megatrain.engine.compute.drawing",
    "megatrain.engine.compute.fused",
    "megatrain.engine.compute.kept",
    "megatrain.engine.compute.products",
    "megatrain.engine.exchange",
    "megatrain.engine.gradients.directions",
    "megatrain.engine.open_step",
    "megatrain.engine.pages",
    "megatrain.engine.residence",
    "megatrain.lanes.reference",
    "megatrain.memory.tier.ring",
    "megatrain.models.adapters.lora",
    "megatrain.models.balance",
    "megatrain.models.experts",
    "megatrain.models.key_values",
    "megatrain.models.tiled_layer",
    "megatrain.models.towers",
    "megatrain.models.widening",
)

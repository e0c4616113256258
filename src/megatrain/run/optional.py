"""Parts of a run that only some runs have, imported when one first has them (late.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.late import imported_late

if TYPE_CHECKING:
    from megatrain.disk.adapters import folder as folder
    from megatrain.engine.compute import fused as fused
    from megatrain.engine.compute import products as products
    from megatrain.run import publishing as publishing
    from megatrain.run import uploads as uploads
    from megatrain.run.evaluation import references as references
    from megatrain.run.evaluation import teaching as teaching

__getattr__ = imported_late(
    __name__,
    "megatrain.disk.adapters.folder",
    "megatrain.engine.compute.fused",
    "megatrain.engine.compute.products",
    "megatrain.run.evaluation.references",
    "megatrain.run.evaluation.teaching",
    "megatrain.run.publishing",
    "megatrain.run.uploads",
)

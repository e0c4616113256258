"""What only some runs need besides the rest, imported when one first does (late.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.late import imported_late

if TYPE_CHECKING:
    from megatrain.data import prompts as prompts
    from megatrain.disk.adapters import folder as folder
    from megatrain.disk.adapters import peft_targets as peft_targets
    from megatrain.disk.checkpoint import conversion as conversion
    from megatrain.losses import distillation as distillation
    from megatrain.losses import preferences as preferences
    from megatrain.memory.tier import scratch_file as scratch_file
    from megatrain.models.adapters import lora as lora
    from megatrain.optim import muon as muon
    from megatrain.planning import alternatives as alternatives
    from megatrain.planning import rollouts as rollouts
    from megatrain.run.evaluation import answers as answers
    from megatrain.run.evaluation import samples as samples
    from megatrain.run.opening import media_shape as media_shape

__getattr__ = imported_late(
    __name__,
    "megatrain.data.prompts",
    "megatrain.disk.adapters.folder",
    "megatrain.disk.adapters.peft_targets",
    "megatrain.disk.checkpoint.conversion",
    "megatrain.losses.distillation",
    "megatrain.losses.preferences",
    "megatrain.memory.tier.scratch_file",
    "megatrain.models.adapters.lora",
    "megatrain.optim.muon",
    "megatrain.planning.alternatives",
    "megatrain.planning.rollouts",
    "megatrain.run.evaluation.answers",
    "megatrain.run.evaluation.samples",
    "megatrain.run.opening.media_shape",
)

"""The section lora of a config: low-rank adapters in place of the model's own params."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megatrain.config.section import Section
from megatrain.config.value_types import Name, Number, Patterns, TypeName, Whole


class LoraSettings(Section):
    """Low-rank adapters, trained instead of the model; `rank` or `path` turns them on."""

    rank: Annotated[Annotated[Whole, Field(ge=1)] | None, TypeName("whole number or null")] = Field(
        default=None, description="Rank of the adapters; null trains the model itself."
    )
    alpha: Annotated[Annotated[Number, Field(gt=0)] | None, TypeName("number or null")] = Field(
        default=None,
        description="Adapters are scaled by alpha / rank; null is twice the rank.",
    )
    path: Annotated[Name | None, TypeName("path or null")] = Field(
        default=None,
        description="Folder of adapters to start from, as PEFT or an export writes it; rank, alpha "
        "and modules are then those of the folder, and dropout is the one given here.",
    )
    dropout: Annotated[Number, Field(ge=0, lt=1)] = Field(
        default=0.0, description="Dropout of the adapters' inputs."
    )
    targets: Patterns = Field(
        default=(),
        description="Linear modules of the decoder layers to adapt, by the end of their names, "
        "like [q_proj, v_proj], or by patterns, like *.mlp.*; all of them if none is given, or "
        "all-linear.",
    )
    rslora: bool = Field(
        default=False, description="Scale by alpha / sqrt(rank) instead, for high ranks."
    )

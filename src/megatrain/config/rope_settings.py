"""The key model.rope of a config: rotary positions beyond those that a model declares."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_serializer, model_validator

from megatrain.config.section import Section
from megatrain.config.value_types import Number, TokenCount, TypeName

_Optional = Annotated[Annotated[Number, Field(gt=0)] | None, TypeName("number or null")]
_ONLY = {
    "attention_factor": "yarn",
    "beta_fast": "yarn",
    "beta_slow": "yarn",
    "low_freq_factor": "llama3",
    "high_freq_factor": "llama3",
}
"""Keys that one type reads."""


class RopeSettings(Section):
    """Scaling of rotary positions, as in `rope: {type: yarn, factor: 4.0}`."""

    type: Literal["default", "linear", "yarn", "llama3"] = Field(
        description="Kind of scaling, by its name in transformers; one that the model declares "
        "cannot change; default scales nothing, for training beyond the positions on purpose."
    )
    factor: Annotated[Number, Field(ge=1)] = Field(
        description="How many times as many positions as before any scaling; a model with factor 8 "
        "gets twice its positions by 16."
    )
    theta: _Optional = Field(
        default=None, description="Base of the frequencies; null is the model's."
    )
    original_max_position_embeddings: Annotated[TokenCount | None, TypeName("tokens or null")] = (
        Field(
            default=None,
            description="Positions before any scaling; null is as the model declares (Qwen3 says "
            "40960, and its makers scale from 32768).",
        )
    )
    attention_factor: _Optional = Field(
        default=None, description="yarn: scale of sines and cosines; null follows from factor."
    )
    beta_fast: _Optional = Field(
        default=None, description="yarn: turns above which nothing is scaled; null is 32."
    )
    beta_slow: _Optional = Field(
        default=None, description="yarn: turns below which all is scaled; null is 1."
    )
    low_freq_factor: _Optional = Field(
        default=None, description="llama3: bound of the scaled frequencies; null is 1."
    )
    high_freq_factor: _Optional = Field(
        default=None, description="llama3: bound of the unscaled frequencies; null is 4."
    )

    @model_validator(mode="after")
    def _read_by_type(self) -> Self:
        for key, kind in _ONLY.items():
            if getattr(self, key) is not None and self.type != kind:
                raise ValueError(f"{key} belongs to type {kind}, and type is {self.type}")
        return self

    @model_serializer
    def _given(self) -> dict[str, Any]:
        return {key: value for key, value in self if value is not None}

    def parameters(self) -> dict[str, Any]:
        """Return what is given, by the names of transformers."""
        renamed = {"type": "rope_type", "theta": "rope_theta"}
        return {renamed.get(key, key): value for key, value in self.model_dump().items()}


Rope = Annotated[
    RopeSettings | None,
    TypeName("mapping, like {type: yarn, factor: 4.0}, or null"),
]

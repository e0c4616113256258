"""The loss section of a config: what a step minimises."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from megatrain.config.data_settings import PreferenceName
from megatrain.config.section import Section
from megatrain.config.value_types import Number, TypeName

LossName = Literal["next_token", "dpo", "ipo", "orpo", "simpo", "kto"]
_Optional = Annotated[Annotated[Number, Field(gt=0)] | None, TypeName("number or null")]
_READ_BY = {
    "beta": ("dpo", "ipo", "orpo", "simpo", "kto"),
    "label_smoothing": ("dpo", "simpo"),
    "gamma": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}
"""Keys, and the losses that read them."""
COMPARED: dict[LossName, PreferenceName] = {
    "dpo": "pairs",
    "ipo": "pairs",
    "orpo": "pairs",
    "simpo": "pairs",
    "kto": "kto",
}
"""The preferences that a loss compares; others train on rows without."""


class LossSettings(Section):
    """The loss."""

    name: LossName = Field(
        default="next_token",
        description="What is minimised: next_token is fine-tuning; dpo, ipo, orpo and simpo prefer "
        "the chosen of two answers; kto takes answers that are each good or bad.",
    )
    beta: _Optional = Field(
        default=None,
        description="Strength of a preference: how far the model may move from the reference (dpo, "
        "ipo, kto: a small one lets it move further), share of the odds ratio (orpo), scale of the "
        "rewards (simpo); null is 0.1, and 2.0 for simpo.",
    )
    label_smoothing: Annotated[
        Annotated[Number, Field(ge=0, lt=0.5)] | None, TypeName("number below 0.5, or null")
    ] = Field(
        default=None,
        description="dpo, simpo: probability that a pair is the wrong way round; null is 0.",
    )
    gamma: Annotated[Annotated[Number, Field(ge=0)] | None, TypeName("number or null")] = Field(
        default=None,
        description="simpo: margin by which the reward of the chosen answer is to be larger; null "
        "is 1.0.",
    )
    desirable_weight: _Optional = Field(
        default=None, description="kto: weight of good answers; null is 1."
    )
    undesirable_weight: _Optional = Field(
        default=None, description="kto: weight of bad answers; null is 1."
    )

    @model_validator(mode="after")
    def _read_by_name(self) -> Self:
        given = [key for key in _READ_BY if getattr(self, key) is not None]
        for key in given:
            if self.name not in _READ_BY[key]:
                names = " and ".join(_READ_BY[key])
                raise ValueError(f"{key} belongs to {names}, and the loss is {self.name}")
        return self

    @property
    def preferences(self) -> PreferenceName | None:
        """The format of the rows that the loss compares; None: it compares none."""
        return COMPARED.get(self.name)

"""What a run tells and keeps: evaluation, checkpoints, logs. Every setting is as in settings.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from megatrain.config.section import Section
from megatrain.config.value_types import Name, StepCount, TypeName, Whole, as_list


class EvalSettings(Section):
    """Evaluation during the run."""

    every: Annotated[StepCount | None, TypeName("steps or null")] = Field(
        default=200, description="Steps between evaluations; null evaluates at the end only."
    )
    samples: Whole = Field(
        default=4,
        ge=0,
        le=1000,
        description="Number of texts to generate before the first step, at each evaluation and "
        "after the last step; without data.eval only first and last; the plan shows the cost.",
    )
    max_rows: Annotated[Annotated[Whole, Field(ge=1)] | None, TypeName("rows or null")] = Field(
        default=None, description="Most rows to evaluate on; null is all."
    )
    patience: Annotated[Annotated[Whole, Field(ge=1)] | None, TypeName("evaluations or null")] = (
        Field(
            default=None,
            description="Stop after this many evaluations in a row without a lower loss, and "
            "export the best checkpoint, as with save.best; null never stops early.",
        )
    )


class SaveSettings(Section):
    """The run folder and its checkpoints."""

    dir: Annotated[Name | None, TypeName("path or null")] = Field(
        default=None,
        description="Run folder; null is runs/ plus the last part of the model's name.",
    )
    every: Annotated[StepCount | None, TypeName("steps or null")] = Field(
        default=500, description="Steps between checkpoints; null saves at the end only."
    )
    keep: Whole = Field(default=2, ge=1, description="Checkpoints to keep; older ones are deleted.")
    best: bool = Field(
        default=False,
        description="Also save when an evaluation is the best so far, keep that checkpoint, and "
        "export it at the end instead of the last one.",
    )


class LogSettings(Section):
    """Logging."""

    every: StepCount = Field(default=1, description="Steps between log lines.")
    to: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio"], ...],
        BeforeValidator(as_list),
        TypeName("list of tensorboard, wandb, trackio"),
    ] = Field(default=(), description="Where to send metrics in addition to metrics.jsonl.")
    project: Annotated[Name | None, TypeName("name or null")] = Field(
        default=None,
        description="Project of wandb and trackio; null is that of WANDB_PROJECT or "
        "TRACKIO_PROJECT, or else megatrain.",
    )

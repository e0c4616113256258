"""Rows with media: the model gets its towers.

Whether rows have media is known when they have been read, so the model was opened without towers
until then. A run without media trains as if there were none, whatever model.media says.

Laws (tests/run/opening/test_towers.py)
    1. A run whose rows have media trains what model.media says, and tells so.
    2. A resumed run has the bits of one that ran through.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from megatrain.config import Config
from megatrain.data.training_rows import TrainingRows
from megatrain.disk.hf.model import ModelFolder
from megatrain.errors import ConfigError
from megatrain.models.build import build_decoder
from megatrain.models.config_json import parse_config
from megatrain.models.decoder import Decoder
from megatrain.planning.model.shapes import MediaShape
from megatrain.run.opening import optional
from megatrain.run.opening.recipe import group_notes

if TYPE_CHECKING:
    from megatrain.data.prompts import Prompts
    from megatrain.models.towers import MediaTraining

Rows: TypeAlias = "TrainingRows | Prompts"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedMedia:
    """The model of a run, with its towers if rows have media."""

    model: ModelFolder
    shape: MediaShape | None = None
    """The media as sizes, for the plan; None: rows have none."""


def open_media(
    config: Config, model: ModelFolder, rows: Rows, tokenizer: Any, notes: list[str]
) -> OpenedMedia:
    """Return the model with its towers, if rows have media.

    Raises ConfigError, and DataError for an item that has changed.
    """
    model = with_towers(config, model, rows, notes)
    if model.decoder.towers is None:
        return OpenedMedia(model=model)
    assert isinstance(rows, TrainingRows)
    counted = optional.media_shape.counted_media(rows)
    item = rows.media_store(tokenizer).read(counted.largest)
    shape = optional.media_shape.media_shape(model.decoder, counted, item)
    return OpenedMedia(model=model, shape=shape)


def with_towers(config: Config, model: ModelFolder, rows: Rows, notes: list[str]) -> ModelFolder:
    """Return the model of a run, with its towers if rows have media. Raises ConfigError."""
    asked, decoder = config.model.media, model.decoder
    if not decoder.carried:
        if asked != "auto":
            raise ConfigError(
                f"model.media is {asked}, but a {decoder.config.model_type} has no towers for "
                "images or sound. Remove the key."
            )
        return model
    if isinstance(rows, TrainingRows) and rows.media is not None:
        if config.loss.teacher is not None:
            raise ConfigError(
                "loss.teacher: rows with images or sound are not scored by a teacher yet. Remove "
                "these rows, or train without a teacher."
            )
        decoder = _with_media(config, model)
        notes.append(_trained_note(decoder, len(rows.media_digests)))
    elif asked != "auto":
        notes.append(f"model.media is {asked}, but no row has images or sound: towers stay as is")
    # Groups may be of towers: only now it is known whether they match.
    notes += group_notes(config, decoder)
    return replace(model, decoder=decoder)


def media_training(config: Config, decoder: Decoder) -> MediaTraining:
    """Return what is trained of towers. Raises ConfigError where that cannot be."""
    asked = config.model.media
    if decoder.adapters is not None:
        if asked not in ("auto", "frozen"):
            raise ConfigError(
                f"model.media is {asked}: with adapters, towers and projectors stay as they are. "
                "Remove it, or train without lora."
            )
        return "frozen"
    return "projector" if asked == "auto" else asked


def _with_media(config: Config, model: ModelFolder) -> Decoder:
    before, settings = model.decoder, config.model
    made = build_decoder(
        parse_config(model.config_json),
        settings.dtype,
        settings.frozen,
        None if settings.attn == "auto" else settings.attn,
        None if before.adapters is None else before.adapters.lora,
        media_training(config, before),
    )
    blocks = (made.blocks[0], *before.blocks[1:])  # under adapters layers have the form of the base
    return replace(made, blocks=blocks, eos_token_ids=before.eos_token_ids)


def _trained_note(decoder: Decoder, num_items: int) -> str:
    text = set(decoder.model.get_decoder().state_dict())
    found = [
        param
        for param in decoder.blocks[0].params
        if param.trained and not any(param.name.endswith(name) for name in text)
    ]
    count = sum(param.num_elements for param in found)
    what = f"{count:,} params of towers and projectors are trained"
    if not found:
        what = "towers and projectors are frozen"
    return f"media: {num_items:,} items; {what} (model.media)"

"""Rows with media: the model gets its towers, and what frozen towers give is computed ahead.

Whether rows have media is known when they have been read, so the model was opened without towers
until then. A run without media trains as if there were none, whatever model.media says.

Laws (tests/run/opening/test_towers.py)
    1. A run whose rows have media trains what model.media says, and tells so.
    2. A resumed run, whose outputs of towers are there or are gone, has the bits of one that ran
       through.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from megatrain.config import Config
from megatrain.data.training_rows import TrainingRows
from megatrain.devices.device import Device
from megatrain.disk.hf.model import ModelFolder
from megatrain.errors import ConfigError, listing
from megatrain.hub import find_model
from megatrain.models.build import build_decoder
from megatrain.models.config_json import parse_config
from megatrain.models.decoder import Decoder
from megatrain.planning.model.shapes import MediaShape
from megatrain.ranks.ranks import Ranks
from megatrain.run.opening import optional
from megatrain.run.opening.recipe import group_notes
from megatrain.run.opening.resumption import OpenedCheckpoint
from megatrain.run.opening.training_data import TrainingData
from megatrain.text import duration, size

if TYPE_CHECKING:
    from megatrain.data.prompts import Prompts
    from megatrain.disk.hf.tower_weights import TowerWeights
    from megatrain.models.towers import MediaTraining

Rows: TypeAlias = "TrainingRows | Prompts"


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
    before, training = model.decoder, media_training(config, model.decoder)
    if before.adapters is None:
        settings = config.model
        attn = None if settings.attn == "auto" else settings.attn
        parsed = parse_config(model.config_json)
        made = build_decoder(parsed, settings.dtype, settings.frozen, attn, media=training)
        return replace(made, end_tokens=before.end_tokens)
    towers = optional.towers.find_towers(
        before.model, [param.name for param in before.carried], training
    )
    assert towers is not None
    loose = [param.name for param in before.carried if not towers.is_inside(param.name)]
    if loose:
        raise ConfigError(
            f"the {before.config.model_type} has params beside its towers that media need "
            f"({listing(loose)}), which adapters are not trained with yet. Train without lora."
        )
    return replace(before, towers=towers)


def _trained_note(decoder: Decoder, num_items: int) -> str:
    carried = {param.name for param in decoder.carried}
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
    ahead = "" if not carried else "; the outputs of frozen towers are computed ahead, once"
    return f"media: {num_items:,} items; {what}{ahead} (model.media)"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedMedia:
    """The model of a run, with its towers if rows have media, and what frozen towers will need."""

    model: ModelFolder
    weights: TowerWeights | None = None
    """Weights of frozen towers, which have not run for all media yet; None: none is frozen."""
    shape: MediaShape | None = None
    facts: tuple[Any, ...] = ()
    """Settings that change their bits."""


def open_media(
    config: Config,
    model: ModelFolder,
    found: OpenedCheckpoint | None,
    rows: Rows,
    tokenizer: Any,
    device: Device,
    notes: list[str],
    ranks: Ranks,
) -> OpenedMedia:
    """Return the model with its towers, if rows have media. Frozen ones run for the first items.

    All ranks call it. Raises ConfigError, what `load_model` does, DataError or DiskError.
    """
    model = with_towers(config, model, rows, notes)
    decoder = model.decoder
    if decoder.towers is None:
        return OpenedMedia(model=model)
    assert isinstance(rows, TrainingRows)
    counted, store = optional.media_shape.counted_media(rows), rows.media_store(tokenizer)
    try:
        if not decoder.towers.modules:
            largest = [(store.read(counted.largest), counted.items[counted.largest])]
            shape = optional.media_shape.media_shape(decoder, counted.documents, largest)
            return OpenedMedia(model=model, shape=shape)
        dtype, attn = config.model.dtype, config.model.attn
        weights = optional.tower_weights.TowerWeights(
            _folder(config, model, found, ranks),
            decoder,
            dtype,
            None if attn == "auto" else attn,
            model.quantization,
        )
        facts, examined = (dtype, attn), counted.examined()
        outputs, computed = optional.tower_outputs.compute_outputs(
            examined, store.read, weights, device, ranks, facts=facts
        )
        ahead = weights.bytes_ahead(store.read(counted.largest))
    finally:
        store.close()
    cached = counted.extrapolated({one: outputs.path(one).stat().st_size for one in examined})
    if computed is not None:
        each = computed.seconds / computed.items
        per_token = each * len(examined) / sum(counted.items[one] for one in examined)
        took = duration(per_token * counted.tokens / len(outputs.makers))
        notes.append(
            f"towers: outputs for {counted.num_items:,} media take about {took}, once, and "
            f"{size(cached)} of the cache"
        )
    items = [(outputs.read(digest), counted.items[digest]) for digest in examined]
    shape = replace(
        optional.media_shape.media_shape(decoder, counted.documents, items),
        tower_bytes=weights.num_bytes,
        ahead_bytes=ahead,
        cached_bytes=cached,
    )
    return OpenedMedia(model=model, weights=weights, shape=shape, facts=facts)


def give_media(
    media: OpenedMedia, data: TrainingData, tokenizer: Any, device: Device, ranks: Ranks
) -> None:
    """Let steps read the media of rows as frozen towers give them, which run now, if there are any.

    All ranks call it. Raises DataError, DiskFull or DiskError.
    """
    if media.weights is None:  # towers run in the step, or there are none
        return
    rows = data.rows
    store = rows.media_store(tokenizer)
    try:
        outputs, _ = optional.tower_outputs.compute_outputs(
            rows.media_digests, store.read, media.weights, device, ranks, facts=media.facts
        )
        data.take_media(outputs.read)
    finally:
        store.close()


def _folder(
    config: Config, model: ModelFolder, found: OpenedCheckpoint | None, ranks: Ranks
) -> Path:
    """Return the folder that has the towers: the model's, or a checkpoint that carries them."""
    if found is not None and model.decoder.adapters is None:
        return found.model.source
    name, revision = config.model.name_or_path, config.model.revision
    return ranks.once_per_host(lambda: find_model(name, revision)).folder

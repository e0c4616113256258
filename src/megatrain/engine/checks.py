"""What an engine refuses, with the reason, before it takes any memory, if that is known."""

from __future__ import annotations

from megatrain.devices.device import Device
from megatrain.errors import ConfigError
from megatrain.memory.kinds import kinds_on_disk
from megatrain.memory.store import Store
from megatrain.models.decoder import Decoder
from megatrain.models.template import Template
from megatrain.ranks.ranks import Ranks
from megatrain.step.settings import StepSettings


def check_possible(decoder: Decoder, device: Device, settings: StepSettings) -> None:
    """Raise ConfigError for what the device or the model cannot do."""
    router_aux_loss = settings.router_aux_loss
    if settings.gather_embedding and not device.own_memory:
        raise ConfigError("gather_embedding needs a device with its own memory")
    num_tokens = decoder.model.get_output_embeddings().weight.shape[0]
    if settings.head_pieces > 1 and decoder.tied:
        raise ConfigError(
            f"head_pieces is {settings.head_pieces}: the head of this model reads the embedding's "
            "table, whose gradient is one sum and cannot leave in pieces"
        )
    if not 1 <= settings.head_pieces <= num_tokens:
        raise ConfigError(
            f"head_pieces is {settings.head_pieces}, must be between 1 and the {num_tokens} tokens "
            "of the vocabulary"
        )
    num_layers = len(decoder.layers)
    if not 0 <= settings.kept_layers <= num_layers:
        raise ConfigError(
            f"kept_layers is {settings.kept_layers}, must be between 0 and the {num_layers} layers "
            "of the model"
        )
    if settings.kept_layers and settings.tile_tokens is not None:
        raise ConfigError(
            f"kept_layers is {settings.kept_layers} and tile_tokens {settings.tile_tokens}: layers "
            "run over tiles to hold less, and compute each tile again. Set one of the two."
        )
    if router_aux_loss and decoder.balancing is None:
        raise ConfigError(
            f"router_aux_loss is {router_aux_loss:g}: the code of {decoder.config.model_type} "
            "has no load-balancing loss, or none that can be computed layer by layer"
        )


def check_pieces(template: Template, settings: StepSettings) -> None:
    """Raise ConfigError if the model needs all logits at once, and they are to go in pieces."""
    if settings.head_pieces > 1 and not template.scores_by_element:
        raise ConfigError(
            f"head_pieces is {settings.head_pieces}: what {template.model.config.model_type} does "
            "to its logits needs all of them at once, so the vocabulary cannot go in pieces"
        )


def check_ranks(store: Store, device: Device, settings: StepSettings, ranks: Ranks) -> None:
    """Raise ConfigError for what cannot be divided among ranks."""
    if store.layout.owner != ranks.owner:
        raise ConfigError(
            f"the store has the part of {store.layout.owner}, and the engine is {ranks.owner}"
        )
    if ranks.owner.is_alone:
        return
    if not device.copying:
        raise ConfigError("ranks gather weights into slots: the device must be one that copies")
    if settings.gather_embedding:
        raise ConfigError("gather_embedding: the table is divided among ranks")


def check_tier(store: Store, settings: StepSettings) -> None:
    """Raise ConfigError unless the store has on disk what the settings say."""
    planned = kinds_on_disk(store.kinds, settings.tier)
    if store.on_disk != planned:
        found, wanted = (
            ", ".join(map(str, kinds)) or "nothing" for kinds in (store.on_disk, planned)
        )
        raise ConfigError(
            f"the store has {found} on disk, but StepSettings.tier is {settings.tier!r}: it needs "
            f"{wanted} there"
        )

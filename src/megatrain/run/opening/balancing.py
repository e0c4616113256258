"""How much the balance of experts counts: `train.router_aux_loss` for the model at hand."""

from __future__ import annotations

from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.models.decoder import Decoder

KEY = "train.router_aux_loss"


def router_aux_loss(config: Config, decoder: Decoder) -> float:
    """Return the coefficient of the load-balancing loss.

    Raises ConfigError where such a loss is asked for and the model's code has none that we know.
    """
    wanted, own, family = config.train.router_aux_loss, decoder.balancing, decoder.config.model_type
    if own is None and decoder.asks_balancing and isinstance(wanted, str):
        raise ConfigError(
            f"config.json sets output_router_logits, but the load-balancing loss of {family} has "
            f"an unusual form and is not supported. Set {KEY} to 0 to train without it."
        )
    if isinstance(wanted, str):
        counts = decoder.asks_balancing or wanted == "model"
        return own.coefficient if own is not None and counts else 0.0
    if wanted and own is None:
        raise ConfigError(
            f"{KEY} is {wanted:g}: transformers' code of {family} has no load-balancing loss, or "
            "one of an unusual form. Remove the key."
        )
    return wanted


def balancing_note(config: Config, decoder: Decoder) -> str | None:
    """Return a note on the choice made for the user; None if there was no choice."""
    own = decoder.balancing
    if own is None or not isinstance(config.train.router_aux_loss, str):
        return None
    coefficient = router_aux_loss(config, decoder)
    if coefficient:
        return f"experts are balanced: loss + {coefficient:g} x aux_loss is minimised ({KEY})"
    return (
        "experts are not balanced: the model's config.json does not set output_router_logits. "
        f"{KEY}: {own.coefficient:g} would add the model's own loss."
    )

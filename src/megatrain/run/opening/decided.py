"""What `auto` becomes before the plan: packing by the model, the learning rate by the method.

Both are part of a run's recipe: config.yaml and checkpoints have the choice, and a resumed run
keeps it, whatever a later version would choose.

The rates are usual ones to start from. 1e-5 suits fine-tuning of all params. TRL has 1e-6 for
every preference loss (DPOConfig, KTOConfig, ORPOConfig and CPOConfig, which has SimPO), where the
paper of SimPO searches 3e-7 to 1e-6; and ten times the rate of full training for adapters.

Laws (tests/run/opening/test_decided.py)
    1. A config of a model and rows opens and trains in every family, packed where documents are
       kept apart, and the user is told where they are not.
    2. A resumed run has the packing and the peak rate it began with.
"""

from __future__ import annotations

from megatrain.config import Config
from megatrain.models.decoder import Decoder
from megatrain.models.isolation import check_packing, packing_family, why_mixed
from megatrain.run.opening.resumption import OpenedCheckpoint

FINE_TUNING_RATE = 1e-5
PREFERENCE_RATE = 1e-6
ADAPTER_RATES = {FINE_TUNING_RATE: 1e-4, PREFERENCE_RATE: 1e-5}
"""The rate of adapters in place of that of all params."""


def decide(
    config: Config,
    decoder: Decoder,
    found: OpenedCheckpoint | None,
    notes: list[str],
    *,
    own_loss: bool = False,
) -> Config:
    """Return the config without `auto` for packing and learning rate; choices become `notes`.

    `own_loss`: the program brings the loss. Raises ConfigError if rows are packed that the model
    would mix.
    """
    family, attn = packing_family(decoder.config), config.model.attn
    mixed = why_mixed(family, attn)
    if found is not None:
        packing, rate = found.known.packing, found.known.peak_rate
    else:
        packing, (rate, method) = mixed is None, usual_rate(config, own_loss=own_loss)
        if config.data.packing == "auto" and mixed is not None:
            notes.append(f"packing: auto is off, so each row is one document: {mixed}")
        if config.optim.learning_rate == "auto":
            notes.append(
                f"learning rate: auto is {rate:g}, the usual one for {method}; "
                "optim.learning_rate sets another"
            )
    config = config.decided(packing=packing, learning_rate=rate)
    if config.packs:
        check_packing(family, attn)
    return config


def usual_rate(config: Config, *, own_loss: bool = False) -> tuple[float, str]:
    """Return the learning rate that is usual for a run's method, and the method in words."""
    compares = config.loss.preferences is not None and not own_loss
    rate = PREFERENCE_RATE if compares else FINE_TUNING_RATE
    method = config.loss.name if compares else "a loss of your own" if own_loss else "fine-tuning"
    if config.lora.rank is None and config.lora.path is None:
        return rate, f"{method} of all params" if not own_loss else method
    return ADAPTER_RATES[rate], f"{method} with adapters"

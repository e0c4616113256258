"""The recipe of a run: loss, learning rate, optimizer, packing and balance of experts.

`auto` is decided before the plan: packing by the model, the learning rate by the method. Both
choices stand in config.yaml and in checkpoints, and a resumed run keeps them, whatever a later
version would choose.

The rates are usual ones to start from. 1e-5 suits fine-tuning of all params. TRL has 1e-6 for
every preference loss (DPOConfig, KTOConfig, ORPOConfig and CPOConfig, which has SimPO), where the
paper of SimPO searches 3e-7 to 1e-6, and for rewards (GRPOConfig); and ten times the rate of full
training for adapters.

Laws (tests/run/opening/test_decided.py)
    1. A config of a model and rows opens and trains in every family, packed where documents are
       kept apart, and the user is told where they are not.
    2. A resumed run has the packing and the peak rate it began with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatrain.config import Config
from megatrain.config.sections import COMPARED, LossName
from megatrain.data.training_rows import TrainingRows
from megatrain.devices.device import Device
from megatrain.disk.hf.model import HostModel
from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError
from megatrain.losses.loss import Loss, NextToken, SmoothedNextToken
from megatrain.models.decoder import Decoder
from megatrain.models.isolation import check_packing, packing_family, why_mixed
from megatrain.optim.adamw import AdamW
from megatrain.optim.groups import ParamGroup, grouped
from megatrain.optim.learning_rate import LRSchedule
from megatrain.optim.optimizer import HostOptimizer
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run.opening import optional
from megatrain.run.opening.resumption import OpenedCheckpoint
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.data.prompts import Prompts

LOSSES: dict[LossName, Callable[[], type[Loss]]] = {
    "next_token": lambda: NextToken,
    "dpo": lambda: optional.preferences.Dpo,
    "ipo": lambda: optional.preferences.Ipo,
    "orpo": lambda: optional.preferences.Orpo,
    "simpo": lambda: optional.preferences.Simpo,
    "apo_zero": lambda: optional.preferences.ApoZero,
    "robust": lambda: optional.preferences.Robust,
    "kto": lambda: optional.preferences.Kto,
    "distill": lambda: optional.distillation.Distill,
}
FINE_TUNING_RATE = 1e-5
PREFERENCE_RATE = 1e-6
ADAPTER_RATES = {FINE_TUNING_RATE: 1e-4, PREFERENCE_RATE: 1e-5}
"""The rate of adapters in place of that of all params."""
_AUX_KEY = "train.router_aux_loss"
_COLUMNS = {"pairs": "prompt, chosen, rejected", "kto": "prompt, completion, label"}


def decide(
    config: Config,
    decoder: Decoder,
    found: OpenedCheckpoint | None,
    notes: list[str],
    *,
    own_loss: bool = False,
) -> Config:
    """Return the config without `auto` for packing and learning rate; choices become `notes`.

    A run that continues keeps both, and the precision of its states. `own_loss`: the program brings
    the loss. Raises ConfigError if rows are packed that the model would mix.
    """
    family, attn = packing_family(decoder.config), config.model.attn
    mixed = why_mixed(family, attn)
    if found is not None:
        packing, rate, state = found.known.packing, found.known.peak_rate, found.known.state_dtype
    else:
        state = None
        packing = mixed is None and not config.loss.draws
        rate, method = usual_rate(config, own_loss=own_loss)
        if config.data.packing == "auto" and mixed is not None and not config.loss.draws:
            notes.append(f"packing: auto is off, so each row is one document: {mixed}")
        if config.optim.learning_rate == "auto":
            notes.append(
                f"learning rate: auto is {rate:g}, the usual one for {method}; "
                "optim.learning_rate sets another"
            )
    config = config.decided(packing=packing, learning_rate=rate, state=state)
    if not decoder.carried:  # else they may be of towers, which a run has if its rows have media
        notes += group_notes(config, decoder)
    if config.packs:
        check_packing(family, attn)
    return config


def usual_rate(config: Config, *, own_loss: bool = False) -> tuple[float, str]:
    """Return the learning rate that is usual for a run's method, and the method in words."""
    compares = config.loss.name not in ("next_token", "distill") and not own_loss
    rate = PREFERENCE_RATE if compares else FINE_TUNING_RATE
    method = config.loss.name if compares else "a loss of your own" if own_loss else "fine-tuning"
    if config.lora.rank is None and config.lora.path is None:
        return rate, f"{method} of all params" if not own_loss else method
    return ADAPTER_RATES[rate], f"{method} with adapters"


def router_aux_loss(config: Config, decoder: Decoder) -> float:
    """Return the coefficient of the load-balancing loss.

    Raises ConfigError where such a loss is asked for and the model's code has none that we know.
    """
    wanted, own, family = config.train.router_aux_loss, decoder.balancing, decoder.config.model_type
    if own is None and decoder.asks_balancing and isinstance(wanted, str):
        raise ConfigError(
            f"config.json sets output_router_logits, but the load-balancing loss of {family} has "
            f"an unusual form and is not supported. Set {_AUX_KEY} to 0 to train without it."
        )
    if isinstance(wanted, str):
        counts = decoder.asks_balancing or wanted == "model"
        return own.coefficient if own is not None and counts else 0.0
    if wanted and own is None:
        raise ConfigError(
            f"{_AUX_KEY} is {wanted:g}: transformers' code of {family} has no load-balancing loss, "
            "or one of an unusual form. Remove the key."
        )
    return wanted


def balancing_note(config: Config, decoder: Decoder) -> str | None:
    """Return a note on the choice made for the user; None if there was no choice."""
    own = decoder.balancing
    if own is None or not isinstance(config.train.router_aux_loss, str):
        return None
    coefficient = router_aux_loss(config, decoder)
    if coefficient:
        return f"experts are balanced: loss + {coefficient:g} x aux_loss is minimized ({_AUX_KEY})"
    return (
        "experts are not balanced: the model's config.json does not set output_router_logits. "
        f"{_AUX_KEY}: {own.coefficient:g} would add the model's own loss."
    )


def require_fitting(config: Config, rows: TrainingRows | Prompts) -> None:
    """Raise ConfigError if the loss cannot be computed on such rows."""
    if not isinstance(rows, TrainingRows):
        return
    name, found = config.loss.name, rows.preferences
    wanted = COMPARED.get(name)
    if wanted == found:
        return
    source = rows.sources[0].card
    fitting = " or ".join(loss for loss in LOSSES if COMPARED.get(loss) == found)
    repair = (
        ""
        if wanted is None
        else f"Give rows of format {wanted} ({_COLUMNS[wanted]}; data.train: "
        f"{{path: ..., format: {wanted}}}), or "
    )
    raise ConfigError(
        f"loss.name is {name}, and {source['source']} is read as {source['format']}. {repair}"
        f"{'set' if repair else 'Set'} loss.name to {fitting}."
    )


def chosen_loss(config: Config) -> Loss:
    """Return the loss of a run; parameters that the config does not give are the loss's own."""
    loss = config.loss
    names = ["beta", "label_smoothing", "gamma", "sft"]
    names += ["desirable_weight", "undesirable_weight", "temperature", "divergence"]
    given = {name: value for name in names if (value := getattr(loss, name)) is not None}
    if loss.name == "next_token" or loss.draws:  # TRL computes losses on rewards
        return SmoothedNextToken(**given) if any(given.values()) else NextToken()
    return LOSSES[loss.name]()(**given)


def learning_rate(config: Config, num_steps: int) -> LRSchedule:
    """Return the learning rate of a run of `num_steps`."""
    optim = config.optim
    assert optim.learning_rate != "auto", "it was decided when the run was opened"
    return LRSchedule(
        peak=optim.learning_rate,
        shape=optim.schedule,
        num_steps=num_steps,
        warmup=optim.warmup,
        decay=optim.decay,
        final_fraction=optim.final_fraction,
    )


def param_groups(config: Config) -> tuple[ParamGroup, ...]:
    """Return the groups of a run whose learning rate is decided, each rate as a factor on it."""
    peak = config.optim.learning_rate
    assert peak != "auto", "it was decided when the run was opened"
    return tuple(
        ParamGroup(
            params=group.params,
            lr_ratio=group.times if group.learning_rate is None else group.learning_rate / peak,
            weight_decay=group.weight_decay,
        )
        for group in config.optim.groups
    )


def group_notes(config: Config, decoder: Decoder) -> list[str]:
    """Return a note on each group: its params, rate and decay. Raises ConfigError."""
    peak, groups = config.optim.learning_rate, param_groups(config)
    assert peak != "auto"
    found = grouped(groups, decoder.params)
    notes = []
    for group in groups:
        count = sum(one is group for one in found.values())
        decay = "" if group.weight_decay is None else f", decay {group.weight_decay:g}"
        notes.append(
            f"group {', '.join(group.params)}: {count} params, peak rate {group.lr_ratio * peak:g}"
            f" ({group.lr_ratio:g} times the others'){decay}"
        )
    return notes


def _optimizer(
    config: Config, settings: StepSettings, device: Device, num_steps: int
) -> HostOptimizer:
    optim = config.optim
    given: dict[str, Any] = {
        "learning_rate": learning_rate(config, num_steps).rate,
        "betas": optim.betas,
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
        "groups": param_groups(config),
        "max_grad_norm": config.train.max_grad_norm,
        "num_threads": device.placement.update_threads,
        "state": settings.state,
        "seed": config.train.seed,
    }
    if optim.name == "muon":
        return optional.muon.Muon(**given, momentum=optim.momentum)
    return AdamW(**given)


def make_engine(
    config: Config,
    settings: StepSettings,
    home: HostModel,
    device: Device,
    num_steps: int,
    ranks: Ranks = ALONE,
    loss: Loss | None = None,
) -> Engine:
    """Return the engine that trains `home` by the config, as one of `ranks`.

    `loss` is one that the program brings; None: the config chooses it.
    """
    return Engine(
        home.decoder,
        home.store,
        optimizer=_optimizer(config, settings, device, num_steps),
        loss=loss or chosen_loss(config),
        settings=settings,
        device=device,
        ranks=ranks,
        reference=home.reference,
        trace=True,
    )

"""The model of a run and its engine, assembled from the opened parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatrain.config import Config
from megatrain.config.loss_settings import COMPARED, LossName
from megatrain.data.chat.choice import exported_template
from megatrain.data.training_rows import TrainingRows
from megatrain.devices.device import Device
from megatrain.disk.hf.exported import require_as_written
from megatrain.disk.hf.growth import Growth
from megatrain.disk.hf.model import HostModel, ModelFolder
from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError
from megatrain.hub import find_model
from megatrain.losses.kto import Kto
from megatrain.losses.loss import Loss, NextToken
from megatrain.losses.preferences import Dpo, Ipo, Orpo, Simpo
from megatrain.memory.kinds import Kind, kinds_on_disk
from megatrain.memory.placement import UNPLACED, Placement
from megatrain.memory.tier.scratch_file import Scratch
from megatrain.models.patterns import check_patterns
from megatrain.optim.adamw import AdamW
from megatrain.optim.learning_rate import LearningRate
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run.opening.adapting import adapters_of, require_no_adapters, require_same_base
from megatrain.run.opening.balancing import router_aux_loss
from megatrain.run.opening.resumption import (
    LoadedCheckpoint,
    OpenedCheckpoint,
    kinds_of,
    read_model,
    resume,
)
from megatrain.step.settings import StepSettings

OPTIMIZERS = {"adamw": AdamW}
LOSSES: dict[LossName, type[Loss]] = {
    "next_token": NextToken,
    "dpo": Dpo,
    "ipo": Ipo,
    "orpo": Orpo,
    "simpo": Simpo,
    "kto": Kto,
}
_COLUMNS = {"pairs": "prompt, chosen, rejected", "kto": "prompt, completion, label"}


def find_source(config: Config, found: OpenedCheckpoint | None, ranks: Ranks = ALONE) -> Path:
    """Return the folder with the run's config.json and tokenizer, fetched if it is on the Hub."""
    if found is not None:
        return found.model.source
    name, revision = config.model.name_or_path, config.model.revision
    return ranks.once_per_host(lambda: find_model(name, revision, "tokenizer")).folder


def open_model(
    config: Config, source: Path, growth: Growth | None, found: OpenedCheckpoint | None
) -> ModelFolder:
    """Return the model of a run without its weights, checked against the config."""
    if found is None:
        require_no_adapters(config, source)
        rope, (lora, start) = config.model.rope, adapters_of(config)
        positions = None if rope is None else rope.parameters()
        model = read_model(config, source, growth, positions, lora, start)
    else:
        model = found.model
    check_patterns("optim.no_decay", config.optim.no_decay, model.decoder.names)
    router_aux_loss(config, model.decoder)
    return model


def load_home(
    config: Config,
    settings: StepSettings,
    model: ModelFolder,
    tokenizer: Any,
    found: OpenedCheckpoint | None,
    ranks: Ranks = ALONE,
    placement: Placement = UNPLACED,
) -> tuple[HostModel, LoadedCheckpoint | None]:
    """Return the model with its tensors, and the checkpoint that has them, if it is one.

    A rank has only the part that it owns. Everything else is cheaper to find wanting. Folders that
    have hashes beside them are compared with these first. Raises what `load_model` does.
    """
    kinds, resumed = kinds_of(config, settings), None
    scratch = scratch_of(config, settings, kinds)
    if found is None:
        name, start = config.model.name_or_path, config.lora.path
        source = ranks.once_per_host(lambda: find_model(name, config.model.revision)).folder
        _require_as_written(ranks, source, *([] if start is None else [Path(start)]))
        home = ranks.long_work(lambda: model.load(kinds, scratch, ranks.owner, placement))
    else:
        home = _unfilled(config, kinds, model, found, scratch, ranks, placement)
        try:
            resumed = resume(found.among, config, home, ranks)
        except BaseException:
            home.store.close()
            raise
    template = exported_template(tokenizer, config.data.chat_template)
    return replace(home, carried={**home.carried, **template}), resumed


def _unfilled(
    config: Config,
    kinds: tuple[Kind, ...],
    model: ModelFolder,
    found: OpenedCheckpoint,
    scratch: Scratch | None,
    ranks: Ranks,
    placement: Placement,
) -> HostModel:
    """Return the model with what a checkpoint does not have of it: the base under adapters."""
    if model.decoder.adapters is None:
        return model.empty(kinds, scratch, ranks.owner, placement)
    name, revision = config.model.name_or_path, config.model.revision
    base = ranks.once_per_host(lambda: find_model(name, revision)).folder
    require_same_base(base, found.known.source_mark)
    _require_as_written(ranks, base)
    return ranks.long_work(lambda: model.load(kinds, scratch, ranks.owner, placement, base=base))


def _require_as_written(ranks: Ranks, *folders: Path) -> None:
    """Compare folders that have hashes beside them with these, once on each host."""

    def check() -> None:
        for folder in folders:
            require_as_written(folder, shown=ranks.leads)

    ranks.on_each_host(check)


def scratch_of(config: Config, settings: StepSettings, kinds: tuple[Kind, ...]) -> Scratch | None:
    """Return where the plan's disk tier goes; None if the run has none."""
    folder, most = config.memory.disk, config.memory.disk_bytes
    on_disk = kinds_on_disk(kinds, settings.tier)
    if folder is None or not on_disk:
        return None
    most_bytes = most if isinstance(most, int) else None
    return Scratch(folder=Path(folder), kinds=on_disk, most_bytes=most_bytes)


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
    optim = config.optim
    optimizer = OPTIMIZERS[optim.name](
        learning_rate=learning_rate(config, num_steps).rate,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        no_decay=optim.no_decay,
        max_grad_norm=config.train.max_grad_norm,
        num_threads=device.placement.update_threads,
        state=settings.state,
        seed=config.train.seed,
    )
    return Engine(
        home.decoder,
        home.store,
        optimizer=optimizer,
        loss=loss or chosen_loss(config),
        settings=settings,
        device=device,
        ranks=ranks,
        trace=True,
    )


def chosen_loss(config: Config) -> Loss:
    """Return the loss of a run; parameters that the config does not give are the loss's own."""
    loss = config.loss
    given = {
        "beta": loss.beta,
        "label_smoothing": loss.label_smoothing,
        "gamma": loss.gamma,
        "desirable_weight": loss.desirable_weight,
        "undesirable_weight": loss.undesirable_weight,
    }
    return LOSSES[loss.name](**{key: value for key, value in given.items() if value is not None})


def require_fitting(config: Config, rows: TrainingRows) -> None:
    """Raise ConfigError if the loss cannot be computed on such rows."""
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


def learning_rate(config: Config, num_steps: int) -> LearningRate:
    """Return the learning rate of a run of `num_steps`."""
    optim = config.optim
    assert optim.learning_rate != "auto", "it was decided when the run was opened"
    return LearningRate(
        peak=optim.learning_rate,
        shape=optim.schedule,
        num_steps=num_steps,
        warmup=optim.warmup,
        decay=optim.decay,
        final_fraction=optim.final_fraction,
    )

"""The model of a run and its engine, assembled from the opened parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatrain.config import Config
from megatrain.data.chat.choice import exported_template
from megatrain.devices.device import Device
from megatrain.disk.hf.growth import Growth
from megatrain.disk.hf.model import HostModel, ModelFolder
from megatrain.engine.engine import Engine
from megatrain.hub import find_model
from megatrain.memory.host import num_cores
from megatrain.memory.kinds import Kind, kinds_on_disk
from megatrain.memory.tier import Scratch
from megatrain.models.patterns import check_patterns
from megatrain.optim.adamw import AdamW
from megatrain.optim.learning_rate import LearningRate
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


def find_source(config: Config, found: OpenedCheckpoint | None) -> Path:
    """Return the folder with the run's config.json and tokenizer, fetched if it is on the Hub."""
    if found is not None:
        return found.model.source
    return find_model(config.model.name_or_path, config.model.revision, "tokenizer").folder


def open_model(
    config: Config, source: Path, growth: Growth | None, found: OpenedCheckpoint | None
) -> ModelFolder:
    """Return the model of a run without its weights, checked against the config."""
    if found is None:
        rope = config.model.rope
        model = read_model(config, source, growth, None if rope is None else rope.parameters())
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
) -> tuple[HostModel, LoadedCheckpoint | None]:
    """Return the model with its tensors, and the checkpoint that has them, if it is one.

    Everything else is cheaper to find wanting.
    """
    kinds, resumed = kinds_of(config, settings), None
    scratch = scratch_of(config, settings, kinds)
    if found is None:
        find_model(config.model.name_or_path, config.model.revision)
        home = model.load(kinds, scratch)
    else:
        home = model.empty(kinds, scratch)
        try:
            resumed = resume(found.among, config, home)
        except BaseException:
            home.store.close()
            raise
    template = exported_template(tokenizer, config.data.chat_template)
    return replace(home, carried={**home.carried, **template}), resumed


def scratch_of(config: Config, settings: StepSettings, kinds: tuple[Kind, ...]) -> Scratch | None:
    """Return where the plan's disk tier goes; None if the run has none."""
    folder, most = config.memory.disk, config.memory.disk_bytes
    on_disk = kinds_on_disk(kinds, settings.tier)
    if folder is None or not on_disk:
        return None
    most_bytes = most if isinstance(most, int) else None
    return Scratch(folder=Path(folder), kinds=on_disk, most_bytes=most_bytes)


def make_engine(
    config: Config, settings: StepSettings, home: HostModel, device: Device, num_steps: int
) -> Engine:
    """Return the engine that trains `home` by the config."""
    optim = config.optim
    optimizer = OPTIMIZERS[optim.name](
        learning_rate=learning_rate(config, num_steps).rate,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        no_decay=optim.no_decay,
        max_grad_norm=config.train.max_grad_norm,
        num_threads=max(1, num_cores() // 2),
        state=settings.state,
        seed=config.train.seed,
    )
    return Engine(
        home.decoder,
        home.store,
        optimizer=optimizer,
        settings=settings,
        device=device,
        trace=True,
    )


def learning_rate(config: Config, num_steps: int) -> LearningRate:
    """Return the learning rate of a run of `num_steps`."""
    optim = config.optim
    return LearningRate(
        peak=optim.learning_rate,
        shape=optim.schedule,
        num_steps=num_steps,
        warmup=optim.warmup,
        decay=optim.decay,
        final_fraction=optim.final_fraction,
    )

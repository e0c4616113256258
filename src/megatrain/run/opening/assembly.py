"""The engine of a run, put together from its settings."""

from __future__ import annotations

from megatrain.config import Config
from megatrain.devices.device import Device
from megatrain.disk.hf.model import HostModel
from megatrain.engine.engine import Engine
from megatrain.memory.host import num_cores
from megatrain.optim.adamw import AdamW
from megatrain.optim.learning_rate import LearningRate
from megatrain.run.opening.balancing import router_aux_loss
from megatrain.run.opening.resolve import Resolved
from megatrain.step.settings import StepSettings

OPTIMIZERS = {"adamw": AdamW}


def make_engine(
    config: Config, resolved: Resolved, home: HostModel, device: Device, rate: LearningRate
) -> Engine:
    """Return the engine that trains `home` as the config says."""
    optim, train = config.optim, config.train
    optimizer = OPTIMIZERS[optim.name](
        learning_rate=rate.rate,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        no_decay=optim.no_decay,
        max_grad_norm=train.max_grad_norm,
        num_threads=max(1, num_cores() // 2),
    )
    return Engine(
        home.decoder,
        home.store,
        optimizer=optimizer,
        settings=StepSettings(
            micro_batch_tokens=resolved.micro_batch_tokens,
            slots=resolved.slots,
            tape=resolved.tape,
            update=resolved.update,
            chunk_tokens=resolved.chunk_tokens,
            gather_embedding=resolved.gather_embedding,
            router_aux_loss=router_aux_loss(config, home.decoder),
            on_nonfinite=train.on_nonfinite,
            compile=train.compile,
            seed=train.seed,
        ),
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

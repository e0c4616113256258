"""TRL's trainers, and transformers' own, with the engine in place of a model in memory.

    from trl import SFTConfig, SFTTrainer
    from megatrain.integrations.trl import streamed

    trainer = streamed(SFTTrainer)(model="Qwen/Qwen3-8B", args=SFTConfig(...), train_dataset=rows)
    trainer.train()

Data, collators, callbacks, logging, arguments and the code of the loss stay theirs. Forward,
backward, optimizer, clipping, save and resume are the engine's (trainer.py).

Laws (proofs/trainers, tests/integrations)
    1. Losses of a streamed trainer are those of the trainer, within rounding.
    2. What the engine cannot honor is refused by name (arguments.py).
"""

from __future__ import annotations

from collections.abc import Callable

from megatrain.devices.device import Device
from megatrain.disk.hf.model import HostModel
from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError
from megatrain.integrations.grpo import StreamedGRPO
from megatrain.integrations.trainer import Choices, StreamedTrainer
from megatrain.losses.leaves import TokenOutputSpec
from megatrain.models.adapters.lora import LoraConfig
from megatrain.step.settings import StepSettings

WANTED: dict[str, TokenOutputSpec] = {
    "SFTTrainer": TokenOutputSpec(entropy=True, top_k=1),
    "DPOTrainer": TokenOutputSpec(entropy=True, mean_logits=True, top_k=1),
    "KTOTrainer": TokenOutputSpec(entropy=True, mean_logits=True),
    "RewardTrainer": TokenOutputSpec(top_k=1),
    "GRPOTrainer": TokenOutputSpec(entropy=True),
    "Trainer": TokenOutputSpec(),
}
"""The leaves that each trainer's loss and metrics read."""
_LIBRARIES = {"trl", "transformers"}


def streamed(
    trainer_class: type,
    *,
    settings: StepSettings | None = None,
    lora: LoraConfig | None = None,
    device: Callable[[], Device] | None = None,
    weights_folder: str | None = None,
    opened: tuple[HostModel, Engine] | None = None,
) -> type:
    """Return a subclass of a trainer that trains through the engine.

    It is used as the trainer is, with a folder or an id on the Hub as `model`. `settings` are those
    of a step; with `lora` new adapters are trained; `device` makes the engine's device, by default
    the accelerator, or the CPU if the arguments say so; weights go to vLLM (`use_vllm=True`)
    through `weights_folder`, by default /dev/shm. A run gives the model and engine that it has
    `opened`. Raises ConfigError for another trainer.
    """
    library = (one for one in trainer_class.__mro__ if one.__module__.split(".")[0] in _LIBRARIES)
    name = next(library, object).__name__
    if name not in WANTED:
        known = ", ".join(sorted(WANTED))
        raise ConfigError(f"{trainer_class.__name__} cannot be streamed, but these can: {known}.")
    choices = Choices(
        wanted=WANTED[name],
        settings=settings,
        lora=lora,
        make_device=device,
        num_labels=1 if name == "RewardTrainer" else None,
        weights_folder=weights_folder,
        opened=opened,
    )
    kind = StreamedGRPO if name == "GRPOTrainer" else StreamedTrainer
    return type(f"Streamed{trainer_class.__name__}", (kind, trainer_class), {"_choices": choices})

"""MegaTrain: full-precision training of language models larger than GPU memory, on one GPU.

Public names are imported when first used, so that `megatrain --help` answers at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatrain.version import __version__

if TYPE_CHECKING:
    from megatrain.batch import MicroBatch
    from megatrain.config import Config, load_config
    from megatrain.devices.accelerator import AcceleratorDevice, accelerator
    from megatrain.devices.device import CpuDevice
    from megatrain.disk.checkpoint.custom_loop import load_checkpoint, save_checkpoint
    from megatrain.disk.hf.model import HostModel, load_model
    from megatrain.engine.engine import Engine
    from megatrain.engine.open_step import ForwardPass
    from megatrain.engine.results import StepResult
    from megatrain.errors import MegaTrainError
    from megatrain.losses.leaves import TokenOutputs, TokenOutputSpec
    from megatrain.losses.loss import Loss, LossInputs, LossValue
    from megatrain.memory.kinds import TensorKind
    from megatrain.memory.store import clone_weights
    from megatrain.models.adapters.lora import LoraConfig
    from megatrain.optim.adamw import AdamW
    from megatrain.optim.groups import ParamGroup
    from megatrain.optim.learning_rate import LRSchedule
    from megatrain.optim.muon import Muon
    from megatrain.planning.estimate import estimate
    from megatrain.ranks.launcher import init_distributed
    from megatrain.rewards.generation import generate
    from megatrain.rewards.rollouts import Rollout
    from megatrain.run.callbacks import Callback, TrainerControl, TrainerState
    from megatrain.run.evaluation.mean_loss import EvalPrediction
    from megatrain.run.trainer import Trainer
    from megatrain.step.settings import StepSettings

_HOMES = {
    "AcceleratorDevice": "megatrain.devices.accelerator",
    "AdamW": "megatrain.optim.adamw",
    "Callback": "megatrain.run.callbacks",
    "Config": "megatrain.config",
    "TrainerControl": "megatrain.run.callbacks",
    "CpuDevice": "megatrain.devices.device",
    "Engine": "megatrain.engine.engine",
    "EvalPrediction": "megatrain.run.evaluation.mean_loss",
    "HostModel": "megatrain.disk.hf.model",
    "TensorKind": "megatrain.memory.kinds",
    "LRSchedule": "megatrain.optim.learning_rate",
    "TokenOutputs": "megatrain.losses.leaves",
    "LoraConfig": "megatrain.models.adapters.lora",
    "Loss": "megatrain.losses.loss",
    "LossInputs": "megatrain.losses.loss",
    "LossValue": "megatrain.losses.loss",
    "MegaTrainError": "megatrain.errors",
    "MicroBatch": "megatrain.batch",
    "Muon": "megatrain.optim.muon",
    "ForwardPass": "megatrain.engine.open_step",
    "ParamGroup": "megatrain.optim.groups",
    "Rollout": "megatrain.rewards.rollouts",
    "TrainerState": "megatrain.run.callbacks",
    "StepResult": "megatrain.engine.results",
    "StepSettings": "megatrain.step.settings",
    "Trainer": "megatrain.run.trainer",
    "TokenOutputSpec": "megatrain.losses.leaves",
    "accelerator": "megatrain.devices.accelerator",
    "clone_weights": "megatrain.memory.store",
    "estimate": "megatrain.planning.estimate",
    "generate": "megatrain.rewards.generation",
    "init_distributed": "megatrain.ranks.launcher",
    "load_config": "megatrain.config",
    "load_model": "megatrain.disk.hf.model",
    "load_checkpoint": "megatrain.disk.checkpoint.custom_loop",
    "save_checkpoint": "megatrain.disk.checkpoint.custom_loop",
}
__all__ = [
    "AcceleratorDevice",
    "AdamW",
    "Callback",
    "Config",
    "CpuDevice",
    "Engine",
    "EvalPrediction",
    "ForwardPass",
    "HostModel",
    "LRSchedule",
    "LoraConfig",
    "Loss",
    "LossInputs",
    "LossValue",
    "MegaTrainError",
    "MicroBatch",
    "Muon",
    "ParamGroup",
    "Rollout",
    "StepResult",
    "StepSettings",
    "TensorKind",
    "TokenOutputSpec",
    "TokenOutputs",
    "Trainer",
    "TrainerControl",
    "TrainerState",
    "__version__",
    "accelerator",
    "clone_weights",
    "estimate",
    "generate",
    "init_distributed",
    "load_checkpoint",
    "load_config",
    "load_model",
    "save_checkpoint",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'megatrain' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

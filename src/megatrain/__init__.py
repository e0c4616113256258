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
    from megatrain.devices.accelerator import Accelerator, accelerator
    from megatrain.devices.device import CpuDevice
    from megatrain.disk.checkpoint.own_loop import resume_loop, save_loop
    from megatrain.disk.hf.model import HostModel, load_model
    from megatrain.engine.engine import Engine
    from megatrain.engine.open_step import OpenStep
    from megatrain.engine.results import StepResult
    from megatrain.errors import MegaTrainError
    from megatrain.losses.leaves import Leaves, Wanted
    from megatrain.losses.loss import Loss, LossInputs, LossValue
    from megatrain.memory.kinds import Kind
    from megatrain.memory.store import copy_of_weights
    from megatrain.models.adapters.lora import Lora
    from megatrain.optim.adamw import AdamW
    from megatrain.optim.groups import ParamGroup
    from megatrain.optim.learning_rate import LearningRate
    from megatrain.optim.muon import Muon
    from megatrain.planning.estimate import estimate
    from megatrain.ranks.launcher import join_ranks
    from megatrain.rewards.generation import generate
    from megatrain.rewards.rollouts import Rollout
    from megatrain.run.callbacks import Callback, Control, RunProgress
    from megatrain.run.evaluation.mean_loss import EvalTokens
    from megatrain.run.trainer import Trainer
    from megatrain.step.settings import StepSettings

_HOMES = {
    "Accelerator": "megatrain.devices.accelerator",
    "AdamW": "megatrain.optim.adamw",
    "Callback": "megatrain.run.callbacks",
    "Config": "megatrain.config",
    "Control": "megatrain.run.callbacks",
    "CpuDevice": "megatrain.devices.device",
    "Engine": "megatrain.engine.engine",
    "EvalTokens": "megatrain.run.evaluation.mean_loss",
    "HostModel": "megatrain.disk.hf.model",
    "Kind": "megatrain.memory.kinds",
    "LearningRate": "megatrain.optim.learning_rate",
    "Leaves": "megatrain.losses.leaves",
    "Lora": "megatrain.models.adapters.lora",
    "Loss": "megatrain.losses.loss",
    "LossInputs": "megatrain.losses.loss",
    "LossValue": "megatrain.losses.loss",
    "MegaTrainError": "megatrain.errors",
    "MicroBatch": "megatrain.batch",
    "Muon": "megatrain.optim.muon",
    "OpenStep": "megatrain.engine.open_step",
    "ParamGroup": "megatrain.optim.groups",
    "Rollout": "megatrain.rewards.rollouts",
    "RunProgress": "megatrain.run.callbacks",
    "StepResult": "megatrain.engine.results",
    "StepSettings": "megatrain.step.settings",
    "Trainer": "megatrain.run.trainer",
    "Wanted": "megatrain.losses.leaves",
    "accelerator": "megatrain.devices.accelerator",
    "copy_of_weights": "megatrain.memory.store",
    "estimate": "megatrain.planning.estimate",
    "generate": "megatrain.rewards.generation",
    "join_ranks": "megatrain.ranks.launcher",
    "load_config": "megatrain.config",
    "load_model": "megatrain.disk.hf.model",
    "resume_loop": "megatrain.disk.checkpoint.own_loop",
    "save_loop": "megatrain.disk.checkpoint.own_loop",
}
__all__ = [
    "Accelerator",
    "AdamW",
    "Callback",
    "Config",
    "Control",
    "CpuDevice",
    "Engine",
    "EvalTokens",
    "HostModel",
    "Kind",
    "LearningRate",
    "Leaves",
    "Lora",
    "Loss",
    "LossInputs",
    "LossValue",
    "MegaTrainError",
    "MicroBatch",
    "Muon",
    "OpenStep",
    "ParamGroup",
    "Rollout",
    "RunProgress",
    "StepResult",
    "StepSettings",
    "Trainer",
    "Wanted",
    "__version__",
    "accelerator",
    "copy_of_weights",
    "estimate",
    "generate",
    "join_ranks",
    "load_config",
    "load_model",
    "resume_loop",
    "save_loop",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'megatrain' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

"""MegaTrain: full-precision training of language models larger than GPU memory, on one GPU.

Public names are imported when first used, so that `megatrain --help` answers at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatrain.version import __version__

if TYPE_CHECKING:
    from megatrain.config import Config, load_config
    from megatrain.devices.accelerator import Accelerator, accelerator
    from megatrain.devices.device import CpuDevice
    from megatrain.disk.hf.model import HostModel, load_model
    from megatrain.engine.batch import MicroBatch, StepResult
    from megatrain.engine.engine import Engine
    from megatrain.errors import MegaTrainError
    from megatrain.memory.kinds import Kind
    from megatrain.optim.adamw import AdamW
    from megatrain.optim.learning_rate import LearningRate
    from megatrain.planning.estimate import estimate
    from megatrain.run.trainer import Trainer
    from megatrain.step.settings import StepSettings

_HOMES = {
    "Accelerator": "megatrain.devices.accelerator",
    "AdamW": "megatrain.optim.adamw",
    "Config": "megatrain.config",
    "CpuDevice": "megatrain.devices.device",
    "Engine": "megatrain.engine.engine",
    "HostModel": "megatrain.disk.hf.model",
    "Kind": "megatrain.memory.kinds",
    "LearningRate": "megatrain.optim.learning_rate",
    "MegaTrainError": "megatrain.errors",
    "MicroBatch": "megatrain.engine.batch",
    "StepResult": "megatrain.engine.batch",
    "StepSettings": "megatrain.step.settings",
    "Trainer": "megatrain.run.trainer",
    "accelerator": "megatrain.devices.accelerator",
    "estimate": "megatrain.planning.estimate",
    "load_config": "megatrain.config",
    "load_model": "megatrain.disk.hf.model",
}
__all__ = [
    "Accelerator",
    "AdamW",
    "Config",
    "CpuDevice",
    "Engine",
    "HostModel",
    "Kind",
    "LearningRate",
    "MegaTrainError",
    "MicroBatch",
    "StepResult",
    "StepSettings",
    "Trainer",
    "__version__",
    "accelerator",
    "estimate",
    "load_config",
    "load_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'megatrain' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

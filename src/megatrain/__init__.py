"""MegaTrain: full-precision training of language models larger than GPU memory, on one GPU.

Public names are imported when first used, so that `megatrain --help` answers at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatrain.version import __version__

if TYPE_CHECKING:
    from megatrain.config import Config, load_config
    from megatrain.disk.hf import HostModel, load_model
    from megatrain.errors import MegaTrainError
    from megatrain.memory.layout import Kind
    from megatrain.optim.adamw import AdamW
    from megatrain.optim.learning_rate import LearningRate
    from megatrain.pipeline.accelerator import Accelerator, accelerator
    from megatrain.pipeline.batch import MicroBatch, StepResult
    from megatrain.pipeline.device import CpuDevice
    from megatrain.pipeline.engine import Engine
    from megatrain.planning.estimate import estimate
    from megatrain.trainer.loop import Trainer

_HOMES = {
    "Accelerator": "megatrain.pipeline.accelerator",
    "AdamW": "megatrain.optim.adamw",
    "Config": "megatrain.config",
    "CpuDevice": "megatrain.pipeline.device",
    "Engine": "megatrain.pipeline.engine",
    "HostModel": "megatrain.disk.hf",
    "Kind": "megatrain.memory.layout",
    "LearningRate": "megatrain.optim.learning_rate",
    "MegaTrainError": "megatrain.errors",
    "MicroBatch": "megatrain.pipeline.batch",
    "StepResult": "megatrain.pipeline.batch",
    "Trainer": "megatrain.trainer.loop",
    "accelerator": "megatrain.pipeline.accelerator",
    "estimate": "megatrain.planning.estimate",
    "load_config": "megatrain.config",
    "load_model": "megatrain.disk.hf",
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

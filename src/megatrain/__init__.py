"""MegaTrain: full-precision training of language models larger than GPU memory, on one GPU.

Public names are imported when first used, so that `megatrain --help` answers at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatrain.version import __version__

if TYPE_CHECKING:
    from megatrain.disk.hf import HostModel, load_model
    from megatrain.errors import MegaTrainError
    from megatrain.memory.layout import Kind

_HOMES = {
    "HostModel": "megatrain.disk.hf",
    "Kind": "megatrain.memory.layout",
    "MegaTrainError": "megatrain.errors",
    "load_model": "megatrain.disk.hf",
}
__all__ = ["HostModel", "Kind", "MegaTrainError", "__version__", "load_model"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'megatrain' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

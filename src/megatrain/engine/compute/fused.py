"""Fused kernels of others in place of a model's own: `train.kernels: liger`.

Liger replaces the forward of norms and feed-forward modules of a model, family by family. It is
given the likeness of the model that computes on the device, so the host's stays as it is. Rotary
positions, the head and the loss are not given to it: it would replace the first for the process,
and the other two are the engine's (losses/).

Not measured: no GPU was here, and the tests use a stand-in for the package.

Laws (tests/engine/compute/test_fused.py)
    1. A package that is missing, a device without kernels, and a family that Liger does not know
       are refused by name.
    2. The model on the host is not changed.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from transformers import PreTrainedModel

from megatrain.devices.device import Device
from megatrain.errors import ConfigError, MissingPackage

LEFT_OUT = {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}
"""Kernels that are not used, by Liger's names."""


def require_liger(device: Device) -> None:
    """Raise MissingPackage or ConfigError unless Liger's kernels can run on the device."""
    if not device.own_memory:
        raise ConfigError(
            f"train.kernels is liger: its kernels do not run on {device.name}. Set train.kernels "
            "to none, or memory.device to an accelerator."
        )
    if find_spec("liger_kernel") is None:
        raise MissingPackage(
            "train.kernels is liger, but the package liger-kernel is not installed. Install it, or "
            "set train.kernels to none"
        )


def use_liger(model: PreTrainedModel, device: Device) -> None:
    """Let modules of `model`, which computes on the device, use Liger's kernels.

    Raises what `require_liger` does, and ConfigError if Liger has none for the family.
    """
    require_liger(device)
    before = _own_forwards(model)
    liger = import_module("liger_kernel.transformers")
    liger._apply_liger_kernel_to_instance(model=model, **LEFT_OUT)
    if _own_forwards(model) == before:
        raise ConfigError(
            f"train.kernels is liger, which has no kernels for {model.config.model_type}. Set "
            "train.kernels to none."
        )


def _own_forwards(model: PreTrainedModel) -> dict[str, object]:
    """Return the modules whose forward, or class, is not that of their kind."""
    return {
        name: (type(module), vars(module).get("forward")) for name, module in model.named_modules()
    }

"""Fused kernels of others in place of a model's own: `train.kernels: liger`.

Liger replaces the forward of norms and feed-forward modules of a model, family by family, and the
function of its family that rotates queries and keys. It is given the likeness of the model that
computes on the device, so the host's stays as it is. What it changes in transformers' own modules
(classes of norms and feed-forward, that function) would be there for every other model of the
process: all of it is put back, and the attention of the likeness alone gets the function.

The head and the loss are not given to it: they are the engine's (losses/). Nor are experts, whose
groups have kernels of their own, and activations that are not the ones its kernels compute: it
does not look at the config.

Laws (tests/engine/compute/test_fused.py with a stand-in; `python -m proofs.liger` with the package)
    1. A package that is missing, a device without Triton, and a family that Liger does not know
       are refused by name.
    2. The model on the host is not changed, nor anything of transformers.
    3. Every norm, feed-forward module and rotation that Liger has a kernel for has it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from megatrain.devices.device import Device
from megatrain.errors import ConfigError, MissingPackage
from megatrain.models.decoder import has_experts
from megatrain.models.multimodal import text_part

_PACKAGE = "liger_kernel.transformers"
_ACTIVATIONS = {"swiglu": ("silu", "swish"), "geglu": ("gelu_pytorch_tanh",)}
"""Activations that Liger's feed-forward kernels compute, by its names of the kernels."""
_OURS = ("cross_entropy", "fused_linear_cross_entropy")
"""Kernels of the head and the loss, by Liger's names."""


def require_liger(device: Device) -> None:
    """Raise MissingPackage or ConfigError unless Liger's kernels can run on the device."""
    if not device.has_triton:
        raise ConfigError(
            f"train.kernels is liger: its kernels do not run on {device.name}. Set train.kernels "
            "to auto, or memory.device to an accelerator that Triton compiles for."
        )
    try:
        import_module(_PACKAGE)
    except ImportError as error:
        raise MissingPackage(
            f"train.kernels is liger, but the package liger-kernel cannot be imported: {error}. "
            "Install it (pip install 'megatrain[kernels]'), or set train.kernels to auto"
        ) from error


def use_liger(model: PreTrainedModel, device: Device) -> None:
    """Let modules of `model`, which computes on the device, use Liger's kernels.

    Raises what `require_liger` does, and ConfigError if Liger has none for the family.
    """
    require_liger(device)
    liger = import_module(_PACKAGE)
    before = _own_forwards(model)
    with _transformers_restored() as replaced:
        liger._apply_liger_kernel_to_instance(model=model, **_wanted(model))
    _rotate_by(replaced, model)
    if _own_forwards(model) == before:
        raise ConfigError(
            f"train.kernels is liger, which has no kernels for {model.config.model_type}. Set "
            "train.kernels to auto or none."
        )


def _wanted(model: PreTrainedModel) -> dict[str, bool]:
    """Return Liger's kernels that are not used, or only if they fit, by its names."""
    text = text_part(model.config)
    activation = getattr(text, "hidden_activation", None) or getattr(text, "hidden_act", None)
    wanted = dict.fromkeys(_OURS, False)
    for kernel, activations in _ACTIVATIONS.items():
        wanted[kernel] = activation in activations and not has_experts(model)
    return wanted


_Replaced = dict[str, dict[str, Any]]
"""New values by name, of each module of transformers."""


@contextmanager
def _transformers_restored() -> Iterator[_Replaced]:
    """Undo what is done meanwhile to names of transformers' models; the result tells what it was.

    It is filled when the block ends.
    """
    modules = [name for name in sys.modules if name.startswith("transformers.models.")]
    before = {name: dict(vars(sys.modules[name])) for name in modules}
    replaced: _Replaced = {}
    try:
        yield replaced
    finally:
        for module, names in before.items():
            now = vars(sys.modules[module])
            changed = {name: now[name] for name, value in names.items() if now[name] is not value}
            if changed:
                replaced[module] = changed
                now.update({name: names[name] for name in changed})


def _rotate_by(replaced: _Replaced, model: PreTrainedModel) -> None:
    """Let the modules of `model` call the functions that Liger has put in place of their own.

    Their code is the same; it finds other functions by the names.
    """
    for submodule in model.modules():
        own = type(submodule).forward
        functions = {
            name: value
            for name, value in replaced.get(type(submodule).__module__, {}).items()
            if isinstance(own, FunctionType)
            and name in own.__code__.co_names
            and isinstance(value, FunctionType)
        }
        if functions:
            vars(submodule)["forward"] = MethodType(_with_names(own, functions), submodule)


def _with_names(function: Any, names: Mapping[str, Any]) -> FunctionType:
    """Return a function of the same code that finds `names` before those of its module."""
    made = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _own_forwards(model: nn.Module) -> dict[str, object]:
    """Return the modules whose forward, or class, is not that of their kind."""
    return {
        name: (type(module), vars(module).get("forward")) for name, module in model.named_modules()
    }

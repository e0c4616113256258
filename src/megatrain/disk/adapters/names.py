"""The names of adapters in PEFT's files, and the params that they are in the model.

base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight          in a file
                 model.layers.0.self_attn.q_proj.lora_A                 param of the decoder

Beside a param PEFT puts a wrapper around its module, and another around that one for the module's
next param. The last param of a module is thus the outermost:

base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight    in a file
                 model.layers.0.mlp.experts.gate_up_proj_lora_A         param of the decoder
base_model.model.model.layers.0.mlp.experts.lora_A.weight               in a file
                 model.layers.0.mlp.experts.down_proj_lora_A            param of the decoder
"""

from __future__ import annotations

import re

from transformers.pytorch_utils import Conv1D

from megatrain.disk.hf.names import FolderTensor
from megatrain.models.decoder import Decoder

_PREFIX, _SUFFIX = "base_model.model.", ".weight"
_WRAPPED = ".base_layer"
# Nothing that a pattern of targets could take for more than this module.
_NAME = re.compile(r"base_model\.model\.((?:[A-Za-z0-9_]+\.)+lora_[AB])\.weight", re.ASCII)


def wrapper_of(name: str) -> str | None:
    """Return a file's tensor as its wrapper and half, `...q_proj.lora_A`; None if it is neither."""
    found = _NAME.fullmatch(name)
    return None if found is None else found[1]


def module_of(wrapper: str) -> str:
    """Return the module of the model that a wrapper, or its half, is around."""
    return wrapper.rpartition(".")[0].replace(_WRAPPED, "")


def wrappers(decoder: Decoder) -> dict[str, str]:
    """Return PEFT's wrappers in a model, each with its adapted module or param."""
    assert decoder.adapters is not None
    found = {module: module for module in decoder.adapters.modules}
    wrapped: dict[str, int] = {}
    for param in reversed(decoder.adapters.params):
        module = param.rpartition(".")[0]
        found[module + _WRAPPED * wrapped.setdefault(module, 0)] = param
        wrapped[module] += 1
    return found


def adapter_tensors(decoder: Decoder) -> list[FolderTensor]:
    """Return the tensors of the decoder's adapters, under the names of files."""
    around = {adapted: wrapper for wrapper, adapted in wrappers(decoder).items()}
    return [
        FolderTensor(
            name=f"{_PREFIX}{around[param.name[: -len('.lora_A')]]}.{param.name[-6:]}{_SUFFIX}",
            shape=param.shape,
            param=param.name,
            start=0,
            num_elements=param.num_elements,
        )
        for param in decoder.params
        if param.is_adapter
    ]


def is_transposed(decoder: Decoder, module: str) -> bool:
    """Return whether a module keeps its weight as (in, out)."""
    return isinstance(decoder.model.get_submodule(module), Conv1D)

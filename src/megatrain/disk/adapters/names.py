"""The names of adapters in PEFT's files, and the params that they are in the model.

base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight          in a file
                 model.layers.0.self_attn.q_proj.lora_A                 param of the decoder

Beside a param PEFT puts a wrapper around its module, and another around that one for the module's
next param. The last param of a module is thus the outermost:

base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight    in a file
                 model.layers.0.mlp.experts.gate_up_proj_lora_A         param of the decoder
base_model.model.model.layers.0.mlp.experts.lora_A.weight               in a file
                 model.layers.0.mlp.experts.down_proj_lora_A            param of the decoder

Params that are trained whole, `modules_to_save`, have their own names:

base_model.model.lm_head.weight                                         in a file
                 lm_head.weight                                         param of the decoder
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from transformers.pytorch_utils import Conv1D

from megatrain.disk.hf.names import FolderTensor
from megatrain.models.adapters.lora import MAGNITUDE
from megatrain.models.decoder import Decoder

_PREFIX, _SUFFIX = "base_model.model.", ".weight"
_WRAPPED = ".base_layer"
# Nothing that a pattern of targets could take for more than this module.
_NAME = re.compile(
    r"base_model\.model\.((?:[A-Za-z0-9_]+\.)+(?:lora_[AB](?=\.)|lora_magnitude_vector))(?:\.weight)?",
    re.ASCII,
)


_SAVED = re.compile(r"base_model\.model\.((?:[A-Za-z0-9_]+\.)+[A-Za-z0-9_]+)", re.ASCII)


def saved_param(name: str, modules: Iterable[str], *, tied: bool) -> str | None:
    """Return the param that a file's tensor is, if it is one of modules that are trained whole.

    With `tied` it may be another name of such a param: the model says so when it is loaded.
    """
    found = _SAVED.fullmatch(name)
    if found is None or not (tied or any(f".{m}." in f".{found[1]}" for m in modules)):
        return None
    return found[1]


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
            name=_file_name(param.name, around) if param.is_adapter else f"{_PREFIX}{param.name}",
            shape=param.shape,
            param=param.name,
            start=0,
            num_elements=param.num_elements,
        )
        for param in decoder.params
        if param.trained
    ]


def tied_copies(decoder: Decoder) -> list[FolderTensor]:
    """Return the other names of what is trained whole: PEFT has a copy of it under each."""
    others = {param.name: param.aliases for param in decoder.params}
    return [
        replace(tensor, name=f"{_PREFIX}{alias}")
        for tensor in adapter_tensors(decoder)
        for alias in others[tensor.param]
    ]


def key_of(name: str) -> str:
    """Return a tensor's name in a file as folders know it: its wrapper and half, or its param."""
    return wrapper_of(name) or name.removeprefix(_PREFIX)


def _file_name(param: str, around: Mapping[str, str]) -> str:
    adapted, _, half = param.rpartition("lora_")
    suffix = "" if param.endswith(MAGNITUDE) else _SUFFIX  # as PEFT has always written it
    return f"{_PREFIX}{around[adapted[:-1]]}.lora_{half}{suffix}"


def is_transposed(decoder: Decoder, module: str) -> bool:
    """Return whether a module keeps its weight as (in, out)."""
    return isinstance(decoder.model.get_submodule(module), Conv1D)

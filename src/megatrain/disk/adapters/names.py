"""The names of adapters in PEFT's files, and the params that they are in the model.

base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight     in a file
                 model.layers.0.self_attn.q_proj.lora_A            param of the decoder
"""

from __future__ import annotations

import re

from transformers.pytorch_utils import Conv1D

from megatrain.disk.hf.names import FolderTensor
from megatrain.models.decoder import Decoder

_PREFIX, _SUFFIX = "base_model.model.", ".weight"
# Nothing that a pattern of targets could take for more than this module.
_NAME = re.compile(r"base_model\.model\.((?:[A-Za-z0-9_]+\.)+lora_[AB])\.weight", re.ASCII)


def param_of(name: str) -> str | None:
    """Return the param that a tensor of a file is; None if a linear module has no such param."""
    found = _NAME.fullmatch(name)
    return None if found is None else found[1]


def adapter_tensors(decoder: Decoder) -> list[FolderTensor]:
    """Return the tensors of the decoder's adapters, under the names of files."""
    return [
        FolderTensor(
            name=f"{_PREFIX}{param.name}{_SUFFIX}",
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

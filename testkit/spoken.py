"""Random models that say different things to different texts, and engines that only predict."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.models.build import build_decoder
from megatrain.models.decoder import Decoder
from testkit.families import tiny_config


def spoken_model(family: str, seed: int, **changes: Any) -> PreTrainedModel:
    """Return a random model in fp32, with weights so large that its answers depend on the text."""
    config = tiny_config(family)
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(seed)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for param in plain.parameters():
            if param.dim() > 1:
                param.copy_(0.2 * torch.randn(param.shape))
    return plain


def predicting(plain: PreTrainedModel) -> tuple[Decoder, Store]:
    """Return the decoder of a model, and a store with its weights and nothing to train them."""
    decoder = build_decoder(plain.config, "fp32")
    store = Store(build_layout(decoder.blocks, (TensorKind.HI,)))
    for param in decoder.params:
        store.param(param.name, TensorKind.HI).copy_(plain.get_parameter(param.name).detach())
    for name, buffer in decoder.persistent_buffers().items():
        buffer.copy_(plain.get_buffer(name))
    return decoder, store

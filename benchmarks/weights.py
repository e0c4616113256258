"""Weights for models that are only timed."""

from __future__ import annotations

import torch

from megatrain.memory.kinds import TensorKind
from megatrain.memory.store import Store
from megatrain.models.decoder import Decoder


def fill_small(store: Store, decoder: Decoder, generator: torch.Generator) -> None:
    """Give matrices small random weights, and norms ones."""
    for param in decoder.params:
        weight = store.param(param.name, TensorKind.HI)
        if len(param.shape) > 1:
            weight.normal_(0.0, 0.02, generator=generator)
        else:
            weight.fill_(1.0)

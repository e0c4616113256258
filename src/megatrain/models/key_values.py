"""The key-value cache for generation: keys and values of tokens that were already read.

The cache is transformers' own: layers that are called with it add what they compute. Only caches
of nothing but keys and values are used. What other layers keep (states of mamba and of linear
attention, convolutions) is partly in modules, which all texts share here; such models read the
full text for each token.

Laws (tests/run/evaluation/test_sampling.py)
    1. A model generates the same text with and without a cache.
    2. Nothing is cached for a model whose layers keep anything but keys and values.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from megatrain.models.multimodal import text_part
from megatrain.models.probing.stand_ins import Call

ARGUMENT = "past_key_values"


class Front(Protocol):
    """A template, as far as it is needed here: models/template.py."""

    @property
    def model(self) -> PreTrainedModel: ...

    def front(
        self, weights: Mapping[str, Tensor], inputs: Mapping[str, Any]
    ) -> tuple[Tensor, list[Call]]: ...


def caches_keys_and_values(template: Front) -> bool:
    """Return whether keys and values are all that the model keeps of a text."""
    model = template.model
    # Stateful: transformers' word for models of which a text cannot be read on from any place.
    takes_one = ARGUMENT in inspect.signature(type(model).forward).parameters
    if not takes_one or model._is_stateful:
        return False
    cache = new_cache(model.config)
    if {type(layer) for layer in cache.layers} - {DynamicLayer, DynamicSlidingWindowLayer}:
        return False
    ids = torch.zeros((1, 2), dtype=torch.long)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        _, calls = template.front({}, {"input_ids": ids, **inputs_with(cache)})
    return all(map(has_cache, calls))


def new_cache(config: PreTrainedConfig) -> DynamicCache:
    """Return an empty cache for one or more texts of equal length."""
    return DynamicCache(config=config)


def drop_last(cache: DynamicCache, num_tokens: int) -> bool:
    """Remove the last tokens of a cache; return whether that is possible.

    A layer with a sliding window has forgotten the tokens that would come into sight again.
    """
    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        return False
    cache.crop(-num_tokens)
    return True


def inputs_with(cache: DynamicCache | None) -> dict[str, Any]:
    """Return what a model's forward gets besides tokens to use and fill a cache."""
    return {} if cache is None else {ARGUMENT: cache, "use_cache": True}


def has_cache(call: Call) -> bool:
    """Return whether a layer is called with a cache."""
    return any(isinstance(given, DynamicCache) for given in (*call.args, *call.kwargs.values()))


def bytes_per_token(config: PreTrainedConfig, element_bytes: int) -> int:
    """Return at most how many bytes a token takes in a cache."""
    config = text_part(config)
    heads = getattr(config, "num_attention_heads", None) or 1
    kept = getattr(config, "num_key_value_heads", None) or heads
    kept = max(kept) if isinstance(kept, list) else kept
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    key = (getattr(config, "qk_nope_head_dim", None) or 0) + (
        getattr(config, "qk_rope_head_dim", None) or 0
    )
    value = getattr(config, "v_head_dim", None) or head
    return int(config.num_hidden_layers * kept * (max(key, head) + value) * element_bytes)

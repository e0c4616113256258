"""Masks that separate packed documents, for models that build masks without position ids.

The forward of most models gives position ids to transformers' mask functions, which see there where
documents begin. Some forget to, but take masks that were made before, as `generate` gives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.masking_utils import create_masks_for_generate

TAKES_MASKS = frozenset({"afmoe", "gpt_oss"})
"""Families (as of transformers 5.22) that forget, and take a mask for each kind of layer."""


def with_packed_masks(
    config: PreTrainedConfig, dtype: torch.dtype, inputs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the inputs with ready masks if the rows are packed and the model needs them."""
    is_packed = "position_ids" in inputs and not {"attention_mask", "past_key_values"} & set(inputs)
    if config.model_type not in TAKES_MASKS or not is_packed:
        return inputs
    places = inputs["position_ids"]
    like_hidden = torch.empty((*places.shape, 1), dtype=dtype, device=places.device)
    masks = create_masks_for_generate(config, like_hidden, None, None, position_ids=places)
    return {**inputs, "attention_mask": masks}

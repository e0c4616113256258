"""The tokens that end a text, as the files of a model name them.

The one place that decides this for `sample`, `eval`, samples of a run and `mt.generate`. Law
(tests/models/test_ends.py): a text ends where transformers' `generate` ends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from megatrain.models.multimodal import text_part


def named_ends(
    config: PreTrainedConfig, generation: Mapping[str, Any] | None = None
) -> frozenset[int]:
    """Return the ends of generation_config.json, or those of config.json if it names none."""
    named = (generation or {}).get("eos_token_id")
    if named is None:
        ends_of = (getattr(part, "eos_token_id", None) for part in (config, text_part(config)))
        named = next((end for end in ends_of if end is not None), None)
    return frozenset(
        end for end in (named if isinstance(named, list) else [named]) if type(end) is int
    )

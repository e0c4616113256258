"""The names of the files that make up a Hugging Face model, on the Hub and in a folder."""

from __future__ import annotations

import re

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}\.safetensors")
CARRIED = re.compile(
    r"generation_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)"
    r"|merges\.txt|chat_template\.(jinja|json)|(tokenizer|spiece|sentencepiece).*\.(json|model)"
)
"""What a folder carries beside weights and config: tokenizer, chat template, generation."""

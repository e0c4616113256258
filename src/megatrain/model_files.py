"""The names of the files that make up a Hugging Face model, on the Hub and in a folder."""

from __future__ import annotations

import re
from pathlib import Path

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
ADAPTER_NAME = "adapter_model.safetensors"
ADAPTER_INDEX_NAME = "adapter_model.safetensors.index.json"
ADAPTER_CONFIG_NAME = "adapter_config.json"
GENERATION_NAME = "generation_config.json"
TOKENIZER_NAME = "tokenizer.json"
PROCESSOR_NAMES = ("preprocessor_config.json", "processor_config.json")
"""A model that takes media has one of these."""
SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}\.safetensors")
CARRIED = re.compile(
    r"generation_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)"
    r"|merges\.txt|chat_template\.(jinja|json)|(tokenizer|spiece|sentencepiece).*\.(json|model)"
    r"|((video_|audio_)?preprocessor|processor)_config\.json"
)
"""Files of a model besides weights and config: tokenizer, chat template, generation, processors."""
VOCABULARY = re.compile(
    r"(tokenizer|vocab|spiece|sentencepiece|tekken).*\.(json|model|txt)|.*\.tiktoken"
)
"""The files that a tokenizer is read from."""
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file is only a Git LFS pointer. Raises OSError."""
    with path.open("rb") as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER


def lfs_pointer_text(path: Path) -> str:
    """Return the message for a Git LFS pointer."""
    return (
        f"{path} is a Git LFS pointer; the file itself was not downloaded. Run `git lfs pull` in "
        "that folder, or fetch the model with `hf download`."
    )

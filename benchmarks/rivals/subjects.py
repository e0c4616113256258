"""What is trained: random models in the shape of Qwen3 with its vocabulary, and random tokens.

The folder is bf16, as models come. `SPEED` has the depth and vocabulary that two processes with
fp32 states can hold on a small machine; `BYTES` is large enough that the interpreter and libraries
do not dominate its bytes per parameter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

VOCABULARY = 151_936

SPEED = {"hidden_size": 512, "num_hidden_layers": 16}
"""141M parameters, 78M of them in the tied embedding."""
BYTES = {"hidden_size": 1024, "num_hidden_layers": 16}
"""407M parameters, 156M of them in the tied embedding."""


def qwen3(*, hidden_size: int, num_hidden_layers: int, **changes: Any) -> Qwen3Config:
    """Return a config with the proportions of Qwen3-0.6B."""
    return Qwen3Config(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": hidden_size,
            "intermediate_size": 3 * hidden_size,
            "num_hidden_layers": num_hidden_layers,
            "num_attention_heads": hidden_size // 64,
            "num_key_value_heads": max(1, hidden_size // 128),
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        }
        | changes
    )


def write_model(folder: Path, config: Qwen3Config) -> Path:
    """Write a model of random weights in bf16, and return its folder."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def write_tokens(path: Path, *, steps: int, rows: int, sequence: int, vocabulary: int) -> Path:
    """Write the tokens of some steps, and return the file's path."""
    drawn = np.random.default_rng(0).integers(0, vocabulary, (steps, rows, sequence))
    np.save(path, drawn)
    return path

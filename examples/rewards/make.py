"""Make what the example of rewards needs: a tiny random Llama, its tokenizer, and prompts.

    python examples/rewards/make.py FOLDER [HEADS]

A prompt is three of eight letters, `gah>`; all 512 are in `prompts.jsonl`, each with the letters
backwards as `answer`, which reward.py compares with and nobody shows the model.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

LETTERS = "abcdefgh"
LENGTH = 3


def write_model(folder: Path, heads: int = 4) -> None:
    """Write a random Llama, and a tokenizer whose tokens are letters."""
    vocabulary = {token: number for number, token in enumerate(("<pad>", "<end>", ">", *LETTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<end>"
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=32,
        tie_word_embeddings=False, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder)


def write_prompts(path: Path) -> None:
    """Write every prompt with the answer that is rewarded."""
    words = map("".join, itertools.product(LETTERS, repeat=LENGTH))
    rows = [{"prompt": f"{word}>", "answer": word[::-1]} for word in words]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    folder = Path(sys.argv[1])
    write_model(folder / "model", *map(int, sys.argv[2:3]))
    write_prompts(folder / "prompts.jsonl")


if __name__ == "__main__":
    main()

"""Make what the addition example needs: a small random GPT-2, its tokenizer, and rows of sums.

    python examples/addition/make.py FOLDER [ROWS]

The model has 5 million random weights and has seen nothing. A row is a chat: the user says
`123+456`, the assistant answers `9750`. Two choices make the task learnable in minutes: the answer
has its lowest digit first, as one adds on paper, and always four digits. No pair of numbers of
`held_out.jsonl` is in `train.jsonl`.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel, PreTrainedTokenizerFast

SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")
CHARACTERS = "0123456789+"
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NUM_HELD_OUT = 1_000


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each character, and a chat template."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    pad, end, *others = SPECIAL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=pad, eos_token=end, additional_special_tokens=others
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return a random GPT-2: it has a vector for each position, so columns are easily found."""
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=384,
        n_inner=1536,
        n_layer=3,
        n_head=6,
        n_positions=128,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def row(first: int, second: int) -> str:
    """Return one sum as a chat, a line of JSON; the answer has its lowest digit first."""
    answer = f"{first + second:04}"[::-1]
    turns = [
        {"role": "user", "content": f"{first:03}+{second:03}"},
        {"role": "assistant", "content": answer},
    ]
    return json.dumps({"messages": turns}) + "\n"


def write(folder: Path, num_rows: int = 100_000) -> None:
    """Write the model and the rows."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    make_model(tokenizer).save_pretrained(folder / "model")
    pairs = random.Random(0).sample(range(1_000_000), num_rows + NUM_HELD_OUT)
    rows = [row(*divmod(pair, 1000)) for pair in pairs]
    (folder / "held_out.jsonl").write_text("".join(rows[:NUM_HELD_OUT]))
    (folder / "train.jsonl").write_text("".join(rows[NUM_HELD_OUT:]))


def main() -> None:
    folder, *num_rows = sys.argv[1:]
    write(Path(folder), *map(int, num_rows))


if __name__ == "__main__":
    main()

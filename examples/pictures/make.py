"""Make what the pictures example needs: a small random Qwen2.5-VL, its processor, and rows.

    python examples/pictures/make.py FOLDER [ROWS]

Each row has a picture of 32 x 32 pixels with one shape on a background of noise, in `pictures/`,
a question, `What is it?`, and an answer with color and shape, like `red circle`.
The model has 1 million random weights and has seen nothing, so its tower is trained as well.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessor,
)

SPECIAL = (
    "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
COLORS = {
    "red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 50),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle")
WORDS = ("What", "is", "it", "?", *COLORS, *SHAPES)
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZE, PATCH = 32, 4
NUM_HELD_OUT = 200


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each word, and a chat template with parts."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *WORDS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(prefix="##")
    pad, end, *others = SPECIAL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=pad, eos_token=end, additional_special_tokens=others
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return a random Qwen2.5-VL."""
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in
           ("image_pad", "video_pad", "vision_start", "vision_end")}  # fmt: skip
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": 256, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6],
        },
        "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }  # fmt: skip
    tower = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4,
        "out_hidden_size": 128, "patch_size": PATCH, "spatial_patch_size": PATCH,
        "window_size": 4 * PATCH, "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    return Qwen2_5_VLForConditionalGeneration(config).to(torch.bfloat16)


def draw(color: str, shape: str, dice: random.Random) -> Image.Image:
    """Return a picture of a shape somewhere on noise."""
    noise = np.random.default_rng(dice.randrange(2**32)).integers(0, 90, (SIZE, SIZE, 3), np.uint8)
    image = Image.fromarray(noise)
    side = dice.randint(12, 20)
    x, y = dice.randint(0, SIZE - side - 1), dice.randint(0, SIZE - side - 1)
    box, pen, fill = (x, y, x + side, y + side), ImageDraw.Draw(image), COLORS[color]
    if shape == "circle":
        pen.ellipse(box, fill=fill)
    elif shape == "square":
        pen.rectangle(box, fill=fill)
    else:
        pen.polygon([(x, y + side), (x + side, y + side), (x + side // 2, y)], fill=fill)
    return image


def write(folder: Path, num_rows: int = 3_000) -> None:
    """Write the model, its processor, the pictures and the rows."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    make_model(tokenizer).save_pretrained(folder / "model")
    pixels = {"shortest_edge": SIZE * SIZE, "longest_edge": SIZE * SIZE}
    Qwen2VLImageProcessor(patch_size=PATCH, size=pixels).save_pretrained(folder / "model")
    (folder / "pictures").mkdir()
    dice, rows = random.Random(0), []
    for number in range(num_rows + NUM_HELD_OUT):
        color, shape = dice.choice(list(COLORS)), dice.choice(SHAPES)
        name = f"pictures/{number}.png"
        draw(color, shape, dice).save(folder / name)
        row = {"prompt": "What is it?", "completion": f"{color} {shape}", "image": name}
        rows.append(json.dumps(row) + "\n")
    (folder / "held_out.jsonl").write_text("".join(rows[:NUM_HELD_OUT]))
    (folder / "train.jsonl").write_text("".join(rows[NUM_HELD_OUT:]))


def main() -> None:
    folder, *num_rows = sys.argv[1:]
    write(Path(folder), *map(int, num_rows))


if __name__ == "__main__":
    main()

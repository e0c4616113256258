"""Tiny runs on rows with pictures: a joint model with its processor, pictures, and rows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForMultimodalLM

from megatrain.config import Config
from testkit.joint_media import media_config
from testkit.processors import GEMMA_TOKENS, save_pictures, tiny_processor

FAMILY = "qwen2_5_vl"


def save_reading_model(folder: Path, family: str, *, lively: bool = False) -> None:
    """Save a random joint model, which reads what its processor gives, and the processor.

    `lively`: with weights so large that its next token depends on what it has read.
    """
    processor, config = tiny_processor(family), media_config(family)
    tokenizer = processor.tokenizer
    if family == "gemma3":
        config.image_token_index = config.image_token_id = tokenizer.image_token_id
    else:
        config.image_token_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        config.video_token_id = tokenizer.convert_tokens_to_ids("<|video_pad|>")
        config.vision_config.patch_size = 4
        config.vision_config.window_size = 32
    config.text_config.vocab_size = len(tokenizer)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
        for name, param in model.named_parameters() if lively else ():
            if param.dim() > 1:  # a tied embedding that is large repeats its token
                param.normal_(std=0.02 if "embed_tokens" in name else 0.3)
    model.save_pretrained(folder)
    if family != "gemma3":
        processor.image_processor.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    else:
        processor.save_pretrained(folder)
        path = folder / "tokenizer_config.json"
        named = {f"{name}_token": getattr(tokenizer, f"{name}_token") for name in GEMMA_TOKENS}
        path.write_text(json.dumps(json.loads(path.read_text()) | named))


def write_media_world(folder: Path, num_rows: int = 12) -> None:
    """Write a joint model with its processor, pictures, and rows: some of text alone."""
    save_reading_model(folder / "model", FAMILY)
    names, draw = save_pictures(folder, 5), random.Random(0)
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(num_rows):
            parts: list[dict[str, Any]] = [{"type": "text", "text": f"what is {number}? "}]
            for name in draw.sample(names, number % 3):
                parts.append({"type": "image", "image": name})
            turns = [
                {"role": "user", "content": parts},
                {"role": "assistant", "content": str(draw.randrange(10**6))},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")


def media_run_config(world: Path, run: Path, **changes: dict[str, Any]) -> Config:
    """Return the config of a run on these rows."""
    values: dict[str, Any] = {
        "model": {"name_or_path": str(world / "model"), "dtype": "fp32"},
        "data": {"train": str(world / "rows.jsonl"), "eval": 0.2, "max_length": 256},
        "train": {"steps": 4, "batch_tokens": 256, "micro_batch_tokens": 256},
        "optim": {"learning_rate": 1e-3, "warmup": 0},
        "memory": {"device": "cpu"},
        "eval": {"every": 2, "samples": 1},
        "save": {"dir": str(run), "every": 2},
        "log": {"every": 100},
    }
    for section, keys in changes.items():
        values[section] = {**values.get(section, {}), **keys}
    return Config.model_validate(values)

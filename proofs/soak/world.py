"""What a soak trains: a model, rows and a config, with the parts that it was asked for.

pages     a mixture of 4 experts, which come in 2 pages to the device of testkit/host_gpu
bucket    the run is uploaded: save.dir is the URL of a folder, on the disk that gets full
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from megatrain.cli.demo import byte_tokenizer
from megatrain.config import Config, dump_config
from megatrain.config.value_types import ACCELERATOR_TYPES
from megatrain.disk.remote.history import last_entry
from megatrain.places import open_place
from testkit.runs import Setting, config_of, write_world

PARTS = ("pages", "bucket")
NUM_ROWS = 600
SAVE_EVERY = 20
DEVICE = "hostgpu"
_MIXTURE = "mixture"


def write(folder: Path, parts: tuple[str, ...]) -> None:
    """Write models and rows."""
    write_world(folder, NUM_ROWS)
    if "pages" not in parts:
        return
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder / _MIXTURE)
    config = MixtralConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4,
        max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder / _MIXTURE)


def config_in(
    world: Path, folder: Path, name: str, num_steps: int, parts: tuple[str, ...]
) -> tuple[Path, Path]:
    """Write the config of a run `name` in `folder`; return its path, and where the run works."""
    path = world / f"{name}.yaml"
    config = _config(world, folder / name, num_steps, parts)
    path.write_text(dump_config(config))
    return path, Path(config.run_dir)


def _config(world: Path, run: Path, num_steps: int, parts: tuple[str, ...]) -> Config:
    setting = Setting(
        dtype="fp32", dropout=0.1, best=True, keep=2, save_every=SAVE_EVERY,
        eval_every=max(60, num_steps // 40),
    )  # fmt: skip
    changes: dict[str, dict[str, Any]] = {
        "train": {"steps": num_steps, "batch_tokens": 64},
        "optim": {"learning_rate": 1e-3},
    }
    if "pages" in parts:
        ACCELERATOR_TYPES.add(DEVICE)  # as the import does that begins threads
        changes["model"] = {"name_or_path": str(world / _MIXTURE)}
        changes["memory"] = {"device": DEVICE, "expert_pages": 2}
    if "bucket" in parts:
        changes["save"] = {"dir": f"file://{run}"}
    return config_of(world, run, setting, **changes)


def missing_in_bucket(bucket: Path, run: Path, num_steps: int) -> list[str]:
    """Return what a bucket lacks of a run that has ended: its last checkpoint, its model."""
    entry = last_entry(open_place(f"file://{bucket}"))
    newest = max((one.step for one in entry.live), default=0) if entry else 0
    missing = [] if newest == num_steps else [f"the bucket has step {newest} of {num_steps}"]
    for path in sorted((run / "model").iterdir()):
        sent = bucket / "model" / path.name
        if not sent.exists() or sent.read_bytes() != path.read_bytes():
            missing.append(f"the bucket has another model/{path.name}, or none")
    return missing

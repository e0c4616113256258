"""The engine in your own loop: load a model, train some steps, read the loss, export.

Makes its own tiny random model and data, so that it runs anywhere, without a network or a GPU.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import megatrain as mt


def make_batch(step: int) -> list[mt.MicroBatch]:
    """Return two micro-batches of unequal length: counting up from a random number."""
    generator = torch.Generator().manual_seed(step)
    batch = []
    for rows, length in ((8, 32), (4, 20)):
        start = torch.randint(0, 200, (rows, 1), generator=generator)
        ids = start + torch.arange(length)
        labels = ids.clone()
        labels[:, 0] = -100  # the first number cannot be known
        batch.append(mt.MicroBatch(input_ids=ids, labels=labels))
    return batch


def main() -> None:
    """Train 40 steps with exact global-norm clipping, and export the result."""
    with tempfile.TemporaryDirectory() as scratch:
        config = LlamaConfig(
            hidden_size=64, intermediate_size=176, num_hidden_layers=3, vocab_size=256,
            num_attention_heads=4, num_key_value_heads=4,
        )  # fmt: skip
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(Path(scratch, "source"))

        home = mt.load_model(Path(scratch, "source"), dtype="bf16")
        optimizer = mt.AdamW(learning_rate=3e-3, weight_decay=0.1, max_grad_norm=1.0)
        with mt.Engine(home.decoder, home.store, optimizer=optimizer) as engine:
            for step in range(40):
                result = engine.step(make_batch(step))
                if step % 10 == 0 or step == 39:
                    print(f"step {step:3}  loss {result.loss:.4f}  norm {result.grad_norm:.2f}")
            total, count = engine.evaluate(make_batch(1000))
            print(f"held out: {total / count:.4f} per token, {count} tokens")
        home.export(Path(scratch, "trained"))
        AutoModelForCausalLM.from_pretrained(Path(scratch, "trained"))


if __name__ == "__main__":
    main()

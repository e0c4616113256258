"""TRL's trainers over the engine: python examples/trl_trainers.py sft (dpo, kto, reward, grpo)

Makes its own tiny random model and rows, so that it runs anywhere, without a network or a GPU. For
a model of yours, give its folder or its id on the Hub. Needs `pip install trl` beside MegaTrain.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from megatrain.cli.demo import byte_tokenizer
from megatrain.integrations.trl import streamed

SUMS = [(f"{a} + {b} = ", f"{a + b}.", f"{a * b + 1}?") for a in range(30) for b in range(10)]
PAIRS = [{"prompt": prompt, "chosen": right, "rejected": wrong} for prompt, right, wrong in SUMS]
ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": [{"prompt": prompt, "completion": right} for prompt, right, _ in SUMS],
    "dpo": PAIRS,
    "kto": [
        {"prompt": prompt, "completion": answer, "label": answer == right}
        for prompt, right, wrong in SUMS
        for answer in (right, wrong)
    ],
    "reward": PAIRS,
    "grpo": [{"prompt": prompt} for prompt, _, _ in SUMS],
}


def many_digits(completions: list[str], **_: Any) -> list[float]:
    """Reward an answer by its share of digits."""
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions]


def make_trainer(name: str, model: Path, output: Path) -> Any:
    """Return a streamed trainer: all but the class is as in a script of TRL's."""
    shared: dict[str, Any] = {
        "output_dir": str(output),
        "learning_rate": 1e-3,
        "max_steps": 30,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,  # both share the step's two passes over the weights
        "logging_steps": 5,
        "save_steps": 15,
        "report_to": [],
        "use_cpu": not torch.accelerator.is_available(),
    }
    given: dict[str, Any] = {"model": str(model), "train_dataset": Dataset.from_list(ROWS[name])}
    if name == "sft":
        return streamed(trl.SFTTrainer)(args=trl.SFTConfig(**shared), **given)
    if name == "dpo":
        return streamed(trl.DPOTrainer)(args=trl.DPOConfig(**shared), **given)
    if name == "kto":
        return streamed(trl.KTOTrainer)(args=trl.KTOConfig(**shared), **given)
    if name == "reward":
        return streamed(trl.RewardTrainer)(args=trl.RewardConfig(**shared), **given)
    args = trl.GRPOConfig(**shared, num_generations=8, max_completion_length=8)
    return streamed(trl.GRPOTrainer)(args=args, reward_funcs=many_digits, **given)


def main() -> None:
    """Train, and load what was saved."""
    with tempfile.TemporaryDirectory() as scratch:
        source, output = Path(scratch, "source"), Path(scratch, "output")
        config = LlamaConfig(
            hidden_size=64, intermediate_size=176, num_hidden_layers=3, vocab_size=320,
            num_attention_heads=4, num_key_value_heads=4,
        )  # fmt: skip
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(source)
        byte_tokenizer().save_pretrained(source)
        name = sys.argv[1] if len(sys.argv) > 1 else "sft"
        if name not in ROWS:
            raise SystemExit(f"{name}: give one of {', '.join(ROWS)}")
        trainer = make_trainer(name, source, output)
        trainer.train()
        trainer.save_model()
        trainer.close()
        print("saved as", *AutoConfig.from_pretrained(output).architectures)


if __name__ == "__main__":
    main()

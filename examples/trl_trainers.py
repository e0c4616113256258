"""TRL's trainers over the engine: python examples/trl_trainers.py sft (dpo, kto)

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
from transformers import AutoModelForCausalLM, LlamaConfig

from megatrain.cli.demo import byte_tokenizer
from megatrain.integrations.trl import streamed

SUMS = [(f"{a} + {b} = ", f"{a + b}.", f"{a * b + 1}?") for a in range(30) for b in range(10)]
SFT = [{"prompt": prompt, "completion": right} for prompt, right, _ in SUMS]
DPO = [{"prompt": prompt, "chosen": right, "rejected": wrong} for prompt, right, wrong in SUMS]
KTO = [
    {"prompt": prompt, "completion": answer, "label": answer == right}
    for prompt, right, wrong in SUMS
    for answer in (right, wrong)
]


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
    if name == "sft":
        return streamed(trl.SFTTrainer)(
            model=str(model), args=trl.SFTConfig(**shared), train_dataset=Dataset.from_list(SFT)
        )
    if name == "dpo":
        return streamed(trl.DPOTrainer)(
            model=str(model), args=trl.DPOConfig(**shared), train_dataset=Dataset.from_list(DPO)
        )
    if name == "kto":
        return streamed(trl.KTOTrainer)(
            model=str(model), args=trl.KTOConfig(**shared), train_dataset=Dataset.from_list(KTO)
        )
    raise SystemExit(f"{name}: give sft, dpo or kto")


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
        trainer = make_trainer(sys.argv[1] if len(sys.argv) > 1 else "sft", source, output)
        trainer.train()
        trainer.save_model()
        trainer.close()
        AutoModelForCausalLM.from_pretrained(output)


if __name__ == "__main__":
    main()

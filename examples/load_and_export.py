"""Load a model into host memory, change a weight, export it, and let transformers read the result.

Makes its own tiny random model, so that it runs anywhere, without a network.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import megatrain as mt


def main() -> None:
    """Run the example in a scratch folder."""
    with tempfile.TemporaryDirectory() as scratch:
        source, target = Path(scratch, "source"), Path(scratch, "export")
        config = LlamaConfig(
            hidden_size=256, intermediate_size=704, num_hidden_layers=4, vocab_size=4096
        )
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(source)

        model = mt.load_model(source, dtype="bf16")
        layout = model.store.layout
        print(f"{layout.num_params:,} parameters in {layout.num_blocks} blocks")
        for kind in model.store.kinds:
            print(f"  {kind.name:5} {layout.kind_bytes[kind] / 2**20:8.1f} MiB")

        model.store.param("model.norm.weight", mt.TensorKind.HI).mul_(2)
        model.export(target)
        reloaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
        print("final norm after export:", reloaded.model.norm.weight[:4].tolist())


if __name__ == "__main__":
    main()

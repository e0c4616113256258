"""Host bytes per param of the base: by the ledger for large models, and measured for one that fits.

    python -m proofs.adapters.host_bytes --json

The ledger counts weights, adapters, their masters, moments and gradients, all that a store has. One
model is loaded and takes a step on the CPU: what the process then holds beyond what it held
before is told per param, too. That includes buffers of compute, which do not grow with the number
of layers.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from megatrain import AdamW, Engine, load_model
from megatrain.memory.host import resident_bytes
from megatrain.memory.layout import build_layout
from megatrain.memory.store import store_ledger
from megatrain.models.adapters.lora import Lora
from megatrain.models.build import build_decoder
from megatrain.models.decoder import Decoder
from megatrain.optim.states import WITH_CLIP
from testkit.plain import make_batch
from testkit.printed import print_figures

LORA = Lora(rank=16, alpha=32)
LARGE = {
    "Llama-3.1-8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                     "num_attention_heads": 32},
    "Llama-3.1-70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                      "num_attention_heads": 64},
}  # fmt: skip
MEASURED = LARGE["Llama-3.1-8B"] | {"num_hidden_layers": 4, "vocab_size": 8192}
"""Layers of 8B, few of them: narrower layers have more adapter per param."""
MOST = 2.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    found: dict[str, Any] = {name: by_ledger(fields) for name, fields in LARGE.items()}
    found["measured"] = measured()
    print_figures(found, as_json=options.json)
    worst = max(figures["bytes_per_param"] for figures in found.values())
    raise SystemExit(worst > MOST)


def by_ledger(fields: dict[str, int]) -> dict[str, float]:
    """Return what a store of such a model has, per param of the base."""
    config = LlamaConfig(num_key_value_heads=8, **({"vocab_size": 128256} | fields))
    decoder = build_decoder(config, "bf16", lora=LORA)
    total = store_ledger(build_layout(decoder.blocks, WITH_CLIP)).total("host")
    return {"params": num_own(decoder), "bytes_per_param": round(total / num_own(decoder), 4)}


def num_own(decoder: Decoder) -> int:
    return sum(param.num_elements for param in decoder.params if not param.is_adapter)


def measured() -> dict[str, float]:
    """Return what a process holds that has taken a step, per param of the base."""
    config = LlamaConfig(num_key_value_heads=8, **MEASURED)
    with tempfile.TemporaryDirectory(prefix="megatrain-adapters-") as folder:
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        _step(Path(folder), lora=Lora(rank=1, alpha=1, targets=("layers.3.mlp.up_proj",)))
        before = resident_bytes()
        home = _step(Path(folder), lora=LORA)
        held = resident_bytes() - before
    params = num_own(home.decoder)
    by_store = store_ledger(home.store.layout).total("host")
    return {
        "params": params,
        "bytes_per_param": round(by_store / params, 4),
        "resident_bytes_per_param": round(held / params, 4),
    }


def _step(folder: Path, lora: Lora) -> Any:
    home = load_model(folder, lora=lora)
    with Engine(home.decoder, home.store, optimizer=AdamW(learning_rate=1e-3)) as engine:
        engine.step(make_batch([(1, 16)]))
    return home


if __name__ == "__main__":
    main()

"""Machines and models that tests plan for: round figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from megatrain.models.build import build_decoder
from megatrain.planning.machine.profile import FlopRate, MachineProfile
from megatrain.planning.model.shapes import ModelShape
from megatrain.planning.model.skeleton import shape_of

GIB = 1 << 30
DESKTOP = MachineProfile(
    name="desktop",
    source="round figures",
    ram_bytes=128 * GIB,
    dram_bytes_per_s=60e9,
    update_params_per_s=60e9 / 26,
    cores=16,
    device="card",
    device_bytes=22 * GIB,
    forward_flops=(FlopRate(4096, 4096, 150e12),),
    device_bytes_per_s=850e9,
    copy_in_bytes_per_s=24e9,
    copy_out_bytes_per_s=24e9,
)
SERVER = DESKTOP.changed(
    name="server",
    ram_bytes=8192 * GIB,
    dram_bytes_per_s=300e9,
    update_params_per_s=300e9 / 26,
    cores=64,
    device_bytes=130 * GIB,
    forward_flops=(FlopRate(4096, 4096, 650e12),),
    device_bytes_per_s=4e12,
    copy_in_bytes_per_s=52e9,
    copy_out_bytes_per_s=52e9,
)
PROCESSOR = DESKTOP.changed(
    name="processor",
    device_bytes=0,
    unified=True,
    cores=8,
    compute_cores=4.0,
    forward_flops=(FlopRate(4096, 4096, 1e12),),
    device_bytes_per_s=20e9,
)


def shape(config: PreTrainedConfig, name: str = "") -> ModelShape:
    """Return the shape of a model; a plan does not ask how many positions it declares."""
    return replace(shape_of(build_decoder(config, "bf16"), name), positions=None)


def llama(hidden: int, inner: int, layers: int, vocab: int = 32000, **more: Any) -> ModelShape:
    """Return a Llama of these dimensions."""
    fields = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": max(1, hidden // 512),
        "vocab_size": vocab,
    }
    return shape(LlamaConfig(**(fields | more)), f"llama {hidden}x{layers}")


SMALL = llama(1024, 2816, 8)
EIGHT = llama(4096, 14336, 32, 128256)
SEVENTY = llama(8192, 28672, 80, 128256)
LARGEST = llama(16384, 53248, 126, 128256, num_key_value_heads=8)
EXPERTS = shape(
    Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
    ),
    "experts",
)

"""Tiny models of random weights, made from their configs: nothing is downloaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    GemmaConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from megatrain.batch import MicroBatch
from megatrain.devices.device import Device
from megatrain.engine.engine import Engine
from megatrain.lanes.player import Player, Plays
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.models.build import build_decoder
from megatrain.models.decoder import COMPUTE_DTYPES, Decoder
from megatrain.optim.adamw import AdamW
from megatrain.optim.states import WITH_CLIP
from megatrain.step.settings import StepSettings

LAW_DEADLINE_S = 60.0
"""For a lane of a tiny model to make progress."""
_VOCABULARY = 96
_LARGE_VOCABULARY = 40_000
"""Devices have another softmax for rows of many columns, and the head writes it in place."""
_SIZES: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_hidden_layers": 3,
}
MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=False),
    "gemma, tied": lambda: GemmaConfig(**_SIZES),
    "mixtral, experts": lambda: MixtralConfig(
        **_SIZES, num_local_experts=4, tie_word_embeddings=False
    ),
    "llama, large vocabulary": lambda: LlamaConfig(
        **_SIZES | {"vocab_size": _LARGE_VOCABULARY, "hidden_size": 32}, tie_word_embeddings=False
    ),
}
_WINDOW = 8
PACKED: dict[str, Callable[[], PreTrainedConfig]] = {
    "packed llama": MODELS["llama"],
    "packed, windows": lambda: Cohere2Config(
        **_SIZES,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=_WINDOW,
        bos_token_id=1,
        eos_token_id=2,
    ),
}
"""Models for packed rows: several queries share a key, and some layers see a window of tokens."""
_PACKED_LENGTHS = (17, 5, 24, 11)
"""Lengths of the documents of a row: shorter than the window and longer, in no order."""
Precisions = Literal["bf16", "fp32"]
ATTENTION: dict[Precisions, str | None] = {"fp32": "eager", "bf16": None}
"""In fp32 products alone; in bf16 what the model takes by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """A tiny model at home, and the resident one with the same weights."""

    decoder: Decoder
    store: Store
    resident: PreTrainedModel

    @classmethod
    def make(cls, name: str, dtype: Precisions) -> TinyModel:
        config, attn = (MODELS | PACKED)[name](), ATTENTION[dtype]
        decoder = build_decoder(config, dtype, attn=attn)
        store = Store(build_layout(decoder.blocks, WITH_CLIP))
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            resident = AutoModelForCausalLM.from_config(
                config, dtype=COMPUTE_DTYPES[dtype], attn_implementation=attn
            )
        with torch.no_grad():
            for param in decoder.params:
                store.param(param.name, TensorKind.HI).copy_(resident.get_parameter(param.name))
        return cls(decoder=decoder, store=store, resident=resident.train())

    def engine(self, device: Device, *, trains: bool, player: Plays | None = None) -> Engine:
        return Engine(
            self.decoder,
            self.store,
            optimizer=AdamW(learning_rate=1e-2, max_grad_norm=1.0) if trains else None,
            device=device,
            settings=StepSettings(tape="host"),
            player=player or Player(device.lanes(), deadline_s=LAW_DEADLINE_S),
        )


def tiny_batch(seed: int) -> list[MicroBatch]:
    """Return two micro-batches of different shapes; the first tokens of a row are not trained."""
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for shape in ((2, 24), (1, 17)):
        ids = torch.randint(3, _VOCABULARY, shape, generator=generator)
        labels = ids.clone()
        labels[:, :3] = -100
        batch.append(MicroBatch(input_ids=ids, labels=labels))
    return batch


def packed_row(seed: int) -> MicroBatch:
    """Return one flat row of several documents; the first token of each is not a target."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, _VOCABULARY, (1, sum(_PACKED_LENGTHS)), generator=generator)
    positions = torch.cat([torch.arange(length) for length in _PACKED_LENGTHS])[None]
    labels = ids.masked_fill(positions == 0, -100)
    return MicroBatch(input_ids=ids, labels=labels, position_ids=positions)

"""A ladder of models: each rung is a Qwen3 that is about 7 % larger than the one below.

Width and vocabulary are those of every rung; only the number of layers grows. The folders share
their files: a layer is one file of random bf16 weights, written once and linked into each folder
that has the layer. A rung therefore costs no time and no space beyond the largest one, and nobody
holds a model to write it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

GROWTH = 1.07
"""From one rung to the next, once a layer is less than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Models of one width: rung 0 has one layer."""

    hidden: int = 768
    intermediate: int = 2304
    heads: int = 12
    key_heads: int = 4
    head_dim: int = 64
    vocabulary: int = 32768

    def layers(self, rung: int) -> int:
        """Return how many layers a rung has."""
        layers = 1
        for _ in range(rung):
            layers += max(1, round((GROWTH - 1) * self._params(layers) / self._layer_params()))
        return layers

    def params(self, rung: int) -> int:
        """Return how many params a rung has."""
        return self._params(self.layers(rung))

    def rung_below(self, params: float) -> int:
        """Return the highest rung with at most so many params, or rung 0."""
        rung = 0
        while self.params(rung + 1) <= params:
            rung += 1
        return rung

    def write(self, folder: Path, rung: int) -> Path:
        """Return the Hugging Face folder of a rung in `folder`, written if it is new."""
        files = {"ends.safetensors": self._ends()}
        for layer in range(self.layers(rung)):
            files[f"layer-{layer:04}.safetensors"] = self._layer(layer)
        model = folder / f"layers-{self.layers(rung)}"
        model.mkdir(parents=True, exist_ok=True)
        places: dict[str, str] = {}
        for seed, (name, shapes) in enumerate(files.items()):
            if not (folder / name).exists():
                save_file(_random(shapes, seed), folder / name, metadata={"format": "pt"})
            if not (model / name).exists():
                os.link(folder / name, model / name)
            places |= dict.fromkeys(shapes, name)
        num_bytes = 2 * self.params(rung)
        index = {"metadata": {"total_size": num_bytes}, "weight_map": places}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        (model / "config.json").write_text(json.dumps(self._config(rung), indent=2))
        return model

    def _params(self, layers: int) -> int:
        return _count(self._ends()) + layers * self._layer_params()

    def _layer_params(self) -> int:
        return _count(self._layer(0))

    def _ends(self) -> Mapping[str, tuple[int, ...]]:
        table = (self.vocabulary, self.hidden)
        return {"model.embed_tokens.weight": table, "model.norm.weight": (self.hidden,)}

    def _layer(self, layer: int) -> Mapping[str, tuple[int, ...]]:
        queries, keys = self.heads * self.head_dim, self.key_heads * self.head_dim
        shapes = {
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
            "self_attn.q_norm": (self.head_dim,),
            "self_attn.k_norm": (self.head_dim,),
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }
        return {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}

    def _config(self, rung: int) -> dict[str, object]:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers(rung),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": None,
            "torch_dtype": "bfloat16",
        }


def _count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def _random(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Return matrices of small random numbers, and norms of ones."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else (0.02 * torch.randn(shape, generator=generator)).bfloat16()
        for name, shape in shapes.items()
    }

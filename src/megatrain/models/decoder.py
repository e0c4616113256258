"""A Hugging Face decoder as blocks: embedding, each decoder layer, head. Nothing is rewritten.

The skeleton holds the model's own modules. Their parameters stay on the meta device and cost
nothing; the real weights live in the store and are bound per call. Buffers are real. Each layer
keeps *its own* module, so attributes that differ between layers (sliding windows, positions or
none, experts or none) stay right.

build.py makes a decoder from a config.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from megatrain.models import optional
from megatrain.models.layer_call import TensorPath
from megatrain.models.matrices import is_hidden_matrix
from megatrain.models.multimodal import text_part
from megatrain.step.ops import Role

if TYPE_CHECKING:
    from megatrain.models.adapters.lora import Adapters
    from megatrain.models.balance import Balancing
    from megatrain.models.towers import Towers
    from megatrain.narrow import Form

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One named tensor of a block."""

    name: str
    """Its name in the model."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Dtype that compute sees: the model's, or fp32 where the model insists on it."""
    aliases: tuple[str, ...] = ()
    """Other names of the same tensor: its ties."""
    trained: bool = True
    is_adapter: bool = False
    """Part of an adapter: no param of the model itself, and in none of its folders."""
    form: Form = ()
    """Its narrow form, if it is kept so, and widened before compute sees it."""

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of what a store keeps of it."""
        return torch.uint8 if self.form else self.dtype

    @property
    def stored_elements(self) -> int:
        """Numbers that a store keeps of it: of a narrow param its bytes."""
        return optional.narrow.form_bytes(self.form) if self.form else self.num_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The streamed unit."""

    index: int
    role: Role
    params: tuple[Param, ...]

    @property
    def hidden_matrices(self) -> frozenset[str]:
        """The names of a layer's matrices; other blocks have none."""
        if self.role is not Role.LAYER:
            return frozenset()
        return frozenset(p.name for p in self.params if is_hidden_matrix(p.name, p.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A model cut into blocks. `model` is the skeleton: parameters on meta, buffers real."""

    model: PreTrainedModel
    blocks: tuple[Block, ...]
    layers_path: str
    """The path of the layer list in the model, for instance `model.layers`."""
    num_layer_outputs: int
    """0 when a layer returns hidden states alone, else the length of the tuple it returns."""
    head_path: str
    """The path of the output projection, for instance `lm_head`."""
    balancing: Balancing | None = None
    """Load-balancing loss of the model's own code; None if it has none, or another kind."""
    adapters: Adapters | None = None
    """Adapters that are trained in place of the model's own params, which are all frozen then."""
    asks_balancing: bool = False
    """config.json asks for `output_router_logits`, and the model's code then balances experts."""
    carried: tuple[Param, ...] = ()
    """Params and persistent buffers of a joint model that text never reads: without values here."""
    eos_token_ids: frozenset[int] = frozenset()
    """Tokens that end a text, by the files of the model; a tokenizer may have one more."""
    looked_up: tuple[frozenset[TensorPath], ...] = ()
    """For each layer, its arguments that gradients go back through (models/passed.py)."""
    towers: Towers | None = None
    """How media are taken; None: there are none, and towers are carried."""

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config

    @property
    def text_config(self) -> PreTrainedConfig:
        """Config of the decoder itself: a part of a joint model's `config`, else the same."""
        return text_part(self.model.config)

    @property
    def passes_more(self) -> bool:
        """Whether layers get more than hidden states that gradients go back through."""
        shares = bool(getattr(self.text_config, "num_kv_shared_layers", None))
        return shares or any(self.looked_up)

    @property
    def layers(self) -> nn.ModuleList:
        layers = self.model.get_submodule(self.layers_path)
        assert isinstance(layers, nn.ModuleList)
        return layers

    @property
    def params(self) -> tuple[Param, ...]:
        return tuple(param for block in self.blocks for param in block.params)

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """The params' names, each with its other names."""
        return {param.name: param.aliases for param in self.params}

    @property
    def tied(self) -> bool:
        """Whether the output projection's weight is a param of the embedding."""
        return self.owner(f"{self.head_path}.weight") in {p.name for p in self.blocks[0].params}

    def owner(self, name: str) -> str:
        """Return the param's name of a tensor that may be known by another name."""
        return next((p.name for p in self.params if name in p.aliases), name)

    def placed(self, place: Callable[[Tensor], Tensor]) -> Decoder:
        """Return a decoder whose skeleton is a copy with each buffer as `place` returns it."""
        model = copy.deepcopy(self.model)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = place(buffer)
        return replace(self, model=model)

    def persistent_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that a folder must carry, by name. They are the real tensors."""
        elsewhere = {param.name for param in self.carried}
        return {
            name: value
            for name, value in persistent_buffers(self.model).items()
            if name not in elsewhere
        }


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a folder has, by name."""
    return {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if not isinstance(value, nn.Parameter)
    }


def has_experts(model: PreTrainedModel) -> bool:
    """Return whether the model's code multiplies by groups of rows."""
    return any(map(is_mixture, model.modules()))


def is_mixture(module: torch.nn.Module) -> bool:
    """Return whether a module has the weights of experts, and multiplies by groups of rows."""
    return hasattr(module, "_is_expert_parallel")

"""A Hugging Face decoder as blocks: embedding, each decoder layer, head. Nothing is rewritten.

    config --> model on the meta device --> its layer list --> which side every other module is on

The skeleton holds the model's own modules. Their parameters stay on the meta device and cost
nothing; the real weights live in the store and are bound per call. Buffers are real, and hold what
`from_pretrained` would have put there. Each layer keeps *its own* module, so attributes that differ
between layers (sliding windows, positions or none, experts or none) stay right.

The model's own forward shows what is before the layers and after them (probing/boundaries.py), and
in a joint model (multimodal.py) what text never reads: tensors that are carried from folder to
folder, and have no block.

Laws (tests/models/test_decoder.py, tests/models/test_families.py, tests/models/chain)
    1. Every parameter belongs to exactly one block; a tied one to the block that reads it first.
       Of a joint model it is in one block, or carried.
    2. Dtypes, ties and buffers equal those of `from_pretrained`.
    3. A model that cannot be split is a NotSplittable with the reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from megatrain.errors import ConfigError, NotSplittable, listing
from megatrain.models.adapters.lora import Adapters, Lora, adapt_layers, is_adapter
from megatrain.models.balance import Balancing, find_balancing, has_own_balancing
from megatrain.models.ends import named_ends
from megatrain.models.multimodal import text_part
from megatrain.models.patterns import check_patterns, matches
from megatrain.models.probing.boundaries import (
    find_head,
    find_layers,
    find_sides,
    persistent_buffers,
)
from megatrain.models.skeleton import build_skeleton
from megatrain.step.ops import Role

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One named tensor of a block."""

    name: str
    """Its name in the model."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    """What compute sees: the model's dtype, or fp32 where the model insists on it."""
    aliases: tuple[str, ...] = ()
    """Other names of the same tensor: its ties."""
    trained: bool = True
    is_adapter: bool = False
    """Part of an adapter: no param of the model itself, and in none of its folders."""

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The streamed unit."""

    index: int
    role: Role
    params: tuple[Param, ...]


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
    """How the model's own code balances its experts; None if it does not, or in another way."""
    adapters: Adapters | None = None
    """What is trained in place of the model's own params, which are all frozen then."""
    asks_balancing: bool = False
    """config.json asks for `output_router_logits`, and the model's code then balances experts."""
    carried: tuple[Param, ...] = ()
    """Params and persistent buffers of a joint model that text never reads: without values here."""
    end_tokens: frozenset[int] = frozenset()
    """Tokens that end a text, by the files of the model; a tokenizer may have one more."""

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config

    @property
    def text_config(self) -> PreTrainedConfig:
        """Of the decoder itself: a part of a joint model's `config`, else the same."""
        return text_part(self.model.config)

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


def build_decoder(
    config: PreTrainedConfig,
    dtype: Literal["bf16", "fp32"],
    frozen: tuple[str, ...] = (),
    attn: str | None = None,
    lora: Lora | None = None,
) -> Decoder:
    """Return the decoder that `config` describes; `frozen` are name patterns not to be trained.

    `attn` is an attention implementation of transformers (`sdpa`, `eager`, `flex_attention` ...);
    None lets it choose. With `lora` its adapters alone are trained. Costs no memory for weights.
    Raises NotSplittable, MissingPackage, or ConfigError for a pattern that matches nothing.
    """
    asked = bool(getattr(text_part(config), "output_router_logits", False))
    if asked:  # stand-ins for layers have no routers; the engine collects their logits itself
        config = copy.deepcopy(config)
        text_part(config).output_router_logits = False
    model = build_skeleton(config, COMPUTE_DTYPES[dtype], attn)
    path, layers = find_layers(model)
    head_path = find_head(model)
    sides = find_sides(model, path, layers, head_path)
    adapters = None if lora is None else adapt_layers(model, path, lora)
    names: list[list[str]] = [sides.before]
    names += [
        [f"{path}.{i}.{n}" for n, _ in layer.named_parameters()] for i, layer in enumerate(layers)
    ]
    names.append(sides.after)
    _refuse_shared(names)
    aliases = _aliases(model)
    owned = {name: aliases.get(name, ()) for block_names in names for name in block_names}
    check_patterns("model.frozen", frozen, owned)
    trained = {name for name in owned if is_adapter(name) or adapters is None}
    trained = {name for name in trained if not matches(name, frozen)}
    if not trained:
        raise ConfigError("model.frozen matches every parameter, so nothing would be trained.")
    roles = (Role.EMBEDDING, *(Role.LAYER for _ in layers), Role.HEAD)
    blocks = tuple(
        Block(
            index=index,
            role=role,
            params=tuple(_param(model, name, aliases, trained) for name in block_names),
        )
        for index, (role, block_names) in enumerate(zip(roles, names, strict=True))
    )
    return Decoder(
        model=model,
        blocks=blocks,
        layers_path=path,
        num_layer_outputs=sides.num_outputs,
        head_path=head_path,
        balancing=find_balancing(model, path, head_path, sides.num_outputs),
        adapters=adapters,
        asks_balancing=asked and has_own_balancing(model, path),
        carried=tuple(_carried_param(model, name, aliases) for name in sides.never),
        end_tokens=named_ends(config),
    )


def _refuse_shared(names: list[list[str]]) -> None:
    flat = [name for block in names for name in block]
    if len(flat) != len(set(flat)):
        shared = {name for name in flat if flat.count(name) > 1}
        raise NotSplittable(f"blocks share parameters: {listing(shared)}")


def _aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return, for each parameter's first name, its other names."""
    first: dict[int, str] = {id(param): name for name, param in model.named_parameters()}
    others: dict[str, tuple[str, ...]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        owner = first[id(param)]
        if name != owner:
            others[owner] = (*others.get(owner, ()), name)
    return others


def _param(
    model: nn.Module, name: str, aliases: dict[str, tuple[str, ...]], trained: set[str]
) -> Param:
    tensor = model.get_parameter(name)
    if tensor.dtype not in COMPUTE_DTYPES.values():
        raise NotSplittable(
            f"parameter {name} is {tensor.dtype}; only bf16 and fp32 can be trained"
        )
    return Param(
        name=name,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        aliases=aliases.get(name, ()),
        trained=name in trained,
        is_adapter=is_adapter(name),
    )


def _carried_param(model: PreTrainedModel, name: str, aliases: dict[str, tuple[str, ...]]) -> Param:
    tensor = model.state_dict(keep_vars=True)[name]
    return Param(
        name=name,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        aliases=aliases.get(name, ()),
        trained=False,
    )

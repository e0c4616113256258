"""A Hugging Face decoder as blocks: embedding, each decoder layer, head. Nothing is rewritten.

    config --> model on the meta device --> its layer list --> which side every other module is on

The skeleton holds the model's own modules. Their parameters stay on the meta device and cost
nothing; the real weights live in the store and are bound per call. Buffers are real, and hold what
`from_pretrained` would have put there. Each layer keeps *its own* module, so attributes that differ
between layers (sliding windows, positions or none, experts or none) stay right.

The side of a module outside the layers is not guessed from names: the model's own forward is run
once with stand-ins for layers and weights, and shows the modules before the first layer and those
after the last.

Laws (tests/models/test_decoder.py, tests/models/test_families.py)
    1. Every parameter belongs to exactly one block; a tied one to the block that reads it first.
    2. Dtypes, ties and buffers equal those of `from_pretrained`.
    3. A model that cannot be split is a NotSplittable with the reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from megatrain.errors import ConfigError, NotSplittable, listing
from megatrain.models.balance import Balancing, find_balancing, has_own_balancing
from megatrain.models.patterns import check_patterns, matches
from megatrain.models.skeleton import build_skeleton
from megatrain.models.stand_ins import (
    Call,
    CarriedTensor,
    head_replaced,
    layers_replaced,
    stand_in_weights,
    tensors_in,
)
from megatrain.step.ops import Role

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MAX_LAYER_OUTPUTS = 3
MAX_STAND_IN = 1 << 26
"""Elements. A product with a stand-in makes a real matrix of it."""


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
    asks_balancing: bool = False
    """config.json asks for `output_router_logits`, and the model's code then balances experts."""

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config

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
        return {
            name: value
            for name, value in self.model.state_dict(keep_vars=True).items()
            if not isinstance(value, nn.Parameter)
        }


def build_decoder(
    config: PreTrainedConfig,
    dtype: Literal["bf16", "fp32"],
    frozen: tuple[str, ...] = (),
    attn: str | None = None,
) -> Decoder:
    """Return the decoder that `config` describes; `frozen` are name patterns not to be trained.

    `attn` is an attention implementation of transformers (`sdpa`, `eager`, `flex_attention` ...);
    None lets it choose. Costs no memory for weights. Raises NotSplittable, MissingPackage, or
    ConfigError for a pattern that matches nothing.
    """
    asked = bool(getattr(config, "output_router_logits", False))
    if asked:  # stand-ins for layers have no routers; the engine collects their logits itself
        config = copy.deepcopy(config)
        config.output_router_logits = False
    model = build_skeleton(config, COMPUTE_DTYPES[dtype], attn)
    path, layers = _find_layers(model)
    head_path = _find_head(model)
    before, after, num_outputs = _find_sides(model, path, layers, head_path)
    names: list[list[str]] = [before]
    names += [
        [f"{path}.{i}.{n}" for n, _ in layer.named_parameters()] for i, layer in enumerate(layers)
    ]
    names.append(after)
    _refuse_shared(names)
    aliases = _aliases(model)
    owned = {name: aliases.get(name, ()) for block_names in names for name in block_names}
    check_patterns("model.frozen", frozen, owned)
    if all(matches(name, frozen) for name in owned):
        raise ConfigError("model.frozen matches every parameter, so nothing would be trained.")
    roles = (Role.EMBEDDING, *(Role.LAYER for _ in layers), Role.HEAD)
    blocks = tuple(
        Block(
            index=index,
            role=role,
            params=tuple(_param(model, name, aliases, frozen) for name in block_names),
        )
        for index, (role, block_names) in enumerate(zip(roles, names, strict=True))
    )
    return Decoder(
        model=model,
        blocks=blocks,
        layers_path=path,
        num_layer_outputs=num_outputs,
        head_path=head_path,
        balancing=find_balancing(model, path, head_path, num_outputs),
        asks_balancing=asked and has_own_balancing(model, path),
    )


def _find_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the list that holds most of the model: its decoder layers."""
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise NotSplittable(f"{model.config.model_type}: no list of layers found in the model")
    return max(lists, key=lambda item: (_num_elements(item[1]), -len(item[0])))


def _num_elements(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _find_head(model: PreTrainedModel) -> str:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise NotSplittable(f"{model.config.model_type}: its output projection is not linear")
    return str(next(name for name, module in model.named_modules() if module is head))


def _find_sides(
    model: PreTrainedModel, path: str, layers: nn.ModuleList, head_path: str
) -> tuple[list[str], list[str], int]:
    """Return the params used before the layers, those used after, and a layer's outputs."""
    moments: dict[str, set[int]] = {
        name: set()
        for name, module in model.named_modules()
        if module._parameters and name != head_path and not name.startswith(f"{path}.")
    }
    _refuse_large(model, moments)
    calls, num_outputs = _probe(model, path, layers, head_path, moments)
    _refuse_crosstalk(model, calls, len(layers))
    owned = _owned_names(model, f"{path}.", head_path)
    before: list[str] = []
    after: list[str] = []
    for name, params in owned.items():
        if name == head_path:
            after += params
            continue
        sides = {moment == 0 for moment in moments[name]}
        if len(sides) != 1 or any(0 < moment < len(layers) for moment in moments[name]):
            raise NotSplittable(
                f"{model.config.model_type}: {listing(params)} is not used on exactly one side of "
                f"the layers (seen after {sorted(moments[name])} of {len(layers)} layers)"
            )
        (before if sides == {True} else after).extend(params)
    return before, after, num_outputs


def _refuse_large(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Refuse projections beside the layers that no model has; a look-up takes only rows."""
    for name in names:
        module = model.get_submodule(name)
        for param in module.parameters(recurse=False):
            if param.numel() > MAX_STAND_IN and not isinstance(module, nn.Embedding):
                raise NotSplittable(
                    f"{model.config.model_type}: {name} is outside the layers and has "
                    f"{param.numel()} elements; the limit is {MAX_STAND_IN}"
                )


def _owned_names(model: nn.Module, layers_prefix: str, head_path: str) -> dict[str, list[str]]:
    """Return the deduplicated params outside the layers, by the module that owns them."""
    owned: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        if not name.startswith(layers_prefix):
            owned.setdefault(name.rpartition(".")[0], []).append(name)
    # A head whose weight is tied but whose bias is its own still comes last.
    if head_path in owned:
        owned[head_path] = owned.pop(head_path)
    return owned


def _probe(
    model: PreTrainedModel,
    path: str,
    layers: nn.ModuleList,
    head_path: str,
    moments: dict[str, set[int]],
) -> tuple[list[Call], int]:
    """Run the model's forward with stand-ins; note after how many layers each module is called."""
    weights = stand_in_weights(model, path, head_path)
    inputs: dict[str, Any] = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "use_cache": False}
    calls: list[Call] = []

    def hear(call: Call, hidden: Tensor) -> Tensor:
        calls.append(call)
        return hidden

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _module, _args, seen=seen: seen.add(len(calls))
        )
        for name, seen in moments.items()
    ]
    failures = []
    try:
        for num_outputs in range(MAX_LAYER_OUTPUTS + 1):
            try:
                with (
                    layers_replaced(layers, hear, num_outputs),
                    head_replaced(model, head_path, lambda hidden: hidden),
                ):
                    torch.func.functional_call(model, weights, kwargs=inputs)
                return calls, num_outputs
            except Exception as error:  # the wrong number of outputs can fail in any way
                failures.append(error)
                calls.clear()
                for seen in moments.values():
                    seen.clear()
    finally:
        for hook in hooks:
            hook.remove()
    raise NotSplittable(
        f"{model.config.model_type}: its forward fails with stand-ins for its layers: "
        f"{type(failures[0]).__name__}: {str(failures[0])[:300]}"
    ) from failures[0]


def _refuse_crosstalk(model: PreTrainedModel, calls: list[Call], num_layers: int) -> None:
    """Refuse layers that are not a plain chain of hidden states."""
    family = model.config.model_type
    order = [call.layer for call in calls]
    if order != list(range(num_layers)):
        raise NotSplittable(
            f"{family}: its {num_layers} layers do not each run once, in order: {order[:16]}"
        )
    for call in calls:
        for value in tensors_in((call.args, call.kwargs)):
            if isinstance(value, CarriedTensor):
                raise NotSplittable(
                    f"{family}: layer {call.layer} receives more from an earlier layer than "
                    "hidden states"
                )
            if value.requires_grad:
                raise NotSplittable(
                    f"{family}: layer {call.layer} receives a trained tensor besides hidden states"
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
    model: nn.Module, name: str, aliases: dict[str, tuple[str, ...]], frozen: tuple[str, ...]
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
        trained=not matches(name, frozen),
    )

"""The boundaries of a model: its layers, its output projection, and the side of all the rest.

The side of a module outside the layers is not guessed from names: the model's own forward is run
once with stand-ins for layers and weights, and shows the modules before the first layer and those
after the last.

In a joint model that forward is over text. A tower is not found by its name: every function of
torch that gets a tensor of the model is noted, and a tensor that none got is carried, also one of a
module that is called (a newline between images). A tensor that is read past its module is not.

Laws (tests/models/test_decoder.py, tests/models/probing/test_boundaries.py)
    1. A model that is not a chain of layers is a UnsupportedModel with the reason.
    2. A tensor is noted if a function gets it, alone or in a list, and not for its shape or dtype.
    3. A product with a tensor larger than any projection beside layers is refused before it is
       made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from megatrain.errors import UnsupportedModel, listing
from megatrain.models.classes import output_projection
from megatrain.models.decoder import persistent_buffers
from megatrain.models.layer_call import TensorPath, tensors_by_path
from megatrain.models.multimodal import joint_class, text_part
from megatrain.models.passed import shared_mapping
from megatrain.models.probing.stand_ins import (
    Call,
    ExtraOutput,
    head_replaced,
    layers_replaced,
    stand_in_weights,
    tensors_in,
)

MAX_LAYER_OUTPUTS = 3
MAX_STAND_IN = 1 << 26
"""Elements. A product with a stand-in makes a real matrix of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """The tensors outside the layers, by when the model's forward uses them."""

    before: list[str]
    after: list[str]
    never: list[str]
    """Params and persistent buffers of a joint model that text never reads."""
    num_outputs: int
    """Outputs of a layer: 0 when it returns hidden states alone, else the length of the tuple."""
    looked_up: tuple[frozenset[TensorPath], ...]
    """For each layer, the arguments besides hidden states that gradients go back through."""


def find_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the list that holds most of the model, or of its text part: its decoder layers."""
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    if joint_class(model.config) is not None:
        inside = set(model.get_decoder().modules())
        depth = getattr(text_part(model.config), "num_hidden_layers", None)
        lists = [(n, m) for n, m in lists if m in inside and len(m) == depth]
    if not lists:
        raise UnsupportedModel(f"{model.config.model_type}: no list of layers found in the model")
    return max(lists, key=lambda item: (_num_elements(item[1]), -len(item[0])))


def _num_elements(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def find_head(model: PreTrainedModel) -> str:
    head = output_projection(model)
    if not isinstance(head, nn.Linear):
        raise UnsupportedModel(f"{model.config.model_type}: its output projection is not linear")
    return str(next(name for name, module in model.named_modules() if module is head))


def find_sides(model: PreTrainedModel, path: str, layers: nn.ModuleList, head_path: str) -> Sides:
    """Return the params used before the layers, after them, and never. Raises UnsupportedModel."""
    moments: dict[str, set[int]] = {
        name: set()
        for name, module in model.named_modules()
        if module._parameters and name != head_path and not name.startswith(f"{path}.")
    }
    joint = joint_class(model.config) is not None
    if not joint:
        _refuse_large(model, moments)
    weights = stand_in_weights(model, path, head_path)
    buffers = {
        name: buffer
        for name, buffer in persistent_buffers(model).items()
        if not name.startswith((f"{path}.", f"{head_path}."))
    }
    large = frozenset(_large(model, moments))
    reads = Reads({**weights, **buffers}, large)
    calls, num_outputs = _probe(model, path, layers, head_path, moments, weights, reads)
    looked_up = _looked_up(model, calls, len(layers))
    owned = _owned_names(model, f"{path}.", head_path)
    before: list[str] = []
    after: list[str] = []
    never = [name for name in buffers if joint and name not in reads.names]
    for name, found in owned.items():
        if name == head_path:
            after += found
            continue
        unread = [param for param in found if joint and param not in reads.names]
        params = [param for param in found if param not in unread]
        never += unread
        if not params:
            continue
        sides = {moment == 0 for moment in moments[name]}
        if len(sides) != 1 or any(0 < moment < len(layers) for moment in moments[name]):
            raise UnsupportedModel(
                f"{model.config.model_type}: {listing(params)} is not used on exactly one side of "
                f"the layers (seen after {sorted(moments[name])} of {len(layers)} layers)"
            )
        (before if sides == {True} else after).extend(params)
    return Sides(
        before=before, after=after, never=never, num_outputs=num_outputs, looked_up=looked_up
    )


def _refuse_large(model: PreTrainedModel, modules: Iterable[str]) -> None:
    """Refuse projections beside the layers that no model has."""
    for name, size in _large(model, modules).items():
        raise UnsupportedModel(
            f"{model.config.model_type}: {name} is outside the layers and has {size} elements; "
            f"the limit is {MAX_STAND_IN}"
        )


def _large(model: PreTrainedModel, modules: Iterable[str]) -> dict[str, int]:
    """Return the params that are too large for a product; a look-up takes only rows."""
    return {
        f"{name}.{own}": param.numel()
        for name in modules
        for own, param in model.get_submodule(name).named_parameters(recurse=False)
        if param.numel() > MAX_STAND_IN and not isinstance(model.get_submodule(name), nn.Embedding)
    }


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
    weights: dict[str, Tensor],
    reads: Reads,
) -> tuple[list[Call], int]:
    """Run the model's forward with stand-ins; note after how many layers each module is called."""
    inputs: dict[str, Any] = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "use_cache": False}
    calls: list[Call] = []

    def receive(call: Call, hidden: Tensor) -> Tensor:
        if hidden.dim() > 3:
            raise UnsupportedModel(
                f"{model.config.model_type}: layers get hidden states of {hidden.dim()} "
                "dimensions, several streams for each token"
            )
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
                    layers_replaced(layers, receive, num_outputs),
                    head_replaced(model, head_path, lambda hidden: hidden),
                    reads,
                ):
                    torch.func.functional_call(model, weights, kwargs=inputs)
                return calls, num_outputs
            except Exception as error:  # the wrong number of outputs can fail in any way
                failures.append(error)
                calls.clear()
                reads.names.clear()
                for seen in moments.values():
                    seen.clear()
    finally:
        for hook in hooks:
            hook.remove()
    if isinstance(failures[0], UnsupportedModel):
        raise failures[0]
    raise UnsupportedModel(
        f"{model.config.model_type}: its forward fails with stand-ins for its layers: "
        f"{type(failures[0]).__name__}: {str(failures[0])[:300]}"
    ) from failures[0]


def _looked_up(
    model: PreTrainedModel, calls: list[Call], num_layers: int
) -> tuple[frozenset[TensorPath], ...]:
    """Return the trained tensors that layers get besides hidden states, each for one layer.

    Refuses layers that are not a chain.
    """
    family = model.config.model_type
    order = [call.layer for call in calls]
    if order != list(range(num_layers)):
        raise UnsupportedModel(
            f"{family}: its {num_layers} layers do not each run once, in order: {order[:16]}"
        )
    readers: dict[int, int] = {}
    found: list[frozenset[TensorPath]] = []
    for call in calls:
        if any(isinstance(value, ExtraOutput) for value in tensors_in((call.args, call.kwargs))):
            raise UnsupportedModel(
                f"{family}: layer {call.layer} receives more from an earlier layer than hidden "
                "states"
            )
        tensors = tensors_by_path((call.args, call.kwargs))
        trained = {path: tensor for path, tensor in tensors if tensor.requires_grad}
        for tensor in trained.values():
            # Its gradients would add up in another order than those of the plain model.
            if (other := readers.setdefault(id(tensor), call.layer)) != call.layer:
                raise UnsupportedModel(
                    f"{family}: layers {other} and {call.layer} receive one trained tensor besides "
                    "hidden states"
                )
        found.append(frozenset(trained))
    num_shared = getattr(text_part(model.config), "num_kv_shared_layers", None)
    if num_shared and any(shared_mapping(call) is None for call in calls):
        raise UnsupportedModel(
            f"{family}: its last {num_shared} layers read keys and values of earlier layers "
            "(num_kv_shared_layers) in a way that is not known"
        )
    return tuple(found)


class Reads(TorchFunctionMode):
    """While it is entered, notes which of `tensors` are read."""

    def __init__(self, tensors: Mapping[str, Tensor], too_large: frozenset[str]) -> None:
        """Reading one of `too_large` raises UnsupportedModel."""
        super().__init__()
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._tensors = tensors  # so that no other tensor gets the id of one of these
        self._too_large = too_large
        self.names: set[str] = set()
        """Names of the tensors that were read."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") != "__get__":
            for tensor in tensors_in((args, kwargs or {})):
                name = self._names.get(id(tensor))
                if name in self._too_large:
                    raise UnsupportedModel(
                        f"{name} is outside the layers and too large to multiply"
                    )
                if name is not None:
                    self.names.add(name)
        return func(*args, **(kwargs or {}))

"""Stand-ins for a model's layers: they note the arguments of a layer and pass hidden states on.

The model's own forward, run with a recorder in place of each layer, computes everything that lies
outside the layers exactly as its authors wrote it: embedding scale, masks per attention kind,
rotary tables, final norm. What layer i would have been handed is then known without running it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class Carried:
    """Takes the place of what a layer returns beside hidden states.

    If one turns up among a later layer's arguments, the layers talk to each other directly.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a layer, as the model's own forward made it."""

    layer: int
    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Recorder(nn.Module):
    """Stands in for one layer; everything but `forward` is answered by the layer itself."""

    def __init__(self, layer: nn.Module, index: int, calls: list[Call], num_outputs: int) -> None:
        super().__init__()
        # Past nn.Module's own __setattr__: the layer must not become a submodule here.
        self.__dict__.update(layer=layer, index=index, calls=calls, num_outputs=num_outputs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, args, kwargs = take_hidden(args, kwargs)
        calls: list[Call] = self.__dict__["calls"]
        calls.append(Call(layer=self.__dict__["index"], hidden=hidden, args=args, kwargs=kwargs))
        num_outputs: int = self.__dict__["num_outputs"]
        if num_outputs == 0:
            return hidden
        return (hidden, *(Carried() for _ in range(num_outputs - 1)))


def take_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """Return the hidden states of a layer's call, and its other arguments."""
    if args:
        return args[0], args[1:], kwargs
    rest = dict(kwargs)
    return rest.pop("hidden_states"), (), rest


@contextmanager
def recording(layers: nn.ModuleList, num_outputs: int) -> Iterator[list[Call]]:
    """Put recorders in place of `layers`, and yield the list their calls go to.

    `num_outputs` is 0 for layers that return a tensor, else the length of the tuple they return.
    """
    calls: list[Call] = []
    originals = list(layers)
    for index, layer in enumerate(originals):
        layers[index] = Recorder(layer, index, calls, num_outputs)
    try:
        yield calls
    finally:
        for index, layer in enumerate(originals):
            layers[index] = layer


def tensors_in(value: Any) -> Iterator[Tensor | Carried]:
    """Yield every tensor and every Carried inside nested arguments."""
    if isinstance(value, Tensor | Carried):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def stand_in_weights(model: nn.Module, skip: str) -> dict[str, Tensor]:
    """Return a tensor of the right shape for each parameter not under `skip`, at no memory cost.

    Each is one zero, expanded; they require gradients, so that it shows where gradients would go.
    """
    zeros: dict[torch.dtype, Tensor] = {}
    for _, param in model.named_parameters():
        if param.dtype not in zeros:
            zeros[param.dtype] = torch.zeros((), dtype=param.dtype, requires_grad=True)
    return {
        name: zeros[param.dtype].expand(param.shape)
        for name, param in model.named_parameters()
        if not name.startswith(skip)
    }

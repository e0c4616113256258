"""Stand-ins for parts of a model: they receive its inputs and return a result in its place.

The model's own forward, run with a stand-in for each layer, computes everything outside
the layers exactly as its authors wrote it: embedding scale, masks per attention kind, rotary
tables, final norm. What layer i would have been handed is then known without running it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class ForwardEnded(Exception):
    """Ends a forward from inside a stand-in; the caller that put it there catches this."""


class ExtraOutput:
    """Takes the place of what a layer returns beside hidden states.

    One among a later layer's arguments shows that layers pass on more than hidden states.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a layer, as the model's own forward made it, but for its hidden states."""

    layer: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    added: Tensor | None = None
    """What the model adds to hidden states before the layer gets them; None: nothing."""


Receive = Callable[[Call, Tensor], Tensor]


class _StandIn(nn.Module):
    """Takes the place of a module; everything but `forward` is answered by the module itself."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # Past nn.Module's own __setattr__: the module must not become a submodule here.
        self.__dict__["module"] = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["module"], name)


class _LayerStandIn(_StandIn):
    def __init__(self, layer: nn.Module, index: int, receive: Receive, num_outputs: int) -> None:
        super().__init__(layer)
        self.index = index
        self.receive = receive
        self.num_outputs = num_outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, args, kwargs = _take_hidden(args, kwargs)
        answer = self.receive(Call(layer=self.index, args=args, kwargs=kwargs), hidden)
        if self.num_outputs == 0:
            return answer
        return (answer, *(ExtraOutput() for _ in range(self.num_outputs - 1)))


class _HeadStandIn(_StandIn):
    def __init__(self, head: nn.Module, receive: Callable[[Tensor], Tensor]) -> None:
        super().__init__(head)
        self.receive = receive

    def forward(self, hidden: Tensor) -> Tensor:
        return self.receive(hidden)


def _take_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """Return the hidden states of a layer's call, and its other arguments."""
    if args:
        return args[0], args[1:], kwargs
    rest = dict(kwargs)
    return rest.pop("hidden_states"), (), rest


@contextmanager
def layers_replaced(layers: nn.ModuleList, receive: Receive, num_outputs: int) -> Iterator[None]:
    """Replace `layers` by stand-ins: `receive` gets each call and its hidden states, and responds.

    `num_outputs` is 0 for layers that return a tensor, else the length of the tuple they return.
    """
    originals = list(layers)
    for index, layer in enumerate(originals):
        layers[index] = _LayerStandIn(layer, index, receive, num_outputs)
    try:
        yield
    finally:
        for index, layer in enumerate(originals):
            layers[index] = layer


@contextmanager
def head_replaced(
    model: nn.Module, head_path: str, receive: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Put a stand-in in place of the output projection: `receive` makes logits of its input."""
    parent_path, _, name = head_path.rpartition(".")
    parent = model.get_submodule(parent_path)
    head = getattr(parent, name)
    setattr(parent, name, _HeadStandIn(head, receive))
    try:
        yield
    finally:
        setattr(parent, name, head)


@contextmanager
def rows_looked_up(embedding: Any, rows: Tensor | None) -> Iterator[None]:
    """Let an embedding look up `rows` in place of the tokens it is given; None: the tokens.

    Its padding token, if it has one, is a token and not a row: it gets a gradient like others.
    """
    if rows is None:
        yield
        return
    padding, embedding.padding_idx = embedding.padding_idx, None

    def look_up(_module: Any, given: tuple[Tensor]) -> tuple[Tensor]:
        assert given[0].shape == rows.shape, "the model looks up other tokens than its inputs"
        return (rows,)

    hook = embedding.register_forward_pre_hook(look_up)
    try:
        yield
    finally:
        hook.remove()
        embedding.padding_idx = padding


def tensors_in(value: Any) -> Iterator[Tensor | ExtraOutput]:
    """Yield every tensor and every ExtraOutput inside nested arguments."""
    if isinstance(value, Tensor | ExtraOutput):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def stand_in_weights(model: nn.Module, *skip: str) -> dict[str, Tensor]:
    """Return a tensor of the right shape for each parameter but those under the paths `skip`.

    Each is one zero, expanded: they cost no memory. They require gradients, so that it shows where
    gradients would go.
    """
    zeros: dict[torch.dtype, Tensor] = {}
    for param in model.parameters():
        if param.dtype not in zeros:
            zeros[param.dtype] = torch.zeros((), dtype=param.dtype, requires_grad=True)
    prefixes = tuple(f"{path}." for path in skip)
    return {
        name: zeros[param.dtype].expand(param.shape)
        for name, param in model.named_parameters()
        if not name.startswith(prefixes)
    }

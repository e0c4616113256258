"""Activations that stay on the device: a layer's graph, from its forward to its backward.

    forward    runs the layer with gradients and keeps its graph
    backward   goes back through that graph: nothing is computed again

A graph must not hold weights: they are in a slot that other blocks visit meanwhile, or in the
store. What autograd saves of them is kept as a place in a param, and taken from the params that
backward is given: those of the same block, wherever they are by then.

Laws (tests/engine/compute/test_kept.py)
    1. Output and gradients are those of forward and recompute, bit for bit.
    2. A graph refers to no memory of weights.
    3. What a graph holds beside that of its layer's arguments is counted, and freed by backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from megatrain.engine.compute.layers import AddGradients, Returned, gradients_with, tail_tile
from megatrain.engine.tape import Key
from megatrain.errors import ConfigError
from megatrain.models.layer_call import LayerOutput
from megatrain.models.passed import Link
from megatrain.models.template import Template
from megatrain.step.settings import StepSettings

Count = Callable[[Tensor, str], Tensor]
"""Counts the memory of a tensor until nothing uses it (devices/device.py)."""


def check_kept(settings: StepSettings, num_layers: int) -> None:
    """Raise ConfigError for layers that the model does not have, or that run over tiles."""
    if not 0 <= settings.kept_layers <= num_layers:
        raise ConfigError(
            f"kept_layers is {settings.kept_layers}, must be between 0 and the {num_layers} layers "
            "of the model"
        )
    if settings.kept_layers and (tile := tail_tile(settings)) is not None:
        raise ConfigError(
            f"kept_layers is {settings.kept_layers} and tiles have {tile} tokens: layers run over "
            "tiles to hold less, and compute each again. Set one of the two."
        )


class KeptActivations:
    """The graphs of a step by layer and micro-batch."""

    def __init__(self, template: Template, counted: Count) -> None:
        self._template = template
        self._counted = counted
        self._graphs: dict[Key, _Graph] = {}

    def forward(
        self, key: Key, leaves: Mapping[str, Tensor], given: Tensor, link: Link
    ) -> LayerOutput:
        """Return what the layer of `link` makes of `given`, without a graph: that is kept here."""
        call = link.call
        shared = (given, call.args, call.kwargs, list(link.leaves.values()))
        saved = _SavedTensors(leaves, shared, self._counted)
        with torch.enable_grad(), saved_tensors_hooks(saved.pack, saved.unpack):
            hidden, logits = self._template.routed_layer(leaves, given, call)
        self._graphs[key] = _Graph(leaves, given, hidden, logits, saved, link)
        return hidden.detach(), tuple(one.detach() for one in logits)

    def backward(
        self, key: Key, weights: Mapping[str, Tensor], returned: Returned, add: AddGradients
    ) -> Tensor | None:
        """Add up the gradients of a layer's params; return that of what it was given, if wanted.

        `weights` are the block's params, as they are now.
        """
        graph = self._graphs.pop(key)
        with torch.enable_grad():
            balance = returned.balance(graph.logits, slice(None))
        outputs = [(graph.hidden, returned.d_hidden), *balance]
        with graph.saved.reading(weights):
            return gradients_with(graph.link, outputs, graph.leaves, graph.given, add)

    def clear(self) -> None:
        """Forget what a failed step left."""
        self._graphs.clear()


@dataclass(frozen=True, slots=True)
class _Graph:
    leaves: Mapping[str, Tensor]
    given: Tensor
    hidden: Tensor
    logits: Sequence[Tensor]
    saved: _SavedTensors
    link: Link


class _Place(NamedTuple):
    """A view of a param."""

    name: str
    offset: int
    """Elements from the param's first."""
    shape: torch.Size
    strides: tuple[int, ...]


class _SavedTensors:
    """The tensors that autograd saves for one graph; of weights, only their places in params."""

    def __init__(self, params: Mapping[str, Tensor], shared: object, counted: Count) -> None:
        """`shared` has the tensors that others hold as well: they are not counted."""
        self._params = dict(params)
        self._counted = counted
        self._of_weights = {_memory(param) for param in params.values()}
        tensors = (leaf for leaf in tree_leaves(shared) if isinstance(leaf, Tensor))
        self._known = {_memory(tensor) for tensor in tensors}
        self._now: Mapping[str, Tensor] = {}

    def pack(self, tensor: Tensor) -> Tensor | _Place:
        """Return what is kept of a tensor that autograd saves."""
        memory = _memory(tensor)
        if memory in self._of_weights:
            return self._place(tensor)
        # Not the tensor itself: it may be a result of the node that saves it, and would hold it.
        tensor = tensor.detach()
        if memory not in self._known:
            self._known.add(memory)
            self._counted(tensor, "kept activations")
        return tensor

    def unpack(self, kept: Tensor | _Place) -> Tensor:
        """Return the tensor that was saved."""
        if isinstance(kept, Tensor):
            return kept
        # Autograd counts writes per buffer, and other blocks' params are written into it.
        param = self._now[kept.name].data
        return param.as_strided(kept.shape, kept.strides, param.storage_offset() + kept.offset)

    @contextmanager
    def reading(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Let places be those of `weights`."""
        self._now = weights
        try:
            yield
        finally:
            self._now = {}

    def _place(self, tensor: Tensor) -> _Place:
        memory = _memory(tensor)
        for name, param in self._params.items():
            offset = int(tensor.storage_offset()) - int(param.storage_offset())
            if (
                _memory(param) == memory
                and param.dtype == tensor.dtype
                and 0 <= offset < param.numel()
            ):
                return _Place(name, offset, tensor.shape, tensor.stride())
        raise AssertionError(
            f"a layer saved a tensor that is not one of its parameters: {tensor.shape}"
        )


def _memory(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory, whatever its device."""
    return int(tensor.untyped_storage()._cdata)

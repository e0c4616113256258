"""Tensors that layers get besides hidden states, and that gradients go back through.

Three kinds:

    added        the front makes one for some layers, and the model adds it to the hidden states
                 that the layer gets: features of a tower's own layers (deepstack)
    looked up    the front makes one for each layer, of trained weights: per-layer embeddings
    shared       a layer leaves tensors in a mapping that the model hands to all of its layers, and
                 later layers read them: keys and values (`num_kv_shared_layers`)

Forward leaves both where the model's own code puts them: among the arguments of a layer's call, and
in the mapping of the micro-batch. In backward a layer is called with leaves in their place and with
a mapping of its own. The gradients of these leaves wait here: those of shared tensors until the
layer that made them goes back, those of looked-up ones until the front does.

All of it is on the device from forward to backward: with per-layer embeddings, tokens x layers x
their width, twice.

Laws (tests/engine/test_passed.py, tests/models/test_passed.py)
    1. Losses and gradients are those of the plain model under ordinary autograd, bit for bit: a
       tensor's gradients add up from its last reader to its first, in its dtype, its own layer's
       last.
    2. What one backward leaves here, the next one of the same step does not find.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from megatrain.models.layer_call import TensorPath, tensors_by_path, with_tensors
from megatrain.models.probing.stand_ins import Call

LinkKey = tuple[Hashable, TensorPath]
"""The layer of a looked-up tensor or the name of a shared entry, and the path in it."""
Paths = Sequence[frozenset[TensorPath]]
"""For each layer, the arguments that the front looked up."""
_ADDED: TensorPath = ("added",)
Count = Callable[[Tensor, str], Tensor]
Shared = MutableMapping[Any, Any]


def shared_mapping(call: Call) -> tuple[str, Shared] | None:
    """Return the argument of a layer's call that layers leave tensors in, by its name."""
    found = ((n, value) for n, value in call.kwargs.items() if isinstance(value, UserDict))
    return next(found, None)


@dataclass(slots=True)
class Link:
    """One call of a layer, in backward or with a graph that stays."""

    call: Call
    """The call, with leaves in place of what gradients go back through."""
    leaves: Mapping[LinkKey, Tensor] = field(default_factory=dict)
    _made: Callable[[], list[tuple[Tensor, Tensor]]] = list
    _give: Callable[[Mapping[LinkKey, Tensor | None]], None] = lambda found: None

    def outputs(self) -> list[tuple[Tensor, Tensor]]:
        """Return the tensors that this layer has shared, with the gradients of their readers."""
        return self._made()

    def give(self, found: Mapping[LinkKey, Tensor | None]) -> None:
        """Take the gradients of `leaves`."""
        self._give(found)


class LayerCalls:
    """The calls of the layers for one micro-batch, and what passes between them and the front."""

    def __init__(
        self, calls: Sequence[Call], looked_up: Paths, counted: Count, *, trains_front: bool
    ) -> None:
        """`trains_front`: looked-up tensors need gradients."""
        self._calls = calls
        self._trains_front = trains_front
        self._looked_up = looked_up if trains_front else [frozenset()] * len(calls)
        self._counted = counted
        self._makers: dict[Hashable, int] = {}
        """The layer that left an entry in the mapping."""
        self._gradients: dict[LinkKey, Tensor] = {}
        for tensor in self._first_of_each_memory(looked_up):
            counted(tensor, "inputs of layers")

    def __getitem__(self, layer: int) -> Call:
        """Return the call of a layer, as the model's own forward made it."""
        return self._calls[layer]

    def entering(self, layer: int, hidden: Tensor) -> Tensor:
        """Return hidden states with what the model adds to them before the layer."""
        added = self._calls[layer].added
        return hidden if added is None else hidden + added

    def left(self, layer: int, gradient: Tensor | None) -> None:
        """Take the gradient of what a layer was given: what was added before it has the same."""
        if self._trains_front and self._calls[layer].added is not None and gradient is not None:
            own = gradient.clone()  # the layer below may overwrite it
            self._gradients[layer, _ADDED] = self._counted(own, "gradients of inputs of layers")

    def after_forward(self, layer: int, link: Link | None = None) -> None:
        """Note what a layer has left in the mapping; with a `link`, in that of its call."""
        there = shared_mapping(self._calls[layer])
        if there is None:
            return
        shared = there[1]
        own = None if link is None else shared_mapping(link.call)
        if own is not None:
            for name in own[1].keys() - shared.keys():
                shared[name] = with_tensors(own[1][name], lambda _, tensor: tensor.detach())
        for name in shared.keys() - self._makers.keys():
            self._makers[name] = layer
            for _, tensor in tensors_by_path(shared[name]):
                self._counted(tensor, "inputs of layers")

    def linked(self, layer: int, *, passes_gradient: bool) -> Link:
        """Return the call of a layer for a graph.

        `passes_gradient`: something below the layer is trained.
        """
        call, leaves = self._calls[layer], dict[LinkKey, Tensor]()

        def leaf(key: LinkKey, tensor: Tensor) -> Tensor:
            wants = passes_gradient and tensor.is_floating_point()
            leaves[key] = tensor.detach().requires_grad_(wants)
            return leaves[key]

        if paths := self._looked_up[layer]:
            args, kwargs = with_tensors(
                (call.args, call.kwargs),
                lambda path, t: leaf((layer, path), t) if path in paths else t,
            )
            call = replace(call, args=args, kwargs=kwargs)
        there = shared_mapping(call)
        if there is None:
            return Link(call, leaves, _give=self._add)
        name, shared = there
        own: Shared = UserDict()
        for entry, maker in self._makers.items():
            if maker < layer:
                own[entry] = _with_leaves(entry, shared[entry], leaf)
        call = replace(call, kwargs={**call.kwargs, name: own})
        return Link(call, leaves, lambda: list(self._made(layer, own)), self._add)

    def front_outputs(self, calls: Sequence[Call]) -> list[tuple[Tensor, Tensor]]:
        """Return the looked-up tensors of a front that ran again, with their gradients."""
        found = []
        for layer, paths in enumerate(self._looked_up):
            for path, tensor in tensors_by_path((calls[layer].args, calls[layer].kwargs)):
                if path in paths and (layer, path) in self._gradients:
                    found.append((tensor, self._gradients.pop((layer, path))))
            added, gradient = calls[layer].added, self._gradients.pop((layer, _ADDED), None)
            if added is not None and added.requires_grad and gradient is not None:
                found.append((added, gradient))
        return found

    def _made(self, layer: int, own: Shared) -> Iterator[tuple[Tensor, Tensor]]:
        for entry, maker in self._makers.items():
            if maker == layer:
                for path, tensor in tensors_by_path(own[entry]):
                    gradient = self._gradients.pop((entry, path), None)
                    if gradient is not None:
                        yield tensor, gradient

    def _add(self, found: Mapping[LinkKey, Tensor | None]) -> None:
        for key, gradient in found.items():
            if gradient is not None:
                before = self._gradients.get(key)
                total = gradient if before is None else before + gradient
                self._gradients[key] = self._counted(total, "gradients of inputs of layers")

    def _first_of_each_memory(self, looked_up: Paths) -> Iterator[Tensor]:
        seen: set[int] = set()
        for call, paths in zip(self._calls, looked_up, strict=True):
            for path, tensor in tensors_by_path((call.args, call.kwargs)):
                memory = int(tensor.untyped_storage()._cdata)
                if path in paths and memory not in seen:
                    seen.add(memory)
                    yield tensor


def _with_leaves(entry: Hashable, value: Any, leaf: Callable[[LinkKey, Tensor], Tensor]) -> Any:
    return with_tensors(value, lambda path, tensor: leaf((entry, path), tensor))

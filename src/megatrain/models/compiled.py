"""Layers as functions of tensors they do not own, plain or compiled: one graph per structure.

A model has many layers and few structures. Layers are of one structure when their modules agree in
class, attributes, and names, shapes and dtypes of params and buffers, and so do all submodules.
They share a *region*: one function, compiled around the module of the first of them, its
representative. What may still differ between them is bound for the time of a call:

    weights    arguments of the function, as the hidden states are
    buffers    likewise: each layer's own, whatever their values
    numbers    a layer's own place in the row (`layer_idx`), set on the representative. Torch guards
               what a graph has read: a layer whose code uses its number has a graph per number

Whatever else a module holds is compared by value if it is plain, hooks by their code and what it
closes over, else by identity; in doubt two layers are of two structures, which costs a graph and no
bit.

Arguments, grad mode and train or eval are guarded by torch: each kind has its graph, made when it
is first met. So is the number of tokens: the first has its own graph, which is the fastest
when there is no other; the second brings one for all lengths, and so does a second number of rows.
Torch makes at most MAX_GRAPHS for a region. Calls that fit none of them then run uncompiled, and a
warning reports it.

The representative is changed during a call and restored after it: one caller at a time, in any
thread. Nothing of torch's compiler is imported before the first call.

Laws (tests/models/test_compiled.py)
    1. The number of graphs does not grow with the number of layers.
    2. Backends that compute with torch's own kernels give the bits of the uncompiled layer.
    3. No layer computes with another's weights, buffers or number.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from megatrain import choices
from megatrain.compat import compile_apart
from megatrain.errors import ConfigError
from megatrain.models.layer_call import LayerOutput, apply_layer

MAX_GRAPHS = 32
"""Per region. Forward, recompute, the lowest layer and evaluation take one each for fixed lengths;
three times as many when lengths and rows vary, and as many again when some rows are padded."""
_PARTS = frozenset({"_parameters", "_buffers", "_modules"})
_PLAIN = (type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.Size, Enum)
_LIMIT_HIT = "Dynamo recompile limit exceeded"

Backend = str | Callable[..., Any]
_names = itertools.count()


class Regions:
    """The compiled layers of one model."""

    def __init__(
        self, layers: Sequence[nn.Module], backend: Backend = "inductor", *, routed: bool = False
    ) -> None:
        """`backend` is one of torch.compile's; others than the default are for tests.

        Raises ConfigError where compiled layers do not work with this Python and this torch.
        """
        if fault := choices.why_not_compiled():
            raise ConfigError(f"compile: {fault}. Upgrade, or set train.compile to false.")
        self.backend = backend
        numbers = _own_numbers(layers)
        firsts = representatives(layers)
        regions = {first: _Region(layers[first], first, backend, routed) for first in firsts}
        self._layers = [
            _Layer(layer, regions[first], numbers)
            for layer, first in zip(layers, firsts, strict=True)
        ]

    def call(
        self,
        index: int,
        weights: Mapping[str, Tensor],
        hidden: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> LayerOutput:
        """Return what layer `index` makes of `hidden`. Raises ConfigError if it cannot compile."""
        layer = self._layers[index]
        # In one order for all layers: graphs are guarded by the order of names, too.
        tensors = {name: weights[name] for name in layer.names} | layer.buffers()
        with layer.numbered():
            return layer.region(tensors, hidden, args, kwargs)


def representatives(layers: Sequence[nn.Module]) -> list[int]:
    """Return for each layer the first layer of its structure."""
    numbers = _own_numbers(layers)
    firsts: dict[object, int] = {}
    found: list[int] = []
    for index, layer in enumerate(layers):
        names = tuple(name for name, _ in layer.named_parameters())
        found.append(firsts.setdefault((names, _structure(layer, numbers)), index))
    return found


class _Region:
    """One structure: a function around its representative, compiled when first called."""

    def __init__(
        self, representative: nn.Module, first: int, backend: Backend, routed: bool
    ) -> None:
        self.representative = representative
        self.first = first
        self._backend = backend
        self._routed = routed
        self._function: Callable[..., LayerOutput] | None = None

    def __call__(self, *given: Any) -> LayerOutput:
        from torch._dynamo.exc import BackendCompilerFailed

        if self._function is None:
            self._function = self._compiled()
        num_before = _num_limits_hit()
        try:
            result = self._function(*given)
        except BackendCompilerFailed as error:
            raise ConfigError(
                f"compile: torch cannot compile {self}: {str(error)[:300]}. Set train.compile to "
                "false."
            ) from error
        if _num_limits_hit() > num_before:
            warnings.warn(
                f"compile: {self} has {MAX_GRAPHS} graphs, the limit. Inputs that fit none "
                "of them run uncompiled: correct, but slower. Micro-batches with fewer different "
                "shapes help; TORCH_LOGS=recompiles shows the differences.",
                stacklevel=2,
            )
        return result

    def __str__(self) -> str:
        return f"layer {self.first} ({type(self.representative).__name__}) or one like it"

    def _compiled(self) -> Callable[..., LayerOutput]:
        representative, routed = self.representative, self._routed

        def run(
            tensors: dict[str, Tensor],
            hidden: Tensor,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
        ) -> LayerOutput:
            return apply_layer(representative, tensors, hidden, args, kwargs, routed)

        # Torch keeps which sizes vary by a function's name and line. If regions shared that, a
        # weight of two sizes in two structures would become a weight of any size in both.
        name = f"layer_{self.first}_{next(_names)}"
        run.__code__ = run.__code__.replace(co_name=name, co_qualname=name)
        # Recompute must draw what forward drew, in another graph: torch's own generator, then.
        options = {"fallback_random": True} if self._backend == "inductor" else None
        return compile_apart(run, max_graphs=MAX_GRAPHS, backend=self._backend, options=options)


class _Layer:
    """One layer's params, buffers and numbers for a call of its region."""

    def __init__(self, layer: nn.Module, region: _Region, numbers: Collection[str]) -> None:
        self.region = region
        self.names = [name for name, _ in layer.named_parameters()]
        self._buffers = [(name, *_owner(layer, name)) for name, _ in layer.named_buffers()]
        representative = region.representative
        self._numbers = []
        for path in numbers if layer is not representative else ():
            module, name = _owner(layer, path)
            if module is not None and name in vars(module):
                self._numbers.append((_owner(representative, path)[0], name, vars(module)[name]))

    def buffers(self) -> dict[str, Tensor]:
        """Return the layer's own buffers, as they are now."""
        # Detached, or the representative's own would be found twice: in its module and here.
        return {path: module._buffers[name].detach() for path, module, name in self._buffers}

    @contextmanager
    def numbered(self) -> Iterator[None]:
        """Let the representative bear the layer's numbers."""
        before = [vars(module)[name] for module, name, _ in self._numbers]
        for module, name, value in self._numbers:
            vars(module)[name] = value
        try:
            yield
        finally:
            for (module, name, _), value in zip(self._numbers, before, strict=True):
                vars(module)[name] = value


def _owner(layer: nn.Module, path: str) -> tuple[Any, str]:
    """Return the submodule (or None) that has the tensor at `path`, and its name there."""
    parent, _, name = path.rpartition(".")
    try:
        return layer.get_submodule(parent), name
    except AttributeError:
        return None, name


def _own_numbers(layers: Sequence[nn.Module]) -> set[str]:
    """Return the paths of the integers that count the layers, in all layers that have them."""
    offsets: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        for prefix, module in layer.named_modules():
            for name, value in vars(module).items():
                if type(value) is int:
                    offsets.setdefault(f"{prefix}.{name}".lstrip("."), []).append(value - index)
    return {path for path, found in offsets.items() if len(found) > 1 and len(set(found)) == 1}


def _structure(module: nn.Module | None, numbers: Collection[str], prefix: str = "") -> object:
    """Return a key that is equal exactly for modules of equal structure."""
    if module is None:
        return None
    attributes = [
        (name, tuple(map(_function, value.values())))
        if name == "_forward_hooks"
        else (name, _identity(value))
        for name, value in sorted(vars(module).items())
        if name not in _PARTS and prefix + name not in numbers
    ]
    tensors = [
        (name, tensor if tensor is None else (tensor.shape, tensor.dtype, tensor.device))
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]
    ]
    submodules = [
        (name, _structure(submodule, numbers, f"{prefix}{name}."))
        for name, submodule in module._modules.items()
    ]
    return type(module), tuple(attributes), tuple(tensors), tuple(submodules)


def _function(value: Any, around: tuple[FunctionType, ...] = ()) -> object:
    """Return a key that is equal for functions made by the same code around equal values.

    `around` are the functions that hold this one, itself among them if it calls itself.
    """
    if not isinstance(value, FunctionType):
        return _identity(value)
    if value in around:
        return around.index(value)
    held = [cell.cell_contents for cell in value.__closure__ or ()]
    given = [value.__defaults__, value.__kwdefaults__, id(value.__globals__)]
    inner = [_function(each, (*around, value)) for each in held]
    return value.__code__, tuple(map(_identity, given)), tuple(inner)


def _identity(value: Any) -> object:
    """Return a key that is equal for equal plain values; other values equal only themselves."""
    kind = type(value)
    if isinstance(value, _PLAIN):
        return kind, value
    if isinstance(value, float):
        return kind, repr(value)  # a zero has a sign
    if kind in (list, tuple):
        return kind, tuple(map(_identity, value))
    if kind in (set, frozenset):
        return kind, frozenset(map(_identity, value))
    if isinstance(value, dict):
        return kind, tuple((_identity(key), _identity(item)) for key, item in value.items())
    if kind is functools.partial:
        return kind, *map(_identity, (value.func, value.args, value.keywords))
    return kind, id(value)


def _num_limits_hit() -> int:
    """Return how often torch has found that a function has all the graphs it may have."""
    from torch._dynamo.utils import counters

    reasons = counters["unimplemented"].items()
    return sum(count for reason, count in reasons if reason.startswith(_LIMIT_HIT))

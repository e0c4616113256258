"""A layer in three parts, cut at its mixer: the one place where tokens meet.

    before   hidden tile ---------------------> what the mixer gets (queries, keys, values)
    meet     what it got of all tiles --------> the mixer's output for the row
    after    hidden tile, its mixer output ---> the layer's output for the tile

All three are the model's own code. `before` is the layer's forward on a tile, ended where it would
call the mixer; `after` is the same forward with the mixer's output as the answer of that call. The
mixer is transformers' attention function, or a module of the layer. Projections that feed
nothing but the mixer are not computed again in `after`: they answer zeros that nobody reads.

Arguments of the layer that have a value for each token are sliced to the tile. Masks, with a
value for each pair of tokens, and whatever has none are passed on as they are.

Laws (tests/models/test_tiled_layer.py)
    1. Before, meet and after over any tiles give the layer's own output, within rounding.
    2. The layer's modules are as they were, whether a part ends well or not.
    3. A tensor of the row that tiles have written has the strides' order of its tiles, so that
       kernels see the layout that the layer's own code makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatrain.models.attention import attention_replaced
from megatrain.models.layer_call import (
    LayerOutput,
    TensorPath,
    apply_layer,
    tensors_by_path,
    with_tensors,
)
from megatrain.models.probing.stand_ins import Call, ForwardEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """One call of a mixer."""

    mixer: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The place where layers of one structure are cut; numbers are token dimensions of tensors."""

    mixer: str | None
    """The module's path in the layer; None: the attention function of transformers."""
    arguments: Mapping[TensorPath, int]
    """Arguments of the layer that are sliced."""
    handed: Mapping[TensorPath, int]
    """Arguments of the mixer that `before` makes."""
    mixed: Mapping[TensorPath, int | None]
    """Results of the mixer; None: `after` gets no such result."""
    unread: Mapping[str, int]
    """Projections whose output only feeds the mixer, with its width."""


class CutLayer:
    """One layer with its cut. Weights are bound for the time of a call, by their names in it."""

    def __init__(self, module: nn.Module, cut: Cut, *, routed: bool = False) -> None:
        self.module = module
        self.cut = cut
        self._routed = routed

    def sliced(self, call: Call, columns: slice) -> Call:
        """Return `call` with arguments for the tokens in `columns` only."""

        def narrowed(path: TensorPath, tensor: Tensor) -> Tensor:
            dim = self.cut.arguments.get(path)
            return tensor if dim is None else _columns(tensor, dim, columns)

        args, kwargs = with_tensors((call.args, call.kwargs), narrowed)
        return replace(call, args=args, kwargs=kwargs)

    def before(self, weights: Mapping[str, Tensor], hidden: Tensor, call: Call) -> Meeting:
        """Return the call of the mixer that the layer makes for a tile."""
        received: list[Meeting] = []

        def receive(mixer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            received.append(Meeting(mixer=mixer, args=args, kwargs=kwargs))
            raise ForwardEnded

        try:
            with mixer_replaced(self.module, self.cut.mixer, receive):
                apply_layer(self.module, weights, hidden, call.args, call.kwargs)
        except ForwardEnded:
            return received.pop()
        raise AssertionError(f"layer {call.layer} has not called its mixer")

    def meet(self, weights: Mapping[str, Tensor], meeting: Meeting) -> Any:
        """Return what the mixer makes of the full row."""
        bound = {f"layer.{name}": weight for name, weight in weights.items()}

        def run() -> Any:
            return meeting.mixer(*meeting.args, **meeting.kwargs)

        return functional_call(_Around(self.module), bound, (run,), tie_weights=False)

    def after(
        self, weights: Mapping[str, Tensor], hidden: Tensor, call: Call, mixed: Any
    ) -> LayerOutput:
        """Return the layer's output for a tile whose mixer answers `mixed`."""
        answers = {
            self.module.get_submodule(path): constants_of(width)
            for path, width in self.cut.unread.items()
        }
        with (
            forwards_replaced(answers),
            mixer_replaced(self.module, self.cut.mixer, lambda *_, **__: mixed),
        ):
            return apply_layer(
                self.module, weights, hidden, call.args, call.kwargs, routed=self._routed
            )

    def mixed_tile(self, mixed: Any, columns: slice) -> Any:
        """Return the part of the mixer's result that `after` gets for the tokens in `columns`."""

        def narrowed(path: TensorPath, tensor: Tensor) -> Tensor | None:
            dim = self.cut.mixed[path]
            return None if dim is None else _columns(tensor, dim, columns)

        return with_tensors(mixed, narrowed)


class _Around(nn.Module):
    """Runs a function while weights are bound to a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


def mixer_replaced(
    layer: nn.Module, mixer: str | None, receive: Callable[..., Any]
) -> AbstractContextManager[None]:
    """Let `receive` answer the calls of a mixer: it gets the mixer and the call's arguments."""
    if mixer is None:
        return attention_replaced(receive)
    module = layer.get_submodule(mixer)
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return receive(own, *args, **kwargs)

    return forwards_replaced({module: forward})


@contextmanager
def forwards_replaced(answers: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Let functions answer in place of modules."""
    for module, answer in answers.items():
        vars(module)["forward"] = answer
    try:
        yield
    finally:
        for module in answers:
            del vars(module)["forward"]


def constants_of(width: int, value: float = 0.0) -> Callable[..., Tensor]:
    """Return the forward of a projection to `width` whose output is the same for every token."""

    def answer(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        # Not one number for all: there is code that wants the last stride to be 1.
        return hidden.new_full((width,), value).expand(*hidden.shape[:-1], width)

    return answer


def _columns(tensor: Tensor, dim: int, columns: slice) -> Tensor:
    return tensor.narrow(dim, columns.start, columns.stop - columns.start)


class Joining:
    """One row's call of the mixer, while its tiles come in."""

    def __init__(self, cut: Cut, call: Call, length: int) -> None:
        """`call` is the layer's, with the arguments of the full row."""
        self._cut = cut
        self._length = length
        self._given = dict(tensors_by_path((call.args, call.kwargs)))
        self._meeting: Meeting | None = None
        self.handed: dict[TensorPath, Tensor] = {}
        """Tensors of the row that tiles have made for the mixer, by path in its arguments."""

    def add(self, meeting: Meeting, tile_call: Call, columns: slice) -> None:
        """Take in what the tile of `columns` hands over; `tile_call` was its layer's call."""
        if self._meeting is None:
            self._meeting = self._of_row(meeting, tile_call)
        for path, part in handed_of(self._cut, meeting, tile_call).items():
            dim = self._cut.handed[path]
            row = self.handed[path]
            row.narrow(dim, columns.start, columns.stop - columns.start).copy_(part)

    def meeting(self) -> Meeting:
        """Return the mixer's call for the row."""
        assert self._meeting is not None
        return self._meeting

    def _of_row(self, meeting: Meeting, tile_call: Call) -> Meeting:
        given = _given(tile_call)
        parts = handed_of(self._cut, meeting, tile_call)

        def row(path: TensorPath, tensor: Tensor) -> Tensor:
            if path in parts:
                self.handed[path] = _lengthened(tensor, self._cut.handed[path], self._length)
                return self.handed[path]
            return self._given[given[id(tensor)]] if id(tensor) in given else tensor

        args, kwargs = with_tensors((meeting.args, meeting.kwargs), row)
        return replace(meeting, args=args, kwargs=kwargs)


def handed_of(cut: Cut, meeting: Meeting, tile_call: Call) -> dict[TensorPath, Tensor]:
    """Return the mixer's arguments that the tile's own code has made, by path."""
    given = _given(tile_call)
    tensors = tensors_by_path((meeting.args, meeting.kwargs))
    return {p: t for p, t in tensors if id(t) not in given and p in cut.handed}


def _given(call: Call) -> dict[int, TensorPath]:
    return {id(tensor): path for path, tensor in tensors_by_path((call.args, call.kwargs))}


def _lengthened(tile: Tensor, dim: int, length: int) -> Tensor:
    """Return an empty tensor like `tile` for `length` tokens."""
    sizes = [length if d == dim else size for d, size in enumerate(tile.shape)]
    order = sorted(range(tile.dim()), key=tile.stride, reverse=True)
    empty = torch.empty([sizes[d] for d in order], dtype=tile.dtype, device=tile.device)
    return empty.permute([order.index(d) for d in range(tile.dim())])


def growing(short: Any, long: Any) -> dict[TensorPath, tuple[int, ...]]:
    """Return, by path, the dimensions in which tensors of `long` exceed those of `short`.

    Raises ValueError if the two are not made alike.
    """
    before, after = dict(tensors_by_path(short)), dict(tensors_by_path(long))
    if before.keys() != after.keys():
        raise ValueError("other tensors for another length")
    found = {}
    for path, tensor in after.items():
        sizes = before[path].shape
        if len(sizes) != tensor.dim():
            raise ValueError("another number of dimensions for another length")
        found[path] = tuple(d for d, size in enumerate(tensor.shape) if size != sizes[d])
    return found

"""FORWARD and BACKWARD of a layer: its output, or its gradients by recompute.

A layer computes a row at once. Rows of more than a tile run over tiles, if there are tiles and the
layer can be cut. Then only what the mixer gets and gives exists for the full row:

    forward    each tile: before -> queries, keys, values       (models/tiled_layer.py)
               the mixer, once
               each tile: after -> output
    backward   1. each tile: before, without gradients
               2. the mixer, with gradients
               3. each tile: after, and back: gradients of params, of the mixer's output, of hidden
               4. back through the mixer
               5. each tile: before, and back: gradients of params, added to those of hidden

A tile's `after` is computed once in backward, its `before` twice; each frees its results before the
next begins. The gradient of hidden states takes the place of the gradient that came in.

Random numbers: `draw` is called with the tile's number before each of its parts, so `after` draws
for what precedes the mixer what `before` drew there; the mixer has the number of tiles for its own.

Laws (tests/engine/compute/test_layers.py; at once: tests/engine/test_exactness.py)
    1. Output and gradients are those of ordinary autograd through the same tiles, bit for bit,
       where the mixer alone reads what precedes it; params' gradients are summed in fp32:
       of `after` in order of tiles, of the mixer, of `before` in order of tiles.
    2. They are those of the full row within 1e-6 of the gradient's norm, in fp32.
    3. No tensor of a row is made but hidden states, what the mixer gets and gives, and gradients
       of those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megatrain.engine.compute.graph import gradients_by
from megatrain.models import optional
from megatrain.models.layer_call import LayerOutput, TensorPath, tensors_by_path, with_tensors
from megatrain.models.passed import Link
from megatrain.models.probing.stand_ins import Call
from megatrain.models.template import Template
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.models.tiled_layer import CutLayer, Joining

AddGradients = Callable[[Mapping[str, Tensor | None]], None]
"""Adds gradients by param name in the layer to the sums of the op's block."""
Draw = Callable[[int], object]
"""Sets the generator to draw for a tile."""
Balance = Callable[[Sequence[Tensor], slice], list[tuple[Tensor, Tensor]]]
"""From the logits of a layer's routers for these columns of a micro-batch to what the balancing
loss is made of, with gradients."""


class Returned(NamedTuple):
    """The gradient of a layer's output, which it may overwrite, and of its routers."""

    d_hidden: Tensor
    balance: Balance
    link: Link | None = None
    """Tensors besides hidden states that gradients go back through; None: there are none."""


def tail_tile(settings: StepSettings) -> int | None:
    """Return the tokens of a tile behind the layers; None: every row is computed at once."""
    return settings.tile_tokens


def layer_tile(settings: StepSettings) -> int | None:
    """Return the tokens of a tile of a layer. A compiled layer is one graph, without tiles."""
    return None if settings.compile else settings.tile_tokens


def tiles_of(hidden: Tensor, tile: int) -> list[slice]:
    """Return the columns of each tile of at most `tile` tokens, of (rows, length, ...)."""
    rows, length = hidden.shape[:2]
    columns = max(1, tile // rows)
    return [slice(a, min(a + columns, length)) for a in range(0, length, columns)]


class Layers:
    """The layers of one model."""

    def __init__(self, template: Template, tile: int | None = None) -> None:
        """`tile` has so many tokens; None to compute every row at once."""
        self._template = template
        self._tile = tile

    def forward(
        self, weights: Mapping[str, Tensor], hidden: Tensor, call: Call, draw: Draw
    ) -> LayerOutput:
        """Return what the layer of `call` makes of `hidden`, and the logits of its routers.

        `draw` sets the generator for a tile; without tiles it stays as it is.
        """
        tiled = self._tiled(weights, hidden, call, draw)
        if tiled is not None:
            return tiled.forward(hidden)
        with torch.no_grad():
            return self._template.routed_layer(weights, hidden, call)

    def backward(
        self,
        leaves: Mapping[str, Tensor],
        given: Tensor,
        call: Call,
        returned: Returned,
        add: AddGradients,
        draw: Draw,
    ) -> Tensor | None:
        """Add up the gradients of `leaves`; return that of `given`, if it is wanted.

        `add` may be called more than once. The gradient in `returned` may be overwritten.
        """
        tiled = self._tiled(leaves, given, call, draw)
        if tiled is not None:
            names = dict(zip(self._template.bound(leaves, call), leaves, strict=True))
            return tiled.backward(
                given, returned, lambda found: add({names[n]: d for n, d in found.items()})
            )
        with torch.enable_grad():
            hidden, logits = self._template.routed_layer(leaves, given, call)
            balance = returned.balance(logits, slice(None))
        outputs = [(hidden, returned.d_hidden), *balance]
        return gradients_with(returned.link, outputs, leaves, given, add)

    def _tiled(
        self, weights: Mapping[str, Tensor], hidden: Tensor, call: Call, draw: Draw
    ) -> TiledLayer | None:
        """Return the call over tiles; None if it has one tile, or its layer is not cut."""
        if self._tile is None:
            return None
        layer, tiles = self._template.cut_layer(call), tiles_of(hidden, self._tile)
        if layer is None or len(tiles) == 1:
            return None
        return TiledLayer(layer, call, tiles, self._template.bound(weights, call), draw)


def gradients_with(
    link: Link | None,
    outputs: Sequence[tuple[Tensor, Tensor]],
    leaves: Mapping[str, Tensor],
    given: Tensor,
    add: AddGradients,
) -> Tensor | None:
    """Add up the gradients of `leaves`, hand on those of a link; return that of `given`."""
    linked = {} if link is None else link.leaves
    more = [] if link is None else link.outputs()
    params, passed, d_given = gradients_by([*outputs, *more], leaves, linked, given)
    if link is not None:
        link.give(passed)
    add(params)
    return d_given


class TiledLayer:
    """One call of a layer over tiles."""

    def __init__(
        self, layer: CutLayer, call: Call, tiles: Sequence[slice], weights: Mapping[str, Tensor],
        draw: Draw,
    ) -> None:  # fmt: skip
        self._layer = layer
        self._call = call
        self._tiles = tiles
        self._weights = weights
        self._draw = draw

    def forward(self, hidden: Tensor) -> LayerOutput:
        """Return the layer's output for `hidden`, and the logits of its routers."""
        with torch.no_grad():
            mixed = self._meet(self._join(hidden))
            output: Tensor | None = None
            routed: list[tuple[Tensor, ...]] = []
            for columns, call in self._each_tile():
                tile = self._layer.mixed_tile(mixed, columns)
                part, logits = self._layer.after(self._weights, hidden[:, columns], call, tile)
                if output is None:
                    output = part.new_empty((*hidden.shape[:2], *part.shape[2:]))
                output[:, columns] = part
                routed.append(logits)
        assert output is not None
        return output, _joined_logits(routed, hidden.shape[0])

    def backward(self, given: Tensor, returned: Returned, add: AddGradients) -> Tensor | None:
        """Add up the gradients of the weights; return that of `given`, if it is wanted."""
        hidden, passes = given.detach(), given.requires_grad
        with torch.no_grad():
            joined = self._join(hidden)
        for handed in joined.handed.values():
            handed.requires_grad_(handed.is_floating_point())
        with torch.enable_grad():
            mixed = self._meet(joined)
        d_mixed = self._back_from_output(hidden, passes, mixed, returned, add)
        d_handed = self._back_through_mixer(joined, mixed, d_mixed, add)
        del joined, mixed, d_mixed
        self._back_to_hidden(hidden, passes, d_handed, returned.d_hidden, add)
        return returned.d_hidden if passes else None

    def _each_tile(self) -> Iterator[tuple[slice, Call]]:
        for number, columns in enumerate(self._tiles):
            self._draw(number)
            yield columns, self._layer.sliced(self._call, columns)

    def _join(self, hidden: Tensor) -> Joining:
        """Return the mixer's call for the row."""
        joining = optional.tiled_layer.Joining(self._layer.cut, self._call, hidden.shape[1])
        for columns, call in self._each_tile():
            meeting = self._layer.before(self._weights, hidden[:, columns], call)
            joining.add(meeting, call, columns)
        return joining

    def _meet(self, joining: Joining) -> Any:
        self._draw(len(self._tiles))
        return self._layer.meet(self._weights, joining.meeting())

    def _back_from_output(
        self, hidden: Tensor, passes: bool, mixed: Any, returned: Returned, add: AddGradients
    ) -> dict[TensorPath, Tensor]:
        """Return the gradient of the mixer's results; put that of hidden states in its place."""
        layer, d_hidden = self._layer, returned.d_hidden
        d_mixed = {
            path: torch.zeros_like(tensor)
            for path, tensor in tensors_by_path(mixed)
            if layer.cut.mixed[path] is not None and tensor.requires_grad
        }
        for columns, call in self._each_tile():
            tile = layer.mixed_tile(mixed, columns)
            leaves = with_tensors(tile, lambda _, t: t.detach().requires_grad_(t.requires_grad))
            part = hidden[:, columns].detach().requires_grad_(passes)
            with torch.enable_grad():
                output, logits = layer.after(self._weights, part, call, leaves)
                outputs = [(output, d_hidden[:, columns]), *returned.balance(logits, columns)]
            wanted = {path: leaf for path, leaf in tensors_by_path(leaves) if path in d_mixed}
            d_weights, d_leaves, d_part = gradients_by(outputs, self._weights, wanted, part)
            del output, outputs, leaves, tile
            add(d_weights)
            del d_weights  # before the next tile makes as many
            for path, found in d_leaves.items():
                if found is not None:
                    _tile(d_mixed[path], layer.cut.mixed[path], columns).copy_(found)
            if passes:
                _put(d_hidden[:, columns], d_part)
        return d_mixed

    def _back_through_mixer(
        self, joined: Joining, mixed: Any, d_mixed: dict[TensorPath, Tensor], add: AddGradients
    ) -> dict[TensorPath, Tensor | None]:
        """Return the gradient of what the mixer got."""
        outputs = [(t, d_mixed[path]) for path, t in tensors_by_path(mixed) if path in d_mixed]
        d_weights, d_handed, _ = gradients_by(outputs, self._weights, joined.handed, None)
        add(d_weights)
        return d_handed

    def _back_to_hidden(
        self,
        hidden: Tensor,
        passes: bool,
        d_handed: Mapping[TensorPath, Tensor | None],
        d_hidden: Tensor,
        add: AddGradients,
    ) -> None:
        """Add the gradients of what precedes the mixer."""
        cut = self._layer.cut
        for columns, call in self._each_tile():
            part = hidden[:, columns].detach().requires_grad_(passes)
            with torch.enable_grad():
                meeting = self._layer.before(self._weights, part, call)
                # Made last, it is first in the sum of gradients, as what follows the mixer is.
                outputs = [(part.view_as(part), d_hidden[:, columns])]
            for path, tensor in optional.tiled_layer.handed_of(cut, meeting, call).items():
                gradient = d_handed.get(path)
                if gradient is not None:
                    outputs.append((tensor, _tile(gradient, cut.handed[path], columns)))
            d_weights, _, d_part = gradients_by(outputs, self._weights, {}, part)
            del meeting, outputs
            add(d_weights)
            del d_weights  # before the next tile makes as many
            if passes:
                _put(d_hidden[:, columns], d_part)


def _tile(row: Tensor, dim: int | None, columns: slice) -> Tensor:
    assert dim is not None
    return row.narrow(dim, columns.start, columns.stop - columns.start)


def _put(tile: Tensor, gradient: Tensor | None) -> None:
    """Overwrite `tile`; autograd may have passed its own memory on as the gradient."""
    if gradient is None:
        tile.zero_()
    elif gradient.untyped_storage().data_ptr() != tile.untyped_storage().data_ptr():
        tile.copy_(gradient)
    else:
        tile.copy_(gradient.clone())


def _joined_logits(routed: Sequence[tuple[Tensor, ...]], rows: int) -> tuple[Tensor, ...]:
    """Return the router logits of all tiles in the order of tokens, row by row."""
    return tuple(
        torch.cat([part.view(rows, -1, part.shape[-1]) for part in parts], dim=1).flatten(0, 1)
        for parts in zip(*routed, strict=True)
    )

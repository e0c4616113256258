"""What FORWARD and BACKWARD do with a layer: compute its output, or its gradients by recompute.

Rows of more than a tile run over tiles, if there are tiles and the layer can be cut (tiles.py);
others at once.

Laws (tests/engine/test_exactness.py)
    1. Output and gradients are those of ordinary autograd through the layer, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatrain.engine.compute.graph import gradients_of
from megatrain.engine.compute.tiles import AddGradients, Draw, Returned, TiledLayer, tiles_of
from megatrain.models.compiled import LayerOutput
from megatrain.models.probing.stand_ins import Call
from megatrain.models.template import Template


class Layers:
    """The layers of one model."""

    def __init__(self, template: Template, tile_tokens: int | None = None) -> None:
        """`tile_tokens`: None to compute every row at once."""
        self._template, self._tile_tokens = template, tile_tokens

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
        grads = gradients_of([(hidden, returned.d_hidden), *balance], leaves, given)
        add(grads.params)
        return grads.given

    def _tiled(
        self, weights: Mapping[str, Tensor], hidden: Tensor, call: Call, draw: Draw
    ) -> TiledLayer | None:
        """Return the call over tiles; None if it has one tile, or its layer is not cut."""
        if self._tile_tokens is None:
            return None
        layer, tiles = self._template.cut_layer(call), tiles_of(hidden, self._tile_tokens)
        if layer is None or len(tiles) == 1:
            return None
        return TiledLayer(layer, call, tiles, self._template.bound(weights, call), draw)

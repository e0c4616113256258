"""The model's own code between its last layer and its output projection, over tiles of tokens.

A norm keeps and makes several times what it is given. It acts on each token alone, as all does that
models have there, so over tiles only its input, its output and the gradient exist for the row;
backward computes each tile once more.

Laws (tests/engine/compute/test_tail.py)
    1. Rows, and the gradient of hidden states, are those of the full row, bit for bit, in every
       family; those of params are summed in fp32, in order of tiles.
    2. Of a row that is one tile, or without tiles, nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatrain.engine.compute.edges import Edges
from megatrain.engine.compute.graph import gradients_of
from megatrain.engine.compute.tiles import AddGradients, tiles_of


class Tail:
    """One call of a model's tail, forward and back."""

    def __init__(
        self,
        edges: Edges,
        weights: Mapping[str, Tensor],
        hidden: Tensor,
        tile_tokens: int | None,
    ) -> None:
        """`hidden` (rows, length, width) wants a gradient if it is to be passed on."""
        self._edges, self._weights, self._hidden = edges, weights, hidden
        self._tiles = [] if tile_tokens is None else tiles_of(hidden, tile_tokens)
        self._graph: Tensor | None = None

    def rows(self, *, goes_back: bool = True) -> Tensor:
        """Return the rows (tokens, width) that the output projection gets, without a graph.

        `goes_back`: a call of `back` follows.
        """
        if len(self._tiles) < 2:
            with torch.set_grad_enabled(goes_back):
                rows = self._edges.tail(self._weights, self._hidden)
            self._graph = rows if goes_back else None
            return rows.detach()
        found: Tensor | None = None
        with torch.no_grad():
            for columns in self._tiles:
                part = self._hidden[:, columns]
                rows = self._edges.tail(self._weights, part).view(*part.shape[:2], -1)
                if found is None:
                    found = rows.new_empty((*self._hidden.shape[:2], rows.shape[-1]))
                found[:, columns] = rows
        assert found is not None
        return found.flatten(0, 1)

    def back(self, d_rows: Tensor, add: AddGradients) -> Tensor | None:
        """Add up the gradients of the weights; return that of `hidden`, if it is wanted.

        It may take the place of `d_rows`.
        """
        hidden, passes = self._hidden, self._hidden.requires_grad
        if self._graph is not None:
            grads = gradients_of([(self._graph, d_rows)], self._weights, hidden)
            self._graph = None
            add(grads.params)
            return grads.given
        d_rows = d_rows.view(*hidden.shape[:2], -1)
        fits = (d_rows.shape, d_rows.dtype) == (hidden.shape, hidden.dtype)
        d_hidden = d_rows if fits else torch.empty_like(hidden)
        for columns in self._tiles:
            part = hidden[:, columns].detach().requires_grad_(passes)
            with torch.enable_grad():
                rows = self._edges.tail(self._weights, part)
            d_tile = d_rows[:, columns].reshape(rows.shape)
            grads = gradients_of([(rows, d_tile)], self._weights, part)
            add(grads.params)
            if grads.given is not None:
                d_hidden[:, columns] = grads.given
            del grads, rows
        return d_hidden if passes else None

"""The output projection: from rows to logits, and from the gradient of the logits back.

Logits are the largest tensor of a step: rows x vocabulary. They exist for one chunk of rows, in
the dtype of the weights, and become their own gradient in place. Between the two products rows do
not meet, so that part runs `part_elements` at a time, in fp32. The gradient of the table is
computed some tokens at a time, where it goes into a sum that exists already: no second table
exists beside it.

Laws (tests/losses/test_projection.py)
    1. Parts and cuts change no bit.
    2. The gradient of a table that is cut never exists as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatrain.step.settings import PART_ELEMENTS

Scores = Callable[[Tensor], Tensor]
"""The model's function of its logits (rows, vocabulary): a soft-cap, a scale."""
AddTokens = Callable[[int, Tensor | None, Tensor | None], None]
"""Takes the gradients of weight and bias (None: frozen) for tokens from the given one on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Weight, bias and scores of all tokens."""

    weight: Tensor
    """(vocabulary, width)"""
    bias: Tensor | None = None
    scores: Scores | None = None
    """None: the model leaves logits alone."""
    part_elements: int = PART_ELEMENTS
    """Logits that are scored at once, in fp32, and elements of the table whose gradient is computed
    at once."""

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits of `rows`, before scores."""
        with torch.no_grad():
            return F.linear(rows, self.weight, self.bias)

    def part_rows(self, num_rows: int) -> int:
        """Return how many of `num_rows` are scored at a time."""
        return min(num_rows, max(1, self.part_elements // len(self.weight)))

    def read(self, logits: Tensor, see: Callable[[slice, Tensor], None]) -> None:
        """Let `see` read the scores in fp32, part by part. It may write over them."""
        with torch.no_grad():
            for part in _cuts(len(logits), self.part_rows(len(logits))):
                given = logits[part]
                scored = given if self.scores is None else self.scores(given)
                see(part, scored.float())

    def differentiate(self, logits: Tensor, turn: Callable[[slice, Tensor], None]) -> None:
        """Write the gradient of the logits over them.

        `turn` gets the scores in fp32, part by part, and writes their gradient over them.
        """
        for part in _cuts(len(logits), self.part_rows(len(logits))):
            given = logits[part]
            if self.scores is None:
                values = given.float()
                turn(part, values)
                if values is not given:
                    given.copy_(values)
                continue
            leaf = given.detach().requires_grad_()
            with torch.enable_grad():
                scored = self.scores(leaf)
            values = scored.detach().to(torch.float32, copy=True)  # scored may be part of the graph
            turn(part, values)
            given.copy_(torch.autograd.grad(scored, leaf, values.to(scored.dtype))[0])

    def back(self, d_logits: Tensor, rows: Tensor, add: AddTokens) -> Tensor:
        """Return the gradient of `rows`; `add` gets those of weight and bias, token by token."""
        trains_bias = self.bias is not None and self.bias.requires_grad
        with torch.no_grad():
            d_rows = d_logits.mm(self.weight)
            if not trains_bias and not self.weight.requires_grad:
                return d_rows
            num_tokens, width = self.weight.shape
            d_bias = d_logits.sum(0) if trains_bias else None
            # A product has no name, so that it is free at the next one.
            for cut in _cuts(num_tokens, self.part_elements // width):
                add(
                    cut.start,
                    d_logits[:, cut].t().mm(rows) if self.weight.requires_grad else None,
                    None if d_bias is None else d_bias[cut],
                )
            return d_rows


def _cuts(total: int, size: int) -> list[slice]:
    """Return slices of `size`, at least one, in order; the last may be smaller."""
    size = max(1, size)
    return [slice(first, min(first + size, total)) for first in range(0, total, size)]

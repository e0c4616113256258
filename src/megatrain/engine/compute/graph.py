"""The piece of autograd's graph that one op builds, and frees before it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockGradients:
    """The gradients of a block."""

    params: Mapping[str, Tensor | None]
    """By param name."""
    given: Tensor | None
    """Of the hidden states that the block was given."""


def gradients_of(
    outputs: Sequence[tuple[Tensor, Tensor]], leaves: Mapping[str, Tensor], given: Tensor | None
) -> BlockGradients:
    """Return the gradients of the leaves that want one and of `given`, and free the graph.

    Each of `outputs` comes with its gradient.
    """
    names = [name for name, leaf in leaves.items() if leaf.requires_grad]
    wanted = [leaves[name] for name in names]
    passes = given is not None and given.requires_grad
    if passes and given is not None:
        wanted.append(given)
    outputs = [(output, d_output) for output, d_output in outputs if output.requires_grad]
    if not wanted or not outputs:
        return BlockGradients({}, None)
    found = torch.autograd.grad(
        [output for output, _ in outputs],
        wanted,
        [d_output.view_as(output) for output, d_output in outputs],
        allow_unused=True,
    )
    params = dict(zip(names, found, strict=False))
    return BlockGradients(params, found[-1] if passes else None)

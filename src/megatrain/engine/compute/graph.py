"""The piece of autograd's graph that one op builds, and frees before it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Between = TypeVar("Between")


@dataclass(frozen=True, slots=True)
class BlockGradients:
    """The gradients of a block."""

    params: Mapping[str, Tensor | None]
    """Gradients by param name."""
    given: Tensor | None
    """Gradient of the hidden states that the block was given. (rows, length, width)"""


def gradients_of(
    outputs: Sequence[tuple[Tensor, Tensor]], leaves: Mapping[str, Tensor], given: Tensor | None
) -> BlockGradients:
    """Return the gradients of the leaves that want one and of `given`, and free the graph.

    Each of `outputs` comes with its gradient.
    """
    params, _, found = gradients_by(outputs, leaves, {}, given)
    return BlockGradients(params, found)


def gradients_by(
    outputs: Sequence[tuple[Tensor, Tensor]],
    leaves: Mapping[str, Tensor],
    between: Mapping[Between, Tensor],
    given: Tensor | None,
) -> tuple[dict[str, Tensor | None], dict[Between, Tensor | None], Tensor | None]:
    """Return the gradients of those that want one, of leaves, tensors `between` and `given`."""
    params = [name for name, leaf in leaves.items() if leaf.requires_grad]
    keys = [key for key, tensor in between.items() if tensor.requires_grad]
    wanted = [leaves[name] for name in params] + [between[key] for key in keys]
    if given is not None and given.requires_grad:
        wanted.append(given)
    outputs = [(output, d_output) for output, d_output in outputs if output.requires_grad]
    if not wanted or not outputs:
        return {}, {}, None
    found: list[Tensor | None] = list(
        torch.autograd.grad(
            [output for output, _ in outputs],
            wanted,
            [d_output.view_as(output) for output, d_output in outputs],
            allow_unused=True,
        )
    )
    d_given = found.pop() if len(found) > len(params) + len(keys) else None
    d_params = dict(zip(params, found, strict=False))
    return d_params, dict(zip(keys, found[len(params) :], strict=True)), d_given

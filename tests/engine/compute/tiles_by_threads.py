"""An oracle for tiles: each tile is a thread that runs a copy of the plain transformers layer.

The threads meet in attention: each hands in its queries, keys and values, attention runs once over
the joined row, and each goes on with its part of the output. All of it is one graph of ordinary
autograd. Gradients of the copies' params are summed in fp32, in the order of tiles.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    output: Tensor
    d_hidden: Tensor
    params: dict[str, Tensor]


class Meeting:
    """Where the threads of one row meet."""

    def __init__(self, attention: Any, num_tiles: int) -> None:
        self._attention = attention
        self._parts: dict[int, Any] = {}
        self._barrier = threading.Barrier(num_tiles, action=self._attend)
        self._joined: Any = None
        self.number = threading.local()

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any
    ) -> Any:
        number = self.number.value
        self._parts[number] = (module, (q, k, v), mask, options)
        self._barrier.wait(PATIENCE_S)
        begin = sum(self._parts[n][1][0].shape[2] for n in range(number))
        return self._joined[:, begin : begin + q.shape[2]], None

    def _attend(self) -> None:
        parts = [self._parts[number] for number in sorted(self._parts)]
        module, _, mask, options = parts[0]
        q, k, v = (torch.cat([part[1][n] for part in parts], dim=2) for n in range(3))
        with torch.enable_grad():
            self._joined, _ = self._attention(module, q, k, v, mask, **options)


def by_threads(
    layer: nn.Module,
    hidden: Tensor,
    kwargs: dict[str, Any],
    d_output: Tensor,
    tiles: Sequence[slice],
    monkeypatch: pytest.MonkeyPatch,
) -> Expected:
    """Return output and gradients of `layer` over `tiles` of its input."""
    names: dict[str, Any] = AttentionInterface._global_mapping
    meeting = Meeting(names["sdpa"], len(tiles))
    copies = [copy.deepcopy(layer) for _ in tiles]
    parts = [hidden[:, columns].detach().requires_grad_() for columns in tiles]
    outputs: dict[int, Tensor] = {}

    def run(number: int) -> None:
        meeting.number.value = number
        result = copies[number](parts[number], **_sliced(kwargs, tiles[number]))
        outputs[number] = result if isinstance(result, Tensor) else result[0]

    with monkeypatch.context() as patch:
        patch.setitem(names, "sdpa", meeting)
        threads = [threading.Thread(target=run, args=(n,)) for n in range(len(tiles))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    ordered = [outputs[number] for number in range(len(tiles))]
    torch.autograd.backward(ordered, [d_output[:, columns] for columns in tiles])
    params: dict[str, Tensor] = {}
    for module in copies:
        for name, param in module.named_parameters():
            if param.grad is not None:
                found = param.grad.float()
                params[name] = params[name] + found if name in params else found
    return Expected(
        output=torch.cat([part.detach() for part in ordered], dim=1),
        d_hidden=torch.cat([_gradient(part) for part in parts], dim=1),
        params=params,
    )


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _sliced(kwargs: dict[str, Any], columns: slice) -> dict[str, Any]:
    """Return what a layer gets for a tile: rotations and positions of its tokens."""
    sliced = dict(kwargs)
    if kwargs.get("position_embeddings") is not None:
        sliced["position_embeddings"] = tuple(t[:, columns] for t in kwargs["position_embeddings"])
    if kwargs.get("position_ids") is not None:
        sliced["position_ids"] = kwargs["position_ids"][:, columns]
    return sliced

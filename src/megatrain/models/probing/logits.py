"""The trace of a model's way with its logits: a soft-cap, a scale, a cast.

It is code behind the output projection, in the middle of the model's forward. Run for every part of
the logits, that forward costs milliseconds of host time each. So it runs once, with every
operation after the projection noted; later only those operations run. They are used where they
give what the model gives, bit for bit, for other numbers of rows and other values.

Not traced, and run through the model as before: operations that read a tensor of the model, that
write in place, or that name a device.

Laws (tests/models/probing/test_logits.py)
    1. A trace gives the bits of the model's own forward, on every device; it holds no tensor.
    2. A function that mixes rows, or depends on their number, is not traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from megatrain.models.probing.dispatch import Operation

Function = Callable[[Tensor], Tensor]
"""From logits (rows, vocabulary) to logits."""


class Tracer:
    """Notes the operations that follow from one tensor, from `begin` on (dispatch.py)."""

    def __init__(self) -> None:
        self._numbers: dict[int, _Number] = {}
        self._kept: list[Tensor] = []
        self._notes: list[_Note] = []
        self.complete = True
        """Whether the notes are enough to repeat all of it."""

    def begin(self, tensor: Tensor) -> None:
        """Note what is made of `tensor`."""
        self._number(tensor)

    def trace(self, result: Tensor) -> NotedOperations | None:
        """Return the way to `result`; None if it cannot be repeated."""
        number = self._numbers.get(id(result))
        return (
            NotedOperations(self._notes, number) if self.complete and number is not None else None
        )

    def __call__(self, func: Operation, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(id(tensor) in self._numbers for tensor in given):
            return result
        strange = any(id(tensor) not in self._numbers for tensor in given)
        placed = any(isinstance(leaf, torch.device) for leaf in tree_leaves((args, kwargs)))
        if strange or placed or func._schema.is_mutable or not isinstance(result, Tensor):
            self.complete = False
            return result
        named = tree_map(lambda leaf: self._numbers.get(id(leaf), leaf), (args, kwargs))
        self._notes.append(_Note(func, *named))
        self._number(result)
        return result

    def _number(self, tensor: Tensor) -> None:
        self._kept.append(tensor)  # or its id might become another tensor's
        self._numbers[id(tensor)] = _Number(len(self._numbers))


@dataclass(frozen=True, slots=True)
class _Number:
    """Stands for a tensor: the first one, or the result of the operation before that number."""

    index: int


@dataclass(frozen=True, slots=True)
class _Note:
    func: Callable[..., Tensor]
    args: Any
    kwargs: Any


class NotedOperations:
    """Noted operations, as a function of the first tensor."""

    def __init__(self, notes: Sequence[_Note], result: _Number) -> None:
        self._notes = notes[: result.index]
        self._result = result.index

    def __call__(self, given: Tensor) -> Tensor:
        values = [given]

        def value(leaf: Any) -> Any:
            return values[leaf.index] if isinstance(leaf, _Number) else leaf

        for note in self._notes:
            args, kwargs = tree_map(value, (note.args, note.kwargs))
            values.append(note.func(*args, **kwargs))
        return values[self._result]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedScores:
    """A model's way with its logits, as far as it is known."""

    changes: bool
    """False: it leaves them alone."""
    function: Function | None
    """Its trace, if there is one and the model changes logits."""


def examined(
    own: Function, trace: Callable[[Tensor], Function | None], num_tokens: int, dtype: torch.dtype
) -> TracedScores:
    """Return what `own` does; `trace` runs it, and returns its trace."""
    first = torch.linspace(-300, 300, num_tokens)[None].to(dtype)
    with torch.no_grad():
        changed = own(first)
        if changed.dtype is dtype and torch.equal(changed, first):
            return TracedScores(changes=False, function=None)
        function = trace(first)
        if function is None or not _agree(own, function, first):
            return TracedScores(changes=True, function=None)
        return TracedScores(changes=True, function=function)


def _agree(own: Function, function: Function, first: Tensor) -> bool:
    """Return whether both give the same bits, however many rows there are, and to a row alone."""
    for rows in ([first], [first.flip(1), first * 0.01], [first * 0.1, *[first * 1e-3] * 3, first]):
        logits = torch.cat(rows)
        try:
            found = function(logits)
        except (RuntimeError, IndexError):  # it names a number of rows
            return False
        alone = torch.cat([function(row[None]) for row in logits])
        for expected in (own(logits), alone):
            if found.dtype is not expected.dtype or not torch.equal(found, expected):
                return False
    return True

"""What a trainer did, as two trainers can share it: documents and loss of each step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from torch import Tensor

IGNORED = -100
TOLERANCE = 1e-5
COMPARED_STEPS = 20
Document = tuple[tuple[int, ...], tuple[bool, ...]]
"""Tokens, and which of them are targets."""


@dataclass(slots=True, kw_only=True)
class History:
    """Every step of one run."""

    documents: list[list[Document]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    planned_steps: int = 0
    left_out: int = 0
    """Targets of theirs that were left out because the difference is known."""

    def worst_difference(self, other: History) -> float:
        """Return how far the losses of the first steps are apart; infinity if there are none."""
        pairs = list(zip(self.losses, other.losses, strict=False))[:COMPARED_STEPS]
        return max((abs(mine - theirs) for mine, theirs in pairs), default=math.inf)


def faults_of(ours: History, theirs: History) -> list[str]:
    """Return what is not the same in two runs."""
    faults = []
    if ours.planned_steps != theirs.planned_steps:
        faults.append(f"{ours.planned_steps} steps, theirs {theirs.planned_steps}")
    none: list[Document] = []
    steps = zip_longest(ours.documents, theirs.documents, fillvalue=none)
    equal = [sorted(mine) == sorted(other) for mine, other in steps]
    if not all(equal) or not equal:
        faults.append(f"documents or targets differ in {equal.count(False)} of {len(equal)} steps")
    worst = ours.worst_difference(theirs)
    if not worst <= TOLERANCE:
        faults.append(f"losses differ by up to {worst:.2g}")
    return faults


def documents_of(inputs: Mapping[str, Any]) -> Iterator[Document]:
    """Yield the documents of a micro-batch, padded or packed, without its padding."""
    ids, labels = inputs["input_ids"], inputs["labels"]
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    for row in range(len(ids)):
        length = int(mask[row].sum()) if mask is not None else ids.shape[1]
        starts = [0] if positions is None else _starts(positions[row])
        for start, stop in zip(starts, [*starts[1:], length], strict=True):
            yield _document(ids[row, start:stop], labels[row, start:stop])


def _starts(positions: Tensor) -> list[int]:
    return [int(place) for place in (positions == 0).nonzero().flatten()]


def _document(ids: Tensor, labels: Tensor) -> Document:
    targets = [bool(label != IGNORED) for label in labels]
    targets[0] = False  # the first token follows nothing
    return tuple(ids.tolist()), tuple(targets)

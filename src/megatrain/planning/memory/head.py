"""The head at its largest: rows, logits of one chunk, and gradients of the projection.

    through the logits   rows and their gradient, one chunk's logits, and either its scores in fp32
                         with what the model's soft cap or scale makes of them (losses/head.py), or
                         the gradient of a part of the table
    back through a norm  what autograd makes of the norm before the projection (engine/compute)

Over tiles a norm is a tile long.
"""

from __future__ import annotations

from megatrain.planning.levers.chunk import chunk_of
from megatrain.planning.levers.tiles import tile_of
from megatrain.planning.memory.kernels import Kernels
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

_TAUGHT_BYTES = 64
"""Bytes per token of a teacher, while it is compared: counted from the calls in
losses/distillation.py, not measured."""


def head_bytes(workload: Workload, settings: StepSettings, kernels: Kernels, tokens: int) -> float:
    """Return what the head holds at its largest, with a micro-batch of so many tokens."""
    model, width = workload.model, workload.element_bytes
    hidden, chunk = model.hidden * width, chunk_of(settings, tokens)
    vocab = model.vocab
    logits = chunk * vocab * width
    at_once = max(vocab, min(kernels.part_elements, logits // width))
    scoring = float((8 if width == 2 else 4) * at_once)  # in fp32, and a gradient to begin with
    if at_once < logits // width and width == 2:
        scoring += 4 * at_once  # the values of the part before
    scoring += model.logit_copies * width * at_once
    table = vocab * model.hidden
    going_back = width * min(table, kernels.part_elements)
    if not model.trains_projection:
        going_back = 0
    tile, through = tile_of(workload, settings), held_rows_bytes(workload, settings, tokens)
    made = 15 if width == 2 else 9
    back = tokens * made * hidden
    if tile is not None:
        back = (2 * tokens + tile * (made - 1)) * hidden
    through += tokens * workload.taught_tokens * _TAUGHT_BYTES
    return max(through + 2 * chunk * hidden + logits + max(scoring, going_back), back)


def held_rows_bytes(workload: Workload, settings: StepSettings, tokens: int) -> int:
    """Return the hidden states, their gradients and what the tail kept, while logits go back."""
    rows = 6 if workload.element_bytes == 2 else 5
    if tile_of(workload, settings) is not None:
        rows = 3
    return rows * tokens * workload.model.hidden * workload.element_bytes

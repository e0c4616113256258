"""The device's memory by purpose: what is reserved before a step, and the working memory.

    weight slots      of the layers, in turns; of embedding and head, one each
    gradient slots    fp32 sums: one or two for the layers, one for embedding and head
    expert pages      two, which experts rotate through (engine/pages.py)
    embedding rows    those of a step's tokens, where they are gathered
    outbox, tape      engine/gradients/outbox.py, engine/tape.py
    kept activations  of the top layers, from forward to backward (engine/compute/kept.py)
    narrow weights    of one layer, where products are in fp8 (engine/compute/products.py)
    widening          what widening narrow params of a layer holds for a moment
    exchange          two buffers between ranks (engine/exchange.py); slots then have room for the
                      parts of all ranks

Laws (tests/planning/memory/test_device.py)
    1. Slots, tape and outbox are those of a rehearsal, to the byte.
    2. Working memory, with activations that stay, is that of a rehearsal within 10 %.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.memory.ledger import Line
from megatrain.planning.levers.chunk import num_chunks
from megatrain.planning.levers.embedding_rows import input_numbers, row_bytes, table_bytes
from megatrain.planning.levers.gradient_slots import gradient_slot_bytes
from megatrain.planning.levers.kept import KEPT_ACTIVATIONS, kept_total
from megatrain.planning.levers.pages import page_slot_bytes
from megatrain.planning.levers.slots import layer_slot_bytes
from megatrain.planning.levers.tape import device_tape_bytes, unified_tape_bytes
from megatrain.planning.levers.tiles import tile_of
from megatrain.planning.memory.kernels import Kernels
from megatrain.planning.memory.working import working_bytes
from megatrain.planning.narrow_products import NARROW_WEIGHTS, narrow_weight_bytes
from megatrain.planning.ranks.collectives import PLANNED_EXCHANGE_BYTES
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

WIDENING_BYTES = {"fp8": 5, "fp4": 10, "mxfp4": 9, "int4": 10, "nf4": 16}
"""Bytes that each element holds while it is widened, beside its weight."""
PLANNED_AT_ONCE = 1 << 22
"""The same number as in models/widening.py, which needs torch; a test compares them."""
PLANNED_OUTBOX_BYTES = 64 << 20
"""The same number as in engine/gradients/outbox.py, which needs torch; a test compares them."""


def device_lines(
    workload: Workload,
    settings: StepSettings,
    kernels: Kernels,
    *,
    unified: bool,
    own_memory: bool = True,
) -> Iterator[Line]:
    """Yield the device's memory by purpose; their sum is the peak.

    Without `own_memory` slots are in the host's, and gradients need no outbox.
    """
    sizes = {
        "working memory": working_bytes(workload, settings, kernels, unified=unified),
        KEPT_ACTIVATIONS: kept_total(workload, settings),
        NARROW_WEIGHTS: narrow_weight_bytes(workload),
        "widening": _widening_bytes(workload),
    }
    if unified:
        sizes |= _unified_bytes(workload, settings)
    else:
        sizes |= _slot_bytes(workload, settings)
    if not own_memory:
        sizes.pop("outbox", None)
    elif not unified:
        sizes["working memory"] += _input_bytes(workload, settings)
    for purpose, num_bytes in sizes.items():
        yield Line(place="device", purpose=purpose, num_bytes=round(num_bytes))


def _widening_bytes(workload: Workload) -> int:
    """Return what one call of widening holds beside its result: models/widening.py."""
    methods = {
        matrices.method
        for layer in workload.model.structures
        for tensor in layer.tensors
        for matrices in tensor.form
    }
    return max((WIDENING_BYTES[method] * PLANNED_AT_ONCE for method in methods), default=0)


def _input_bytes(workload: Workload, settings: StepSettings) -> int:
    """Return what the device has of the batch itself: engine/compute/inputs.py.

    Tokens, positions or a mask, targets, the numbers of trained rows, and of gathered ones.
    """
    per_token = 8 * (4 + input_numbers(settings))
    return per_token * sum(workload.micro_sizes(settings.micro_batch_tokens))


def _slot_bytes(workload: Workload, settings: StepSettings) -> dict[str, float]:
    model, dtype = workload.model, workload.dtype
    division = workload.division
    slots = layer_slot_bytes(workload, settings) + table_bytes(workload, settings)
    slots += model.head.weight_bytes(dtype, division.gathered)
    kinds = (model.embedding, *model.structures, model.head)
    drained = max(block.gradient_bytes(dtype, division.owned) for block in kinds)
    exchanged = 0
    if not division.is_alone:
        gradients = max(block.gradient_bytes(dtype) for block in kinds)
        exchanged = 2 * max(4 * division.size, min(PLANNED_EXCHANGE_BYTES, gradients))
    return {
        "weight slots": slots,
        "expert pages": page_slot_bytes(workload, settings),
        "gradient slots": sum(gradient_slot_bytes(workload, settings)),
        "embedding rows": row_bytes(workload, settings),
        "outbox": min(PLANNED_OUTBOX_BYTES, drained),
        "exchange": exchanged,
        "tape": device_tape_bytes(workload, settings),
    }


def _unified_bytes(workload: Workload, settings: StepSettings) -> dict[str, float]:
    """Return what compute on the host's own memory holds beside its working memory.

    A sum of one part is that part, so gradient slots are written only where there are several: of
    the layers with several micro-batches or tiles, of the output projection with several chunks
    too. Where gradients stay in fp32, they add up there. Two layers' gradients exist while the one
    before is drained.
    """
    model, dtype = workload.model, workload.dtype
    several = workload.num_micro(settings.micro_batch_tokens) > 1
    row = min(settings.micro_batch_tokens, workload.step_tokens)
    chunked, tiled = num_chunks(settings, row) > 1, tile_of(workload, settings) is not None
    turns, edges = gradient_slot_bytes(workload, settings)
    table = 4 * model.vocab * model.hidden if model.trains_projection else 0
    stay = settings.gradients_stay
    sums = turns if several or tiled else 0
    sums += edges if several else table if chunked else 0
    if stay and workload.element_bytes == 4:
        sums = 0
    waiting = max(layer.gradient_bytes(dtype) for layer in model.structures)
    if model.tied and not stay and not several and not chunked:
        waiting += model.embedding.gradient_bytes(dtype)  # the head's, until the embedding's comes
    tape = unified_tape_bytes(workload, settings)
    wide = max(layer.wide_bytes(dtype) for layer in model.structures)
    return {
        "weight slots": wide,
        "gradient slots": sums,
        "waiting gradients": waiting,
        "tape": tape,
    }

"""The working memory of compute: the most that one op holds, and what all of a step holds.

It is the largest of a few moments of a step, counted in bytes per token: of a layer's backward
(layers.py), of the head's (head.py), and of the embedding's. Beside it there are the hidden states
of the other micro-batches, and what each micro-batch is given all along.

Activations that stay are apart. They are largest while the head works; the first layer to go back
has its own among them, and where layers are computed again they are gone.

Law (tests/planning/memory/test_device.py): that of a rehearsal within 10 %.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from megatrain.planning.levers.chunk import num_chunks
from megatrain.planning.levers.embedding_rows import looked_up_rows
from megatrain.planning.levers.kept import kept_bytes, kept_total, layers_that_keep
from megatrain.planning.levers.pages import held
from megatrain.planning.levers.tiles import layer_bytes
from megatrain.planning.levers.update import staying_bytes
from megatrain.planning.memory.head import head_bytes, held_rows_bytes
from megatrain.planning.memory.kernels import Kernels
from megatrain.planning.model.shapes import BlockShape
from megatrain.planning.narrow_products import narrow_token_bytes
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

PLANNED_AT_ONCE = 1 << 26
"""The same number as in optim/muon.py, which needs torch; a test compares them."""


def working_bytes(
    workload: Workload, settings: StepSettings, kernels: Kernels, *, unified: bool
) -> float:
    """Return the most that compute holds at once.

    Besides the memory reserved before a step, and the activations that stay.
    """
    sizes = workload.micro_sizes(settings.micro_batch_tokens)
    tokens = max(sizes)
    model, width = workload.model, workload.element_bytes
    moments = [head_bytes(workload, settings, kernels, tokens)]
    kept, layers = layers_that_keep(workload, settings), model.layers
    gone = kept_total(workload, settings)
    moments += [
        layer_bytes(layer, workload, settings, kernels) - kept_bytes(layer, workload, tokens)
        for layer in _distinct(kept)
    ]
    moments += [
        layer_bytes(layer, workload, settings, kernels) - gone
        for layer in _distinct(layers[: len(layers) - len(kept)])
    ]
    looked_up = _looked_up_rows(workload, settings, tokens, unified=unified)
    rows = 4 * tokens * model.hidden * width
    embedding = rows + looked_up * model.hidden * width + _other_tables(workload) * width
    moments.append(embedding - gone)
    if model.media is not None:  # before the table has its turn
        moments.append(rows + model.media.most_held(tokens) - gone)
    moments += [orthogonalized_bytes(layer) for layer in model.structures]
    if kernels.widens and width == 2:
        several = sum(sizes) > tokens
        moments += _widening_moments(workload, settings, tokens, several=several, unified=unified)
    others = (sum(sizes) - tokens) * model.hidden * width
    given = sum(sizes.count(size) * _given_bytes(workload, size) for size in set(sizes))
    narrow = tokens * narrow_token_bytes(workload)
    return max(moments) + narrow + others + given + staying_bytes(workload, settings)


def _distinct(layers: Sequence[BlockShape]) -> Iterable[BlockShape]:
    """Return each structure once. Layers share them; to hash one takes longer than to count it."""
    return {id(layer): layer for layer in layers}.values()


def orthogonalized_bytes(layer: BlockShape) -> float:
    """Return what Newton-Schulz holds of a layer beside its gradient slot, in bf16.

    A matrix twice and two products with its smaller side; of experts as many as go at once.
    """
    most = 0.0
    for tensor in layer.matrices:
        small, large = sorted(tensor.shape[-2:])
        experts = tensor.num_elements // (small * large)
        at_once = min(experts, max(1, PLANNED_AT_ONCE // (small * large)))
        most = max(most, 4.0 * at_once * small * (large + small))
    return most


def _looked_up_rows(
    workload: Workload, settings: StepSettings, tokens: int, *, unified: bool
) -> int:
    """Return the rows that the embedding's backward makes a gradient of.

    Where compute shares the host's memory it has the rows themselves too, and their sums in fp32.
    """
    if not workload.model.embedding.is_trained:
        return 0
    if unified:
        widened = 2 if workload.element_bytes == 2 else 1
        return (2 + 2 * widened) * min(tokens, workload.model.vocab)
    return looked_up_rows(workload, settings)


def _other_tables(workload: Workload) -> int:
    """Return the elements that the front trains besides the embedding: tables for each layer."""
    model = workload.model
    trained = sum(tensor.num_elements for tensor in model.embedding.trained_part.tensors)
    return max(0, trained - model.vocab * model.hidden)


def _widening_moments(
    workload: Workload, settings: StepSettings, tokens: int, *, several: bool, unified: bool
) -> Iterator[float]:
    """Yield the moments at which a gradient is added to a sum, and exists in fp32 once more.

    Where compute shares the host's memory, those of tables are added by a few rows.
    """
    model, width = workload.model, workload.element_bytes
    chunked = num_chunks(settings, tokens) > 1
    table = model.vocab * model.hidden
    rows = held_rows_bytes(workload, settings, tokens)
    added_whole = not unified and model.trains_projection
    if added_whole and (several or chunked):
        yield rows + table * (width * (1 + chunked) + 4)
    if not unified and (several or model.tied) and model.embedding.is_trained:
        yield rows + max(table, _other_tables(workload)) * (width + 4)
    for layer in [held(layer, settings) for layer in model.structures] if several else ():
        largest = max((t.num_elements for t in layer.trained_part.tensors), default=0)
        yield rows + layer.gradient_bytes(workload.dtype) + 4 * largest


def _given_bytes(workload: Workload, tokens: int) -> float:
    """Return what a micro-batch keeps all along: tokens, rotary tables, masks if it has any.

    What layers get besides hidden states, too, and its gradients.
    """
    model = workload.model
    total = 32.0 * tokens + 2 * model.passed_width * workload.element_bytes * tokens
    attention = [layer.attention for layer in model.structures if layer.attention is not None]
    if attention:
        total += 2 * workload.element_bytes * tokens * max(shape.head_dim for shape in attention)
    sequence = min(workload.sequence, tokens)
    kinds = {shape.window for shape in attention}
    windows = {window for window in kinds if window is not None and window < sequence}
    eager = workload.attn == "eager"  # it always has a mask, and adds it: in the model's dtype
    masks = len(kinds) if workload.masked or eager else len(windows)
    per_pair = workload.element_bytes if eager else 1
    if workload.by_document:  # those of one document, while it is attended to
        return total + (sequence**2 * per_pair if windows or eager else 0)
    return total + masks * tokens * sequence * per_pair

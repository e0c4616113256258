"""A layer's backward at its largest: tensors that its recompute kept, and their gradients.

    full rows   all that recompute kept of feed-forward and attention exists at once
    kept        the same tensors of a layer whose activations stay, from its forward on
    tiles       inputs and outputs of attention and their gradients are as long as the row; all
                else is a tile long, and the gradients of params come in several parts

Bytes per token are those of the usual layer: norms that widen, a gated feed-forward.
"""

from __future__ import annotations

from megatrain.planning.memory.kernels import Kernels
from megatrain.planning.model.shapes import AttentionShape, BlockShape
from megatrain.planning.workload import Workload


def full_rows_bytes(
    block: BlockShape, workload: Workload, tokens: int, kernels: Kernels, gradients: int
) -> float:
    """Return what the backward of a layer holds at its largest, and `gradients` at its end."""
    hidden, width = workload.model.hidden, workload.element_bytes
    kept, attending = kept_per_token(block, workload, tokens)
    at_end = tokens * (kept + hidden * width) + gradients
    if block.num_experts:
        at_end += tokens * attending / 2
        return max(_feed_forward(block, workload, tokens, kept), at_end)
    if kernels.accumulates and block.attention is not None:
        attending += _accumulated(block.attention, width)
    in_attention = tokens * (kept + attending) + gradients
    in_attention -= width * block.trained_part.attention_params / 2
    return max(_feed_forward(block, workload, tokens, kept), in_attention, at_end)


def _feed_forward(block: BlockShape, workload: Workload, tokens: int, kept: float) -> float:
    """Return the bytes of its backward; `kept` bytes per token are there besides."""
    hidden, width = workload.model.hidden, workload.element_bytes
    inner = 6 * width * block.inner
    out = width * _largest_matrix(block, "down")
    if not block.num_experts:
        return tokens * (kept + inner) + out
    routed = block.experts_per_token * hidden * width
    return max(tokens * (kept + inner + 2 * routed) + out, tokens * (kept + inner + 4 * routed))


def page_bytes(block: BlockShape, workload: Workload, tokens: int) -> float:
    """Return what the backward of a layer holds with the gradient of its largest page."""
    hidden, width = workload.model.hidden, workload.element_bytes
    kept, _ = kept_per_token(block, workload, tokens)
    inner = (2 if block.gated else 1) * width * block.inner
    routed = block.experts_per_token * hidden * width
    largest = max(tensor.num_elements for tensor in block.trained_part.paged_tensors)
    return tokens * (kept + inner + 4 * routed) + width * largest


def tiled_bytes(
    block: BlockShape,
    attention: AttentionShape,
    workload: Workload,
    tokens: int,
    tile: int,
    kernels: Kernels,
) -> float:
    """Return the same over tiles: attention's own backward, or the tiles on either side of it."""
    hidden, width = workload.model.hidden, workload.element_bytes
    norms = _num_norms(block, hidden)
    made = width * (attention.query_width + attention.kv_width)
    mixed = width * attention.heads * attention.value_dim
    scores = attention.heads * min(workload.sequence, tokens)
    held, added = _score_bytes(workload, attention)
    kept = made + mixed + 4 * attention.heads + scores * held
    back = mixed + made + scores * added
    if kernels.accumulates:
        back += _accumulated(attention, width)
    elif workload.masked:  # keys and values are repeated for each query head
        kept += _expanded(attention, width)
        back += _expanded(attention, width) - width * attention.kv_width
    d_hidden = hidden * width
    before = hidden * (width + _norm_bytes(width)) + 3 * made
    after = hidden * (2 * width + _norm_bytes(width) * max(1, norms - 1)) + 2 * mixed
    before_params, after_params = block.trained_part.params_around_attention(hidden)
    after_tile = max(
        _feed_forward(block, workload, tile, after),
        tile * (after + d_hidden) + width * after_params,
    )
    return max(
        tokens * (d_hidden + kept + back),
        tokens * (d_hidden + kept + mixed) + after_tile,
        tokens * (d_hidden + made) + tile * before + width * before_params,
    )


def _expanded(attention: AttentionShape, width: int) -> int:
    """Return the bytes per token of keys and values, each once for every query head it serves."""
    if attention.kv_heads == attention.heads:
        return 0
    return width * attention.heads * (attention.head_dim + attention.value_dim)


def _accumulated(attention: AttentionShape, width: int) -> int:
    """Return what a fused kernel has beside its results: dQ in fp32, dK and dV by query head."""
    return 4 * attention.query_width + _expanded(attention, width)


def kept_per_token(block: BlockShape, workload: Workload, tokens: int) -> tuple[float, float]:
    """Return what recompute keeps beside the feed-forward, and what attention's backward adds."""
    hidden, width = workload.model.hidden, workload.element_bytes
    norms, trained = (_num_norms(each, hidden) for each in (block, block.trained_part))
    kept: float = hidden * (2 * width + _norm_bytes(width) * norms - width * (norms - trained))
    inputs, ranks, _ = block.adapted_widths
    kept += width * ranks + ((width + 1) * inputs if block.drops else 0)
    attention = block.attention
    if attention is None:
        return kept, 0.0
    queries = attention.query_width
    latent = attention.value_dim != attention.head_dim
    repeated = workload.masked or workload.attends_eagerly(attention)
    seen = queries if repeated else attention.kv_heads * attention.head_dim
    kept += (10 * queries if latent else 2 * (queries + seen)) * width + 4 * attention.heads
    for tensor in block.tensors:
        if "q_norm" in tensor.name:
            of_weight = width if tensor.trained else 0
            kept += (4 + of_weight) * (queries + attention.kv_heads * attention.head_dim)
    scores = attention.heads * min(workload.sequence, tokens)
    held, made = _score_bytes(workload, attention)
    return kept + scores * held, 4.0 * width * (queries + seen) + scores * made


def _num_norms(block: BlockShape, hidden: int) -> int:
    return sum(1 for t in block.tensors if t.name.endswith("weight") and t.shape == (hidden,))


def _norm_bytes(width: int) -> int:
    """Return what a norm keeps of each element: in bf16 also a copy in fp32.

    Its result before the product with its weight is among them, for the gradient of the weight.
    """
    return 4 + 2 * width if width == 2 else 10


def _score_bytes(workload: Workload, attention: AttentionShape) -> tuple[int, int]:
    """Return the bytes per score that recompute keeps, and that attention's backward adds.

    A fused kernel keeps none. Eager attention keeps its softmax, in fp32 and in the model's dtype,
    and makes as much again on the way back.
    """
    if not workload.attends_eagerly(attention):
        return 0, 0
    if attention.score_bytes:
        return attention.score_bytes, 0
    return (6, 6) if workload.dtype == "bf16" else (4, 6)


def _largest_matrix(block: BlockShape, name: str) -> int:
    """Return the elements of the largest gradient of matrices with this name."""
    tensors = block.trained_part.tensors
    found = (t.num_elements for t in tensors if name in t.name and len(t.shape) > 1)
    return max(found, default=max((t.num_elements for t in tensors), default=0))

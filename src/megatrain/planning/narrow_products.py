"""Products in fewer bits, as a plan counts them: `train.products` (engine/compute/products.py).

    products      those of linear modules at the machine's gain; experts, attention and the head
                  as ever
    passes        what narrowing reads and writes: the largest element, the scaled copy, the cast,
                  and the turned copies of backward; in fp16 also the results, which are widened
    weights       the same for each weight, once per pass over a block: shared by its micro-batches
    device        the narrowed weights of one layer, and their turned copies; of its tokens the
                  narrowed inputs, and the copies of the widest gradient

All of it is counted, and none was measured on a card.

Laws (tests/planning/test_narrow_products.py)
    1. A plan with plain products has nothing of this.
    2. The memory of narrowed weights is that of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.model.shapes import BlockShape, TensorShape
from megatrain.planning.workload import Workload

NARROW_WEIGHTS = "narrow weights"
PLANNED_MULTIPLE = 16
"""The same number as in engine/compute/products.py, which needs torch; a test compares them."""
_SCALED = 8
"""Bytes per element in bf16: read for the largest, read and written scaled, read for the cast."""
_WIDENED = 8
"""Bytes per element of a result in fp16: read and written in bf16, and once more with its unit."""


def narrow_bytes(workload: Workload) -> int:
    """Return the bytes of a narrowed element; 0: products are plain."""
    return {"plain": 0, "fp8": 1, "fp16_sums": 2}[workload.products]


def gain(profile: MachineProfile, workload: Workload) -> float:
    """Return the rate of narrow products over that of plain ones."""
    gains = {"plain": 1.0, "fp8": profile.fp8_gain, "fp16_sums": profile.fp16_sums_gain}
    return gains[workload.products]


def narrow_part(block: BlockShape, workload: Workload) -> float:
    """Return the share of a layer's products that are narrow."""
    narrow = 2.0 * sum(tensor.num_elements for tensor in narrow_matrices(block, workload))
    return narrow / block.matmul_flops_per_token if narrow else 0.0


def narrow_matrices(block: BlockShape, workload: Workload) -> Iterator[TensorShape]:
    """Yield the weights of a layer's linear modules that multiply in fewer bits."""
    if workload.products == "plain":
        return
    for tensor in block.tensors:
        widths = tensor.shape
        linear = tensor.role == "matrix" and len(widths) == 2 and not tensor.adapts
        router = widths[0] == block.num_experts
        if linear and not router and not any(width % PLANNED_MULTIPLE for width in widths):
            yield tensor


def narrowing_bytes(block: BlockShape, workload: Workload, *, backward: bool) -> float:
    """Return what narrowing for a layer's forward or backward moves per token."""
    width, total = narrow_bytes(workload), 0
    results = _WIDENED if width == 2 else 0
    for tensor in narrow_matrices(block, workload):
        outward, inward = tensor.shape
        if not backward:
            total += inward * (_SCALED + width) + outward * results
            continue
        # Gradients of input and weight: in fp16 each has its own scale.
        times = width if tensor.trained else 1
        total += outward * (_SCALED + width) * times + inward * results
        total += (outward + inward) * 2 * width if tensor.trained else 0
    return total


def weight_traffic(block: BlockShape, workload: Workload, *, backward: bool) -> float:
    """Return what narrowing a layer's weights moves, in each pass over it."""
    width = narrow_bytes(workload)
    params = sum(tensor.num_elements for tensor in narrow_matrices(block, workload))
    casts = 2 if backward and width == 2 else 1
    return params * (casts * (_SCALED + width) + (2 * width if backward else 0))


def narrow_token_bytes(workload: Workload) -> int:
    """Return what a layer's backward holds per token besides what it holds with plain products."""
    width = narrow_bytes(workload)
    most = 0
    for layer in workload.model.structures:
        shapes = [tensor.shape for tensor in narrow_matrices(layer, workload)]
        inputs = width * sum(inward for _, inward in shapes)
        copies = (outward * (2 + 2 * width) + inward * width for outward, inward in shapes)
        most = max(most, inputs + max(copies, default=0))
    return most


def narrow_weight_bytes(workload: Workload) -> int:
    """Return the device memory of one layer's narrowed weights, turned ones included."""
    width = narrow_bytes(workload)
    return max(
        2 * width * sum(tensor.num_elements for tensor in narrow_matrices(layer, workload))
        for layer in workload.model.structures
    )

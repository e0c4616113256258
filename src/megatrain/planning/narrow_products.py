"""Products in fp8, as a plan counts them: `train.products` (engine/compute/products.py).

    products      those of linear modules at the machine's gain; experts, attention and the head
                  as ever
    passes        what narrowing reads and writes: the largest element, the scaled copy, the cast,
                  and the turned copies of backward
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
_CAST = 9
"""Bytes per element in bf16: read for the largest, read and written scaled, read and written in
the cast."""
_TURN = 2
"""Bytes per element that is turned: read and written."""


def gain(profile: MachineProfile, workload: Workload) -> float:
    """Return the rate of narrow products over that of plain ones."""
    return profile.fp8_gain if workload.products == "fp8" else 1.0


def narrow_part(block: BlockShape, workload: Workload) -> float:
    """Return the share of a layer's products that are narrow."""
    narrow = 2.0 * sum(tensor.num_elements for tensor in narrow_matrices(block, workload))
    return narrow / block.matmul_flops_per_token if narrow else 0.0


def narrow_matrices(block: BlockShape, workload: Workload) -> Iterator[TensorShape]:
    """Yield the weights of a layer's linear modules that multiply in fp8."""
    if workload.products == "plain":
        return
    for tensor in block.tensors:
        widths = tensor.shape
        linear = tensor.role == "matrix" and len(widths) == 2 and not tensor.adapts
        router = widths[0] == block.num_experts
        if linear and not router and not any(width % PLANNED_MULTIPLE for width in widths):
            yield tensor


def narrowing_bytes(block: BlockShape, workload: Workload, *, backward: bool) -> int:
    """Return what narrowing for a layer's forward or backward moves per token."""
    total = 0
    for tensor in narrow_matrices(block, workload):
        outward, inward = tensor.shape
        if not backward:
            total += inward * _CAST
            continue
        total += outward * _CAST
        total += (outward + inward) * _TURN if tensor.trained else 0
    return total


def weight_traffic(block: BlockShape, workload: Workload, *, backward: bool) -> int:
    """Return what narrowing a layer's weights moves, in each pass over it."""
    params = sum(tensor.num_elements for tensor in narrow_matrices(block, workload))
    return params * (_CAST + _TURN if backward else _CAST)


def narrow_token_bytes(workload: Workload) -> int:
    """Return what a layer's backward holds per token besides what it holds with plain products."""
    most = 0
    for layer in workload.model.structures:
        shapes = [tensor.shape for tensor in narrow_matrices(layer, workload)]
        inputs = sum(inward for _, inward in shapes)
        # A gradient scaled in bf16, narrow and turned, and the turned input.
        copies = (4 * outward + inward for outward, inward in shapes)
        most = max(most, inputs + max(copies, default=0))
    return most


def narrow_weight_bytes(workload: Workload) -> int:
    """Return the device memory of one layer's narrowed weights, turned ones included."""
    return max(
        2 * sum(tensor.num_elements for tensor in narrow_matrices(layer, workload))
        for layer in workload.model.structures
    )

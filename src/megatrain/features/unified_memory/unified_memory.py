"""Compute works where the host's bytes are, so copies to the device are left out.

Where updates run in backward, embedding and head add up in their places of the host's ring, which
no layer uses. Layers drain into theirs.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatrain.engine.features import Feature
from megatrain.step.ops import OpKind
from megatrain.step.passes import Draft, Step

COPIES = (OpKind.FETCH, OpKind.SEND, OpKind.RETURN)


class UnifiedMemory(Feature):
    """Lets compute find weights and directions in host memory."""

    def places(self, step: Step) -> None:
        for family, *block in list(step.places):
            if family == "direction":
                step.places["direction", *block] = step.places["drained_grad", *block]

    def ops(self, step: Step) -> Iterable[Draft]:
        shape, layers = step.shape, step.shape.layers
        # Only now: other passes find by a fetch where a step first needs a block.
        step.places |= {("fetched", b): ("weights", b) for b in range(shape.num_blocks)}
        for op in step.ops:
            if op.kind in COPIES:
                continue
            if op.kind in (OpKind.HEAD, OpKind.BACKWARD):
                edges = [b for family, *b in op.writes if family == "grad_sum"]
                homes = [("drained_grad", *b) for b in edges if b[0] not in layers]
                op.also(writes=tuple(one for one in homes if step.places[one][0] == "host_grad"))
            yield op

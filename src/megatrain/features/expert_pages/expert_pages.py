"""A layer's ops fetch the pages of its experts themselves, so they read host memory as well."""

from __future__ import annotations

from collections.abc import Iterable

from megatrain.engine.features import Feature
from megatrain.step.ops import OpKind
from megatrain.step.passes import Draft, Step


class ExpertPages(Feature):
    """Ops of layers read the weights of their block while they compute."""

    def ops(self, step: Step) -> Iterable[Draft]:
        for op in step.ops:
            block = op.block or 0
            if op.kind in (OpKind.FORWARD, OpKind.BACKWARD) and block in step.shape.layers:
                op.also(reads=(("weights", block),))
        return step.ops

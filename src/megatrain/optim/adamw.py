"""AdamW on the store: fp32 masters and moments, one pass per run of params.

A pure function of the store, a gradient, the step of the run and the number of the update: it keeps
no state of its own, so what is in the store is all there is to save. The learning rate follows the
step, which also counts steps that were skipped or left out; the bias correction of the moments
follows the updates that a segment has had.

Norms and biases are not decayed, nor what `no_decay` names. Inside a segment params of equal decay
that follow each other form a run, and each run is one pass of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from megatrain.memory.layout import Kind, Segment
from megatrain.memory.store import Store
from megatrain.models.decoder import Param
from megatrain.models.patterns import check_patterns, matches
from megatrain.optim.kernel import AdamWScalars, Kernel
from megatrain.optim.native import load_kernel

Run = tuple[int, int, bool]
"""First and last element of a segment, and whether they are decayed."""


class AdamW:
    """The optimizer of one store. Safe to call from one thread at a time."""

    def __init__(
        self,
        store: Store,
        *,
        learning_rate: Callable[[int], float] | float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        no_decay: tuple[str, ...] = (),
        max_grad_norm: float | None = None,
        num_threads: int = 1,
        kernel: Kernel | None = None,
    ) -> None:
        """`learning_rate` is a number, or a function of the run's step, counted from 0.

        Raises ConfigError for a pattern of `no_decay` that matches nothing.
        """
        names = {name: place.param.aliases for name, place in store.layout.places.items()}
        check_patterns("optim.no_decay", no_decay, names)
        self._store, self._betas, self._eps = store, betas, eps
        self._rate: Callable[[int], float] = (
            learning_rate if callable(learning_rate) else lambda _: learning_rate
        )
        self._weight_decay, self._max_grad_norm = weight_decay, max_grad_norm
        self._num_threads = num_threads
        self._kernel = kernel or load_kernel()
        self._runs = {
            id(segment): _runs(store, segment, no_decay)
            for segment in store.layout.segments
            if segment.trained
        }

    def squared_norm(self, gradient: Tensor) -> float:
        """Return the sum of squares; finite exactly when every element is."""
        return self._kernel.squared_norm(gradient, num_threads=self._num_threads)

    def clip_factor(self, norm: float) -> float:
        """Return what brings a gradient of this norm down to `max_grad_norm`, as torch does."""
        if self._max_grad_norm is None or norm == 0:
            return 1.0
        return min(1.0, self._max_grad_norm / (norm + 1e-6))

    def update(
        self, segment: Segment, gradient: Tensor, *, step: int, number: int, scale: float
    ) -> None:
        """Apply `scale` x `gradient` to the segment, with the learning rate of `step`.

        `number` says which update of the segment this is. Both count from 1.
        """
        assert math.isfinite(scale), scale
        rate = self._rate(step - 1)
        weight = self._store.segment(segment, Kind.HI)
        lo = self._store.segment(segment, Kind.LO) if Kind.LO in segment.starts else None
        m, v = self._store.segment(segment, Kind.M), self._store.segment(segment, Kind.V)
        for start, stop, decays in self._runs[id(segment)]:
            scalars = AdamWScalars.at(
                number,
                lr=rate,
                betas=self._betas,
                eps=self._eps,
                weight_decay=self._weight_decay if decays else 0.0,
                grad_scale=scale,
            )
            span = slice(start, stop)
            self._kernel.adamw(
                weight[span],
                None if lo is None else lo[span],
                m[span],
                v[span],
                gradient[span],
                scalars,
                num_threads=self._num_threads,
            )


def decays(param: Param, no_decay: tuple[str, ...] = ()) -> bool:
    """Return whether weight decay is for this param: matrices, not norms, not biases."""
    module, _, leaf = param.name.rpartition(".")
    is_norm = "norm" in module.rpartition(".")[2]  # of heads, say: (heads, head size)
    if len(param.shape) < 2 or leaf.endswith("bias") or is_norm:
        return False
    return not matches(param.name, no_decay)


def _runs(store: Store, segment: Segment, no_decay: tuple[str, ...]) -> list[Run]:
    runs: list[Run] = []
    for place in store.layout.segment_places(segment):
        flag = decays(place.param, no_decay)
        if runs and runs[-1][2] == flag:
            runs[-1] = (runs[-1][0], place.padded_stop, flag)
        else:
            runs.append((place.start, place.padded_stop, flag))
    return runs

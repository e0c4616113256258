"""Tokens of a micro-batch: larger ones compute at a higher rate and hold more.

Full rows, twice as many each time. How a step is cut decides the order of its sums, so a resumed
run keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatrain.planning.levers.lever import Lever, as_tokens
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.planning.search import Search

MAX_MICRO_TOKENS = 1 << 16


class MicroBatchTokens(Lever):
    """The tokens that the device processes at a time."""

    name = "micro_batch_tokens"
    key = "train.micro_batch_tokens"
    is_kept = True
    is_tried = True
    frugal_turn = 2

    def choices(self, search: Search) -> list[int]:
        """Return full rows, twice as many each time, up to a rank's part of the step's tokens.

        One row is always offered, however long; beyond MAX_MICRO_TOKENS no second one joins it.
        """
        workload = search.workload
        size, most = min(workload.sequence, workload.step_tokens), workload.even_tokens
        sizes: list[int] = []
        while size < most and (size <= MAX_MICRO_TOKENS or not sizes):
            sizes.append(size)
            size *= 2
        if most <= MAX_MICRO_TOKENS or not sizes:
            sizes.append(most)
        return sizes[::-1]

    def given_up(self, settings: StepSettings) -> int:
        return settings.micro_batch_tokens

    def reason(self, search: Search, settings: StepSettings) -> str:
        tokens = settings.micro_batch_tokens
        if tokens >= search.workload.step_tokens:
            return "the full step at once"
        larger = settings.changed(micro_batch_tokens=2 * tokens)
        return f"{2 * tokens} {search.compared(settings, larger)}"

    def read(self, training: Mapping[str, Any]) -> int:
        return as_tokens(training["micro_batch_tokens"])

    def smaller(self, workload: Workload, settings: StepSettings) -> tuple[int, str, str] | None:
        before = settings.micro_batch_tokens
        now = max(before // 2, workload.sequence)
        if now >= before:
            return None
        return now, "smaller micro-batches", f"micro-batches of {now:,} tokens, not {before:,}"

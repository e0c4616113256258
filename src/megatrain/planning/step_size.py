"""The tokens of a step where `train.batch_tokens` is `auto`, from config and data alone.

The batch size changes what a run computes, so it never depends on the card or its memory: the same
config takes the same steps on every machine. The default is DEFAULT_TOKENS in whole rows of
`data.max_length`, fewer where an epoch of the data would have less than LEAST_STEPS steps. Where a
longer step would be faster on this machine, the plan says so and changes nothing; where not even
this step fits, its fixes name one that does.

Invariants (tests/planning/test_step_size.py)
    1. The machine has no part in it.
    2. An epoch has LEAST_STEPS steps, unless one row is too long for that.
    3. A step holds whole rows: one at least, DEFAULT_TOKENS at most unless one row is longer.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_TOKENS = 32768
LEAST_STEPS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """The tokens of a step, and why so many."""

    tokens: int
    reason: str


def default_step(row_tokens: int, epoch_tokens: int | None = None) -> StepSize:
    """Return the default step for rows of `row_tokens`.

    `epoch_tokens` are those of the data; None where they are not known, as in `estimate`.
    """
    sizes = [row_tokens]
    while 2 * sizes[-1] <= DEFAULT_TOKENS:
        sizes.append(2 * sizes[-1])
    if epoch_tokens is None or -(-epoch_tokens // sizes[-1]) >= LEAST_STEPS:
        is_long = row_tokens > DEFAULT_TOKENS
        return StepSize(tokens=sizes[-1], reason="one row" if is_long else "the default")
    enough = [size for size in sizes if -(-epoch_tokens // size) >= LEAST_STEPS]
    if not enough:
        return StepSize(tokens=row_tokens, reason="one row: an epoch is short")
    return StepSize(tokens=enough[-1], reason=f"so that an epoch has {LEAST_STEPS} steps")

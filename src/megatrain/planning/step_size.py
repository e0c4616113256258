"""The size of a step where `train.batch_tokens` is `auto`.

A longer step spreads the costs that a step has once, weights through the link and the optimizer,
over more tokens, until compute hides them; a still longer one only needs more memory for its tape
and takes fewer steps from the same data. So the size is the smallest that is fast enough:

    rows of data.max_length: 1, 2, 4, 8 ... of them, up to LONGEST tokens; with ranks, up to as
    many for each of them, and MOST_RANKS_TOKENS for all
      ->  those that leave an epoch LEAST_STEPS steps; one row, if none does
      ->  those that fit, with the most exact optimizer state that FLOOR tokens allow
      ->  the smallest from FLOOR on with ENOUGH of the speed of a very long step,
          or else the fastest

Speeds are those of steps that recompute: what the plan lets layers keep comes on top, from the
device memory that happens to be free, and must not change how a model trains.

FLOOR is for training, not for speed: with fewer tokens the gradient is noisier than most recipes
expect. Only data and memory may force a shorter step, and memory only after less exact states.

Laws (tests/planning/test_step_size.py)
    1. If a step of any size fits, the chosen one does.
    2. It has ENOUGH of the speed of a very long step, unless memory, data or LONGEST forbid.
    3. Half of it has less than ENOUGH, or is shorter than FLOOR.
    4. An epoch has LEAST_STEPS steps, unless one row is too long for that.
    5. A step longer than FLOOR costs no exactness of the optimizer's states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatrain.planning.levers import LEVERS
from megatrain.planning.levers.micro_batch import MAX_MICRO_TOKENS
from megatrain.planning.machine.profile import NOT_MEASURED, MachineProfile
from megatrain.planning.search import Search
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

FLOOR = 16384
LONGEST = 131072
USUAL = 32768
"""Tokens of a step where the machine was not measured: enough for usual cards (docs/planner.md)."""
MOST_RANKS_TOKENS = 1 << 20
"""Most tokens of a step that several ranks share: larger global batches rarely train well."""
VERY_LONG = 4
"""A very long step, in those of LONGEST tokens: nothing that a step has once matters any more."""
ENOUGH = 0.95
LEAST_STEPS = 50
_OF_AUTO = "auto takes no longer one"
_OF_DATA = f"so that an epoch has {LEAST_STEPS} steps"
_OF_ROW = "one row: an epoch is short"
_OF_MEMORY = "a longer one does not fit"
_NO_LIMIT = 1 << 60
_STATES = tuple(lever.name for lever in LEVERS if lever.makes_home)
"""Settings of the optimizer's states: those of the shortest step are kept for longer ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """The tokens of a step, and why so many."""

    tokens: int
    reason: str


def choose_step(
    profile: MachineProfile,
    workload: Workload,
    settings: StepSettings,
    pins: Mapping[str, str],
    epoch_tokens: int | None = None,
) -> StepSize:
    """Return the size of a step of `workload`, whose own is not regarded.

    The plan may not change those of `settings` that `pins` names. `epoch_tokens` are those of the
    data, where they are known.
    """
    trial = _Trial(profile, workload, settings, pins)
    sizes = step_sizes(trial.row, workload.division.size)
    allowed = [size for size in sizes if _num_steps(size, epoch_tokens) >= LEAST_STEPS]
    limit = _OF_AUTO if allowed == sizes else _OF_DATA if allowed else _OF_ROW
    allowed = allowed or sizes[:1]
    start = next((size for size in allowed if size >= FLOOR), allowed[-1])
    first = trial.longest([size for size in allowed if size <= start])
    if first is None:
        return StepSize(tokens=start, reason="no step fits")
    longer = [size for size in allowed if size > start]
    if first.tokens < start:
        limit, longer = _OF_MEMORY, []
    kept = trial.with_states_of(first.settings)
    if profile.source == NOT_MEASURED:
        return _usual(kept, first, longer, limit)
    return _fast_enough(kept, first, longer, limit)


def step_sizes(row_tokens: int, num_ranks: int = 1) -> list[int]:
    """Return full rows, twice as many each time, up to LONGEST tokens; at least one row."""
    sizes = [row_tokens]
    while 2 * sizes[-1] <= min(num_ranks * LONGEST, MOST_RANKS_TOKENS):
        sizes.append(2 * sizes[-1])
    return sizes


def _num_steps(size: int, epoch_tokens: int | None) -> int:
    return LEAST_STEPS if epoch_tokens is None else -(-epoch_tokens // size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    """A size that fits, its best settings and its speed."""

    tokens: int
    settings: StepSettings
    tokens_per_s: float


class _Trial:
    """Tries steps of several sizes."""

    def __init__(
        self,
        profile: MachineProfile,
        workload: Workload,
        settings: StepSettings,
        pins: Mapping[str, str],
    ) -> None:
        self.profile, self.workload = profile, workload
        self.settings, self.pins = settings, pins
        self.row = workload.sequence
        """Tokens of the smallest step: one row, or one micro-batch if its size is given."""
        if "micro_batch_tokens" in pins:
            self.row = max(self.row, settings.micro_batch_tokens)

    def with_states_of(self, settings: StepSettings) -> _Trial:
        """Return a trial in which every step has the optimizer states of `settings`."""
        kept = {name: getattr(settings, name) for name in _STATES}
        pins = {**self.pins, **dict.fromkeys(_STATES, "those of the shortest step")}
        return _Trial(self.profile, self.workload, self.settings.changed(**kept), pins)

    def best(self, tokens: int) -> _Tried | None:
        """Return a step of so many tokens with its best settings, or None if it does not fit."""
        found = self._search(self.profile, tokens).best()
        if found is None:
            return None
        speed = tokens / found.step_s
        return _Tried(tokens=tokens, settings=found.settings, tokens_per_s=speed)

    def longest(self, sizes: Sequence[int]) -> _Tried | None:
        """Return the longest of `sizes` that fits, or None."""
        return next(filter(None, map(self.best, reversed(sizes))), None)

    def long_speed(self, tried: _Tried) -> float:
        """Return tokens/s of a very long step without a limit of host memory.

        Where `tried` is faster, as with its tape on the device, return that.
        """
        roomy = self.profile.changed(ram_bytes=_NO_LIMIT, pinned_bytes=0)
        longest = step_sizes(self.row, self.workload.division.size)[-1]
        search = self._search(roomy, VERY_LONG * longest)
        ways = self._large_parts(roomy, longest) or [tried.settings]
        seconds = min(map(search.seconds, ways))
        return max(search.workload.step_tokens / seconds, tried.tokens_per_s)

    def _large_parts(self, profile: MachineProfile, tokens: int) -> list[StepSettings]:
        """Return the best settings with each of the two largest micro-batches that fit."""
        found: list[StepSettings] = []
        micro, size = self.row, self.workload.division.size
        most = min(tokens // size, MAX_MICRO_TOKENS)
        while 2 * micro <= most and "micro_batch_tokens" not in self.pins:
            micro *= 2
        while micro >= self.row and len(found) < 2:
            settings = self.settings.changed(micro_batch_tokens=micro)
            pins = {**self.pins, "micro_batch_tokens": "large", "slots": "of short steps"}
            best = Search(profile, self.workload.with_step(tokens), settings, pins).best()
            found += [] if best is None else [best.settings]
            micro //= 2
        return found

    def _search(self, profile: MachineProfile, tokens: int) -> Search:
        return Search(profile, self.workload.with_step(tokens), self.settings, self.pins)


def _usual(trial: _Trial, first: _Tried, longer: Sequence[int], limit: str) -> StepSize:
    """Return the usual size, or the longest below it that may be chosen."""
    below = [size for size in longer if size <= USUAL]
    found = trial.longest(below) or first
    if not below and limit != _OF_AUTO:
        return StepSize(tokens=found.tokens, reason=limit)
    if below and found.tokens < below[-1]:
        return StepSize(tokens=found.tokens, reason=_OF_MEMORY)
    return StepSize(tokens=found.tokens, reason="usual; this machine was not measured")


def _fast_enough(trial: _Trial, first: _Tried, longer: Sequence[int], limit: str) -> StepSize:
    """Return the smallest size with ENOUGH of the speed of a very long one, else the fastest."""
    long_speed = trial.long_speed(first)
    tried = [first]
    for size in longer:
        if tried[-1].tokens_per_s >= ENOUGH * long_speed:
            break
        found = trial.best(size)
        if found is None:
            limit = _OF_MEMORY
            break
        tried.append(found)
    chosen = max(tried, key=lambda one: (one.tokens_per_s, -one.tokens))
    percents = {one.tokens: int(100 * one.tokens_per_s / long_speed) for one in tried}
    speed = f"{percents[chosen.tokens]}% of a very long step's speed"
    if chosen.tokens_per_s < ENOUGH * long_speed or chosen.tokens < FLOOR:
        return StepSize(tokens=chosen.tokens, reason=f"{limit}; {speed}")
    if chosen is first:
        return StepSize(tokens=chosen.tokens, reason=f"{speed}; auto takes no shorter one")
    before = tried[tried.index(chosen) - 1].tokens
    return StepSize(
        tokens=chosen.tokens, reason=f"{speed}; {before:,} tokens have {percents[before]}%"
    )

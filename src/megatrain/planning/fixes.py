"""Changes to the settings, the data or the machine that make a run fit, the cheapest first.

A change that costs nothing but a habit comes before one that costs quality, that before one that
wears out a drive, and that before one that costs money at once. What one change does not solve,
several together may: every set of kinds of change is tried, in the order of its cost, until enough
are found. Settings are written as `train` and `estimate` take them, so that each can be tried at
once.

Laws (tests/planning/test_fixes.py): each fix, applied, fits; none holds a change it can do without.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from megatrain.memory.ledger import Ledger, gib
from megatrain.planning.levers import LEVERS
from megatrain.planning.levers.lever import Lever
from megatrain.planning.levers.tier import LEAST_SAVED
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.machine.reserve import left_by_system
from megatrain.planning.memory.predicted import predicted_ledger
from megatrain.planning.model.partly_trained import with_base
from megatrain.planning.model.shapes import BlockShape, TensorShape
from megatrain.planning.plan import make_plan
from megatrain.planning.search import (
    DEVICE_HEADROOM,
    HOST_HEADROOM,
    Search,
    shortfalls,
)
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

MOST = 3
STATE_KEY = "optim.state"
STATE_PRICE = {
    "bf16": "moments are rounded to bf16, so weights move 0.2 % farther",
    "8bit": "moments are rounded to 8 bits, so weights move 1 to 2 % farther",
}
"""What a less exact state costs with beta2 = 0.999: docs/numerics.md has the measurements."""
RAM_SIZES = [
    size << 30
    for size in (
        16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1152, 1280, 1536,
        2048, 2304, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152, 65536,
    )
]  # fmt: skip
"""Sizes that machines are sold with: 2 to 24 modules of 8 to 256 GiB and more."""
DEVICE_SIZES = [
    size << 30 for size in (8, 10, 12, 16, 24, 32, 40, 48, 64, 80, 96, 141, 180, 192, 288)
]
SHORTEST = 128
"""Tokens of a row: the shortest useful length."""
_DRIVER_SHARE = 0.06
"""Share of a card's memory that the driver keeps."""


@dataclass(frozen=True, kw_only=True)
class Fix:
    """One change, or several that go together."""

    text: str
    cost: float
    """Orders fixes: 1 a habit, 2 quality, 2.5 the life of a drive, 4 and more money."""
    profile: MachineProfile
    workload: Workload
    """Both as they are after the change."""
    settings: StepSettings
    pins: Mapping[str, str]
    """Settings that the search begins with, and reasons for those that it may not change."""
    overrides: tuple[str, ...] = ()
    """The settings among the changes, as the command line takes them."""
    bought: tuple[int, int] = (0, 0)
    """Sizes of card and host memory to buy; 0: none."""

    def __str__(self) -> str:
        return self.text.replace("; ", "\n    and ")

    @property
    def _search(self) -> Search:
        return Search(self.profile, self.workload, self.settings, self.pins)

    @cached_property
    def ledger(self) -> Ledger:
        """Ledger of the settings that lack least."""
        search = self._search
        smallest = min(search.small(), key=search.lack)
        return predicted_ledger(self.profile, self.workload, smallest)

    def least(self, place: str) -> int:
        """Return the least bytes that a place could do with, if no other place lacks for it."""
        ways = self._search.small()
        ledgers = [predicted_ledger(self.profile, self.workload, way) for way in ways]
        fine = [each for each in ledgers if not shortfalls(self.profile, each).keys() - {place}]
        return min(ledger.total(place) for ledger in fine or ledgers)

    @property
    def tier_bytes(self) -> int:
        """Bytes on disk in the first home in which anything fits."""
        home = self._search.first_home()
        ways = [] if home is None else self._search.small_at(home)
        ledgers = [predicted_ledger(self.profile, self.workload, way) for way in ways]
        return min((ledger.total("tier") for ledger in ledgers), default=0)

    @cached_property
    def missing(self) -> dict[str, int]:
        """Bytes by place; empty: it fits."""
        return shortfalls(self.profile, self.ledger)

    def then(self, text: str, override: str = "", **changes: object) -> Fix:
        """Return the fix that does this one and then another change."""
        joined = f"{self.text}; {text}" if self.text else text
        overrides = (*self.overrides, override) if override else self.overrides
        return replace(self, text=joined, overrides=overrides, **changes)  # type: ignore[arg-type]

    def left_to_plan(self, lever: Lever, **begins: int) -> Fix | None:
        """Let the plan choose a setting that the user has; the search begins with `begins`."""
        if lever.name not in self.pins:
            return None
        pins = {other: why for other, why in self.pins.items() if other != lever.name}
        settings = self.settings.changed(**begins)
        found = replace(self, pins=pins, settings=settings)
        place = "host" if self.profile.unified else "device"
        saved = self.ledger.total(place) - found.ledger.total(place)
        if saved < LEAST_SAVED:
            return None
        override = f"{lever.key}=auto"
        return self.then(
            f"{override} (-{gib(saved)} {place})", override, pins=pins, settings=settings
        )


_Chosen = tuple[int, ...]
"""Kinds of change by their places in _KINDS, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A kind of change."""

    cost: float
    change: Callable[[Fix], Fix | None]
    """Return what comes of a fix with this change too; None if it has nothing to give."""


def find_fixes(search: Search) -> tuple[Fix, ...]:
    """Return up to MOST changes that make the workload of a search fit, the cheapest first."""
    start = Fix(
        text="",
        cost=0.0,
        profile=search.profile,
        workload=search.workload,
        settings=search.settings,
        pins=search.pins,
    )
    tried: dict[_Chosen, Fix | None] = {(): start}
    found: dict[_Chosen, Fix] = {}
    for chosen in _by_cost():
        if len(found) == MOST:
            break
        before = tried[chosen[:-1]]  # costs less, so it was tried already
        kind = _KINDS[chosen[-1]]
        fix = None if before is None or not before.missing else kind.change(before)
        tried[chosen] = fix = None if fix is None else replace(fix, cost=fix.cost + kind.cost)
        if fix is not None and not fix.missing and not _is_more(chosen, fix, found):
            found[chosen] = fix
    return tuple(_with_figures(start, fix) for fix in found.values())


def _with_figures(start: Fix, fix: Fix) -> Fix:
    """Return a fix of the optimizer's states alone with its memory, its speed and its price.

    A change of what is computed is the user's decision, so all that speaks for and against it is
    said. The speed is compared with that of the states that were asked for, in enough memory.
    """
    state = fix.settings.state
    if fix.overrides != (f"{STATE_KEY}={state}",) or any(fix.bought):
        return fix
    plan = make_plan(fix.profile, fix.workload, fix.settings, fix.pins)
    figures, price = plan.places()["host"], STATE_PRICE[state]
    if plan.knows_time:
        roomy = start.profile.changed(ram_bytes=RAM_SIZES[-1])
        exact = make_plan(roomy, start.workload, start.settings, start.pins)
        figures += f", {plan.speed}"
        gain, asked = exact.step_s / plan.step_s - 1, start.settings.state
        price += f"\n    {gain:+.0%} tok/s against {asked} in enough memory"
    return replace(fix, text=f"{fix.overrides[0]} ({figures})\n    {price}")


def _by_cost() -> list[_Chosen]:
    """Return every set of kinds, the cheapest first."""
    places = range(len(_KINDS))
    sets = itertools.chain.from_iterable(
        itertools.combinations(places, count + 1) for count in places
    )
    return sorted(sets, key=lambda chosen: (sum(_KINDS[i].cost for i in chosen), chosen))


def _is_more(chosen: _Chosen, fix: Fix, found: dict[_Chosen, Fix]) -> bool:
    """Return whether it asks for all that another asks for, and saves nothing that is bought."""
    return any(
        set(other) <= set(chosen)
        and all(new >= old for new, old in zip(fix.bought, known.bought, strict=True))
        for other, known in found.items()
    )


def _set(before: Fix, override: str, why: str, workload: Workload) -> Fix:
    return before.then(f"{override} ({why})", override, workload=workload)


# Settings.


def _without_packing(start: Fix) -> Fix | None:
    """Do without the mask that keeps packed rows apart: as large as a row is long, for each."""
    if not start.workload.masked:
        return None
    plain = replace(start.workload, packed=False)
    saved = _saved(start, plain, "device")
    if saved < LEAST_SAVED:
        return None
    return _set(start, "data.packing=false", f"no masks, -{gib(saved)} device", plain)


def _without_clipping(start: Fix) -> Fix | None:
    """Do without the norm, where gradients that wait for it cannot be had by a second backward."""
    if start.workload.max_grad_norm is None:
        return None
    unclipped = replace(start.workload, max_grad_norm=None)
    saved = _saved(start, unclipped, "host")
    if saved < LEAST_SAVED:
        return None
    why = f"updates in backward, -{gib(saved)} host"
    return _set(start, "train.max_grad_norm=null", why, unclipped)


def _in_bf16(start: Fix) -> Fix | None:
    if start.workload.dtype != "fp32":
        return None
    low = replace(start.workload, dtype="bf16")
    return _set(start, "model.dtype=bf16", "masters stay fp32", low)


def _less_exact_states(start: Fix) -> Fix | None:
    """Keep the states of the optimizer in the most exact of the lesser precisions that fits."""
    states = list(start.workload.states)
    lesser = states[states.index(start.settings.state) + 1 :]
    ways = [replace(start, settings=start.settings.changed(state=state)) for state in lesser]
    if not ways:
        return None
    way = next((way for way in ways if not way.missing), ways[-1])
    saved = start.ledger.total("host") - way.ledger.total("host")
    override = f"{STATE_KEY}={way.settings.state}"
    return start.then(f"{override} (-{gib(saved)} host)", override, settings=way.settings)


def _with_frozen_tables(start: Fix) -> Fix | None:
    """Freeze embedding and output projection: they keep their weights and nothing else."""
    model = start.workload.model
    tables = [t for block in (model.embedding, model.head) for t in block.tensors if _is_table(t)]
    if not tables:
        return None
    frozen = replace(model, embedding=_frozen(model.embedding), head=_frozen(model.head))
    workload = replace(start.workload, model=frozen)
    listed = ",".join(_pattern(table.name) for table in tables)
    saved = gib(_saved(start, workload, "host"))
    return _set(start, f"model.frozen=[{listed}]", f"-{saved} host", workload)


def _with_narrow_base(start: Fix) -> Fix | None:
    """Keep the frozen base of adapters in 4 bits."""
    model = start.workload.model
    if not model.is_adapted:
        return None
    narrow = replace(start.workload, model=with_base(model, "nf4"))
    saved = _saved(start, narrow, "host")
    if saved < LEAST_SAVED:
        return None
    return _set(start, "model.base=nf4", f"-{gib(saved)} host", narrow)


def _is_table(tensor: TensorShape) -> bool:
    return tensor.trained and len(tensor.shape) > 1


def _frozen(block: BlockShape) -> BlockShape:
    tensors = (replace(t, trained=t.trained and not _is_table(t)) for t in block.tensors)
    return replace(block, tensors=tuple(tensors))


def _pattern(name: str) -> str:
    """Return a pattern for a table; one that is known from dimensions alone has no prefix."""
    stem = name.removesuffix(".weight")
    return f"model.{stem}*" if stem == "embed_tokens" else f"{stem}*"


def _saved(start: Fix, workload: Workload, place: str) -> int:
    return start.ledger.total(place) - replace(start, workload=workload).ledger.total(place)


def _shorter_rows(start: Fix) -> Fix | None:
    """Offer the longest rows, of half the length or less, that fit the device."""
    workload, length = start.workload, start.workload.sequence // 2
    while length >= SHORTEST:
        shorter = replace(workload, sequence=length)
        if "device" not in replace(start, workload=shorter).missing:
            return _set(start, f"data.max_length={length}", f"now {workload.sequence}", shorter)
        length //= 2
    return None


def _shorter_steps(start: Fix) -> Fix | None:
    """Offer the longest step, of half the tokens or less, that fits; else, that fits the host."""
    workload = start.workload
    shorter = [workload.with_step(tokens) for tokens in _halves(start)]
    fits = [each for each in shorter if not replace(start, workload=each).missing]
    if not fits and "host" in start.missing:
        fits = [each for each in shorter if "host" not in replace(start, workload=each).missing]
    if not fits:
        return None
    longest = fits[0]
    place = "host" if "host" in start.missing else "device"
    key, value = longest.step_setting
    why = f"now {workload.step_setting[1]}, -{gib(_saved(start, longest, place))} {place}"
    return _set(start, f"{key}={value}", why, longest)


def _halves(start: Fix) -> list[int]:
    """Return halves of the step's tokens, and halves of those, down to one micro-batch."""
    least = start.workload.sequence
    if "micro_batch_tokens" in start.pins:
        least = max(least, start.settings.micro_batch_tokens)
    tokens, rows = start.workload.step_tokens, start.workload.batch_rows
    powers = range(1, 24 if rows is None else rows.bit_length())
    return [tokens >> power for power in powers if tokens >> power >= least]


# The machine.


def _more_device(start: Fix) -> Fix | None:
    profile = start.profile
    if profile.unified or profile.integrated or not profile.device_bytes:
        return None
    return _more(start, "device", DEVICE_SIZES, DEVICE_HEADROOM, profile.device_bytes)


def _more_ram(start: Fix) -> Fix | None:
    return _more(start, "host", RAM_SIZES, HOST_HEADROOM, start.profile.ram_bytes)


def _more(start: Fix, place: str, sizes: list[int], headroom: float, now: int) -> Fix | None:
    needed = int(start.least(place) * headroom) + 1
    left = left_by_system if place == "host" else _left_by_driver
    sold = next((size for size in sizes if left(size) >= needed), None)
    if needed <= now or sold is None:
        return None
    field = "ram_bytes" if place == "host" else "device_bytes"
    where = "installed" if place == "host" else "on the card"
    text = f"{place} memory: {gib(needed)} free (now {gib(now)})"
    if needed > sold // 4:  # less than that is a matter of limits, not of what is sold
        text += f", so {sold >> 30} GiB {where}"
    bought = (start.bought[0], sold) if place == "host" else (sold, start.bought[1])
    return start.then(text, profile=start.profile.changed(**{field: needed}), bought=bought)


def _left_by_driver(card_bytes: int) -> int:
    return int(card_bytes * (1 - _DRIVER_SHARE))


def _of_levers(*, fills_gap: bool) -> tuple[_Kind, ...]:
    """Return the changes of levers, in the order of LEVERS."""
    return tuple(
        _Kind(cost=lever.fix_cost, change=lever.fix)
        for lever in LEVERS
        if lever.fix_cost and lever.fills_gap is fills_gap
    )


_KINDS = (
    *_of_levers(fills_gap=False),
    _Kind(cost=1.1, change=_without_packing),
    _Kind(cost=1.0, change=_without_clipping),
    _Kind(cost=1.2, change=_in_bf16),
    _Kind(cost=2.0, change=_with_frozen_tables),
    _Kind(cost=2.1, change=_with_narrow_base),
    _Kind(cost=0.9, change=_less_exact_states),
    *_of_levers(fills_gap=True),
    _Kind(cost=1.5, change=_shorter_rows),
    _Kind(cost=0.8, change=_shorter_steps),
    _Kind(cost=8.0, change=_more_device),
    _Kind(cost=4.0, change=_more_ram),
)
"""In the order in which they are applied: what gives a fixed amount, then what fills the gap."""

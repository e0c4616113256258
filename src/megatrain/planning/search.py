"""The best settings of a workload on a machine: what fits, tried by simulation.

Fitting is arithmetic on the ledger. Speed is simulated; layers repeat, so for the search a step of
few layers and one of a few more are played, and the rest is their difference. The winner is then
played whole.

    1. the first home of the optimizer's states in which anything fits (levers/homes.py)
    2. for each value of the levers that are tried: from the settings that need least, as much of
       the usual ones as fits, the levers by turns
    3. around the fastest of those: the other values that levers propose
    4. in what is left then: what levers fill it with, if that is faster

Laws (tests/planning/test_search.py)
    1. A returned setting fits; if any setting on the grid fits, one is returned.
    2. On a small grid its simulated time is within 2 % of the best of all settings of its home.
    3. In no home that comes before its own does anything on the grid fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from megatrain.memory.ledger import Ledger, gib
from megatrain.planning.levers import LEVERS
from megatrain.planning.levers.homes import homes, rivals, small_homes
from megatrain.planning.levers.lever import Lever
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.memory.predicted import predicted_ledger
from megatrain.planning.model.shapes import ModelShape
from megatrain.planning.simulate import simulate
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

HOST_HEADROOM = 1.04
"""A run needs this much more than its ledger before it is started: the ledger is true to 3 %."""
DEVICE_HEADROOM = 1.03
"""Working memory is predicted, not reserved."""
_HEADROOMS = {purpose: share for lever in LEVERS for purpose, share in lever.headroom.items()}
_TRIED = tuple(lever for lever in LEVERS if lever.is_tried)
_BY_TURNS = tuple(lever for lever in LEVERS if lever.turns is not None)
_ORDERS = tuple(
    sorted(_BY_TURNS, key=lambda lever: (lever.turns or ())[order]) for order in range(3)
)
"""The order in which levers get memory, where there is not enough for all. Which is best for speed
depends on the machine, so several are tried; tiles are never taken while full rows fit."""
_FRUGAL = sorted(
    (lever for lever in LEVERS if lever.frugal_turn), key=lambda lever: lever.frugal_turn
)
_FEW, _MORE = 6, 12
"""Layers that are played: periods of 2, 3 and 6 layers fit in between."""
_WORTH = 0.995
"""More device memory for less gain than this is not spent."""
_SAME = 1.0001
"""Times that differ by less are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """StepSettings that fit, and the time of a step with them."""

    settings: StepSettings
    step_s: float


def effective_profile(profile: MachineProfile, ledger: Ledger) -> MachineProfile:
    """Return the machine as copies see it: slower where not all can be pinned."""
    if not profile.pinned_bytes or ledger.total("pinned") <= profile.pinned_bytes:
        return profile
    share = profile.unpinned_share
    return profile.changed(
        copy_in_bytes_per_s=profile.copy_in_bytes_per_s * share,
        copy_out_bytes_per_s=profile.copy_out_bytes_per_s * share,
    )


def reserves(profile: MachineProfile, ledger: Ledger) -> dict[str, int]:
    """Return the bytes that must stay free beside the ledger, by each place that has a limit."""
    headrooms = {"host": HOST_HEADROOM, "tier": 1.0}  # the tier's file has exactly its size
    if not profile.on_host:
        headrooms["device"] = DEVICE_HEADROOM
    totals = {place: ledger.total(place) for place in headrooms}
    found = {place: int(totals[place] * headrooms[place]) - totals[place] for place in headrooms}
    for line in ledger.lines:
        if line.purpose in _HEADROOMS and line.place in found:
            found[line.place] += int(_HEADROOMS[line.purpose] * line.num_bytes)
    if profile.integrated:
        found["host"] += found.get("device", 0)
    return found


def shortfalls(profile: MachineProfile, ledger: Ledger) -> dict[str, int]:
    """Return the bytes that are missing, by place; empty: it fits."""
    has = capacities(profile)
    needed = {
        place: ledger.total(place) + reserve for place, reserve in reserves(profile, ledger).items()
    }
    return {place: needed[place] - has[place] for place in needed if needed[place] > has[place]}


def shortfall_texts(profile: MachineProfile, ledger: Ledger) -> list[str]:
    """Return what is missing, place by place, for people."""
    names = {"host": "host memory", "device": "device memory", "tier": "disk space"}
    if profile.integrated:
        names["host"] = "memory of host and device together"
    lacks = shortfalls(profile, ledger)
    return [f"{names[place]} {gib(lacks[place])}" for place in lacks]


def capacities(profile: MachineProfile) -> dict[str, int]:
    """Return the bytes that a run may use, by each place that may have a limit."""
    return {
        "host": profile.ram_bytes,
        "device": profile.device_bytes,
        "tier": profile.disk_bytes,
    }


class Search:
    """Tries settings of one workload on one machine."""

    def __init__(
        self,
        profile: MachineProfile,
        workload: Workload,
        settings: StepSettings | None = None,
        pins: Mapping[str, str] | None = None,
    ) -> None:
        """`settings` are where the search begins; those named in `pins` stay, for that reason."""
        self.profile, self.workload = profile, workload
        self.settings, self.pins = settings or StepSettings(), pins or {}
        self.tried: dict[StepSettings, float] = {}
        self._fitting: dict[StepSettings, bool] = {}
        self.few = _with_layers(workload, _FEW)
        self._more = _with_layers(workload, _MORE)

    def best(self) -> Candidate | None:
        """Return the fastest in the first home in which anything fits, or None if none has any.

        Where a home costs time alone, so do its rivals, and the faster of both is taken.
        """
        home = self.first_home()
        if home is None:
            return None
        best = self._fastest(home)
        rival = self._first_fitting(rivals(self, home))
        other = None if rival is None else self._fastest(rival)
        return min(filter(None, (best, other)), key=lambda one: one.step_s, default=None)

    def filled(self, best: Candidate) -> Candidate:
        """Return the candidate with the memory that it leaves put to use."""
        for lever in LEVERS:
            best = lever.filled(self, best)
        return best

    def first_home(self) -> StepSettings | None:
        """Return the first home in which anything fits."""
        return self._first_fitting(homes(self))

    def _first_fitting(self, among: Iterable[StepSettings]) -> StepSettings | None:
        fitting = (home for home in among if any(map(self.fits, self.small_at(home))))
        return next(fitting, None)

    def _fastest(self, home: StepSettings) -> Candidate | None:
        starts = [
            self.candidate(settings) for settings in self._starts(home) if self.fits(settings)
        ]
        if not starts:
            return None
        best = _frugal(starts)
        found = best.settings
        for settings in [way for lever in LEVERS for way in lever.around(self, found)]:
            if self.fits(settings):
                best = self.faster(best, settings)
        for lever in LEVERS:
            best = lever.settled(self, best)
        return best

    def faster(self, best: Candidate, settings: StepSettings) -> Candidate:
        """Return `settings` if they are faster by what is worth it, else the best so far."""
        other = self.candidate(settings)
        return other if other.step_s < best.step_s * _WORTH else best

    def no_slower(self, best: Candidate, settings: StepSettings) -> Candidate:
        """Return `settings` if they take no longer, else the best so far."""
        other = self.candidate(settings)
        return other if other.step_s <= best.step_s * _SAME else best

    def fits(self, settings: StepSettings) -> bool:
        """Return whether the ledger of these settings fits."""
        found = self._fitting.get(settings)
        if found is None:
            found = self._fitting[settings] = not self.missing(settings)
        return found

    def missing(self, settings: StepSettings) -> dict[str, int]:
        """Return the bytes that these settings lack, by place."""
        return shortfalls(self.profile, predicted_ledger(self.profile, self.workload, settings))

    def smallest(self) -> StepSettings:
        """Return the settings that lack least, in the best home of several: they show by how much
        it does not fit."""
        return min((way for home in homes(self) for way in self.small_at(home)), key=self.lack)

    def small(self) -> list[StepSettings]:
        """Return settings among which those are that need least of each place."""
        return [settings for home in small_homes(self) for settings in self.small_at(home)]

    def small_at(self, home: StepSettings) -> list[StepSettings]:
        """Return the settings of one home among which one needs least."""
        return [
            way for start in self._values(_TRIED, home, least=True) for way in self._least(start)
        ]

    def _least(self, start: StepSettings) -> list[StepSettings]:
        return list(self._values(_BY_TURNS, start, least=True))

    def _values(
        self, levers: Iterable[Lever], settings: StepSettings, *, least: bool = False
    ) -> Iterator[StepSettings]:
        """Yield `settings` with every value of some levers, or with those that may need least."""
        ways = {lever.name: (lever.least if least else lever.allowed)(self) for lever in levers}
        for values in itertools.product(*ways.values()):
            yield settings.changed(**dict(zip(ways, values, strict=True)))

    def lack(self, settings: StepSettings) -> float:
        """Return the missing memory of each place, as a share of its size."""
        has = capacities(self.profile)
        lacks = self.missing(settings)
        return sum(num_bytes / max(1, has[place]) for place, num_bytes in lacks.items())

    def missing_text(self, settings: StepSettings) -> str:
        """Return the memory that settings lack, of the first place that lacks any; empty: none."""
        lacks = self.missing(settings).items()
        return next((f"{gib(num_bytes)} more {place} memory" for place, num_bytes in lacks), "")

    def compared(self, settings: StepSettings, other: StepSettings) -> str:
        """Return how other settings compare: how much memory they lack, or how much slower."""
        if missing := self.missing_text(other):
            return f"needs {missing}"
        if settings not in self.tried or other not in self.tried:
            return "is not faster"
        slower = self.tried[other] / self.tried[settings] - 1
        return f"is {slower:.1%} slower" if slower > 0.0005 else "is not faster"

    def reasons(self, settings: StepSettings) -> dict[str, str]:
        """Return a reason for each setting, by its name."""
        levers = (lever for lever in LEVERS if lever.applies(self))
        return {lever.name: lever.reason(self, settings) for lever in levers} | dict(self.pins)

    def home_reasons(self, settings: StepSettings) -> dict[str, str]:
        """Return the reasons that are of memory alone: those of the home, which may cost time."""
        levers = [lever for lever in LEVERS if lever.is_costly(settings)]
        reasons = {
            lever.name: lever.reason(self, settings) for lever in levers if lever.applies(self)
        }
        pinned = [lever.name for lever in levers if lever.name in self.pins]
        return reasons | {name: self.pins[name] for name in pinned}

    def candidate(self, settings: StepSettings) -> Candidate:
        """Return `settings` with the time of a step."""
        if settings not in self.tried:
            self.tried[settings] = self.seconds(settings)
        return Candidate(settings=settings, step_s=self.tried[settings])

    @property
    def few_layers(self) -> int:
        """The layers of the shorter of two steps that are played for a longer one."""
        return self.few.model.num_layers

    def whole_seconds(self, settings: StepSettings) -> float:
        """Return the time of a step that is played whole."""
        return simulate(self._effective(settings), self.workload, settings).step_s

    def seconds(self, settings: StepSettings) -> float:
        """Return the time of a step, from those of two steps of few layers."""
        layers = self.workload.model.num_layers
        if layers <= _MORE:
            return self.whole_seconds(settings)
        for lever in LEVERS:
            if (found := lever.seconds(self, settings)) is not None:
                return found
        profile = self._effective(settings)
        few = simulate(profile, self.few, settings).step_s
        more = simulate(profile, self._more, settings).step_s
        return more + (layers - _MORE) * (more - few) / (_MORE - _FEW)

    def _effective(self, settings: StepSettings) -> MachineProfile:
        ledger = predicted_ledger(self.profile, self.workload, settings)
        return effective_profile(self.profile, ledger)

    def _starts(self, home: StepSettings) -> Iterator[StepSettings]:
        for start in self._values(_TRIED, home):
            yield from self._roomiest(start)

    def _roomiest(self, start: StepSettings) -> set[StepSettings]:
        """Return the settings that fit with as much of the usual ones as possible."""
        least = next(filter(self.fits, self._least(start)), None)
        if least is None:
            return set()
        usual = least.changed(**{lever.name: lever.allowed(self)[0] for lever in _BY_TURNS})
        if self.fits(usual):
            return {usual}
        return {self._relaxed(least, order) for order in _ORDERS}

    def _relaxed(self, settings: StepSettings, order: Iterable[Lever]) -> StepSettings:
        """Return settings that fit, with each lever in turn as near to the usual as still fits."""
        for lever in order:
            ways = (settings.changed(**{lever.name: value}) for value in lever.allowed(self))
            settings = next(filter(self.fits, ways), settings)
        return settings

    def waits_for_fetches(self, settings: StepSettings) -> bool:
        """Return whether a link without limits would help: only then can more slots."""
        if self.profile.unified:
            return False
        free = self.profile.changed(copy_in_bytes_per_s=1e3 * self.profile.copy_in_bytes_per_s)
        if free.network is not None:  # a block that is still there is not gathered again either
            free = free.changed(network=free.network.faster(1e3))
        here = simulate(self.profile, self.few, settings).step_s
        return simulate(free, self.few, settings).step_s < here * _WORTH


def _frugal(tried: list[Candidate]) -> Candidate:
    """Return the fastest; of those hardly slower, the one whose levers give up least."""
    fastest = min(one.step_s for one in tried)
    near = [one for one in tried if one.step_s * _WORTH <= fastest]

    def key(one: Candidate) -> tuple[float, ...]:
        return *(lever.given_up(one.settings) for lever in _FRUGAL), one.step_s

    return min(near, key=key)


def _with_layers(workload: Workload, count: int) -> Workload:
    """Return the workload with the model's first layers only."""
    model: ModelShape = workload.model
    if model.num_layers <= count:
        return workload
    return replace(workload, model=replace(model, layer_kinds=model.layer_kinds[:count]))

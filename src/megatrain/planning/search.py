"""The best settings of a workload on a machine: what fits, tried by simulation.

Fitting is arithmetic on the ledger. Speed is simulated; layers repeat, so for the search a step of
few layers and one of a few more are played, and the rest is their difference. The winner is then
played whole.

    1. the first home of the optimizer's states in which anything fits: in host memory from fp32
       over bf16 to 8 bits, then on disk, the same states in the same order
    2. for each micro-batch size and place of the tape: the largest chunk and fewest slots that fit
    3. around the fastest of those: more slots, rows in place of the table

A less exact state is never taken for speed, and a disk is never worn while host memory is enough.

Laws (tests/planning/test_search.py)
    1. A returned setting fits; if any setting on the grid fits, one is returned.
    2. On a small grid its simulated time is within 2 % of the best of all settings of its home.
    3. In no home that comes before its own does anything on the grid fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatrain.memory.ledger import Ledger, gib
from megatrain.planning.bytes import predicted_ledger
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.model.shapes import ModelShape
from megatrain.planning.simulate import simulate
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

HOST_HEADROOM = 1.04
"""A run needs this much more than its ledger before it is started: the ledger is true to 3 %."""
DEVICE_HEADROOM = 1.03
"""Working memory is predicted, not reserved."""
MAX_MICRO_TOKENS = 1 << 16
CHUNKS = (4096, 2048, 1024, 512, 256)
_FEW, _MORE = 6, 12
"""Layers that are played: periods of 2, 3 and 6 layers fit in between."""
_WORTH = 0.995
"""More device memory for less gain than this is not spent."""


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
    if profile.device_bytes and not profile.unified:
        headrooms["device"] = DEVICE_HEADROOM
    totals = {place: ledger.total(place) for place in headrooms}
    return {place: int(totals[place] * headrooms[place]) - totals[place] for place in headrooms}


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
        self.few = _with_layers(workload, _FEW)
        self._more = _with_layers(workload, _MORE)

    def best(self) -> Candidate | None:
        """Return the fastest in the first home in which anything fits, or None if none has any."""
        home = self.first_home()
        return None if home is None else self._fastest(home)

    def first_home(self) -> StepSettings | None:
        """Return the first home in which anything fits."""
        fitting = (home for home in self.homes() if any(map(self.fits, self.small_at(home))))
        return next(fitting, None)

    def homes(self) -> list[StepSettings]:
        """Return where states may live and how exactly, the best first, as settings to begin with.

        In host memory, the most exact first; then on disk, where a state that is less exact saves
        hardly any host memory, so that waiting gradients go there before a state is given up.
        """
        on_disk = ["states"] if self.workload.max_grad_norm is None else ["states", "gradients"]
        tiers = self._choices("tier", ["none", *on_disk] if self.profile.disk_bytes else ["none"])
        states = self._choices("state", list(self.workload.states))
        in_memory = [(state, tier) for tier in tiers if tier == "none" for state in states]
        tiered = [(state, tier) for state in states for tier in tiers if tier != "none"]
        return [self.settings.changed(state=s, tier=tier) for s, tier in (*in_memory, *tiered)]

    def _fastest(self, home: StepSettings) -> Candidate | None:
        starts = [self._try(settings) for settings in self._starts(home) if self.fits(settings)]
        if not starts:
            return None
        best = _frugal(starts)
        for settings in self._around(best.settings):
            if self.fits(settings):
                other = self._try(settings)
                if other.step_s < best.step_s * _WORTH:
                    best = other
        return best

    def fits(self, settings: StepSettings) -> bool:
        """Return whether the ledger of these settings fits."""
        ledger = predicted_ledger(self.profile, self.workload, settings)
        return not shortfalls(self.profile, ledger)

    def smallest(self) -> StepSettings:
        """Return the settings that lack least, in the best home of several: they show by how much
        it does not fit."""
        return min((way for home in self.homes() for way in self.small_at(home)), key=self.lack)

    def small(self) -> list[StepSettings]:
        """Return the settings that need least: in each tier, and with the tape in each place."""
        least = {home.tier: home for home in self.homes()}  # the last of each is the smallest
        return [settings for home in least.values() for settings in self.small_at(home)]

    def small_at(self, home: StepSettings) -> list[StepSettings]:
        """Return the settings that need least in one home, with the tape in each place."""
        micro = self._choices("micro_batch_tokens", self._micro_sizes())[0]
        chunk = self._choices("chunk_tokens", CHUNKS)[-1]
        return [
            self._settings(home, micro, tape=tape, chunk=chunk, gather=self._may_gather)
            for tape in self._tapes()
        ]

    def lack(self, settings: StepSettings) -> float:
        """Return the missing memory of each place, as a share of its size."""
        ledger = predicted_ledger(self.profile, self.workload, settings)
        has = capacities(self.profile)
        lacks = shortfalls(self.profile, ledger)
        return sum(num_bytes / max(1, has[place]) for place, num_bytes in lacks.items())

    def _try(self, settings: StepSettings) -> Candidate:
        if settings not in self.tried:
            self.tried[settings] = self.seconds(settings)
        return Candidate(settings=settings, step_s=self.tried[settings])

    def seconds(self, settings: StepSettings) -> float:
        """Return the time of a step, from those of two steps of few layers."""
        layers = self.workload.model.num_layers
        profile = effective_profile(
            self.profile, predicted_ledger(self.profile, self.workload, settings)
        )
        if layers <= _MORE or settings.slots > _FEW:
            return simulate(profile, self.workload, settings).step_s
        few = simulate(profile, self.few, settings).step_s
        more = simulate(profile, self._more, settings).step_s
        return more + (layers - _MORE) * (more - few) / (_MORE - _FEW)

    def _choices(self, name: str, others: Sequence[Any]) -> Sequence[Any]:
        """Return what a setting may be: its own value if it is pinned, else `others`."""
        return [getattr(self.settings, name)] if name in self.pins else others

    def _starts(self, home: StepSettings) -> Iterator[StepSettings]:
        for micro in self._choices("micro_batch_tokens", self._micro_sizes()):
            for tape in self._tapes():
                found = self._roomiest(home, micro, tape)
                if found is not None:
                    yield found

    def _tapes(self) -> Sequence[str]:
        return self._choices("tape", ["device"] if self.profile.unified else ["device", "host"])

    def _roomiest(self, home: StepSettings, micro: int, tape: str) -> StepSettings | None:
        """Return the settings with the largest chunk that fits, or None."""
        possible = self._may_gather
        for gather in self._choices("gather_embedding", [False, True] if possible else [False]):
            for chunk in self._choices("chunk_tokens", CHUNKS):
                settings = self._settings(
                    home, micro, tape=tape, chunk=chunk, gather=gather and possible
                )
                if self.fits(settings):
                    return settings
        return None

    def _around(self, settings: StepSettings) -> Iterator[StepSettings]:
        layers = self.workload.model.num_layers
        if "slots" not in self.pins and self._waits_for_fetches(settings):
            counts = [3, 4, 8, 16, 32, 64, 128, layers]
            for slots in sorted({count for count in counts if count <= layers}):
                yield settings.changed(slots=slots)
        if "gather_embedding" not in self.pins and self._may_gather:
            yield settings.changed(gather_embedding=not settings.gather_embedding)

    def _waits_for_fetches(self, settings: StepSettings) -> bool:
        """Return whether a link without limits would help: only then can more slots."""
        if self.profile.unified:
            return False
        free = self.profile.changed(copy_in_bytes_per_s=1e3 * self.profile.copy_in_bytes_per_s)
        here = simulate(self.profile, self.few, settings).step_s
        return simulate(free, self.few, settings).step_s < here * _WORTH

    @property
    def _may_gather(self) -> bool:
        wanted = any(self._choices("gather_embedding", [True]))
        return wanted and not self.workload.model.tied and not self.profile.unified

    def _micro_sizes(self) -> list[int]:
        """Return full rows, twice as many each time, up to the step's tokens.

        One row is always offered, however long; beyond MAX_MICRO_TOKENS no second one joins it.
        """
        workload = self.workload
        size = min(workload.sequence, workload.step_tokens)
        sizes: list[int] = []
        while size < workload.step_tokens and (size <= MAX_MICRO_TOKENS or not sizes):
            sizes.append(size)
            size *= 2
        if workload.step_tokens <= MAX_MICRO_TOKENS or not sizes:
            sizes.append(workload.step_tokens)
        return sizes

    def _settings(
        self, home: StepSettings, micro: int, *, tape: str, chunk: int, gather: bool
    ) -> StepSettings:
        return home.changed(
            micro_batch_tokens=micro,
            tape=tape,
            update="in_backward" if self.workload.max_grad_norm is None else "late",
            chunk_tokens=chunk,
            gather_embedding=gather,
        )


def _frugal(tried: list[Candidate]) -> Candidate:
    """Return the fastest; of those hardly slower, the one with the smallest micro-batches."""
    fastest = min(one.step_s for one in tried)
    near = [one for one in tried if one.step_s * _WORTH <= fastest]
    return min(near, key=lambda one: (one.settings.micro_batch_tokens, one.step_s))


def _with_layers(workload: Workload, count: int) -> Workload:
    """Return the workload with the model's first layers only."""
    model: ModelShape = workload.model
    if model.num_layers <= count:
        return workload
    return replace(workload, model=replace(model, layer_kinds=model.layer_kinds[:count]))

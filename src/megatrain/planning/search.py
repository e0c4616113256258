"""The best settings of a workload on a machine: what fits, tried by simulation.

Fitting is arithmetic on the ledger. Speed is simulated; layers repeat, so for the search a step of
few layers and one of a few more are played, and the rest is their difference. The winner is then
played whole.

    1. the first home of the optimizer's states in which anything fits: in host memory from fp32
       over bf16 to 8 bits, then on disk, the same states in the same order
    2. for each micro-batch size and place of the tape: from the settings that need least, as much
       of the usual ones as fits; full rows before all others
    3. around the fastest of those: more slots, rows in place of the table, one gradient slot
    4. in what is left then: activations of as many top layers as fit, if that is faster

A less exact state is never taken for speed, and a disk is never worn while host memory is enough.

Laws (tests/planning/test_search.py)
    1. A returned setting fits; if any setting on the grid fits, one is returned.
    2. On a small grid its simulated time is within 2 % of the best of all settings of its home.
    3. In no home that comes before its own does anything on the grid fit.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatrain.memory.ledger import Ledger, gib
from megatrain.planning.machine.profile import NOT_MEASURED, MachineProfile
from megatrain.planning.memory.device import KEPT_ACTIVATIONS
from megatrain.planning.memory.predicted import predicted_ledger
from megatrain.planning.model.shapes import ModelShape
from megatrain.planning.simulate import simulate
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

HOST_HEADROOM = 1.04
"""A run needs this much more than its ledger before it is started: the ledger is true to 3 %."""
DEVICE_HEADROOM = 1.03
"""Working memory is predicted, not reserved."""
KEPT_HEADROOM = 0.1
"""More of kept activations than the ledger has: they are many tensors, predicted by rules."""
MAX_MICRO_TOKENS = 1 << 16
CHUNKS = (4096, 2048, 1024, 512, 256)
TILES = (None, 16384, 8192, 4096, 2048, 1024)
PIECES = (1, 2, 4, 8, 16)
"""Each from what is best for speed to what needs least memory."""
_ORDERS = (
    ("tile_tokens", "head_pieces", "grad_slots", "chunk_tokens", "gather_embedding"),
    ("tile_tokens", "grad_slots", "chunk_tokens", "head_pieces", "gather_embedding"),
    ("tile_tokens", "chunk_tokens", "head_pieces", "grad_slots", "gather_embedding"),
)
"""Which settings get memory first, where there is not enough for all. What that is best for speed
depends on the machine, so several orders are tried; tiles are never taken while full rows fit."""
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
    if profile.device_bytes and not profile.unified:
        headrooms["device"] = DEVICE_HEADROOM
    totals = {place: ledger.total(place) for place in headrooms}
    found = {place: int(totals[place] * headrooms[place]) - totals[place] for place in headrooms}
    for line in ledger.lines:
        if line.purpose == KEPT_ACTIVATIONS and line.place in found:
            found[line.place] += int(KEPT_HEADROOM * line.num_bytes)
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
        return self._with_fewer_grad_slots(best)

    def with_kept_layers(self, best: Candidate) -> Candidate:
        """Return the candidate with activations kept by as many top layers as memory is left for.

        Not where that does not save time, and not on a machine that was not measured.
        """
        if "kept_layers" in self.pins or not self.may_keep(best.settings):
            return best
        num_layers = self.workload.model.num_layers
        kept = bisect_left(
            range(1, num_layers + 1),
            True,
            key=lambda count: not self.fits(best.settings.changed(kept_layers=count)),
        )
        if kept == 0:
            return best
        other = self._try(best.settings.changed(kept_layers=kept))
        return other if other.step_s < best.step_s * _WORTH else best

    def may_keep(self, settings: StepSettings) -> bool:
        """Return whether the plan may let layers keep activations.

        Tiles are there to hold less, and layers without attention, or with one that families take
        apart, hold what no rule here predicts.
        """
        attention = [layer.attention for layer in self.workload.model.structures]
        known = all(shape is not None and not shape.score_bytes for shape in attention)
        measured = self.profile.source != NOT_MEASURED
        return known and measured and self.workload.tile_of(settings) is None

    def fits(self, settings: StepSettings) -> bool:
        """Return whether the ledger of these settings fits."""
        found = self._fitting.get(settings)
        if found is None:
            ledger = predicted_ledger(self.profile, self.workload, settings)
            found = self._fitting[settings] = not shortfalls(self.profile, ledger)
        return found

    def smallest(self) -> StepSettings:
        """Return the settings that lack least, in the best home of several: they show by how much
        it does not fit."""
        return min((way for home in self.homes() for way in self.small_at(home)), key=self.lack)

    def small(self) -> list[StepSettings]:
        """Return the settings that need least: in each tier, and with the tape in each place."""
        least = {home.tier: home for home in self.homes()}  # the last of each is the smallest
        return [settings for home in least.values() for settings in self.small_at(home)]

    def small_at(self, home: StepSettings) -> list[StepSettings]:
        """Return the settings that need least in one home, with the tape in each place.

        Tiles and pieces of the vocabulary save memory in most cases, not in all.
        """
        micro = self._choices("micro_batch_tokens", self._micro_sizes())[0]
        return [way for tape in self._tapes() for way in self._smallest_ways(home, micro, tape)]

    def _smallest_ways(self, home: StepSettings, micro: int, tape: str) -> list[StepSettings]:
        ladders = self._ladders
        update = "in_backward" if self.workload.max_grad_norm is None else "late"
        least = home.changed(
            micro_batch_tokens=micro,
            tape=tape,
            update=update,
            **{name: ladder[-1] for name, ladder in ladders.items()},
        )
        tiles, pieces = ({ladders[n][-1], ladders[n][0]} for n in ("tile_tokens", "head_pieces"))
        return [
            least.changed(tile_tokens=tile, head_pieces=count)
            for tile, count in itertools.product(sorted(tiles, key=str), sorted(pieces))
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
        if 0 < settings.kept_layers < layers:  # as much of the way from none to all of them
            none, every = (
                self.seconds(settings.changed(kept_layers=count)) for count in (0, layers)
            )
            return none + (every - none) * settings.kept_layers / layers
        few = simulate(profile, self.few, settings).step_s
        more = simulate(profile, self._more, settings).step_s
        return more + (layers - _MORE) * (more - few) / (_MORE - _FEW)

    def _choices(self, name: str, others: Sequence[Any]) -> Sequence[Any]:
        """Return what a setting may be: its own value if it is pinned, else `others`."""
        return [getattr(self.settings, name)] if name in self.pins else others

    def _starts(self, home: StepSettings) -> Iterator[StepSettings]:
        for micro in self._choices("micro_batch_tokens", self._micro_sizes()):
            for tape in self._tapes():
                yield from self._roomiest(home, micro, tape)

    def _tapes(self) -> Sequence[str]:
        return self._choices("tape", ["device"] if self.profile.unified else ["device", "host"])

    def _roomiest(self, home: StepSettings, micro: int, tape: str) -> set[StepSettings]:
        """Return the settings that fit with as much of the usual ones as possible."""
        ways = filter(self.fits, self._smallest_ways(home, micro, tape))
        least = next(ways, None)
        if least is None:
            return set()
        usual = least.changed(**{name: ladder[0] for name, ladder in self._ladders.items()})
        if self.fits(usual):
            return {usual}
        return {self._relaxed(least, order) for order in _ORDERS}

    def _relaxed(self, settings: StepSettings, order: Sequence[str]) -> StepSettings:
        """Return settings that fit, with each in turn as near to the usual as still fits."""
        for name in order:
            ways = (settings.changed(**{name: value}) for value in self._ladders[name])
            settings = next(filter(self.fits, ways), settings)
        return settings

    @cached_property
    def _ladders(self) -> dict[str, Sequence[Any]]:
        """What a setting may be, from the best for speed to what needs least memory."""
        gathers = self._choices("gather_embedding", [False, True]) if self._may_gather else [False]
        tiled = self.workload.model.tiled and not self.workload.compiled
        tiled = tiled and self.settings.kept_layers == 0
        return {
            "tile_tokens": self._choices("tile_tokens", TILES if tiled else TILES[:1]),
            "head_pieces": self._choices("head_pieces", [1] if self._has_no_pieces else PIECES),
            "grad_slots": self._choices("grad_slots", [2, 1]),
            "chunk_tokens": self._choices("chunk_tokens", CHUNKS),
            "gather_embedding": gathers,
        }

    def _around(self, settings: StepSettings) -> Iterator[StepSettings]:
        layers = self.workload.model.num_layers
        if "slots" not in self.pins and self._waits_for_fetches(settings):
            counts = [3, 4, 8, 16, 32, 64, 128, layers]
            for slots in sorted({count for count in counts if count <= layers}):
                yield settings.changed(slots=slots)
        if "gather_embedding" not in self.pins and self._may_gather:
            yield settings.changed(gather_embedding=not settings.gather_embedding)

    def _with_fewer_grad_slots(self, best: Candidate) -> Candidate:
        """Return the candidate with one gradient slot, if it takes no longer."""
        if "grad_slots" in self.pins or best.settings.grad_slots == 1:
            return best
        other = self._try(best.settings.changed(grad_slots=1))
        return other if other.step_s <= best.step_s * _SAME else best

    def _waits_for_fetches(self, settings: StepSettings) -> bool:
        """Return whether a link without limits would help: only then can more slots."""
        if self.profile.unified:
            return False
        free = self.profile.changed(copy_in_bytes_per_s=1e3 * self.profile.copy_in_bytes_per_s)
        if free.network is not None:  # a block that is still there is not gathered again either
            free = free.changed(network=free.network.faster(1e3))
        here = simulate(self.profile, self.few, settings).step_s
        return simulate(free, self.few, settings).step_s < here * _WORTH

    @property
    def _may_gather(self) -> bool:
        alone = self.workload.division.is_alone
        return alone and not self.workload.model.tied and not self.profile.on_host

    @property
    def _has_no_pieces(self) -> bool:
        """A tied table, and one that is not trained, adds up as a whole or not at all."""
        model = self.workload.model
        return model.tied or self.profile.unified or not model.head.is_trained

    def _micro_sizes(self) -> list[int]:
        """Return full rows, twice as many each time, up to a rank's part of the step's tokens.

        One row is always offered, however long; beyond MAX_MICRO_TOKENS no second one joins it.
        """
        workload = self.workload
        size, most = min(workload.sequence, workload.step_tokens), workload.even_tokens
        sizes: list[int] = []
        while size < most and (size <= MAX_MICRO_TOKENS or not sizes):
            sizes.append(size)
            size *= 2
        if most <= MAX_MICRO_TOKENS or not sizes:
            sizes.append(most)
        return sizes


def _frugal(tried: list[Candidate]) -> Candidate:
    """Return the fastest; of those hardly slower, one with full rows and small micro-batches."""
    fastest = min(one.step_s for one in tried)
    near = [one for one in tried if one.step_s * _WORTH <= fastest]

    def key(one: Candidate) -> tuple[bool, int, float]:
        settings = one.settings
        return settings.tile_tokens is not None, settings.micro_batch_tokens, one.step_s

    return min(near, key=key)


def _with_layers(workload: Workload, count: int) -> Workload:
    """Return the workload with the model's first layers only."""
    model: ModelShape = workload.model
    if model.num_layers <= count:
        return workload
    return replace(workload, model=replace(model, layer_kinds=model.layer_kinds[:count]))

"""The plan: the immutable decision from workload and machine, with its reasons.

    plan = make_plan(profile, workload)
    plan.verdict()              # one line: whether it fits, how fast, memory and disk
    print(plan)                 # a table: memory, speed, what limits it
    plan.text(details=True)     # the same with every line of memory, every choice and why
    plan.facts()                # all of it as plain values: plan.json

A plan that does not fit reports by how much and the ways out (`fixes`), and has the settings that
need least, so that all its other figures exist.

Laws (tests/planning/test_plan.py)
    1. A plan that fits has a ledger that fits, with headroom; each of its settings has a reason.
    2. A plan that does not fit has fixes, and each of them, applied, fits.
    3. Its text has no line longer than 80 columns.
    4. The lines of a place add up to its total, with and without details.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatrain.errors import DoesNotFit
from megatrain.memory.ledger import Ledger, gib, plain_purpose
from megatrain.planning import optional
from megatrain.planning.levers import LEVERS
from megatrain.planning.levers.tier import has_tier
from megatrain.planning.levers.update import goes_back_twice, without_clipping
from megatrain.planning.machine.profile import NOT_MEASURED, MachineProfile
from megatrain.planning.memory.predicted import predicted_ledger
from megatrain.planning.prediction import (
    predicted_speed,
    predicted_time,
    speed_range,
    time_range,
    with_range,
)
from megatrain.planning.ranks.described import rank_lines, whose
from megatrain.planning.roofline import Roofline, roofline_of
from megatrain.planning.search import (
    Search,
    capacities,
    effective_profile,
    reserves,
    shortfall_texts,
    shortfalls,
)
from megatrain.planning.simulate import Simulation, simulate
from megatrain.planning.workload import Workload
from megatrain.step.ops import LIMITS
from megatrain.step.settings import StepSettings
from megatrain.text import figure

if TYPE_CHECKING:
    from megatrain.planning.fixes import Fix
    from megatrain.planning.wear import Wear

_LARGEST = 3
"""Lines of memory that are shown of each place, without details."""
_LEAST_GAIN = 0.02
_FASTER = 4
"""Factor to the next Ethernet that is sold: 10, 25, 100, 400."""
_TIGHT = 0.05
"""A plan that leaves less of host memory is tight: another program may take what it needs."""
_WORTH_NAMING = 0.15
"""A share of the step: what takes less is not named beside the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of a run, and the predictions for it."""

    profile: MachineProfile
    workload: Workload
    settings: StepSettings
    ledger: Ledger
    simulation: Simulation
    """The step as played; of a plan that does not fit, one of a few layers."""
    fits: bool
    reasons: dict[str, str]
    """Reasons by setting, with that of `batch_tokens` if the plan chose it; those of memory alone
    where the machine was not measured."""
    lever: str
    """The one setting that would move the bottleneck, and by how much."""
    fixes: tuple[Fix, ...] = ()
    epoch_tokens: int | None = None
    """Of data that has fewer than a step may have: it decides the time. None: it has more."""

    @property
    def knows_time(self) -> bool:
        """Whether the machine was measured; if not, only the figures of memory are valid."""
        return self.profile.source != NOT_MEASURED

    @property
    def is_tight(self) -> bool:
        """Whether it fits, and leaves hardly any host memory beside the reserve."""
        has = capacities(self.profile)["host"]
        needed = self.ledger.total("host") + reserves(self.profile, self.ledger)["host"]
        return self.fits and has - needed < _TIGHT * has

    @property
    def step_s(self) -> float:
        return self.simulation.step_s

    @property
    def bottleneck(self) -> str:
        return self.simulation.bottleneck

    @property
    def wear(self) -> Wear | None:
        """Wear of the disk by the tier; None without a tier."""
        written = self.ledger.total("tier")
        if not written or not self.fits:
            return None
        return optional.wear.Wear(
            step_bytes=written, step_s=self.step_s if self.knows_time else None
        )

    def roofline(self) -> Roofline:
        """Return the least times that the plan's costs allow. Walks all ops of a step."""
        return roofline_of(self.simulation)

    def with_setting(self, name: str, value: int, reason: str) -> Plan:
        """Return the plan with one setting changed, and all else as it is."""
        settings = self.settings.changed(**{name: value})
        ledger = predicted_ledger(self.profile, self.workload, settings)
        return replace(
            self,
            settings=settings,
            ledger=ledger,
            simulation=simulate(effective_profile(self.profile, ledger), self._timed, settings),
            reasons={**self.reasons, name: reason},
        )

    def with_epoch(self, tokens: int) -> Plan:
        """Return the plan for data of so many tokens.

        No step has more, and the last of an epoch is not filled from the next. Memory keeps room
        for full steps, which evaluations may need.
        """
        if not self.fits or tokens >= self.workload.step_tokens:
            return self
        plan = replace(self, epoch_tokens=max(1, tokens))
        profile = effective_profile(self.profile, self.ledger)
        return replace(plan, simulation=simulate(profile, plan._timed, self.settings))

    @property
    def _timed(self) -> Workload:
        """The step whose time is predicted."""
        if self.epoch_tokens is None:
            return self.workload
        return self.workload.with_step(self.epoch_tokens)

    def with_step_reason(self, reason: str) -> Plan:
        """Return the plan with the reason for the tokens of its step."""
        return replace(self, reasons={"batch_tokens": reason, **self.reasons})

    def require(self, *others: str) -> None:
        """Raise DoesNotFit, with `others` and all fixes, unless the plan fits."""
        if self.fits:
            return
        ways = "".join(f"\n  {way}" for way in (*others, *self.fixes))
        name = self.workload.model.name
        raise DoesNotFit(f"{name} does not fit: {self._lacking()}. Ways out:{ways}")

    def facts(self) -> dict[str, Any]:
        """Return the plan as plain values, for plan.json."""
        return {
            "model": self.workload.model.name,
            "machine": self.profile.name,
            **self._rank_facts(),
            "fits": self.fits,
            "tight": self.is_tight,
            "settings": self.settings.facts(),
            "reasons": self.reasons,
            "ledger": [
                {"place": line.place, "purpose": line.purpose, "num_bytes": line.num_bytes}
                for line in self.ledger.lines
            ],
            "reserve": reserves(self.profile, self.ledger),
            "predicted": self._predicted() if self.fits and self.knows_time else None,
            "wear": None if self.wear is None else self.wear.facts(),
            "lever": self.lever,
            "fixes": [fix.text for fix in self.fixes],
        }

    def _rank_facts(self) -> dict[str, Any]:
        division, network = self.workload.division, self.profile.network
        if division.is_alone or network is None:
            return {}
        hosts = {"num_hosts": division.num_hosts, "per_host": division.per_host}
        return {"ranks": hosts | {"network": network.facts()}}

    def _predicted(self) -> dict[str, Any]:
        simulation = self.simulation
        seconds, name = self.roofline().of(simulation.tokens)
        return {
            **with_range("step_s", simulation.step_s, time_range),
            **with_range("tokens_per_s", simulation.tokens_per_s, speed_range),
            "roofline_s": seconds,
            "roofline": name,
            "bottleneck": simulation.bottleneck,
            "busy": simulation.busy_shares,
            "chain_s": simulation.chain,
        }

    def verdict(self, whole: str = "", speed: str = "") -> str:
        """Return in one line whether it fits, and its figures.

        `whole` is the time of a run, `speed` that of all of it, where it does more than train.
        """
        if not self.fits:
            return f"does not fit: {self._lacking()}"
        places = self.places()
        if self.is_tight:
            places["host"] += " (tight)"
        memory = ", ".join(places.values())
        if not self.knows_time:
            return f"fits: {memory}"
        times = ", ".join(filter(None, [speed or self.speed, whole]))
        return f"fits: {times}, predicted; {memory}"

    @property
    def speed(self) -> str:
        """The predicted speed for people."""
        return predicted_speed(self.simulation.tokens_per_s)

    def _lacking(self) -> str:
        lacks = shortfall_texts(self.profile, self.ledger)
        return ", ".join(f"{text} short" for text in lacks)

    def places(self) -> dict[str, str]:
        """Return the memory and the disk that a run needs, each with its limit, by place."""
        has, reserved = capacities(self.profile), reserves(self.profile, self.ledger)
        names = {"host": "host", "device": "device", "tier": "scratch file", "disk": "disk"}
        totals = {place: self.ledger.total(place) + reserved.get(place, 0) for place in names}
        return {
            place: f"{name} {_share(totals[place], has.get(place, 0))}"
            for place, name in names.items()
            if totals[place]
        }

    def __str__(self) -> str:
        rows = [] if self.fits else ["", "does not fit", *self.ways_out()]
        return "\n".join([self.text(), *map(within_80, rows)])

    def text(self, *, details: bool = False) -> str:
        """Return the figures for people; with `details`, every line of memory and every choice."""
        rows = [*self._heading(), *self._memory(details=details)]
        if self.fits:
            speed = self._speed(details=details) if self.knows_time else []
            wear = [] if self.wear is None else [*self.wear.lines(), ""]
            rows += [*speed, *wear, *self._choices(details=details)]
        return "\n".join(map(within_80, rows)).rstrip()

    def ways_out(self, *others: str) -> list[str]:
        """Return lines with the changes that make it fit: `others`, then the fixes."""
        if not others and not self.fixes:
            return ["None of the changes that were tried makes it fit."]
        lines = "\n".join(f"  {way}" for way in (*others, *self.fixes)).splitlines()
        return ["Changes that make it fit, the cheapest first:", *lines]

    def _heading(self) -> list[str]:
        workload, model = self.workload, self.workload.model
        why = self.reasons.get("batch_tokens")
        return [
            f"plan      {model.name}, {figure(model.params)} params, on {self.profile.name}",
            f"step      {workload.step_tokens:,} tokens in rows of {workload.sequence:,}, "
            f"{workload.dtype}",
            *([] if why is None else [f"          auto: {why}"]),
            *self._short_step(),
            *rank_lines(self.profile, workload, self.ledger),
            "",
        ]

    def _short_step(self) -> list[str]:
        if self.epoch_tokens is None:
            return []
        return [f"          the data has {self.epoch_tokens:,} tokens: no step has more"]

    def _memory(self, *, details: bool) -> list[str]:
        has = capacities(self.profile)
        missing = shortfalls(self.profile, self.ledger)
        reserved = reserves(self.profile, self.ledger)
        rows = []
        for place in dict.fromkeys(line.place for line in self.ledger.lines):
            if place == "pinned":
                continue
            free = f" of {gib(has[place])}" if has.get(place) else ""
            short = f", {gib(missing[place])} short" if place in missing else ""
            total = self.ledger.total(place) + reserved.get(place, 0)
            of = whose(place, self.workload.division)
            rows.append(f"{place:10}{gib(total):>12}{free}{short}{of}")
            lines = [line for line in self.ledger.lines if line.place == place]
            sizes = [(plain_purpose(line.purpose), line.num_bytes) for line in lines]
            if reserved.get(place):
                sizes.append(("reserve, kept free", reserved[place]))
            rows += [f"  {name:28}{gib(size):>12}" for name, size in _largest(sizes, details)]
        return [*rows, ""]

    def _speed(self, *, details: bool) -> list[str]:
        simulation = self.simulation
        shares = simulation.busy_shares
        lanes = ["compute", "in", "out", "host", *([] if self.wear is None else ["disk"])]
        busy = ", ".join(f"{lane} {shares[lane]:.0%}" for lane in lanes)
        if not self.workload.division.is_alone:
            busy += f", network {shares['comm']:.0%}"
        return [
            f"speed     {self.speed}, {predicted_time(simulation.step_s)} a step, predicted",
            f"limit     {self._limit()}",
            *([f"busy      {busy}"] if details else []),
            f"faster    {self.lever}",
            "",
        ]

    def _limit(self) -> str:
        """Return what the step waits for; where several things take turns, their shares."""
        chain, whole = self.simulation.chain, self.simulation.step_s
        shares = {name: seconds / whole for name, seconds in chain.items()}
        first, *others = sorted(shares, key=lambda name: -shares[name])
        turns = [name for name in others if shares[name] >= _WORTH_NAMING]
        if not turns:
            return LIMITS[first]
        parts = ", then ".join(f"{name} {shares[name]:.0%}" for name in (first, *turns))
        return f"{parts} (not overlapped)"

    def costly_choices(self) -> list[str]:
        """Return the choices that cost exactness, time or a disk's life, each with its reason."""
        return [" ".join(line.split()) for line in self._choices(details=False)]

    def _choices(self, *, details: bool) -> list[str]:
        shown = {lever.name: self.reasons.get(lever.name) for lever in LEVERS}
        for lever in LEVERS:
            if (not details or not self.knows_time) and not lever.is_costly(self.settings):
                shown[lever.name] = None  # only what costs something is worth a line
            if (text := lever.unused_text(self.profile, self.settings)) is not None:
                del shown[lever.name]
                shown[lever.name] = text
        facts = self.settings.facts()
        values = {name: "null" if facts[name] is None else facts[name] for name in shown}
        return [f"{name:20}{values[name]!s:11} {why}" for name, why in shown.items() if why]


def within_80(line: str) -> str:
    """Return a line that is at most 80 columns long."""
    return line if len(line) <= 80 else f"{line[:77]}..."


def _largest(lines: list[tuple[str, int]], details: bool) -> list[tuple[str, int]]:
    """Return lines of memory, the largest first; without details all but three are one line."""
    lines = sorted(lines, key=lambda line: -line[1])
    rest = [] if details else lines[_LARGEST:]
    if len(rest) < 2:
        return lines
    others = sum(num_bytes for _, num_bytes in rest)
    return [*lines[:_LARGEST], (f"{len(rest)} others", others)]


def _share(num_bytes: int, of: int) -> str:
    """Return bytes and their limit, 0 for none, in few digits: 112 of 119 GiB."""
    unit, name = (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")
    shown = [f"{part / unit:.3g}" if part < 1000 * unit else f"{part / unit:,.0f}"
             for part in ((num_bytes, of) if of else (num_bytes,))]  # fmt: skip
    return f"{' of '.join(shown)} {name}"


def make_plan(
    profile: MachineProfile,
    workload: Workload,
    settings: StepSettings | None = None,
    pins: Mapping[str, str] | None = None,
) -> Plan:
    """Return the best plan for a workload on a machine.

    It keeps those of `settings` that `pins` names, for the reason given there, and chooses the
    rest.
    """
    search = Search(profile, workload, settings, pins)
    best = search.best()
    if best is not None:
        best = search.filled(best)
    chosen = search.smallest() if best is None else best.settings
    ledger = predicted_ledger(profile, workload, chosen)
    # The speed of a plan that does not fit does not matter: few layers are played then.
    played = search.few if best is None else workload
    simulation = simulate(effective_profile(profile, ledger), played, chosen)
    reasons = search.home_reasons if profile.source == NOT_MEASURED else search.reasons
    return Plan(
        profile=profile,
        workload=workload,
        settings=chosen,
        ledger=ledger,
        simulation=simulation,
        fits=best is not None,
        reasons=reasons(chosen),
        lever=_lever(search, chosen) if best is not None else "",
        fixes=() if best is not None else optional.fixes.find_fixes(search),
    )


def _lever(search: Search, settings: StepSettings) -> str:
    """Return the change that would raise tokens per second most, and by how much.

    A setting costs less than a network: that is named only where no setting helps.
    """
    workload, profile = search.workload, search.profile
    here = Search(profile, workload).seconds(settings) / workload.step_tokens
    found: list[tuple[float, str]] = []
    for times in (2, 4):
        tokens = times * workload.step_tokens
        longer = workload.with_step(tokens)
        larger = Search(profile, longer)
        if larger.fits(settings):
            gain = here / (larger.seconds(settings) / tokens) - 1
            key, value = longer.step_setting
            found.append((gain, f"{key}={value} (now {workload.step_setting[1]})"))
    if workload.max_grad_norm is not None:
        other = without_clipping(settings)
        gain = here * workload.step_tokens / search.seconds(other) - 1
        found.append((gain, "train.max_grad_norm=null"))
    if _is_detour(settings):
        found.append(_less_exact(search, settings, here * workload.step_tokens))
    gain, text = max(found, default=(0.0, ""))
    if gain < _LEAST_GAIN:
        gain, text = _faster_network(search, settings, here * workload.step_tokens)
    if gain < _LEAST_GAIN:
        return f"no setting that was tried gains {_LEAST_GAIN:.0%}"
    return f"{text}: {gain:+.0%} tok/s"


def _less_exact(search: Search, settings: StepSettings, step_s: float) -> tuple[float, str]:
    """Return the gain of the most exact of the lesser states that fits without a detour.

    A second backward and a disk are detours: they make states fit and cost time.
    """
    update = "late" if goes_back_twice(settings) else settings.update
    straight = settings.changed(tier="none", update=update)
    names = list(search.workload.states)
    for state in names[names.index(settings.state) + 1 :]:
        if search.fits(other := straight.changed(state=state)):
            gain = step_s / search.seconds(other) - 1
            return gain, f"optim.state={state} (now {settings.state})"
    return 0.0, ""


def _is_detour(settings: StepSettings) -> bool:
    return goes_back_twice(settings) or has_tier(settings)


def _faster_network(search: Search, settings: StepSettings, step_s: float) -> tuple[float, str]:
    """Return the gain of four times the rates between ranks; none for a process alone."""
    network = search.profile.network
    if search.workload.division.is_alone or network is None:
        return 0.0, ""
    faster = search.profile.changed(network=network.faster(_FASTER))
    seconds = Search(faster, search.workload).seconds(settings)
    return step_s / seconds - 1, f"a network {_FASTER} times as fast"

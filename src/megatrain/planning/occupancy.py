"""Bytes by place over the time of a simulated step: when memory is needed, and how much.

What stays all along (store, slots, rings) is the floor. Above it come and go the tape, input by
input, and the working memory of each compute op while it runs.

Laws (tests/planning/test_occupancy.py)
    1. No place ever holds more than its ledger.
    2. The tape is empty when a step begins and when it ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatrain.pipeline.ops import OpKind
from megatrain.planning.ledger import moment_bytes, predicted_ledger
from megatrain.planning.profile import MachineProfile
from megatrain.planning.settings import Settings
from megatrain.planning.simulate import SimulatedOp, Simulation
from megatrain.planning.workload import Workload

_MOVING = ("tape", "working memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """What a place holds from `at_s` on."""

    at_s: float
    place: str
    num_bytes: int


def occupancy(
    profile: MachineProfile, workload: Workload, settings: Settings, simulation: Simulation
) -> list[Occupancy]:
    """Return the bytes of each place, each time they change, in order."""
    ledger = predicted_ledger(profile, workload, settings)
    moving = {line.purpose for line in ledger.lines} & set(_MOVING)
    held = {
        place: sum(
            line.num_bytes
            for line in ledger.lines
            if line.place == place and line.purpose not in moving
        )
        for place in ("host", "device")
    }
    on_host = profile.unified or not profile.device_bytes
    found_changes = _changes(workload, settings, simulation, copies=not profile.unified)
    changes = sorted(found_changes, key=lambda change: change[0])
    found = [Occupancy(at_s=0.0, place=place, num_bytes=held[place]) for place in held]
    for at_s, place, num_bytes in changes:
        where = "host" if on_host else place
        held[where] += num_bytes
        found.append(Occupancy(at_s=at_s, place=where, num_bytes=held[where]))
    return found


def peaks(changes: list[Occupancy]) -> dict[str, Occupancy]:
    """Return when each place holds most."""
    found: dict[str, Occupancy] = {}
    for change in changes:
        if change.place not in found or change.num_bytes > found[change.place].num_bytes:
            found[change.place] = change
    return found


def _changes(
    workload: Workload, settings: Settings, simulation: Simulation, *, copies: bool
) -> Iterator[tuple[float, str, int]]:
    for played in simulation.ops:
        if copies or played.op.kind not in (OpKind.STASH, OpKind.RESTORE):
            yield from _tape_changes(workload, settings, played)
        if played.op.lane == "compute":
            num_bytes = round(moment_bytes(played.op, workload, settings))
            yield played.start_s, "device", num_bytes
            yield played.end_s, "device", -num_bytes


def _tape_changes(
    workload: Workload, settings: Settings, played: SimulatedOp
) -> Iterator[tuple[float, str, int]]:
    """An input is on the device from its forward on, or in the ring, then on the host."""
    op = played.op
    if op.micro is None or op.block is None:
        return
    tokens = workload.micro_sizes(settings.micro_tokens)[op.micro]
    size = tokens * workload.model.hidden * (2 if workload.dtype == "bf16" else 4)
    if op.keeps_input:
        yield played.start_s, "device", size
    elif op.kind is OpKind.STASH:
        yield played.start_s, "host", size
        yield played.end_s, "device", -size
    elif op.kind is OpKind.RESTORE:
        yield played.start_s, "device", size
        yield played.end_s, "host", -size
    elif op.kind is OpKind.BACKWARD and op.block > 0:
        yield played.end_s, "device", -size

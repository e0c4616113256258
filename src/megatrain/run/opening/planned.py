"""The plan of a run: it chooses for `auto`, and refuses a run that does not fit.

On a machine that `megatrain doctor` has measured the planner decides, and every run is held to its
prediction: plan.json has both. Elsewhere simple rules decide, unless memory is too
small for them and the planner finds settings that fit; memory needs no measuring.

Laws (tests/run/opening/test_planned.py)
    1. The plan keeps the choices of the config and makes the open ones, with a reason.
    2. A run that cannot fit is refused before its weights are read, with changes that would fit.
    3. It fits into free memory, `memory.ram` and `memory.vram`.
    4. Where device and host are one memory, both together fit into nine tenths of what is free, and
       the device cannot take more than its part.
    5. No run that was started is killed for its memory (`python -m benchmarks.plan --cap`).
    6. All ranks plan with the same memory, and no host has less than that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatrain.config import Config
from megatrain.devices.device import Device
from megatrain.lanes.trace import Trace
from megatrain.memory.host import free_bytes, give_back_at_once, peak_resident_bytes, resident_bytes
from megatrain.models.decoder import Decoder
from megatrain.models.template import Template
from megatrain.planning.from_config import (
    free_on_disk,
    kernels_choice,
    liger_installed,
    pins_of,
    step_settings_of,
    step_size_of,
    within,
    workload_of,
)
from megatrain.planning.levers.tiles import wants_tiles
from megatrain.planning.machine.examination import kept_examination, measured_profile
from megatrain.planning.machine.profile import NOT_MEASURED, MachineProfile, unmeasured
from megatrain.planning.machine.reserve import with_one_budget, with_reserve
from megatrain.planning.memory.predicted import DEVICE_SHARE
from megatrain.planning.model.shapes import MediaShape
from megatrain.planning.model.skeleton import shape_of
from megatrain.planning.plan import Plan, make_plan
from megatrain.planning.prediction import predicted_time
from megatrain.planning.ranks.division import Division
from megatrain.planning.ranks.sharing import as_rank
from megatrain.planning.search import HOST_HEADROOM
from megatrain.planning.step_size import StepSize
from megatrain.planning.workload import Workload
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run.opening import optional
from megatrain.run.opening.recipe import router_aux_loss
from megatrain.run.opening.resumption import OpenedCheckpoint
from megatrain.step.settings import StepSettings
from megatrain.text import counted, duration

LATER_BYTES = 96 << 20
"""Memory that Python and libraries take once a run has begun: modules, threads, caches."""
UNMEASURED = (
    "no prediction of time: this machine was not measured. `megatrain doctor` does that once, in "
    "under a minute; later runs are then planned for speed"
)
MEASURED_BUSY = (
    "this machine was busy when it was measured, so steps are not compared with the prediction. "
    "Run `megatrain doctor` when it is idle"
)
UNCHANGED = "unchanged since the start of the run"
TIGHT = 1.3
"""With less than this, in shares of the ledger, malloc must not keep freed memory."""


def plan_run(
    config: Config,
    device: Device,
    decoder: Decoder,
    found: OpenedCheckpoint | None = None,
    epoch_tokens: int | None = None,
    ranks: Ranks = ALONE,
    teacher: Decoder | None = None,
    media: MediaShape | None = None,
) -> Plan:
    """Return the plan of a run. Raises DoesNotFit, with changes that would fit.

    A resumed run keeps the settings that its bits depend on. It is not refused: it ran before.
    `epoch_tokens` are those of the data: the size of a step may depend on them. All `ranks` plan
    for the least memory that any of them has.
    """
    config = with_kernels(config, decoder, device)
    division = division_of(ranks)
    machine = as_rank(_machine(config, device, ranks, division), division)
    model = shape_of(decoder, Path(config.model.name_or_path).name)
    if teacher is not None:
        model = replace(model, teacher=shape_of(teacher))
    if media is not None:
        model = model.with_media(media)
    size = _begun_with(config, found)
    size = size or step_size_of(config, epoch_tokens)
    if size is not None:
        config = config.settled(size.tokens)
    coefficient = router_aux_loss(config, decoder)
    settings = step_settings_of(
        config,
        unified=not device.own_memory,
        in_place=not device.copying,
        router_aux_loss=coefficient,
        division=division,
    )
    pins = pins_of(config)
    if found is not None:
        kept = {name: value for name, value in found.known.kept.items() if name not in pins}
        settings = settings.changed(**kept)
        pins |= dict.fromkeys(kept, UNCHANGED)
    workload = workload_of(config, model, division, unified=not device.own_memory)
    plan = _planned(machine, workload, settings, pins)
    if wants_tiles(plan.settings) and not _can_be_cut(decoder):
        workload = replace(workload, model=replace(model, tiled=False))
        plan = _planned(machine, workload, settings, pins)
    if found is None:
        _require(plan, config)
    if not device.own_memory and plan.profile.ram_bytes < TIGHT * plan.ledger.total("host"):
        give_back_at_once()
    if epoch_tokens is not None and not config.loss.draws:
        plan = plan.with_epoch(epoch_tokens)
    return plan if size is None else plan.with_step_reason(size.reason)


def with_kernels(config: Config, decoder: Decoder, device: Device) -> Config:
    """Return the config with the fused kernels that a run on the device has."""
    return config.decided(kernels=chosen_kernels(config, decoder, device)[0])


def chosen_kernels(
    config: Config, decoder: Decoder, device: Device
) -> tuple[Literal["none", "liger"], str]:
    """Return the fused kernels of a run on the device, and why."""
    return kernels_choice(
        config,
        str(decoder.config.model_type),
        has_triton=device.has_triton,
        installed=liger_installed(),
    )


def _begun_with(config: Config, found: OpenedCheckpoint | None) -> StepSize | None:
    """Return the step of a resumed run that the config leaves open: part of the run's recipe."""
    tokens = None if found is None else found.known.batch_tokens
    if tokens is None or config.train.batch_tokens != "auto":
        return None
    return StepSize(tokens=tokens, reason=UNCHANGED)


def division_of(ranks: Ranks) -> Division:
    """Return how many hosts the ranks are on, and how many are on the fullest of them."""
    on_host = Counter(ranks.hosts())
    num_hosts, per_host = len(on_host), max(on_host.values())
    missing = num_hosts * per_host - ranks.owner.size
    return Division(num_hosts=num_hosts, per_host=per_host, missing=missing)


def _machine(config: Config, device: Device, ranks: Ranks, division: Division) -> MachineProfile:
    """Return this machine with the memory and disk that are free now, as the config allows.

    The memory is that of the host, and what Python holds that of one of its ranks.
    """
    found, free_now = measured_profile(), device.free_bytes
    if found is None or found.on_host == device.own_memory:
        found = unmeasured(ram_bytes=1, base_bytes=0, device_bytes=free_now)
    elif device.own_memory:  # others may have taken of it since it was measured
        found = found.changed(device_bytes=min(found.device_bytes, free_now))
    # Hosts may have been measured differently, or not at all.
    measured = MachineProfile.from_json(ranks.decide(found.to_json))
    found = measured.changed(device_bytes=found.device_bytes)
    room = least_room(
        ranks,
        Room(
            free_bytes=free_bytes(),
            held_bytes=resident_bytes(),
            device_bytes=found.device_bytes,
            disk_bytes=free_on_disk(config),
        ),
    )
    now = found.changed(
        ram_bytes=room.free_bytes + room.held_bytes,
        base_bytes=room.held_bytes // division.per_host + LATER_BYTES,
        device_bytes=room.device_bytes,
        disk_bytes=room.disk_bytes,
        integrated=device.integrated,
        unified=not device.copying if device.integrated else found.unified,
    )
    return with_reserve(within(with_one_budget(now), config))


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes of a host and of a device, as one process sees them, or of all ranks of a host."""

    free_bytes: int
    """Free host memory."""
    held_bytes: int
    """Host memory that this process holds, or all ranks of the host."""
    device_bytes: int
    disk_bytes: int


def least_room(ranks: Ranks, own: Room) -> Room:
    """Return the room on the host that has least; of devices and disks, the least of all.

    Memory that the ranks of a host hold counts as theirs: together they may use it.
    """
    of_rank = [Room(**said) for said in ranks.agree(asdict(own))]
    of_host: dict[str, list[Room]] = {}
    for host, room in zip(ranks.hosts(), of_rank, strict=True):
        of_host.setdefault(host, []).append(room)
    together = [
        Room(
            free_bytes=min(room.free_bytes for room in rooms),
            held_bytes=sum(room.held_bytes for room in rooms),
            device_bytes=min(room.device_bytes for room in rooms),
            disk_bytes=min(room.disk_bytes for room in rooms),
        )
        for rooms in of_host.values()
    ]
    least = min(together, key=lambda room: room.free_bytes + room.held_bytes)
    return Room(
        free_bytes=least.free_bytes,
        held_bytes=least.held_bytes,
        device_bytes=min(room.device_bytes for room in together),
        disk_bytes=min(room.disk_bytes for room in together),
    )


def _can_be_cut(decoder: Decoder) -> bool:
    """Return whether all layers run over tiles: those that do not take as much as full rows."""
    return None not in Template(decoder, tiled=True).cuts


def _planned(
    machine: MachineProfile, workload: Workload, settings: StepSettings, pins: dict[str, str]
) -> Plan:
    if machine.source != NOT_MEASURED:
        return make_plan(machine, workload, settings, pins)
    by_rules = dict.fromkeys(settings.facts(), "by a simple rule") | pins
    plan = make_plan(machine, workload, settings, by_rules)
    return plan if plan.fits else make_plan(machine, workload, settings, pins)


def _require(plan: Plan, config: Config) -> None:
    """Raise DoesNotFit unless the plan fits; a cap of the config's is the first thing to change."""
    needed = int(plan.ledger.total("host") * HOST_HEADROOM)
    ways = []
    if isinstance(config.memory.ram, int) and config.memory.ram < needed < _free_for_us():
        ways.append(f"memory.ram={-(-needed // 10**6)}MB")
    elif not plan.fits:
        model, division = plan.workload.model, plan.workload.division
        ways += optional.alternatives.alternatives(config, plan.profile, model, division)
    plan.require(*ways)


def _free_for_us() -> int:
    """Return what this process holds and could still have."""
    return free_bytes() + resident_bytes()


def cap_device(device: Device, plan: Plan) -> None:
    """Keep an integrated device to what the plan leaves it of the one memory.

    Beyond that it raises OutOfDeviceMemory. Without a cap it would take the host's last pages, and
    such machines hang then.
    """
    if not device.integrated:
        return
    lines = plan.ledger.lines
    host = sum(x.num_bytes for x in lines if x.place == "host" and x.purpose != DEVICE_SHARE)
    left = plan.profile.ram_bytes - int(host * HOST_HEADROOM)
    device.cap(max(0, left // plan.workload.division.per_host))


def can_be_compared(plan: Plan) -> bool:
    """Return whether steps can be compared with the plan's times.

    The rates of a machine that was busy when it was measured are too low: steps would seem faster
    than is possible.
    """
    if not plan.knows_time:
        return False
    found = kept_examination()
    return found is None or not found.disturbance


def plan_lines(plan: Plan, num_steps: int) -> list[str]:
    """Return the verdict of the plan, with the time of the run, and what it could not know."""
    whole = f"{counted(num_steps, 'step')} in {predicted_time(num_steps * plan.step_s)}"
    lines = [plan.verdict(whole)]
    if not plan.knows_time:
        lines.append(UNMEASURED)
    elif not can_be_compared(plan):
        lines.append(MEASURED_BUSY)
    return lines


def compared_with_plan(plan: Plan, step_seconds: Collection[float], trace: Trace | None) -> str:
    """Return the predicted and the measured time of a step, and what limits it, in one line.

    The limit is measured in the last step of `trace`, if there is one.
    """
    steps = [] if trace is None else trace.last_step().step_summaries()
    return (
        f"a step: {duration(_median(step_seconds))} measured, {predicted_time(plan.step_s)} "
        f"predicted; limited by {plan.bottleneck}"
        + "".join(f" (measured: {step.bottleneck})" for step in steps)
    )


def facts(
    plan: Plan,
    device: Device,
    step_seconds: Collection[float],
    ops: Sequence[Mapping[str, Any]] = (),
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Return plan.json: the plan, the device, and the measurements until now.

    `ops` are the seconds of a step by kind of op, predicted and measured, once they are known.
    `notes` are the remarks of the start, of which the console shows the first.
    """
    measured = {
        "host_peak_bytes": peak_resident_bytes(),
        "device_peak_bytes": device.peak_bytes,
    }
    settings = {"device": device.name, **plan.settings.facts()}
    found = plan.facts() | {"measured": measured, "settings": settings, "notes": list(notes)}
    if step_seconds:
        found["measured_step_s"] = _median(step_seconds)
    if ops:
        found["ops"] = list(ops)
    return found


def _median(seconds: Collection[float]) -> float:
    """Return the usual time of a step; the first ones warm up."""
    usual = sorted(list(seconds)[2:] or seconds)
    return usual[len(usual) // 2]

"""The ledger before anything exists: bytes by place and purpose, from sizes alone.

    host      Python and libraries, the store, a host tape, rings, save buffers
    pinned    of the host's, what copies must reach: weights and waiting gradients
    device    slots, gradient slots, outbox, tape, the working memory of compute, and a reserve
    tier      what of the store is on disk while a run lasts
    disk      checkpoints and the exported model

All but the working memory is exact. Where the machine's device is the host itself, the device's
lines are the host's. Where the device is integrated, it has its lines, and the host has a line with
their sum: the memory is one. A teacher is there before the run, and gone when it begins: a line has
what it needs beyond all others. With several ranks, host and tier are those of one host with all of
its ranks, pinned and device those of one rank, and disk is what all of them write.

Laws (tests/planning/memory/test_predicted.py)
    1. The store's lines are those of the layout, to the byte.
    2. More of anything never needs less: tokens, slots, chunks, tiles, layers.
    3. Of one memory for host and device every byte is counted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from megatrain.memory.kinds import TensorKind
from megatrain.memory.ledger import Ledger, Line
from megatrain.planning.levers.chunk import chunk_of
from megatrain.planning.levers.tape import host_tape_bytes
from megatrain.planning.levers.tier import has_tier, on_disk
from megatrain.planning.levers.update import arrives_in_ring, kinds, without_clipping
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.machine.reserve import reserve_line
from megatrain.planning.memory.device import device_lines
from megatrain.planning.memory.kernels import CARD_KERNELS, HOST_KERNELS, Kernels
from megatrain.planning.model.shapes import PLANNED_PAGE, BlockShape, ModelShape
from megatrain.planning.ranks.division import SOLE_RANK
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

TEACHER = "teacher, before the run"
MEDIA = "media"
"""Purpose of the lines with what steps read of images and sounds."""
_READ_AHEAD = 2
"""Steps whose media are in host memory: the one that is played, and the next."""
REFERENCE = "weights of the reference"
SERVED = "weights for vLLM"
"""The export in memory that rewards/vllm.py makes while a server loads it."""
_IN_FORWARD = ("working memory", "widening", "weight slots", "expert pages", "exchange")
"""Lines of the device that a model has which only goes forward."""
PLANNED_WORKING = 32
"""WORKING_HIDDEN of engine/residence.py, which needs torch; a test compares them."""
DEVICE_SHARE = "device memory"
"""Purpose of the host's line with what an integrated device takes: the sum of its lines."""
SAVE_BYTES = 64 << 20
"""Bytes that writing a checkpoint or an export holds beside the store."""
TIER_SAVE_BYTES = 64 << 20
"""Bytes more if the state comes from a disk tier, a few chunks ahead of the writer."""
COMMUNICATOR_BYTES = 512 << 20
"""Assumed of NCCL: the buffers of its channels."""


def predicted_ledger(profile: MachineProfile, workload: Workload, settings: StepSettings) -> Ledger:
    """Return all bytes of a run."""
    division = workload.division
    rings = list(_ring_lines(profile, workload, settings))
    host = [
        Line(place="host", purpose="Python and libraries", num_bytes=profile.base_bytes),
        *store_lines(workload, settings),
        *_copy_lines(workload),
        *rings,
        *_tier_ring_lines(workload, settings),
        Line(place="host", purpose="save buffers", num_bytes=_save_bytes(settings)),
    ]
    given = _media_bytes(workload)
    if given:
        sent = 0 if profile.unified else 1
        host.append(Line(place="host", purpose=MEDIA, num_bytes=(_READ_AHEAD + sent) * given))
    on_host = profile.on_host
    kernels = HOST_KERNELS if on_host else CARD_KERNELS
    device = list(
        device_lines(
            workload,
            settings,
            kernels,
            unified=profile.unified,
            own_memory=division.is_alone or not on_host,
        )
    )
    if given and not profile.unified:
        device.append(Line(place="device", purpose=MEDIA, num_bytes=given))
    disk = list(_disk_lines(workload, settings))
    before = list(_teacher_lines(profile, workload, settings, kernels))
    if on_host:
        host += [_moved(line) for line in device]
        device = []
    else:
        pinned = list(_pinned_lines(workload, settings))
        device = [*pinned, *device, reserve_line(profile, [*pinned, *rings])]
        buffers = 0 if division.is_alone else COMMUNICATOR_BYTES
        device.append(Line(place="device", purpose="communicators", num_bytes=buffers))
    if profile.integrated:
        total = Ledger(device).total("device")
        host.append(Line(place="host", purpose=DEVICE_SHARE, num_bytes=total))
    here = [replace(line, num_bytes=line.num_bytes * division.per_host) for line in host]
    run = [*here, *device]
    return Ledger([*run, *disk, *_beyond(run, before)])


def _media_bytes(workload: Workload) -> int:
    """Return what a step reads of the media of its rows, of which a rank has its share."""
    media = workload.model.media
    if media is None:
        return 0
    tokens = -(-workload.step_tokens // workload.division.size)
    return round(media.sent_bytes * media.most_tokens(tokens))


def _teacher_lines(
    profile: MachineProfile, workload: Workload, settings: StepSettings, kernels: Kernels
) -> Iterator[Line]:
    """Yield what a teacher's pass over the rows holds.

    On a device its working memory is counted as if it went back, which is more.
    """
    teacher, division = workload.model.teacher, workload.division
    if teacher is None:
        return
    own, forward = replace(workload, model=teacher), settings.forward_alone(workload.sequence)
    held = profile.base_bytes + _weight_bytes(own)
    if profile.on_host:
        held += _forward_bytes(own, forward)
    else:
        lines = device_lines(own, forward, kernels, unified=profile.unified)
        yield from (line for line in lines if line.purpose in _IN_FORWARD)
    yield Line(place="host", purpose=TEACHER, num_bytes=held * division.per_host)


def _forward_bytes(workload: Workload, settings: StepSettings) -> int:
    """Return the working memory of a model that only goes forward: a layer's, or the head's."""
    model, width = workload.model, workload.element_bytes
    chunk = chunk_of(settings, workload.sequence)
    layer = PLANNED_WORKING * workload.sequence * model.hidden * width
    head = chunk * model.vocab * (width + 8)  # scores in fp32, and log-probabilities
    return workload.step_tokens * model.hidden * width + max(layer, head)


def _beyond(run: Sequence[Line], before: Sequence[Line]) -> Iterator[Line]:
    """Yield what a teacher needs beyond a run, by place: both are never there at once."""
    needed, has = Ledger(before), Ledger(run)
    for place in dict.fromkeys(line.place for line in before):
        more = max(0, needed.total(place) - has.total(place))
        yield Line(place=place, purpose=TEACHER, num_bytes=more)


def _save_bytes(settings: StepSettings) -> int:
    return SAVE_BYTES + (TIER_SAVE_BYTES if has_tier(settings) else 0)


def _moved(line: Line) -> Line:
    return Line(place="host", purpose=line.purpose, num_bytes=line.num_bytes)


# The host.


def store_lines(workload: Workload, settings: StepSettings) -> Iterator[Line]:
    """Yield the arenas of one rank's store, in host memory or in the tier."""
    blocks = list(_counted(workload.model))
    tiered = on_disk(workload, settings)
    for kind in kinds(workload, settings):
        total = sum(count * _pages(_arena_bytes(kind, block, workload)) for block, count in blocks)
        place = "tier" if kind in tiered else "host"
        yield Line(place=place, purpose=kind.purpose, num_bytes=total)


def _copy_lines(workload: Workload) -> Iterator[Line]:
    """Yield copies of the weights: as training began with them, and for a server to read."""
    if workload.keeps_reference:
        yield Line(place="host", purpose=REFERENCE, num_bytes=_weight_bytes(workload))
    if workload.serves_weights:
        model, width = workload.model, workload.element_bytes
        total = sum(
            count * tensor.num_elements * (4 if tensor.fp32 else width)
            for block, count in _counted(model)
            for tensor in block.tensors
            if not tensor.adapts  # adapters are merged
        )
        total += model.carried_params * width
        yield Line(place="host", purpose=SERVED, num_bytes=total)


def _weight_bytes(workload: Workload) -> int:
    blocks = _counted(workload.model)
    return sum(
        count * _pages(_arena_bytes(TensorKind.HI, block, workload)) for block, count in blocks
    )


def _tier_ring_lines(workload: Workload, settings: StepSettings) -> Iterator[Line]:
    """Yield the host buffers between disk and updates: of layers in turns, and one of the edges."""
    model, tiered = workload.model, on_disk(workload, settings)
    if not tiered:
        return
    slots = settings.shape(num_blocks=model.num_blocks, copying=True).tier_slots
    layers = max(_region_bytes(tiered, layer, workload) for layer in model.structures)
    edges = [_region_bytes(tiered, edge, workload) for edge in (model.embedding, model.head)]
    yield Line(place="host", purpose="tier ring", num_bytes=slots * layers + max(edges))


def _region_bytes(tiered: Iterable[TensorKind], block: BlockShape, workload: Workload) -> int:
    """Return what a block has on disk."""
    return sum(_pages(_arena_bytes(kind, block, workload)) for kind in tiered)


def _arena_bytes(kind: TensorKind, block: BlockShape, workload: Workload) -> int:
    trained = None if kind.is_for_frozen else True
    apart = None if kind.is_for_matrices else False
    dtype, owned = workload.dtype, workload.division.owned
    narrow = owned(block.narrow_bytes) if kind is TensorKind.HI else 0
    return narrow + round(
        sum(
            kind.bytes_per_element(is_fp32=fp32)
            * block.elements(dtype, fp32=fp32, trained=trained, apart=apart, cut=owned)
            for fp32 in (False, True)
        )
    )


def _counted(model: ModelShape) -> Iterator[tuple[BlockShape, int]]:
    yield model.embedding, 1
    for kind, structure in enumerate(model.structures):
        yield structure, model.layer_kinds.count(kind)
    yield model.head, 1


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PLANNED_PAGE) * PLANNED_PAGE


def _ring_lines(
    profile: MachineProfile, workload: Workload, settings: StepSettings
) -> Iterator[Line]:
    """Yield the tape on the host, and gradients on their way to an update."""
    model, dtype, owned = workload.model, workload.dtype, workload.division.owned
    if not profile.unified and (tape := host_tape_bytes(workload, settings)):
        yield Line(place="host", purpose="tape", num_bytes=tape)
    if arrives_in_ring(settings):
        layers = 2 * max(layer.gradient_bytes(dtype, owned) for layer in model.structures)
        edges = [block.gradient_bytes(dtype, owned) for block in (model.embedding, model.head)]
        rings = layers + (sum(edges) if model.tied else max(edges))
        yield Line(place="host", purpose="gradient rings", num_bytes=rings)


def _pinned_lines(workload: Workload, settings: StepSettings) -> Iterator[Line]:
    pinned = (TensorKind.HI.purpose, TensorKind.GRAD.purpose, REFERENCE)
    for line in (*store_lines(workload, settings), *_copy_lines(workload)):
        if line.place == "host" and line.purpose in pinned:
            yield replace(line, place="pinned")


def _disk_lines(workload: Workload, settings: StepSettings) -> Iterator[Line]:
    """Yield what a run writes: checkpoints that are kept, one that is being written, an export.

    Of a model with adapters these have the adapters alone.
    """
    model = workload.model.trained_part if workload.model.is_adapted else workload.model
    saved = replace(workload, model=model, division=SOLE_RANK)
    lines = list(store_lines(saved, without_clipping(settings)))
    carried = workload.model.carried_params * (4 if workload.dtype == "fp32" else 2)
    whole = sum(line.num_bytes for line in lines) + carried
    checkpoints = (workload.kept_checkpoints + 1) * whole
    yield Line(place="disk", purpose="checkpoints", num_bytes=checkpoints)
    yield Line(place="disk", purpose="exported model", num_bytes=lines[0].num_bytes + carried)

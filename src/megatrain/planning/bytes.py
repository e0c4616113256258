"""The ledger before anything exists: bytes by place and purpose, from sizes alone.

    host      Python and libraries, the store, a host tape, rings, save buffers
    pinned    of the host's, what copies must reach: weights and waiting gradients
    device    slots, gradient slots, outbox, tape, and the working memory of compute
    tier      what of the store is on disk while a run lasts
    disk      checkpoints and the exported model

All but the working memory is exact. That is the largest of a few moments of a step, counted in
bytes per token: in the feed-forward's backward, in attention's, at the end of a layer's backward
when all its gradients are there, and in the head. Where the machine's device is the host itself,
the device's lines are the host's.

Laws (tests/planning/test_bytes.py)
    1. The store's lines are those of the layout, to the byte; slots, tape and outbox those of a
       rehearsal.
    2. Working memory is that of a rehearsal within 10 %.
    3. More of anything never needs less: tokens, slots, chunks, layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from megatrain.memory.kinds import Kind
from megatrain.memory.ledger import Ledger, Line
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.model.shapes import PLANNED_PAGE, BlockShape, Dtype, ModelShape
from megatrain.planning.workload import Workload
from megatrain.step.ops import Op, OpKind, Role
from megatrain.step.settings import StepSettings

PLANNED_OUTBOX_BYTES = 64 << 20
PLANNED_PART_ELEMENTS = 1 << 22
TAPE_ALIGNMENT = 256
"""As in engine/gradients.py, losses/head.py and engine/tape.py, which need torch; a test holds
them equal."""
KEPT_CHECKPOINTS = 2
SAVE_BYTES = 64 << 20
"""What writing a checkpoint or an export holds beside the store."""
TIER_SAVE_BYTES = 64 << 20
"""More, where the state comes from a disk tier, a few chunks ahead of the writer."""


def predicted_ledger(profile: MachineProfile, workload: Workload, settings: StepSettings) -> Ledger:
    """Return all bytes of a run."""
    host = [
        Line(place="host", purpose="Python and libraries", num_bytes=profile.base_bytes),
        *store_lines(workload, settings),
        *_ring_lines(profile, workload, settings),
        *_tier_ring_lines(workload, settings),
        Line(place="host", purpose="save buffers", num_bytes=_save_bytes(settings)),
    ]
    on_host = profile.unified or not profile.device_bytes
    device = list(device_lines(workload, settings, unified=profile.unified, on_host=on_host))
    disk = _disk_lines(workload, settings)
    if on_host:
        return Ledger([*host, *(_moved(line) for line in device), *disk])
    return Ledger([*host, *_pinned_lines(workload, settings), *device, *disk])


def _save_bytes(settings: StepSettings) -> int:
    return SAVE_BYTES + (TIER_SAVE_BYTES if settings.tier != "none" else 0)


def _moved(line: Line) -> Line:
    return Line(place="host", purpose=line.purpose, num_bytes=line.num_bytes)


# The host.


def store_lines(workload: Workload, settings: StepSettings) -> Iterator[Line]:
    """Yield the arenas of the store, in host memory or in the tier."""
    blocks = list(_counted(workload.model))
    on_disk = workload.kinds_on_disk(settings)
    for kind in workload.kinds(settings):
        total = sum(
            count * _pages(_arena_bytes(kind, block, workload.dtype)) for block, count in blocks
        )
        place = "tier" if kind in on_disk else "host"
        yield Line(place=place, purpose=kind.purpose, num_bytes=total)


def _tier_ring_lines(workload: Workload, settings: StepSettings) -> Iterator[Line]:
    """Yield the host buffers between disk and updates: of layers in turns, and one of the edges."""
    model, kinds = workload.model, workload.kinds_on_disk(settings)
    if not kinds:
        return
    slots = settings.shape(num_blocks=model.num_blocks, copying=True).tier_slots
    layers = max(_region_bytes(kinds, layer, workload.dtype) for layer in model.structures)
    edges = [_region_bytes(kinds, edge, workload.dtype) for edge in (model.embedding, model.head)]
    yield Line(place="host", purpose="tier ring", num_bytes=slots * layers + max(edges))


def _region_bytes(kinds: Iterable[Kind], block: BlockShape, dtype: Dtype) -> int:
    """Return what a block has on disk."""
    return sum(_pages(_arena_bytes(kind, block, dtype)) for kind in kinds)


def _arena_bytes(kind: Kind, block: BlockShape, dtype: Dtype) -> int:
    trained = None if kind.is_for_frozen else True
    return round(
        sum(
            kind.bytes_per_element(is_fp32=fp32) * block.elements(dtype, fp32=fp32, trained=trained)
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
    """Yield the tape on the host, and gradients on their way to an update or to the disk."""
    model, dtype = workload.model, workload.dtype
    if settings.tape == "host" and not profile.unified:
        total = model.num_layers * sum(_taped(workload, settings))
        yield Line(place="host", purpose="tape", num_bytes=total)
    if settings.update == "in_backward" or settings.tier == "gradients":
        layers = 2 * max(layer.gradient_bytes(dtype) for layer in model.structures)
        edges = [block.gradient_bytes(dtype) for block in (model.embedding, model.head)]
        rings = layers + (sum(edges) if model.tied else max(edges))
        yield Line(place="host", purpose="gradient rings", num_bytes=rings)


def _pinned_lines(workload: Workload, settings: StepSettings) -> Iterator[Line]:
    pinned = (Kind.HI.purpose, Kind.GRAD.purpose)
    for line in store_lines(workload, settings):
        if line.place == "host" and line.purpose in pinned:
            yield replace(line, place="pinned")


def _disk_lines(workload: Workload, settings: StepSettings) -> Iterator[Line]:
    """Yield what a run writes: checkpoints that are kept, one that is being written, an export."""
    lines = list(store_lines(workload, settings.changed(update="in_backward")))
    whole = sum(line.num_bytes for line in lines)
    checkpoints = (KEPT_CHECKPOINTS + 1) * whole
    yield Line(place="disk", purpose="checkpoints", num_bytes=checkpoints)
    yield Line(place="disk", purpose="exported model", num_bytes=lines[0].num_bytes)


# The device.


def device_lines(
    workload: Workload, settings: StepSettings, *, unified: bool, on_host: bool = False
) -> Iterator[Line]:
    """Yield the device's memory by purpose; their sum is the peak.

    `on_host`: compute is on the host's cores, where a sum of fp32 and bf16 first widens the latter.
    """
    sizes = {"working memory": working_bytes(workload, settings, widens=unified or on_host)}
    if unified:
        sizes |= _unified_bytes(workload, settings)
    else:
        sizes |= _slot_bytes(workload, settings)
    for purpose, num_bytes in sizes.items():
        yield Line(place="device", purpose=purpose, num_bytes=round(num_bytes))


def _slot_bytes(workload: Workload, settings: StepSettings) -> dict[str, float]:
    model, dtype = workload.model, workload.dtype
    largest = max(layer.weight_bytes(dtype) for layer in model.structures)
    slots = settings.slots * largest + model.head.weight_bytes(dtype)
    rows = 0
    if settings.gather_embedding:
        rows = min(model.vocab, workload.step_tokens) * model.hidden * _width(dtype)
    else:
        slots += model.embedding.weight_bytes(dtype)
    kinds = (model.embedding, *model.structures, model.head)
    gradients = max(block.gradient_bytes(dtype) for block in kinds)
    taped = [-(-size // TAPE_ALIGNMENT) * TAPE_ALIGNMENT for size in _taped(workload, settings)]
    on_host = settings.tape == "host"
    tape = settings.tape_slots * max(taped) if on_host else model.num_layers * sum(taped)
    return {
        "weight slots": slots,
        "gradient slots": _grad_slot_bytes(model),
        "embedding rows": rows,
        "outbox": min(PLANNED_OUTBOX_BYTES, gradients),
        "tape": tape,
    }


def _grad_slot_bytes(model: ModelShape) -> int:
    """Return the fp32 sums: two for layers, one for the edges, which a tied head does not share."""
    layers = 2 * max(layer.trained_elements() for layer in model.structures)
    edges = [model.embedding.trained_elements(), model.head.trained_elements()]
    return 4 * (layers + (sum(edges) if model.tied else max(edges)))


def _unified_bytes(workload: Workload, settings: StepSettings) -> dict[str, float]:
    """Return what compute on the host's own memory holds beside its working memory.

    A sum of one part is that part, so gradient slots are written only where there are several: of
    the layers with several micro-batches, of the output projection with several chunks too. Two
    layers' gradients exist while the one before is drained.
    """
    model, dtype = workload.model, workload.dtype
    num_micro = workload.num_micro(settings.micro_batch_tokens)
    edge = 4 * model.vocab * model.hidden
    chunked = min(settings.micro_batch_tokens, workload.step_tokens) > settings.chunk_tokens
    several = num_micro > 1
    sums = _grad_slot_bytes(model) if several else edge if chunked or model.tied else 0
    waiting = max(layer.gradient_bytes(dtype) for layer in model.structures)
    if model.tied and not several and not chunked:  # the head's part, until the embedding's comes
        waiting += model.embedding.gradient_bytes(dtype)
    tape = model.num_layers * sum(_taped(workload, settings))
    return {"gradient slots": sums, "waiting gradients": waiting, "tape": tape}


def _taped(workload: Workload, settings: StepSettings) -> list[int]:
    """Return the bytes of one block input of each micro-batch."""
    per_token = workload.model.hidden * _width(workload.dtype)
    return [tokens * per_token for tokens in workload.micro_sizes(settings.micro_batch_tokens)]


def working_bytes(workload: Workload, settings: StepSettings, *, widens: bool = False) -> float:
    """Return the most that compute holds at once, besides the memory reserved before a step."""
    sizes = workload.micro_sizes(settings.micro_batch_tokens)
    tokens = max(sizes)
    model, width = workload.model, _width(workload.dtype)
    moments = [_head_bytes(workload, settings, tokens)]
    moments += [_layer_bytes(layer, workload, tokens) for layer in model.structures]
    moments.append(model.vocab * model.hidden * width + 4 * tokens * model.hidden * width)
    if widens:
        moments += _widening_moments(workload, settings, tokens)
    others = (sum(sizes) - tokens) * model.hidden * width
    return max(moments) + others + _all_given_bytes(workload, sizes)


def moment_bytes(op: Op, workload: Workload, settings: StepSettings) -> float:
    """Return the working memory of one compute op, the hidden states of all others included."""
    model, width = workload.model, _width(workload.dtype)
    sizes = workload.micro_sizes(settings.micro_batch_tokens)
    tokens = sizes[op.micro or 0]
    states = (sum(sizes) - tokens) * model.hidden * width
    given = _all_given_bytes(workload, sizes)
    block = model.blocks[op.block or 0]
    if op.kind in (OpKind.HEAD, OpKind.PIECE):
        return states + given + _head_bytes(workload, settings, tokens)
    if op.role is Role.EMBEDDING:
        table = model.vocab * model.hidden * width if op.kind is OpKind.BACKWARD else 0
        return states + given + table + 4 * tokens * model.hidden * width
    if op.kind is OpKind.BACKWARD:
        return states + given + _layer_bytes(block, workload, tokens)
    # Forward keeps nothing: at its widest it holds what goes into and out of the feed-forward.
    return states + given + tokens * width * (3 * block.inner + 2 * model.hidden)


def _widening_moments(workload: Workload, settings: StepSettings, tokens: int) -> Iterator[float]:
    """Yield the moments at which a gradient is added to a sum, and exists in fp32 once more."""
    model, width = workload.model, _width(workload.dtype)
    several, chunked = workload.step_tokens > tokens, tokens > settings.chunk_tokens
    table = model.vocab * model.hidden
    rows = 7 * tokens * model.hidden * width
    if several or chunked:
        yield rows + table * (width * (1 + chunked) + 4)
    if several or model.tied:
        yield rows + table * (width + 4)
    for layer in model.structures if several else ():
        largest = max(tensor.num_elements for tensor in layer.tensors)
        yield rows + layer.gradient_bytes(workload.dtype) + 4 * largest


def _all_given_bytes(workload: Workload, sizes: list[int]) -> float:
    """Return what all micro-batches keep; few of them differ in size."""
    return sum(sizes.count(size) * _given_bytes(workload, size) for size in set(sizes))


def _given_bytes(workload: Workload, tokens: int) -> float:
    """Return what a micro-batch keeps all along: tokens, rotary tables, a mask per kind."""
    model = workload.model
    total = 32.0 * tokens
    attention = [layer.attention for layer in model.structures if layer.attention is not None]
    if attention:
        total += 2 * _width(workload.dtype) * tokens * max(shape.head_dim for shape in attention)
    sequence = min(workload.sequence, tokens)
    kinds = {shape.window for shape in attention}
    windows = {window for window in kinds if window is not None and window < sequence}
    eager = workload.attn == "eager"  # it always has a mask, and adds it: in the model's dtype
    masks = len(kinds) if workload.masked or eager else len(windows)
    per_pair = _width(workload.dtype) if eager else 1
    return total + masks * tokens * sequence * per_pair


def _layer_bytes(block: BlockShape, workload: Workload, tokens: int) -> float:
    """Return a layer's backward at its largest: the tensors kept by forward, and their "
    "gradients."""
    hidden, width = workload.model.hidden, _width(workload.dtype)
    kept, attending = _kept_per_token(block, workload, tokens)
    out = width * max(_largest_matrix(block, "down"), 0)
    gradients = block.gradient_bytes(workload.dtype)
    inner = 6 * width * block.inner
    if block.num_experts:
        routed = block.experts_per_token * hidden * width
        return max(
            tokens * (kept + inner + 2 * routed) + out,
            tokens * (kept + inner + 4 * routed),
            tokens * (kept + hidden * width + attending / 2) + gradients,
        )
    feed_forward = tokens * (kept + inner) + out
    in_attention = tokens * (kept + attending) + gradients - width * _attention_params(block) / 2
    at_end = tokens * (kept + hidden * width) + gradients
    return max(feed_forward, in_attention, at_end)


def _kept_per_token(block: BlockShape, workload: Workload, tokens: int) -> tuple[float, float]:
    """Return what recompute keeps beside the feed-forward, and what attention's backward adds."""
    hidden, width = workload.model.hidden, _width(workload.dtype)
    norms = sum(1 for t in block.tensors if t.name.endswith("weight") and t.shape == (hidden,))
    kept = hidden * (2 * width + (4 + 2 * width if width == 2 else 10) * norms)
    attention = block.attention
    if attention is None:
        return kept, 0.0
    queries = attention.query_width
    latent = attention.value_dim != attention.head_dim
    kept += (10 if latent else 4) * width * queries + 4 * attention.heads
    if any("q_norm" in tensor.name for tensor in block.tensors):
        kept += (4 + width) * (queries + attention.kv_heads * attention.head_dim)
    scores = attention.heads * min(workload.sequence, tokens)
    held, made = _score_bytes(workload, attention.score_bytes)
    return kept + scores * held, 8.0 * width * queries + scores * made


def _score_bytes(workload: Workload, of_family: int) -> tuple[int, int]:
    """Return the bytes per score that recompute keeps, and that attention's backward adds.

    A fused kernel keeps none. Eager attention keeps its softmax, in fp32 and in the model's dtype,
    and makes as much again on the way back.
    """
    if workload.attn != "eager" or of_family:
        return of_family, 0
    return (6, 6) if workload.dtype == "bf16" else (4, 6)


def _largest_matrix(block: BlockShape, name: str) -> int:
    found = (t.num_elements for t in block.tensors if name in t.name and len(t.shape) > 1)
    return max(found, default=max((t.num_elements for t in block.tensors), default=0))


def _attention_params(block: BlockShape) -> int:
    return sum(t.num_elements for t in block.tensors if "attn" in t.name and len(t.shape) > 1)


def _head_bytes(workload: Workload, settings: StepSettings, tokens: int) -> float:
    """Return the head at its largest: logits of one chunk, gradients of the projection."""
    model, width = workload.model, _width(workload.dtype)
    chunk = min(tokens, settings.chunk_tokens)
    table = model.vocab * model.hidden * width
    # While a chunk goes back, the gradient of the chunk before is still held.
    tables = table if tokens <= settings.chunk_tokens else 2 * table
    scoring = 12.0 * min(PLANNED_PART_ELEMENTS, chunk * model.vocab)
    logits = chunk * model.vocab * width
    rows = tokens * model.hidden * (7 * width if width == 2 else 6 * width)
    return rows + max(logits + tables, logits + tables - table + scoring)


def _width(dtype: Dtype) -> int:
    return 2 if dtype == "bf16" else 4

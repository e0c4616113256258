"""The memory of an engine: what stays from step to step, and where ops find it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers.utils.generic import is_flash_attention_requested

from megatrain.devices.device import Device
from megatrain.engine.batch import MicroBatch
from megatrain.engine.edges import Edges
from megatrain.engine.gathered import Gathered
from megatrain.engine.grad_slots import GradSlots
from megatrain.engine.outbox import OUTBOX_BYTES, Outbox
from megatrain.engine.slots import SlotId, Slots
from megatrain.engine.snapshot import Gate
from megatrain.engine.tape import Tape
from megatrain.memory.kinds import Kind
from megatrain.memory.layout import Segment
from megatrain.memory.store import Store
from megatrain.models.balance import Routing
from megatrain.models.decoder import Decoder
from megatrain.models.key_values import caches_keys_and_values
from megatrain.models.template import Template
from megatrain.optim.optimizer import Optimizer
from megatrain.optim.views import UpdateViews
from megatrain.step.ops import Op
from megatrain.step.resources import OpTable
from megatrain.step.shape import StepShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is to become of a step's gradients, once all norms are known."""

    step: int
    """The step of the run, from 1: its update may be played with the next step."""
    norm: float
    scale: float
    applies: bool
    """False: no block is updated, because the norm is not finite."""


class Machine:
    """Slots, tape, gradients and weights of one engine."""

    def __init__(
        self,
        decoder: Decoder,
        store: Store,
        device: Device,
        shape: StepShape,
        optimizer: Optimizer | None,
        *,
        chunk_tokens: int,
        seed: int,
        compile: bool = False,
        router_aux_loss: float = 0.0,
    ) -> None:
        """Allocate what `shape` needs, whatever its number of micro-batches."""
        self.decoder, self.store, self.device = decoder, store, device
        self.optimizer, self.chunk_tokens, self.seed = optimizer, chunk_tokens, seed
        self.router_aux_loss = router_aux_loss
        self.update_views: UpdateViews | None = None
        if optimizer is not None:
            decayed = optimizer.decayed(decoder.params)
            self.update_views = UpdateViews(store, optimizer.states, decayed)
        template = Template(decoder, compile=compile, routed=shape.balances)
        self.template = template.placed(device.place) if device.own_memory else template
        self.edges = Edges(template, self.template, answers=device.answers)
        self._on_host = template
        self._takes_lengths = is_flash_attention_requested(decoder.config)
        self.tape = Tape(device, on_host=shape.tape == "host", num_ring_slots=shape.tape_slots)
        self._taped_layers = range(shape.bottom_layer, shape.head)
        layout, places = store.layout, OpTable(shape).places
        self.slots = (
            Slots(
                layout,
                shape.slots,
                lambda size: device.allocate(size, "weight slots"),
                embedding=not shape.gather_embedding,
            )
            if shape.copying
            else None
        )
        self.gathered = Gathered(decoder, store, device) if shape.gather_embedding else None
        users: dict[SlotId, list[int]] = {}
        ring_users: dict[SlotId, list[int]] = {}
        # A model that is only read has no place for gradients, on neither side.
        trains = optimizer is not None or Kind.GRAD in store.kinds
        for block, place in enumerate(places if trains else ()):
            if place.grad_slot is not None:
                users.setdefault(place.grad_slot, []).append(block)
            if place.host_grad is not None:
                ring_users.setdefault(place.host_grad, []).append(block)
        self.grad_slots = GradSlots(
            layout,
            users,
            lambda size: device.allocate(size, "gradient slots"),
            keeps_first=not device.copying,
        )
        self._host_grads = {
            slot: device.map_host(max(map(self._gradient_bytes, blocks)), "gradients")
            for slot, blocks in ring_users.items()
        }
        self.outbox: Outbox | None = None
        if device.own_memory:
            device.pin("weights", store.arena(Kind.HI))
        if device.own_memory and trains:
            largest = max(map(self._gradient_bytes, shape.trained_blocks))
            self.outbox = Outbox(device, min(largest, OUTBOX_BYTES))
            if not ring_users:
                device.pin("gradients", store.arena(Kind.GRAD))
        self._stored = [
            {param.name: store.param(param.name, Kind.HI) for param in block.params}
            for block in decoder.blocks
        ]
        self.trained = frozenset(param.name for param in decoder.params if param.trained)
        self.head_weight = decoder.owner(f"{decoder.head_path}.weight")
        self.head_bias = f"{decoder.head_path}.bias"
        self.verdict = Verdict(step=0, norm=0.0, scale=1.0, applies=False)
        self.gate = Gate(shape.trained_blocks)
        late = shape.update == "late"
        self.last_updated = shape.trained_blocks[-1 if late else 0]
        self.half_applied = False
        """True while some blocks have had a step's update and others not yet."""

    def routing(self) -> Routing | None:
        """Return a new count of what routers do; None if experts are not balanced."""
        if not self.router_aux_loss:
            return None
        assert self.decoder.balancing is not None
        return Routing(self.decoder.balancing)

    @functools.cached_property
    def caches(self) -> bool:
        """Whether predictions can keep the keys and values of what they have read."""
        return caches_keys_and_values(self._on_host)

    def weights(self, block: int, slot: SlotId | None) -> dict[str, Tensor]:
        """Return what compute reads: views into the slot, or into the store."""
        if slot is None:
            return self._stored[block]
        if block == 0 and self.gathered is not None:
            return self.gathered.weights()
        assert self.slots is not None
        return self.slots.weights(slot, block)

    def inputs(self, micro: MicroBatch) -> dict[str, Tensor | int]:
        """Return what the model's forward gets of a micro-batch, on the host.

        Masks keep the documents of packed rows apart, but flash attention takes no mask. Left to
        itself, transformers looks for documents in a single row only, and asks the device in
        every layer.
        """
        lengths = micro.document_lengths() if self._takes_lengths else {}
        pin = self.device.pinned
        pinned = {n: pin(v) if isinstance(v, Tensor) else v for n, v in lengths.items()}
        return {**micro.inputs, **pinned}

    def gradients(self, op: Op) -> list[tuple[Segment, Tensor]]:
        """Return where the gradient of the op's block is on the host, segment by segment."""
        assert op.block is not None
        segments = self.store.layout.trained_segments(op.block)
        if op.host_grad is None:
            return [(segment, self.store.segment(segment, Kind.GRAD)) for segment in segments]
        return _cut(self._host_grads[op.host_grad], segments)

    def reserve(self, batch: Sequence[MicroBatch], *, trains: bool = True) -> None:
        """Make room for a step, or an evaluation, on `batch`. Nothing may be under way."""
        if self.gathered is not None:
            self.gathered.reserve(batch)
        if not trains:
            return
        width = self.template.bytes_per_token
        sizes = [micro.input_ids.numel() * width for micro in batch]
        self.tape.reserve(self._taped_layers, sizes)

    def gradient_of(self, op: Op, name: str) -> Tensor:
        """Return where the gradient of one param of the op's block is on the host, flat."""
        for segment, gradient in self.gradients(op):
            for place in self.store.layout.segment_places(segment):
                if place.param.name == name:
                    return gradient[place.start : place.start + place.param.num_elements]
        raise KeyError(name)

    def _gradient_bytes(self, block: int) -> int:
        segments = self.store.layout.trained_segments(block)
        return sum(segment.num_elements * segment.dtype.itemsize for segment in segments)


def _cut(buffer: Tensor, segments: Sequence[Segment]) -> list[tuple[Segment, Tensor]]:
    """Return the segments one behind the other in `buffer`."""
    start, result = 0, []
    for segment in segments:
        stop = start + segment.num_elements * segment.dtype.itemsize
        result.append((segment, buffer[start:stop].view(segment.dtype)))
        start = stop
    return result

"""The machine: all that stays from step to step, and where actions find it.

weights, gradients, updates   three doors: each hides where its bytes are and how they move
tier_ring                     masters and states of the blocks that are on their way to or from disk
tape                          block inputs, from forward to backward
template, edges               the model's own code, as functions of weights
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from transformers.utils.generic import is_flash_attention_requested

from megatrain.devices.device import Device
from megatrain.engine.batch import MicroBatch
from megatrain.engine.compute.edges import Edges
from megatrain.engine.compute.layers import Layers
from megatrain.engine.embedding_rows import EmbeddingRows
from megatrain.engine.gradients import Gradients
from megatrain.engine.tape import Tape
from megatrain.engine.updates import Updates
from megatrain.engine.weights import Weights
from megatrain.memory.store import Store
from megatrain.memory.tier_ring import TierRing
from megatrain.models.balance import Routing
from megatrain.models.decoder import Decoder
from megatrain.models.documents import PackedDocuments, attends_by_document
from megatrain.models.template import Template
from megatrain.optim.optimizer import Optimizer
from megatrain.step.ops import SlotId
from megatrain.step.resources import block_places
from megatrain.step.settings import StepSettings
from megatrain.step.shape import StepShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The parts of one engine."""

    weights: Weights
    gradients: Gradients
    updates: Updates
    tier_ring: TierRing
    tape: Tape
    taped_layers: range
    """The layers whose inputs a step keeps."""
    decoder: Decoder
    device: Device
    on_host: Template
    template: Template
    """The model that computes: `on_host`, or its copy on a device with its own memory."""
    edges: Edges
    layers: Layers
    settings: StepSettings

    def routing(self) -> Routing | None:
        """Return a new count of what routers do; None if experts are not balanced."""
        if not self.settings.router_aux_loss:
            return None
        assert self.decoder.balancing is not None
        return Routing(self.decoder.balancing)

    def inputs(self, micro: MicroBatch) -> dict[str, Tensor | int]:
        """Return what the model's forward gets of a micro-batch, on the host.

        Flash attention is given the lengths of packed documents. Left to itself, transformers
        looks for documents in a single row only, and asks the device in every layer.
        """
        flash = is_flash_attention_requested(self.decoder.config)
        lengths = micro.document_lengths() if flash else {}
        pin = self.device.pinned
        pinned = {n: pin(v) if isinstance(v, Tensor) else v for n, v in lengths.items()}
        return {**micro.inputs, **pinned}

    def documents(self, micro: MicroBatch) -> PackedDocuments | None:
        """Return the documents of a packed row, on the host; None: nothing, or masks, part them."""
        if not attends_by_document(self.decoder.config, compiles=self.settings.compile):
            return None
        documents = micro.packed_documents()
        if documents is None:
            return None
        return replace(documents, bounds=self.device.pinned(documents.bounds))

    def reserve(self, batch: Sequence[MicroBatch], *, trains: bool = True) -> None:
        """Make room for a step, or an evaluation, on `batch`. Nothing may be under way."""
        self.weights.reserve(batch)
        if trains:
            self.gradients.reserve()
            width = self.template.bytes_per_token
            sizes = [micro.input_ids.numel() * width for micro in batch]
            self.tape.reserve(self.taped_layers, sizes)


def build_machine(
    decoder: Decoder,
    store: Store,
    device: Device,
    shape: StepShape,
    optimizer: Optimizer | None,
    settings: StepSettings,
) -> Machine:
    """Return a machine with the memory that `shape` needs, whatever its number of micro-batches."""
    # A compiled layer is one graph: it runs without tiles.
    tile_tokens = None if settings.compile else settings.tile_tokens
    on_host = Template(
        decoder,
        compile=settings.compile,
        routed=shape.balances,
        tiled=tile_tokens is not None,
    )
    template = on_host.placed(device.place) if device.own_memory else on_host
    rows = EmbeddingRows(decoder, store, device) if shape.gather_embedding else None
    weights = Weights(decoder, store, device, shape, rows)
    return Machine(
        weights=weights,
        gradients=Gradients(
            store,
            device,
            shape,
            rows,
            updates=optimizer is not None,
            projection=(weights.head_weight, weights.head_bias),
        ),
        updates=Updates(optimizer, decoder.params, store, shape),
        tier_ring=TierRing(store, _tier_slots(shape)),
        tape=Tape(device, on_host=shape.tape == "host", num_ring_slots=shape.tape_slots),
        taped_layers=range(shape.bottom_layer, shape.head),
        decoder=decoder,
        device=device,
        on_host=on_host,
        template=template,
        edges=Edges(on_host, template, answers=device.answers),
        layers=Layers(template, tile_tokens),
        settings=settings,
    )


def _tier_slots(shape: StepShape) -> dict[int, SlotId]:
    places = enumerate(block_places(shape))
    return {block: place.tier_slot for block, place in places if place.tier_slot is not None}

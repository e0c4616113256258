"""The machine: all that stays from step to step, and where actions find it.

weights, gradients, updates   three doors: each hides where its bytes are and how they move
pages                         experts that visit the device while their layer computes, if any do
tier_ring                     masters and states of the blocks that are on their way to or from disk
tape                          block inputs, from forward to backward
kept                          of the top layers all that backward needs, if there is room
template, edges               the model's own code, as functions of weights
inputs                        the tensors of a batch, on their way to the device
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from megatrain.batch import MicroBatch
from megatrain.devices.device import Device
from megatrain.engine import optional
from megatrain.engine.compute.front_and_tail import Edges
from megatrain.engine.compute.inputs import Inputs
from megatrain.engine.compute.layers import Layers, layer_tile, tail_tile
from megatrain.engine.embedding_rows import (
    TokenRows,
    check_rows,
    embedding_rows,
)
from megatrain.engine.features import Feature, registry
from megatrain.engine.gradients.door import Gradients
from megatrain.engine.tape import ALIGNMENT, Tape
from megatrain.engine.updates import Optimizer, Updates
from megatrain.engine.weights import Weights, check_ranks, check_reference
from megatrain.errors import ConfigError
from megatrain.memory.store import Store
from megatrain.models.decoder import Decoder, has_experts
from megatrain.models.passed import LayerCalls
from megatrain.models.probing.stand_ins import Call
from megatrain.models.template import Template
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.step.ops import Op, Resource, SlotId
from megatrain.step.settings import StepSettings
from megatrain.step.shape import StepShape

if TYPE_CHECKING:
    from megatrain.engine.compute.kept import KeptActivations
    from megatrain.engine.compute.products import NarrowWeights
    from megatrain.engine.exchange import SharedRouting
    from megatrain.engine.pages import ExpertPages
    from megatrain.memory.tier.ring import TierRing
    from megatrain.models.balance import Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The parts of one engine."""

    weights: Weights
    gradients: Gradients
    updates: Updates
    pages: ExpertPages | None
    """Experts that come in pages; None: a layer is in its slot whole."""
    tier_ring: TierRing | None
    """Buffers of masters and states that are on disk; None: they are in memory."""
    tape: Tape
    taped_layers: range
    """The layers whose inputs a step keeps."""
    decoder: Decoder
    device: Device
    on_host: Template
    template: Template
    """The model that computes: `on_host`, or its copy on a device with its own memory, or with
    narrow products."""
    edges: Edges
    inputs: Inputs
    layers: Layers
    tail_tile: int | None
    """Tokens of a tile behind the layers; None: every row is computed at once."""
    kept: KeptActivations | None
    """None: backward computes every layer again."""
    narrow_weights: NarrowWeights | None
    """Weights in fp8, of the block that compute is at; None: products are plain."""
    settings: StepSettings
    features: Sequence[Feature]
    """The features of the engine's steps, in the order of their passes."""
    token_rows: TokenRows | None
    """Selects rows to make a gradient of, where it is not made of the embedding's table."""
    shared_routing: SharedRouting | None
    """Counts of all ranks' routers; None: alone, or nothing is balanced."""

    def routing(self) -> Routing | None:
        """Return a new count of what routers do; None if experts are not balanced."""
        if not self.settings.router_aux_loss:
            return None
        assert self.decoder.balancing is not None
        shared = self.shared_routing
        return optional.balance.Routing(
            self.decoder.balancing, None if shared is None else shared.own
        )

    def layer_calls(self, calls: Sequence[Call]) -> LayerCalls:
        """Return the calls of a micro-batch's layers, for a step."""
        trains = any(param.trained for param in self.decoder.blocks[0].params)
        return LayerCalls(calls, self.decoder.looked_up, self.device.counted, trains_front=trains)

    def tier_region(self, op: Op) -> Tensor | None:
        """Return the buffer that an op works in; None: its block has nothing on disk."""
        return None if self.tier_ring is None else self.tier_ring.region(op)

    def forget(self) -> None:
        """Drop what a failed step kept for its backward."""
        self.tape.clear()
        if self.kept is not None:
            self.kept.clear()

    def announce(self, step_tokens: int) -> None:
        """Say how many tokens a step has at most, so that room for it is made once."""
        micros = -(-step_tokens // self.settings.micro_batch_tokens)
        # Micro-batches of other sizes may be one more each than full ones, and each is padded.
        num_bytes = step_tokens * self.template.bytes_per_token + 2 * micros * ALIGNMENT
        self.tape.announce(len(self.taped_layers) * num_bytes)

    def reserve(self, batch: Sequence[MicroBatch], *, trains: bool = True) -> None:
        """Make room for a step, or an evaluation, on `batch`. Nothing may be under way."""
        self.weights.reserve(batch)
        if trains:
            self.gradients.reserve()
            width = self.template.bytes_per_token
            sizes = [micro.input_ids.numel() * width for micro in batch]
            self.tape.reserve(self.taped_layers, sizes)


def check_parts(
    decoder: Decoder,
    store: Store,
    device: Device,
    optimizer: Optimizer | None,
    settings: StepSettings,
    ranks: Ranks,
    reference: Store | None = None,
) -> None:
    """Raise ConfigError for what a part of the machine refuses, before any takes memory."""
    check_rows(settings, decoder, device, ranks)
    if settings.kept_layers:
        optional.kept.check_kept(settings, len(decoder.layers))
    if settings.expert_pages != 1:
        optional.pages.check_pages(settings, decoder, store, device, ranks)
    if settings.router_aux_loss and decoder.balancing is None:
        raise ConfigError(
            f"router_aux_loss is {settings.router_aux_loss:g}: the code of "
            f"{decoder.config.model_type} has no load-balancing loss, or none that can be computed "
            "layer by layer"
        )
    check_ranks(store, device, ranks)
    check_reference(store, reference)
    if optimizer is not None and (store.on_disk or settings.tier != "none"):
        optional.ring.check_tier(store, settings.tier)


def build_machine(
    decoder: Decoder,
    store: Store,
    device: Device,
    shape: StepShape,
    optimizer: Optimizer | None,
    settings: StepSettings,
    ranks: Ranks = ALONE,
    reference: Store | None = None,
) -> Machine:
    """Return a machine with the memory that `shape` needs, whatever its number of micro-batches."""
    on_host = Template(
        decoder,
        compile=settings.compile,
        routed=shape.balances,
        tiled=layer_tile(settings) is not None,
    )
    narrow = settings.products == "fp8"
    template = on_host.placed(device.place) if device.own_memory or narrow else on_host
    if shape.pages or waits_for_experts(decoder, device, compiles=settings.compile):
        optional.experts.count_on_host(template.model)
    if settings.kernels == "liger":
        optional.fused.use_liger(template.model, device)
    if narrow:
        optional.products.require_fp8(device)
        optional.products.narrow_products(template.model, decoder)
    rows = embedding_rows(decoder, store, device, shape)
    pages = None
    if shape.pages:
        pages = optional.pages.ExpertPages(decoder, template, store, device, settings.expert_pages)
    weights = Weights(decoder, store, device, shape, rows, ranks, pages, reference)
    places = registry().places_of(shape)
    tier_slots = _tier_slots(places)
    edges = Edges(on_host if device.own_memory else template, template, answers=device.answers)
    return Machine(
        weights=weights,
        gradients=Gradients(
            store,
            device,
            shape,
            places,
            rows,
            updates=optimizer is not None,
            ranks=ranks,
        ),
        updates=Updates(optimizer, store, shape, ranks),
        pages=pages,
        tier_ring=optional.ring.TierRing(store, tier_slots) if tier_slots else None,
        tape=Tape(device, on_host=shape.tape == "host", num_ring_slots=shape.tape_slots),
        taped_layers=shape.taped_layers,
        decoder=decoder,
        device=device,
        on_host=on_host,
        template=template,
        edges=edges,
        inputs=Inputs(device, decoder, edges, settings),
        layers=Layers(template, layer_tile(settings)),
        tail_tile=tail_tile(settings),
        kept=optional.kept.KeptActivations(template, device.counted) if shape.kept_layers else None,
        narrow_weights=optional.products.NarrowWeights(device.counted) if narrow else None,
        settings=settings,
        features=registry().features_of(shape),
        token_rows=None if device.copying else TokenRows(decoder, device),
        shared_routing=_shared_routing(decoder, device, shape, ranks),
    )


def waits_for_experts(decoder: Decoder, device: Device, *, compiles: bool) -> bool:
    """Return whether the host waits for the device in each layer of experts.

    Compiled layers leave it to torch.
    """
    model = decoder.model
    return not compiles and has_experts(model) and not device.groups(model.dtype)


def _shared_routing(
    decoder: Decoder, device: Device, shape: StepShape, ranks: Ranks
) -> SharedRouting | None:
    if not shape.balances or not shape.divided:
        return None
    assert decoder.balancing is not None
    return optional.exchange.SharedRouting(device, ranks, decoder.balancing.num_experts)


def _tier_slots(places: Mapping[Resource, Resource]) -> dict[int, SlotId]:
    """Return the buffer of each block whose masters and states are on disk."""
    return {int(thing[1]): place[1] for thing, place in places.items() if place[0] == "tier_slot"}

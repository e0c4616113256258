"""New adapters in a store: their masters begin with the values that the seed gives them.

Law (tests/disk/adapters/test_start.py): the stores of all ranks together have the bits of one.
"""

from __future__ import annotations

from contextlib import nullcontext

from megatrain.memory.kinds import Kind
from megatrain.memory.master import split_into
from megatrain.memory.store import Store
from megatrain.models.adapters.lora import first_values
from megatrain.models.decoder import Decoder


def start_adapters(decoder: Decoder, store: Store) -> None:
    """Write the first values of the decoder's adapters, as far as they are here."""
    if decoder.adapters is None:
        return
    for param in decoder.params:
        place = store.layout.places[param.name]
        if not param.is_adapter or not place.owned:
            continue
        values = first_values(param.name, param.shape, decoder.adapters.lora.seed)
        values = values.view(-1)[place.owned.start : place.owned.stop]
        hi, split = store.param(param.name, Kind.HI).view(-1), place.has(Kind.LO)
        with store.changing(place.segment.block, Kind.LO) if split else nullcontext() as region:
            if split:
                split_into(values, hi, store.param(param.name, Kind.LO, region).view(-1))
            else:
                hi.copy_(values)

"""The first values of new adapters in a store: of the seed, or norms of the weights beside them.

Law (tests/disk/adapters/test_start.py): the stores of all ranks together have the bits of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from megatrain.disk.adapters.names import is_transposed
from megatrain.errors import ConfigError
from megatrain.memory.store import Store
from megatrain.models.adapters import lora
from megatrain.models.decoder import Decoder


def first_values(decoder: Decoder, store: Store) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield each param of the adapters, and what returns its first values, in fp32.

    The weights of the model are in the store. Raises ConfigError if they do not suffice.
    """
    assert decoder.adapters is not None
    settings, places = decoder.adapters.lora, store.layout.places.values()
    if settings.dora and any(len(p.owned) < p.param.num_elements for p in places):
        raise ConfigError(
            "lora.dora: new adapters start from the norms of whole weights, and each rank has a "
            "part of them. Begin the run on one GPU and resume it on several, or remove lora.dora."
        )
    for param in decoder.params:
        if param.is_adapter and param.name.endswith(lora.MAGNITUDE):
            yield param.name, partial(_row_norms, decoder, store, param.name.rpartition(".")[0])
        elif param.is_adapter:
            yield param.name, partial(lora.first_values, param.name, param.shape, settings.seed)


def _row_norms(decoder: Decoder, store: Store, module: str) -> Tensor:
    """Return the norm of each row of a module's weight, with which DoRA starts."""
    weight = store.weight(f"{module}.weight")
    rows = weight.T if is_transposed(decoder, module) else weight
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
    return norms

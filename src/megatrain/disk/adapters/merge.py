"""Merging: the product of an adapter's params, added to the weight that it is beside.

    W + (alpha / rank) B A      one tensor at a time, while it is written; of experts those in it

The operations, their order and their dtypes are those of PEFT's `merge_and_unload` of the adapters
that we export: B A and its scale in fp32, from the masters, and one rounding to the dtype of W.

Laws (tests/disk/adapters/test_merge.py; against PEFT: proofs/adapters)
    1. Merged weights have the bits of PEFT's; those of experts are near them (PEFT adds up the
       product of all experts in another order, and in bf16 it rounds twice).
    2. A weight without an adapter has the bits of the base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatrain.disk.adapters.names import is_transposed
from megatrain.disk.hf.names import FolderTensor
from megatrain.disk.hf.weights_file import NamedTensor, tensor_fields
from megatrain.memory.kinds import Kind
from megatrain.memory.master import join
from megatrain.memory.store import Store
from megatrain.models.adapters.params import factors
from megatrain.models.adapters.params import is_transposed as keeps_transposed
from megatrain.models.decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedTensor(NamedTensor):
    """A weight of the base with its adapter in it; it exists while it is written."""

    plain: NamedTensor
    change: Callable[[], Tensor]
    """The numbers that are added to its own, flat, in fp32."""

    @property
    def dtype(self) -> torch.dtype:
        return self.plain.dtype

    def pieces(self) -> Iterator[Tensor]:
        weight = torch.cat([piece.view(self.dtype) for piece in self.plain.pieces()])
        weight += self.change()
        yield weight.view(torch.uint8)


def merged(
    tensors: list[tuple[FolderTensor, NamedTensor]], decoder: Decoder, store: Store
) -> list[tuple[FolderTensor, NamedTensor]]:
    """Return the same tensors, those that have an adapter beside them with it."""
    if decoder.adapters is None:
        return tensors
    adapted = {f"{module}.weight": module for module in decoder.adapters.modules}
    result: list[tuple[FolderTensor, NamedTensor]] = []
    for tensor, plain in tensors:
        change: Callable[[], Tensor] | None = None
        if (module := adapted.get(tensor.param)) is not None:
            change = partial(_change, tensor, module, decoder, store)
        elif tensor.param in decoder.adapters.params:
            change = partial(_change_of_param, tensor, decoder, store)
        if change is not None:
            plain = MergedTensor(**tensor_fields(plain), plain=plain, change=change)
        result.append((tensor, plain))
    return result


def _change(tensor: FolderTensor, module: str, decoder: Decoder, store: Store) -> Tensor:
    assert decoder.adapters is not None
    product = master(store, f"{module}.lora_B") @ master(store, f"{module}.lora_A")
    if is_transposed(decoder, module):
        product = product.T
    change = (product * decoder.adapters.lora.scaling_of(module)).reshape(-1)
    return change[tensor.start : tensor.start + tensor.num_elements]


def _change_of_param(tensor: FolderTensor, decoder: Decoder, store: Store) -> Tensor:
    """Return the change of the experts that a tensor has a part of."""
    assert decoder.adapters is not None
    module = decoder.model.get_submodule(tensor.param.rpartition(".")[0])
    shape = decoder.model.get_parameter(tensor.param).shape
    each = shape[-2:].numel()
    first, last = tensor.start // each, -(-(tensor.start + tensor.num_elements) // each)
    a, b = (master(store, f"{tensor.param}_lora_{half}") for half in "AB")
    left, right = factors(
        shape, a, b, is_transposed=keeps_transposed(module), experts=slice(first, last)
    )
    change = (left @ right * decoder.adapters.lora.scaling_of(tensor.param)).reshape(-1)
    start = tensor.start - first * each
    return change[start : start + tensor.num_elements]


def master(store: Store, name: str) -> Tensor:
    """Return the fp32 master of a param, which the store has whole."""
    place, hi = store.layout.places[name], store.param(name, Kind.HI)
    if not place.has(Kind.LO):
        return hi.float()
    return join(hi, store.at_rest(name, Kind.LO).view(hi.shape))

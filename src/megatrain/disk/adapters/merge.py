"""Merging: the product of an adapter's params, added to the weight that it is beside.

    W + (alpha / rank) B A      one tensor at a time, while it is written; of experts those in it
    m / |W + s B A| (W + s B A)                                                           DoRA

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
from megatrain.memory.kinds import TensorKind
from megatrain.memory.master import join
from megatrain.memory.store import Store
from megatrain.models.adapters.lora import MAGNITUDE
from megatrain.models.adapters.params import factors
from megatrain.models.adapters.params import is_transposed as keeps_transposed
from megatrain.models.decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedTensor(NamedTensor):
    """A weight of the base with its adapter in it; it exists while it is written."""

    plain: NamedTensor
    merge: Callable[[Tensor], Tensor]
    """Returns what its own numbers become, flat and in their dtype."""

    @property
    def dtype(self) -> torch.dtype:
        return self.plain.dtype

    def pieces(self) -> Iterator[Tensor]:
        weight = torch.cat([piece.view(self.dtype) for piece in self.plain.pieces()])
        yield self.merge(weight).view(torch.uint8)


def merged(
    tensors: list[tuple[FolderTensor, NamedTensor]], decoder: Decoder, store: Store
) -> list[tuple[FolderTensor, NamedTensor]]:
    """Return the same tensors, those that have an adapter beside them with it."""
    if decoder.adapters is None:
        return tensors
    adapted = {f"{module}.weight": module for module in decoder.adapters.modules}
    result: list[tuple[FolderTensor, NamedTensor]] = []
    for tensor, plain in tensors:
        merge: Callable[[Tensor], Tensor] | None = None
        if (module := adapted.get(tensor.param)) is not None:
            add = _scaled if decoder.adapters.lora.dora else _changed
            merge = partial(add, tensor, module, decoder, store)
        elif tensor.param in decoder.adapters.params:
            merge = partial(_changed_experts, tensor, decoder, store)
        if merge is not None:
            plain = MergedTensor(**tensor_fields(plain), plain=plain, merge=merge)
        result.append((tensor, plain))
    return result


def _changed(
    tensor: FolderTensor, module: str, decoder: Decoder, store: Store, weight: Tensor
) -> Tensor:
    assert decoder.adapters is not None
    product = master(store, f"{module}.lora_B") @ master(store, f"{module}.lora_A")
    if is_transposed(decoder, module):
        product = product.T
    change = (product * decoder.adapters.lora.scaling_of(module)).reshape(-1)
    weight += change[tensor.start : tensor.start + tensor.num_elements]
    return weight


def _scaled(
    tensor: FolderTensor, module: str, decoder: Decoder, store: Store, weight: Tensor
) -> Tensor:
    """Return rows of a weight by DoRA; a folder has whole rows, or all columns of (in, out)."""
    assert decoder.adapters is not None
    a, b = (master(store, f"{module}.lora_{half}") for half in "AB")
    magnitudes, transposed = master(store, f"{module}.{MAGNITUDE}"), is_transposed(decoder, module)
    if transposed:
        rows = weight.view(a.shape[1], b.shape[0]).T
    else:
        first = tensor.start // a.shape[1]
        rows = weight.view(-1, a.shape[1])
        b, magnitudes = (part[first : first + len(rows)] for part in (b, magnitudes))
    found = rows.float() + (b @ a) * decoder.adapters.lora.scaling_of(module)
    found *= (magnitudes / torch.linalg.norm(found, dim=1))[:, None]
    return (found.T if transposed else found).reshape(-1).to(weight.dtype)


def _changed_experts(
    tensor: FolderTensor, decoder: Decoder, store: Store, weight: Tensor
) -> Tensor:
    """Return the experts that a tensor has, or a part of one."""
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
    weight += change[start : start + tensor.num_elements]
    return weight


def master(store: Store, name: str) -> Tensor:
    """Return the fp32 master of a param, which the store has whole."""
    place, hi = store.layout.places[name], store.param(name, TensorKind.HI)
    if not place.has(TensorKind.LO):
        return hi.float()
    return join(hi, store.at_rest(name, TensorKind.LO).view(hi.shape))

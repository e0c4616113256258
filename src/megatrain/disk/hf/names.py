"""Mapping from the tensors of a folder to parts of the model's params.

Folders and models do not always agree. A folder may store each expert's projections apart where the
model holds all experts in one param, or spell names as an earlier version did. Transformers knows
these differences as conversions, which it applies to full tensors in memory. Here its own reverse
conversion is run once on the meta device, where it moves no bytes, and watched: what comes out are
runs of elements of params. They map each tensor of a folder to its place, so that it can be read
straight into its place, and export is the same map walked the other way.

What a joint model carries has names too, and no place: its tensors are known by name alone.

Laws (tests/models/test_families.py, tests/disk/hf/test_multimodal_tensors.py)
    1. The map covers each element of each param and persistent buffer exactly once.
    2. It has the names and shapes that `save_pretrained` writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from megatrain.errors import UnsupportedModel
from megatrain.models.decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderTensor:
    """A tensor as a folder has it: a run of elements of one param."""

    name: str
    shape: tuple[int, ...]
    param: str
    """The param or persistent buffer that holds it."""
    start: int
    """Its first element in the param."""
    num_elements: int


class NameMap:
    """The tensors of a decoder's folder, in the form that `save_pretrained` writes."""

    def __init__(self, decoder: Decoder) -> None:
        originals, carried = _meta_tensors(decoder), _carried_tensors(decoder)
        self._own = {name: _whole(name, tensor) for name, tensor in originals.items()}
        self._aliases = {a: self._own[p.name] for p in decoder.params for a in p.aliases}
        self._rename = _renamer(decoder.model, {**originals, **carried})
        self.tensors = _reversed_names(decoder.model, originals)
        self._carried = _reverted(decoder.model, carried).keys() | carried.keys()
        self._carried |= {alias for param in decoder.carried for alias in param.aliases}

    def find(self, name: str) -> FolderTensor | None:
        """Return what a folder's tensor `name` is, in any spelling that transformers accepts."""
        return self._look_up(name, self.tensors) or self._look_up(name, self._own)

    def find_alias(self, name: str) -> FolderTensor | None:
        """Return the tied param of which `name` is the other name."""
        return self._look_up(name, self._aliases)

    def is_carried(self, name: str) -> bool:
        """Return whether a folder's tensor `name` is one that the model carries."""
        return name in self._carried or self._rename(name) in self._carried

    def missing_carried(self, decoder: Decoder, found: Iterable[str]) -> list[str]:
        """Return the params that are carried and that the tensors `found` of a folder lack."""
        buffers = {name for name, _ in decoder.model.named_buffers()}
        names = {form for name in found for form in (name, self._rename(name))}
        params = [param for param in decoder.carried if param.name not in buffers]
        lacked = [p.name for p in params if not names & {p.name, *p.aliases}]
        if not lacked:
            return []
        one_by_one = {
            name: _reverted(decoder.model, {name: tensor}).keys()
            for name, tensor in _carried_tensors(decoder).items()
            if name in lacked
        }
        return sorted(name for name in lacked if not one_by_one[name] & names)

    def _look_up(self, name: str, tensors: dict[str, FolderTensor]) -> FolderTensor | None:
        return tensors.get(name) or tensors.get(self._rename(name))

    def faults(self, found: Iterable[FolderTensor]) -> tuple[list[str], list[str]]:
        """Return the tensors that `found` lacks, and the params it covers more than once."""
        spans: dict[str, list[FolderTensor]] = {name: [] for name in self._own}
        for tensor in found:
            spans[tensor.param].append(tensor)
        wanted: dict[str, list[FolderTensor]] = {}
        for tensor in self.tensors.values():
            wanted.setdefault(tensor.param, []).append(tensor)
        missing, twice = set(), []
        for name, pieces in spans.items():
            position, starts = 0, {piece.start for piece in pieces}
            for piece in sorted(pieces, key=lambda piece: piece.start):
                if piece.start < position:
                    twice.append(name)
                position = max(position, piece.start + piece.num_elements)
            if sum(piece.num_elements for piece in pieces) < self._own[name].num_elements:
                missing |= {t.name for t in wanted.get(name, ()) if t.start not in starts}
        return sorted(missing), twice


def _meta_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """Return a meta tensor for each param and persistent buffer, with its own storage."""
    sources = {p.name: (p.shape, p.dtype) for p in decoder.params if not p.is_adapter}
    sources |= {n: (tuple(b.shape), b.dtype) for n, b in decoder.persistent_buffers().items()}
    return {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, (shape, dtype) in sources.items()
    }


def _carried_tensors(decoder: Decoder) -> dict[str, Tensor]:
    return {p.name: torch.empty(p.shape, dtype=p.dtype, device="meta") for p in decoder.carried}


def _whole(name: str, tensor: Tensor) -> FolderTensor:
    return FolderTensor(
        name=name, shape=tuple(tensor.shape), param=name, start=0, num_elements=tensor.numel()
    )


class _KeepViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes a copy return its argument, so that results stay views of params."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0]
        return func(*args, **(kwargs or {}))


def _reversed_names(
    model: PreTrainedModel, originals: dict[str, Tensor]
) -> dict[str, FolderTensor]:
    """Return the folder's tensors: the reverse conversion of transformers, run on `originals`."""
    owners = {_storage(tensor): name for name, tensor in originals.items()}
    result: dict[str, FolderTensor] = {}
    for name, tensor in _reverted(model, originals, views=True).items():
        owner = owners.get(_storage(tensor))
        if owner is None or not tensor.is_contiguous():
            raise UnsupportedModel(
                f"{model.config.model_type}: folders store {name} rearranged, so it cannot be "
                "read directly into its place"
            )
        result[name] = FolderTensor(
            name=name,
            shape=tuple(tensor.shape),
            param=owner,
            start=int(tensor.storage_offset()),
            num_elements=tensor.numel(),
        )
    return result


def _reverted(
    model: PreTrainedModel, originals: dict[str, Tensor], *, views: bool = False
) -> dict[str, Tensor]:
    """Return transformers' reverse conversion of `originals`, as `views` of them if asked to."""
    try:
        with _KeepViews() if views else nullcontext():  # type: ignore[no-untyped-call]
            converted: dict[str, Tensor] = revert_weight_conversion(model, dict(originals))
    except Exception as error:  # sizes that a model is built with, and no folder could have
        raise UnsupportedModel(
            f"{model.config.model_type}: transformers cannot convert its tensor names: "
            f"{type(error).__name__}: {str(error)[:300]}"
        ) from error
    return converted


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _renamer(model: PreTrainedModel, originals: dict[str, Tensor]) -> Callable[[str], str]:
    """Return transformers' renaming of a folder's names to the model's own."""
    conversions = get_model_conversion_mapping(model)
    renamings = [item for item in conversions if isinstance(item, WeightRenaming)]

    def rename(name: str) -> str:
        renamed, _ = rename_source_key(name, renamings, [], model.base_model_prefix, originals)
        return str(renamed)

    return rename

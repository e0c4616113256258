"""What features of media cost: memory and products, counted without computing them.

The model's own code makes features of an item and goes back, on tensors that have a shape alone.
Only numbers without a fraction are there: sizes and grids, which the code turns into lists, and
what it makes of them. Every byte is counted as long as something holds it, so that there is no cost
model of towers to keep true, and a tower of any size costs no memory and little time.

Items go through one after another, and are all held until backward. With the gradients of params,
which the last item's backward makes first, so many bytes grow by a part that is always the same
from the second item on. Three items tell all numbers.

Laws (tests/models/probing/test_feature_cost.py)
    1. Bytes are those of the same code that computes, within 2 %.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils import flop_counter
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from megatrain.media import MediaItem
from megatrain.models.decoder import Decoder
from megatrain.models.probing.dispatch import Operation, intercepted
from megatrain.models.towers import given_features, media_given

_INDEX = torch.ops.aten.index.Tensor
_attention_flops: Any = flop_counter.sdpa_flop_count
_attention_back_flops: Any = flop_counter.sdpa_backward_flop_count
_ATTENDS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_ATTENDS_BACK = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureCost:
    """What features of equal items cost the first block of a step."""

    held_bytes: tuple[int, int, int]
    """The most that forward and backward hold, of one, two and three items."""
    forward_flops: float
    """Of one item."""
    backward_flops: float
    num_levels: int
    """Layers that get features besides the first one."""


def feature_cost(decoder: Decoder, item: MediaItem) -> FeatureCost:
    """Return what features of such an item cost."""
    trained = {param.name for param in decoder.blocks[0].params if param.trained}
    one, two, three = (_counted(decoder, [_without_numbers(item)] * n, trained) for n in (1, 2, 3))
    return replace(one, held_bytes=(one.held_bytes[0], two.held_bytes[0], three.held_bytes[0]))


def _counted(decoder: Decoder, items: Sequence[MediaItem], trained: set[str]) -> FeatureCost:
    assert decoder.towers is not None
    counter = _Counter()
    with (
        _wanting_gradients(decoder.model, trained) as params,
        intercepted(counter),
        _fused_attention(),
        media_given(decoder.model, decoder.towers, items),
        torch.enable_grad(),
    ):
        features = given_features(decoder.model, decoder.towers, items[0].kind)
        forward = counter.flops
        made = [one for one in tree_leaves(features) if isinstance(one, Tensor)]
        levels = features.get("deepstack_features") or ()
        del features
        made = [one for one in made if one.requires_grad]
        if made:
            given = [torch.empty_like(one) for one in made]
            torch.autograd.grad(made, params, given, allow_unused=True)
    return FeatureCost(
        held_bytes=(counter.peak_bytes, 0, 0),
        forward_flops=forward,
        backward_flops=counter.flops - forward,
        num_levels=len(levels),
    )


@contextmanager
def _wanting_gradients(model: PreTrainedModel, names: set[str]) -> Iterator[list[Tensor]]:
    """Let these params of a skeleton, and no others, want a gradient meanwhile."""
    before = {param: param.requires_grad for param in model.parameters()}
    for name, param in model.named_parameters():
        param.requires_grad_(name in names)
    try:
        yield [param for param in before if param.requires_grad]
    finally:
        for param, wanted in before.items():
            param.requires_grad_(wanted)


def _without_numbers(item: MediaItem) -> MediaItem:
    """Return an item whose numbers with fractions have a shape alone."""

    def shape(tensor: Tensor) -> Tensor:
        return tensor.to("meta") if tensor.is_floating_point() else tensor

    return replace(item, tensors={name: shape(one) for name, one in item.tensors.items()})


class _Counter:
    """Handles operations, and counts what their results hold."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.flops = 0.0
        self._live_bytes = 0
        self._known: set[int] = set()

    def __call__(self, func: Operation, args: Any, kwargs: Any) -> Any:
        given = _tensors((args, kwargs))
        for tensor in given:  # what is not a result here was there before
            self._count(tensor.untyped_storage(), is_made=False)
        if any(tensor.is_meta for tensor in given):
            if func is _INDEX:
                args = (args[0], list(_places(args[1])))
            args, kwargs = tree_map(_shape, (args, kwargs))
        elif kwargs.get("device") is not None:  # what is not made of weights or pixels is computed
            kwargs = {**kwargs, "device": torch.device("cpu")}
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self._count(tensor.untyped_storage(), is_made=True)
        self.flops += _flops(func, args, kwargs, result)
        return result

    def _count(self, storage: torch.UntypedStorage, *, is_made: bool) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        num_bytes = storage.nbytes() if is_made else 0
        self._live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        weakref.finalize(storage, self._forget, key, num_bytes)  # another may have its place then

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self._live_bytes -= num_bytes


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _shape(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.is_meta:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _places(indices: Sequence[Tensor | None]) -> Iterator[Tensor | None]:
    """Yield indices with numbers in place of masks, whose elements are known."""
    for index in indices:
        if index is not None and index.dtype is torch.bool:
            yield from index.nonzero().unbind(1)
        else:
            yield index


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    if func is _ATTENDS:
        return float(_attention_flops(*(tensor.shape for tensor in args[:3])))
    if func is _ATTENDS_BACK:
        return float(_attention_back_flops(*(tensor.shape for tensor in args[:4])))
    count = flop_counter.flop_registry.get(func._overloadpacket)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Let attention be one kernel. A mode would not be met by layers that are computed again."""
    functions: Any = F
    own = functions.scaled_dot_product_attention
    functions.scaled_dot_product_attention = fused_on_meta
    try:
        yield
    finally:
        functions.scaled_dot_product_attention = own


def fused_on_meta(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
    """Return what attention gives, as shapes, of one kernel as on a device: torch takes it apart.

    The kernel is the CPU's. Like those of other devices it keeps its output and a sum per row.
    """
    width = value.shape[-1]  # the kernel wants one width; narrower values cost as much
    attended: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query,
        key,
        F.pad(value, (0, query.shape[-1] - width)) if width < query.shape[-1] else value,
        is_causal=how.get("is_causal", False),
        attn_mask=how.get("attn_mask"),
        scale=how.get("scale"),
    )[0]
    return attended[..., :width]

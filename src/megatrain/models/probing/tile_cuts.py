"""Finds where a layer can be cut into tiles of tokens, and proves it before use.

    1. Token dimensions. The model's front is run on rows of two lengths: what grows counts tokens.
    2. The mixer. If the layer asks transformers' attention exactly once, that is it. Else it is the
       smallest module, called once, around which a cut can be proved.
    3. The proof. Over tiles of unequal length, and of one token each, the parts give what the
       layer gives for the full row: outside the mixer, then, no token sees another. With
       and without padding and positions of packed documents, as far as the model takes them.

A layer without such a place is not cut. The search runs on a small random copy of the layer, a few
tokens long, once for layers of equal structure.

The skeleton has no weights, and a layer can have billions of them. How it treats tokens does not
depend on their values: so the copy's small params are drawn at random, and large ones are
stand-ins, one zero expanded, whose products are computed as if the weight had rank one. Tokens stay
as apart in such a product as in the true one, and nothing is as large as the weight. All in fp32.

Laws (tests/models/probing/test_tile_cuts.py)
    1. A layer whose tokens meet outside the mixer is not cut there.
    2. No cut is found that the layer's own forward over the full row contradicts.
    3. For a layer of any size, the search needs no more memory than its small params and a few
       tokens.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatrain.models.attention import attention_on_host
from megatrain.models.layer_call import TensorPath, apply_layer, tensors_by_path, with_tensors
from megatrain.models.probing.dispatch import Operation, intercepted
from megatrain.models.probing.stand_ins import Call
from megatrain.models.tiled_layer import (
    Cut,
    CutLayer,
    Joining,
    Meeting,
    constants_of,
    forwards_replaced,
    growing,
    mixer_replaced,
)

ROW_LENGTHS = (5, 7)
LARGE = 1 << 18
"""Elements. A param of more is a stand-in."""
_TILINGS = ((3, 7), (1, 2, 6, 7), (1, 2, 3, 4, 5, 6, 7))
"""Ends of tiles that are tried."""
_TOLERANCE = 1e-4
"""Relative to the largest number: sums over a row's width, in another order."""
_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSample:
    """A call of a layer with hidden states to go with it."""

    hidden: Tensor
    call: Call


Samples = Sequence[tuple[LayerSample, LayerSample]]
"""Calls for rows of two ROW_LENGTHS, for each kind of inputs."""


def sample_inputs(model: PreTrainedModel) -> list[list[dict[str, Tensor]]]:
    """Return inputs of the model's forward for rows of two ROW_LENGTHS: plain, padded, packed."""
    ids = [torch.zeros((2, length), dtype=torch.long) for length in ROW_LENGTHS]
    kinds = [[{"input_ids": row} for row in ids]]
    kinds.append([{"input_ids": row, "attention_mask": _padding(row)} for row in ids])
    if "position_ids" in inspect.signature(type(model).forward).parameters:
        rows = [row[:1] for row in ids]
        restarting = [torch.arange(length)[None] % 3 for length in ROW_LENGTHS]
        kinds.append(
            [
                {"input_ids": row, "position_ids": positions}
                for row, positions in zip(rows, restarting, strict=True)
            ]
        )
    return kinds


def _padding(ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return mask


def sampled_call(hidden: Tensor, call: Call) -> LayerSample:
    """Return `call` with random hidden states like `hidden`, all in fp32."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(hidden.shape, generator=generator)
    args, kwargs = with_tensors((call.args, call.kwargs), lambda _, tensor: _in_fp32(tensor))
    return LayerSample(hidden=drawn, call=replace(call, args=args, kwargs=kwargs))


def find_cut(layer: nn.Module, samples: Samples) -> Cut | None:
    """Return where `layer` is cut; None if nothing can be proved."""
    mode = layer.training
    layer.eval()  # dropout would differ between the runs that are compared
    try:
        with _products_of_stand_ins(), attention_on_host():
            probe = _Probe(layer, _likeness(layer), samples)
            return probe.cut(None) or probe.cut_at_module()
    finally:
        layer.train(mode)


class _Probe:
    def __init__(self, layer: nn.Module, weights: Mapping[str, Tensor], samples: Samples) -> None:
        self._layer = layer
        self._weights = weights
        self._samples = samples

    def cut_at_module(self) -> Cut | None:
        """Return the cut at the smallest module that has one."""
        found, path = None, ""
        while True:
            module = self._layer.get_submodule(path)
            children = [f"{path}.{name}".lstrip(".") for name, _ in module.named_children()]
            cuts = [cut for child in children if (cut := self.cut(child)) is not None]
            if not cuts:
                return found
            found = min(cuts, key=lambda cut: self._size(str(cut.mixer)))
            path = str(found.mixer)

    def cut(self, mixer: str | None) -> Cut | None:
        """Return the cut at `mixer`, proved; None if there is none."""
        cut: Cut | None = None
        try:
            for short, long in self._samples:
                cut = self._learned(mixer, short, long, cut)
                if not self._proved(cut, long):
                    return None
        except Exception:  # any code can fail for lengths that it was not made for: no cut, then
            return None
        return cut

    def _learned(
        self, mixer: str | None, short: LayerSample, long: LayerSample, known: Cut | None
    ) -> Cut:
        """Return what is `known` of the cut, with what one kind of inputs shows."""
        grown = growing(*((s.call.args, s.call.kwargs) for s in (short, long)))
        arguments = {path: dims[0] for path, dims in grown.items() if len(dims) == 1}
        cut = Cut(mixer=mixer, arguments=arguments, handed={}, mixed={}, unread={})
        results = [self._mixer_result(mixer, sample) for sample in (short, long)]
        grown = growing(*results)
        mixed = {path: dims[0] if len(dims) == 1 else None for path, dims in grown.items()}
        cut = replace(cut, handed=self._handed(CutLayer(self._layer, cut), long), mixed=mixed)
        if known is None:
            return replace(cut, unread=self._unread(cut, long, results[1]))
        return replace(
            known,
            arguments={**known.arguments, **cut.arguments},
            handed={**known.handed, **cut.handed},
            mixed={**known.mixed, **cut.mixed},
        )

    def _mixer_result(self, mixer: str | None, sample: LayerSample) -> Any:
        """Return what the mixer answers in a run of the layer, which calls it once."""
        results = []

        def receive(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            results.append(own(*args, **kwargs))
            return results[-1]

        with mixer_replaced(self._layer, mixer, receive):
            self._whole(sample)
        (result,) = results
        return result

    def _handed(self, layer: CutLayer, sample: LayerSample) -> dict[TensorPath, int]:
        """Return the token dimension of each tensor that a tile makes for the mixer."""
        received: list[Meeting] = []
        given: set[TensorPath] = set()
        for length in (2, 3):
            columns = slice(0, length)
            call = layer.sliced(sample.call, columns)
            received.append(layer.before(self._weights, sample.hidden[:, columns], call))
            known = {id(tensor) for _, tensor in tensors_by_path((call.args, call.kwargs))}
            tensors = tensors_by_path((received[-1].args, received[-1].kwargs))
            given |= {path for path, tensor in tensors if id(tensor) in known}
        found = {}
        for path, dims in growing(*((m.args, m.kwargs) for m in received)).items():
            if path not in given and dims:
                (found[path],) = dims  # of two dimensions, a tile has made a part only
        return found

    def _unread(self, cut: Cut, long: LayerSample, result: Any) -> dict[str, int]:
        """Return the projections that feed nothing but the mixer: without them all is the same.

        `result` is the mixer's.
        """
        layer = CutLayer(self._layer, cut)
        with _output_widths(self._layer) as widths:
            layer.before(self._weights, long.hidden, long.call)
        mixed = layer.mixed_tile(result, slice(0, ROW_LENGTHS[1]))
        expected, _ = layer.after(self._weights, long.hidden, long.call, mixed)

        def feeds_nothing_else(path: str, width: int) -> bool:
            poison = {self._layer.get_submodule(path): constants_of(width, torch.nan)}
            with forwards_replaced(poison):
                found, _ = layer.after(self._weights, long.hidden, long.call, mixed)
            return torch.equal(found, expected)

        return {path: width for path, width in widths.items() if feeds_nothing_else(path, width)}

    def _proved(self, cut: Cut, sample: LayerSample) -> bool:
        expected = self._whole(sample)
        layer, length = CutLayer(self._layer, cut), ROW_LENGTHS[1]
        for ends in _TILINGS:
            tiles = [slice(a, b) for a, b in zip((0, *ends), ends, strict=False)]
            calls = [layer.sliced(sample.call, columns) for columns in tiles]
            joining = Joining(cut, sample.call, length)
            for columns, call in zip(tiles, calls, strict=True):
                meeting = layer.before(self._weights, sample.hidden[:, columns], call)
                joining.add(meeting, call, columns)
            mixed = layer.meet(self._weights, joining.meeting())
            parts = [
                layer.after(
                    self._weights, sample.hidden[:, columns], call, layer.mixed_tile(mixed, columns)
                )[0]
                for columns, call in zip(tiles, calls, strict=True)
            ]
            if not _alike(torch.cat(parts, dim=1), expected):
                return False
        return True

    def _whole(self, sample: LayerSample) -> Tensor:
        call = sample.call
        return apply_layer(self._layer, self._weights, sample.hidden, call.args, call.kwargs)[0]

    def _size(self, path: str) -> int:
        return sum(param.numel() for param in self._layer.get_submodule(path).parameters())


def _alike(found: Tensor, expected: Tensor) -> bool:
    finite = bool(expected.isfinite().all())
    return finite and bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())


@contextmanager
def _output_widths(layer: nn.Module) -> Iterator[dict[str, int]]:
    """Collect the projections that are called, with the width of their output."""
    widths: dict[str, int] = {}
    hooks = []
    for path, module in layer.named_modules():
        if next(module.children(), None) is None and any(p.dim() > 1 for p in module.parameters()):

            def receive(_: Any, args: Any, output: Any, path: str = path) -> None:
                if isinstance(output, Tensor) and output.shape[:-1] == args[0].shape[:-1]:
                    widths[path] = output.shape[-1]

            hooks.append(module.register_forward_hook(receive))
    try:
        yield widths
    finally:
        for hook in hooks:
            hook.remove()


def _likeness(layer: nn.Module) -> dict[str, Tensor]:
    """Return params and buffers of a layer like `layer`, in fp32."""
    generator = torch.Generator().manual_seed(0)
    zero = torch.zeros(())
    weights = {
        name: zero.expand(param.shape) if param.numel() > LARGE else _drawn(param, generator)
        for name, param in layer.named_parameters()
    }
    buffers = {name: _in_fp32(buffer) for name, buffer in layer.named_buffers()}
    return weights | buffers


def _in_fp32(tensor: Tensor) -> Tensor:
    """Return a tensor of numbers in fp32, any other as it is."""
    return tensor.float() if tensor.is_floating_point() else tensor


def _drawn(param: Tensor, generator: torch.Generator) -> Tensor:
    if param.dim() < 2:
        return torch.rand(param.shape, generator=generator) + 0.5
    return torch.randn(param.shape, generator=generator).div_(math.sqrt(param.shape[-1]))


@contextmanager
def _products_of_stand_ins() -> Iterator[None]:
    """Compute products with stand-ins as if they had rank one; without gradients."""
    with torch.no_grad(), intercepted(_multiply):
        yield


def _multiply(func: Operation, args: Any, kwargs: Any) -> Any:
    number = _FIRST_FACTOR.get(func)
    if number is None or not any(map(_is_stand_in, args[number : number + 2])):
        return func(*args, **kwargs)
    product = _product(args[number], args[number + 1])
    return product + args[0] if number else product


_FIRST_FACTOR: dict[Operation, int] = {
    _aten.mm.default: 0,
    _aten.bmm.default: 0,
    _aten._grouped_mm.default: 0,
    _aten.addmm.default: 1,
    _aten.baddbmm.default: 1,
}
"""The place of the first factor among the arguments of each operation."""


def _is_stand_in(tensor: Tensor) -> bool:
    return tensor.numel() > 1 and tensor.untyped_storage().nbytes() == tensor.element_size()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a product of which one factor is a stand-in, (..., i, k) and (..., k, o)."""
    if _is_stand_in(a):
        return _product(b.transpose(-1, -2), a.transpose(-1, -2)).transpose(-1, -2)
    return (a @ _line(b, -2))[..., None] * _line(b, -1)


def _line(tensor: Tensor, dim: int) -> Tensor:
    """Return one number for each place of a dimension."""
    size = tensor.shape[dim]
    return torch.arange(1, size + 1, dtype=torch.float32).cos().div_(math.sqrt(size))

"""The weights of frozen towers, read once: a step never has them (models/towers.py).

They are read as the weights of any model, into a store of their own, and put into the modules of a
skeleton. On a device with its own memory either all of them stay there, or each layer's come for
the time of its call, as those of text do.

Laws (tests/run/evaluation/test_tower_outputs.py)
    1. Outputs are those of transformers' own model, bit for bit, with weights that stay and with
       weights that come.
    2. The mark of towers differs if one of their tensors does, and for no other tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatrain.devices.device import Device
from megatrain.disk.hf.load import Match, match_tensors, read_into
from megatrain.disk.hf.source_mark import lasting_config, mark_of_tensors
from megatrain.media import MediaItem, TowerOutputs
from megatrain.memory.kinds import Kind
from megatrain.memory.layout import build_layout
from megatrain.memory.placement import UNPLACED
from megatrain.memory.store import open_store
from megatrain.models.build import build_decoder
from megatrain.models.decoder import Decoder
from megatrain.models.probing.feature_cost import bytes_ahead
from megatrain.models.towers import Towers, recorded
from megatrain.quantization import Quantization

MOST_OF_DEVICE = 0.5
"""The share of a device's free memory that towers may take whole; their activations need room."""


class TowerWeights:
    """The tensors of a decoder's frozen towers, in a folder."""

    def __init__(
        self,
        folder: Path,
        decoder: Decoder,
        dtype: Literal["bf16", "fp32"],
        attn: str | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        """Read names and shapes. Raises what `load_model` does."""
        assert decoder.towers is not None
        self.towers: Towers = decoder.towers
        # A decoder that has towers among its params: it is never trained.
        self._decoder = build_decoder(decoder.config, dtype, attn=attn, media="all")
        matches, _ = match_tensors(folder, self._decoder, None, quantization)
        self._matches: list[Match] = [
            one for one in matches if self.towers.is_inside(one.tensor.param)
        ]
        self._folder = folder
        first = self._decoder.blocks[0]
        inside = tuple(param for param in first.params if self.towers.is_inside(param.name))
        self._block = replace(first, params=inside)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights in host memory."""
        return sum(param.num_elements * param.dtype.itemsize for param in self._block.params)

    def bytes_ahead(self, item: MediaItem) -> int:
        """Return what the towers hold beside their weights, while they run for an item."""
        return bytes_ahead(self._decoder.model, self.towers, item)

    def mark(self) -> str:
        """Return what tells these towers from others. Raises DiskError."""
        about = lasting_config(self._folder) + repr(self.towers).encode()
        stored = {one.tensor.param: one.stored for one in self._matches}
        return mark_of_tensors(about, stored)

    @contextmanager
    def running(self, device: Device, *, comes: bool | None = None) -> Iterator[TowerRuns]:
        """Read the weights, and yield what runs the towers on a device. Raises DiskError.

        `comes`: the weights of a layer come when it is called; None: where they would not fit.
        """
        store = open_store(build_layout([self._block], (Kind.HI,)), None, UNPLACED)
        try:
            read_into(
                self._decoder, store, self._matches, [], title=f"towers of {self._folder.name}"
            )
            weights = {param.name: store.param(param.name, Kind.HI) for param in self._block.params}
            if comes is None:
                room = MOST_OF_DEVICE * device.free_bytes if device.own_memory else None
                comes = room is not None and self.num_bytes > room
            yield TowerRuns(self._decoder, self.towers, weights, device, comes=comes)
        finally:
            store.close()


class TowerRuns:
    """Towers that have their weights."""

    def __init__(
        self,
        decoder: Decoder,
        towers: Towers,
        weights: dict[str, Tensor],
        device: Device,
        *,
        comes: bool,
    ) -> None:
        placed = decoder.placed(device.place) if device.own_memory else decoder
        self._model = placed.model.eval()
        self._towers, self._device, self._weights = towers, device, weights
        dtypes = {param.dtype for param in self._model.parameters()}
        zeros = {dtype: device.place(torch.zeros((), dtype=dtype)) for dtype in dtypes}
        layers = list(self._layers()) if comes else []
        inside = tuple(f"{path}." for path in layers)
        for name, param in list(self._model.named_parameters()):
            if name not in weights:  # what reads a tower's output is traced, no result is used
                self._bind(name, zeros[param.dtype].expand(param.shape))
            elif not name.startswith(inside):
                self._bind(name, device.place(weights[name].view(param.shape)))
        for path in layers:
            self._model.get_submodule(path).register_forward_pre_hook(self._coming(path))
            self._model.get_submodule(path).register_forward_hook(self._going(path))

    def outputs(self, item: MediaItem) -> TowerOutputs:
        """Return what the towers give for an item, in host memory."""
        device = self._device
        there = {name: device.to_device(device.pinned(one)) for name, one in item.tensors.items()}
        found = recorded(self._model, self._towers, replace(item, tensors=there))
        return replace(found, tensors=tuple(device.read(one) for one in found.tensors))

    def _layers(self) -> Iterator[str]:
        """Yield the paths of layers: the members of lists, inside towers."""
        for path, module in self._model.named_modules():
            if isinstance(module, nn.ModuleList) and self._towers.is_inside(f"{path}."):
                yield from (f"{path}.{number}" for number in range(len(module)))

    def _coming(self, path: str) -> Any:
        def come(_module: nn.Module, _args: Any) -> None:
            for name, weight in self._weights.items():
                if name.startswith(f"{path}."):
                    shape = self._model.get_parameter(name).shape
                    self._bind(
                        name, self._device.to_device(self._device.pinned(weight)).view(shape)
                    )

        return come

    def _going(self, path: str) -> Any:
        def go(_module: nn.Module, _args: Any, _output: Any) -> None:
            for name in self._weights:
                if name.startswith(f"{path}."):
                    param = self._model.get_parameter(name)
                    self._bind(name, torch.empty_like(param, device="meta"))

        return go

    def _bind(self, name: str, tensor: Tensor) -> None:
        path, _, own = name.rpartition(".")
        module = self._model.get_submodule(path)
        module._parameters[own] = nn.Parameter(tensor, requires_grad=False)

"""The frozen model under adapters, in a narrow form: which params have one, and who fills it.

    as_published   what is quantized in the folder stays so: values and scales are copied
    nf4            linear modules and experts of the layers are rounded on load (narrowing.py)
    bf16           nothing is narrow
    auto           as_published where the folder is quantized, else bf16

Norms, biases, routers, tables and the output projection stay as they are, which is the convention
of QLoRA. A narrow param has the matrices that a folder stores: of experts in one param, each
expert's projections apart.

The folder decides, not its config.json: a tensor that is quantized there stays so if all of its
param is. `presumed` says what to expect before there are weights to look at, for a plan.

Laws (tests/disk/hf/test_narrowed.py)
    1. A narrow param, widened, has the bits that it has where it is widened while it is loaded.
    2. The stores of all ranks together have the bytes of the store of one process.
    3. Nothing that is trained is narrow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from megatrain.choices import BaseForm
from megatrain.disk.hf.dequantize import PlacedValues, Scaled, typed
from megatrain.disk.hf.names import FolderTensor, NameMap
from megatrain.disk.hf.narrowing import narrow_nf4
from megatrain.errors import ConfigError, ModelConfigError, WeightsMismatch
from megatrain.memory.direct import DirectReader
from megatrain.memory.layout import overlap
from megatrain.memory.store import Store
from megatrain.models.config_json import read_object
from megatrain.models.decoder import Decoder, Param
from megatrain.narrow import (
    Form,
    Matrices,
    Spot,
    find_matrix,
    joined,
    nf4_on_load,
    published,
)
from megatrain.quantization import Quantization

_NOT_LINEAR = (".gate", ".router")
"""How modules that choose experts are called."""
_NAN = 0x7F
_LARGEST = {"fp8": 448.0, "fp4": 6.0, "mxfp4": 6.0, "int4": 8.0}
BASE_KEY = "megatrain_base"
"""Key of the config.json beside adapters: the form of the model that they were trained over, where
that has other bits than the folder's."""


def resolved(asked: BaseForm, quantization: Quantization | None) -> BaseForm:
    """Return the form that is meant for a folder. Raises ConfigError for nf4 of mxfp4."""
    if asked == "auto":
        return "bf16" if quantization is None else "as_published"
    if quantization is not None and quantization.method == "mxfp4" and asked == "nf4":
        raise ConfigError(
            "model.base is nf4, and the folder is in mxfp4, which has four bits too. Set "
            "model.base to as_published."
        )
    return asked


def recorded(data: bytes) -> tuple[bytes, BaseForm | None]:
    """Return a config.json without the form of a base, and that form, if it has one.

    Raises ModelConfigError.
    """
    fields = read_object(data)
    if BASE_KEY not in fields:
        return data, None
    form = fields.pop(BASE_KEY)
    if form != "nf4":
        raise ModelConfigError(f"config.json: {BASE_KEY} is {str(form)[:40]!r}; it must be nf4")
    return json.dumps(fields, indent=2).encode() + b"\n", form


def recording(data: bytes, form: BaseForm) -> bytes:
    """Return the config.json that stands beside adapters of a base in this form."""
    if form != "nf4":
        return data
    return json.dumps(read_object(data) | {BASE_KEY: form}, indent=2).encode() + b"\n"


def presumed(decoder: Decoder, asked: BaseForm, quantization: Quantization | None) -> Decoder:
    """Return the decoder with the forms that its base will have, as far as its config tells."""
    how = resolved(asked, quantization)
    if how == "bf16" or (how == "as_published" and quantization is None):
        return _with_forms(decoder, (), lambda tensor: None)

    def form_of(tensor: FolderTensor) -> Matrices | None:
        if how == "as_published":
            assert quantization is not None
            return published(tensor.shape, quantization.method, quantization.block)
        return nf4_on_load(tensor.shape)

    tensors = NameMap(decoder).tensors.values()
    return _with_forms(decoder, tensors, form_of)


def narrowed(
    decoder: Decoder,
    asked: BaseForm,
    quantization: Quantization | None,
    tensors: Sequence[tuple[FolderTensor, Scaled | None]],
) -> Decoder:
    """Return the decoder with the forms of its base. `tensors` are those of the folder."""
    how = resolved(asked, quantization)
    if how == "as_published":
        scaled = {id(tensor): one for tensor, one in tensors}

        def found(tensor: FolderTensor) -> Matrices | None:
            one = scaled[id(tensor)]
            return None if one is None else one.matrices

        return _with_forms(decoder, (tensor for tensor, _ in tensors), found, linear_only=False)
    return presumed(decoder, how, None)


def _with_forms(
    decoder: Decoder,
    tensors: Iterable[FolderTensor],
    form_of: Callable[[FolderTensor], Matrices | None],
    *,
    linear_only: bool = True,
) -> Decoder:
    """Return the decoder with forms for params of its layers whose tensors all have one."""
    linear = _linear_params(decoder) if linear_only else None
    by_param: dict[str, list[FolderTensor]] = {}
    for tensor in tensors:
        by_param.setdefault(tensor.param, []).append(tensor)

    def form(param: Param) -> Form:
        if param.trained or param.is_adapter or len(param.shape) < 2:
            return ()
        if linear is not None and param.name not in linear:
            return ()
        parts = sorted(by_param.get(param.name, ()), key=lambda tensor: tensor.start)
        found = [form_of(part) if len(part.shape) > 1 else None for part in parts]
        usable = [one for one in found if one is not None and one.matrix_elements % 2 == 0]
        return joined(usable) if usable and len(usable) == len(parts) else ()

    first, *layers, last = decoder.blocks
    layers = [
        replace(block, params=tuple(replace(param, form=form(param)) for param in block.params))
        for block in layers
    ]
    return replace(decoder, blocks=(first, *layers, last))


def _linear_params(decoder: Decoder) -> set[str]:
    """Return the weights of linear modules and of experts."""
    found = {
        f"{name}.weight"
        for name, module in decoder.model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not name.endswith(_NOT_LINEAR)
    }
    return found | {p.name for p in decoder.params if "experts" in p.name and len(p.shape) == 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedBytes:
    """Bytes of a narrow param from `first` on."""

    first: int
    data: Tensor


def put_bytes(store: Store, name: str, run: PlacedBytes) -> None:
    """Write what is here of a run of bytes of a narrow param."""
    owned = store.layout.places[name].owned
    here = overlap(owned, range(run.first, run.first + len(run.data)))
    if here:
        data = run.data[here.start - run.first : here.stop - run.first]
        store.narrow(name)[here.start - owned.start : here.stop - owned.start] = data


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedMatrix:
    """A quantized matrix of a folder, to be copied as it is."""

    tensor: Scaled
    matrix: int
    spot: Spot
    owned: range
    """Bytes of the param that are here."""

    @property
    def num_bytes(self) -> int:
        return len(self.spot.array_bytes("values")) + len(self.spot.array_bytes("scales"))

    def runs(self, readers: Mapping[Path, DirectReader], buffer: Tensor) -> Iterator[PlacedBytes]:
        """Yield its bytes as far as they are here. Raises WeightsMismatch for what is damaged."""
        rows = range(self.tensor.rows)
        for name, stored, begin in (
            ("values", self.tensor.values, self.tensor.values_bytes(self.matrix, rows).start),
            ("scales", self.tensor.scales, self.tensor.scales_bytes(self.matrix, rows).start),
        ):
            target = self.spot.array_bytes(name)
            wanted = overlap(self.owned, target)
            room = len(buffer) - 2 * 4096
            for first in range(wanted.start, wanted.stop, room):
                last = min(first + room, wanted.stop)
                start = begin + first - target.start
                data = readers[stored.path].read(start, start + last - first, buffer)
                self.tensor.require_finite(self._is_finite(name, data), self.matrix, rows)
                yield PlacedBytes(first=first, data=data)

    def _is_finite(self, name: str, data: Tensor) -> bool:
        method, matrices = self.tensor.method, self.spot.matrices
        if name == "values":
            return method != "fp8" or not bool(((data & _NAN) == _NAN).any())
        dtype = getattr(torch, matrices.scale)
        data = data[: len(data) // dtype.itemsize * dtype.itemsize]
        scales = typed(data, dtype).float()
        if dtype is torch.uint8:
            scales = (scales - 127).exp2()
        return bool(torch.isfinite((scales * _LARGEST[method]).bfloat16()).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedMatrix:
    """A matrix of a folder that is rounded to nf4."""

    values: Callable[[Mapping[Path, DirectReader], Tensor], Iterator[PlacedValues]]
    """Reads its elements, in order."""
    dtype: torch.dtype
    """The dtype of the param: weights are rounded to it first, as a model that is loaded has it."""
    spot: Spot
    num_bytes: int

    def runs(self, readers: Mapping[Path, DirectReader], buffer: Tensor) -> Iterator[PlacedBytes]:
        """Yield the bytes of its form."""
        read = (run.values.to(self.dtype) for run in self.values(readers, buffer))
        for name, first, numbers in narrow_nf4(read):
            begin = self.spot.array_bytes(name).start + first * numbers.element_size()
            yield PlacedBytes(first=begin, data=numbers.view(torch.uint8))


def matrices_of(param: Param, tensor: FolderTensor) -> Iterator[tuple[int, Spot]]:
    """Yield the first element of each matrix of a folder's tensor, and its place in the param."""
    element, stop = tensor.start, tensor.start + tensor.num_elements
    while element < stop:
        spot = find_matrix(param.form, element)
        yield element - tensor.start, spot
        element += spot.matrices.matrix_elements
    if element != stop:
        raise WeightsMismatch(
            f"{tensor.name} has a part of a matrix of {param.name}, which cannot be kept narrow. "
            "Set model.base to bf16."
        )

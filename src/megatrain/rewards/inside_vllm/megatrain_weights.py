"""In a worker of vLLM: weights from a trainer's memory, and digests of what the kernels then have.

    PYTHONPATH=FOLDER_OF_THIS_FILE VLLM_SERVER_DEV_MODE=1 \\
    python -m vllm.entrypoints.openai.api_server --worker-extension-cls megatrain_weights.Weights

vLLM gives its worker the methods of `Weights`, and POST /collective_rpc calls them between two
steps of the model. Needs torch and vLLM alone: the trainer's environment may have other versions of
both. `shared_weights.py` of the trainer says how its memory is laid out.

Weights that are not complete, or not all of this model, are refused before anything is touched.
From then on a failure would leave half of them, which nothing repairs: the worker ends, and the
server with it.

A digest is that of a tensor as the trainer's folder has it. vLLM joins some of them (queries, keys
and values; gates and ups), pads the vocabulary, and on a CPU packs weights of linear layers for its
kernels, and drops most of the originals: the kernel's product with the identity gives them back,
exactly but for the sign of a zero.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import time
import traceback
import warnings
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import layerwise

MARK = b"MEGAWGT1"
HEAD = struct.Struct("<8s16sQQ")
HEAD_BYTES = 64
ROWS = 256
"""Rows of the identity in one product."""
PIECE_ELEMENTS = 1 << 22


class Refused(Exception):
    """The weights cannot be taken, and nothing was touched."""


class Weights:
    """Methods of the worker, by /collective_rpc."""

    megatrain_label: str | None = None

    def megatrain_state(self) -> dict[str, Any]:
        """Return which weights of ours it has, None if not all of one version, and their dtype."""
        dtype = str(self.model_config.dtype).removeprefix("torch.")  # type: ignore[attr-defined]
        return {"label": self.megatrain_label, "dtype": dtype}

    def megatrain_load(
        self, process: int, descriptor: int, name: str, version: int
    ) -> dict[str, Any]:
        """Take all weights of a version; return the digest of each tensor, with its dtype."""
        start = time.perf_counter()
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        try:
            memory = TrainersMemory(process, descriptor, name)
            memory.require(version)
            spots = find_spots(model, memory.tensors)
        except Refused as refused:
            return {"refused": str(refused)}
        self.megatrain_label = None
        try:
            layerwise.initialize_layerwise_reload(model)  # parameters are now without memory
            model.load_weights(iter(memory.tensors.items()))
            layerwise.finalize_layerwise_reload(model, self.model_config)  # type: ignore[attr-defined]
            memory.require(version)  # nobody wrote meanwhile
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        self.megatrain_label = f"{name}-{version}"
        loaded = time.perf_counter() - start
        digests = dict(found_digests(model, spots, self.model_config.dtype))  # type: ignore[attr-defined]
        total = time.perf_counter() - start
        return {"digests": digests, "load_s": loaded, "digest_s": total - loaded}


class TrainersMemory:
    """A trainer's copy of its weights, to read."""

    def __init__(self, process: int, descriptor: int, name: str) -> None:
        """Open it. Raises Refused."""
        path = f"/proc/{int(process)}/fd/{int(descriptor)}"
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise Refused(
                f"cannot read the trainer's memory ({path}: {error}). Trainer and server must be "
                "on one host, of one user, and in one container"
            ) from None
        mark, own, _, table_bytes = HEAD.unpack(self._map[: HEAD.size])
        if mark != MARK or own.hex() != name:
            raise Refused(f"{path} is not the memory of this trainer's weights")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: "not writable", which is the point
            arena = torch.frombuffer(self._map, dtype=torch.uint8)
        table = json.loads(self._map[HEAD_BYTES : HEAD_BYTES + table_bytes])
        self.tensors = {key: _view(arena, key, *place) for key, place in table.items()}

    def require(self, version: int) -> None:
        """Raise Refused unless all weights of `version` are there."""
        counter = HEAD.unpack(self._map[: HEAD.size])[2]
        if counter != 2 * version:
            state = "being written" if counter % 2 else f"of version {counter // 2}"
            raise Refused(f"version {version} was asked for, the trainer's weights are {state}")


def _view(arena: torch.Tensor, name: str, dtype: str, shape: list[int], start: int) -> torch.Tensor:
    kind = getattr(torch, dtype)
    end = start + torch.Size(shape).numel() * kind.itemsize
    if not HEAD_BYTES <= start <= end <= len(arena):
        raise Refused(f"{name} is outside of the trainer's memory")
    return arena[start:end].view(kind).view(shape)


@dataclass(frozen=True)
class Spot:
    """The part of a parameter that a tensor of the folder is."""

    param: str
    first: int
    """Its first row."""
    shape: tuple[int, ...]


def find_spots(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, Spot]:
    """Return where each tensor of the folder will be. Raises Refused unless all are known."""
    params = dict(model.named_parameters())
    parts: dict[str, list[tuple[int, str]]] = {}
    strange = []
    for name in tensors:
        param, number = _param_of(model, name, params)
        if param in params:
            parts.setdefault(param, []).append((number, name))
        else:
            strange.append(name)
    if strange or len(parts) < len(params):
        raise Refused(
            "the model of the server is another, or joins weights in a way that is not known: "
            f"its parameters without tensors of ours {sorted(params.keys() - parts.keys())[:5]}, "
            f"tensors of ours without parameters {strange[:5]}"
        )
    spots: dict[str, Spot] = {}
    for param, named in parts.items():
        first = 0
        for _, name in sorted(named):
            shape = tuple(tensors[name].shape)
            spots[name] = Spot(param, first, shape)
            first += shape[0] if shape else 1
        names = [name for _, name in named]
        _require_room(model, param, params[param], first, names, tensors[names[0]])
    return spots


def _param_of(model: torch.nn.Module, name: str, params: Collection[str]) -> tuple[str, int]:
    """Return the parameter that a tensor of the folder is in, and its number among others there.

    Some models name the joined parameter in their mapper, others in their list of joined modules.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    mapped = mapper.apply_list([name]) if mapper is not None else [name]
    param = mapped[0] if mapped else ""
    given = name.split(".")
    for joined, modules in (getattr(model, "packed_modules_mapping", None) or {}).items():
        for number, module in enumerate(modules):
            if len(modules) > 1 and module in given:
                own = param.replace(f".{module}.", f".{joined}.")
                return (own if own in params else param), number
    return param, 0


def _require_room(
    model: torch.nn.Module,
    param: str,
    value: torch.Tensor,
    rows: int,
    parts: list[str],
    tensor: torch.Tensor,
) -> None:
    """Raise Refused unless a parameter has the shape of its tensors; a vocabulary may be padded."""
    shape = tuple(value.shape) if value.numel() else _packed_shape(model, param)
    is_padded = len(shape) == 2 and hasattr(_module_of(model, param), "org_vocab_size")
    if shape[1:] != tuple(tensor.shape[1:]) or not (
        shape[:1] == (rows,) or (is_padded and shape[0] > rows)
    ):
        raise Refused(f"{param} is {shape} on the server, {parts} of ours have {rows} rows")


def found_digests(
    model: torch.nn.Module, spots: dict[str, Spot], dtype: torch.dtype
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield each tensor's name with the dtype and the digest that it has in the model."""
    by_param: dict[str, list[tuple[str, Spot]]] = {}
    for name, spot in spots.items():
        by_param.setdefault(spot.param, []).append((name, spot))
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        for param, parts in by_param.items():
            value = model.get_parameter(param).detach()
            if param.endswith(".weight") and hasattr(_module_of(model, param), "cpu_linear"):
                value = _unpacked(model, param, value, dtype)  # even if there is an original
            kind = str(value.dtype).removeprefix("torch.")
            made = pool.map(lambda part: _digest(value, part[1]), parts)  # noqa: B023
            yield from ((name, (kind, one)) for (name, _), one in zip(parts, made, strict=True))


def _digest(value: torch.Tensor, spot: Spot) -> str:
    rows = spot.shape[0] if spot.shape else 1
    total = hashlib.sha256()
    numbers = value.view(-1) if not spot.shape else value[spot.first : spot.first + rows]
    for piece in torch.split(numbers.reshape(-1), PIECE_ELEMENTS):
        total.update((piece.cpu() + 0).contiguous().view(torch.uint8).numpy().data)
    return total.hexdigest()


def _module_of(model: torch.nn.Module, param: str) -> Any:
    return model.get_submodule(param.rpartition(".")[0])


def _packed_shape(model: torch.nn.Module, param: str) -> tuple[int, ...]:
    module = _module_of(model, param)
    return module.output_size_per_partition, module.input_size_per_partition


def _unpacked(
    model: torch.nn.Module, param: str, value: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return a packed weight of a linear layer: its products with the rows of the identity."""
    module = _module_of(model, param)
    num_outputs, num_inputs = value.shape if value.numel() else _packed_shape(model, param)
    weight = torch.empty(num_outputs, num_inputs, dtype=dtype)
    for first in range(0, num_inputs, ROWS):
        count = min(ROWS, num_inputs - first)
        rows = torch.zeros(count, num_inputs, dtype=dtype)
        rows[torch.arange(count), torch.arange(first, first + count)] = 1
        weight[:, first : first + count] = module.cpu_linear(rows, value, None).t()
    return weight

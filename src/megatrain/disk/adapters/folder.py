"""An adapter folder in PEFT's form: what is adapted, with which rank, over which model.

A folder is untrusted input and read as strictly as a model folder (disk/hf/folder.py). The modules
that have adapters are those of the weights; ranks and shapes must agree with adapter_config.json,
and with the model. `adapter_model.bin` is a pickle, which could run code: it is never opened.

Laws (tests/disk/adapters/test_folder.py)
    1. Tensors that are not exactly the adapters of the config and the model are named, before a
       byte of them is read.
    2. Loaded masters have exactly the values of the folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatrain.disk.adapters.names import (
    adapter_tensors,
    key_of,
    module_of,
    saved_param,
    wrapper_of,
)
from megatrain.disk.adapters.peft_config import (
    MAX_ADAPTER_CONFIG_BYTES,
    PeftConfig,
    parse_peft_config,
)
from megatrain.disk.checkpoint.manifest import MANIFEST_NAME
from megatrain.disk.hf.exported import RECORD_NAME
from megatrain.disk.hf.folder import (
    StoredTensor,
    read_folder,
    read_limited,
    readable,
    resolve_file,
)
from megatrain.disk.hf.load import WEIGHT_DTYPES, Match, read_into
from megatrain.disk.hf.safetensors_format import DTYPES
from megatrain.errors import ModelFolderError, WeightsMismatch, listing
from megatrain.hub import Need, find_model
from megatrain.memory.store import Store
from megatrain.model_files import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_INDEX_NAME,
    ADAPTER_NAME,
    VOCABULARY,
)
from megatrain.models.adapters.lora import MAGNITUDE, LoraConfig, is_adapter
from megatrain.models.config_json import CONFIG_NAME
from megatrain.models.decoder import Decoder

_PICKLE = "adapter_model.bin"
_SNAPSHOT = re.compile(r"models--([\w.\-]+?)(?:--([\w.\-]+))?/snapshots/([0-9a-f]{40})")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFolder:
    """A folder with adapters, read but for their numbers."""

    path: Path
    config: PeftConfig
    tensors: Mapping[str, StoredTensor]
    """The tensors, by PEFT's wrapper and the half that each is, or by their param (names.py)."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Those that have an adapter, or a param that has one."""
        adapted = (name for name in self.tensors if is_adapter(name))
        return tuple(dict.fromkeys(map(module_of, adapted)))

    def lora(self) -> LoraConfig:
        """Return the settings of the adapters."""
        config = self.config
        return LoraConfig(
            rank=config.rank,
            alpha=config.alpha,
            dropout=config.dropout,
            target_modules=self.modules,
            target_parameters=config.params,
            modules_to_save=config.saved,
            ranks=config.ranks,
            alphas=config.alphas,
            rslora=config.rslora,
            dora=config.dora,
        )

    def base(self, need: Need = "weights") -> Path:
        """Return the folder of the model that the adapters belong to, fetched as far as needed."""
        name, where = self.config.base, self.path / ADAPTER_CONFIG_NAME
        if name is None:
            raise ModelFolderError(
                f"{where} names no base_model_name_or_path. Set it to the folder or the Hub id of "
                "the model that the adapters belong to."
            )
        try:
            revision = None if Path(name).is_dir() else self.config.revision
            return find_model(name, revision, need).folder
        except ModelFolderError as error:
            way = "set base_model_name_or_path to its place."
            if (self.path.parent / MANIFEST_NAME).exists():  # with a hash of this file
                way = "continue the run with its new place as `model`, or link it to the old one."
            elif (self.path / RECORD_NAME).exists():
                way = (
                    "link it to the old place; or set base_model_name_or_path, delete "
                    f"{RECORD_NAME}, which has a hash of this file, and give this folder."
                )
            raise ModelFolderError(
                f"{where}: its base model cannot be found: {error} If the model has moved, {way}"
            ) from error

    def load(self, decoder: Decoder, store: Store) -> None:
        """Read the adapters into their places. Raises WeightsMismatch or DiskError."""
        wanted = {key_of(tensor.name): tensor for tensor in adapter_tensors(decoder)}
        # PEFT writes a tied table under each of its names; config.json says that they are one.
        ties = {alias for param in decoder.params if param.trained for alias in param.aliases}
        if ties & self.tensors.keys() and not self.config.tied:
            raise WeightsMismatch(
                f"{self.path}: {listing(ties & self.tensors.keys())} was trained apart from the "
                "table that the model ties it to. Train with ensure_weight_tying=True in PEFT."
            )
        faults = []
        if absent := wanted.keys() - self.tensors.keys():
            faults.append(f"{len(absent)} are missing: {listing(absent)}")
        if surplus := self.tensors.keys() - wanted.keys() - ties:
            faults.append(f"{len(surplus)} are not in the model: {listing(surplus)}")
        for name in sorted(wanted.keys() & self.tensors.keys()):
            shape = self.tensors[name].entry.shape
            if shape != wanted[name].shape:
                faults.append(f"{name} has shape {shape}; the model wants {wanted[name].shape}")
        if faults:
            raise WeightsMismatch(
                f"{self.path}: the adapters do not match the model:\n  " + "\n  ".join(faults[:12])
            )
        matches = [Match(stored=self.tensors[n], tensor=tensor) for n, tensor in wanted.items()]
        read_into(decoder, store, matches, [], title=f"loading the adapters of {self.path.name}")


def read_adapter_folder(folder: Path) -> AdapterFolder:
    """Return what a folder holds. Reads no number of its weights.

    Raises ModelFolderError, ModelConfigError, WeightsFormatError, WeightsMismatch or DiskError.
    """
    with readable(folder):
        if not os.path.lexists(folder / ADAPTER_CONFIG_NAME):
            raise ModelFolderError(
                f"{folder} has no {ADAPTER_CONFIG_NAME}: it is not a folder of adapters"
            )
        path = resolve_file(folder, ADAPTER_CONFIG_NAME)
        config = parse_peft_config(read_limited(path, MAX_ADAPTER_CONFIG_BYTES))
        weights = [ADAPTER_NAME, ADAPTER_INDEX_NAME]
        if (folder / _PICKLE).exists() and not any((folder / name).exists() for name in weights):
            raise ModelFolderError(
                f"{folder / _PICKLE} is a pickle, which could run code: refused. Load it where you "
                "trust it, and save it with PEFT's save_pretrained(safe_serialization=True)."
            )
    tensors = read_folder(folder, ADAPTER_NAME, ADAPTER_INDEX_NAME)
    return AdapterFolder(path=folder, config=config, tensors=_checked(folder, config, tensors))


def _checked(
    folder: Path, config: PeftConfig, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return the tensors by wrapper. Raises WeightsMismatch for what no adapter of the config has.

    How many rows and columns experts have, the model says when they are loaded.
    """
    found = {
        name: wrapper_of(name) or saved_param(name, config.saved, tied=config.tied)
        for name in stored
    }
    others = [name for name, wrapper in found.items() if wrapper is None]
    if others:
        raise WeightsMismatch(
            f"{folder}: {len(others)} tensors are not adapters of linear modules or of params: "
            f"{listing(others)}. Only plain LoRA is supported; if these are embeddings that PEFT "
            "has copied, save with save_embedding_layers=False, or name them in modules_to_save."
        )
    tensors = {wrapper: stored[name] for name, wrapper in found.items() if wrapper is not None}
    faults = []
    for name, tensor in tensors.items():
        wrapper, _, half = name.rpartition(".")
        if half == MAGNITUDE or not is_adapter(name):
            continue  # of the size of its module, which the model knows
        shape, rank_at = tensor.entry.shape, 0 if half == "lora_A" else -1
        other = f"{wrapper}.lora_{'B' if half == 'lora_A' else 'A'}"
        if other not in tensors:
            faults.append(f"{other} is missing")
        rank = config.rank_of(wrapper)
        if len(shape) != 2 or (shape[rank_at] != rank and not config.params):
            faults.append(f"{name} has shape {shape}, and r is {rank}")
        elif DTYPES.get(tensor.entry.dtype) not in WEIGHT_DTYPES:
            faults.append(f"{name} is {tensor.entry.dtype}; it must be BF16, F16 or F32")
    if faults or not tensors:
        reasons = faults[:12] or ["there is none"]
        raise WeightsMismatch(f"{folder}: the adapters are not whole:\n  " + "\n  ".join(reasons))
    return tensors


def config_folder(adapter: AdapterFolder) -> Path:
    """Return the folder whose config.json counts: that of the adapters, or of their model."""
    own = os.path.lexists(adapter.path / CONFIG_NAME)
    return adapter.path if own else adapter.base("config")


def tokenizer_source(adapter: AdapterFolder) -> Path:
    """Return the folder that the tokenizer is read from: that of the adapters, if it has one."""
    own = any(VOCABULARY.fullmatch(path.name) for path in adapter.path.iterdir())
    return adapter.path if own else adapter.base("tokenizer")


def reference(folder: Path) -> tuple[str, str | None]:
    """Return the name that others find a model folder by, and its revision on the Hub."""
    found = _SNAPSHOT.search(folder.resolve().as_posix())
    if found is None:
        return str(folder.resolve()), None
    owner, name, commit = found.groups()
    return (owner if name is None else f"{owner}/{name}"), commit

"""Load a Hugging Face folder into the store, and export the store to a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from megatrain.disk.hf.export import SHARD_BYTES, Origin, export_weights
from megatrain.disk.hf.folder import read_carried, read_config_bytes
from megatrain.disk.hf.growth import Growth
from megatrain.disk.hf.load import load_weights
from megatrain.hub import find_model
from megatrain.memory.kinds import Kind
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store, open_store
from megatrain.memory.tier import Scratch
from megatrain.models.config_json import parse_config
from megatrain.models.decoder import Decoder, build_decoder
from megatrain.models.rope import require_rotary, with_rope
from megatrain.optim.states import WITH_CLIP

Precision = Literal["bf16", "fp32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostModel:
    """A model at home: its blocks, and the store that holds their bytes."""

    decoder: Decoder
    store: Store
    source: Path
    """The folder it came from."""
    config_json: bytes
    carried: Mapping[str, bytes]
    """Tokenizer and generation files, by name: they go with every export and checkpoint."""

    def export(
        self,
        folder: str | Path,
        *,
        shard_bytes: int = SHARD_BYTES,
        origin: Origin | None = None,
        masters: bool = False,
    ) -> None:
        """Write the weights as a folder that `from_pretrained` loads. Safe over `source` too.

        A new folder appears complete or not at all. `origin` names the model of a run, and is
        recorded in the folder. `masters` writes fp32 masters in place of the weights.
        """
        export_weights(
            Path(folder),
            self.decoder,
            self.store,
            config_json=self.config_json,
            carried=self.carried,
            shard_bytes=shard_bytes,
            origin=origin,
            masters=masters,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A model folder, read but for its weights: enough to plan a run, before memory is taken."""

    source: Path
    config_json: bytes
    carried: Mapping[str, bytes]
    decoder: Decoder
    precision: Precision
    """Of the weights in the folder."""
    growth: Growth | None = None
    """New tokens, of which the folder's weights know nothing."""

    def empty(self, kinds: tuple[Kind, ...], scratch: Scratch | None = None) -> HostModel:
        """Return the model with weights that are all zeros; `scratch`: some kinds are on disk.

        Raises DoesNotFit, DiskFull or DiskError.
        """
        return HostModel(
            decoder=self.decoder,
            store=open_store(build_layout(self.decoder.blocks, kinds), scratch),
            source=self.source,
            config_json=self.config_json,
            carried=self.carried,
        )

    def load(self, kinds: tuple[Kind, ...], scratch: Scratch | None = None) -> HostModel:
        """Return the model with its weights at home.

        Raises what `load_model` does, and DiskFull if the scratch file has no room.
        """
        home = self.empty(kinds, scratch)
        try:
            load_weights(home.source, home.decoder, home.store, self.growth)
        except BaseException:
            home.store.close()
            raise
        return home


def load_model(
    folder: str | Path,
    *,
    dtype: Precision = "bf16",
    kinds: tuple[Kind, ...] = WITH_CLIP,
    frozen: tuple[str, ...] = (),
    attn: str | None = None,
) -> HostModel:
    """Return the model of a folder, or of an id on the Hub, its weights in host memory.

    `frozen` are name patterns of params that are not trained; `attn` an attention implementation of
    transformers, None for its own choice. Raises ModelConfigError, NotSplittable, MissingPackage,
    DoesNotFit, ModelFolderError, WeightsFormatError, WeightsMismatch, HubError or DiskError.
    """
    found = find_model(str(folder)).folder
    return read_model_folder(found, dtype=dtype, frozen=frozen, attn=attn).load(kinds)


def read_model_folder(
    folder: str | Path,
    *,
    dtype: Precision | None = None,
    frozen: tuple[str, ...] = (),
    attn: str | None = None,
    growth: Growth | None = None,
    rope: Mapping[str, Any] | None = None,
) -> ModelFolder:
    """Return what a model folder holds besides weights. Its config is parsed once, here.

    `dtype` None is the folder's own, and `attn` may be `auto` too: the choice of transformers.
    With `growth` config and tokenizer have new tokens, with `rope` other rotary positions. Raises
    ConfigError if the tokens could not be trained, or the positions do not suit the model.
    """
    source = Path(folder)
    config_json = read_config_bytes(source)
    carried = read_carried(source)  # refused now, and not by the export at the end of a run
    if growth is not None:
        config_json, carried = growth.config(config_json), growth.carried(carried)
    if rope is not None:
        config_json = with_rope(config_json, rope)
    config = parse_config(config_json)
    precision: Precision = "fp32" if config.dtype is torch.float32 else "bf16"
    decoder = build_decoder(config, dtype or precision, frozen, None if attn == "auto" else attn)
    if growth is not None:
        growth.check(decoder)
    if rope is not None:
        require_rotary(decoder.model)
    return ModelFolder(
        source=source,
        config_json=config_json,
        carried=carried,
        decoder=decoder,
        precision=precision,
        growth=growth,
    )

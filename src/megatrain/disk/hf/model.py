"""Load a Hugging Face folder into the store, and export the store to a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megatrain.choices import BaseForm
from megatrain.disk import optional
from megatrain.disk.hf.export import SHARD_BYTES, Origin, config_bytes, write_tensors
from megatrain.disk.hf.exported import require_as_written
from megatrain.disk.hf.folder import is_adapter_folder, read_carried, read_config_bytes
from megatrain.disk.hf.growth import Growth, tables
from megatrain.disk.hf.load import has_spare_heads, load_weights, match_tensors
from megatrain.disk.hf.narrowed import (
    narrowed,
    presumed,
    recorded,
    recording,
    resolved,
)
from megatrain.disk.hf.weights_file import as_masters, folder_tensors
from megatrain.errors import ConfigError, ModelFolderError
from megatrain.hub import find_model
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import build_layout
from megatrain.memory.master import split_into
from megatrain.memory.placement import UNPLACED, Placement
from megatrain.memory.store import Store, open_store
from megatrain.model_files import GENERATION_NAME
from megatrain.models.build import build_decoder, named_ends
from megatrain.models.classes import SCORE, first_scores, scores_texts
from megatrain.models.config_json import (
    CONFIG_NAME,
    as_family,
    parse_config,
    with_labels,
    without_quantization,
)
from megatrain.models.decoder import Decoder
from megatrain.models.multimodal import text_part
from megatrain.models.rope import require_rotary, with_rope
from megatrain.optim.states import WITH_CLIP
from megatrain.quantization import Quantization
from megatrain.ranks.ownership import SOLE, Owner
from megatrain.ranks.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from megatrain.disk.adapters.folder import AdapterFolder
    from megatrain.disk.hf.multimodal_tensors import SourceTensor
    from megatrain.memory.tier.scratch_file import Scratch
    from megatrain.models.adapters.lora import LoraConfig
    from megatrain.models.towers import MediaTraining

Precision = Literal["bf16", "fp32"]
_TEXT_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


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
    base: Path | None = None
    """The folder whose weights are under the adapters, if it is not `source`."""
    form: BaseForm = "bf16"
    """The form of the frozen model under adapters."""
    beside: Sequence[SourceTensor] = ()
    """Tensors that the model does not have itself: they stay in the source, and are exported."""
    reference: Store | None = None
    """The weights that training began with, if a loss compares with them."""

    @property
    def weights(self) -> Path:
        """The folder of the weights that the model came with."""
        return self.base or self.source

    def export(
        self,
        folder: str | Path,
        *,
        shard_bytes: int = SHARD_BYTES,
        origin: Origin | None = None,
        masters: bool = False,
        merge: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        """Write the weights as a folder that `from_pretrained` loads. Safe over `source` too.

        A new folder appears complete or not at all. `origin` names the model of a run, and is
        recorded in the folder. `masters` writes fp32 masters in place of the weights. Of a model
        with adapters these alone are written, as PEFT loads them, unless `merge` adds them to the
        weights. Of `ranks` that share the model, all call this alike. Raises ConfigError for a
        merge that is not possible, and DiskError.
        """
        if merge and self.decoder.adapters is None:
            raise ConfigError("there are no adapters to merge: the model is exported without merge")
        if merge and not ranks.owner.is_alone:
            raise ConfigError("one process merges adapters: export without torchrun")
        if self.decoder.adapters is not None and not merge:
            optional.export.export_adapters(
                Path(folder),
                self.decoder,
                self.store,
                base=self.weights,
                config_json=recording(self.config_json, self.form),
                carried=self.carried,
                origin=origin,
                ranks=ranks,
            )
            return
        found, dtype = folder_tensors(self.decoder, self.store), self.decoder.model.dtype
        if masters:
            found, dtype = as_masters(found, self.store), torch.float32
        if merge:
            found = optional.merge.merged(found, self.decoder, self.store)
        small = {**self.carried, CONFIG_NAME: config_bytes(self.config_json, dtype)}
        write_tensors(
            Path(folder),
            [*(tensor for _, tensor in found), *self.beside],
            small,
            shard_bytes=shard_bytes,
            origin=origin,
            ranks=ranks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A model folder, read but for its weights: enough to plan a run, before memory is taken."""

    source: Path
    config_json: bytes
    carried: Mapping[str, bytes]
    decoder: Decoder
    precision: Precision
    """The precision of the weights in the folder."""
    growth: Growth | None = None
    """New tokens, of which the folder's weights know nothing."""
    quantization: Quantization | None = None
    """The form of the folder's weights, which `config_json` no longer has."""
    adapter: AdapterFolder | None = None
    """The folder that adapters are read from; None: they are new, or there are none."""
    over: Path | None = None
    """The folder of the weights, if it is known; None: the one that `adapter` names."""
    notes: tuple[str, ...] = ()
    """Remarks on how its config.json was read."""
    new_head: bool = False
    """A head that scores texts, of which the folder's weights know nothing."""
    base: BaseForm = "auto"
    """Form of the frozen model under adapters; the decoder has what is presumed of it."""

    def with_base(self, base: BaseForm, folder: Path | None = None) -> ModelFolder:
        """Return the model with its base in another form. Without adapters there is no base.

        `folder` has the config.json of the base, if that is not `source`. Raises ConfigError.
        """
        if self.decoder.adapters is None:
            return self
        quantization = self.quantization if folder is None else self._quantization(folder)
        decoder = presumed(self.decoder, base, quantization)
        return replace(self, base=base, decoder=decoder)

    def with_end(self, token: int) -> ModelFolder:
        """Return the model with one more token that ends its texts, in exports too."""
        fields = _generation_config(self.carried)
        if not fields:  # transformers then takes these from config.json
            given = text_part(parse_config(self.config_json)).to_dict()
            fields = {name: given[name] for name in _TEXT_TOKENS if given.get(name) is not None}
        named = fields.get("eos_token_id")
        ends = named if isinstance(named, list) else sorted(self.decoder.eos_token_ids)
        fields["eos_token_id"] = [*ends, token]
        written = json.dumps(fields, indent=2, sort_keys=True).encode() + b"\n"
        return replace(
            self,
            carried={**self.carried, GENERATION_NAME: written},
            decoder=replace(self.decoder, eos_token_ids=self.decoder.eos_token_ids | {token}),
        )

    def empty(
        self,
        kinds: tuple[TensorKind, ...],
        scratch: Scratch | None = None,
        owner: Owner = SOLE,
        placement: Placement = UNPLACED,
    ) -> HostModel:
        """Return what `owner` has of the model, all zeros; `scratch`: some kinds are on disk.

        Raises DoesNotFit, DiskFull or DiskError, and for the folder of a joint model what
        `load_model` does.
        """
        return HostModel(
            decoder=self.decoder,
            store=open_store(build_layout(self.decoder.blocks, kinds, owner), scratch, placement),
            source=self.source,
            config_json=self.config_json,
            carried=self.carried,
            base=self.over,
            beside=() if self.adapter is not None else self._beside(self.over or self.source),
        )

    def load(
        self,
        kinds: tuple[TensorKind, ...],
        scratch: Scratch | None = None,
        owner: Owner = SOLE,
        placement: Placement = UNPLACED,
        *,
        base: Path | None = None,
    ) -> HostModel:
        """Return the model with the weights that `owner` has at home. Reads no others.

        With `base` the weights come from that folder, and adapters stay zero: a checkpoint has
        them. Raises what `load_model` does, and DiskFull if the scratch file has no room.
        """
        over = base or self.over or self._named_base()
        model, quantization = self, self._quantization(over)
        growth = self.growth or _grown_before(self.decoder)
        new_head = self.new_head or self._has_own_head(over)
        match = partial(match_tensors, over, self.decoder, growth, quantization, new_head=new_head)
        matched = None  # a model that does not fit is told so before its tensors are compared
        if self.decoder.adapters is not None:  # its forms are those of the tensors
            matched = match()
            tensors = [(one.tensor, one.scaled) for one in matched[0]]
            decoder = narrowed(self.decoder, self.base, quantization, tensors)
            model = replace(self, decoder=decoder)
        home = replace(
            model.empty(kinds, scratch, owner, placement),
            base=over,
            form=resolved(self.base, quantization),
        )
        try:
            if self.adapter is not None:
                home = replace(home, beside=self._beside(over))
            load_weights(over, home.decoder, home.store, growth, quantization, matched or match())
            if new_head:
                _start_head(home.decoder, home.store)
            if self.adapter is not None and base is None:
                self.adapter.load(home.decoder, home.store)
            elif base is None and home.decoder.adapters is not None:
                for name, first in optional.start.first_values(home.decoder, home.store):
                    _start(home.store, name, first)
        except BaseException:
            home.store.close()
            raise
        return home

    def _has_own_head(self, over: Path) -> bool:
        """Return whether the adapters bring a head that scores texts, which their model lacks."""
        if self.adapter is None or SCORE not in self.adapter.config.saved:
            return False
        return not scores_texts(parse_config(without_quantization(read_config_bytes(over))[0]))

    def _beside(self, folder: Path) -> Sequence[SourceTensor]:
        """Return what the model carries. It stays in the folder, which must therefore fit."""
        if not self.decoder.carried and not has_spare_heads(self.decoder):
            return ()
        quantization = self._quantization(folder)
        if self.decoder.carried:
            match_tensors(folder, self.decoder, self.growth, quantization)
        return optional.multimodal_tensors.carried_tensors(folder, self.decoder, quantization)

    def _quantization(self, folder: Path) -> Quantization | None:
        """Return that of the weights in a folder, which may not be the one that was read."""
        if folder == self.source:
            return self.quantization
        return without_quantization(read_config_bytes(folder))[1]

    def _named_base(self) -> Path:
        assert self.adapter is not None
        base = self.adapter.base()
        require_as_written(base)
        return base

    def load_adapters(self, kinds: tuple[TensorKind, ...], owner: Owner = SOLE) -> HostModel:
        """Return the adapters in a store that has nothing else: enough to export them."""
        assert self.adapter is not None
        blocks = [
            replace(block, params=tuple(param for param in block.params if param.trained))
            for block in self.decoder.blocks
        ]
        home = HostModel(
            decoder=self.decoder,
            store=open_store(build_layout(blocks, kinds, owner), None, UNPLACED),
            source=self.source,
            config_json=self.config_json,
            carried=self.carried,
            base=self.over or self.adapter.base("config"),
        )
        self.adapter.load(home.decoder, home.store)
        return home


def load_model(
    folder: str | Path,
    *,
    dtype: Precision = "bf16",
    kinds: tuple[TensorKind, ...] = WITH_CLIP,
    frozen: tuple[str, ...] = (),
    attn: str | None = None,
    lora: LoraConfig | None = None,
    owner: Owner = SOLE,
    base: BaseForm = "auto",
    num_labels: int | None = None,
    media: MediaTraining = "off",
) -> HostModel:
    """Return the model of a folder, or of an id on the Hub, its weights in host memory.

    Of several ranks, each has what its `owner` owns. `frozen` are name patterns of params that are
    not trained; `attn` an attention implementation of transformers, None for its own choice; with
    `lora` new adapters are trained, and nothing else, over a model in the form of `base`. With
    `num_labels` a language model gets a new head that scores texts (models/classes.py): 1 for a
    reward, more for classes. `media`: what is trained of the towers of a joint model, if rows have
    media (models/towers.py). Raises
    ConfigError, ModelConfigError, UnsupportedModel, MissingPackage, DoesNotFit, ModelFolderError,
    WeightsFormatError, WeightsMismatch, HubError or DiskError, and CheckpointCorrupted for a folder
    with hashes of other bytes.
    """
    found = find_model(str(folder)).folder
    require_as_written(found, shown=owner.leads)
    model = read_model_folder(
        found,
        dtype=dtype,
        frozen=frozen,
        attn=attn,
        lora=lora,
        base=base,
        num_labels=num_labels,
        media=media,
    )
    return model.load(kinds, owner=owner)


def read_model_folder(
    folder: str | Path,
    *,
    dtype: Precision | None = None,
    frozen: tuple[str, ...] = (),
    attn: str | None = None,
    growth: Growth | None = None,
    rope: Mapping[str, Any] | None = None,
    lora: LoraConfig | None = None,
    start: AdapterFolder | None = None,
    base: BaseForm = "auto",
    trained_with: Mapping[str, Any] | None = None,
    num_labels: int | None = None,
    media: MediaTraining = "off",
) -> ModelFolder:
    """Return what a model folder holds besides weights. Its config is parsed once, here.

    A folder of adapters stands for the model that they belong to, with them. `lora` gives a model
    new adapters; `start` says what they start with; `base` is the form of the model under them,
    where auto is also the one that a folder of adapters records. `trained_with` are settings of
    adapters that PEFT's files do not keep: dropout where params are adapted, and fp32.

    `dtype` None is the folder's own, and `attn` may be `auto` too: the choice of transformers.
    With `growth` config and tokenizer have new tokens, with `rope` other rotary positions, with
    `num_labels` a language model has a new head that scores texts, which is trained whole beside
    adapters. `media`: what is trained of the towers of a joint model, if rows have media. Raises
    ConfigError if the tokens could not be trained, or the positions do not suit the model.
    """
    source = Path(folder)
    over: Path | None = source
    if is_adapter_folder(source):
        start = optional.folder.read_adapter_folder(source)
        given = read_config_bytes(optional.folder.config_folder(start))
        source = optional.folder.tokenizer_source(start)
        lora, over = replace(start.lora(), **(trained_with or {})), None
    else:
        given = read_config_bytes(source)
    given, trained_over = recorded(given)
    config_json, quantization = without_quantization(given)
    config_json, notes = as_family(config_json)
    carried = read_carried(source)  # refused now, and not by the export at the end of a run
    if growth is not None:
        config_json, carried = growth.config(config_json), growth.carried(carried)
    if rope is not None:
        config_json = with_rope(config_json, rope)
    new_head = False
    if num_labels is not None:
        new_head = not scores_texts(parse_config(config_json))
        config_json = with_labels(config_json, num_labels)
    if new_head and lora is not None:  # else it would stay at random, and be in no file
        lora = replace(lora, modules_to_save=tuple(dict.fromkeys((*lora.modules_to_save, SCORE))))
    config = parse_config(config_json)
    stored_dtype = config.dtype or text_part(config).dtype
    precision: Precision = "fp32" if stored_dtype is torch.float32 else "bf16"
    attn = None if attn == "auto" else attn
    decoder = build_decoder(config, dtype or precision, frozen, attn, lora, media)
    decoder = replace(decoder, eos_token_ids=named_ends(config, _generation_config(carried)))
    if growth is not None:
        growth.check(decoder)
    if rope is not None:
        require_rotary(decoder.model)
    model = ModelFolder(
        source=source,
        config_json=config_json,
        carried=carried,
        decoder=decoder,
        precision=precision,
        growth=growth,
        quantization=quantization,
        adapter=start,
        over=over,
        notes=tuple(notes),
        new_head=new_head,
    )
    return model.with_base(trained_over if base == "auto" and trained_over else base)


def _generation_config(carried: Mapping[str, bytes]) -> dict[str, Any]:
    """Return generation_config.json, empty if there is none. Raises ModelFolderError."""
    try:
        fields = json.loads(carried.get(GENERATION_NAME, b"{}"))
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{GENERATION_NAME} is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(fields, dict):
        raise ModelFolderError(f"{GENERATION_NAME} is a {type(fields).__name__}, not an object")
    return fields


def _start_head(decoder: Decoder, store: Store) -> None:
    """Write the values that a new head starts with, as far as its params are here."""
    for param in decoder.params:
        if param.name.startswith(f"{decoder.head_path}."):
            _start(store, param.name, partial(first_scores, param.shape, decoder.config))


def _start(store: Store, name: str, first: Callable[[], Tensor]) -> None:
    """Write the first values of a param, as far as it is here."""
    place = store.layout.places[name]
    if not place.owned:
        return
    values = first().view(-1)[place.owned.start : place.owned.stop]
    hi, split = store.param(name, TensorKind.HI).view(-1), place.has(TensorKind.LO)
    with store.changing(place.segment.block, TensorKind.LO) if split else nullcontext() as region:
        if split:
            split_into(values, hi, store.param(name, TensorKind.LO, region).view(-1))
        else:
            hi.copy_(values)


def _grown_before(decoder: Decoder) -> Growth | None:
    """Return the growth of a base whose tables adapters have whole, maybe with more rows."""
    saved = () if decoder.adapters is None else decoder.adapters.saved
    if not saved or not set(tables(decoder)) <= set(saved):
        return None
    return Growth(num_tokens=1, new_ids=(), files={})

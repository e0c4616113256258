"""The model of a run and its tokenizer: found, opened without weights, and then loaded.

New special tokens go from the tokenizer into the data, the model and exports. Adapters are new
ones, or those of a folder.

Law (tests/run/test_adapters.py): settings of the config for adapters of a folder are as the folder
has them, or a ConfigError names both.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.config import Config
from megatrain.data.chat.choice import exported_template
from megatrain.data.chat.masks import answer_ends
from megatrain.disk.hf.exported import require_as_written
from megatrain.disk.hf.folder import is_adapter_folder
from megatrain.disk.hf.growth import Growth
from megatrain.disk.hf.model import HostModel, ModelFolder
from megatrain.disk.hf.source_mark import source_mark
from megatrain.errors import CheckpointMismatch, ConfigError, ModelFolderError, listing
from megatrain.hub import find_model, folder_of
from megatrain.memory.kinds import TensorKind, kinds_on_disk
from megatrain.memory.placement import UNPLACED, Placement
from megatrain.memory.store import clone_weights
from megatrain.model_files import (
    CARRIED,
    GENERATION_NAME,
    TOKENIZER_NAME,
    VOCABULARY,
    is_lfs_pointer,
    lfs_pointer_text,
)
from megatrain.models.decoder import Decoder
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run.opening import optional
from megatrain.run.opening.recipe import router_aux_loss
from megatrain.run.opening.resumption import (
    LoadedCheckpoint,
    OpenedCheckpoint,
    kinds_of,
    read_model,
    resume,
)
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.disk.adapters.folder import AdapterFolder
    from megatrain.memory.tier.scratch_file import Scratch
    from megatrain.models.adapters.lora import Adapters, LoraConfig


def find_source(config: Config, found: OpenedCheckpoint | None, ranks: Ranks = ALONE) -> Path:
    """Return the folder with the run's config.json and tokenizer, fetched if it is on the Hub."""
    if found is not None:
        return found.model.source
    name, revision = config.model.name_or_path, config.model.revision
    return ranks.once_per_host(lambda: find_model(name, revision, "tokenizer")).folder


def open_tokenizer(
    config: Config, source: Path, notes: list[str], found: OpenedCheckpoint | None
) -> tuple[Any, Growth | None]:
    """Return the tokenizer of a run, and the tokens that its model does not have yet."""
    tokenizer = load_tokenizer(source)
    if found is not None:  # its model and tokenizer have them
        return tokenizer, None
    growth, more = add_tokens(tokenizer, config.model.add_tokens)
    notes += more
    return tokenizer, growth


def load_tokenizer(folder: str | Path) -> Any:
    """Return the tokenizer of a model folder. Raises ModelFolderError, whatever goes wrong."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not Path(folder).is_dir():
        raise ModelFolderError(f"{folder} is not a directory. Give the folder of a model.")
    _require_vocabulary(Path(folder))
    code = _tokenizer_code(Path(folder))
    if code is not None and not (Path(folder) / TOKENIZER_NAME).is_file():
        raise ModelFolderError(
            f"{folder}: its tokenizer is code in the folder ({code}), which is never run. Copy a "
            f"{TOKENIZER_NAME} with the same tokens to the folder: it is then read in place of the "
            "code. Copies of the model in the form of transformers have one; compare some texts."
        )
    try:
        if code is not None:
            return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        return AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raise some that are not an Exception
        raise ModelFolderError(
            f"{folder}: cannot read its tokenizer: {type(error).__name__}: {str(error)[:300]}"
        ) from error


def _tokenizer_code(folder: Path) -> str | None:
    """Return the class in the folder's own code that its tokenizer needs; None: it needs none."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    try:
        fields = json.loads((folder / "tokenizer_config.json").read_bytes())
        code, known = fields["auto_map"], str(fields.get("tokenizer_class"))
        named = code if isinstance(code, list) else code["AutoTokenizer"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None  # a file that is broken is refused by transformers, with the reason
    if any(tokenizer_class_from_name(name) for name in (known, known.removesuffix("Fast"))):
        return None
    return str(next(filter(None, named), named) if isinstance(named, list) else named)


def _require_vocabulary(folder: Path) -> None:
    """Raise ModelFolderError where transformers would make up an empty tokenizer, or hang."""
    found = sorted(folder.iterdir())
    for path in found:  # reading a pipe or a device might never return
        if CARRIED.fullmatch(path.name) and path.exists() and not path.is_file():
            raise ModelFolderError(f"{path} is not a regular file: refused")
    files = [path for path in found if VOCABULARY.fullmatch(path.name)]
    if not files:
        raise ModelFolderError(
            f"{folder} has no tokenizer.json, tokenizer.model or vocabulary. Copy the "
            "tokenizer files of the model to it."
        )
    for path in files:
        if path.is_file() and is_lfs_pointer(path):
            raise ModelFolderError(lfs_pointer_text(path))


def add_tokens(tokenizer: Any, tokens: Sequence[str]) -> tuple[Growth | None, list[str]]:
    """Add tokens to the tokenizer; return the growth of the model, and notes.

    None: it has all of them already. Raises ConfigError for one that cannot be a token.
    """
    known = {token: number for token, number in tokenizer.get_vocab().items() if token in tokens}
    notes = [f"model.add_tokens: {t} already is token {n}" for t, n in sorted(known.items())]
    num_tokens = len(tokenizer)
    new = [token for token in dict.fromkeys(tokens) if token not in known]
    tokenizer.add_tokens(new, special_tokens=True)
    ids = [int(tokenizer.convert_tokens_to_ids(token)) for token in new]
    for token, number in zip(new, ids, strict=True):
        if number < num_tokens or tokenizer.encode(token, add_special_tokens=False) != [number]:
            raise ConfigError(f"model.add_tokens: the tokenizer cannot have {token!r} as a token")
    if not new:
        return None, notes
    notes.append(f"new tokens: {', '.join(f'{t} {n}' for t, n in zip(new, ids, strict=True))}")
    return Growth(
        num_tokens=num_tokens, new_ids=tuple(ids), files=_tokenizer_files(tokenizer)
    ), notes


def _tokenizer_files(tokenizer: Any) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = [path for path in Path(folder).iterdir() if CARRIED.fullmatch(path.name)]
        return {path.name: path.read_bytes() for path in paths}


def open_model(
    config: Config, source: Path, growth: Growth | None, found: OpenedCheckpoint | None
) -> ModelFolder:
    """Return the model of a run without its weights, checked against the config."""
    if found is None:
        require_no_adapters(config, source)
        rope, (lora, start) = config.model.rope, adapters_of(config)
        positions = None if rope is None else rope.parameters()
        model = read_model(config, source, growth, positions, lora, start)
    else:
        model = found.model
        if model.decoder.adapters is not None:  # the plan asks how its base is stored
            name, revision = config.model.name_or_path, config.model.revision
            model = model.with_base(config.model.base, find_model(name, revision, "config").folder)
    router_aux_loss(config, model.decoder)
    return model


def with_answer_end(
    config: Config, model: ModelFolder, tokenizer: Any, notes: list[str]
) -> ModelFolder:
    """Return the model with the tokens that its rows teach it to end an answer with.

    Folders of base models do not name them: what is trained would never stop where it is served.
    """
    ends = answer_ends(tokenizer, config.data.template_kwargs)
    if not (ends := [end for end in ends if end not in model.decoder.eos_token_ids]):
        return model
    word = " or ".join(map(tokenizer.convert_ids_to_tokens, ends))
    if model.decoder.adapters is None:
        told = f"it ends texts here, and {GENERATION_NAME} of the exported model names it"
    else:
        told = "it ends texts here. Served over their base, adapters need it as a stop token"
    notes.append(
        f"the chat template ends an answer with {word}, no end for the model's folder: {told}"
    )
    for end in ends:
        model = model.with_end(end)
    return model


def require_no_adapters(config: Config, source: Path) -> None:
    """Raise ConfigError if what the config calls a model is a folder of adapters."""
    if is_adapter_folder(source):
        raise ConfigError(
            f"model.name_or_path is {config.model.name_or_path}, a folder of adapters. To train "
            f"them further, set lora.path to it, and model to the model that they belong to: "
            f"{optional.folder.read_adapter_folder(source).config.base}."
        )


def adapters_of(config: Config) -> tuple[LoraConfig | None, AdapterFolder | None]:
    """Return the adapters that a new run trains, and the folder that they start from.

    None and None: the model itself is trained. Raises ConfigError, or what `read_adapter_folder`
    does.
    """
    lora = config.lora
    if lora.path is not None:
        start = optional.folder.read_adapter_folder(folder_of(lora.path))
        return _as_in_folder(config, start), start
    if lora.rank is None:
        return None, None
    new = optional.lora.LoraConfig(
        rank=lora.rank,
        alpha=2 * lora.rank if lora.alpha is None else lora.alpha,
        dropout=lora.dropout,
        target_modules=lora.targets,
        target_parameters=lora.experts,
        ranks=tuple(lora.rank_pattern.items()),
        alphas=tuple(lora.alpha_pattern.items()),
        rslora=lora.rslora,
        modules_to_save=lora.modules_to_save,
        dora=lora.dora,
        fp32=lora.dtype == "fp32",
        seed=config.train.seed,
    )
    return new, None


def _as_in_folder(config: Config, start: AdapterFolder) -> LoraConfig:
    """Return the adapters of a folder. Raises ConfigError if the config has other settings."""
    found, lora = start.lora(), config.lora
    asked = {"rank": lora.rank, "alpha": lora.alpha, "rslora": lora.rslora or None}
    asked["dora"] = lora.dora or None
    for key, value in asked.items():
        if value is not None and value != getattr(found, key):
            raise ConfigError(
                f"lora.{key} is {value}, but the adapters in {lora.path} have "
                f"{getattr(found, key)}. Remove lora.{key}, or start without lora.path."
            )
    return replace(found, dropout=lora.dropout, fp32=lora.dtype == "fp32")


def load_home(
    config: Config,
    settings: StepSettings,
    model: ModelFolder,
    tokenizer: Any,
    found: OpenedCheckpoint | None,
    ranks: Ranks = ALONE,
    placement: Placement = UNPLACED,
) -> tuple[HostModel, LoadedCheckpoint | None]:
    """Return the model with its tensors, and the checkpoint that has them, if it is one.

    A rank has only the part that it owns. Everything else is cheaper to find wanting. Folders that
    have hashes beside them are compared with these first. Raises what `load_model` does.
    """
    kinds, resumed = kinds_of(config, settings), None
    scratch = scratch_of(config, settings, kinds)
    if found is None:
        name, start = config.model.name_or_path, config.lora.path
        source = ranks.once_per_host(lambda: find_model(name, config.model.revision)).folder
        _require_as_written(ranks, source, *([] if start is None else [folder_of(start)]))
        home = ranks.long_work(lambda: model.load(kinds, scratch, ranks.owner, placement))
    else:
        home = _unfilled(config, kinds, model, found, scratch, ranks, placement)
    try:
        if config.keeps_reference:
            home = replace(home, reference=clone_weights(home.store, placement))
        if found is not None:
            resumed = resume(found.among, config, home, ranks)
    except BaseException:
        home.store.close()
        raise
    template = exported_template(tokenizer, config.data.chat_template)
    return replace(home, carried={**home.carried, **template}), resumed


def _unfilled(
    config: Config,
    kinds: tuple[TensorKind, ...],
    model: ModelFolder,
    found: OpenedCheckpoint,
    scratch: Scratch | None,
    ranks: Ranks,
    placement: Placement,
) -> HostModel:
    """Return the model with what a checkpoint does not have of it.

    That is the base under adapters, or the weights that the run began with.
    """
    if model.decoder.adapters is None and not config.keeps_reference:
        return model.empty(kinds, scratch, ranks.owner, placement)
    name, revision = config.model.name_or_path, config.model.revision
    base = ranks.once_per_host(lambda: find_model(name, revision)).folder
    require_same_base(base, found.known.source_mark)
    _require_as_written(ranks, base)
    if config.keeps_reference:  # the folder knows nothing of tokens that the run has added
        growth, _ = add_tokens(load_tokenizer(base), config.model.add_tokens)
        model = replace(model, growth=growth)
    return ranks.long_work(lambda: model.load(kinds, scratch, ranks.owner, placement, base=base))


def require_same_base(base: Path, mark: str | None) -> None:
    """Raise CheckpointMismatch unless a folder has the weights that the run began with."""
    if source_mark(base) != mark:
        raise CheckpointMismatch(
            f"{base} has changed since the run began: its config or its weights differ, and the "
            "run needs the weights that were there, under its adapters or as the reference of "
            "loss.kl. Restore them, or start a new run with another save.dir."
        )


def _require_as_written(ranks: Ranks, *folders: Path) -> None:
    """Compare folders that have hashes beside them with these, once on each host."""

    def check() -> None:
        for folder in folders:
            require_as_written(folder, shown=ranks.leads)

    ranks.on_each_host(check)


def scratch_of(
    config: Config, settings: StepSettings, kinds: tuple[TensorKind, ...]
) -> Scratch | None:
    """Return where the plan's disk tier goes; None if the run has none."""
    folder = config.memory.disk
    on_disk = kinds_on_disk(kinds, settings.tier)
    if folder is None or not on_disk:
        return None
    return optional.scratch_file.Scratch(folder=Path(folder), kinds=on_disk)


def _beside_params(adapters: Adapters) -> str:
    if not adapters.params:
        return ""
    without = ", these without dropout" if adapters.lora.dropout else ""
    return f" and {len(adapters.params)} params of experts or other modules{without}"


def adapter_notes(decoder: Decoder) -> list[str]:
    """Return what is trained in place of the model, and what of its layers has no adapter."""
    adapters = decoder.adapters
    if adapters is None:
        return []
    trained = sum(param.num_elements for param in decoder.params if param.trained)
    note = (
        f"lora: rank {adapters.lora.rank} beside {len(adapters.modules)} linear modules"
        f"{_beside_params(adapters)}, {trained:,} trained params; the model is frozen"
    )
    narrow = [param for param in decoder.params if param.form]
    if narrow:
        size = sum(param.stored_elements for param in narrow)
        count = sum(param.num_elements for param in narrow)
        methods = sorted({matrices.method for param in narrow for matrices in param.form})
        note += (
            f"; {count:,} of its params are kept in {' and '.join(methods)}, "
            f"{size / count:.2f} bytes each"
        )
    if adapters.left_out:
        note += f". Without an adapter: {listing(adapters.left_out)}"
    if not adapters.params and optional.lora.has_shared_experts(decoder.model, decoder.layers_path):
        note += ". lora.experts: true adapts experts, too"
    notes = [note]
    if lost := optional.peft_targets.not_loaded_by_peft(decoder):
        notes.append(
            f"lora: PEFT 0.21 does not load the adapters of {len(lost)} modules "
            f"({listing(lost, most=2)}), because it renames them. Export the result with --merge, "
            "or choose lora.targets without them"
        )
    return notes

"""The adapters of a run, as its config describes them: new ones, or those of a folder.

Law (tests/run/test_adapters.py): what the config says of a folder's adapters is as the
folder has it, or a ConfigError names both.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatrain.config import Config
from megatrain.disk.adapters.folder import AdapterFolder, is_adapter_folder, read_adapter_folder
from megatrain.disk.adapters.peft_targets import not_loaded_by_peft
from megatrain.disk.hf.source_mark import source_mark
from megatrain.errors import CheckpointMismatch, ConfigError, listing
from megatrain.models.adapters.lora import Lora
from megatrain.models.decoder import Decoder


def adapters_of(config: Config) -> tuple[Lora | None, AdapterFolder | None]:
    """Return the adapters that a new run trains, and the folder that they start from.

    None and None: the model itself is trained. Raises ConfigError, or what `read_adapter_folder`
    does.
    """
    lora = config.lora
    if lora.path is not None:
        start = read_adapter_folder(Path(lora.path))
        return _as_in(config, start), start
    if lora.rank is None:
        return None, None
    new = Lora(
        rank=lora.rank,
        alpha=2 * lora.rank if lora.alpha is None else lora.alpha,
        dropout=lora.dropout,
        targets=lora.targets,
        rslora=lora.rslora,
        seed=config.train.seed,
    )
    return new, None


def _as_in(config: Config, start: AdapterFolder) -> Lora:
    """Return the adapters of a folder. Raises ConfigError if the config has other settings."""
    found, lora = start.lora(), config.lora
    asked = {"rank": lora.rank, "alpha": lora.alpha, "rslora": lora.rslora or None}
    for key, value in asked.items():
        if value is not None and value != getattr(found, key):
            raise ConfigError(
                f"lora.{key} is {value}, but the adapters in {lora.path} have "
                f"{getattr(found, key)}. Remove lora.{key}, or start without lora.path."
            )
    return replace(found, dropout=lora.dropout)


def require_no_adapters(config: Config, source: Path) -> None:
    """Raise ConfigError if what the config calls a model is a folder of adapters."""
    if is_adapter_folder(source):
        raise ConfigError(
            f"model.name_or_path is {config.model.name_or_path}, a folder of adapters. To train "
            f"them further, set lora.path to it, and model to the model that they belong to: "
            f"{read_adapter_folder(source).config.base}."
        )


def require_same_base(base: Path, mark: str | None) -> None:
    """Raise CheckpointMismatch unless a folder has the weights that the adapters belong to."""
    if source_mark(base) != mark:
        raise CheckpointMismatch(
            f"{base} has changed since the run began: its config or its weights differ, and the "
            "adapters of the checkpoint belong to the weights that were there. Restore them, or "
            "start a new run with another save.dir."
        )


def adapter_notes(decoder: Decoder) -> list[str]:
    """Return what is trained in place of the model, and what of its layers has no adapter."""
    adapters = decoder.adapters
    if adapters is None:
        return []
    trained = sum(param.num_elements for param in decoder.params if param.trained)
    note = (
        f"lora: rank {adapters.lora.rank} beside {len(adapters.modules)} linear modules, "
        f"{trained:,} trained params; the model is frozen"
    )
    if adapters.left_out:
        note += f". Without an adapter: {listing(adapters.left_out)}"
    notes = [note]
    if lost := not_loaded_by_peft(decoder):
        notes.append(
            f"lora: PEFT 0.21 does not load the adapters of {len(lost)} modules "
            f"({listing(lost, most=2)}), because it renames them. Export the result with --merge, "
            "or choose lora.targets without them"
        )
    return notes

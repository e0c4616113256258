"""What the ranks of a run start from: the same model and the same adapters, or none of them trains.

Each host may have its own folder under one name, and one of them may be stale. A rank loads only
the part that it owns, so ranks with two models would train a mixture of both, and save it with
hashes that match.

Law (tests/run/opening/test_same_start.py): models or adapters that differ between ranks are a
ConfigError on all of them, which names the setting, the marks and the ranks, before rows are read.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

from megatrain.config import Config
from megatrain.disk.adapters.folder import is_adapter_folder, read_adapter_folder
from megatrain.disk.hf.source_mark import mark_of_tensors, tensor_mark
from megatrain.ranks.ranks import Ranks
from megatrain.run.opening.resumption import OpenedCheckpoint


def require_same_start(ranks: Ranks, config: Config, found: OpenedCheckpoint | None) -> None:
    """Raise ConfigError unless all ranks read the same weights besides those of a checkpoint.

    A resumed run reads its weights from the run folder, which all ranks share, and from elsewhere
    only the model under its adapters.
    """
    names: dict[str, str] = {}
    if found is None or found.model.decoder.adapters is not None:
        names["model.name_or_path"] = config.model.name_or_path
    if found is None and config.lora.path is not None:
        names["lora.path"] = config.lora.path
    marks = partial(_marks, names, config.model.revision)
    ranks.require_same(lambda: ranks.long_work(marks))


def _marks(names: dict[str, str], revision: str | None) -> dict[str, str]:
    """Return what each name leads to: the mark of a folder, or a commit of the Hub."""
    return {
        f"{key} ({name})": folder_mark(Path(name)) if Path(name).is_dir() else f"commit {revision}"
        for key, name in names.items()
    }


def folder_mark(folder: Path) -> str:
    """Return the mark of the model or the adapters in a folder.

    Raises ModelFolderError, ModelConfigError, WeightsFormatError, WeightsMismatch or DiskError.
    """
    if not is_adapter_folder(folder):
        return f"mark {tensor_mark(folder)}"
    adapters = read_adapter_folder(folder)
    about = json.dumps(asdict(adapters.lora())).encode()
    return f"mark {mark_of_tensors(about, adapters.tensors)}"

"""Commands for checkpoints: save one now, verify the existing ones."""

from __future__ import annotations

import time
from pathlib import Path

from megatrain.config import load_config
from megatrain.config.load import file_of_run
from megatrain.disk.checkpoint.manifest import MANIFEST_NAME
from megatrain.disk.checkpoint.restore import verify
from megatrain.disk.checkpoint.retention import finished
from megatrain.disk.checkpoint.save import FOLDERS as PARTS
from megatrain.disk.hf.folder import is_adapter_folder
from megatrain.errors import CheckpointCorrupted, RunFolderError
from megatrain.memory.ledger import gib
from megatrain.models.config_json import CONFIG_NAME
from megatrain.run.folder import FOLDER, ask_for_save, is_run


def save_now(run: Path, wait_s: float) -> str:
    """Ask the process that trains in a run folder for a checkpoint; wait until it is written."""
    parent = run / FOLDER
    before = set(finished(parent))
    ask_for_save(run)
    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        if new := [path for path in finished(parent) if path not in before]:
            return f"saved in {new[0]}\n{_how_long(run)}"
        time.sleep(0.2)
    raise RunFolderError(
        f"{run}: requested a checkpoint, but none appeared in {wait_s:g} s. It is written after "
        "the current step; see events.jsonl there."
    )


def _how_long(run: Path) -> str:
    keep = load_config(file_of_run(run)).save.keep
    newer = "one newer checkpoint exists" if keep == 1 else f"{keep} newer checkpoints exist"
    return (
        f"save.keep is {keep}: it is deleted once {newer}. To keep it longer, copy it or run "
        "`megatrain export`."
    )


def verify_checkpoints(path: Path) -> str:
    """Check every byte of a checkpoint, or of all of a run; return a summary."""
    if not path.is_dir():
        raise RunFolderError(f"{path}: no such folder")
    if (path / FOLDER).is_dir():
        folders = finished(path / FOLDER)
    else:
        folders = [] if is_run(path) else [path]
        if path.name == FOLDER and is_run(path.parent):
            raise RunFolderError(f"{path} has the checkpoints of a run. Give {path.parent}.")
        is_model = is_adapter_folder(path) or (path / CONFIG_NAME).exists()
        if folders and is_model and not (path / MANIFEST_NAME).exists():
            raise RunFolderError(
                f"{path} is a model, not a checkpoint or a run folder. Give one of those; a model "
                "that has hashes beside it is compared with them by each command that reads it."
            )
        if folders and not any((path / name).exists() for name in (MANIFEST_NAME, *PARTS)):
            raise RunFolderError(
                f"{path} is neither a run folder nor a checkpoint: it has no {MANIFEST_NAME}"
            )
    if not folders:
        raise CheckpointCorrupted(f"{path}: no complete checkpoint here")
    lines, damaged = [], 0
    for folder in folders:
        try:
            manifest = verify(folder)
            lines.append(
                f"{folder.name}: complete, step {manifest.step}, {len(manifest.files)} files, "
                f"{gib(manifest.num_bytes)}"
            )
        except CheckpointCorrupted as error:
            damaged += 1
            lines.append(f"{folder.name}: DAMAGED: {error}")
    if damaged:
        raise CheckpointCorrupted("\n".join([*lines, f"{damaged} of {len(folders)} damaged"]))
    return "\n".join(lines)

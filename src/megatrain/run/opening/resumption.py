"""Resuming: the newest checkpoint that verifies, if it belongs to this run.

One table below has the settings that may change between stop and resume. Every change is printed.
A damaged checkpoint is skipped, with a message; one of another model, data or
version is refused, because it is not damage but a mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.config import Config
from megatrain.disk.checkpoint.manifest import Manifest, read_manifest
from megatrain.disk.checkpoint.parts import checkpoint_parts
from megatrain.disk.checkpoint.restore import restore
from megatrain.disk.checkpoint.retention import finished, step_of
from megatrain.disk.hf.growth import Growth
from megatrain.disk.hf.model import HostModel, ModelFolder, read_model_folder
from megatrain.disk.hf.source_mark import source_mark
from megatrain.errors import CheckpointDamaged, CheckpointMismatch, DiskError
from megatrain.memory.direct import digests
from megatrain.memory.host import resident_bytes
from megatrain.memory.kinds import Kind, store_kinds
from megatrain.models.config_json import CONFIG_NAME
from megatrain.optim.states import STATES
from megatrain.run.state import RunState, as_count, as_loss
from megatrain.step.settings import CHUNK_TOKENS

FIXED = {
    "model": ("dtype", "frozen", "add_tokens"),
    "data": (
        "max_length",
        "overlong",
        "train_on",
        "template_kwargs",
        "chat_template",
        "packing",
        "shuffle",
        "seed",
    ),
    "train": ("batch_rows", "seed"),
}
"""What must stay. The rows themselves are known by the mark of their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The state of a run in a checkpoint, besides tensors."""

    state: RunState
    num_updates: dict[int, int]
    """By block."""
    data: dict[str, Any]
    lines: dict[str, int]
    """How long the step's files were."""
    micro_batch_tokens: int
    learning_rate: float | None = None
    """Of the last step."""
    source_mark: str | None = None
    """Of the model folder that the run began with."""
    chunk_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """A model from a checkpoint, and the record of its run."""

    home: HostModel
    manifest: Manifest
    known: RunRecord
    path: Path
    base_bytes: int
    """What the process held before this model."""
    skipped: list[str] = field(default_factory=list)
    """Why newer checkpoints are skipped."""
    damaged: list[Path] = field(default_factory=list)
    """Those checkpoints."""
    changed: list[str] = field(default_factory=list)
    """Settings that are not as they were."""


def kinds_of(config: Config) -> tuple[Kind, ...]:
    """Return what the store of a run holds: gradients too, if updates wait for the norm."""
    states = STATES[config.optim.name]["fp32"]
    return store_kinds(states, waits=config.train.max_grad_norm is not None)


def read_model(config: Config, folder: Path, growth: Growth | None = None) -> ModelFolder:
    """Return the model in `folder`, without weights, as the config wants it."""
    model = config.model
    return read_model_folder(
        folder, dtype=model.dtype, frozen=model.frozen, attn=model.attn, growth=growth
    )


def find_checkpoint(config: Config, folder: Path, *, resumes: bool) -> LoadedCheckpoint | None:
    """Return the newest complete checkpoint, loaded, of a run that `resumes`; None without one."""
    return resume(folder, config, kinds_of(config)) if resumes else None


def resume(
    folder: Path, config: Config, kinds: tuple[Kind, ...], into: HostModel | None = None
) -> LoadedCheckpoint | None:
    """Return the newest complete checkpoint of `folder`, loaded; None if no save finished.

    It is loaded `into` a model whose weights are unused now, or else into a new one.
    Raises CheckpointDamaged if there are some and none is complete, and CheckpointMismatch.
    """
    candidates, base_bytes = finished(folder), resident_bytes()
    skipped: list[str] = []
    damaged: list[Path] = []
    for path in candidates:
        try:
            manifest = read_manifest(path)
            if manifest.step != step_of(path):
                raise CheckpointDamaged(f"{path} has step {manifest.step}: its files were mixed up")
            changed, known = changed_settings(config, manifest), known_of(manifest)
            require_same_model(config, manifest, known.source_mark)
            home = into or _opened(path, manifest, config, kinds)
            restore(path, manifest, checkpoint_parts(home))
        except (CheckpointDamaged, DiskError) as error:  # a sector that cannot be read is damage
            skipped.append(str(error))
            damaged.append(path)
            continue
        return LoadedCheckpoint(
            home=home,
            manifest=manifest,
            known=known,
            path=path,
            base_bytes=base_bytes,
            skipped=skipped,
            damaged=damaged,
            changed=changed,
        )
    if skipped:
        reasons = "\n  ".join(skipped)
        raise CheckpointDamaged(
            f"{folder}: none of {len(skipped)} checkpoints is complete:\n  {reasons}\n"
            "Restore one from a backup, or remove the folder to start again."
        )
    return None


def known_of(manifest: Manifest) -> RunRecord:
    """Return the state of the run in a manifest. Raises CheckpointMismatch if it is invalid.

    The manifest is untrusted input, and another version may have written other fields.
    """
    training = manifest.training
    try:
        state = RunState.from_json(training["run"])
        known = RunRecord(
            state=state,
            num_updates={as_count(block): as_count(n) for block, n in training["num_updates"]},
            data={
                "order": str(training["data"]["order"]),
                **{name: as_count(training["data"][name]) for name in ("epoch", "window", "row")},
            },
            lines={str(name): as_count(size) for name, size in training["lines"].items()},
            micro_batch_tokens=as_count(training["micro_batch_tokens"]),
            chunk_tokens=as_count(training.get("chunk_tokens", CHUNK_TOKENS)),
            learning_rate=as_loss(training.get("learning_rate")),
            source_mark=_as_text(training.get("source_mark")),
        )
        if state.step != manifest.step:
            raise ValueError(f"step {state.step} of a run in a checkpoint of step {manifest.step}")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointMismatch(
            "the checkpoint has a state of another version: "
            f"{type(error).__name__} {str(error)[:100]}"
        ) from None
    return known


def _as_text(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is not text")
    return value


def require_same_model(config: Config, manifest: Manifest, mark: str | None) -> None:
    """Raise CheckpointMismatch if the config names a model that the run did not begin with."""
    before, now = manifest.training["config"].get("model"), config.model.name_or_path
    old = before.get("name_or_path") if isinstance(before, Mapping) else None
    if old == now or (mark is not None and source_mark(Path(now)) == mark):
        return
    raise CheckpointMismatch(
        f"model.name_or_path was {str(old)[:200]} and is {now}, which is another model: its config "
        "or its weights differ. A resumed run continues with its own weights. To train the other "
        "model, set save.dir to another folder; to continue this run, give its own model."
    )


def changed_settings(config: Config, manifest: Manifest) -> list[str]:
    """Return what changed since the checkpoint. Raises CheckpointMismatch for what may not."""
    before = manifest.training.get("config")
    if not isinstance(before, Mapping):
        raise CheckpointMismatch("the checkpoint has no settings")
    now = config.model_dump(mode="json")
    changed: list[str] = []
    refused: list[str] = []
    for section, values in now.items():
        old = before.get(section)
        old = old if isinstance(old, Mapping) else {}
        for key, value in values.items():
            if old.get(key) == value:
                continue
            text = f"{section}.{key}: {str(old.get(key))[:100]} -> {value}"
            (refused if key in FIXED.get(section, ()) else changed).append(text)
    if refused:
        raise CheckpointMismatch(
            "a resumed run must keep these settings. Restore them, or use another save.dir:\n  "
            + "\n  ".join(refused)
        )
    return changed


def _opened(path: Path, manifest: Manifest, config: Config, kinds: tuple[Kind, ...]) -> HostModel:
    """Return the checkpoint's model without weights; its small files are checked before use."""
    for name, record in manifest.files.items():
        if not name.startswith("model/") or name.endswith(".safetensors"):
            continue
        try:
            data = (path / name).read_bytes()
        except OSError as error:
            raise CheckpointDamaged(f"{path / name}: {error.strerror}") from None
        if record.digests != digests(data):
            raise CheckpointDamaged(f"{path / name} does not match its hash")
    if f"model/{CONFIG_NAME}" not in manifest.files:
        raise CheckpointDamaged(f"{path} has no {CONFIG_NAME}")
    return read_model(config, path / "model").empty(kinds)

"""Resuming: the newest checkpoint that verifies, if it belongs to this run.

`find_checkpoint` reads its small files, which is enough to plan the run; `resume` reads its tensors
into the store that the plan asks for.

One table below has the settings that may change between stop and resume. Every change is printed.
A damaged checkpoint is skipped, with a message; one of another model, data or
version is refused, because it is not damage but a mistake. One that the system does not read, after
some tries, is skipped with a message too, and it stays: its bytes may be right.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

from megatrain.choices import StateDtype
from megatrain.config import Config
from megatrain.config.sections import LossSettings
from megatrain.disk.checkpoint.manifest import Manifest, read_manifest
from megatrain.disk.checkpoint.parts import checkpoint_parts
from megatrain.disk.checkpoint.restore import restore
from megatrain.disk.checkpoint.retention import finished, step_of
from megatrain.disk.checkpoint.retried import retried
from megatrain.disk.hf.model import HostModel, ModelFolder, read_model_folder
from megatrain.disk.hf.source_mark import source_mark
from megatrain.errors import (
    CheckpointCorrupted,
    CheckpointMismatch,
    DiskError,
    DiskFull,
    ModelFolderError,
    WeightsFormatError,
    WeightsMismatch,
)
from megatrain.memory.direct import digests
from megatrain.memory.kinds import TensorKind, store_kinds
from megatrain.models.config_json import CONFIG_NAME
from megatrain.optim.states import STATES, state_among
from megatrain.planning.levers import KEPT
from megatrain.planning.levers.lever import as_optional_tokens
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run.opening import optional
from megatrain.run.state import RunState, as_count, as_loss
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.disk.adapters.folder import AdapterFolder
    from megatrain.disk.checkpoint.conversion import Conversion
    from megatrain.disk.hf.growth import Growth
    from megatrain.models.adapters.lora import LoraConfig

T = TypeVar("T")

FIXED = {
    "model": ("dtype", "base", "frozen", "media", "add_tokens", "rope"),
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
    "optim": ("name", "momentum"),
    "loss": tuple(LossSettings.model_fields),
    "rollouts": (
        "samples",
        "max_new_tokens",
        "temperature",
        "iterations",
        "mask_truncated",
        "environment",
    ),
    "lora": (
        "rank",
        "alpha",
        "dropout",
        "targets",
        "experts",
        "rank_pattern",
        "alpha_pattern",
        "rslora",
        "modules_to_save",
        "dora",
        "dtype",
        "path",
    ),
}
"""Settings that must stay. The rows themselves are known by the mark of their order."""
DECIDED_ONCE = ("batch_tokens", "packing", "learning_rate")
"""Keys that are decided when a run begins, and then kept where the config has `auto`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The state of a run in a checkpoint, besides tensors."""

    state: RunState
    num_updates: dict[int, int]
    """Updates applied so far, per block."""
    data: dict[str, Any]
    lines: dict[str, int]
    """Lengths of the files that have a line per step, by name."""
    batch_tokens: int | None
    """Tokens of a step; None: a step is counted in rows."""
    packing: bool
    peak_rate: float
    """The learning rate of the config."""
    state_dtype: StateDtype
    """The `optim.state` of the states that are saved."""
    kept: dict[str, Any]
    """The StepSettings that the bits of the run depend on, by name."""
    learning_rate: float | None
    """Learning rate of the last step; None: there was none yet."""
    source_mark: str | None
    """Mark of the model folder that the run began with; None: it could not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedCheckpoint:
    """A checkpoint whose small files are correct: enough to plan with, before memory is taken."""

    model: ModelFolder
    known: RunRecord
    among: Path
    """The folder with all checkpoints of the run: if this one is damaged, an older one is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """A checkpoint whose tensors are in the store."""

    manifest: Manifest
    known: RunRecord
    path: Path
    skipped: list[str] = field(default_factory=list)
    """Why newer checkpoints are skipped."""
    damaged: list[Path] = field(default_factory=list)
    """Newer checkpoints that have a byte other than was written, or lack one."""
    unreadable: list[Path] = field(default_factory=list)
    """Newer checkpoints that the system did not read: they may be whole."""
    refused: list[Path] = field(default_factory=list)
    """Newer checkpoints that the caller does not want."""
    changed: list[str] = field(default_factory=list)
    """Settings that are not as they were."""
    converted: list[str] = field(default_factory=list)
    """Conversions of the optimizer's states from those that were saved."""


def kinds_of(config: Config, settings: StepSettings) -> tuple[TensorKind, ...]:
    """Return the kinds in the store of a run: gradients too, if they wait for the norm."""
    states = STATES[config.optim.name][settings.state]
    return store_kinds(states, waits=settings.update == "late")


def read_model(
    config: Config,
    folder: Path,
    growth: Growth | None = None,
    rope: Mapping[str, Any] | None = None,
    lora: LoraConfig | None = None,
    start: AdapterFolder | None = None,
) -> ModelFolder:
    """Return the model in `folder`, without weights, as the config wants it.

    A checkpoint has new tokens, scaled positions and adapters already: it is read without.
    """
    model = config.model
    return read_model_folder(
        folder,
        dtype=model.dtype,
        frozen=model.frozen,
        attn=model.attn,
        growth=growth,
        rope=rope,
        lora=lora,
        start=start,
        base=model.base,
        trained_with={"dropout": config.lora.dropout, "fp32": config.lora.dtype == "fp32"},
    )


def find_checkpoint(
    config: Config, folder: Path, *, ranks: Ranks = ALONE
) -> OpenedCheckpoint | None:
    """Return the newest checkpoint in a folder, without tensors; None without one.

    Raises CheckpointCorrupted if there are some and none can be opened, DiskError if it may be that
    they only cannot be read now, and CheckpointMismatch.
    """

    def opened(path: Path, manifest: Manifest, known: RunRecord) -> OpenedCheckpoint:
        changed_settings(config, manifest)
        require_same_model(config, manifest, known.source_mark)
        _require_small_files(path, manifest)
        try:
            model = read_model(config, path / "model")
        except (ModelFolderError, WeightsFormatError, WeightsMismatch) as error:
            raise CheckpointCorrupted(f"{path}: {error}") from error  # the header of a file is read
        return OpenedCheckpoint(model=model, known=known, among=folder)

    found = _newest(folder, opened, ranks)
    return None if found is None else found[0]


def resume(
    folder: Path,
    config: Config,
    home: HostModel,
    ranks: Ranks = ALONE,
    *,
    wants: Callable[[RunRecord], bool] = lambda known: True,
) -> LoadedCheckpoint | None:
    """Fill `home` from the newest complete checkpoint of `folder` that the caller `wants`.

    None: no save finished, or it does not want those that are complete. If one rank finds damage,
    all ranks take an older checkpoint.

    Raises CheckpointCorrupted if there are some and none is complete, DiskError if it may be that
    they only cannot be read now, and CheckpointMismatch.
    """

    def loaded(path: Path, manifest: Manifest, known: RunRecord) -> LoadedCheckpoint:
        changed = changed_settings(config, manifest)
        require_same_model(config, manifest, known.source_mark)
        conversion = conversion_of(config, known, home)
        restore(path, manifest, checkpoint_parts(home), conversion)
        return LoadedCheckpoint(
            manifest=manifest,
            known=known,
            path=path,
            changed=changed,
            converted=[] if conversion is None else [_in_words(config, known)],
        )

    found = _newest(folder, loaded, ranks, wants)
    if found is None:
        return None
    checkpoint, passed = found
    return replace(
        checkpoint,
        skipped=[one.reason for one in passed if one.reason],
        damaged=[one.path for one in passed if one.is_damaged],
        unreadable=[one.path for one in passed if one.reason and not one.is_damaged],
        refused=[one.path for one in passed if not one.reason],
    )


def conversion_of(config: Config, known: RunRecord, home: HostModel) -> Conversion | None:
    """Return how the states of a checkpoint become those of the store; None: they are the same."""
    saved, wanted = known.state_dtype, state_among(config.optim.name, home.store.kinds)
    if saved == wanted:
        return None
    return optional.conversion.Conversion(
        layout=home.store.layout,
        saved=STATES[config.optim.name][saved],
        wanted=STATES[config.optim.name][wanted],
        seed=config.train.seed,
        num_updates=known.num_updates,
    )


def _in_words(config: Config, known: RunRecord) -> str:
    return f"converted the optimizer's states from {known.state_dtype} to {config.optim.state}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passed:
    """A checkpoint that is not used."""

    path: Path
    reason: str
    """The fault of the checkpoint; empty: the caller does not want it."""
    is_damaged: bool


def _newest(
    folder: Path,
    use: Callable[[Path, Manifest, RunRecord], T],
    ranks: Ranks,
    wants: Callable[[RunRecord], bool] = lambda known: True,
) -> tuple[T, list[_Passed]] | None:
    """Return what `use` makes of the newest checkpoint that it can, and those that are newer.

    Rank 0 says which there are. None: there is none, or none but those that the caller does not
    want. Raises CheckpointCorrupted if all are damaged, and DiskError if some may be whole and
    cannot be read.
    """
    passed: list[_Passed] = []
    names = ranks.decide(lambda: [path.name for path in finished(folder)])
    for path in [folder / name for name in names]:
        result, failure = ranks.long_work(partial(_tried, path, use, wants))
        failures = [said["failure"] for said in ranks.agree({"failure": failure})]
        # Damage that one rank finds is damage, whatever the others could not read.
        found = sorted((one for one in failures if one is not None), key=lambda one: not one[1])
        if not found:
            assert result is not None
            return result, passed
        reason, is_damaged = found[0]
        passed.append(_Passed(path=path, reason=reason, is_damaged=is_damaged))
    if not all(one.reason for one in passed) or not passed:
        return None
    reasons = "\n  ".join(one.reason for one in passed)
    if all(one.is_damaged for one in passed):
        raise CheckpointCorrupted(
            f"{folder}: none of {len(passed)} checkpoints is complete:\n  {reasons}\n"
            "Restore one from a backup, or remove the folder to start again."
        )
    raise DiskError(
        f"{folder}: none of {len(passed)} checkpoints can be used:\n  {reasons}\n"
        "Those that cannot be read may be whole, and nothing was deleted. Run the same command "
        "again when the file system answers."
    )


def _tried(
    path: Path,
    use: Callable[[Path, Manifest, RunRecord], T],
    wants: Callable[[RunRecord], bool],
) -> tuple[T | None, tuple[str, bool] | None]:
    """Return what `use` makes of a checkpoint, or why it makes nothing, and if that is damage."""

    def attempt() -> T | None:
        manifest = read_manifest(path)
        if manifest.step != step_of(path):
            raise CheckpointCorrupted(f"{path} has step {manifest.step}: its files were mixed up")
        known = known_of(manifest)
        return use(path, manifest, known) if wants(known) else None

    try:
        result = retried(attempt)
    except CheckpointCorrupted as error:
        return None, (str(error), True)
    except DiskFull:  # of the scratch file: no older checkpoint would need less
        raise
    except DiskError as error:
        return None, (f"{error}. It may be whole, and stays", False)
    return result, (None if result is not None else ("", False))


def known_of(manifest: Manifest) -> RunRecord:
    """Return the state of the run in a manifest. Raises CheckpointMismatch if it is invalid.

    The manifest is untrusted input.
    """
    training = manifest.training
    try:
        state = RunState.from_json(training["run"])
        known = RunRecord(
            state=state,
            num_updates={as_count(block): as_count(n) for block, n in training["num_updates"]},
            data=_as_position(training["data"]),
            lines={str(name): as_count(size) for name, size in training["lines"].items()},
            batch_tokens=as_optional_tokens(training["config"]["train"]["batch_tokens"]),
            packing=_as_flag(training["config"]["data"]["packing"]),
            peak_rate=_as_rate(training["config"]["optim"]["learning_rate"]),
            state_dtype=_as_state(training["config"]["optim"]["state"]),
            kept={lever.name: lever.read(training) for lever in KEPT},
            learning_rate=as_loss(training["learning_rate"]),
            source_mark=_as_text(training["source_mark"]),
        )
        if state.global_step != manifest.step:
            raise ValueError(
                f"step {state.global_step} of a run in a checkpoint of step {manifest.step}"
            )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointMismatch(
            "the checkpoint has an invalid state of the run: "
            f"{type(error).__name__} {str(error)[:100]}"
        ) from None
    return known


def _as_position(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return where the data stood, with what a trainer of another library has saved, if any."""
    counts = {name: as_count(data[name]) for name in ("epoch", "window", "row")}
    trainer = data.get("trainer")
    found = {} if trainer is None else {"trainer": dict(trainer)}
    return {"order": str(data["order"]), **counts, **found}


def _as_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{str(value)[:40]!r} is neither true nor false")
    return value


def _as_rate(value: Any) -> float:
    rate = as_loss(value)
    if rate is None or not 0 < rate <= 1:
        raise ValueError(f"{str(value)[:40]!r} is not a learning rate")
    return rate


def _as_state(value: Any) -> StateDtype:
    if value not in get_args(StateDtype):
        raise ValueError(f"{str(value)[:40]!r} is not a state of an optimizer")
    return cast(StateDtype, value)


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
            if old.get(key) == value or (value == "auto" and key in DECIDED_ONCE):
                continue
            text = f"{section}.{key}: {_as_yaml(old.get(key))} -> {_as_yaml(value)}"
            (refused if key in FIXED.get(section, ()) else changed).append(text)
    if refused:
        raise CheckpointMismatch(
            "a resumed run must keep these settings. Restore them, or use another save.dir:\n  "
            + "\n  ".join(refused)
        )
    return changed


def _as_yaml(value: object) -> str:
    """Return a setting as a config file has it: null, true; the beginning of a long one."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _require_small_files(path: Path, manifest: Manifest) -> None:
    """Raise CheckpointCorrupted or DiskError unless the small files of the model are as written."""
    for name, record in manifest.files.items():
        if not name.startswith("model/") or name.endswith(".safetensors"):
            continue
        try:
            data = (path / name).read_bytes()
        except FileNotFoundError:
            raise CheckpointCorrupted(f"{path / name} is missing") from None
        except OSError as error:
            raise DiskError(f"cannot read {path / name}: {error.strerror}") from error
        if record.digests != digests(data):
            raise CheckpointCorrupted(f"{path / name} does not match its hash")
    if f"model/{CONFIG_NAME}" not in manifest.files:
        raise CheckpointCorrupted(f"{path} has no {CONFIG_NAME}")

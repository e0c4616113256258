"""The model of a run that is meant: one answer for every verb that reads a run, with its step.

    RUN                     the newest complete model; the best, if the run keeps it
    RUN with `best`         the one with the lowest evaluation loss
    RUN/best, RUN/last, a checkpoint folder    that checkpoint
    anything else           a model folder (`RUN/model` too), or a Hub id

A run's models are its checkpoints and the export at its end, `RUN/model`. None is used before its
bytes were compared with their hashes, and so is any other folder that has hashes beside it. A
damaged newest model of a run is skipped, and that is reported; a damaged best one, or a damaged
folder that was asked for itself, is an error, because no other can take its place.

Laws (tests/run/test_run_model.py)
    1. An export that is older than the newest complete checkpoint is never used for it.
    2. No model that has hashes is used with a byte other than it was written with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatrain.disk.adapters.folder import read_adapter_folder, tokenizer_source
from megatrain.disk.checkpoint.manifest import MANIFEST_NAME, read_manifest
from megatrain.disk.checkpoint.restore import verify_model
from megatrain.disk.checkpoint.retention import finished, loss_of, step_of
from megatrain.disk.checkpoint.retried import retried
from megatrain.disk.hf.exported import ExportRecord, read_exported, require_as_written
from megatrain.disk.hf.folder import is_adapter_folder
from megatrain.errors import (
    CheckpointCorrupted,
    CheckpointMismatch,
    ConfigError,
    DiskError,
    RunFolderError,
)
from megatrain.hub import find_model
from megatrain.run.folder import FOLDER, is_run
from megatrain.run.opening.opening import MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class RunModel:
    """A model folder, and where it comes from."""

    folder: Path
    """The folder that `from_pretrained` would load."""
    step: int | None = None
    """None: it is not of a run, as far as we know."""
    best_loss: float | None = None
    """Loss of its evaluation, if it was chosen for that."""
    run: Path | None = None
    """The run folder it belongs to."""
    passed_over: tuple[str, ...] = ()
    """Why newer models are skipped."""

    def facts(self) -> dict[str, Any]:
        """Return the fields as values that JSON has."""
        run = None if self.run is None else str(self.run)
        return asdict(self) | {"folder": str(self.folder), "run": run}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> RunModel:
        run = None if facts["run"] is None else Path(facts["run"])
        paths = {"folder": Path(facts["folder"]), "run": run}
        return cls(**{**facts, **paths, "passed_over": tuple(facts["passed_over"])})

    def __str__(self) -> str:
        if self.step is None:
            return f"model in {self.folder}"
        best = "" if self.best_loss is None else f", the best by evaluation ({self.best_loss:.4f})"
        lines = [f"skipped: {reason}" for reason in self.passed_over]
        return "\n".join([*lines, f"model of step {self.step}{best}, from {self.folder}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A model of a run, not yet checked."""

    path: Path
    """A checkpoint, or the run's export."""
    step: int
    loss: float | None
    """Loss of an evaluation at this step; an export has one only if it was the best."""
    exported: ExportRecord | None = None

    @property
    def folder(self) -> Path:
        return self.path if self.exported is not None else self.path / MODEL

    def check(self) -> None:
        if self.exported is not None:
            self.exported.check(self.path)
        elif verify_model(self.path).step != self.step:
            raise CheckpointCorrupted(f"{self.path} has another step: its files were mixed up")


def chosen_model(path: Path, *, best: bool = False) -> RunModel:
    """Return the complete model of `path`. Raises CheckpointCorrupted or RunFolderError."""
    checkpoint = _checkpoint_at(path)
    if checkpoint is None and is_run(path):
        return _best_of_run(path, asked=best) if best or _keeps_best(path) else _newest(path)
    if best:
        raise ConfigError(f"{path} is not a run folder, so --best does not apply")
    if checkpoint is None:
        folder = find_model(str(path)).folder
        require_as_written(folder)
        return RunModel(folder=folder)
    step = verify_model(checkpoint).step
    run = checkpoint.parent.parent
    return RunModel(folder=checkpoint / MODEL, step=step, run=run if is_run(run) else None)


def tokenizer_folder(path: Path) -> Path:
    """Return a folder that has the tokenizer of what `path` means; no weight is checked."""
    folder = _tokenizer_folder(path)
    is_own = not is_adapter_folder(folder)
    return folder if is_own else tokenizer_source(read_adapter_folder(folder))


def _tokenizer_folder(path: Path) -> Path:
    checkpoint = _checkpoint_at(path)
    if checkpoint is not None:
        return checkpoint / MODEL
    if not is_run(path):
        return find_model(str(path), need="tokenizer").folder
    return next((found.folder for found in _by_step(path)), path)


def _checkpoint_at(path: Path) -> Path | None:
    """Return the checkpoint that a path leads to: the folder itself, or the model in it."""
    if path.is_symlink() and not path.exists():
        raise RunFolderError(f"{path} is a link to a file that no longer exists")
    real = path.resolve()
    for folder in (real, real.parent) if real.name == MODEL else (real,):
        if (folder / MANIFEST_NAME).is_file() and (folder / MODEL).is_dir():
            return folder
    return None


def _newest(run: Path) -> RunModel:
    passed_over: list[str] = []
    for found in _by_step(run):
        try:
            retried(found.check)
        except (CheckpointCorrupted, DiskError) as error:
            passed_over.append(str(error))
            continue
        return RunModel(
            folder=found.folder, step=found.step, run=run, passed_over=tuple(passed_over)
        )
    raise _none_of(run, passed_over)


def _best_of_run(run: Path, *, asked: bool) -> RunModel:
    judged = [found for found in _by_step(run) if found.loss is not None]
    if not judged:
        if asked:
            raise RunFolderError(f"{run}: no model was evaluated, so there is no best one")
        return _newest(run)
    lowest = min(found.loss for found in judged if found.loss is not None)
    reasons = []
    for found in judged:
        if found.loss != lowest:
            continue
        try:
            retried(found.check)
        except (CheckpointCorrupted, DiskError) as error:
            reasons.append(str(error))
            continue
        return RunModel(folder=found.folder, step=found.step, best_loss=lowest, run=run)
    raise CheckpointCorrupted(
        f"{run}: cannot use its best model:\n  " + "\n  ".join(reasons) + "\n"
        f"Give the newest model, {run}/last, or another checkpoint."
    )


def _none_of(run: Path, reasons: list[str]) -> Exception:
    if reasons:
        return CheckpointCorrupted(f"{run}: no model is complete:\n  " + "\n  ".join(reasons))
    text = f"{run}: the run has no checkpoint"
    if (run / MODEL).is_dir():
        return RunFolderError(
            f"{text}, and the step of {run / MODEL} is unknown. Give that folder itself."
        )
    return RunFolderError(f"{text} and no model")


def _by_step(run: Path) -> list[_Candidate]:
    """Return all models of a run, the newest first, and of a step its export first."""
    found = list(_candidates(run))
    return sorted(found, key=lambda one: (-one.step, one.exported is None))


def _candidates(run: Path) -> Iterator[_Candidate]:
    exported = read_exported(run / MODEL)
    if exported is not None:
        yield _Candidate(
            path=run / MODEL, step=exported.step, loss=exported.best_loss, exported=exported
        )
    for path in finished(run / FOLDER):
        yield _Candidate(path=path, step=step_of(path), loss=loss_of(path))


def _keeps_best(run: Path) -> bool:
    """Return whether the run was set to keep its best model, by its newest checkpoint."""
    for path in finished(run / FOLDER):
        try:
            config: Any = read_manifest(path).training.get("config")
        except (CheckpointCorrupted, CheckpointMismatch, DiskError):
            continue
        save, judging = (
            (config.get(section) if isinstance(config, Mapping) else None)
            for section in ("save", "eval")
        )
        return (isinstance(save, Mapping) and save.get("best") is True) or (
            isinstance(judging, Mapping) and judging.get("patience") is not None
        )
    return False

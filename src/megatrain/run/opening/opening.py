"""Opening a run: one line of steps, in the order in which they can fail cheaply.

docs/engine.md has the list. Every file is read once, and what a step finds is handed on.

Laws (tests/run/opening/test_opening.py)
    1. config.json is parsed, the decoder built and the tokenizer loaded once.
    2. A run that fails to open leaves nothing open and no folder locked.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.config import Config
from megatrain.data.steps.isolation import packs_flat
from megatrain.data.training_rows import with_longest_step
from megatrain.devices.accelerator import find_device
from megatrain.devices.device import Device
from megatrain.disk.checkpoint.retention import clear_unfinished
from megatrain.disk.hf.model import HostModel
from megatrain.engine.engine import Engine
from megatrain.errors import RunFolderError
from megatrain.files import remove_folder
from megatrain.planning.plan import Plan
from megatrain.run.checkpoints import FOLDER
from megatrain.run.folder import RunFolder
from megatrain.run.opening.assembly import find_source, load_home, make_engine, open_model
from megatrain.run.opening.places import Pins, pin_commits
from megatrain.run.opening.planned import plan_run
from megatrain.run.opening.resumption import LoadedCheckpoint, find_checkpoint
from megatrain.run.opening.tokenizer import open_tokenizer
from megatrain.run.opening.training_data import TrainingData, open_data, open_rows
from megatrain.run.sinks import check_sinks

MODEL = "model"
"""Where in a run folder its result is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Everything that a run has before its first step."""

    config: Config
    """With commits in place of branches of the Hub, and the tokens of a step in place of auto."""
    pins: Pins
    folder: RunFolder
    device: Device
    resumed: LoadedCheckpoint | None
    tokenizer: Any
    plan: Plan
    data: TrainingData
    home: HostModel
    engine: Engine
    notes: tuple[str, ...]
    """What the user should know of the rows and the model."""

    def close(self) -> None:
        """End the engine, and let go of the scratch file, the data and the folder."""
        try:
            self.engine.close()
        finally:
            self.home.store.close()
            self.data.close()
            self.folder.close()


def open_run(config: Config, *, resumes: bool = False, dry_run: bool = False) -> Opening:
    """Open what the config names; with `resumes` the newest complete checkpoint, if any."""
    notes: list[str] = []
    with ExitStack() as opened:
        config, pins = pin_commits(config, resumes=resumes)
        folder = open_folder(config, opened, resumes=resumes, dry_run=dry_run)
        device = open_device(config)
        found = find_checkpoint(config, folder.path / FOLDER, resumes=resumes)
        source = find_source(config, found)
        tokenizer, growth = open_tokenizer(config, source, notes, found)
        model = open_model(config, source, growth, found)
        rows = open_rows(config, tokenizer, model.decoder, notes, resumes=found is not None)
        plan = plan_run(
            with_longest_step(config, rows), device, model.decoder, found, rows.epoch_tokens
        )
        data = opened.enter_context(
            open_data(
                _settled(config, plan),
                tokenizer,
                plan.settings,
                rows,
                flat=packs_flat(model.decoder.config, compiles=plan.settings.compile),
            )
        )
        home, resumed = load_home(config, plan.settings, model, tokenizer, found)
        opened.callback(home.store.close)
        engine = make_engine(config, plan.settings, home, device, data.num_steps)
        opened.pop_all()
    return Opening(
        config=_settled(config, plan),
        pins=pins,
        folder=folder,
        device=device,
        resumed=resumed,
        tokenizer=tokenizer,
        plan=plan,
        data=data,
        home=home,
        engine=engine,
        notes=tuple(notes),
    )


def _settled(config: Config, plan: Plan) -> Config:
    """Return the config with the step that the plan chose, or found in the checkpoint."""
    return config.settled(plan.workload.step_tokens)


def open_folder(config: Config, opened: ExitStack, *, resumes: bool, dry_run: bool) -> RunFolder:
    """Return the run folder, locked. Raises RunFolderError if it holds another run."""
    check_sinks(config.log.to)
    _require_apart(config)
    folder = RunFolder(config.run_dir, dry=dry_run)
    opened.callback(folder.close)
    if folder.has_run and not resumes:
        raise RunFolderError(
            f"{folder.path} already has a run. Continue it with --resume, or set save.dir to "
            "another folder."
        )
    if not dry_run:
        _clear_unfinished(folder.path)
    return folder


def open_device(config: Config) -> Device:
    """Return the device that the config asks for, or the best there is."""
    vram = config.memory.vram
    return find_device(config.memory.device, cap_bytes=None if vram == "auto" else vram)


def _require_apart(config: Config) -> None:
    """Raise RunFolderError if the run would write over the model that it trains from."""
    run, model = Path(config.run_dir).resolve(), Path(config.model.name_or_path).resolve()
    result = (run / MODEL).resolve()
    for written in (run, result):
        if model.is_relative_to(written):
            raise RunFolderError(
                f"save.dir {config.run_dir}: the run writes into {written}, but the model to "
                f"train, {config.model.name_or_path}, is in there. Set save.dir to another folder."
            )


def _clear_unfinished(run: Path) -> None:
    """Remove saves and exports that a killed process never ended."""
    clear_unfinished(run / FOLDER)
    for path in run.glob(f".{MODEL}.*.tmp"):
        remove_folder(path)

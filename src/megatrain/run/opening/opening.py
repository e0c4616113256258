"""All that a run needs before its first step, opened in the order in which it can fail cheaply."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatrain.config import Config
from megatrain.data.chat.choice import exported_template
from megatrain.data.steps.isolation import check_packing
from megatrain.data.training_rows import gather, with_longest_step
from megatrain.devices.device import Device
from megatrain.disk.checkpoint.retention import clear_unfinished
from megatrain.disk.hf.model import HostModel, ModelFolder, read_model_folder
from megatrain.errors import RunFolderError
from megatrain.files import remove_folder
from megatrain.hub import find_model
from megatrain.memory.host import resident_bytes
from megatrain.memory.kinds import store_kinds
from megatrain.models.patterns import check_patterns
from megatrain.optim.states import STATES
from megatrain.planning.plan import Plan
from megatrain.run.checkpoints import FOLDER
from megatrain.run.folder import RunFolder
from megatrain.run.opening.added_tokens import add_tokens
from megatrain.run.opening.balancing import router_aux_loss
from megatrain.run.opening.model_limits import check_rows
from megatrain.run.opening.planned import plan_resumed, plan_run
from megatrain.run.opening.resolve import Resolved, open_device, resolve
from megatrain.run.opening.resumption import Resumed, resume
from megatrain.run.opening.training_data import TrainingData, load_tokenizer, open_data
from megatrain.run.sinks import check_sinks

MODEL = "model"
"""Where in a run folder its result is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A device, data and a model, and how they will be used."""

    device: Device
    resolved: Resolved
    plan: Plan
    tokenizer: Any
    data: TrainingData
    home: HostModel
    resumed: Resumed | None
    notes: tuple[str, ...]
    """What should be said of the rows and the model."""


def as_it_began(resolved: Resolved, config: Config, resumed: Resumed) -> Resolved:
    """Return the settings with those of the checkpoint where `auto` might now give other bits."""
    train, memory, known = config.train, config.memory, resumed.known
    if train.micro_batch_tokens == "auto":
        resolved = replace(resolved, micro_batch_tokens=known.micro_batch_tokens)
    if memory.chunk_tokens == "auto":
        resolved = replace(resolved, chunk_tokens=known.chunk_tokens)
    return resolved


def require_apart(config: Config) -> None:
    """Raise RunFolderError if the run would write over the model that it trains from."""
    run, model = Path(config.run_dir).resolve(), Path(config.model.name_or_path).resolve()
    result = (run / MODEL).resolve()
    for written in (run, result):
        if model.is_relative_to(written):
            raise RunFolderError(
                f"save.dir {config.run_dir}: the run writes into {written}, and the model it would "
                f"be trained from, {config.model.name_or_path}, is in there. Give save.dir another "
                "folder."
            )


def _clear_unfinished(run: Path) -> None:
    """Remove saves and exports that a killed process never ended."""
    clear_unfinished(run / FOLDER)
    for path in run.glob(f".{MODEL}.*.tmp"):
        remove_folder(path)


def open_run(config: Config, folder: RunFolder, *, resumes: bool) -> Opened:
    """Open what the config names; with `resumes` the newest whole checkpoint, if there is one."""
    if folder.has_run and not resumes:
        raise RunFolderError(
            f"{folder.path}: holds a run already. Continue it with --resume, or give save.dir "
            "another folder."
        )
    check_sinks(config.log.to)
    device, name = open_device(config)
    resolved = resolve(config, device, name)
    base_bytes = resident_bytes()
    if not folder.is_dry:
        _clear_unfinished(folder.path)
    kinds = store_kinds(STATES[config.optim.name], waits=resolved.update == "late")
    resumed = resume(folder.path / FOLDER, config, kinds) if resumes else None
    model = config.model
    source = (
        find_model(model.name_or_path, model.revision, "tokenizer").folder
        if resumed is None
        else resumed.home.source
    )
    tokenizer = load_tokenizer(source)
    growth, notes = add_tokens(tokenizer, model.add_tokens) if resumed is None else (None, [])
    found: HostModel | ModelFolder = (
        resumed.home
        if resumed is not None
        else read_model_folder(
            source, dtype=model.dtype, frozen=model.frozen, attn=model.attn, growth=growth
        )
    )
    check_patterns("optim.no_decay", config.optim.no_decay, found.decoder.names)
    router_aux_loss(config, found.decoder)
    if config.data.packing:
        check_packing(found.decoder.config.model_type, model.attn)
    rows = gather(config, tokenizer)
    notes += check_rows(rows.prepared, found.decoder)
    measured = with_longest_step(config, rows)
    resolved = resolve(measured, device, name)
    if resumed is None:
        resolved, plan = plan_run(measured, device, resolved, found.decoder)
    else:
        resolved = as_it_began(resolved, config, resumed)
        resolved, plan = plan_resumed(measured, device, resolved, found.decoder, base_bytes)
    data = open_data(config, tokenizer, resolved, rows)
    try:
        if resumed is None:  # weights come last: all else is cheaper to find wanting
            find_model(model.name_or_path, model.revision)
        home = found.load(kinds) if isinstance(found, ModelFolder) else found
        template = exported_template(tokenizer, config.data.chat_template)
        home = replace(home, carried={**home.carried, **template})
    except BaseException:
        data.close()
        raise
    return Opened(
        device=device,
        resolved=resolved,
        plan=plan,
        tokenizer=tokenizer,
        data=data,
        home=home,
        resumed=resumed,
        notes=tuple(notes),
    )

"""Opening a run: one line of steps, in the order in which they can fail cheaply.

docs/engine.md has the list. Every file is read once, and each step hands on what it finds.

All ranks must start from the same model and the same adapters. Each host may have its own folder
under one name, and one of them may be stale. A rank loads only the part that it owns, so ranks with
two models would train a mixture of both, and save it with hashes that match.

Laws (tests/run/opening/test_opening.py, tests/run/opening/test_same_start.py)
    1. config.json is parsed, the decoder built and the tokenizer loaded once.
    2. A run that fails to open leaves nothing open, no folder locked, and no folder that was not
       there before.
    3. Models or adapters that differ between ranks are a ConfigError on all of them, which names
       the setting, the marks and the ranks, before rows are read.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.config import Config
from megatrain.data.training_rows import TrainingRows
from megatrain.devices.device import Device
from megatrain.disk.checkpoint.retention import clear_unfinished
from megatrain.disk.hf.folder import is_adapter_folder
from megatrain.disk.hf.model import HostModel, ModelFolder
from megatrain.disk.hf.source_mark import mark_of_tensors, tensor_mark
from megatrain.engine.engine import Engine
from megatrain.engine.machine import waits_for_experts
from megatrain.errors import RunFolderError
from megatrain.files import remove_folder
from megatrain.hub import folder_of
from megatrain.models.decoder import Decoder
from megatrain.models.isolation import packs_flat
from megatrain.optim.native import load_kernel
from megatrain.optim.torch_kernel import TorchKernel
from megatrain.planning.from_config import (
    compile_choice,
    linear_attention_installed,
    linear_attention_path,
)
from megatrain.planning.levers import KEPT
from megatrain.planning.plan import Plan
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run import optional
from megatrain.run.arguments import NOTHING_GIVEN, Given
from megatrain.run.folder import FOLDER, RunFolder, has_run, settings_by_key
from megatrain.run.opening.model import (
    adapter_notes,
    find_source,
    load_home,
    open_model,
    open_tokenizer,
    with_answer_end,
)
from megatrain.run.opening.pin_commits import Pins, pin_commits
from megatrain.run.opening.planned import cap_device, chosen_kernels, plan_run
from megatrain.run.opening.recipe import decide, make_engine, require_fitting
from megatrain.run.opening.resumption import (
    LoadedCheckpoint,
    OpenedCheckpoint,
    find_checkpoint,
)
from megatrain.run.opening.towers import OpenedMedia, open_media
from megatrain.run.opening.training_data import (
    TrainingData,
    open_data,
    open_rows,
    planned_config,
)
from megatrain.run.sinks import check_sinks
from megatrain.run.state import RunState
from megatrain.run.this_rank import installed_facts, note_launch, place_of, take_cores

if TYPE_CHECKING:
    from megatrain.data.prompts import Prompts
    from megatrain.data.steps.teacher import TeacherScores
    from megatrain.run.evaluation.teaching import Teacher
    from megatrain.run.external_steps import ExternalSteps

MODEL = "model"
"""The folder of a run's result, in its run folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Everything that a run has before its first step."""

    config: Config
    """The config with commits in place of branches of the Hub, and choices in place of auto for
    packing, the learning rate and the tokens of a step."""
    pins: Pins
    ranks: Ranks
    folder: RunFolder
    """The run folder; other ranks than the first write nothing to it."""
    device: Device
    resumed: LoadedCheckpoint | None
    tokenizer: Any
    plan: Plan
    data: TrainingData | ExternalSteps
    home: HostModel
    engine: Engine
    given: Given
    notes: tuple[str, ...]
    """Remarks for the user on the rows and the model."""

    def close(self) -> None:
        """End the engine, and let go of the scratch file, the data and the folder."""
        try:
            self.engine.close()
        finally:
            self.home.store.close()
            self.data.close()
            self.folder.close()


def open_run(
    config: Config,
    *,
    dry_run: bool = False,
    ranks: Ranks = ALONE,
    given: Given = NOTHING_GIVEN,
) -> Opening:
    """Open what the config names, at the newest complete checkpoint of its folder, if any.

    A run that is there already loses nothing by it: Trainer.train asks whether to continue it.
    Rows and a loss may be `given` by a program. All `ranks` open the same run, each its part.
    Names that are assigned to without a type are the steps in docs/engine.md.
    """
    notes: list[str] = []
    asked = {"--dry-run": dry_run}
    ranks.require_same(lambda: settings_by_key(config) | installed_facts() | asked)
    with ExitStack() as opened:
        config, pins = pin_commits(config, ranks=ranks)
        folder = open_folder(config, opened, dry_run=dry_run, ranks=ranks)
        device = open_device(config, ranks)
        take_cores(ranks, device)
        require_kernels(config, device)
        found = find_checkpoint(config, folder.path / FOLDER, ranks=ranks)
        source = find_source(config, found, ranks)
        require_same_start(ranks, config, found)
        tokenizer, growth = open_tokenizer(config, source, notes, found)
        model = open_model(config, source, growth, found)
        notes += model.notes
        config = decide(config, model.decoder, found, notes, own_loss=given.loss is not None)
        rows = open_rows(
            config, tokenizer, model.decoder, notes, given.rows, resumes=bool(found), ranks=ranks
        )
        require_fitting(config, rows)
        ending: ModelFolder = with_answer_end(config, model, tokenizer, notes)
        teacher: Teacher | None = (
            None
            if config.loss.teacher is None
            else optional.teaching.open_teacher(config, tokenizer, model.decoder, ranks)
        )
        media: OpenedMedia = open_media(config, ending, rows, tokenizer, notes)
        plan = plan_run(
            planned_config(config, rows),
            device,
            media.model.decoder,
            found,
            rows.epoch_tokens,
            ranks,
            None if teacher is None else teacher.model.decoder,
            media.shape,
        )
        _require_same_plan(ranks, device, rows, plan, ending.decoder, tokenizer)
        cap_device(device, plan)
        settled: Config = config.settled(plan.workload.step_tokens)
        flat: bool = packs_flat(media.model.decoder, compiles=plan.settings.compile)
        data = open_data(
            settled,
            tokenizer,
            plan.settings,
            rows,
            flat=flat,
            ranks=ranks,
            external=given.open_external,
        )
        opened.callback(data.close)
        if isinstance(data, TrainingData) and teacher is not None and not dry_run:
            ranks.on_first(
                partial(
                    optional.teaching.keep_mark, folder.path, teacher, resumes=found is not None
                )
            )
            pad: int = tokenizer.pad_token_id or 0
            scores: TeacherScores = optional.teaching.teach(
                config, teacher, data.rows, plan.settings, device, ranks, pad
            )
            data.take_teacher(scores)
        home, resumed = load_home(
            config, plan.settings, media.model, tokenizer, found, ranks, device.placement
        )
        opened.callback(home.store.close)
        engine = make_engine(config, plan.settings, home, device, data.num_steps, ranks, given.loss)
        opened.callback(engine.close)
        engine.announce(data.step_tokens)
        if not isinstance(data, TrainingData):
            data.attach(engine, home)
        notes += adapter_notes(home.decoder) + speed_notes(config, model.decoder, device)
        notes += ranks.notes(notes)
        opening: Opening = Opening(
            config=settled,
            pins=pins,
            ranks=ranks,
            folder=folder,
            device=device,
            resumed=resumed,
            tokenizer=tokenizer,
            plan=plan,
            data=data,
            home=home,
            engine=engine,
            given=given,
            notes=tuple(notes),
        )
        if not dry_run:
            _refer(opening)
        opened.pop_all()  # nothing can fail any more: it stays open
        return opening


def open_folder(
    config: Config, opened: ExitStack, *, dry_run: bool, ranks: Ranks = ALONE
) -> RunFolder:
    """Return the run folder, locked by rank 0.

    Raises RunFolderError if it is somebody else's, or if not all ranks see it.
    """
    check_sinks(config.log.to)
    _require_apart(config)

    def lock() -> RunFolder:
        folder = RunFolder(config.run_dir, dry=dry_run)
        opened.push(lambda kind, *_: folder.discard() if kind else folder.close())
        if not dry_run:
            note_launch(folder)
            _clear_unfinished(folder.path)
            if config.bucket is not None:
                folder.uploads = optional.uploads.open_uploads(
                    config.bucket,
                    folder.path,
                    keep=config.save.keep,
                    keep_best=config.keeps_best,
                )
                folder.had_run |= has_run(folder.path)  # it is on this machine now
        return folder

    locked = ranks.on_first(lock)
    if not dry_run:
        ranks.require_shared(Path(config.run_dir))
    return locked or RunFolder(config.run_dir, dry=True)


def _require_apart(config: Config) -> None:
    """Raise RunFolderError if the run would write over what it starts from."""
    run = Path(config.run_dir).resolve()
    read = {"model to train": config.model.name_or_path, "adapters to train": config.lora.path}
    read["teacher"] = config.loss.teacher
    for what, name in read.items():
        for written in (run, (run / MODEL).resolve()):
            if name is not None and Path(name).resolve().is_relative_to(written):
                raise RunFolderError(
                    f"save.dir {config.run_dir}: the run writes into {written}, but the {what}, "
                    f"{name}, is in there. Set save.dir to another folder."
                )


def _clear_unfinished(run: Path) -> None:
    """Remove saves and exports that a killed process never ended."""
    clear_unfinished(run / FOLDER)
    for path in run.glob(f".{MODEL}.*.tmp"):
        remove_folder(path)


def open_device(config: Config, ranks: Ranks = ALONE) -> Device:
    """Return the device that the config asks for, or the best there is.

    Slots that the config gives are used, also where device and host are one memory.
    """
    memory = config.memory
    cap_bytes = None if memory.vram == "auto" else memory.vram
    in_place = memory.slots == "auto"
    return place_of(memory.device, ranks.owner, cap_bytes, in_place=in_place)


def require_kernels(config: Config, device: Device) -> None:
    """Raise MissingPackage or ConfigError unless the kernels of the config run on the device."""
    if config.train.kernels == "liger":
        optional.fused.require_liger(device)
    if config.train.products == "fp8":
        optional.products.require_fp8(device)


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
    """Return the mark of the folder that each name means, or its commit of the Hub."""
    folders = {key: folder_of(name) for key, name in names.items()}
    return {
        f"{key} ({name})": folder_mark(folder) if folder.is_dir() else f"commit {revision}"
        for (key, name), folder in zip(names.items(), folders.values(), strict=True)
    }


def folder_mark(folder: Path) -> str:
    """Return the mark of the model or the adapters in a folder.

    Raises ModelFolderError, ModelConfigError, WeightsFormatError, WeightsMismatch or DiskError.
    """
    if not is_adapter_folder(folder):
        return f"mark {tensor_mark(folder)}"
    adapters = optional.folder.read_adapter_folder(folder)
    about = json.dumps(asdict(adapters.lora())).encode()
    return f"mark {mark_of_tensors(about, adapters.tensors)}"


def _require_same_plan(
    ranks: Ranks,
    device: Device,
    rows: TrainingRows | Prompts,
    plan: Plan,
    decoder: Decoder,
    tokenizer: Any,
) -> None:
    """Raise ConfigError unless all ranks will train the same rows in the same way.

    Each rank draws some of the texts, so all must end a text alike.
    """
    ends = [*sorted(decoder.eos_token_ids), tokenizer.eos_token_id]
    kind, tokens = device.name.partition(":")[0], plan.workload.step_tokens
    planned = {"kind of device": kind, "tokens of a step": tokens, "tokens that end a text": ends}
    read = {"data.train (its rows)": rows.digest, "data.eval (its rows)": rows.held_digest}
    ranks.require_same(lambda: plan.settings.facts() | planned | read)


def speed_notes(config: Config, decoder: Decoder, device: Device) -> list[str]:
    """Return remarks for the user on the speed of layers and updates."""
    compiles, reason = compile_choice(config, unified=not device.own_memory)
    notes = []
    if config.train.compile == "auto":
        notes.append(f"compile: auto is {'on' if compiles else 'off'}: {reason}")
    kernels, reason = chosen_kernels(config, decoder, device)
    if config.train.kernels == "auto" and device.own_memory:
        notes.append(f"kernels: auto is {kernels}: {reason}")
    path = linear_attention_path(
        str(decoder.config.model_type),
        has_triton=device.has_triton,
        installed=linear_attention_installed(),
    )
    if path and device.own_memory:
        notes.append(f"linear attention: {path}")
    if waits_for_experts(decoder, device, compiles=compiles):
        notes.append(
            f"experts: torch has no kernel for their products on {device.name}, so the host waits "
            "for the device twice in each layer and micro-batch; larger micro-batches wait less"
        )
    kernel = load_kernel()
    if isinstance(kernel, TorchKernel):
        notes.append(
            f"updates: kernel {kernel.description}, same results, slower. For the fast one install "
            "a wheel of MegaTrain, or install a C compiler and then MegaTrain again"
        )
    return notes


def _refer(opening: Opening) -> None:
    """Find or compute the reference log-probabilities, if the loss needs them."""
    data = opening.data
    if "reference" not in opening.engine.loss.required_tensors or not isinstance(
        data, TrainingData
    ):
        return
    data.take_references(
        optional.references.with_references(
            opening.config,
            data.rows,
            opening.engine,
            opening.home,
            opening.plan.settings,
            opening.folder.path,
            pad_id=opening.tokenizer.pad_token_id or 0,
            resumes=opening.resumed is not None,
            ranks=opening.ranks,
            items=data.items,
        )
    )


def checkpoint_facts(
    opened: Opening, state: RunState, learning_rate: float | None, source_mark: str | None
) -> dict[str, Any]:
    """Return the facts of a run in a checkpoint, besides tensors and lines: see `known_of`."""
    return {
        "run": state.to_json(),
        "eval_loss": state.eval_loss,
        "data": opened.data.state(),
        "config": opened.config.model_dump(mode="json"),
        **{lever.name: getattr(opened.plan.settings, lever.name) for lever in KEPT},
        "learning_rate": learning_rate,
        "source_mark": source_mark,
    }

"""The commands behind the command line: one function each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatrain.cache import writable_cache_folder
from megatrain.choices import RowFormat
from megatrain.cli.conversing import converse
from megatrain.cli.demo import (
    resumed_equals_uninterrupted,
    streamed_equals_resident,
    write_demo,
)
from megatrain.cli.first_config import FILE, FirstConfig, marked_format
from megatrain.config import Config
from megatrain.config.sections import DataSettings, DataSource
from megatrain.config.value_types import Arguments
from megatrain.data.chat.choice import choose_template
from megatrain.data.chat.render import TrainOn
from megatrain.data.media.processing import media_settings
from megatrain.data.preview import card_lines, show_prepared, show_rows
from megatrain.data.prompts import PromptSource, gather_prompts
from megatrain.data.rows.hub_rows import Where, located
from megatrain.data.rows.token_files import as_token_files
from megatrain.data.tokens.limits import check_limits
from megatrain.data.tokens.prepare import prepare
from megatrain.data.tokens.prepared import PreparedData
from megatrain.data.training_rows import gather, with_room
from megatrain.disk.hf.model import ModelFolder, read_model_folder
from megatrain.engine.compute.drawing import GREEDY, SamplingParams
from megatrain.engine.engine import Engine
from megatrain.engine.sampling import continue_texts
from megatrain.errors import DiskFull, RunFolderError, StorageError
from megatrain.hub import find_model
from megatrain.media import TextMedia
from megatrain.memory.kinds import TensorKind
from megatrain.models.isolation import packs_flat
from megatrain.planning.from_config import step_settings_of
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.report.page import write_report
from megatrain.report.run import read_run
from megatrain.run.evaluation.answers import answer_all, questions
from megatrain.run.evaluation.conversation import (
    Turn,
    first_turns,
    printed_answer,
    prompt_tokens,
)
from megatrain.run.evaluation.judging import (
    config_of_run,
    for_lengths,
    judging_config,
    left_out,
    media_as_trained,
    prompts_as_trained,
    require_single_answers,
)
from megatrain.run.evaluation.mean_loss import mean_loss
from megatrain.run.evaluation.media_prompts import MediaFile, read_prompts
from megatrain.run.evaluation.samples import eos_token_ids
from megatrain.run.folder import RunFolder, settings_by_key
from megatrain.run.opening.model import load_tokenizer, open_tokenizer
from megatrain.run.opening.opening import MODEL, folder_mark, open_device
from megatrain.run.opening.pin_commits import read_config, require_no_run
from megatrain.run.opening.planned import with_kernels
from megatrain.run.opening.recipe import router_aux_loss
from megatrain.run.opening.training_data import check_rows, open_data
from megatrain.run.run_model import RunModel, chosen_model, tokenizer_folder
from megatrain.run.this_rank import (
    installed_facts,
    interrupts_of_rank,
    joined,
    place_of,
    take_cores,
    was_restarted,
)
from megatrain.run.trainer import Trainer
from megatrain.text import counted, printable

_DATA = DataSettings.model_fields
_LIMITS = ("max_bad", "max_dropped", "max_lost_thoughts")


def read_only(model: ModelFolder) -> tuple[TensorKind, ...]:
    """Return what a model needs that is not trained: its weights.

    Adapters in fp32 also leave a remainder, so that their weights are rounded as in training.
    """
    return (TensorKind.HI,) if model.decoder.adapters is None else (TensorKind.HI, TensorKind.LO)


def train_from(
    config: Config,
    *,
    dry_run: bool = False,
    resume: bool = False,
    verbose: bool = False,
    first: FirstConfig | None = None,
    rewards: Sequence[str] = (),
) -> str:
    """Train; return the closing line. Ranks that torchrun has started again resume.

    A `first` config, which has no file, is kept in the run folder. With `rewards`, functions by
    FILE.py:NAME, TRL takes the steps. Raises RunFolderError, before anything is loaded, if there
    is a run that is not to be resumed.
    """
    open_external = None
    if config.loss.draws:
        from megatrain.integrations.reward_functions import load_reward_functions
        from megatrain.integrations.trl_run import open_with, require_supported

        require_supported(config)
        open_external = open_with(load_reward_functions(rewards))
    with ExitStack() as opened:
        interrupts = opened.enter_context(interrupts_of_rank())
        ranks = opened.enter_context(joined(config.memory.device, config.train.rank_deadline))
        resume = was_restarted(Path(config.run_dir), ranks) or resume
        if not resume:
            ranks.on_first(lambda: require_no_run(config))
        trainer = opened.enter_context(
            Trainer(
                config,
                dry_run=dry_run,
                verbose=verbose,
                interrupts=interrupts,
                ranks=ranks,
                open_external=open_external,
            )
        )
        if dry_run:
            ready = f"ready to train {counted(trainer.num_steps, 'step')}; dry run, nothing written"
            return "\n".join([*trainer.startup_lines(verbose=True), ready])
        if first is not None:
            ranks.on_first(lambda: _keep(first.of_run(trainer.plan), trainer.folder))
        outcome = trainer.train(resume_from_checkpoint=resume)
        model = trainer.folder.path / MODEL
        which = _exported(trainer, model)
        where = ranks.long_work(lambda: ranks.on_first(lambda: _sent(trainer, model)))
        report = ranks.on_first(lambda: report_on([trainer.folder.path], None)) or ""
    return (
        f"{outcome.learned} in "
        f"{counted(outcome.num_steps, 'step')}, {outcome.total_tokens:,} tokens, "
        f"{outcome.seconds:.0f} s\n{which}, in {where or model}\n{report}"
    )


def _sent(trainer: Trainer, model: Path) -> str:
    """Send the result of a run to its bucket, if it has one; return where it is."""
    uploads = trainer.folder.uploads
    if uploads is None:
        return str(model)
    try:
        return f"{model} and {uploads.send_folder(model, MODEL)}"
    except StorageError as error:
        return f"{model}; NOT uploaded: {error}"


def _keep(first: FirstConfig, folder: RunFolder) -> None:
    """Write the config of a run that has no file, unless a resumed run has it."""
    path = folder.path / FILE
    if not path.exists():
        folder.write(FILE, first.text())
    print(f"config in {path}; with --resume it continues this run", file=sys.stderr, flush=True)


def _exported(trainer: Trainer, target: Path) -> str:
    """Export the result of a run; return its name."""
    try:
        return trainer.save_model(target)
    except DiskFull as error:
        run = trainer.folder.path
        raise DiskFull(
            f"{error}. The run is complete and saved after step {trainer.checkpoints.saved_step}; "
            f"`megatrain export {run} FOLDER` writes its model to a disk with enough space"
        ) from error


def report_on(runs: Sequence[Path], target: Path | None) -> str:
    """Write the report; return where it is."""
    page = target or runs[0] / "report.html"
    write_report(runs, page)
    return f"report in {page}"


def evaluate_model(
    model: Path,
    data: Path,
    max_rows: int | None,
    *,
    answers: bool = False,
    best: bool = False,
    max_length: int | None = None,
    name: str | None = None,
    split: str | None = None,
    columns: Mapping[str, str] = MappingProxyType({}),
    roles: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ranks: Ranks = ALONE,
) -> str:
    """Return the loss and perplexity of a model on a file, as text, and which rows were left out.

    `name` and `split` choose a part of a Hub dataset; `columns` and `roles` are its names for ours.

    With `answers` the model also generates each answer, and exact matches are counted.
    """
    chosen = found_model(model, best=best, ranks=ranks)
    read = read_model_folder(chosen.folder)
    source = DataSource(
        path=str(data), name=name, split=split, columns=Arguments(columns), roles=Arguments(roles)
    )
    config = judging_config(chosen, read.decoder.config, source, max_rows, max_length)
    tokenizer = load_tokenizer(read.source)
    rows = ranks.once_per_folder(writable_cache_folder(), lambda: gather(config, tokenizer))
    require_single_answers(rows)
    if rows.media is not None:
        read = read_model_folder(chosen.folder, media="all")
    lines = left_out(rows.sources[0], config.data.max_length)
    config = for_lengths(config, rows.held[0])
    device = open_device(config, ranks)
    take_cores(ranks, device)
    home = ranks.long_work(lambda: read.load(read_only(read), owner=ranks.owner))
    lines += check_rows(rows.sources, home.decoder)
    coefficient = router_aux_loss(config, home.decoder)
    config = with_kernels(config, home.decoder, device)
    settings = step_settings_of(
        with_room(config, rows), unified=not device.own_memory, router_aux_loss=coefficient
    )
    ranks.require_same(lambda: settings.facts() | {"data": rows.digest, **settings_by_key(config)})
    flat = packs_flat(home.decoder, compiles=settings.compile)
    with (
        open_data(config, tokenizer, settings, rows, flat=flat) as opened,
        Engine(home.decoder, home.store, settings=settings, device=device, ranks=ranks) as engine,
    ):
        found = mean_loss(engine, opened.eval_batches())
        assert found is not None, "prepared data has a trained token"
        lines.append(f"{found.in_words()} over {found.num_valid_tokens:,} trained tokens")
        lines += _loss_of_run(chosen)
        if answers:
            asked = questions(rows.held[0], max_rows)
            ends, decode = eos_token_ids(tokenizer, home), _plain_text(tokenizer)
            matches = answer_all(engine, asked, ends, decode, opened.items)
            lines.append(matches.in_words())
    return "\n".join(lines)


def _loss_of_run(model: RunModel) -> list[str]:
    """Return a line on what the run of a model evaluates, if that is not the loss of tokens."""
    run = config_of_run(model)
    if model.run is None or run is None or run.loss.name == "next_token":
        return []
    evals = read_run(model.run, "").evals if (model.run / "metrics.jsonl").exists() else []
    known = [line for line in evals if model.step is None or line.step <= model.step]
    last = f", {known[-1].values['eval_loss']:.4f} after step {known[-1].step}" if known else ""
    return [
        "this is the mean loss per token of the answers, as in fine-tuning; the evaluation loss of "
        f"the run is another quantity, that of {run.loss.name}{last}"
    ]


def sample_from(
    model: Path,
    prompts: Sequence[str],
    max_new_tokens: int,
    drawing: SamplingParams = GREEDY,
    *,
    system: str | None = None,
    device: str = "auto",
    best: bool = False,
    media: Sequence[MediaFile] = (),
    ranks: Ranks = ALONE,
) -> list[str]:
    """Return a model's answers to user messages, computed on `device`.

    Each message is about all images and sounds of `media`. Without `prompts` the messages are those
    of a conversation on standard input, the first of which is about `media`.
    """
    place = place_of(device, ranks.owner)
    found = found_model(model, best=best, ranks=ranks)
    read = read_model_folder(found.folder)
    tokenizer = load_tokenizer(read.source)
    kwargs = prompts_as_trained(found, tokenizer)
    before = first_turns(tokenizer, system)
    settings = media_as_trained(found, tokenizer) if media else None

    def read_talks(talks: Sequence[Sequence[Turn]]) -> tuple[list[list[int]], list[TextMedia]]:
        if media:
            return read_prompts(talks, media, tokenizer, settings, kwargs)
        return [prompt_tokens(tokenizer, turns, kwargs) for turns in talks], []

    # Prompts are read first: what the template or the processor refuses is known before a load.
    talks = [[*before, {"role": "user", "content": one}] for one in prompts or [""]]
    asked, items = read_talks(talks)
    if media:
        read = read_model_folder(found.folder, media="all")
    home = ranks.long_work(lambda: read.load(read_only(read), owner=ranks.owner))
    with Engine(home.decoder, home.store, device=place, ranks=ranks) as engine:
        ends = eos_token_ids(tokenizer, home)
        if not prompts:
            converse(engine, tokenizer, ends, before, read_talks, max_new_tokens, drawing)
            return []
        made = continue_texts(engine, asked, max_new_tokens, ends, drawing, items)
    return [printed_answer(tokenizer, tokens) for tokens in made]


def look_at_data(
    path: Path,
    model: Path,
    max_length: int,
    samples: int,
    row_format: RowFormat = "auto",
    train_on: TrainOn = "assistant",
    *,
    name: str | None = None,
    split: str | None = None,
    columns: Mapping[str, str] = MappingProxyType({}),
    roles: Mapping[str, Sequence[str]] = MappingProxyType({}),
    max_rows: int | None = None,
    chat_template: str | None = None,
    whole: bool = False,
    media: str | None = None,
) -> None:
    """Print the format and lengths of a file, and which of its tokens would be trained.

    `media`: the folder of images and sounds. Raises DataError if a run with the default limits
    would refuse the rows.
    """
    tokenizer = load_tokenizer(tokenizer_folder(model))
    choose_template(tokenizer, chat_template)
    source = DataSource(
        path=str(path), format=row_format, name=name, split=split, rows=max_rows,
        columns=Arguments(columns), roles=Arguments(roles),
    )  # fmt: skip
    if marked_format(source) is not None:
        row_format = "kto"
        print(
            f"{path} has answers marked good or bad, so `megatrain train --data` trains on them by "
            "kto. --format shows them as other rows"
        )
    where: Where = located(path, name=name, split=split)
    prepared: PreparedData = prepare(
        as_token_files(where, tokenizer, max_length, dtype=None, eos=None),
        tokenizer,
        cache_dir=writable_cache_folder(),
        max_length=max_length,
        train_on=train_on,
        max_bad=1.0,
        max_dropped=1.0,
        max_lost_thoughts=1.0,
        wanted=row_format,
        columns=columns,
        roles=roles,
        max_rows=max_rows,
        media=media_settings(tokenizer, where=media),
    )
    _show(prepared, tokenizer, samples, whole=whole)
    check_limits(prepared.card, **{key: _DATA[key].default for key in _LIMITS})


def look_at_config(config: Config, samples: int, *, whole: bool = False) -> None:
    """Print the rows of a run, each source as `look_at_data` does, with the settings of the run.

    Raises DataError if the run would refuse them.
    """
    model = config.model
    source = find_model(model.name_or_path, revision=model.revision, need="tokenizer").folder
    tokenizer, _ = open_tokenizer(config, source, [], None)
    unlimited = config.data.model_copy(update=dict.fromkeys(_LIMITS, 1.0))
    lenient = config.model_copy(update={"data": unlimited})
    draws = config.loss.draws
    rows = gather_prompts(lenient, tokenizer, {}) if draws else gather(lenient, tokenizer)
    for prepared in rows.prepared:
        _show(prepared, tokenizer, samples, whole=whole)
    for prepared in rows.prepared:
        check_limits(prepared.card, **{key: getattr(config.data, key) for key in _LIMITS})


def _show(
    prepared: PreparedData | PromptSource,
    tokenizer: Any,
    samples: int,
    *,
    whole: bool,
) -> None:
    for line in card_lines(prepared.card):
        print(printable(line))
    if isinstance(prepared, PreparedData):
        show_prepared(prepared, tokenizer, samples, whole=whole)
    else:
        show_rows(prepared, tokenizer, samples, whole=whole)


def run_demo(folder: Path, num_steps: int) -> None:
    """Create a tiny model and data, verify the engine on it, train it, write a report."""
    if folder.exists():
        raise RunFolderError(f"{folder} exists. Give another name.")
    config = write_demo(folder, num_steps=num_steps)
    count = streamed_equals_resident(folder / "model")
    print(f"streamed = resident: {count} tensors bit-identical", flush=True)
    print(train_from(read_config(config, [])), flush=True)
    count = resumed_equals_uninterrupted(config, folder / "run", num_steps)
    print(f"resumed = uninterrupted: {count} files bit-identical", flush=True)
    for prompt, answer in zip(
        ("3 + 4", "9 + 8"), sample_from(folder / "run", ["3 + 4", "9 + 8"], 8), strict=True
    ):
        print(f"{prompt} = {answer}", flush=True)


def found_model(model: Path, *, best: bool, ranks: Ranks) -> RunModel:
    """Return the requested model, and print its name. Of ranks, one reads all of it to check it.

    Raises ConfigError if another rank has other code, or another model in that folder.
    """
    found = ranks.long_work(lambda: ranks.on_first(lambda: chosen_model(model, best=best)))
    if found is not None:
        print(found, file=sys.stderr, flush=True)
    chosen = RunModel.from_facts(ranks.decide(lambda: None if found is None else found.facts()))

    def facts() -> dict[str, str]:
        mark = ranks.long_work(lambda: folder_mark(chosen.folder))
        return installed_facts() | {f"model ({chosen.folder})": mark}

    ranks.require_same(facts)
    return chosen


def _plain_text(tokenizer: Any) -> Callable[[list[int]], str]:
    return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()

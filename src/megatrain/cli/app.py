"""The commands: parse, call one function, print. Heavy imports happen inside a command."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperGroup

from megatrain.choices import BaseForm, Method, RowFormat
from megatrain.errors import ConfigError, DiskError, DoesNotFit
from megatrain.ranks.launcher import num_restarts, read_environment
from megatrain.text import printable
from megatrain.version import __version__

if TYPE_CHECKING:
    from megatrain.planning.machine.examination import Examination


class _Group(TyperGroup):
    """The root, with a `--help` that is off by default.

    Typer leaves it None, and converting None to a bool imports pydantic: half of the start time.
    """

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Typer's text for a value that an option does not take is pydantic's."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


app = typer.Typer(
    cls=_Group,
    name="megatrain",
    help="Train Hugging Face language models larger than GPU memory, at full precision.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: importing rich would take half of the start time
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"megatrain {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Train Hugging Face language models larger than GPU memory, at full precision."""


ModelArgument = Annotated[
    Path, typer.Argument(help="Folder of a model, adapters, run or checkpoint, URL or Hub id.")
]
Best = Annotated[
    bool, typer.Option("--best", help="From a run, use the model with the lowest evaluation loss.")
]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token.")]
TopP = Annotated[
    float, typer.Option("--top-p", help="Sample from tokens with this total probability.")
]
SamplingSeed = Annotated[int, typer.Option(help="Seed for sampling.", min=0)]
Images = Annotated[
    list[Path] | None,
    typer.Option(help="An image that the prompts are about; may be repeated."),
]
Sounds = Annotated[
    list[Path] | None,
    typer.Option(help="A sound that the prompts are about; may be repeated."),
]
SystemMessage = Annotated[str | None, typer.Option(help="System message.")]
DeviceName = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or xpu.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Settings, like train.epochs=2.")]
Configuration = Annotated[str | None, typer.Option(help="Configuration of a Hub dataset.")]
Split = Annotated[
    str | None, typer.Option(help="Split, or a part like train[:1000]; default: train.")
]
ColumnsOption = Annotated[
    str | None, typer.Option(help="As in data.train: {prompt: Question, completion: Answer}.")
]
RolesOption = Annotated[
    str | None, typer.Option(help="As in data.train: {user: Customer, assistant: Agent}.")
]
ModelOption = Annotated[str | None, typer.Option(help="Model folder or Hub id.")]
DataOption = Annotated[
    str | None, typer.Option(help="Rows: a file, a folder, a Hub id, or YAML as for data.train.")
]
MethodOption = Annotated[
    Method | None, typer.Option(help="How to train; default: inferred from the data.")
]
ExportPrecision = Literal["bf16", "fp32"]
TrainOnOption = Literal["assistant", "last", "completion", "all"]
_GPU_FILE = Path("doctor-gpu.json")
"""All that `doctor --gpu` finds."""


def _require_model(model: Path) -> None:
    """Raise an error for a name that does not exist here or on the Hub, before importing torch."""
    if not model.exists():
        from megatrain.hub import find_model

        find_model(str(model), need="config")


def _tokens(option: str, text: str) -> int:
    from megatrain.config.quantities import read_tokens

    try:
        return read_tokens(text)
    except ValueError as error:
        raise ConfigError(f"{option} is {text}; {error}.") from None


def _names_of_rows(columns: str | None, roles: str | None) -> dict[str, Any]:
    """Return the columns and roles that options give, which are written as in a config."""
    from megatrain.config.value_types import read_columns, read_roles
    from megatrain.config.yaml_reader import parse_document

    found: dict[str, Any] = {}
    given = (("columns", columns, read_columns), ("roles", roles, read_roles))
    for option, text, read in given:
        if text is None:
            continue
        try:
            found[option] = read(parse_document(os.fsencode(text), f"--{option}").value)
        except ValueError as error:
            raise ConfigError(f"--{option} is {text}; {error}.") from None
    return found


@app.command(
    short_help="Train a model, from a config or --model and --data.",
    epilog="Example: megatrain train --model Qwen/Qwen3-0.6B --data train.jsonl train.epochs=2",
)
def train(
    config: Annotated[
        str | None,
        typer.Argument(help="YAML file, or URL of a run; none with --model and --data."),
    ] = None,
    overrides: Overrides = None,
    model: ModelOption = None,
    data: DataOption = None,
    method: MethodOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read data and model, but take no step.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue from the newest complete checkpoint, if any."),
    ] = False,
    gpus: Annotated[
        int | None, typer.Option(help="GPUs of this host to train on; default: one.", min=1)
    ] = None,
    rewards: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.py:NAME[=WEIGHT]",
            help="Reward function of loss grpo and its kin; may be repeated.",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print the whole plan and every note.")
    ] = False,
) -> None:
    """Train a model, from a YAML config or from --model and --data.

    Without a file the config is made as `init` makes it, and kept as run.yaml in the run folder.
    Ctrl-C finishes the step and saves; twice ends now.
    """
    from megatrain.cli.measuring import measure_first
    from megatrain.run.opening.pin_commits import (
        check_before_loading,
        config_at,
        pin_commits,
        read_config,
    )

    # Errors in the config, names that do not exist, a folder that is taken: before torch is
    # imported. Ranks that torchrun has started again resume, which only the run itself knows.
    owner, first = read_environment(os.environ), None
    if model is None and data is None and method is None:
        if config is None:
            raise ConfigError(
                "no config given. Give a YAML file, or --model and --data; `megatrain init` "
                "writes a file."
            )
        asked = read_config(config_at(config), overrides or [])
    else:
        from megatrain.cli.first_config import first_config

        words = [word for word in (config, *(overrides or [])) if word is not None]
        speaks = owner is None or owner.leads
        first = first_config(
            model, data, method, words, lambda note: typer.echo(note, err=True) if speaks else None
        )
        asked = first.config
    if owner is None and not num_restarts(os.environ):
        check_before_loading(asked, resumes=resume)
    if rewards and not asked.loss.draws:
        raise ConfigError(f"--rewards is given and loss.name is {asked.loss.name}. Set it to grpo.")
    if rewards and (owner is not None or (gpus or 1) > 1):
        raise ConfigError(
            "training on rewards is for one process: start it without --gpus and torchrun. Give "
            "other GPUs to vLLM, which draws the answers (rollouts.engine: vllm)."
        )
    pin_commits(asked)
    measure_first(asked.memory.device)
    if gpus is not None and gpus > 1:
        _launch(gpus, asked.memory.device)
    if first is not None and owner is None and not resume:
        first.planned()  # refuses what does not fit before anything is downloaded
    from megatrain.cli.verbs import train_from

    typer.echo(
        train_from(
            asked,
            dry_run=dry_run,
            resume=resume,
            verbose=verbose,
            first=first,
            rewards=rewards or (),
        )
    )


def _launch(num_ranks: int, device: str) -> NoReturn:
    """Start the command that this process was started with once for each rank, and end with it."""
    from megatrain.cli.launch import launch

    if read_environment(os.environ) is not None:
        raise ConfigError("--gpus starts ranks, but torchrun has started this one. Give it there.")
    raise typer.Exit(launch(num_ranks, sys.argv[1:], device))


@app.command(
    short_help="Ask a running training process for a checkpoint.",
    epilog="Example: megatrain save runs/mine",
)
def save(
    run: Annotated[Path, typer.Argument(help="Folder of a run that is training.")],
    wait: Annotated[float, typer.Option(help="Seconds to wait for the checkpoint.")] = 3600.0,
) -> None:
    """Ask a running training process for a checkpoint after its current step."""
    from megatrain.cli.checkpoint_verbs import save_now

    typer.echo(save_now(run, wait))


@app.command(
    "verify",
    short_help="Compare every byte of checkpoints with their hashes.",
    epilog="Example: megatrain verify runs/mine",
)
def verify_command(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint, or run folder for all.")],
) -> None:
    """Compare every byte of a checkpoint with the hashes saved in it."""
    from megatrain.cli.checkpoint_verbs import verify_checkpoints

    typer.echo(verify_checkpoints(checkpoint))


@app.command(
    name="eval",
    short_help="Print the loss and perplexity of a model on rows.",
    epilog="Example: megatrain eval runs/mine rows.jsonl --max-rows 500",
)
def evaluate(
    model: ModelArgument,
    data: Annotated[Path, typer.Argument(help="Rows to evaluate on: a file, or a Hub id.")],
    max_rows: Annotated[int | None, typer.Option(help="Maximum number of rows.", min=1)] = None,
    answers: Annotated[
        bool, typer.Option("--answers", help="Also generate answers and count exact matches.")
    ] = False,
    best: Best = False,
    max_length: Annotated[
        str | None,
        typer.Option(help="Longest row, like 2k; default: that of the run or the model."),
    ] = None,
    name: Configuration = None,
    split: Split = None,
    columns: ColumnsOption = None,
    roles: RolesOption = None,
) -> None:
    """Print the loss and perplexity of a model on a file or a Hub dataset."""
    names = _names_of_rows(columns, roles)
    length = None if max_length is None else _tokens("--max-length", max_length)
    _require_model(model)
    from megatrain.cli.verbs import evaluate_model
    from megatrain.run.evaluation.judging import device_of
    from megatrain.run.this_rank import joined

    options: dict[str, Any] = {"max_length": length, "name": name, "split": split, **names}
    with joined(device_of(model)) as options["ranks"]:
        found = evaluate_model(model, data, max_rows, answers=answers, best=best, **options)
        typer.echo(printable(found))


@app.command(
    short_help="Write a run's model as a Hugging Face folder, or as GGUF.",
    epilog="Example: megatrain export runs/mine my-model",
)
def export(
    model: ModelArgument,
    target: Annotated[
        Path | None, typer.Argument(help="Folder to create, or URL; none with --gguf.")
    ] = None,
    gguf: Annotated[
        Path | None,
        typer.Option(help="Write this file instead of a folder, by llama.cpp's converter."),
    ] = None,
    best: Best = False,
    dtype: Annotated[
        ExportPrecision | None,
        typer.Option(help="fp32 writes the masters; default: the training precision."),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Add adapters to the weights of their model.")
    ] = False,
) -> None:
    """Write a run's model as a Hugging Face folder; of a run with adapters, those alone.

    With --gguf the model is one file for llama.cpp and Ollama.
    """
    if (target is None) is (gguf is None):
        raise ConfigError("export writes one thing: give a folder to create, or --gguf FILE.")
    if gguf is not None and read_environment(os.environ) is not None:
        raise ConfigError("export --gguf is one process. Start it without torchrun.")
    _require_model(model)
    from megatrain.cli.exporting import export_gguf, export_model
    from megatrain.run.this_rank import joined

    if gguf is not None:
        typer.echo(export_gguf(model, gguf, best=best, dtype=dtype, merge=merge))
    if target is not None:
        with joined("cpu") as ranks:
            done = export_model(model, target, best=best, dtype=dtype, merge=merge, ranks=ranks)
            typer.echo(done)


@app.command(
    short_help="Upload a run's model with a model card to the Hugging Face Hub.",
    epilog="Example: megatrain push runs/mine me/my-model",
)
def push(
    model: Annotated[Path, typer.Argument(help="Run folder, or a checkpoint of it.")],
    repo: Annotated[str, typer.Argument(help="Repository on the Hub, like me/my-model.")],
    best: Best = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="Add adapters to the weights of their model.")
    ] = False,
    private: Annotated[
        bool, typer.Option("--private/--public", help="Who sees a new repository.")
    ] = True,
) -> None:
    """Upload a run's model with a model card to the Hub; of a run with adapters, those alone."""
    from megatrain.hub import require_repository

    require_repository(repo)
    if not model.is_dir():
        raise ConfigError(f"{model}: no such folder. Give a run folder.")
    if read_environment(os.environ) is not None:
        raise ConfigError("push is one process. Start it without torchrun.")
    from megatrain.cli.exporting import push_run

    typer.echo(push_run(model, repo, best=best, merge=merge, private=private))


@app.command(
    short_help="Generate a model's answers to prompts, or talk with it.",
    epilog='Example: megatrain sample runs/mine "Who are you?" --temperature 0.7',
)
def sample(
    model: ModelArgument,
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Prompts, each a user message; none: a conversation.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="Maximum tokens of an answer; default: 64, in a chat 512.", min=1),
    ] = None,
    image: Images = None,
    audio: Sounds = None,
    temperature: Temperature = 0.0,
    best: Best = False,
    top_p: TopP = 1.0,
    seed: SamplingSeed = 0,
    system: SystemMessage = None,
    device: DeviceName = "auto",
) -> None:
    """Generate a model's answers to prompts.

    Without a prompt each line of standard input is a message of one conversation; Ctrl-D ends it.
    """
    prompts = prompts or []
    if not prompts and read_environment(os.environ) is not None:
        raise ConfigError("A conversation is one process. Start it without torchrun.")
    _require_model(model)
    from megatrain.cli.verbs import sample_from
    from megatrain.engine.compute.drawing import SamplingParams
    from megatrain.run.this_rank import joined

    drawing = SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
    options: dict[str, Any] = {"system": system, "device": device, "best": best}
    options["media"] = [("image", one) for one in image or ()]
    options["media"] += [("audio", one) for one in audio or ()]
    with joined(device) as options["ranks"]:
        longest = max_new_tokens or (64 if prompts else 512)
        answers = sample_from(model, prompts, longest, drawing, **options)
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            if len(prompts) > 1:
                typer.echo(f"{'' if number == 0 else chr(10)}> {printable(prompt)}")
            typer.echo(printable(answer))


@app.command(
    short_help="Write one HTML file that shows a run, or compares several.",
    epilog="Example: megatrain report runs/one runs/two --to both.html",
)
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; two or more are compared.")],
    to: Annotated[Path | None, typer.Option(help="HTML file to write.")] = None,
) -> None:
    """Write one HTML file that shows a run, or compares several."""
    from megatrain.cli.verbs import report_on

    typer.echo(report_on(runs, to))


_SOURCE_KEY = "data.train={path: ..., %s: ...}"
_KEYS_OF_ROWS = {
    "max_length": "data.max_length=...",
    "train_on": "data.train_on=...",
    "chat_template": "data.chat_template=...",
    "media": "data.media=...",
    "row_format": _SOURCE_KEY % "format",
    **{name: _SOURCE_KEY % name for name in ("name", "split", "columns", "roles", "rows")},
}
"""Options of `data` for rows without a config, and what says the same behind a config."""


def _named(option: str) -> str:
    return "--format" if option == "row_format" else f"--{option.replace('_', '-')}"


@app.command(
    short_help="Show the rows of a dataset and which tokens are trained.",
    epilog="Example: megatrain data rows.jsonl -m Qwen/Qwen3-0.6B --samples 2",
)
def data(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="File of rows, Hub id, or config of a run.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings, if it is a config of a run.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("-m", "--model", help="Model folder or Hub id; a config names its own."),
    ] = None,
    max_length: Annotated[str, typer.Option(help="Longest row, in tokens, like 2k.")] = "2048",
    samples: Annotated[int, typer.Option(help="Rows to show of each source.")] = 3,
    whole: Annotated[bool, typer.Option("--whole", help="Do not cut long rows.")] = False,
    row_format: Annotated[RowFormat, typer.Option("--format", help="As in data.train.")] = "auto",
    train_on: Annotated[TrainOnOption, typer.Option(help="Same as data.train_on.")] = "assistant",
    chat_template: Annotated[str | None, typer.Option(help="Same as data.chat_template.")] = None,
    name: Configuration = None,
    split: Split = None,
    columns: ColumnsOption = None,
    roles: RolesOption = None,
    rows: Annotated[int | None, typer.Option(help="Read so many rows.", min=1)] = None,
    media: Annotated[str | None, typer.Option(help="Folder of images and sounds.")] = None,
) -> None:
    """Show a dataset's format, lengths and bad rows, and which tokens are trained.

    With the config of a run, its rows are shown exactly as the run would train on them.
    """
    length = _tokens("--max-length", max_length)
    names = _names_of_rows(columns, roles)
    if path.suffix in (".yaml", ".yml"):
        if model is not None:
            raise ConfigError(f"{path} names its model. Give model=... behind it, not -m.")
        for option, key in _KEYS_OF_ROWS.items():
            if (source := context.get_parameter_source(option)) and source.name != "DEFAULT":
                raise ConfigError(
                    f"{_named(option)} is for a file of rows, and {path} is the config of a run. "
                    f"Give {key} behind it instead, or edit it."
                )
        from megatrain.run.opening.pin_commits import pin_commits, read_config

        config, _ = pin_commits(read_config(path, overrides or []))
        from megatrain.cli.verbs import look_at_config

        return look_at_config(config, samples, whole=whole)
    if model is None:
        raise ConfigError(f"-m is missing: the model whose tokens {path} becomes.")
    if overrides:
        raise ConfigError(f"{overrides[0]}: settings follow the config of a run; {path} is data.")
    _require_model(model)
    from megatrain.cli.verbs import look_at_data

    return look_at_data(
        path, model, length, samples, row_format, train_on,
        name=name, split=split, max_rows=rows, chat_template=chat_template, whole=whole,
        media=media, **names,
    )  # fmt: skip


@app.command(
    short_help="Write a config for a model and rows, or from another tool's.",
    epilog="Example: megatrain init run.yaml --model Qwen/Qwen3-8B --data train.jsonl --gpu 4090",
)
def init(
    target: Annotated[Path, typer.Argument(help="YAML file to write.")] = Path("run.yaml"),
    overrides: Overrides = None,
    model: ModelOption = None,
    data: DataOption = None,
    method: MethodOption = None,
    gpu: Annotated[
        str | None, typer.Option(help="Machine to fit, like 4090 or 24GB; default: this one.")
    ] = None,
    ram: Annotated[str | None, typer.Option(help="Host memory of that machine.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Config of LLaMA-Factory, Axolotl or TRL.")
    ] = None,
) -> None:
    """Write a config for a model and rows that fits a machine, or begin one from another tool's.

    Without any option, a starter config with names to replace.
    """
    own = {"--model": model, "--data": data, "--method": method, "--gpu": gpu, "--ram": ram}
    given = [name for name, value in own.items() if value is not None] + (overrides or [])[:1]
    if not given:
        from megatrain.cli.starting import init_config

        return init_config(target, source, say=typer.echo)
    if source is not None:
        raise ConfigError(f"--from reads a config; {given[0]} is for a new one. Give one.")
    from megatrain.cli.first_config import first_config, require_free, write_first
    from megatrain.cli.measuring import measure_first

    require_free(target)
    first = first_config(model, data, method, overrides or [], typer.echo)
    if gpu is None:
        measure_first(first.config.memory.device)
    return write_first(target, first.planned(gpu, ram), typer.echo)


@app.command(
    short_help="Test this machine: a tiny model learns sums.",
    epilog="Example: megatrain demo megatrain-demo",
)
def demo(
    folder: Annotated[Path, typer.Argument(help="Folder to create.")] = Path("megatrain-demo"),
    steps: Annotated[int, typer.Option(help="Steps to train.", min=2)] = 120,
) -> None:
    """Test this machine: a tiny model learns sums. No network, no GPU."""
    from megatrain.cli.verbs import run_demo

    run_demo(folder, steps)


@app.command(
    short_help="Measure this machine; plans use the results. Check a GPU.",
    epilog="Example: megatrain doctor --gpu",
)
def doctor(
    folder: Annotated[Path, typer.Argument(help="Folder whose disk is measured.")] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Some seconds: rougher, and without the disk.")
    ] = False,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu", help="Check too that a GPU computes correctly; write a file to send."
        ),
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="With --gpu: auto, cuda, cuda:N, xpu or cpu; default: auto.")
    ] = None,
) -> None:
    """Measure this machine; later plans use the results. Under torchrun, the network too.

    With --gpu, first check that tiny models have the right bits on the device; doctor-gpu.json
    has all results. The first plan on a machine that was never measured takes the quick
    measurement by itself.
    """
    if gpu:
        raise typer.Exit(_check_gpu(device or "auto", folder, quick=quick, as_json=as_json))
    if device is not None:
        raise ConfigError(f"--device is {device}, but without --gpu. Add --gpu, or leave it out.")
    from megatrain.doctor.examine import examine_together, keep, stage_line
    from megatrain.planning.machine.examination import kept_examination

    begin = time.monotonic()
    kept: list[str] = []

    def say(what: str) -> None:
        typer.echo(stage_line(what, time.monotonic() - begin, quick=quick), err=True)

    def keep_part(part: Examination) -> None:
        before = kept_examination()
        if before is not None and before.folder:  # a whole one is better
            return
        with suppress(DiskError):  # the end of the command says so
            keep(part)
            kept.append(part.text())

    try:
        found = examine_together(folder, say, keep_part, quick=quick)
    except KeyboardInterrupt:
        if not kept:
            raise
        typer.echo(kept[-1])
        typer.echo(
            "stopped: plans use what was measured so far. Run `megatrain doctor` again for trial "
            "steps and the disk",
            err=True,
        )
        raise typer.Exit(130) from None
    if found is not None:
        typer.echo(found.to_json() if as_json else found.text())
        _keep_examination(found, quick=quick)


def _check_gpu(device: str, folder: Path, *, quick: bool, as_json: bool) -> int:
    """Check a device and write the file to send; return the exit code."""
    from megatrain.doctor.gpu_check.check import check_device
    from megatrain.files import write_file

    found = check_device(
        device, folder, lambda what: typer.echo(f"checking {what} ...", err=True), quick=quick
    )
    write_file(_GPU_FILE, found.to_json().encode(), durable=False)
    typer.echo(found.to_json() if as_json else found.text())
    typer.echo(f"send {_GPU_FILE}", err=True)
    if found.examination is not None and not found.exit_code:
        _keep_examination(found.examination, quick=quick)
    return found.exit_code


def _keep_examination(found: Examination, *, quick: bool) -> None:
    """Keep an examination for plans, unless it is quick and a whole one was kept before."""
    from megatrain.doctor.examine import keep
    from megatrain.planning.machine.examination import kept_examination

    before = kept_examination()
    if quick and before is not None and before.folder:
        typer.echo("not kept: the whole examination of this machine is better", err=True)
    else:
        keep(found)


@app.command(
    "estimate",
    short_help="Predict whether a model fits, its speed and its cost.",
    epilog="Example: megatrain estimate Qwen/Qwen3-8B --gpu 4090 --ram 128GB",
)
def estimate_command(
    model: Annotated[
        str, typer.Argument(help="Known model, model folder, config.json, or run.yaml.")
    ] = "",
    overrides: Overrides = None,
    gpu: Annotated[
        str | None, typer.Option(help="Like 4090, 24GB or none; default: this machine.")
    ] = None,
    ram: Annotated[str | None, typer.Option(help="Installed host memory, like 128GB.")] = None,
    disk: Annotated[
        str | None, typer.Option(help="Disk for states that host memory cannot hold, like 2TB.")
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens to train on, like 1e9.")] = None,
    seq: Annotated[str | None, typer.Option(help="Short for data.max_length.")] = None,
    batch_tokens: Annotated[str | None, typer.Option(help="Short for train.batch_tokens.")] = None,
    lora: Annotated[int | None, typer.Option(help="Short for lora.rank: adapters alone.")] = None,
    base: Annotated[
        BaseForm | None, typer.Option(help="Short for model.base: the form of the frozen model.")
    ] = None,
    rollouts: Annotated[
        str | None,
        typer.Option(help="Answers and their tokens in a step on rewards, like 64x1024."),
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Price of an hour of all machines, like 0.34.")
    ] = None,
    by_price: Annotated[
        bool, typer.Option("--cheapest", help="List machines to rent, by the price of 10M tokens.")
    ] = False,
    gpus: Annotated[int, typer.Option(help="GPUs of each host.")] = 1,
    hosts: Annotated[int, typer.Option(help="Hosts, with that memory each.")] = 1,
    network: Annotated[str | None, typer.Option(help="Between hosts, like 25GbE or 3GB/s.")] = None,
    list_known: Annotated[bool, typer.Option("--list", help="List known models and GPUs.")] = False,
    details: Annotated[
        bool, typer.Option("--details", help="Print all lines of memory and all choices.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict whether a model fits, how fast it trains, the bottleneck and the cost."""
    from megatrain.planning.estimate import estimate as estimated
    from megatrain.planning.estimate import known

    if list_known:
        typer.echo(known())
        return
    if not model:
        raise ConfigError("no model given. Give a name, a folder or a run.yaml; --list shows names")
    if by_price:
        from megatrain.planning.cheapest import cheapest

        options = {
            "--gpu": gpu, "--gpus": gpus > 1, "--hosts": hosts > 1, "--network": network,
            "--rollouts": rollouts, "--details": details,
        }  # fmt: skip
        if given := [name for name, value in options.items() if value not in (None, False)]:
            raise ConfigError(
                "--cheapest lists single cards by what tokens cost. Leave out "
                f"{' and '.join(given)}."
            )
        offers = cheapest(
            model,
            overrides or [],
            ram=ram,
            tokens=tokens,
            seq=seq,
            batch_tokens=batch_tokens,
            lora=lora,
            base=base,
            disk=disk,
            price=price,
        )
        typer.echo(offers.to_json() if as_json else str(offers))
        raise typer.Exit(0 if offers.offers else DoesNotFit.exit_code)
    if gpu is None:
        from megatrain.cli.measuring import measure_first

        measure_first()
    found = estimated(
        model,
        overrides or [],
        gpu=gpu,
        ram=ram,
        disk=disk,
        tokens=tokens,
        seq=seq,
        batch_tokens=batch_tokens,
        lora=lora,
        base=base,
        rollouts=rollouts,
        price=price,
        gpus=gpus,
        hosts=hosts,
        network=network,
    )
    typer.echo(found.to_json() if as_json else found.text(details=details))
    raise typer.Exit(0 if found.fits else DoesNotFit.exit_code)

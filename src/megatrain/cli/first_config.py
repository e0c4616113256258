"""A first config from a model and rows: `init --model --data`, and `train` without a file.

    model, rows, method, settings  ->  first_config: a Config, its rows looked at    no torch
                                   ->  planned: the verdict for a machine
                                   ->  text: YAML with the keys that people change

Laws (tests/cli/test_first_config.py)
    1. The text loads as the config that it was made from, with every setting that was given.
    2. A method that was not given is chosen by the rows, and a note says which and why. Rows that
       do not suit a method that was given are refused, with the words that would suit them.
    3. Names, rows and settings are refused without torch.
    4. A run that does not fit the machine is refused with changes to add to the command.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

from megatrain.choices import Method, PreferenceFormat, RowFormat
from megatrain.config import Config
from megatrain.config.aliases import our_key
from megatrain.config.load import resolve_config, write_yaml
from megatrain.config.quantities import write_bytes
from megatrain.config.sections import COMPARED, REWARDED, DataSettings, DataSource
from megatrain.config.yaml_reader import Document, parse_document, scalar
from megatrain.data.rows.formats import Format
from megatrain.data.rows.hub_rows import located
from megatrain.data.rows.reading import FIRST_ROWS, parsed
from megatrain.data.rows.source import RowSource, open_source
from megatrain.data.rows.token_files import token_files
from megatrain.data.rows.turns import Names
from megatrain.errors import ConfigError, DataError, DoesNotFit
from megatrain.files import write_file
from megatrain.hub import find_model
from megatrain.planning.catalog.known_models import find_known_model
from megatrain.planning.estimate import Estimate, estimate
from megatrain.planning.machine.examination import kept_examination
from megatrain.planning.plan import Plan
from megatrain.progress import Say
from megatrain.text import printable

FILE = "run.yaml"
"""Name of the config in the folder of a run that was started without a file."""
_HELD_OUT = 0.02
_COMPARED: dict[str, PreferenceFormat] = dict(COMPARED.items())
_USUAL = {
    ("data", "train"): None,
    ("data", "eval"): None,
    ("data", "max_length"): DataSettings.model_fields["max_length"].default,
    ("lora", "rank"): None,
    ("train", "epochs"): 1,
    ("train", "batch_tokens"): "auto",
    ("optim", "learning_rate"): "auto",
    ("save", "dir"): None,
    ("log", "to"): [],
}
"""The keys that people change, beside the model: they stand in every first config."""
_INSTEAD = {"epochs": "steps", "batch_tokens": "batch_rows", "rank": "path"}
"""Keys that stand for others of them."""
_PLAIN = re.compile(r"[A-Za-z_./~][\w./~@+-]*", re.ASCII)
_NAMED = {
    "model": "--model", "model.name_or_path": "--model", "data": "--data", "data.train": "--data"
}  # fmt: skip
"""Keys that options set, as a whole section too."""
_UNPLANNED = "not planned: `megatrain train FILE --dry-run` shows memory and speed"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstConfig:
    """A config that nobody has written yet."""

    config: Config
    rows: str
    """Format of the rows, as found."""
    verdict: str = _UNPLANNED
    step_tokens: int | None = None
    """Tokens of a step in the plan; None without one."""

    def planned(self, gpu: str | None = None, ram: str | None = None) -> FirstConfig:
        """Return it with the verdict for a machine: the one that is named, or this one.

        This machine has a verdict if the device of the run was measured. Raises DoesNotFit with
        changes that would fit, and ConfigError for a machine that nobody knows.
        """
        if gpu is None and ram is None and not self._can_be_planned_here():
            return self
        found = estimate(self.config.model.name_or_path, list(self._words()), gpu=gpu, ram=ram)
        if not found.fits:
            ways = "\n".join(found.plan.ways_out(*found.alternatives))
            raise DoesNotFit(f"{found.verdict()}\n{ways}\n{_ADD}")
        return replace(
            self, verdict=_verdict(found, ram), step_tokens=found.plan.workload.step_tokens
        )

    def of_run(self, plan: Plan) -> FirstConfig:
        """Return it with the verdict of a run's own plan."""
        verdict = f"{plan.verdict()}\non {plan.profile.name}"
        return replace(self, verdict=verdict, step_tokens=plan.workload.step_tokens)

    def _can_be_planned_here(self) -> bool:
        """Return whether this machine, as measured, is the one that the run would compute on."""
        found, config = kept_examination(), self.config
        if found is None or (config.lora.path is not None and config.lora.rank is None):
            return False
        return config.memory.device != "cpu" or found.profile.on_host

    def _words(self) -> Iterator[str]:
        """Yield the settings as overrides of a command, without model and rows."""
        for section, values in _given(self.config).items():
            for key, value in values.items():
                if f"{section}.{key}" not in _NAMED:
                    yield f"{section}.{key}={write_yaml(value)}"

    def text(self) -> str:
        """Return the YAML file."""
        given = _given(self.config)
        head = [*printable(self.verdict).splitlines(), "Every other key is in docs/config.md."]
        lines = [(f"# {line}", "") for line in head]
        comments = self._comments()
        for section in Config.model_fields:
            values = _shown(section, given.get(section, {}))
            if set(values) == {"name_or_path"}:
                name = _yaml(values["name_or_path"])
                lines.append((f"model: {name}", comments["model.name_or_path"]))
            elif values:
                lines.append((f"{section}:", ""))
                lines += [
                    (f"  {key}: {_yaml(value)}", comments.get(f"{section}.{key}", ""))
                    for key, value in values.items()
                ]
        width = max(len(line) for line, comment in lines if comment and len(line) < 48)
        return "".join(
            f"{line:{width}}  # {printable(comment)}\n" if comment else f"{line}\n"
            for line, comment in lines
        )

    def _comments(self) -> dict[str, str]:
        """Return what people should know about the keys that they change, by key."""
        step = "" if self.step_tokens is None else f", here at most {self.step_tokens:,}"
        return {
            "model.name_or_path": "a folder, or an id on the Hugging Face Hub",
            "data.train": self.rows,
            "data.eval": "share of the rows to hold out, or a file; null: no evaluation",
            "data.max_length": "tokens of the longest row; data.overlong is what happens to others",
            "loss.name": "rows of preferences; loss.beta is their strength",
            "lora.rank": "null trains all weights, 16 or more adapters alone",
            "train.epochs": "passes over the rows; train.steps counts steps instead",
            "train.batch_tokens": f"tokens of a step; auto is 32k, fewer for small data{step}",
            "optim.learning_rate": "auto: 1e-5; 1e-4 for adapters; preferences a tenth of these",
            "save.dir": "the run: its model, checkpoints and report.html",
            "log.to": "beside metrics.jsonl: [tensorboard], [wandb], [trackio] or [mlflow]",
        }


_ADD = "Settings among them can be added to this command; for another model change --model."


def first_config(
    model: str | None,
    data: str | None,
    method: Method | None,
    overrides: Sequence[str],
    say: Say = lambda _: None,
) -> FirstConfig:
    """Return the config of a model and rows, which are looked at; `say` gets choices made of them.

    `data` is a path, a Hub id, or YAML as `data.train` takes it. Raises ConfigError, DataError,
    ModelFolderError or HubError.
    """
    for word in overrides:
        if "=" not in word:
            raise ConfigError(
                f"{word:.100} is a file, and --model, --data and --method are for a run without "
                "one. Give settings behind the file instead, like model=... or lora.rank=16."
            )
        name = word.partition("=")[0].strip()
        if option := _NAMED.get(our_key(tuple(name.split("."))) or name):
            raise ConfigError(f"{word:.100}: {option} gives it already. Remove one of the two.")
    if model is None or data is None:
        raise ConfigError(
            f"{'--data' if data is None else '--model'} is missing: without a file, --model and "
            "--data say what is trained, like --model Qwen/Qwen3-0.6B --data train.jsonl"
        )
    name, notes = _model(model)
    sources = data if Path(data).exists() else parse_document(data.encode(), "--data").value
    bare = {"model": {"name_or_path": name}, "data": {"train": sources, "eval": _HELD_OUT}}
    asked = _resolved(bare, _settings(method or "sft"), overrides)  # their faults come first
    chosen, shape = _suited(asked, method, notes)
    settings = _settings(chosen)
    config = _resolved(bare, settings | {"save.dir": asked.run_dir}, overrides)
    if config.loss.name != settings.get("loss.name", "next_token"):
        raise ConfigError(
            f"--method {method} and loss.name={config.loss.name} are two methods. Give one of them."
        )
    for note in notes:
        say(printable(note))
    return FirstConfig(config=config, rows=str(shape))


def require_free(target: Path) -> None:
    """Raise ConfigError if a file of this name exists."""
    if target.exists():
        raise ConfigError(f"{target} exists. Give another name.")


def write_first(target: Path, first: FirstConfig, say: Say) -> None:
    """Write a config to a file, and say whether it fits."""
    write_file(target, first.text().encode())
    say(printable(first.verdict))
    say(f"wrote {target}: `megatrain train {target}` trains it")


def _model(asked: str) -> tuple[str, list[str]]:
    """Return the name of a model that is here, known or on the Hub, and a note if it was short."""
    known = None
    if not Path(asked).exists():
        with suppress(ConfigError):
            known = find_known_model(asked).name
    if known is not None and "/" not in asked:
        return known, [f"--model {asked} is {known} on the Hugging Face Hub"]
    if known != asked:  # that of another owner may differ
        find_model(asked, need="config")
    return asked, []


def _resolved(
    bare: Mapping[str, Any], settings: Mapping[str, Any], overrides: Sequence[str]
) -> Config:
    """Return the config of a model and rows, with the settings of a method, then the user's."""
    value = {section: dict(values) for section, values in bare.items()}
    for key, setting in settings.items():
        section, _, leaf = key.partition(".")
        value.setdefault(section, {})[leaf] = setting
    return resolve_config(Document(name="the command", value=value), overrides)


def _settings(method: Method) -> dict[str, Any]:
    """Return the settings that are a method, by key."""
    own: dict[Method, dict[str, Any]] = {
        "sft": {},
        "lora": {"lora.rank": 16},
        "pretrain": {"data.overlong": "split"},
    }
    return own.get(method, {"loss.name": method})


def _suited(config: Config, method: Method | None, notes: list[str]) -> tuple[Method, Format]:
    """Return the method and the format of the rows; a choice becomes a note. Raises DataError."""
    name = config.loss.name
    if name in REWARDED:
        raise ConfigError(
            f"loss.name is {name}: training on rewards needs a config with prompts and "
            "rollouts. docs/rewards.md has one of 6 lines; run it with `megatrain train run.yaml "
            "--rewards rewards.py:correct`."
        )
    for source in config.data.train:
        if token_files(source.path):
            raise ConfigError(
                f"{source.path} has token ids: how long to train on them, and what ends a document "
                "there, is for a config to say. docs/data.md#token-files has one of 7 lines; run "
                "it with `megatrain train run.yaml`."
            )
    if method is None and name != "next_token":
        method = cast("Method", name)  # all others are methods, too
    compared = None if method is None else _COMPARED.get(method)
    sources = config.data.train
    shapes = [_format(source, compared) for source in sources]
    shape, path = shapes[0], sources[0].path
    if method is None:
        marked = [one for source in sources if (one := marked_format(source)) is not None]
        shape = marked[0] if len(marked) == len(sources) else shape
        return _by_rows(shape, path, notes), shape
    if compared is None and shape.preferences is not None:
        raise DataError(
            f"{path} has preferences ({shape}), and --method {method} trains on one answer a row. "
            f"Give --method {_by_rows(shape, path, [])}{', and lora.rank=16' * (method == 'lora')}."
        )
    if method == "pretrain" and shape.is_conversation:
        raise DataError(
            f"{path} has conversations ({shape}), and --method pretrain trains on rows with a "
            "column text. Give --method sft, with data.train_on=all to train on every token."
        )
    return method, shape


def _by_rows(shape: Format, path: str, notes: list[str]) -> Method:
    if shape.preferences == "pairs":
        notes.append(
            f"--method is not given: {path} has pairs of answers, so it is dpo. ipo, orpo and "
            "simpo train on them too"
        )
        return "dpo"
    if shape.preferences == "kto":
        notes.append(
            f"--method is not given: {path} has answers marked good or bad, so it is kto. "
            "--method sft trains on all of them alike"
        )
        return "kto"
    if shape.kind == "text":
        notes.append(
            f"--method is not given: {path} has plain text, so it is pretrain: every token is "
            "trained, and longer rows are split"
        )
        return "pretrain"
    return "sft"


def _format(source: DataSource, compared: PreferenceFormat | None) -> Format:
    """Return the format of the rows of a source, for a method that compares such answers."""
    if source.format != "auto" or compared is None:
        return _opened(source, source.format).format
    try:
        return _opened(source, compared).format
    except DataError as error:
        other = _by_rows(_opened(source, "auto").format, source.path, [])
        raise DataError(f"{error} Give --method {other}.") from None


def marked_format(source: DataSource) -> Format | None:
    """Return the format of rows whose answers are each marked true or false; None: they are not.

    Numbers or names in such a column may be anything, so rows with those are not meant here.
    """
    if source.format != "auto":
        return None
    try:
        found = _opened(source, "kto")
    except DataError:
        return None
    mark = found.format.columns[-1]
    first = [parsed(value) for _, value in islice(found.values(), FIRST_ROWS)]
    names = found.format.names or Names()
    cells = [names.read(row).get(mark) for row in first if isinstance(row, Mapping)]
    is_marked = all(str(cell).lower() in ("true", "false") for cell in cells)
    return found.format if is_marked and cells else None


def _opened(source: DataSource, wanted: RowFormat) -> RowSource:
    where = located(source.path, name=source.name, split=source.split, revision=source.revision)
    return open_source(
        where, wanted, columns=source.columns, roles=source.roles, max_rows=source.rows
    )


def _given(config: Config) -> dict[str, dict[str, Any]]:
    """Return the settings that were given, as YAML has them, by section and key."""
    found = config.model_dump(mode="json", exclude_unset=True)
    for key in ("vram", "ram"):
        if isinstance(size := found.get("memory", {}).get(key), int):
            found["memory"][key] = write_bytes(size)
    for key in ("train", "eval"):
        sources = found["data"].get(key)
        if isinstance(sources, list):
            short = [each["path"] if set(each) == {"path"} else each for each in sources]
            found["data"][key] = short[0] if len(short) == 1 else short
    return found


def _shown(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lines of a section: the keys that people change, then the others that are set."""
    usual = {key: value for (of, key), value in _USUAL.items() if of == section}
    return {
        key: value
        for key, value in (usual | dict(values)).items()
        if (key in values and value is not None) or _INSTEAD.get(key) not in values
    }


def _yaml(value: Any) -> str:
    """Return a value as people write it: a name without quotes, where YAML reads it as text."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and scalar(value) == value:
        return value
    return write_yaml(value)


def _verdict(found: Estimate, ram: str | None) -> str:
    """Return the verdict and the machine that it is for."""
    memory = "" if ram is None else f" with {ram}"
    return f"{found.verdict()}\non {found.machine}{memory} ({found.figures})"

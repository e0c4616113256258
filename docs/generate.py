"""Write the pages that are made from code: `python docs/generate.py`.

    config.md      ten keys, examples, and every setting, from megatrain.config
    errors.md      every error, from megatrain.errors
    cli.md         every command, from megatrain.cli.app
    migration.md   names of other tools, from megatrain.config.aliases
    timeline.svg   a step, from the simulator: timeline.py
    README.md      its table of models and machines, from megatrain.planning.estimate

tests/test_docs.py checks that the pages are up to date.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any, get_args

import typer.main

from megatrain import errors
from megatrain.cli.app import app
from megatrain.config.aliases import ALIASES
from megatrain.config.load import write_yaml
from megatrain.config.sections import (
    DataSource,
    GroupSettings,
    RopeSettings,
    Section,
)
from megatrain.config.settings import SECTIONS, SHORT_FORMS
from megatrain.config.value_types import TypeName
from megatrain.planning.estimate import Estimate, estimate
from megatrain.planning.prediction import predicted_speed, predicted_time

HERE = Path(__file__).parent
README = HERE.parent / "README.md"

FITS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("Qwen/Qwen3-4B", "3060", "64GB", ()),
    ("Qwen/Qwen3-8B", "3090", "64GB", ("optim.state=8bit",)),
    ("Qwen/Qwen3-8B", "4090", "128GB", ()),
    ("Qwen/Qwen3-14B", "3090", "128GB", ("optim.state=8bit",)),
    ("Qwen/Qwen3-32B", "5090", "384GB", ("optim.state=bf16",)),
    ("openai/gpt-oss-120b", "H200", "1.5TB", ("optim.state=bf16",)),
)
"""Models and machines of that table, as `megatrain estimate` takes them."""
FITS_HEAD = """
| model | GPU, host memory | fits | optimizer states | tok/s, predicted | 10M tokens take |
|---|---|---|---|---|---|
"""
CONFIG_HEAD = """# Config

A run is one YAML file with sections. This is the shortest:

```yaml
model: Qwen/Qwen3-8B
data: train.jsonl
```

Everything else has a default. This page begins with the ten keys that most people set, and an
[example](#examples) for each method. Then it says [how values are written](#values) and lists all
keys, section by section.

## Ten keys

| key | what to choose |
|---|---|
"""
TEN_KEYS = {
    "model": (
        "An id of the Hugging Face Hub, or a folder. `megatrain estimate MODEL` says whether it "
        "fits, before a download."
    ),
    "data.train": (
        "A file, a folder, a dataset of the Hub, or a list of them "
        "([formats](data.md#files-and-formats)). `megatrain data run.yaml` shows what will be "
        "trained."
    ),
    "data.eval": (
        "`0.02` holds 2 % of the rows out. To compare runs with each other, give a file of its "
        "own instead."
    ),
    "data.max_length": (
        "The length of almost all of your rows; `megatrain data` prints their lengths. Longer "
        "rows are dropped and counted. Working memory on the device grows with it."
    ),
    "train.epochs": (
        "1 for tens of thousands of rows, 2 or 3 for hundreds or a few thousand. More epochs "
        "learn the rows by heart."
    ),
    "train.batch_tokens": (
        "`auto` is 32,768 tokens, fewer for small data, and the same on every machine. Give "
        "`train.batch_rows` instead where a number of rows is part of the recipe: for preferences, "
        "and for configs of other tools (rows x accumulation x GPUs). A longer step needs more "
        "host memory, but not more device memory, where its micro-batches are computed one after "
        "another."
    ),
    "optim.learning_rate": (
        "`auto` is 1e-5 for fine-tuning and 1e-6 for preferences, and ten times as much with "
        "adapters. If the loss jumps, take a third of it; if it hardly falls, three times as "
        "much."
    ),
    "lora.rank": (
        "Leave it out to train all weights. 16 trains [adapters](adapters.md), with about a "
        "seventh of the host memory; take 64 or more for large changes."
    ),
    "save.dir": (
        "One folder for each run. The default is `runs/` and the name of the model. A second run "
        "in the same folder is refused."
    ),
    "log.to": (
        "`[tensorboard]`, `[wandb]`, `[trackio]` or `[mlflow]`, once the package is installed. The "
        "run folder has the curves in any case, in `report.html` and `metrics.jsonl`."
    ),
}
"""The keys that people set, with advice for each, in the order of the page."""
CONFIG_EXAMPLES = """
## Examples

Each of these is a complete file. `megatrain train run.yaml --dry-run` checks one against your data
and your machine.

### Fine-tuning

All weights are trained, on chats, questions with answers, or instructions:

```yaml
model: Qwen/Qwen3-8B
data: {train: train.jsonl, eval: 0.02, max_length: 2048}
train: {epochs: 2}
eval: {every: 100, patience: 3}
save: runs/sft
```

### Adapters

[Adapters](adapters.md) over a model that may be far larger than the device:

```yaml
model: meta-llama/Llama-3.1-70B-Instruct
data: {train: train.jsonl, eval: 0.02, max_length: 2048}
train: {epochs: 2}
lora: {rank: 16, dropout: 0.05}
save: runs/adapters
```

### Preferences: DPO

Rows have `prompt`, `chosen` and `rejected` ([preferences](preferences.md)). The model is one that
was fine-tuned before:

```yaml
model: runs/sft/model
data: {train: pairs.jsonl, eval: 0.02, max_length: 2048}
loss: {name: dpo, beta: 0.1}
train: {epochs: 1, batch_rows: 64}
save: runs/dpo
```

### Preferences: KTO

Rows have `prompt`, `completion` and `label` (true or false):

```yaml
model: runs/sft/model
data: {train: {path: marked.jsonl, format: kto}, eval: 0.02, max_length: 2048}
loss: {name: kto, undesirable_weight: 1.5}
train: {epochs: 1, batch_rows: 64}
save: runs/kto
```

### Rewards

Rows have a `prompt`. The model draws answers to it, and functions of yours reward them
([rewards](rewards.md)):

```yaml
model: Qwen/Qwen3-8B
data: {train: prompts.jsonl, eval: 0.02, max_length: 1536}
loss: grpo
rollouts: {samples: 8, max_new_tokens: 1024}
train: {steps: 500, batch_rows: 8}
lora: {rank: 16}
save: runs/rewards
```

### Continued pre-training

Rows are plain text. Those longer than `max_length` become several:

```yaml
model: Qwen/Qwen3-8B-Base
data:
  train: {path: corpus, format: text}
  eval: 0.001
  max_length: 4096
  overlong: split
train: {epochs: 1, batch_tokens: 256k}
optim:
  learning_rate: 2e-5
  weight_decay: 0.1
  schedule: wsd
  warmup: 0.01
save: {dir: runs/pretraining, every: 200}
```

### Long rows

Rows may be longer than those that the model was trained for, here four times
([long context](long_context.md)):

```yaml
model: {name_or_path: Qwen/Qwen2.5-7B-Instruct, rope: {type: yarn, factor: 4.0}}
data: {train: books.jsonl, max_length: 128k, train_on: all}
train: {epochs: 1, batch_tokens: 512k}
save: runs/long
```

### Several GPUs

The file is the same as for one GPU, and `megatrain train run.yaml --gpus 8` starts it
([several GPUs and hosts](many.md)). `batch_tokens` is a step of all GPUs together:

```yaml
model: Qwen/Qwen3-32B
data: {train: train.jsonl, eval: 0.02, max_length: 4096}
train: {epochs: 1, batch_tokens: 512k}
save: runs/many
```

## Values

You can change any key on the command line: `megatrain train run.yaml train.epochs=2`. The value is
read as YAML. Names of other tools that mean the same are read as ours
([migration.md](migration.md)). MegaTrain refuses an unknown key and suggests the nearest one, or
what to set instead. Every error in the file is reported in one pass, with file, line and key; the
exit code is 2.

- Tokens: `2048`, `2k`, `1M`; k and M are powers of 1024, as in context lengths.
- Sizes: `24GB` is 24 x 10^9 bytes, `24GiB` is 24 x 2^30.
- Numbers: `1e-5` is a number, quoted or not.
- `auto` is decided by the plan, which is printed and kept in the run folder.
- YAML follows the core schema of version 1.2: `no` is a word, `010` is ten. Anchors, aliases, merge
  keys, tags and duplicate keys are errors. Quote patterns that begin with `*`.
"""

CLI_HEAD = """# Command line

Below is what `megatrain COMMAND --help` prints. MODEL is a run folder, a checkpoint, a Hugging Face
folder or an id on the Hub. Exit codes are those of [Errors](errors.md).

| command | purpose |
|---|---|
"""

ERRORS_HEAD = """# Errors

Every error that MegaTrain raises is one of these. Scripts can rely on the code and the exit code.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | a bug in MegaTrain |
| 2 | an error in the config |
| 3 | the run does not fit |
| 4 | an error in the model folder or the data |
| 5 | an error in the environment |
| 6 | another rank was lost |
| 130 | interrupted |

| error | code | exit code | meaning |
|---|---|---|---|
"""

MIGRATION_HEAD = """# From other tools

A name of transformers, TRL, PEFT, LLaMA-Factory or Axolotl that means the same as a key here is
read as that key, in a config and on the command line, and one line says so:

```text
megatrain train run.yaml num_train_epochs=3 lr=1e-5
read num_train_epochs as train.epochs, lr as optim.learning_rate
```

Such a name stands at the top of the file or in the section of its key (`optim: {lr: 1e-5}`). A
name that means something else is refused, with what to set instead.

`megatrain init run.yaml --from sft.yaml` reads a config of one of these tools, YAML or JSON. It
writes the keys below, and lists every other key of the file for you to decide, with our key where
there is one. The exit code is 2 if the new file does not load yet, for example because it has no
data.

## Look at these first

- **Batch.** A step here is that of all GPUs, and memory decides its micro-batches. Set
  `train.batch_rows` to rows per device x accumulation x GPUs, or `train.batch_tokens` where rows
  are packed.
- **Defaults.** A key that the file leaves out has our default ([config.md](config.md)): one epoch,
  `cosine`, `warmup: 0.03`, `max_length: 2048`. TRL and LLaMA-Factory take 3 epochs and `linear`
  without warm-up.
- **Method.** `loss.name` and `lora.rank` choose it. Without `lora.rank` all weights are trained.
- **Rows.** `data.train` takes files and Hub ids with their columns ([data.md](data.md)). Longer
  rows are dropped and counted; `data.overlong: truncate` cuts them.
- **What is trained.** `data.train_on` is `assistant`. TRL trains on all tokens of conversations
  without `assistant_only_loss`.
- **Template.** It is the tokenizer's, or `data.chat_template`. `megatrain data run.yaml` shows
  which tokens are trained.

A trainer of TRL can also run over the streamed model ([trl.md](trl.md)).

## Names that mean the same

| here | elsewhere |
|---|---|
"""


GROUP_EXAMPLES = (
    "`optim.groups` lists them; a parameter is in one group at most, and the console prints the "
    'rate of each. LoRA+ is `groups: [{params: "*lora_B*", times: 16}]`, a slower embedding '
    '`groups: [{params: "*embed_tokens*", learning_rate: 1e-6}]`.'
)


def config_page() -> str:
    """Return docs/config.md."""
    advice = [f"| `{key}` | {choice} |\n" for key, choice in TEN_KEYS.items()]
    parts = [CONFIG_HEAD, *advice, CONFIG_EXAMPLES]
    for name, section in SECTIONS.items():
        short = f" `{name}: X` alone means `{SHORT_FORMS[name]}`." if name in SHORT_FORMS else ""
        parts.append(f"\n## {name}\n\n{_sentence(section)}{short}\n\n{_settings_table(section)}")
    parts.append(f"\n## model.rope\n\n{_sentence(RopeSettings)}\n\n")
    parts.append(_settings_table(RopeSettings))
    parts.append(f"\n## A source of rows\n\n{_sentence(DataSource)} A path alone is enough.\n\n")
    parts.append(_settings_table(DataSource))
    parts.append(f"\n## A group of params\n\n{_sentence(GroupSettings)} {GROUP_EXAMPLES}\n\n")
    parts.append(_settings_table(GroupSettings))
    return "".join(parts)


def cli_page() -> str:
    """Return docs/cli.md."""
    group: Any = typer.main.get_command(app)
    commands = dict(sorted(group.commands.items()))
    parts = [CLI_HEAD]
    for name, command in commands.items():
        parts.append(f"| [`{name}`](#{name}) | {command.get_short_help_str(120)} |\n")
    for name, command in commands.items():
        context = command.make_context(name, [], resilient_parsing=True, terminal_width=96)
        context.info_name = f"megatrain {name}"
        parts.append(f"\n## {name}\n\n```text\n{command.get_help(context)}\n```\n")
    return "".join(parts)


def errors_page() -> str:
    """Return docs/errors.md."""
    rows = [
        f"| `{name}` | {error.code} | {error.exit_code} | {_sentence(error)} |\n"
        for name, error in vars(errors).items()
        if isinstance(error, type) and issubclass(error, errors.MegaTrainError)
        if error is not errors.MegaTrainError
    ]
    return ERRORS_HEAD + "".join(rows)


def migration_page() -> str:
    """Return docs/migration.md."""
    names: dict[str, list[str]] = {}
    for name, key in ALIASES.items():
        names.setdefault(key, []).append(f"`{name}`")
    rows = [f"| `{key}` | {', '.join(elsewhere)} |\n" for key, elsewhere in names.items()]
    return MIGRATION_HEAD + "".join(rows)


def timeline() -> str:
    """Return docs/timeline.svg."""
    return str(runpy.run_path(str(HERE / "timeline.py"))["picture"]())


def fits_table() -> str:
    """Return the table of models and machines."""
    return FITS_HEAD + "".join(_fits_row(*case) for case in FITS)


def with_table(text: str, table: str) -> str:
    """Return the README with its table of models and machines replaced."""
    before, _, rest = text.partition("<!-- fits -->\n")
    return f"{before}<!-- fits -->\n{table}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"


PAGES = {
    "cli.md": cli_page,
    "config.md": config_page,
    "errors.md": errors_page,
    "migration.md": migration_page,
    "timeline.svg": timeline,
}


def _fits_row(model: str, gpu: str, ram: str, settings: tuple[str, ...]) -> str:
    found = estimate(model, settings, gpu=gpu, ram=ram, tokens="10M")
    speed, time = "-", "-"
    if found.fits:
        speed = predicted_speed(found.tokens_per_s).removesuffix(" tok/s")
        time = predicted_time(found.seconds or 0.0)
    machine = f"{found.machine}, {ram}"
    state = str(found.plan.settings.state)
    cells = (model.rpartition("/")[2], machine, _fits(found, settings), state, speed, time)
    return f"| {' | '.join(cells)} |\n"


def _fits(found: Estimate, settings: tuple[str, ...]) -> str:
    """Return yes, or the cheapest setting that helps."""
    if found.fits:
        return f"with `{' '.join(settings)}`" if settings else "yes"
    return f"with `{' '.join(found.plan.fixes[0].overrides)}`"


def _settings_table(section: type[Section]) -> str:
    rows = ["| key | type | default | meaning |\n|---|---|---|---|\n"]
    for key, field in section.model_fields.items():
        default = "required" if field.is_required() else f"`{write_yaml(field.default)}`"
        rows.append(f"| `{key}` | {_type(field)} | {default} | {field.description} |\n")
    return "".join(rows)


def _type(field: Any) -> str:
    """Return what a key takes: its Kind, the words of a Literal, or true and false."""
    kinds = [mark for mark in field.metadata if isinstance(mark, TypeName)]
    if kinds:
        return str(kinds[-1])
    if field.annotation is bool:
        return "true or false"
    words = get_args(field.annotation)
    return ", ".join(f"`{word}`" for word in words)


def _sentence(thing: type) -> str:
    return " ".join((thing.__doc__ or "").split())


def main() -> None:
    """Write all pages."""
    for name, page in PAGES.items():
        (HERE / name).write_text(page())
    README.write_text(with_table(README.read_text(), fits_table()))


if __name__ == "__main__":
    main()

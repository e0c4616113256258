"""Write the pages that are made from code: `python docs/generate.py`.

    config.md      ten keys, examples, and every setting, from megatrain.config
    errors.md      every error, from megatrain.errors
    cli.md         every command, from megatrain.cli.app
    migration.md   keys of other tools, from megatrain.config.other_tools.tables
    timeline.svg   a step, from the simulator: timeline.py
    tour.svg       a recorded terminal, from tour.json: tour.py
    README.md, index.md   their table of models and machines, from megatrain.planning.estimate

tests/test_docs.py checks that the pages are up to date.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any, get_args

import typer.main

from megatrain import errors
from megatrain.cli.app import app
from megatrain.config.load import write_yaml
from megatrain.config.other_tools.tables import ALWAYS, BY_TRAINER, DEFAULTS, TABLES
from megatrain.config.sections import (
    DataSource,
    GroupSettings,
    RewardFunction,
    RopeSettings,
    Section,
)
from megatrain.config.settings import SECTIONS, SHORT_FORMS
from megatrain.config.value_types import TypeName
from megatrain.planning.estimate import Estimate, estimate
from megatrain.text import duration

HERE = Path(__file__).parent
README = HERE.parent / "README.md"

FITS_PAGES = (README, HERE / "index.md")
"""Pages with the table of models and machines."""
FITS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("Qwen/Qwen3-4B", "3060", "64GB", ()),
    ("Qwen/Qwen3-8B", "3090", "64GB", ()),
    ("Qwen/Qwen3-8B", "4090", "128GB", ()),
    ("Qwen/Qwen3-14B", "3090", "128GB", ()),
    ("Qwen/Qwen3-32B", "5090", "384GB", ()),
    ("openai/gpt-oss-120b", "H200", "1.5TB", ()),
)
"""Models and machines of that table, as `megatrain estimate` takes them."""
FITS_HEAD = """
| model | GPU, host memory | fits | optimizer states | tokens/s | 10M tokens take |
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
        "`auto` takes the shortest step that is fast on your machine. Give a number of tokens for "
        "steps of the same size on every machine. Give `train.batch_rows` instead where a number "
        "of rows is part of the recipe: for preferences, and for configs of other tools (rows x "
        "accumulation x GPUs). A longer step needs more host memory, but not more device memory, "
        "where its micro-batches are computed one after another."
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
rewards: [rewards.py:correct, {function: rewards.py:short, weight: 0.1}]
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
read as YAML. MegaTrain refuses an unknown key and suggests the nearest one, or our name for another
tool's key. Every error in the file is reported in one pass, with file, line and key; the exit code
is 2.

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

`megatrain init run.yaml --from sft.yaml` converts a config of LLaMA-Factory, Axolotl or TRL, in
YAML or JSON. It recognizes the tool by the keys of the file; use `--tool` if they are ambiguous,
and `--gpus` to give the number of GPUs of the old run.

TRL names the trainer on its command line, not in the file: `trl dpo --config dpo.yaml`. If neither
the keys nor rows on this machine tell it, `init` asks for it: `--tool trl-dpo`. It can be
`trl-sft`, `trl-dpo`, `trl-kto`, `trl-orpo` or `trl-cpo`.

A file whose method cannot be repeated here is refused by the name of the method, and nothing is
written:

- GRPO, RLOO, PPO and online DPO. Write `loss: grpo` with reward functions of your own
  ([Rewards](rewards.md)).
- Distillation (GKD). Write `loss: distill` with its teacher ([Distillation](distillation.md)).
- Reward models, other preference losses, several losses at once, and adapters that are not LoRA.
  [TRL's own trainers](trl.md) can run over the streamed model instead.

`init` prints a line for every key of the file, in three groups:

- *Changes results*: the run differs from that of the tool.
- *Needs you*: something that you decide, set or install.
- *Same as there*: everything else.

The first word of a line is its outcome:

- *mapped*: our key has the same value.
- *changed*: our key has another value with the same meaning.
- *default*: the file does not have the key, and the tool's default differs from ours; it is written
  to the new file.
- *dropped*: MegaTrain has no equivalent; the line gives the reason.
- *missing*: the file does not have the key, and nothing can be written for it.
- *unknown*: the key is not in the tables below.

The exit code is 2 if the new file does not load yet, for example because its data must be set.

From Python: `megatrain.config.other_tools.translate.migrate("sft.yaml")`.

A migrated run trains with the same method and learning rates on the same rows in the same number of
steps. Rows x accumulation x GPUs become `train.batch_rows`, and the tool's defaults for absent or
null keys are written to the new file. In an environment with the other tools
`python -m proofs.migrated --check` compares the table that our tests use with what the tools' own
classes read from the same configs: method, loss, learning rates of steps, batch, length, optimizer
and adapters.
There are exceptions:

- Packed runs (`packing`, `sample_packing`) measure a step in tokens. The number of steps in an
  epoch depends on how rows fill sequences, which differs between tools. MegaTrain packs only if the
  other tool packed.
- Rows come in a different order; every tool shuffles differently.
- LLaMA-Factory cuts the prompt and the answer of an overlong row in proportion; MegaTrain cuts the
  end. MegaTrain drops and counts a row without a trained token; LLaMA-Factory keeps it in its
  batch, where it trains nothing.
- LLaMA-Factory and Axolotl can format rows with their own templates (`template`, `chat_template`,
  alpaca rows in Axolotl). MegaTrain uses the tokenizer's chat template, or `data.chat_template`.
- LoRA of TRL without `lora_target_modules` adapts what PEFT chooses by the model's type, mostly
  `[q_proj, v_proj]`; that is written to the new file. If the type is not known on this machine,
  a line says so.
- `simpo` of TRL and Axolotl adds the chosen answer's own loss unless `cpo_alpha` is 0. That is
  `loss.sft`, as the mean over an answer and then over pairs; there it is the mean over all tokens
  of a micro-batch.
- A base in 4 bits (QLoRA) is `model.base: nf4`, with the bits of bitsandbytes. Other forms of
  quantization are dropped: the frozen model then stays in bf16.
- `fp8` of LLaMA-Factory and Axolotl is `train.products: fp8`, which has one scale for a tensor, as
  Axolotl has; LLaMA-Factory has one for each row.
- LLaMA-Factory makes images smaller before the model's processor sees them (`image_max_pixels`);
  here the processor alone decides (`data.processor_kwargs`).
- LLaMA-Factory packs into sequences of one token less than `cutoff_len`.
- MegaTrain holds an evaluation fraction out of each source; the other tools hold it out of all
  sources together.
"""


REWARD_EXAMPLE = (
    "`rewards` may be one, or a list: `rewards: [rewards.py:correct, {function: rewards.py:short, "
    "weight: 0.1}]`. [Rewards](rewards.md) has the rest."
)
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
    parts.append(f"\n## A reward function\n\n{_sentence(RewardFunction)} {REWARD_EXAMPLE}\n\n")
    parts.append(_settings_table(RewardFunction))
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
    parts = [MIGRATION_HEAD]
    for tool, table in TABLES.items():
        parts.append(f"\n## {tool}\n\n| key | ours | note |\n|---|---|---|\n")
        mapped = {key: rule for key, rule in table.items() if rule.to}
        parts += [f"| `{key}` | `{rule.to}` | {rule.why} |\n" for key, rule in mapped.items()]
        parts.append("\nDefaults written to the new file when the old one does not have the key: ")
        absent = [f"`{key}: {write_yaml(value)}`" for key, value in DEFAULTS[tool].items()]
        for trainer, values in BY_TRAINER.items() if tool == "TRL" else ():
            absent += [f"`{key}: {write_yaml(value)}` ({trainer})" for key, value in values.items()]
        absent += [f"`{ours}: {value}` (ours)" for ours, (value, _) in ALWAYS[tool].items()]
        parts.append(f"{', '.join(absent)}.\n\n| dropped | why |\n|---|---|\n")
        reasons: dict[str, list[str]] = {}
        for key, rule in table.items():
            if not rule.to:
                reasons.setdefault(rule.why, []).append(f"`{key}`")
        parts += [f"| {', '.join(keys)} | {why} |\n" for why, keys in reasons.items()]
    return "".join(parts)


def timeline() -> str:
    """Return docs/timeline.svg."""
    return str(runpy.run_path(str(HERE / "timeline.py"))["picture"]())


def tour() -> str:
    """Return docs/tour.svg."""
    recording = json.loads((HERE / "tour.json").read_text())
    return str(runpy.run_path(str(HERE / "tour.py"))["drawn"](recording))


def fits_table() -> str:
    """Return the table of models and machines."""
    return FITS_HEAD + "".join(_fits_row(*case) for case in FITS)


def with_table(text: str, table: str) -> str:
    """Return a page with the table of models and machines replaced."""
    before, _, rest = text.partition("<!-- fits -->\n")
    return f"{before}<!-- fits -->\n{table}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"


PAGES = {
    "cli.md": cli_page,
    "config.md": config_page,
    "errors.md": errors_page,
    "migration.md": migration_page,
    "timeline.svg": timeline,
    "tour.svg": tour,
}


def _fits_row(model: str, gpu: str, ram: str, settings: tuple[str, ...]) -> str:
    found = estimate(model, settings, gpu=gpu, ram=ram, tokens="10M")
    speed, time = "-", "-"
    if found.fits:
        speed, time = f"{found.tokens_per_s:,.0f}", duration(found.seconds or 0.0)
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
    fits = fits_table()
    for path in FITS_PAGES:
        path.write_text(with_table(path.read_text(), fits))


if __name__ == "__main__":
    main()

"""Write the pages that are made from code: `python docs/generate.py`.

    config.md      every setting, from megatrain.config
    errors.md      every error, from megatrain.errors
    migration.md   keys of other tools, from megatrain.config.other_tools.names

tests/test_docs.py checks that the pages say what the code says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from megatrain import errors
from megatrain.config.data_settings import Source
from megatrain.config.load import write_yaml
from megatrain.config.other_tools.defaults import ALWAYS, DEFAULTS
from megatrain.config.other_tools.translate import TABLES
from megatrain.config.section import Section
from megatrain.config.settings import SECTIONS, SHORT_FORMS
from megatrain.config.value_types import Kind

HERE = Path(__file__).parent

CONFIG_HEAD = """# Config

A run is one YAML file, in sections; this is the shortest:

```yaml
model: Qwen/Qwen3-8B
data: train.jsonl
```

Any key can be changed on the command line: `megatrain train run.yaml train.epochs=2`; the value is
read as YAML. An unknown key is refused, with the nearest one that exists, or what another tool's
key is called here. All faults of a file are told at once, with file, line and key (exit code 2).

- Tokens: `2048`, `2k`, `1M`; k and M count by 1024, as context lengths are written.
- Sizes: `24GB` is 24 x 10^9 bytes, `24GiB` is 24 x 2^30.
- Numbers: `1e-5` is a number, quoted or not.
- `auto` is decided by the plan, which is printed and kept in the run folder.
- YAML is read by the core schema of 1.2: `no` is a word, `010` is ten. Anchors, aliases, merge keys
  and tags are refused, and so is a key that is given twice. Quote patterns that begin with `*`.
"""

ERRORS_HEAD = """# Errors

Every error we raise is one of these. A script may rely on code and exit code.

| exit code | meaning |
|---|---|
| 0 | fine |
| 1 | a bug of ours |
| 2 | the config |
| 3 | does not fit |
| 4 | the model folder or the data |
| 5 | the environment |

| error | code | exit code | meaning |
|---|---|---|---|
"""

MIGRATION_HEAD = """# From other tools

`megatrain.config.other_tools.translate.migrate("sft.yaml")` reads a config of LLaMA-Factory,
Axolotl or TRL, YAML or JSON, and tells which it is by its keys. It returns our config and a line
for every key of the file:

- *mapped*: our key has the same value
- *changed*: our key has another value that means the same
- *default*: the file does not have it, and the tool does something else than we would; written out
- *dropped*: there is no such thing here, and why
- *unknown*: not in the tables below; nothing is passed over in silence

`megatrain init run.yaml --from sft.yaml` writes it; `--tool` names the tool where the keys do not
tell, `--gpus` how many GPUs it ran on.

A migrated run trains on the same rows in as many steps: rows x accumulation x GPUs become
`train.batch_rows`, and what a tool does when a key is absent or null is written out. Where that
cannot be had:

- Packed runs (`packing`, `sample_packing`) count a step in tokens. How many steps an epoch has
  depends on how rows fill sequences, and that differs between tools; nothing is packed here that
  was not packed there.
- Rows come in another order: every tool draws its own.
- Of rows that are longer than the limit LLaMA-Factory cuts prompt and answer in proportion; here
  the end is cut. A row that has no trained token left is left out and counted; there it stays in
  its batch, and trains nothing.
- LLaMA-Factory and Axolotl can write rows with templates of their own (`template`, `chat_template`,
  alpaca rows in Axolotl). Here the chat template is the tokenizer's, or the one that
  `data.chat_template` gives.
- A fraction to evaluate on is held out of each source; they hold it out of all sources together.
- A key that is unknown or dropped is named, with the reason.
"""


def config_page() -> str:
    """Return docs/config.md."""
    parts = [CONFIG_HEAD]
    for name, section in SECTIONS.items():
        short = f" `{name}: X` alone means `{SHORT_FORMS[name]}`." if name in SHORT_FORMS else ""
        parts.append(f"\n## {name}\n\n{_sentence(section)}{short}\n\n{_settings_table(section)}")
    parts.append(f"\n## A source of rows\n\n{_sentence(Source)} A path alone will do.\n\n")
    parts.append(_settings_table(Source))
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
        parts.append(f"\n## {tool}\n\n| key | ours | to know |\n|---|---|---|\n")
        mapped = {key: rule for key, rule in table.items() if rule.to}
        parts += [f"| `{key}` | `{rule.to}` | {rule.why} |\n" for key, rule in mapped.items()]
        parts.append("\nWritten out when the file does not have it: ")
        absent = [f"`{key}: {write_yaml(value)}`" for key, value in DEFAULTS[tool].items()]
        absent += [f"`{ours}: {value}` (ours)" for ours, (value, _) in ALWAYS[tool].items()]
        parts.append(f"{', '.join(absent)}.\n\n| dropped | why |\n|---|---|\n")
        reasons: dict[str, list[str]] = {}
        for key, rule in table.items():
            if not rule.to:
                reasons.setdefault(rule.why, []).append(f"`{key}`")
        parts += [f"| {', '.join(keys)} | {why} |\n" for why, keys in reasons.items()]
    return "".join(parts)


PAGES = {"config.md": config_page, "errors.md": errors_page, "migration.md": migration_page}


def _settings_table(section: type[Section]) -> str:
    rows = ["| key | type | default | meaning |\n|---|---|---|---|\n"]
    for key, field in section.model_fields.items():
        default = "required" if field.is_required() else f"`{write_yaml(field.default)}`"
        rows.append(f"| `{key}` | {_type(field)} | {default} | {field.description} |\n")
    return "".join(rows)


def _type(field: Any) -> str:
    """Return what a key takes: its Kind, the words of a Literal, or true and false."""
    kinds = [mark for mark in field.metadata if isinstance(mark, Kind)]
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


if __name__ == "__main__":
    main()

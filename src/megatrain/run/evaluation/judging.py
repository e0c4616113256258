"""The config of an evaluation: rows of a file are read as the model's run has read its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from megatrain.config import Config, load_config
from megatrain.config.load import file_of_run
from megatrain.config.sections import DataSource
from megatrain.data.chat.choice import NONE, choose_template
from megatrain.data.media.processing import MediaSettings, media_settings
from megatrain.data.tokens.documents import Documents
from megatrain.data.tokens.limits import bad_rows, dropped_rows
from megatrain.data.tokens.prepared import PreparedData
from megatrain.data.training_rows import TrainingRows, row_media
from megatrain.errors import ConfigError
from megatrain.models.isolation import ISOLATES, packing_family
from megatrain.models.multimodal import text_part
from megatrain.models.rope import num_positions
from megatrain.run.folder import is_run
from megatrain.run.run_model import RunModel

EVAL_TOKENS = 8192
NO_LIMIT = 131072
"""For models whose config has no number of positions."""
_ROWS_OF_A_RUN = {
    "max_length", "overlong", "train_on", "packing", "template_kwargs", "chat_template",
    "processor_kwargs",
}  # fmt: skip


def judging_config(
    model: RunModel,
    model_config: PreTrainedConfig,
    source: DataSource,
    max_rows: int | None,
    max_length: int | None,
) -> Config:
    """Return what to evaluate a model with; `model_config` is its config.json.

    Rows may be as long as `max_length`, or as in the run, or else as the model has positions.
    """
    rows: dict[str, object] = {
        "train": [source],
        "eval": [source],
        "packing": packing_family(model_config) in ISOLATES,
        "max_length": num_positions(text_part(model_config)) or NO_LIMIT,
        "max_bad": 1.0,  # rows left out are counted and printed
        "max_dropped": 1.0,
        "max_lost_thoughts": 1.0,
    }
    value: dict[str, object] = {"model": str(model.folder), "eval": {"max_rows": max_rows}}
    train: dict[str, object] = {}
    if (run := config_of_run(model)) is not None:
        packs = rows["packing"]
        rows |= run.data.model_dump(include=_ROWS_OF_A_RUN)
        rows["packing"] = packs if run.data.packing == "auto" else run.data.packing
        rows["chat_template"] = _template_of(run)
        value["memory"] = run.memory
        train["router_aux_loss"] = run.train.router_aux_loss
    if max_length is not None:
        rows["max_length"] = max_length
    train["batch_tokens"] = rows["max_length"]
    return Config.model_validate(value | {"data": rows, "train": train})


def device_of(model: Path) -> str:
    """Return the device that the run of a model computes on, as its config says; else `auto`."""
    here = model.resolve()
    for folder in (here, *here.parents[:3]):
        if is_run(folder) and (config := file_of_run(folder)).exists():
            return load_config(config).memory.device
    return "auto"


def prompts_as_trained(model: RunModel, tokenizer: Any) -> Mapping[str, Any]:
    """Let `tokenizer` write prompts as the model's run has read its rows.

    Return the arguments that its chat template was given there.
    """
    run = config_of_run(model)
    if run is None:
        return {}
    choose_template(tokenizer, _template_of(run))
    return run.data.template_kwargs


def media_as_trained(model: RunModel, tokenizer: Any) -> MediaSettings | None:
    """Return how media of prompts are read, as in the model's run; None: the model takes none."""
    run = config_of_run(model)
    return media_settings(tokenizer) if run is None else row_media(run, tokenizer)


def config_of_run(model: RunModel) -> Config | None:
    """Return the settings of the run that a model belongs to; None: it belongs to none."""
    if model.run is None or not (config := file_of_run(model.run)).exists():
        return None
    return load_config(config)


def _template_of(run: Config) -> str | None:
    """Return `none` if the run had no template; its own is in the tokenizer that it wrote."""
    return NONE if run.data.chat_template == NONE else None


def for_lengths(config: Config, rows: Documents) -> Config:
    """Return the config with steps as long as the rows need, not as they might be."""
    longest = int(rows.lengths.max())
    data = config.data.model_copy(update={"max_length": longest})
    train = config.train.model_copy(update={"batch_tokens": max(EVAL_TOKENS, longest)})
    return config.model_copy(update={"data": data, "train": train})


def require_single_answers(rows: TrainingRows) -> None:
    """Raise ConfigError for rows of preferences: they are compared with a reference."""
    if rows.preferences is not None:
        card = rows.sources[0].card
        raise ConfigError(
            f"{card['source']} is read as {card['format']}: `megatrain eval` reports the loss per "
            "token of rows with one answer each. Preferences are evaluated while a model is "
            "trained on them: give the file as data.eval of such a run."
        )


def left_out(rows: PreparedData, max_length: int) -> list[str]:
    """Return how many rows are not evaluated on, and why; nothing if all are."""
    card, lines = rows.card, []
    for what, skipped in (("dropped", dropped_rows(card)), ("bad", bad_rows(card))):
        if skipped.total:
            limit = f" (--max-length is {max_length:,})" if what == "dropped" else ""
            lines.append(f"{skipped.total:,} of {card['rows']:,} rows {what}{limit}:\n{skipped}")
    if card["truncated"]:
        lines.append(f"{card['truncated']:,} of {card['rows']:,} rows cut to {max_length:,} tokens")
    return lines

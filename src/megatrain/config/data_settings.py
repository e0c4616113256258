"""The data section of a config: where rows come from, and what becomes of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from megatrain.choices import RowFormat
from megatrain.config.quantities import read_number
from megatrain.config.section import Section, short
from megatrain.config.template_settings import Arguments
from megatrain.config.value_types import (
    Name,
    Number,
    Seed,
    Switch,
    TemplateArguments,
    TemplateSetting,
    TokenCount,
    TypeName,
    as_list,
)

PreferenceName = Literal["pairs", "kto"]
"""The formats whose rows are two answers each, to be compared."""
FormatName = RowFormat


class DataSource(Section):
    """Rows from one place."""

    path: Name = Field(description="File, folder or Hub id of a dataset.")
    name: Annotated[Name | None, TypeName("name or null")] = Field(
        default=None,
        description="Which configuration of a dataset on the Hub, like main of openai/gsm8k; null "
        "is its default.",
    )
    split: Annotated[Name | None, TypeName("name or null")] = Field(
        default=None, description="Which split of a dataset on the Hub; null is train."
    )
    revision: Annotated[Name | None, TypeName("branch, tag or commit, or null")] = Field(
        default=None, description="Which version of a dataset on the Hub; null is main."
    )
    format: FormatName = Field(
        default="auto",
        description="How a row is written; auto detects it and prints what was found.",
    )
    weight: Number = Field(
        default=1.0,
        gt=0,
        description="How many times each of its rows comes in an epoch; 1 everywhere is plain "
        "concatenation, 0.5 takes another half of the rows in each epoch.",
    )


def _places(value: object) -> object:
    """Return the places as a list; refuse rows, of which each would be a separate fault."""
    if isinstance(value, Iterable) and not isinstance(value, str | Mapping | list | tuple):
        raise ValueError(_ROWS)
    if isinstance(value, list | tuple) and value and all(map(_is_row, value)):
        raise ValueError(_ROWS)
    return as_list(value)


def _is_row(value: object) -> bool:
    return isinstance(value, Mapping) and bool(value.keys() & _COLUMNS)


_COLUMNS = {
    "messages", "conversations", "text", "prompt", "completion", "instruction", "output", "query",
    "response", "question", "answer", "chosen", "rejected",
}  # fmt: skip
_ROWS = (
    "give files, folders or Hub ids, not rows. Rows go to mt.Trainer as train_dataset, or into a "
    "file, one JSON object a line"
)
Sources = Annotated[
    tuple[Annotated[DataSource, short("path")], ...],
    BeforeValidator(_places),
    Field(min_length=1),
]


def _eval_kind(value: object) -> str:
    if isinstance(value, str):
        try:
            read_number(value)
        except ValueError:
            return "sources"
    return "sources" if isinstance(value, Iterable) else "fraction"


Eval = Annotated[
    Annotated[Annotated[Number, Field(gt=0, lt=1)] | None, Tag("fraction")]
    | Annotated[Sources, Tag("sources")],
    Discriminator(_eval_kind),
    TypeName("fraction, path or list of paths or {path, name, split, ...}, or null"),
]


class DataSettings(Section):
    """Training and evaluation rows."""

    train: Annotated[Sources, TypeName("path, or list of paths or {path, name, split, ...}")] = (
        Field(description="Sources of the training rows.")
    )
    eval: Eval = Field(
        default=None,
        description="Rows to evaluate on: a fraction held out of train, or separate sources.",
    )
    max_length: TokenCount = Field(default=2048, description="Maximum length of a row.")
    overlong: Literal["drop", "truncate", "split"] = Field(
        default="drop", description="Treatment of longer rows; they are counted and reported."
    )
    train_on: Literal["assistant", "last", "completion", "all"] = Field(
        default="assistant",
        description="Which tokens are targets: every assistant turn, only the last one, everything "
        "after the prompt, or every token.",
    )
    template_kwargs: TemplateArguments = Field(
        default=Arguments(),
        description="Arguments for the chat template; chat_template_kwargs of a row override them.",
    )
    chat_template: TemplateSetting = Field(
        default=None,
        description="Replaces the tokenizer's template: a file, the text of a template, or none, "
        "which joins prompt and completion unchanged.",
    )
    max_bad: Annotated[Number, Field(ge=0, le=1)] = Field(
        default=0.01,
        description="Share of the rows that may be bad (broken, empty, refused by the chat "
        "template) and skipped; more is an error.",
    )
    max_dropped: Annotated[Number, Field(ge=0, le=1)] = Field(
        default=0.2,
        description="Share of the rows that may be dropped because of their length or because they "
        "have nothing to train on; more is an error.",
    )
    max_lost_thoughts: Annotated[Number, Field(ge=0, le=1)] = Field(
        default=0.01,
        description="Share of the rows that may be trained without the thought of an answer, "
        "because the chat template leaves it out; more is an error.",
    )
    packing: Switch = Field(
        default="auto",
        description="Put several rows into one sequence, where they never attend to each other; "
        "auto does so if the model's family keeps them apart, and a resumed run keeps what it "
        "has.",
    )
    shuffle: bool = Field(
        default=True,
        description="Shuffle the rows in each epoch; false keeps the order of the files, one "
        "source after another.",
    )
    seed: Seed = Field(
        default=42, description="Seed for the order of rows and the held-out fraction."
    )

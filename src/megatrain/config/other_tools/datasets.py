"""Datasets as other tools name them, translated to our sources.

LLaMA-Factory's names stand for entries of dataset_info.json, which is in `dataset_dir`, looked up
from the working directory and beside the config. A name becomes a file or a Hub dataset with one
of our formats, and names of columns and roles become `columns` and `roles` of the source. Entries
that cannot be read as LLaMA-Factory would (scripts, videos, roles of calls) are refused by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain.config.other_tools.tool_config import (
    Asks,
    Differs,
    DroppedKey,
    ToolConfig,
    trl_names,
)

_FORMATS = {"alpaca": "alpaca", "chat_template": "messages", "sharegpt": "messages",
            "completion": "text", "pretraining_dataset": "text"}  # fmt: skip
_KEPT = {
    "path", "type", "data_files", "ds_type", "name", "split", "revision", "columns", "field",
    "field_messages", "field_system", "field_tools", "field_prompt", "field_chosen",
    "field_rejected", "field_completion", "field_label", "message_property_mappings",
    "message_field_role", "message_field_content", "roles",
}  # fmt: skip
"""Keys of an entry that are read. TRL's `columns` selects columns; those that no format reads are
not read here either."""
_FIELDS = {
    "field": "text", "field_messages": "messages", "field_system": "system", "field_tools": "tools",
    "field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected",
    "field_completion": "completion", "field_label": "label", "field_instruction": "instruction",
    "field_input": "input", "field_output": "output", "message_field_role": "role",
    "message_field_content": "content",
}  # fmt: skip
"""Axolotl's names for columns, and ours."""
_LOADERS = ("json", "csv", "parquet", "text", "arrow")
_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".gz", ".zst")
"""Names of `datasets` for files, not datasets."""
ALPACA_PROMPT = "Axolotl uses the Alpaca prompt for these rows; here they use the chat template"
_PREFERENCES = {"kto": "kto", "dpo": "pairs", "ipo": "pairs", "orpo": "pairs", "simpo": "pairs"}
"""The format of rows by Axolotl's `rl`: its type names how columns are read."""
INFO_NAME = "dataset_info.json"
MAX_INFO_BYTES = 8 << 20
ONLINE = "ONLINE"
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "system": "system",
           "history": "history", "tools": "tools"}  # fmt: skip
_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("query", "response"),
          ("question", "answer"))  # fmt: skip
_TALKS = ("conversations", "messages")
_TAGS = {
    "role_tag": ("from", "role"),
    "content_tag": ("value", "content"),
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant", "model", "bot"),
    "observation_tag": ("observation", "tool", "tool_response"),
    "function_tag": ("function_call", "tool_call"),
    "system_tag": ("system", "developer"),
}
_ROLE_OF = {
    "user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool",
    "system_tag": "system",
}  # fmt: skip
_KNOWN_ROLES = {ours: _TAGS[tag] for tag, ours in _ROLE_OF.items()}
_ANSWERS = {"chosen": "chosen", "rejected": "rejected", "kto_tag": "label"}
_READ = {
    "file_name", "hf_hub_url", "subset", "split", "formatting", "columns", "tags", "ranking",
    "num_samples",
}  # fmt: skip
_OTHER_HUBS = {"ms_hub_url", "om_hub_url"}
_MEDIA = ("images", "audios")
RESIZED = Differs(
    "the model's processor decides the size of images (data.processor_kwargs); there they are made "
    "smaller before it, by image_max_pixels"
)
CHOSEN_ROWS = Differs("num_samples: there so many rows are chosen at random, here the first")


def llama_factory(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """Names of dataset_info.json, concatenated as LLaMA-Factory does."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not names:
        raise DroppedKey(Asks("not a list of names"))
    found = _listed_names([str(name).strip() for name in names], asked)
    notes = [note for note, holds in ((CHOSEN_ROWS, any("rows" in source for source in found)),
                                      (RESIZED, have_media(asked))) if holds]  # fmt: skip
    if (most := asked.get("max_samples")) is not None:
        most = _row_count(most, "max_samples")
        found = [{**source, "rows": min(most, source.get("rows", most))} for source in found]
    return found, Differs("; ".join(notes)) if notes else ""


def max_samples(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """The first rows of each dataset, as `rows` of its source."""
    _row_count(value, "max_samples")
    if asked.get("dataset") is None:
        raise DroppedKey(Asks("dataset is not given: set rows of each source"))
    try:
        return llama_factory(asked["dataset"], asked)
    except DroppedKey:
        raise DroppedKey(Asks(f"set `rows: {value}` in each source of data.train")) from None


def _row_count(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DroppedKey(Asks(f"{key} {value} is not a number of rows"))
    return value


def _listed_names(names: list[str], asked: ToolConfig) -> list[dict[str, Any]]:
    """Return the source of each name.

    Raises DroppedKey with every name that cannot be read, and the sources of those that can.
    """
    folder = str(asked.given("dataset_dir", "data"))
    if folder == ONLINE:
        return [{"path": name} for name in names]
    if (place := _info_folder(asked)) is not None:
        return _sources(names, _read(place / INFO_NAME), place, asked.get("media_dir"))
    raise DroppedKey(
        Asks(
            f"{', '.join(names)}: names from {Path(folder) / INFO_NAME}, which does not exist "
            "here. Set data.train to the paths of their files"
        )
    )


def _info_folder(asked: ToolConfig) -> Path | None:
    """Return the folder of dataset_info.json, None if it is not on this machine."""
    folder = str(asked.given("dataset_dir", "data"))
    places = (Path(folder), asked.folder / folder)
    return next((place for place in places if os.path.isfile(place / INFO_NAME)), None)


def have_media(asked: ToolConfig) -> bool:
    """Return whether a dataset of the file is known to have images or sound."""
    place, given = _info_folder(asked), asked.get("dataset")
    if place is None or given is None:
        return False
    try:
        info = _read(place / INFO_NAME)
    except DroppedKey:  # the key `dataset` says so
        return False
    names = given.split(",") if isinstance(given, str) else given
    entries = [info.get(str(name).strip()) for name in names] if isinstance(names, list) else []
    columns = [entry.get("columns") for entry in entries if isinstance(entry, Mapping)]
    return any(key in one for one in columns if isinstance(one, Mapping) for key in _MEDIA)


def _sources(
    names: list[str], info: Mapping[str, Any], place: Path, media: Any
) -> list[dict[str, Any]]:
    """Return the source of each name; `media` is the folder of images and sounds, or None."""
    found, faults = [], []
    for name in names:
        try:
            found.append(_source(name, info, place, media))
        except DroppedKey as fault:
            faults.append(fault.reason)
    if faults:
        raise _unreadable(faults, found)
    return found


def _unreadable(faults: list[str], found: list[dict[str, Any]]) -> DroppedKey:
    """Return the error for datasets of which some cannot be read."""
    others = f". The others are {json.dumps(found)}: add yours to them" if found else ""
    return DroppedKey(Asks(f"{'; '.join(faults)}{others}"))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > MAX_INFO_BYTES:
            raise DroppedKey(f"{path} is larger than {MAX_INFO_BYTES >> 20} MiB")
        info = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DroppedKey(f"cannot read {path}: {str(error)[:100]}") from error
    if not isinstance(info, Mapping):
        raise DroppedKey(f"{path} is not a table of datasets")
    return info


def _source(name: str, info: Mapping[str, Any], folder: Path, media: Any) -> dict[str, Any]:
    entry = info.get(name)
    if not isinstance(entry, Mapping):
        raise DroppedKey(f"{name} is not in {folder / INFO_NAME}")
    try:
        found = _location(entry, folder) | _how(entry)
    except DroppedKey as reason:
        raise DroppedKey(f"{name} of {folder / INFO_NAME}: {reason}") from None
    if _is_name(media) and any(key in _mapping(entry, "columns") for key in _MEDIA):
        found["media"] = media
    return {key: value for key, value in found.items() if value is not None}


def _location(entry: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    # LLaMA-Factory asks the other hubs where there is no hf_hub_url, or a variable says so.
    read = _READ | _OTHER_HUBS if isinstance(entry.get("hf_hub_url"), str) else _READ
    if unread := [str(key) for key in entry if key not in read and entry[key] not in (None, "")]:
        raise DroppedKey(f"{', '.join(sorted(unread))} are not supported")
    if isinstance(entry.get("hf_hub_url"), str):
        split = entry.get("split")
        return {
            "path": entry["hf_hub_url"],
            "name": entry.get("subset"),
            "split": None if split == "train" else split,
        }
    if not isinstance(entry.get("file_name"), str):
        raise DroppedKey("it has neither file_name nor hf_hub_url")
    return {"path": str(folder / entry["file_name"])}


def _how(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return format, columns, roles and rows of an entry."""
    kind = entry.get("formatting") or "alpaca"
    given, tags = (_mapping(entry, key) for key in ("columns", "tags"))
    given = {key: value for key, value in given.items() if value is not None}
    for key, value in {**given, **tags}.items():
        if not isinstance(value, str) or not value:
            raise DroppedKey(f"{key} is not a name")
    answers = {_ANSWERS[key]: value for key, value in given.items() if key in _ANSWERS}
    media = {key: name for key, name in given.items() if key in _MEDIA and name != key}
    others = {key: value for key, value in given.items() if key not in (*_ANSWERS, *_MEDIA)}
    if kind in ("sharegpt", "openai"):
        shape, columns = "messages", _talk_columns(others, tags)
    elif kind == "alpaca":
        shape, columns = _alpaca_columns(others, is_given="columns" in entry, answers=answers)
    else:
        raise DroppedKey(f"formatting {kind} is not supported")
    if entry.get("ranking"):
        shape = "pairs"
    elif "label" in answers:
        shape = "kto"
        columns |= {} if answers["label"] in ("label", "kto_tag") else {"label": answers["label"]}
    columns |= media | {ours: one for ours, one in answers.items() if ours not in ("label", one)}
    roles = {ours: tags[tag] for tag, ours in _ROLE_OF.items()
             if tag in tags and tags[tag] not in _TAGS[tag]}  # fmt: skip
    if (call := tags.get("function_tag", _TAGS["function_tag"][0])) not in _TAGS["function_tag"]:
        raise DroppedKey(f"function_tag {call} is not a supported name")
    rows = entry.get("num_samples")
    return {
        "format": shape,
        "columns": columns or None,
        "roles": roles or None,
        "rows": None if rows is None else _row_count(rows, "num_samples"),
    }


def _talk_columns(given: Mapping[str, str], tags: Mapping[str, str]) -> dict[str, str]:
    for key in given:
        if key not in ("messages", "system", "tools"):
            raise DroppedKey(f"column {given[key]} for {key} is not supported")
    columns = {key: name for key, name in given.items()
               if name != key and not (key == "messages" and name in _TALKS)}  # fmt: skip
    keys = {ours: tags[tag] for tag, ours in (("role_tag", "role"), ("content_tag", "content"))
            if tag in tags and tags[tag] not in _TAGS[tag]}  # fmt: skip
    return columns | keys


def _alpaca_columns(
    given: Mapping[str, str], *, is_given: bool, answers: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
    """Return the format and the columns. Columns that an entry leaves out are not read there."""
    for key in given:
        if key not in _ALPACA:
            raise DroppedKey(f"column {given[key]} for {key} is not supported")
    if set(given) == {"prompt"} and not answers:
        return "text", {} if given["prompt"] == "text" else {"text": given["prompt"]}
    if not is_given or "prompt" not in given or {"query", "history"} & given.keys():
        return "alpaca", {_ALPACA[key]: name for key, name in given.items() if name != _ALPACA[key]}
    if (given["prompt"], given.get("response")) in _PAIRS:
        given = {key: name for key, name in given.items() if key not in ("prompt", "response")}
    ours = {"prompt": "prompt", "response": "completion"}
    columns = {ours.get(key, key): name for key, name in given.items()}
    return "prompt_completion", {key: name for key, name in columns.items() if key != name}


def _mapping(entry: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = entry.get(key) or {}
    if not isinstance(value, Mapping):
        raise DroppedKey(f"{key} is not a table")
    return value


def trl_train(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """dataset_name with its configuration and split."""
    if asked.get("datasets"):
        raise DroppedKey("overridden by datasets")
    return [_hub_source(asked, asked.given("dataset_train_split", "train"))], ""


def trl_eval(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """The split to evaluate on, if TRL evaluates at all."""
    strategy = asked.given("eval_strategy", asked.given("evaluation_strategy", "no"))
    if strategy in ("no", False) or asked.get("datasets"):
        raise DroppedKey("evaluation is off")
    return [_hub_source(asked, value)], ""


def _hub_source(asked: ToolConfig, split: Any) -> dict[str, Any]:
    name = asked.get("dataset_name")
    if not isinstance(name, str) or not name:
        raise DroppedKey(Asks("dataset_name is not given"))
    text = _text_column(asked)
    if os.path.exists(name):
        if not _has_split(name, str(split)):
            raise DroppedKey(
                Asks(f"{name} is a local file and has no splits: set data.eval to a file")
            )
        return {"path": name} | ({} if split == "train" else {"split": str(split)}) | text
    return _named(name, asked.get("dataset_config"), split, None) | text


def _has_split(path: str, split: str) -> bool:
    """Return whether a local path has a split: files have train, and parts of it."""
    saved = os.path.exists(os.path.join(path, "dataset_dict.json"))
    return saved or split.partition("[")[0] == "train"


def text_field(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """TRL's column of text, as `columns` of the source."""
    if not _text_column(asked):
        raise DroppedKey("the row format is detected; see data.train.format")
    if asked.get("datasets"):
        return listed_sources(asked["datasets"], asked)
    return trl_train(value, asked)


def _text_column(asked: ToolConfig) -> dict[str, Any]:
    """Return the columns of a source of TRL whose text is not in `text`."""
    name = asked.get("dataset_text_field")
    if asked.tool != "TRL" or not isinstance(name, str) or name in ("", "text", *_TALKS):
        return {}
    if any(asked.rows_of(path) not in (None, "other") for path in trl_names(asked)):
        return {}  # TRL reads it of rows that are neither prompts with answers nor preferences
    return {"format": "text", "columns": {"text": name}}


def _named(path: str, name: Any, split: Any, revision: Any) -> dict[str, Any]:
    chosen = {"name": name, "split": None if split == "train" else split, "revision": revision}
    return {"path": path} | {key: str(value) for key, value in chosen.items() if value is not None}


def listed_sources(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """Axolotl's and TRL's lists of {path, name, split, and more}.

    Raises DroppedKey with every entry that cannot be read, and those that can.
    """
    sources: list[dict[str, Any]] = []
    notes: dict[str, None] = {}
    faults: list[str] = []
    unused: set[str] = set()
    for number, item in enumerate(value if isinstance(value, list) else [value], 1):
        item = {"path": item} if isinstance(item, str) else item
        if not isinstance(item, dict) or not item.get("path"):
            faults.append(f"entry {number} has no path")
            continue
        kind, shape = _kind_of(item, asked)
        if kind == "alpaca":
            notes[ALPACA_PROMPT] = None
        elif kind and kind not in _FORMATS and "format" not in shape:
            notes[f"type {kind} is unknown: the format is detected"] = None
        styles = item["type"] if isinstance(item.get("type"), dict) else {}
        unused |= {str(key) for key in styles if key not in _FIELDS and styles[key]}
        try:
            sources += [source | shape for source in _places(item)]
        except DroppedKey as fault:
            faults.append(fault.reason)
        unused |= {str(key) for key in item if key not in _KEPT and item[key] is not None}
    if faults:
        raise _unreadable(faults, sources)
    if unused:
        notes[f"not used: {', '.join(sorted(unused))}"] = None
    return sources, Differs("; ".join(notes)) if notes else ""


def _kind_of(item: dict[str, Any], asked: ToolConfig) -> tuple[str, dict[str, Any]]:
    """Return the type of an entry, empty if its keys say it, and format, columns and roles."""
    style = item.get("type")
    kind = style if isinstance(style, str) else ""
    kind = kind.partition(".")[0].partition(":")[0]
    found = {**item, **style} if isinstance(style, dict) else item
    columns = {ours: found[key] for key, ours in _FIELDS.items() if _is_name(found.get(key))}
    mapped = item.get("message_property_mappings")
    for key in ("role", "content"):
        if isinstance(mapped, dict) and _is_name(mapped.get(key)):
            columns[key] = mapped[key]
    shape: dict[str, Any] = {"format": _FORMATS[kind]} if kind in _FORMATS else {}
    if isinstance(style, dict) and {"instruction", "output"} <= columns.keys():
        shape = {"format": "alpaca"}
    method = asked.get("rl")
    if _is_name(method) and method in _PREFERENCES:
        kind, shape = "", {"format": _PREFERENCES[method]}
    columns = {key: name for key, name in columns.items() if key != name}
    if columns.get("messages") in _TALKS:
        del columns["messages"]
    if columns.get("role", "from") == "from" and columns.get("content", "value") == "value":
        columns = {key: name for key, name in columns.items() if key not in ("role", "content")}
    names = item.get("roles")
    names = names if isinstance(names, dict) else {}
    roles = {ours: [name for name in theirs if name not in _KNOWN_ROLES[ours]]
             for ours, theirs in names.items()
             if ours in _KNOWN_ROLES and isinstance(theirs, list)}  # fmt: skip
    roles = {ours: theirs for ours, theirs in roles.items() if theirs}
    named = {"columns": columns, "roles": roles}
    return kind, shape | _text_column(asked) | {key: one for key, one in named.items() if one}


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _places(item: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the location of an entry's rows: its files, or the dataset."""
    files = item.get("data_files")
    files = [files] if isinstance(files, str) else files or []
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise DroppedKey(f"{item['path']}: data_files is not a name or a list of names")
    path, split = str(item["path"]), str(item.get("split") or "train")
    part = {} if split == "train" or not _has_split(path, split) else {"split": split}
    if files and (path in _LOADERS or os.path.exists(path)):
        base = Path() if path in _LOADERS else Path(path)
        return [{"path": str(base / file), **part} for file in files]
    if files:
        raise DroppedKey(f"{path}: selecting single files of a Hub dataset is not supported")
    if os.path.exists(path) or Path(path).suffix in _FILES:
        return [{"path": path, **part}]
    return [_named(path, item.get("name"), item.get("split"), item.get("revision"))]

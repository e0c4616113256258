"""Datasets as other tools name them, translated to our sources.

LLaMA-Factory's names stand for entries of dataset_info.json, which is in `dataset_dir`, looked up
from the working directory and beside the config. A name becomes a file or a Hub dataset with one
of our formats. Entries that our formats cannot read as LLaMA-Factory would (other columns, other
tags, scripts) are refused by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain.config.other_tools.tool_config import Asks, Differs, DroppedKey, ToolConfig

_FORMATS = {"alpaca": "alpaca", "chat_template": "messages", "sharegpt": "messages",
            "completion": "text", "pretraining_dataset": "text"}  # fmt: skip
_KEPT = {"path", "type", "data_files", "ds_type", "name", "split", "revision"}
_LOADERS = ("json", "csv", "parquet", "text")
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
_MESSAGES = {"messages": ("conversations", "messages"), "system": ("system",), "tools": ("tools",)}
_TAGS = {
    "role_tag": ("from", "role"),
    "content_tag": ("value", "content"),
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant", "model", "bot"),
    "observation_tag": ("observation", "tool", "tool_response"),
    "function_tag": ("function_call", "tool_call"),
    "system_tag": ("system", "developer"),
}
_ANSWERS = {"chosen": ("chosen",), "rejected": ("rejected",), "kto_tag": ("label", "kto_tag")}
_READ = {
    "file_name", "hf_hub_url", "subset", "split", "formatting", "columns", "tags", "ranking",
}  # fmt: skip


def llama_factory(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """Names of dataset_info.json, concatenated as LLaMA-Factory does."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not names:
        raise DroppedKey(Asks("not a list of names"))
    return _listed_names([str(name).strip() for name in names], asked), ""


def _listed_names(names: list[str], asked: ToolConfig) -> list[dict[str, Any]]:
    """Return the source of each name.

    Raises DroppedKey with every name that cannot be read, and the sources of those that can.
    """
    folder = str(asked.given("dataset_dir", "data"))
    if folder == ONLINE:
        return [{"path": name} for name in names]
    for place in (Path(folder), asked.folder / folder):
        if os.path.isfile(place / INFO_NAME):
            info = _read(place / INFO_NAME)
            return _sources(names, info, place)
    raise DroppedKey(
        Asks(
            f"{', '.join(names)}: names from {Path(folder) / INFO_NAME}, which does not exist "
            "here. Set data.train to the paths of their files"
        )
    )


def _sources(names: list[str], info: Mapping[str, Any], place: Path) -> list[dict[str, Any]]:
    found, faults = [], []
    for name in names:
        try:
            found.append(_source(name, info, place))
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


def _source(name: str, info: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    entry = info.get(name)
    if not isinstance(entry, Mapping):
        raise DroppedKey(f"{name} is not in {folder / INFO_NAME}")
    try:
        found = _location(entry, folder) | {"format": _format(entry)}
    except DroppedKey as reason:
        raise DroppedKey(f"{name} of {folder / INFO_NAME}: {reason}") from None
    return {key: value for key, value in found.items() if value is not None}


def _location(entry: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    if unread := [str(key) for key in entry if key not in _READ and entry[key] not in (None, "")]:
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


def _format(entry: Mapping[str, Any]) -> str:
    kind = entry.get("formatting") or "alpaca"
    columns, tags = (_mapping(entry, key) for key in ("columns", "tags"))
    answers = {key: value for key, value in columns.items() if key in _ANSWERS}
    columns = {key: value for key, value in columns.items() if key not in _ANSWERS}
    for key, value in answers.items():
        if value not in _ANSWERS[key]:
            raise DroppedKey(f"column {value} for {key} is not read; rename it {key}")
    found = _of_turns(kind, columns, tags)
    if entry.get("ranking"):
        return "pairs"
    return "kto" if "kto_tag" in answers else found


def _of_turns(kind: Any, columns: Mapping[str, Any], tags: Mapping[str, Any]) -> str:
    if kind in ("sharegpt", "openai"):
        for given, allowed in ((columns, _MESSAGES), (tags, _TAGS)):
            for key, value in given.items():
                if value not in allowed.get(key, ()):
                    raise DroppedKey(f"{key} {value} is not a supported name")
        return "messages"
    if kind != "alpaca":
        raise DroppedKey(f"formatting {kind} is not supported")
    pair = columns.get("prompt"), columns.get("response")
    if set(columns) == {"prompt", "response"} and pair in _PAIRS:
        return "prompt_completion"
    if columns == {"prompt": "text"}:
        return "text"
    for key, value in columns.items():
        if _ALPACA.get(key) != value:
            raise DroppedKey(
                f"column {value} for {key} is not read; rename it {_ALPACA.get(key, '')}"
            )
    return "alpaca"


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
    if os.path.exists(name):
        if split != "train":
            raise DroppedKey(
                Asks(f"{name} is a local file and has no splits: set data.eval to a file")
            )
        return {"path": name}
    return _named(name, asked.get("dataset_config"), split, None)


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
        kind = str(item.get("type") or "").partition(".")[0].partition(":")[0]
        shape = {"format": _FORMATS[kind]} if kind in _FORMATS else {}
        if asked.get("rl") in _PREFERENCES:
            shape = {"format": _PREFERENCES[asked["rl"]]}
        elif kind == "alpaca":
            notes[ALPACA_PROMPT] = None
        elif kind and kind not in _FORMATS:
            notes[f"type {kind} is unknown: the format is detected"] = None
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


def _places(item: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the location of an entry's rows: its files, or the dataset."""
    files = item.get("data_files")
    files = [files] if isinstance(files, str) else files or []
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise DroppedKey(f"{item['path']}: data_files is not a name or a list of names")
    path = str(item["path"])
    if files and (path in _LOADERS or os.path.exists(path)):
        base = Path() if path in _LOADERS else Path(path)
        return [{"path": str(base / file)} for file in files]
    if files:
        raise DroppedKey(f"{path}: selecting single files of a Hub dataset is not supported")
    if os.path.exists(path) or Path(path).suffix in (".jsonl", ".json", ".csv", ".txt", ".parquet"):
        return [{"path": path}]
    return [_named(path, item.get("name"), item.get("split"), item.get("revision"))]

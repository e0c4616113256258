"""LLaMA-Factory's dataset_info.json: the datasets behind its names.

The file is in `dataset_dir`, looked up from the working directory and beside the config. A name
becomes a file or a Hub dataset with one of our formats. Entries that our formats cannot read as
LLaMA-Factory would (other columns, other tags, scripts) are refused by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain.config.other_tools.asked import Asks, DroppedKey, ToolConfig

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
_PREFERENCES = {"chosen": ("chosen",), "rejected": ("rejected",), "kto_tag": ("label", "kto_tag")}
_READ = {
    "file_name", "hf_hub_url", "subset", "split", "formatting", "columns", "tags", "ranking",
}  # fmt: skip


def sources(names: list[str], asked: ToolConfig) -> list[dict[str, Any]]:
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
        raise unreadable(faults, found)
    return found


def unreadable(faults: list[str], found: list[dict[str, Any]]) -> DroppedKey:
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
        found = _place(entry, folder) | {"format": _format(entry)}
    except DroppedKey as reason:
        raise DroppedKey(f"{name} of {folder / INFO_NAME}: {reason}") from None
    return {key: value for key, value in found.items() if value is not None}


def _place(entry: Mapping[str, Any], folder: Path) -> dict[str, Any]:
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
    answers = {key: value for key, value in columns.items() if key in _PREFERENCES}
    columns = {key: value for key, value in columns.items() if key not in _PREFERENCES}
    for key, value in answers.items():
        if value not in _PREFERENCES[key]:
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

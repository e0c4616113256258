"""Datasets as other tools name them, translated to our sources."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatrain.config.other_tools import dataset_info
from megatrain.config.other_tools.asked import Asks, Differs, DroppedKey, ToolConfig

_FORMATS = {"alpaca": "alpaca", "chat_template": "messages", "sharegpt": "messages",
            "completion": "text", "pretraining_dataset": "text"}  # fmt: skip
_KEPT = {"path", "type", "data_files", "ds_type", "name", "split", "revision"}
_LOADERS = ("json", "csv", "parquet", "text")
"""Names of `datasets` for files, not datasets."""
ALPACA_PROMPT = "Axolotl uses the Alpaca prompt for these rows; here they use the chat template"
_PREFERENCES = {"kto": "kto", "dpo": "pairs", "ipo": "pairs", "orpo": "pairs", "simpo": "pairs"}
"""The format of rows by Axolotl's `rl`: its type names how columns are read."""


def llama_factory(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """Names of dataset_info.json, concatenated as LLaMA-Factory does."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not names:
        raise DroppedKey(Asks("not a list of names"))
    return dataset_info.sources([str(name).strip() for name in names], asked), ""


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
        raise dataset_info.unreadable(faults, sources)
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

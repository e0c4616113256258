"""A strict reader for YAML and JSON: plain data with the line of every key, or a ConfigError.

Scalars are those of YAML 1.2's core schema, so 1e-5 is a number, 010 is ten and `no` is a word.
Refused: tags, anchors and aliases (a page of them can expand to billions of nodes), duplicate keys,
keys that are not scalars, more than one document, and input beyond the limits below. We build
from the parser's events, so a limit ends the reading at once and nothing recurses.

Laws (tests/config/test_yaml_reader.py): any bytes give data or a ConfigError; the line of a key
is its position in the file.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from typing import Any

import yaml

from megatrain.errors import ConfigError, DiskError

MAX_YAML_BYTES = 64 << 10
MAX_YAML_DEPTH = 16
MAX_NODES = 10_000

Path = tuple[str | int, ...]
"""The path of a value: keys and positions from the top."""

_WORDS = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip
_QUOTE = ". Quote text that begins with * or &"
_INT = re.compile(r"[-+]?\d[\d_]{0,40}")
_FLOAT = re.compile(r"[-+]?(\.\d{1,40}|\d{1,40}(\.\d{0,40})?)([eE][-+]?\d{1,4})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The contents of a file, with the line of each key."""

    name: str
    """Its name in messages."""
    value: Any
    lines: dict[Path, int] = field(default_factory=dict)
    """The line of each key or list item, counted from 1."""
    origins: dict[Path, str] = field(default_factory=dict)
    """Values given elsewhere, and the name of that place in messages."""

    def place(self, path: Path) -> str:
        """Return `name:line` of a path, or of the nearest parent that has a line."""
        made_on_the_way = {given[: len(path)]: origin for given, origin in self.origins.items()}
        for end in range(len(path), 0, -1):
            if path[:end] in self.origins:
                return self.origins[path[:end]]
            if path[:end] in self.lines:
                return f"{self.name}:{self.lines[path[:end]]}"
            if path[:end] in made_on_the_way:
                return made_on_the_way[path[:end]]
        return self.name

    def line(self, path: Path) -> int:
        """Return the line of a path; 0 if it has none."""
        return next((self.lines[path[:n]] for n in range(len(path), 0, -1)
                     if path[:n] in self.lines), 0)  # fmt: skip


def read_document(path: str | os.PathLike[str]) -> Document:
    """Return the contents of a YAML or JSON file.

    Raises ConfigError for an invalid file, DiskError if the system fails to read it.
    """
    name = os.fspath(path)
    try:
        if not stat.S_ISREG(os.stat(name).st_mode):
            raise ConfigError(f"{name}: is not a file. Give the path of a YAML file.")
        with open(name, "rb") as file:
            data = file.read(MAX_YAML_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise ConfigError(
            f"{name}: no such file. Give the path of a YAML file; `megatrain init` writes one."
        ) from None
    except OSError as error:
        raise DiskError(f"{name}: cannot read it: {error.strerror}") from error
    return parse_document(data, name)


def parse_document(data: bytes, name: str) -> Document:
    """Return the contents of bytes; messages call them `name`."""
    if len(data) > MAX_YAML_BYTES:
        raise ConfigError(f"{name}: larger than {MAX_YAML_BYTES >> 10} KiB. Is it a config?")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: byte {error.start} is not UTF-8. Is it a config?") from None
    if text.lstrip().startswith("{"):
        text = text.replace("\t", " ")  # JSON may be indented by tabs; inside text it escapes them
    builder = _Builder(name)
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}" if mark else name
        quote = _QUOTE if re.search("alias|anchor", str(error.context)) else ""
        reason = f"{error.problem or error.context}{quote}"
        raise ConfigError(f"{place}: invalid YAML: {reason}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        reason = str(error).splitlines()[0]  # an escape beyond Unicode is a bare ValueError
        raise ConfigError(f"{name}: invalid YAML: {reason:.200}") from None
    return Document(name=name, value=builder.value, lines=builder.lines)


class _Builder:
    """Builds values from events, one open mapping or list inside the other."""

    def __init__(self, name: str) -> None:
        self.value: Any = None
        self.lines: dict[Path, int] = {}
        self._name = name
        self._open: list[dict[str, Any] | list[Any]] = []
        self._path: list[str | int | None] = []  # per open value: its key or position being filled
        self._num_nodes = 0
        self._num_documents = 0

    def take(self, event: Any) -> None:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise self._refusal(line, f"anchors and aliases are not supported{_QUOTE}")
        tag = getattr(event, "tag", None)
        if tag not in (None, "!", "tag:yaml.org,2002:str"):
            raise self._refusal(line, f"the tag {tag:.60} is not supported. Write a plain value")
        if isinstance(event, yaml.DocumentStartEvent):
            self._num_documents += 1
            if self._num_documents > 1:
                raise self._refusal(line, "a second document begins. Give only one")
        elif isinstance(event, yaml.ScalarEvent):
            self._take_scalar(event.value, event.style is None and tag is None, line)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            self._begin({} if isinstance(event, yaml.MappingStartEvent) else [], line)
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            self._open.pop()
            self._path.pop()
            self._path[-1:] = [None] * bool(self._path)

    def _take_scalar(self, text: str, plain: bool, line: int) -> None:
        try:  # JSON escapes a character beyond 16 bits as two halves
            text = text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise self._refusal(line, "half of a surrogate pair is not a character") from None
        if self._awaits_key():
            self._begin_key(text, line)
        else:
            self._put(scalar(text) if plain else text, line)

    def _awaits_key(self) -> bool:
        return bool(self._open) and isinstance(self._open[-1], dict) and self._path[-1] is None

    def _begin_key(self, key: str, line: int) -> None:
        holder = self._open[-1]
        if key == "<<":
            raise self._refusal(line, "merge keys (<<) are not supported. Write the keys out")
        self._path[-1] = key
        if key in holder:
            dotted = ".".join(map(str, self._path))
            first = self.lines[self._place()]
            raise self._refusal(line, f"{dotted:.200} is given twice, first in line {first}")
        self.lines[self._place()] = line

    def _begin(self, value: dict[str, Any] | list[Any], line: int) -> None:
        if self._awaits_key():
            raise self._refusal(line, "a key is a list or a mapping. Use text as the key")
        self._put(value, line)
        if len(self._open) == MAX_YAML_DEPTH:
            raise self._refusal(line, f"nested deeper than {MAX_YAML_DEPTH}")
        self._open.append(value)
        self._path.append(None)

    def _put(self, value: Any, line: int) -> None:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise self._refusal(line, f"more than {MAX_NODES} values, too many for a config")
        if not self._open:
            self.value = value
            return
        holder = self._open[-1]
        if isinstance(holder, list):
            self._path[-1] = len(holder)
            self.lines[self._place()] = line
            holder.append(value)
        else:
            holder[str(self._path[-1])] = value
        if not isinstance(value, dict | list):
            self._path[-1] = None

    def _place(self) -> Path:
        return tuple(part for part in self._path if part is not None)

    def _refusal(self, line: int, what: str) -> ConfigError:
        return ConfigError(f"{self._name}:{line}: {what}.")


def scalar(text: str) -> Any:
    """Return the value of a plain scalar: None, a bool, a number, or its text."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    if _FLOAT.fullmatch(text):
        return float(text)
    return text

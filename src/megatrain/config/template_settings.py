"""Settings of the chat template: its arguments, and a template to use instead."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

_RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message")


class Arguments(dict[str, Any]):
    """An immutable, hashable mapping."""

    __slots__ = ()

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True, default=str))

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a config is immutable")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[Arguments], tuple[dict[str, Any]]]:
        return Arguments, (dict(self),)


def read_arguments(value: object) -> Arguments:
    """Return arguments for a chat template. Raises ValueError."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError("give a mapping, like {enable_thinking: false}")
    for name in value:
        if name in _RESERVED:
            raise ValueError(f"{name} is not an argument that can be set")
    return Arguments(value)


def read_template(value: object) -> str | None:
    """Return a file, a template or `none`; the user of the value decides which it is."""
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise ValueError("give a file, the text of a template, or none")
    return value

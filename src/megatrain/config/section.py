"""The base class of the sections of a config."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    """Settings that belong together."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)


def short(key: str) -> BeforeValidator:
    """Accept one word for a section, as the value of `key`."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


def retired(key: str, note: str) -> BeforeValidator:
    """Accept and drop a key of earlier versions, whose config.yaml has it with value auto.

    Any other value has no effect either, and a FutureWarning says so.
    """

    def without(value: object) -> object:
        if not isinstance(value, Mapping) or key not in value:
            return value
        if value[key] != "auto":
            warnings.warn(f"{key} has no effect: {note}. Remove it.", FutureWarning, stacklevel=2)
        return {name: one for name, one in value.items() if name != key}

    return BeforeValidator(without)

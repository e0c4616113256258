"""The base class of the sections of a config."""

from __future__ import annotations

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    """Settings that belong together."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)


def short(key: str) -> BeforeValidator:
    """Accept one word for a section, as the value of `key`."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)

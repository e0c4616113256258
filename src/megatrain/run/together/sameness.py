"""Facts that all ranks must share before they train together: compared, and named where not.

Laws (tests/run/together/test_sameness.py)
    1. A fact that differs on any rank is a ConfigError on all, which names fact, values and ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatrain.config import Config
from megatrain.errors import ConfigError, listing
from megatrain.ranks.ranks import Ranks

_MOST_TEXT = 200


def require_same(ranks: Ranks, facts: Mapping[str, Any]) -> None:
    """Raise ConfigError unless all ranks have these facts, which JSON can say."""
    if ranks.owner.is_alone:
        return
    heard = ranks.agree({"facts": facts})
    found = [{name: json.dumps(v) for name, v in said["facts"].items()} for said in heard]
    names = dict.fromkeys(name for of_rank in found for name in of_rank)
    differing = [_difference(name, found) for name in names if len(_values(name, found)) > 1]
    if differing:
        raise ConfigError(
            "ranks of one run must have the same settings, model, data, code and packages, but "
            "these differ:\n  "
            + "\n  ".join(differing)
            + "\nStart all of them with the same command, files and installed packages."
        )


def facts_of(config: Config) -> dict[str, Any]:
    """Return the settings of a config as facts."""
    return {
        f"{section}.{key}": value
        for section, values in config.model_dump(mode="json").items()
        for key, value in values.items()
    }


def _values(name: str, found: list[dict[str, str]]) -> dict[str, list[int]]:
    """Return the ranks that have each value."""
    values: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(found):
        values.setdefault(of_rank.get(name, "nothing"), []).append(rank)
    return values


def _difference(name: str, found: list[dict[str, str]]) -> str:
    values = _values(name, found)
    parts = [f"{value[:_MOST_TEXT]} on {_in_words(ranks)}" for value, ranks in values.items()]
    return f"{name}: {'; '.join(parts)}"


def _in_words(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listing(map(str, ranks))}"

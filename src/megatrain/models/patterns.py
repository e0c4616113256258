"""Name patterns of params in settings; a pattern without a match is an error.

`*` matches any characters, `?` for one, `[ab]` for one of several; case counts.

Laws (tests/models/test_patterns.py)
    1. Every pattern that passes matches at least one param.
    2. A refusal names the setting, the pattern, and the names that come near it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from megatrain.errors import ConfigError

_NUM_NEAR = 3


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether any of the patterns matches a param's name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def ends_like(name: str, patterns: Iterable[str]) -> bool:
    """Return whether any of the patterns matches a name, or its end after a dot."""
    return any(fnmatchcase(name, form) for p in patterns for form in (p, f"*.{p}"))


def check_patterns(
    setting: str,
    patterns: Iterable[str],
    names: Mapping[str, tuple[str, ...]],
    what: str = "parameter",
) -> None:
    """Raise ConfigError unless each pattern matches a name.

    `names` are those of the params, each with its other names, by which ties know it; `what` says
    which params these are.
    """
    for pattern in patterns:
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        raise ConfigError(
            f"{setting}: {pattern} matches no {what} of the model. {_way_out(pattern, names)}"
        )


def _way_out(pattern: str, names: Mapping[str, tuple[str, ...]]) -> str:
    for name, others in names.items():
        if any(fnmatchcase(other, pattern) for other in others):
            return f"The model ties it to {name}: use that name."
    # Layers have the same names but for their number, and are one suggestion.
    kinds = list(dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names))
    near = difflib.get_close_matches(pattern, kinds, n=_NUM_NEAR, cutoff=0.5)
    if near:
        return f"Similar names: {', '.join(near)}."
    return f"Its parameters have names like {', '.join(kinds[:_NUM_NEAR])}."

"""The end of a proof or a benchmark: its figures, one a line or as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def print_figures(found: Mapping[str, Any], *, as_json: bool) -> None:
    """Print figures by name."""
    if as_json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:24} {value}")

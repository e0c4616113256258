"""`megatrain audit`: the words of the command, and a folder to repeat rounds in."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from megatrain.errors import ConfigError
from megatrain.progress import Say
from megatrain.run.audit import audit

_SPAN = re.compile(r"(\d+)(?:\.\.(\d+))?")
FALSE = 4
"""Exit code if a claim is false."""


def audited(run: Path, exchanges: str, tolerance: float | None, say: Say) -> int:
    """Audit exchanges of a run, like 3..5; return the exit code. Raises ConfigError."""
    numbers = read_span(exchanges)
    with tempfile.TemporaryDirectory(prefix="megatrain-audit-") as scratch:
        found = audit(run, numbers, Path(scratch), say, tolerance=tolerance)
    return FALSE if any(one.reason is not None for one in found) else 0


def read_span(text: str) -> range:
    """Return the exchanges that are meant by 3..5, or by 7. Raises ConfigError."""
    match = _SPAN.fullmatch(text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ConfigError(f"{text[:60]}: give exchanges from 1 on, like 3..5, or one of them")
    return range(first, last + 1)

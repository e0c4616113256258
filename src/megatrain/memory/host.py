"""How much host memory this process may still use: what is free within its group's limit."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_LIMIT_FILES = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)


def free_bytes(root: Path = _CGROUP) -> int:
    """Return the bytes that can still be allocated before something is killed."""
    free = int(psutil.virtual_memory().available)
    for limit_name, usage_name, stat_name in _LIMIT_FILES:
        limit, usage = _number(root / limit_name), _number(root / usage_name)
        if limit is not None and usage is not None:
            free = min(free, limit - usage + _reclaimable(root / stat_name))
    return max(free, 0)


def resident_bytes() -> int:
    """Return the resident memory of this process now."""
    return int(psutil.Process(os.getpid()).memory_info().rss)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(path: Path) -> int:
    """Page cache counts as usage of the group, but gives way."""
    try:
        fields = dict(line.split()[:2] for line in path.read_text().splitlines() if " " in line)
    except OSError:
        return 0
    return int(fields.get("inactive_file", 0))

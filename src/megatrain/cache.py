"""The cache folder: data that can be made again, such as prepared rows and machine profiles.

`$MEGATRAIN_CACHE/megatrain`, or `$XDG_CACHE_HOME/megatrain`, or `~/.cache/megatrain`. Nothing in it
is needed to resume a run, and it may be deleted when no run is active.

Laws (tests/test_cache.py)
    1. A folder that cannot be made or written is one DiskError that names MEGATRAIN_CACHE.
    2. A cache without room is one DiskFull with the problem, then the remedies.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatrain.errors import DiskError, DiskFull
from megatrain.files import make_folder

CACHE_VARIABLE = "MEGATRAIN_CACHE"


def cache_folder() -> Path:
    """Return the cache folder, which may not exist yet."""
    home = os.environ.get(CACHE_VARIABLE) or os.environ.get("XDG_CACHE_HOME")
    # expanduser and not Path.home, which raises for a user without a home
    return Path(home or os.path.expanduser("~/.cache")) / "megatrain"


def writable_cache_folder() -> Path:
    """Return the cache folder, created if missing. Raises DiskError."""
    folder = cache_folder()
    try:
        make_folder(folder)
    except (DiskError, OSError) as error:
        reason = str(error) if isinstance(error, DiskError) else error.strerror or str(error)
        raise _unusable(folder, reason) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unusable(folder, "it is not writable")
    return folder


def cache_full(problem: str, otherwise: str = "") -> DiskFull:
    """Return the error for a cache without room: the problem, and what to do."""
    remedy = f"Set {CACHE_VARIABLE} to a folder on a larger disk"
    return DiskFull(f"{problem}. {remedy}{otherwise and ', or '}{otherwise}.")


def _unusable(folder: Path, reason: str) -> DiskError:
    return DiskError(
        f"the cache folder {folder} cannot be used: {reason}. Set {CACHE_VARIABLE} to a writable "
        "folder. Prepared data and the results of `megatrain doctor` are kept there."
    )

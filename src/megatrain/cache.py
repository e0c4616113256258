"""The cache folder: what can be made again, such as prepared data and measured machines.

`$MEGATRAIN_CACHE/megatrain`, or `$XDG_CACHE_HOME/megatrain`, or `~/.cache/megatrain`. Nothing in it
is needed to resume a run, and it may be deleted whenever nothing runs.

Laws (tests/test_cache.py)
    1. A folder that cannot be made or written is one DiskError that names MEGATRAIN_CACHE.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatrain.errors import DiskError
from megatrain.files import make_folder

CACHE = "MEGATRAIN_CACHE"


def cache_folder() -> Path:
    """Return the cache folder, which may not exist yet."""
    home = os.environ.get(CACHE) or os.environ.get("XDG_CACHE_HOME")
    # expanduser and not Path.home, which raises for a user without a home
    return Path(home or os.path.expanduser("~/.cache")) / "megatrain"


def writable_cache_folder() -> Path:
    """Return the cache folder, made if it was missing. Raises DiskError."""
    folder = cache_folder()
    try:
        make_folder(folder)
    except (DiskError, OSError) as error:
        reason = str(error) if isinstance(error, DiskError) else error.strerror or str(error)
        raise _unusable(folder, reason) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unusable(folder, "it cannot be written to")
    return folder


def _unusable(folder: Path, reason: str) -> DiskError:
    return DiskError(
        f"the cache folder {folder} cannot be used: {reason}. Set {CACHE} to a folder that can be "
        "written; prepared data and what `megatrain doctor` measures are kept there."
    )

"""Reads that are tried again, because a file system may fail once and answer the next time.

A network file system whose server restarts returns EIO or ESTALE for files that are whole. That is
no damage: nothing was read that does not match its hash.

Laws (tests/disk/checkpoint/test_retried.py)
    1. A read that fails with such an error is tried again, a few times at most, from the start.
    2. Damage, a full disk, and errors that no wait repairs are raised at once.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from megatrain.errors import DiskError

Read = TypeVar("Read")
PAUSES_S = (1.0, 4.0, 16.0)
"""Before the second, third and fourth try."""
TRANSIENT = frozenset(
    {
        errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ENXIO, errno.ENODEV,
        errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ECONNRESET,
    }
)  # fmt: skip


def retried(read: Callable[[], Read]) -> Read:
    """Return what `read` returns, if need be at a later try. Raises what its last try raises."""
    for pause_s in PAUSES_S:
        try:
            return read()
        except DiskError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno not in TRANSIENT:
                raise
        time.sleep(pause_s)
    return read()

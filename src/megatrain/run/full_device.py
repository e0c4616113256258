"""What a run keeps of a device that was full: the allocator's blocks, beside the error.

It is torch's snapshot as JSON, which `torch.cuda._memory_viz` draws. Without torch's recording of
allocations it has segments and blocks, and not who asked for them.

Law (tests/run/test_full_device.py): a run that ends for lack of device memory has the file, where
the device tells, and the error stays the error.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from megatrain.errors import DeviceFull
from megatrain.run.folder import RunFolder

SNAPSHOT = "memory_snapshot.json"


def keep_snapshot(folder: RunFolder, error: DeviceFull, say: Callable[[str], None]) -> None:
    """Write what device memory held, if it is known, and tell where."""
    if error.snapshot is None:
        return
    folder.write(SNAPSHOT, json.dumps(error.snapshot, default=str))
    say(f"{folder.path / SNAPSHOT} has what device memory held")

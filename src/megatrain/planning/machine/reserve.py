"""Memory that a run leaves to others than itself.

On the device it is a line of the ledger:

    libraries    workspaces of cuBLAS and cuDNN in two threads, accumulators of attention's
                 backward, and what torch's allocator rounds up and cannot join
    driver       tables of the host pages that it has pinned

Both are assumed, not measured here: 0.75 GB, and 0.4 % of what is pinned. Where little memory is
allowed, libraries are given an eighth of it.

Where device and host are one memory (an integrated GPU), a run has one budget for both, and a tenth
of what is free stays free: such a device does not raise when the last pages are gone, the machine
hangs.

Of installed host memory the system keeps 2 % (firmware, tables of pages: Linux reports 62.7 GiB of
64, 1,007 of 1,024) and 2 GiB for itself and other programs. A desktop with a browser needs more.

Laws (tests/planning/machine/test_reserve.py)
    1. A device with its own memory has the line, whatever is planned; the host has none.
    2. More pinned memory needs more of the device.
    3. A device that shares the host's memory has no budget of its own.
    4. More installed memory leaves more, and never more than is installed.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatrain.memory.ledger import Line
from megatrain.planning.machine.profile import MachineProfile

LIBRARY_BYTES = 750_000_000
PAGE_TABLE_SHARE = 0.004
_LARGEST_PART = 8
SYSTEM_SHARE = 0.02
SYSTEM_BYTES = 2 << 30
INTEGRATED_SHARE = 0.9
"""Share of free memory that a run may use where it is the device's too."""


def left_by_system(installed_bytes: int) -> int:
    """Return what the system leaves of installed memory; of very little, half."""
    left = int(installed_bytes * (1 - SYSTEM_SHARE)) - SYSTEM_BYTES
    return max(left, installed_bytes // 2)


def with_reserve(profile: MachineProfile) -> MachineProfile:
    """Return the machine with what a run on it must leave free, if its device has own memory."""
    if profile.on_host:
        return profile
    return profile.changed(
        reserved_bytes=min(LIBRARY_BYTES, profile.device_bytes // _LARGEST_PART),
        reserved_pinned_share=PAGE_TABLE_SHARE,
    )


def with_one_budget(profile: MachineProfile) -> MachineProfile:
    """Return the machine with the memory that host and device may use together, if it is one."""
    if not profile.integrated:
        return profile
    most = int(profile.ram_bytes * INTEGRATED_SHARE)
    return profile.changed(ram_bytes=most, device_bytes=min(profile.device_bytes, most))


def reserve_line(profile: MachineProfile, pinned: Iterable[Line]) -> Line:
    """Return the reserve beside a run that pins these lines of host memory."""
    tables = profile.reserved_pinned_share * sum(line.num_bytes for line in pinned)
    num_bytes = profile.reserved_bytes + round(tables)
    return Line(place="device", purpose="libraries and driver", num_bytes=num_bytes)

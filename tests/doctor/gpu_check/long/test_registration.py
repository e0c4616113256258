"""Sizes that are pinned leave host memory to others; a processor has none to pin."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.doctor.gpu_check.long import registration as module
from megatrain.doctor.gpu_check.long.registration import HOST_SHARE, measure, sizes_for
from megatrain.doctor.gpu_check.long.results import CannotRun
from testkit.machines import GIB
from tests.doctor.gpu_check.long.givens import Kept, given_on_cpu


@pytest.mark.parametrize("free", [GIB, 16 * GIB, 64 * GIB, 512 * GIB])
def test_no_size_takes_more_than_its_share(free: int) -> None:
    found = sizes_for(1.0, free)
    assert found
    assert max(found) <= HOST_SHARE * free
    assert len(found) == {GIB: 1, 16 * GIB: 1, 64 * GIB: 2, 512 * GIB: 3}[free]
    assert max(sizes_for(0.05, free)) <= GIB


def test_a_processor_has_nothing_to_pin(tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match="nothing to pin"):
        measure(given_on_cpu(Kept(), tmp_path))


def test_memory_that_is_refused_is_said() -> None:
    refused = [{"bytes": 8, "seconds": 1.0, "left_out": "no memlock"}]
    assert module._found(refused, [])["lead"] == "Host memory cannot be pinned."
    pinned = [{"bytes": 8, "seconds": 1.0, "bytes_per_s": 5e9, "device_share": 0.004}]
    lead = module._found([*refused, *pinned], [])["lead"]
    assert lead == "Pinning at 5 GB/s or more, with 0.40% of it on the device."

"""The longest row that fits: no power of two more does."""

from __future__ import annotations

import pytest

from megatrain.planning.longest import LONGEST_ROW, longest_row
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.search import Search
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings
from testkit.machines import DESKTOP, EIGHT, GIB, PROCESSOR, SERVER, SMALL

FULL_ROWS = {"tile_tokens": "set by you"}


def _fits(profile: MachineProfile, tokens: int) -> bool:
    workload = Workload(model=EIGHT, step_tokens=tokens, sequence=tokens, packed=True)
    return Search(profile, workload).best() is not None


@pytest.mark.parametrize("profile", [DESKTOP, SERVER, PROCESSOR], ids=lambda each: each.name)
def test_it_fits_and_twice_as_long_does_not(profile: MachineProfile) -> None:
    found = longest_row(profile, EIGHT)
    assert found.bit_count() == 1
    assert _fits(profile, found)
    assert not _fits(profile, 2 * found)


def test_tiles_make_rows_longer() -> None:
    full = longest_row(SERVER, EIGHT, StepSettings(tile_tokens=None), FULL_ROWS)
    assert longest_row(SERVER, EIGHT) >= 4 * full


def test_there_is_an_end_and_a_beginning() -> None:
    roomy = SERVER.changed(ram_bytes=1 << 50, device_bytes=1 << 50)
    assert longest_row(roomy, SMALL) == LONGEST_ROW
    assert longest_row(DESKTOP.changed(ram_bytes=8 * GIB), EIGHT) == 0

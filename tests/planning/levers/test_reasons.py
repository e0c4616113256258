"""What a state or a tier cost is said in figures."""

from __future__ import annotations

import re

import pytest

from megatrain.planning.machine.profile import NOT_MEASURED
from megatrain.planning.memory.predicted import predicted_ledger
from megatrain.planning.plan import make_plan
from megatrain.planning.search import Search, shortfalls
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings
from testkit.machines import DESKTOP, EIGHT, GIB

WORKLOAD = Workload(model=EIGHT, step_tokens=8192)


def _reasons(ram: int, disk: int = 0, settings: StepSettings | None = None) -> dict[str, str]:
    profile = DESKTOP.changed(ram_bytes=ram * GIB, disk_bytes=disk * GIB)
    search = Search(profile, WORKLOAD, settings)
    best = search.best()
    assert best is not None
    return search.reasons(best.settings)


def test_a_tier_names_what_memory_lacks() -> None:
    said = _reasons(80, 2000)["tier"]
    found = re.fullmatch(r"fp32 states are (\d+\.\d) GiB short in memory", said)
    assert found is not None
    profile = DESKTOP.changed(ram_bytes=80 * GIB)
    least = StepSettings(micro_batch_tokens=2048, chunk_tokens=256)
    lacks = shortfalls(profile, predicted_ledger(profile, WORKLOAD, least))
    assert float(found[1]) == pytest.approx(lacks["host"] / GIB, abs=0.06)


def test_the_reasons_of_a_tier() -> None:
    assert "tier" not in _reasons(128)
    assert _reasons(128, 2000)["tier"] == "host memory is enough, and a disk wears out"
    narrow = _reasons(48, 2000, StepSettings(state="8bit"))
    assert re.fullmatch(r"8bit states are .* GiB short in memory", narrow["tier"])


def test_tiles_name_what_full_rows_lack() -> None:
    workload = Workload(model=EIGHT, step_tokens=131072, sequence=131072, packed=True)
    search = Search(DESKTOP, workload, StepSettings(state="8bit"))
    best = search.best()
    assert best is not None
    reasons = search.reasons(best.settings)
    assert re.fullmatch(r"full rows need .* GiB more device memory", reasons["tile_tokens"])
    assert _reasons(128)["tile_tokens"] == "full rows fit"
    assert "grad_slots" in reasons


def test_a_second_backward_is_told_where_no_time_is_known() -> None:
    for ram, told in ((105, True), (128, False)):
        machine = DESKTOP.changed(ram_bytes=ram * GIB, source=NOT_MEASURED)
        plan = make_plan(machine, WORKLOAD)
        assert plan.fits
        assert ("update" in plan.reasons) is told
        assert ("waiting gradients are" in str(plan)) is told

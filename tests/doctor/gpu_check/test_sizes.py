"""The model of the timed step: as large as asked for, as memory and time allow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatrain.doctor.gpu_check.check import DEFAULT_PARAMS
from megatrain.doctor.gpu_check.sizes import shaped_model, step_for
from megatrain.doctor.timed_step import TimedModel
from megatrain.errors import DoesNotFit
from megatrain.planning.catalog.asked_machines import find_machine
from megatrain.planning.machine.profile import MachineProfile


def card(**changes: int) -> MachineProfile:
    return find_machine("4090")[0].profile().changed(**changes)


@pytest.mark.parametrize("params", [1_500_000, 10**7, 10**8, 10**9, 8 * 10**9])
def test_a_model_has_the_parameters_that_were_asked_for(params: int) -> None:
    model = TimedModel(**shaped_model(params, 16384), rows=1, num_micro=1, dtype="bf16")
    made = sum(param.num_elements for param in model.decoder().params)
    assert made == pytest.approx(params, rel=0.1)


def test_a_large_card_gets_all_of_them_and_many_tokens() -> None:
    chosen = step_for(card(), 10**9)
    assert chosen.reduced == ""
    assert chosen.plan.fits
    assert chosen.model.step_tokens == 32768
    assert chosen.model.dtype == "bf16"
    assert chosen.model.rows * chosen.model.length == chosen.plan.settings.micro_batch_tokens


def test_memory_that_is_small_gets_fewer_and_says_which() -> None:
    host = step_for(card(ram_bytes=8 << 30), 10**9)
    assert host.plan.workload.model.params < 6e8
    assert "do not fit: host memory" in host.reduced
    device = step_for(card(device_bytes=400 << 20), 10**9)
    assert "do not fit: device memory" in device.reduced
    with pytest.raises(DoesNotFit, match=r"^gpu-check: .* parameters do not fit: host memory"):
        step_for(card(ram_bytes=1 << 20), 10**9)


def test_the_page_says_how_much_host_memory_the_model_needs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "gpu.md").read_text()
    said = re.search(r"The model needs (\d+) GiB of free host memory \(predicted\)", page)
    assert said
    for less, update in ((0, "late"), (1, "second_backward")):
        chosen = step_for(card(ram_bytes=(int(said[1]) - less) << 30), DEFAULT_PARAMS)
        assert (chosen.reduced, chosen.plan.settings.update) == ("", update)


def test_one_memory_of_host_and_device_is_not_used_twice() -> None:
    most = 20 << 30
    for integrated, usable in ((False, most), (True, int(0.9 * most))):
        profile = card(ram_bytes=most, device_bytes=most, integrated=integrated)
        plan = step_for(profile, 10**8).plan
        assert plan.fits
        assert plan.profile.ram_bytes == usable
        host = [line.purpose for line in plan.ledger.lines if line.place == "host"]
        assert ("device memory" in host) == integrated

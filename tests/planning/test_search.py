"""What the search returns fits, and is near the best of all."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest

from megatrain.planning.bytes import predicted_ledger
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.search import CHUNKS, Search, effective_profile, shortfalls
from megatrain.planning.simulate import simulate
from megatrain.planning.workload import ModelShape, Workload
from megatrain.step.settings import StepSettings
from testkit.machines import DESKTOP, EIGHT, EXPERTS, GIB, PROCESSOR, SERVER, SEVENTY, SMALL

PLACES = [
    (SMALL, DESKTOP),
    (SMALL, PROCESSOR),
    (EIGHT, DESKTOP),
    (EIGHT, DESKTOP.changed(device_bytes=10 * GIB)),
    (EXPERTS, SERVER.changed(device_bytes=24 * GIB)),
    (SEVENTY, SERVER),
]


def everything(workload: Workload, profile: MachineProfile) -> list[StepSettings]:
    """All settings of a grid."""
    micros = [2048 * 2**power for power in range(5) if 2048 * 2**power <= workload.step_tokens]
    places: list[Literal["device", "host"]] = ["device"] if profile.unified else ["device", "host"]
    slots = (2,) if profile.unified else (2, 3, 4, 8)
    gathers = (False,) if profile.unified or workload.model.tied else (False, True)
    return [
        StepSettings(
            micro_batch_tokens=micro,
            slots=count,
            tape=tape,
            chunk_tokens=chunk,
            gather_embedding=gather,
        )
        for micro, count, tape, chunk, gather in itertools.product(
            micros, slots, places, (CHUNKS[0], CHUNKS[3]), gathers
        )
    ]


@pytest.mark.parametrize(("model", "profile"), PLACES, ids=lambda value: value.name)
def test_what_is_returned_fits(model: ModelShape, profile: MachineProfile) -> None:
    search = Search(profile, Workload(model=model, step_tokens=32768))
    best = search.best()
    assert best is not None
    assert search.fits(best.settings)
    assert all(search.fits(settings) for settings in search.tried)


@pytest.mark.parametrize("link", [1.0, 0.05], ids=["fast link", "slow link"])
@pytest.mark.parametrize("profile", [DESKTOP, PROCESSOR], ids=lambda profile: profile.name)
def test_it_is_near_the_best_of_all(profile: MachineProfile, link: float) -> None:
    profile = profile.changed(
        copy_in_bytes_per_s=link * profile.copy_in_bytes_per_s, device_bytes_per_s=400e9
    )
    workload = Workload(model=SMALL, step_tokens=16384)
    search = Search(profile, workload)
    best = search.best()
    assert best is not None
    times = [
        simulate(profile, workload, settings).step_s
        for settings in everything(workload, profile)
        if search.fits(settings)
    ]
    assert simulate(profile, workload, best.settings).step_s <= 1.02 * min(times)
    if not profile.unified:
        assert max(times) > 1.02 * min(times)


def test_few_layers_tell_the_time_of_many() -> None:
    workload = Workload(model=SEVENTY, step_tokens=32768)
    for settings in (
        StepSettings(micro_batch_tokens=8192, tape="host"),
        StepSettings(micro_batch_tokens=2048, tape="host", slots=4),
    ):
        whole = simulate(SERVER, workload, settings).step_s
        assert Search(SERVER, workload).seconds(settings) == pytest.approx(whole, rel=0.01)


def test_nothing_is_returned_where_nothing_fits() -> None:
    search = Search(DESKTOP.changed(ram_bytes=32 * GIB), Workload(model=EIGHT, step_tokens=32768))
    assert search.best() is None
    assert not search.fits(search.smallest())


def test_slots_are_added_where_fetches_are_waited_for() -> None:
    workload = Workload(model=SMALL, step_tokens=2048)
    slow = Search(DESKTOP.changed(copy_in_bytes_per_s=1e9), workload).best()
    assert slow is not None
    assert slow.settings.slots == SMALL.num_layers
    quick = Search(DESKTOP.changed(copy_in_bytes_per_s=1e13), workload).best()
    assert quick is not None
    assert quick.settings.slots == 2


def test_what_the_user_decided_stays() -> None:
    settings = StepSettings(
        micro_batch_tokens=4096, slots=5, tape="host", chunk_tokens=512, gather_embedding=True
    )
    pins = dict.fromkeys(settings.facts(), "set by you")
    best = Search(DESKTOP, Workload(model=EIGHT, step_tokens=32768), settings, pins).best()
    assert best is not None
    assert best.settings == settings


@pytest.mark.parametrize(("norm", "update"), [(1.0, "late"), (None, "in_backward")])
def test_clipping_decides_when_updates_run(norm: float | None, update: str) -> None:
    workload = Workload(model=EIGHT, step_tokens=32768, max_grad_norm=norm)
    best = Search(DESKTOP, workload).best()
    assert best is not None
    assert best.settings.update == update


@pytest.mark.parametrize("sequence", [65536, 131072, 262144])
def test_rows_longer_than_usual_are_computed_one_at_a_time(sequence: int) -> None:
    workload = Workload(model=SMALL, step_tokens=4 * sequence, sequence=sequence)
    best = Search(SERVER, workload).best()
    assert best is not None
    assert best.settings.micro_batch_tokens == sequence


def test_a_step_of_one_long_row_is_one_micro_batch() -> None:
    workload = Workload(model=SMALL, step_tokens=262144, sequence=262144)
    best = Search(SERVER, workload).best()
    assert best is not None
    assert best.settings.micro_batch_tokens == 262144


def test_what_cannot_be_pinned_is_copied_slower() -> None:
    limited = DESKTOP.changed(pinned_bytes=GIB)
    workload, settings = (
        Workload(model=EIGHT, step_tokens=8192),
        StepSettings(micro_batch_tokens=8192),
    )
    ledger = predicted_ledger(limited, workload, settings)
    slower = effective_profile(limited, ledger)
    assert slower.copy_in_bytes_per_s == pytest.approx(0.4 * limited.copy_in_bytes_per_s)
    assert effective_profile(DESKTOP, ledger) == DESKTOP
    assert shortfalls(limited, ledger) == {}

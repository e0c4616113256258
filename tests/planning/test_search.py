"""What the search returns fits, and is near the best of all."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Literal

import pytest

from megatrain.planning.levers.chunk import CHUNKS
from megatrain.planning.levers.homes import homes
from megatrain.planning.machine.profile import NOT_MEASURED, MachineProfile
from megatrain.planning.memory.predicted import predicted_ledger
from megatrain.planning.model.shapes import ModelShape
from megatrain.planning.search import Search, effective_profile, shortfalls
from megatrain.planning.simulate import simulate
from megatrain.planning.workload import Workload
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


@pytest.mark.few(3)
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


@pytest.mark.parametrize("device_bytes", [0, 10 * GIB])
def test_rows_are_gathered_for_a_device_with_its_own_memory_alone(device_bytes: int) -> None:
    """As the engine has it: on the host's memory copies are of whole blocks."""
    slow = DESKTOP.changed(copy_in_bytes_per_s=1e8, device_bytes=device_bytes)
    search = Search(slow, Workload(model=EIGHT, step_tokens=2048))
    assert search.best() is not None
    assert any(settings.gather_embedding for settings in search.tried) == (device_bytes > 0)


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


EIGHT_WORKLOAD = Workload(model=EIGHT, step_tokens=8192)
"""With its reserve in fp32 110 GiB, and 95 where backward runs twice; in 8 bits 63 and 49; on disk
41."""
HOMES: list[tuple[int, int, Literal["fp32", "8bit"], tuple[str, str]]] = [
    # GiB of host memory, of disk, the states asked for, and what is chosen
    (128, 0, "fp32", ("none", "late")),
    (128, 2000, "fp32", ("none", "late")),
    (100, 0, "fp32", ("none", "second_backward")),
    (100, 2000, "fp32", ("none", "second_backward")),
    (70, 2000, "fp32", ("states", "late")),
    (70, 2000, "8bit", ("none", "late")),
    (55, 0, "8bit", ("none", "second_backward")),
    (48, 2000, "8bit", ("states", "late")),
]


@pytest.mark.few(6)
@pytest.mark.parametrize(("ram", "disk", "state", "home"), HOMES)
def test_states_are_as_they_were_asked_for_and_on_disk_only_if_they_must(
    ram: int, disk: int, state: Literal["fp32", "8bit"], home: tuple[str, str]
) -> None:
    profile = DESKTOP.changed(ram_bytes=ram * GIB, disk_bytes=disk * GIB)
    search = Search(profile, EIGHT_WORKLOAD, StepSettings(state=state))
    best = search.best()
    assert best is not None
    assert best.settings.state == state
    assert _home(best.settings) == home
    for other in homes(search):
        if _home(other) == home:
            break
        grid = everything(EIGHT_WORKLOAD, profile)
        tier, update = _home(other)
        ways = (one.changed(state=state, tier=tier, update=update) for one in grid)
        assert not any(map(search.fits, ways))


def _home(settings: StepSettings) -> tuple[str, str]:
    return settings.tier, settings.update


def test_a_disk_that_is_faster_than_a_second_backward_is_taken() -> None:
    fast = DESKTOP.changed(
        ram_bytes=100 * GIB,
        disk_bytes=2000 * GIB,
        disk_read_bytes_per_s=1e12,
        disk_write_bytes_per_s=1e12,
    )
    best = Search(fast, replace(EIGHT_WORKLOAD, step_tokens=32768)).best()
    assert best is not None
    assert _home(best.settings) == ("states", "late")


def test_a_disk_that_is_too_small_is_not_used() -> None:
    profile = DESKTOP.changed(ram_bytes=48 * GIB)
    assert Search(profile, EIGHT_WORKLOAD).best() is None
    enough = Search(profile.changed(disk_bytes=90 * GIB), EIGHT_WORKLOAD).best()
    assert enough is not None
    assert enough.settings.tier == "states"
    assert Search(profile.changed(disk_bytes=50 * GIB), EIGHT_WORKLOAD).best() is None


LONG = Workload(model=EIGHT, step_tokens=524288, sequence=524288, packed=True)


def test_rows_are_cut_into_tiles_only_if_full_rows_do_not_fit() -> None:
    search = Search(SERVER, LONG)
    best = search.best()
    assert best is not None
    assert best.settings.tile_tokens is not None
    assert not search.fits(best.settings.changed(tile_tokens=None))
    roomy = Search(SERVER.changed(device_bytes=2000 * GIB), LONG).best()
    assert roomy is not None
    assert roomy.settings.tile_tokens is None


def test_no_tiles_where_layers_cannot_be_cut_or_the_user_wants_none() -> None:
    uncut = replace(LONG, model=replace(EIGHT, tiled=False))
    assert Search(SERVER, uncut).best() is None
    assert Search(SERVER, replace(LONG, compiled=True)).best() is None
    assert Search(SERVER, LONG, StepSettings(), {"tile_tokens": "set by you"}).best() is None


def test_one_gradient_slot_only_if_two_do_not_fit_or_are_not_faster() -> None:
    workload = Workload(model=EIGHT, step_tokens=16384)
    for device_bytes in (7 * GIB, 22 * GIB):
        search = Search(DESKTOP.changed(device_bytes=device_bytes), workload)
        best = search.best()
        assert best is not None
        two = best.settings.changed(grad_slots=2)
        one = best.settings.changed(grad_slots=1)
        if best.settings.grad_slots == 1:
            assert not search.fits(two) or search.seconds(two) >= 0.999 * search.seconds(one)
        else:
            assert search.seconds(one) > search.seconds(two)


# Activations that stay.


@pytest.mark.parametrize("device_gib", [40, 80])
def test_as_many_layers_keep_their_activations_as_fit(device_gib: int) -> None:
    profile = SERVER.changed(device_bytes=device_gib * GIB)
    search = Search(profile, Workload(model=EIGHT, step_tokens=32768))
    best = search.best()
    assert best is not None
    found = search.filled(best)
    kept = found.settings.kept_layers
    assert 0 < kept <= EIGHT.num_layers
    assert found.settings.changed(kept_layers=0) == best.settings
    assert search.fits(found.settings)
    assert kept == EIGHT.num_layers or not search.fits(best.settings.changed(kept_layers=kept + 1))
    assert found.step_s < best.step_s
    more = Search(profile.changed(device_bytes=2 * profile.device_bytes), search.workload)
    assert more.filled(best).settings.kept_layers >= kept


def test_no_layer_keeps_what_is_unknown_or_does_not_pay() -> None:
    workload = Workload(model=EIGHT, step_tokens=32768)
    search = Search(SERVER, workload)
    best = search.best()
    assert best is not None
    slow_link = SERVER.changed(copy_in_bytes_per_s=1e8, copy_out_bytes_per_s=1e8)
    for other in (
        Search(SERVER.changed(source=NOT_MEASURED), workload),
        Search(SERVER, workload, pins={"kept_layers": "set by you"}),
        Search(slow_link, workload),
    ):
        begin = replace(best, step_s=other.seconds(best.settings))
        assert other.filled(begin).settings.kept_layers == 0


def test_layers_in_between_take_their_share_of_the_time() -> None:
    search = Search(SERVER, Workload(model=EIGHT, step_tokens=32768))
    settings = StepSettings(micro_batch_tokens=8192)
    for count in (8, 20):
        kept = settings.changed(kept_layers=count)
        whole = simulate(SERVER, search.workload, kept).step_s
        assert search.seconds(kept) == pytest.approx(whole, rel=0.02)

"""Laws of reserve.py: the device keeps room for libraries and the driver, in sight."""

from __future__ import annotations

from megatrain.memory.ledger import Line
from megatrain.planning.machine.reserve import (
    LIBRARY_BYTES,
    reserve_line,
    with_one_budget,
    with_reserve,
)
from megatrain.planning.memory.predicted import predicted_ledger
from megatrain.planning.search import (
    DEVICE_HEADROOM,
    HOST_HEADROOM,
    Search,
    shortfall_texts,
    shortfalls,
)
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings
from testkit.machines import DESKTOP, EIGHT, PROCESSOR

WORKLOAD = Workload(model=EIGHT, step_tokens=32768)
SETTINGS = StepSettings(micro_batch_tokens=8192, tape="host")
CARD = with_reserve(DESKTOP)


def test_a_card_has_the_line_and_the_host_has_none() -> None:
    plain = predicted_ledger(DESKTOP, WORKLOAD, SETTINGS)
    ledger = predicted_ledger(CARD, WORKLOAD, SETTINGS)
    (line,) = set(ledger.lines) - set(plain.lines)
    tape = sum(one.num_bytes for one in plain.lines if (one.place, one.purpose) == ("host", "tape"))
    pinned = plain.total("pinned") + tape
    assert line.purpose == "libraries and driver"
    assert line.num_bytes == LIBRARY_BYTES + round(0.004 * pinned)
    assert ledger.total("device") == plain.total("device") + line.num_bytes
    assert ledger.total("host") == plain.total("host")
    assert with_reserve(PROCESSOR) == PROCESSOR


def test_more_pinned_memory_needs_more_of_the_device() -> None:
    pinned = [Line(place="pinned", purpose="weights", num_bytes=100 * 10**9)]
    more = reserve_line(CARD, pinned * 2).num_bytes - reserve_line(CARD, pinned).num_bytes
    assert more == 400_000_000


def test_what_is_chosen_leaves_the_reserve_free() -> None:
    """On a card that is just large enough for what would be chosen without it."""
    roomy = Search(DESKTOP, WORKLOAD).best()
    assert roomy is not None
    needed = predicted_ledger(DESKTOP, WORKLOAD, roomy.settings).total("device")
    card = DESKTOP.changed(device_bytes=int(needed * DEVICE_HEADROOM))
    assert Search(card, WORKLOAD).best() == roomy
    best = Search(with_reserve(card), WORKLOAD).best()
    assert best is not None
    taken = predicted_ledger(card, WORKLOAD, best.settings).total("device")
    assert taken + LIBRARY_BYTES <= card.device_bytes


def test_where_little_is_allowed_an_eighth_of_it_is_kept() -> None:
    assert with_reserve(DESKTOP.changed(device_bytes=800)).reserved_bytes == 100


def test_one_memory_has_one_budget_and_a_tenth_of_it_stays_free() -> None:
    shared = DESKTOP.changed(integrated=True, ram_bytes=1000, device_bytes=2000)
    found = with_one_budget(shared)
    assert (found.ram_bytes, found.device_bytes) == (900, 900)
    assert with_one_budget(DESKTOP) == DESKTOP


def test_every_byte_of_one_memory_is_counted_once() -> None:
    """A host that has room for its own lines alone is too small where it is the device's too."""
    shared = CARD.changed(integrated=True)
    apart, together = (predicted_ledger(m, WORKLOAD, SETTINGS) for m in (CARD, shared))
    assert together.total("device") == apart.total("device")
    assert together.total("host") == apart.total("host") + apart.total("device")
    enough = int(apart.total("host") * HOST_HEADROOM) + 1
    assert shortfalls(CARD.changed(ram_bytes=enough), apart) == {}
    (place,) = shortfalls(shared.changed(ram_bytes=enough), together)
    assert place == "host"
    (text,) = shortfall_texts(shared.changed(ram_bytes=enough), together)
    assert text.startswith("memory of host and device together ")

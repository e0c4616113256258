"""L2 on an accelerator: streams never change a result.

The engine on lanes against the reference, one op at a time, on the same device: every loss, norm
and byte of the store. Then again while streams dawdle at random, and once with a wait taken away,
which must show.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatrain.step.ops import Op, Role
from testkit.states import steps_of
from testkit.worlds import Case, Outcome, world_of
from tests.gpu.rigs import SPIN_CYCLES, RealRig, Rig, SimulatedRig, delayed_lanes, play

LLAMA, FP32, DROPOUT = "llama of 2 layers", "llama in fp32", "gpt2, tied, with dropout"
STEPS = steps_of(3)[:2]


def case(sort: str, update: Any, tape: Any, slots: int) -> Case:
    return Case(
        sort=sort,
        steps=STEPS,
        update=update,
        tape=tape,
        slots=slots,
        evaluates_after=(1,),
    )


FAST = [
    case("llama of 5 layers", "late", "host", 2),
    case(DROPOUT, "in_backward", "device", 3),
]
ALL = [
    case(sort, update, tape, slots)
    for sort in ("llama of 5 layers", FP32, "gemma, tied", "mixtral", DROPOUT)
    for update in ("none", "late", "in_backward")
    for tape in ("device", "host")
    for slots in (2, 3, 4)
]
CASES = [*FAST, *(pytest.param(c, marks=pytest.mark.thorough) for c in ALL if c not in FAST)]


def named(value: object) -> str | None:
    if isinstance(value, Case):
        return f"{value.sort}-{value.update}-tape on {value.tape}-{value.slots} slots"
    return None


_references: dict[tuple[type[Rig], Case], Outcome] = {}


def reference(rig: Rig, chosen: Case) -> Outcome:
    """Return what one op at a time gives, by two slots: their number changes no bit of it."""
    world, plain = world_of(chosen.sort), replace(chosen, slots=2)
    if (type(rig), plain) not in _references:
        with rig.running(world.store) as accelerator:
            found = play(rig, world, plain, accelerator, reference=True)
        _references[type(rig), plain] = found
    return _references[type(rig), plain]


@pytest.mark.merge
@pytest.mark.parametrize("chosen", CASES, ids=named)
def test_lanes_give_the_bits_of_the_reference(rig: Rig, chosen: Case) -> None:
    world, expected = world_of(chosen.sort), reference(rig, chosen)
    with rig.running(world.store, seed=1) as accelerator:
        outcome = play(rig, world, chosen, accelerator)
    assert outcome.differences(expected) == []
    assert any(number not in (None, 0.0) for number in outcome.numbers)


@pytest.mark.merge
@pytest.mark.parametrize(
    ("seeds", "tape"),
    [
        (range(3), "host"),
        pytest.param(range(20), "device", marks=pytest.mark.thorough),
        pytest.param(range(3, 20), "host", marks=pytest.mark.thorough),
    ],
)
def test_dawdling_streams_change_nothing(rig: Rig, seeds: range, tape: str) -> None:
    chosen = case(LLAMA, "late", tape, 2)
    world, expected = world_of(chosen.sort), reference(rig, chosen)
    for seed in seeds:
        with rig.running(world.store, seed=seed) as accelerator:
            lanes = delayed_lanes(rig, seed)
            outcome = play(rig, world, chosen, accelerator, lanes=lanes)
        assert outcome.differences(expected) == [], f"seed {seed}"


class Hasty:
    """A stream whose op is called done at `before`, where that is set."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.before: Any = None

    def record_event(self) -> Any:
        return self.before or self._stream.record_event()

    def __enter__(self) -> object:
        return self._stream.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._stream.__exit__(*exc)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@pytest.mark.merge
def test_a_lost_wait_would_be_noticed(rig: Rig) -> None:
    """Compute does not wait for fetches, which are late: it sees what was in the slot before.

    For the embedding it waits. The inputs come with that, and a card that looks up tokens which are
    not there is lost to its process.
    """
    chosen = case(LLAMA, "none", "device", 2)
    world, expected = world_of(chosen.sort), reference(rig, chosen)

    def broken() -> Outcome:
        with rig.running(world.store, seed=1) as accelerator:
            lanes = delayed_lanes(rig, 0)
            stream: Any = lanes[0]._stream
            hasty = Hasty(stream)

            def late(op: Op) -> float:
                hasty.before = None if op.role is Role.EMBEDDING else stream.record_event()
                rig.spin(100 * SPIN_CYCLES)
                return 0.0

            lanes[0]._stream, lanes[0]._delay = hasty, late
            return play(rig, world, chosen, accelerator, lanes=lanes)

    if isinstance(rig, RealRig):
        assert broken().differences(expected) != []
        return
    assert isinstance(rig, SimulatedRig)
    with pytest.raises(AssertionError, match=r"by stream .* reads what"):
        broken()

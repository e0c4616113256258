"""What a rank concludes from what it heard of the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.errors import DataError, RankLost
from megatrain.ranks.heartbeats import Beat, RankFault, Roll, begin
from megatrain.ranks.ownership import Owner
from megatrain.ranks.torch_ranks import NoAnswer

BEATS = [Beat(host=f"host{rank}", pid=100 + rank, count=1) for rank in range(3)]
LIMIT_S = 10.0


def _roll(*silent: int) -> Roll:
    """A roll in which some ranks were silent for 12 s."""
    roll = Roll(Owner(0, 3), BEATS[0])
    for rank in (1, 2):
        roll.hear(rank, replace(BEATS[rank], doing="gather"))
    roll.wait(12.0)
    roll.hear_store()
    for rank in {1, 2} - set(silent):
        roll.hear(rank, replace(BEATS[rank], count=2, doing="gather"))
    return roll


def _failed(rank: int, number: int, error: Exception) -> Beat:
    return replace(BEATS[rank], count=2, fault=replace(RankFault.of(error), number=number))


def test_a_heartbeat_comes_back_from_the_store() -> None:
    beat = _failed(1, 3, DataError("row 7"))
    assert Beat.from_json(begin(beat, "comm", "gather").to_json()) == replace(
        beat, begun={"comm": 1}, doing="gather"
    )


def test_another_rank_that_waits_for_its_storage_is_known_until_it_leaves() -> None:
    roll = _roll()
    roll.own = replace(roll.own, storing="write a file")
    assert not roll.is_storing, "this rank does not wait for itself"
    roll.hear(1, replace(BEATS[1], storing="write a file"))
    assert roll.is_storing
    roll.hear(1, replace(BEATS[1], storing="write a file", has_left=True))
    assert not roll.is_storing


def test_a_silent_rank_is_named_with_its_host_and_what_it_did() -> None:
    assert _roll(2).cause(LIMIT_S) == (
        "rank 2 (host2, pid 102) is dead or cut off: silent for 12 s; then: gather"
    )
    assert _roll(2).cause(13.0) is None


def test_a_rank_that_never_came_is_named() -> None:
    roll = Roll(Owner(0, 2), BEATS[0])
    roll.wait(12.0)
    roll.hear_store()
    assert roll.cause(LIMIT_S) == "rank 1 has not joined within 12 s"


def test_a_rank_that_has_left_is_not_missed() -> None:
    roll = _roll(2)
    roll.hear(2, replace(BEATS[2], has_left=True))
    assert roll.cause(LIMIT_S) is None


def test_the_first_error_is_the_cause_whoever_is_silent() -> None:
    roll = _roll(2)
    roll.hear(1, _failed(1, 2, DataError("row 7")))
    assert roll.cause(LIMIT_S) == "rank 1 (host1, pid 101) failed: DataError: row 7"
    roll.hear(2, _failed(2, 1, DataError("row 9")))
    assert roll.cause(LIMIT_S) == "rank 2 (host2, pid 102) failed: DataError: row 9"


def test_a_rank_that_lost_another_is_not_the_cause_but_is_heard() -> None:
    roll = _roll(2)
    roll.hear(1, _failed(1, 1, RankLost("rank 2 is dead")))
    assert "rank 2 (host2, pid 102) is dead" in str(roll.cause(LIMIT_S))
    roll.hear(2, replace(BEATS[2], count=3))
    assert roll.cause(LIMIT_S) == "rank 1 (host1, pid 101) ended: RankLost: rank 2 is dead"
    roll.hear(2, _failed(2, 2, DataError("row 9")))
    assert "row 9" in str(roll.cause(LIMIT_S))


@pytest.mark.parametrize("error", [None, ConnectionError("reset")])
def test_without_the_store_no_rank_is_blamed_but_its_own(error: Exception | None) -> None:
    roll = _roll()
    roll.wait(12.0)
    if error is not None:
        roll.hear_store(error)
    cause = str(roll.cause(LIMIT_S))
    assert "store is gone or cut off" in cause
    assert "rank 0" in cause
    assert ("reset" if error else "12 s") in cause
    assert "rank 1" not in cause
    assert "rank 2" not in cause


def test_the_store_of_a_rank_that_has_left_may_go() -> None:
    roll = Roll(Owner(1, 2), BEATS[1])
    roll.hear(0, replace(BEATS[0], has_left=True))
    roll.hear_store(ConnectionError("reset"))
    assert roll.cause(LIMIT_S) is None


def test_a_rank_that_is_behind_is_suspected() -> None:
    roll = _roll()
    roll.own = begin(begin(roll.own, "comm", "gather"), "comm", "gather")
    roll.hear(1, replace(BEATS[1], count=3, begun={"comm": 2}))
    roll.hear(2, replace(BEATS[2], count=3, begun={"comm": 1}, doing="exchange"))
    found = roll.suspicion(TimeoutError("60000 ms"))
    assert found == (
        "rank 2 (host2, pid 102) is alive but stuck or slow: it has begun 1 of 2 on comm; "
        "doing: exchange"
    )


def test_where_none_is_behind_the_network_is_suspected() -> None:
    found = _roll().suspicion(TimeoutError("60000 ms"))
    assert "rank 1 (host1, pid 101)" in found
    assert "60000 ms" in found
    found = _roll().suspicion(NoAnswer(2, TimeoutError("60000 ms")))
    assert "rank 2" in found
    assert "rank 1" not in found


@pytest.mark.parametrize("words", [b"cos\nmkdir\n", b"\xff", b"[]", b"7", b"{}", b'{"fault": 1}'])
def test_words_that_are_not_a_heartbeat_are_a_value_error(words: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (also of json)
        Beat.from_json(words)

"""Ranks end a piece of work alike."""

from __future__ import annotations

import pytest

from megatrain.errors import CheckpointCorrupted, DiskError, DiskFull, MegaTrainError, RankLost
from megatrain.ranks.agreement import Agreement
from megatrain.ranks.ranks import ALONE, Ranks
from testkit.rank_threads import Together


def _ends(size: int, failing: dict[int, Exception], *, in_middle: bool) -> list[Exception | None]:
    """Let ranks fail in a block or at its end; return what each has raised."""

    def work(ranks: Ranks) -> Exception | None:
        failure = failing.get(ranks.owner.rank)
        try:
            with Agreement(ranks.agree) as agreement:
                if in_middle:
                    assert agreement.all_well(failure) == (not failing)
                    agreement.settle(failure)
                elif failure is not None:
                    raise failure
        except Exception as error:
            return error
        return None

    return Together(size).run(work)


@pytest.mark.parametrize("in_middle", [True, False])
def test_all_raise_what_the_first_raises(in_middle: bool) -> None:
    own = DiskFull("no room")
    ends = _ends(3, {2: CheckpointCorrupted("late"), 1: own}, in_middle=in_middle)
    assert [(type(end), str(end)) for end in ends] == 3 * [(DiskFull, "rank 1: no room")]
    assert [end.__cause__ for end in ends if end is not None][:2] == [None, own]
    assert _ends(3, {}, in_middle=in_middle) == [None, None, None]


@pytest.mark.parametrize(
    ("failure", "kind"),
    [(OSError(5, "gone"), DiskError), (ZeroDivisionError("a bug"), RankLost)],
)
def test_errors_that_are_not_ours_have_a_class_too(
    failure: Exception, kind: type[MegaTrainError]
) -> None:
    ends = _ends(2, {0: failure}, in_middle=False)
    assert [(type(end), str(end)) for end in ends] == 2 * [(kind, f"rank 0: {failure!r}")]


def test_a_process_alone_raises_its_own_error() -> None:
    own = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError) as found, Agreement(ALONE.carrier.agree):
        raise own
    assert found.value is own
    with Agreement(ALONE.agree) as agreement:
        assert agreement.settle(facts={"a": 1}) == [{"a": 1}]


def test_nobody_is_asked_about_a_lost_rank() -> None:
    def ask(facts: object) -> list[object]:
        raise AssertionError("asked")

    with pytest.raises(RankLost, match="gone"), Agreement(ask):  # type: ignore[arg-type]
        raise RankLost("gone")

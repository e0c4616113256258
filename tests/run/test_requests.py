"""What one rank was asked, all do."""

from __future__ import annotations

from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run.interrupts import Interrupts, Requests
from testkit.rank_threads import Together


def test_one_reason_is_that_of_all() -> None:
    def work(ranks: Ranks) -> list[str | None]:
        interrupts = Interrupts()
        requests = Requests(ranks, interrupts, lambda: False, lambda: False)
        requests.ask()
        heard = [requests.stop]
        interrupts.reason = "SIGTERM" if ranks.owner.rank == 2 else None
        heard.append(requests.stop)  # not before all have heard
        requests.ask()
        return [*heard, requests.stop]

    assert Together(3).run(work) == [[None, None, "rank 2: SIGTERM"]] * 3


def test_rank_0_decides_on_a_save_which_happens_once() -> None:
    def work(ranks: Ranks) -> list[bool]:
        requests = Requests(ranks, Interrupts(), lambda: ranks.owner.leads, lambda: False)
        requests.ask()
        return [requests.save(), requests.save()]

    assert Together(2).run(work) == [[True, False]] * 2

    def unasked(ranks: Ranks) -> bool:
        return Requests(ranks, Interrupts(), lambda: True, lambda: False).save()

    assert not any(Together(2).run(unasked))


def test_all_know_that_storage_has_stalled_on_one() -> None:
    def work(ranks: Ranks) -> list[bool]:
        answers = [ranks.owner.rank != 1, True]
        requests = Requests(ranks, Interrupts(), lambda: False, lambda: not answers.pop(0))
        heard = []
        for _ in range(2):
            requests.ask()
            heard.append(requests.storage_stalled)
        return heard

    assert Together(3).run(work) == [[True, False]] * 3


def test_a_process_alone_is_asked_when_it_matters() -> None:
    interrupts, wants = Interrupts(), [True, False]
    requests = Requests(ALONE, interrupts, wants.pop, lambda: False)
    interrupts.reason = "SIGINT"
    requests.ask()
    assert requests.stop == "SIGINT"
    assert [requests.save(), requests.save()] == [False, True]

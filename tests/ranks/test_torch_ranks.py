"""Ranks as processes hear each other exactly, or end with RankLost."""

from __future__ import annotations

import math
import os
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.errors import RankLost
from megatrain.ranks import torch_ranks
from megatrain.ranks.ranks import Ranks
from testkit.patience import eventually
from testkit.rank_processes import rank_outcomes, run_ranks

SIZE = 3
BITS = [0x7FF8_0000_0000_BEEF, 0x7FF0_0000_0000_0000, 0x8000_0000_0000_0000, 1]
"""Of doubles: a not-a-number that says something, infinity, minus zero, the least above zero."""


def pattern(count: int, seed: int) -> Tensor:
    """Return bytes that no other seed has."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def gathered(ranks: Ranks, count: int, spoil: bool = False) -> bool:
    """Gather parts of `count` bytes inside a larger slot; return whether all is as it should be."""
    rank, size = ranks.owner.rank, ranks.owner.size
    parts = [pattern(count, seed) for seed in range(size)]
    slot = torch.full((size * count + 16,), 7, dtype=torch.uint8)
    own = slot[8 + rank * count : 8 + (rank + 1) * count]
    own.copy_(parts[0 if spoil else rank])
    ranks.wire.gather(slot[8:-8])
    edges = torch.full((8,), 7, dtype=torch.uint8)
    return torch.equal(slot, torch.cat([edges, *parts, edges]))


def exchanged(ranks: Ranks, counts: list[int], dtype: torch.dtype, spoil: bool = False) -> bool:
    """Send `counts[r]` elements to rank r; return whether all have theirs, and nothing else."""
    rank, size = ranks.owner.rank, ranks.owner.size

    def sent_by(sender: int, receiver: int) -> Tensor:
        return pattern(counts[receiver] * dtype.itemsize, 10 * sender + receiver).view(dtype)

    sent = torch.cat([sent_by(rank, other) for other in range(size)])
    if spoil and rank == 1:
        sent.copy_(sent.flip(0))
    received = torch.zeros(size * counts[rank] + 4, dtype=dtype)
    ranks.wire.exchange(received[:-4], sent, [counts[rank]] * size, counts)
    expected = torch.cat([sent_by(other, rank) for other in range(size)])
    bits = received.view(torch.uint8)
    edge = torch.zeros(4 * dtype.itemsize, dtype=torch.uint8)
    return torch.equal(bits, torch.cat([expected.view(torch.uint8), edge]))


def shared_bits(ranks: Ranks) -> list[list[int]]:
    """Share doubles of odd bits and one of our own; return the bits that came."""
    own = [*(struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in BITS), ranks.owner.rank]
    return [
        [struct.unpack("<Q", struct.pack("<d", number))[0] for number in told]
        for told in ranks.share(own)
    ]


def carried(ranks: Ranks, num_rounds: int, log: list[str]) -> None:
    """Send parts round the ring and agree between them; write down what is wrong."""
    rank, size = ranks.owner.rank, ranks.owner.size
    for number in range(num_rounds):
        for sender in range(size):
            receiver = (sender + 1) % size
            sent = [pattern(1000 + number, 100 * number + sender + half) for half in (0, 50)]
            if rank == sender:
                for part in sent:
                    ranks.carrier.send(part, receiver)
            if rank == receiver:
                got = [torch.zeros_like(part) for part in sent]
                for part in got:
                    ranks.carrier.receive(part, sender)
                log += [] if all(map(torch.equal, got, sent)) else [f"{number} from {sender}"]
        facts = ranks.carrier.agree({"rank": rank, "number": number})
        expected = [{"rank": other, "number": number} for other in range(size)]
        log += [] if facts == expected else [f"{number}: {facts}"]


def converse(ranks: Ranks) -> dict[str, Any]:
    """Do everything that ranks do; return what was found."""
    rank = ranks.owner.rank
    facts = {"rank": rank, "text": "\ud800 \u00e9 \U0001f680 " * 200_000 * rank, "loss": 0.1 + rank}
    found: dict[str, Any] = {
        "gathered": [gathered(ranks, count) for count in (0, 1, 999, 3 << 20)],
        "exchanged": [
            exchanged(ranks, counts, dtype)
            for counts in ([5, 0, 7], [0, 0, 1], [0, 0, 0], [400_000, 500_000, 64])
            for dtype in (torch.bfloat16, torch.float32)
        ],
        "spoiled": [gathered(ranks, 64, True), exchanged(ranks, [8, 8, 8], torch.float32, True)],
        "bits": shared_bits(ranks),
        "agreed": [said == facts | {"rank": r, "text": "\ud800 \u00e9 \U0001f680 " * 200_000 * r,
                                    "loss": 0.1 + r} for r, said in enumerate(ranks.agree(facts))],
        "infinite": ranks.agree({"norm": math.inf if rank else math.nan}),
    }  # fmt: skip
    log: list[str] = []
    thread = threading.Thread(target=carried, args=(ranks, 12, log))
    thread.start()
    found["order"] = [gathered(ranks, 1 + 1000 * number) for number in range(12)]
    found["counted"] = [ranks.share([number]) for number in range(12)]
    thread.join()
    found["carried"] = log
    return found


def test_processes_hear_each_other_exactly() -> None:
    for found in run_ranks(SIZE, converse):
        assert all(found["gathered"])
        assert all(found["exchanged"])
        assert found["bits"] == [[*BITS, bits_of(float(other))] for other in range(SIZE)]
        assert found["agreed"] == [True] * SIZE
        assert math.isnan(found["infinite"][0]["norm"])
        assert [said["norm"] for said in found["infinite"][1:]] == [math.inf] * (SIZE - 1)
        assert all(found["order"])
        assert found["counted"] == [[[float(number)]] * SIZE for number in range(12)]
        assert found["carried"] == []
        assert found["spoiled"] == [False, False], "the siblings: wrong bytes show"


def bits_of(number: float) -> int:
    bits: int = struct.unpack("<Q", struct.pack("<d", number))[0]
    return bits


def end_at(ranks: Ranks, ends: Callable[[list[int]], None], calls: str) -> str:
    """Let rank 1 end; return what the others' call raises."""
    said = ranks.agree({"pid": os.getpid()})
    if ranks.owner.rank == 1:
        ends([said[0]["pid"], said[2]["pid"]])
    own = torch.zeros(3 << 16, dtype=torch.uint8)
    doings: dict[str, Callable[[], object]] = {
        "gather": lambda: ranks.wire.gather(own),
        "exchange": lambda: ranks.wire.exchange(own, own, [1 << 16] * 3, [1 << 16] * 3),
        "share": lambda: ranks.share([1.0]),
        "receive": lambda: ranks.carrier.receive(own, 1),
    }
    try:
        doings[calls]()
    except RankLost as error:
        if not isinstance(error.__cause__, RuntimeError):
            return f"no cause: {error}"
        with pytest.raises(RankLost):  # a group that failed stays closed
            doings[calls]()
        return str(error)
    return "nothing"


def die(others: list[int]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_silent(others: list[int]) -> None:
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in others))
    os._exit(0)


def stay(others: list[int]) -> None:
    pass


@pytest.mark.merge
@pytest.mark.parametrize("calls", ["gather", "receive"])
def test_a_rank_that_dies_is_named(calls: str) -> None:
    outcomes = rank_outcomes(SIZE, end_at, die, calls)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome.trace
        assert outcome.result.startswith("rank 1 is dead, cut off or hangs")
        assert "GLHF" not in outcome.result


@pytest.mark.merge
def test_a_rank_that_is_silent_beyond_the_deadline_is_named() -> None:
    outcomes = rank_outcomes(SIZE, end_at, be_silent, "gather", deadline_s=2.0)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome.trace
        assert outcome.result.startswith("rank 1 is dead, cut off or hangs")


def store_for_long(ranks: Ranks, stops: bool) -> str:
    """Let rank 1 wait for its storage for three deadlines, or stop in it; return what 0 gets."""
    own = torch.full((8,), ranks.owner.rank, dtype=torch.uint8)
    if ranks.owner.rank == 1:
        if stops:
            let_go = f"sleep {4 * ranks.patience_s}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", let_go], start_new_session=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(3 * ranks.patience_s)
        ranks.carrier.send(own, 0)
        return "sent"
    ranks.carrier.receive(own, 1)
    return f"received {own.tolist()}"


@pytest.mark.merge
def test_a_rank_that_waits_for_its_storage_is_waited_for() -> None:
    outcomes = rank_outcomes(2, store_for_long, False, deadline_s=2.0)
    assert [outcome.result for outcome in outcomes] == [f"received {[1] * 8}", "sent"]


def lose_soon(ranks: Ranks, stops: bool) -> str:
    torch_ranks.GRACE_S = 1.0
    return store_for_long(ranks, stops)


@pytest.mark.merge
def test_a_rank_that_stops_while_it_waits_for_its_storage_is_lost() -> None:
    """The sibling; it also shows that a process ends while a call waits for a rank that is lost."""
    outcome = rank_outcomes(2, lose_soon, True, deadline_s=2.0)[0]
    assert (outcome.exit_code, outcome.result) == (RankLost.exit_code, None)


def test_a_rank_that_stays_is_not_lost() -> None:
    """The sibling: the same calls, and nobody ends."""
    assert run_ranks(SIZE, end_at, stay, "exchange") == ["nothing"] * SIZE

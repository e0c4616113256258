"""Rounds of peers: the same anchor for all, and that of plain PyTorch."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatrain.errors import ConfigError, PeersError
from megatrain.peers.anchor import Anchor, Piece
from megatrain.peers.compression import Floats, Sent
from testkit.patience import HANG_S
from testkit.toy_peers import PLAIN, SPARSE, ToyPeer, change

ALONE = {"outer_rate": 1.0, "momentum": 0.0, "compression": "none", "inner_steps": 1}


def together(calls: Sequence[Callable[[], Any]]) -> None:
    """Make calls at the same time, and wait for all."""
    errors: list[BaseException] = []

    def make(call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=make, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _peers(tmp_path: Path, names: str, settings: dict[str, Any]) -> list[ToyPeer]:
    found = [ToyPeer(tmp_path / "meeting", tmp_path, name, settings) for name in names]
    for peer in found:
        peer.begin()
    return found


def _plain(start: list[Floats], num_steps: int) -> list[Floats]:
    """Return weights after steps without peers."""
    found = [values.copy() for values in start]
    for step in range(1, num_steps + 1):
        for number, values in enumerate(found):
            values += change("a", step, number, len(values))
    return found


def _bits(weights: list[Floats]) -> list[bytes]:
    return [values.tobytes() for values in weights]


def test_one_peer_alone_trains_as_without_peers(tmp_path: Path) -> None:
    (peer,) = _peers(tmp_path, "a", ALONE)
    start = peer.weights()
    start[0][3] = -0.0  # whose sum with 0 is another number
    peer.masters.write(peer.pieces[0], start[0])
    peer.take(3)
    assert _bits(peer.weights()) == _bits(_plain(start, 3))
    (other,) = _peers(tmp_path / "other", "a", {**ALONE, "outer_rate": 0.99999})
    other.take(3)
    assert _bits(other.weights()) != _bits(_plain(start, 3))


def test_late_steps_of_one_peer_alone_are_those_without_peers(tmp_path: Path) -> None:
    late = {**ALONE, "inner_steps": 2, "late": 1}
    (peer,) = _peers(tmp_path, "a", late)
    start = peer.weights()
    peer.take(5, is_last=True)
    assert len(peer.anchors()) == 3
    assert _bits(peer.weights()) == _bits(_plain(start, 5))
    (other,) = _peers(tmp_path / "other", "a", {**late, "outer_rate": 0.99999})
    other.take(5, is_last=True)
    assert _bits(other.weights()) != _bits(_plain(start, 5))


def test_peers_have_the_anchors_of_plain_pytorch(tmp_path: Path) -> None:
    peers = _peers(tmp_path, "abc", PLAIN)
    anchors = [torch.from_numpy(values.astype(np.float64)) for values in peers[0].weights()]
    for anchor in anchors:
        anchor.requires_grad_()
    outer = torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)
    for number in range(3):
        together([partial(peer.take, 2) for peer in peers])
        for piece, anchor in enumerate(anchors):
            moved = sum(
                change(peer.name, step, piece, len(anchor)).astype(np.float64)
                for peer in peers
                for step in (2 * number + 1, 2 * number + 2)
            )
            anchor.grad = torch.from_numpy(-np.asarray(moved) / len(peers))
        outer.step()
    for peer in peers:
        for values, anchor in zip(peer.weights(), anchors, strict=True):
            assert np.abs(values - anchor.detach().numpy()).max() < 1e-6
    assert len({tuple(_bits(peer.weights())) for peer in peers}) == 1


@pytest.mark.parametrize(
    "changes",
    [{"compression": "int8"}, SPARSE, {**SPARSE, "parts": 2, "late": 1}],
    ids=["int8", "sparse", "in parts, late"],
)
def test_all_peers_have_one_anchor(tmp_path: Path, changes: dict[str, Any]) -> None:
    peers = _peers(tmp_path, "abc", {**PLAIN, **changes})
    together([partial(peer.take, 6) for peer in peers])
    together([partial(peer.take, 2, is_last=True) for peer in peers])
    first, *others = (peer.anchors() for peer in peers)
    assert len(first) >= 3
    assert all(other == first for other in others)
    if "late" not in changes:  # a peer that takes its steps late may miss an exchange
        assert all(len(event["entered"]) == 3 for peer in peers for event in peer.events)


def test_peers_join_leave_and_come_back(tmp_path: Path) -> None:
    a, b = _peers(tmp_path, "ab", SPARSE)
    together([lambda: a.take(4), lambda: b.take(4)])
    c = ToyPeer(tmp_path / "meeting", tmp_path, "c", SPARSE).begin()  # replays all
    assert _bits(c.weights()) == _bits(a.weights())
    together([lambda: a.take(2), lambda: c.take(2)])  # b has died, and is waited for
    assert a.events[-1]["entered"] == ["a", "c"]
    back = ToyPeer(tmp_path / "meeting", tmp_path, "b", SPARSE)
    back.saved, back.step = b.saved, b.step
    back.begin()
    assert _bits(back.weights()) == _bits(a.weights())
    together([lambda: a.take(2), lambda: c.take(2), lambda: back.take(2)])
    assert back.events[-1]["entered"] == ["a", "b", "c"]
    assert {p.rounds.anchor.digest for p in (a, back, c)} == {a.rounds.anchor.digest}


def test_a_peer_that_is_late_is_named_and_goes_on_from_the_anchor(tmp_path: Path) -> None:
    a, b = _peers(tmp_path, "ab", {**PLAIN, "wait": 0.05})
    a.take(2)
    b.take(2)
    assert b.said[-1].startswith("peers: too late for exchange 1: the steps since the last one")
    assert _bits(a.weights()) == _bits(b.weights())
    together([lambda: a.take(2), lambda: b.take(2)])
    assert a.rounds.anchor.digest == b.rounds.anchor.digest


def test_a_peer_that_is_at_work_is_waited_for_and_one_whose_run_has_ended_is_not(
    tmp_path: Path,
) -> None:
    a, b = _peers(tmp_path, "ab", {**PLAIN, "wait": HANG_S})
    together([lambda: a.take(2), lambda: b.take(2)])
    (tmp_path / "meeting" / "begun" / "00000002" / "b").unlink()  # it has not come so far yet
    waits, place = threading.Event(), a.rounds.meeting.place
    place.pause = lambda seconds: waits.set()
    first = threading.Thread(target=a.take, args=(2,))
    first.start()
    assert waits.wait(HANG_S)
    b.take(2, is_last=True)
    first.join()
    assert a.events[-1]["entered"] == ["a", "b"]
    waits.clear()
    a.take(2)
    assert a.events[-1]["entered"] == ["a"]
    assert not waits.is_set()


def test_a_newcomer_begins_from_an_anchor_that_was_published(tmp_path: Path) -> None:
    (a,) = _peers(tmp_path, "a", {**SPARSE, "publish": 2})
    a.take(6)
    shutil.rmtree(tmp_path / "meeting" / "differences" / "00000001")
    b = ToyPeer(tmp_path / "meeting", tmp_path, "b", SPARSE).begin()
    assert b.said[0] == "peers: took the anchor that was published after exchange 2"
    assert _bits(a.weights()) == _bits(b.weights())


def test_other_terms_and_rows_are_refused_by_name(tmp_path: Path) -> None:
    (a,) = _peers(tmp_path, "a", PLAIN)
    for changes, text in (
        ({"outer_rate": 0.5}, "outer_rate is 0.5 here and 0.7 there"),
        ({"compression": "int8"}, "compression is int8 here and none there"),
    ):
        with pytest.raises(ConfigError, match=text):
            ToyPeer(tmp_path / "meeting", tmp_path / "x", "b", {**PLAIN, **changes}).begin()
    b = ToyPeer(tmp_path / "meeting", tmp_path / "y", "b", PLAIN)
    b.masters.write(b.pieces[0], b.weights()[0] + np.float32(1))
    with pytest.raises(ConfigError, match=r"anchor is .* here and .* there"):
        b.begin()
    c = ToyPeer(tmp_path / "meeting", tmp_path / "z", "c", PLAIN)
    with pytest.raises(ConfigError, match="peer a trains on the same rows in the same order as c"):
        c.rounds.begin(None, 0, {"order": a.name})


def test_a_damaged_anchor_is_noticed(tmp_path: Path) -> None:
    (a,) = _peers(tmp_path, "a", PLAIN)
    path = tmp_path / "a" / "00000.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(PeersError, match="the bytes of this piece of the anchor have changed"):
        a.take(2)


def test_a_peer_that_dies_while_the_anchor_moves_goes_on_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = _peers(tmp_path, "ab", PLAIN)
    together([lambda: a.take(2), lambda: b.take(2)])
    moves: list[int] = []
    real = Anchor.move

    def dies(self: Anchor, piece: Piece, number: int, sent: Sequence[Sent]) -> None:
        if self is b.rounds.anchor and number == 2:
            moves.append(piece.number)
            if len(moves) == 3:
                raise KeyboardInterrupt
        real(self, piece, number, sent)

    with monkeypatch.context() as patch:
        patch.setattr(Anchor, "move", dies)
        with pytest.raises(KeyboardInterrupt):
            together([lambda: a.take(2), lambda: b.take(2)])
    back = ToyPeer(tmp_path / "meeting", tmp_path, "b", PLAIN)
    back.saved, back.step = b.saved, b.step
    back.begin()
    assert back.rounds.anchor.digest == a.rounds.anchor.digest

"""What enters an exchange is decided once, and nothing bad does."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from megatrain.errors import ConfigError, PeersError
from megatrain.peers.compression import Floats, Refusal
from megatrain.peers.meeting import norm_limit
from megatrain.peers.rounds import Rounds
from megatrain.peers.signing import Ed25519, Signer
from megatrain.places import FolderPlace, open_place
from testkit.faulty_place import FaultyPlace
from testkit.forged_claims import OF_SIGNATURES, REASONS, forge
from testkit.toy_peers import PLAIN, ToyPeer, change, toy_layout
from tests.peers.test_rounds import together

LAYOUT = toy_layout(1, 300)


def _peer(
    tmp_path: Path,
    name: str,
    signer: Signer | None = None,
    *,
    wait: float = 0.3,
    score: bool = False,
) -> ToyPeer:
    settings = {**PLAIN, "wait": wait, "score": score}
    at = tmp_path / "meeting"
    return ToyPeer(at, tmp_path, name, settings, signer=signer, layout=LAYOUT).begin()


def _bad_one_enters(tmp_path: Path, kind: str, signed: bool = False) -> bool:
    """Let two honest peers and a bad one exchange; return whether the bad one got in."""
    keys = [Ed25519(tmp_path / f"{name}.key") if signed else None for name in "abz"]
    a, b, z = (_peer(tmp_path, name, key) for name, key in zip("abz", keys, strict=True))
    together([lambda: a.take(2), lambda: b.take(2), lambda: forge("none", z, 1)])
    z.rounds._catch_up()
    forge(kind, z, 2, keys[0])
    together([lambda: a.take(2), lambda: b.take(2)])
    assert a.anchors() == b.anchors()
    (event,) = [event for event in a.events if event["number"] == 2]
    assert {"a", "b"} <= set(event["entered"])
    if "z" in event["entered"]:
        return True
    assert re.search(REASONS[kind], event["refused"]["z"]), event["refused"]["z"]
    return False


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", [kind for kind in REASONS if kind not in OF_SIGNATURES])
def test_nothing_bad_enters(tmp_path: Path, kind: str) -> None:
    assert not _bad_one_enters(tmp_path, kind)


@pytest.mark.parametrize("kind", OF_SIGNATURES)
def test_nothing_enters_without_the_signature_of_its_peer(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("cryptography", reason="signatures need cryptography")
    assert not _bad_one_enters(tmp_path, kind, signed=True)


def test_an_honest_difference_and_a_check_that_is_missing_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _bad_one_enters(tmp_path, "none")
    real = Rounds._judge

    def gullible(self: Rounds, claim: dict[str, object], path: Path) -> float:
        try:
            return real(self, claim, path)
        except Refusal:
            return float(str(claim["norm"]))

    monkeypatch.setattr(Rounds, "_judge", gullible)
    assert _bad_one_enters(tmp_path / "gullible", "lie")


def test_a_closer_cannot_let_a_bad_difference_in(tmp_path: Path) -> None:
    """The record of a closer that means harm has a claim whose norm is a lie."""
    a, z = _peer(tmp_path, "a"), _peer(tmp_path, "z")
    forge("lie", z, 1)
    z.rounds.meeting._close(1, z.rounds.anchor.digest, tmp_path / "got", lambda claim, path: 1.0)
    a.take(2)
    (event,) = [event for event in a.events if event["event"] == "exchange"]
    assert event["entered"] == []
    assert "and it claims" in event["refused"]["z"]


def test_a_closer_cannot_raise_the_limit_of_norms(tmp_path: Path) -> None:
    """It fills a record with claims of nobody, and puts a huge difference in the next exchange."""
    a, b, z = (_peer(tmp_path, name) for name in "abz")
    for peer in (a, b, z):
        forge("none", peer, 1)
    z.rounds.meeting._close(1, z.rounds.anchor.digest, tmp_path / "got", z.rounds._judge)
    path = tmp_path / "meeting" / "exchanges" / "00000001.json"
    fields = json.loads(path.read_bytes())
    fields["entered"] += [{"peer": f"x{number}", "norm": 1e9} for number in range(20)]
    path.write_bytes(json.dumps(fields).encode())
    together([lambda: a.take(2), lambda: b.take(2)])
    z.rounds._catch_up()
    forge("huge", z, 2)
    together([lambda: a.take(2), lambda: b.take(2)])
    (event,) = [event for event in a.events if event.get("number") == 2]
    assert event["entered"] == ["a", "b"]
    assert re.search(REASONS["huge"], event["refused"]["z"])


def test_objects_of_strangers_do_not_stop_a_meeting(tmp_path: Path) -> None:
    a = _peer(tmp_path, "a")
    for name, data in ((" ", b"{}"), ("x\ty", b"{}"), ("x", b'{"name": "x"}'), ("y", b"[" * 9000)):
        (tmp_path / "meeting" / "members" / f"{name}.json").write_bytes(data)
    a.rounds.meeting.terms = {**a.rounds.meeting.terms, "members": {"a": ""}}
    a.take(2)
    assert a.events[0]["entered"] == ["a"]
    assert set(a.rounds.meeting._known_members()) == {"a"}


@pytest.mark.parametrize("name", ["z" * 200, "z z"])
def test_a_member_with_a_name_that_no_peer_can_have_does_not_stop_a_meeting(
    tmp_path: Path, name: str
) -> None:
    a, z = _peer(tmp_path, "a"), _peer(tmp_path, "z")
    meeting = tmp_path / "meeting"
    member = {"name": name, "key": "", "order": "another"}
    (meeting / "members" / f"{name}.json").write_text(json.dumps(member))
    z.rounds._make_difference(1, {"steps": [0, 1]})
    claim = {"peer": name, "number": 1, **(z.rounds._own_claim(1) or {})}
    for key, data in (
        (f"claims/00000001/{name}.json", json.dumps(claim).encode()),
        (
            f"differences/00000001/{name}-{claim['sha256'][:32]}",
            (z.rounds.anchor.next / "difference").read_bytes(),
        ),
    ):
        (meeting / key).parent.mkdir(parents=True, exist_ok=True)
        (meeting / key).write_bytes(data)
    a.take(2)
    assert a.events[0]["entered"] == ["a"]


@pytest.mark.parametrize(
    "fields",
    [
        {"refused": [{}]},
        {"closed_by": "../z"},
        {"entered": [{"peer": "../z"}]},
        {"number": math.inf},
        {"scores": {"a": 10**400}},
    ],
)
def test_a_closer_that_lies_is_named_at_once(tmp_path: Path, fields: dict[str, object]) -> None:
    a, z = _peer(tmp_path, "a"), _peer(tmp_path, "z")
    meeting = z.rounds.meeting
    meeting._close(1, z.rounds.anchor.digest, tmp_path / "got", z.rounds._judge)
    path = tmp_path / "meeting" / "exchanges" / "00000001.json"
    path.write_bytes(json.dumps({**json.loads(path.read_bytes()), **fields}).encode())
    a.rounds.meeting.place.pause = lambda seconds: pytest.fail("the place was asked again")
    if "entered" in fields:
        a.take(2)
        assert a.events[0]["refused"] == {"../z": "it is not a member"}
    else:
        with pytest.raises(PeersError, match=r"not a record of an exchange|not signed by a member"):
            a.take(2)


def test_an_anchor_of_an_exchange_that_was_not_is_not_taken(tmp_path: Path) -> None:
    a = _peer(tmp_path, "a")
    a.take(2)
    meeting = a.rounds.meeting
    meeting.publish(1, a.rounds.anchor.digest, dict(a.rounds.anchor.objects()))
    index = {"number": 9, "anchor": "e" * 64, "objects": ["../up"], "peer": "a"}
    meeting.place.write("anchors/00000009.json", json.dumps(index).encode())
    found = meeting.published()
    assert found is not None
    assert found[:2] == (1, a.rounds.anchor.digest)


def test_late_claims_are_named_in_the_next_record(tmp_path: Path) -> None:
    a, b = _peer(tmp_path, "a"), _peer(tmp_path, "b")
    a.take(2)
    forge("none", b, 1)
    a.take(2)
    assert a.events[-1]["refused"] == {"b": "it was late for exchange 1"}


def test_a_place_that_fails_is_asked_again(tmp_path: Path) -> None:
    place = FaultyPlace(
        FolderPlace(tmp_path / "meeting"), lambda number, action, key, done: number % 5 == 0
    )
    a = ToyPeer(place, tmp_path, "a", PLAIN, layout=LAYOUT).begin()
    b = ToyPeer(place, tmp_path, "b", PLAIN, layout=LAYOUT).begin()
    together([lambda: a.take(4), lambda: b.take(4)])
    assert [event["entered"] for event in a.events] == [["a", "b"], ["a", "b"]]
    assert a.anchors() == b.anchors()


def test_records_that_no_member_wrote_and_names_of_others_stop_a_peer(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="signatures need cryptography")
    a = _peer(tmp_path, "a", Ed25519(tmp_path / "a.key"))
    with pytest.raises(ConfigError, match=r"has another peer of the name a\. Set peers\.name"):
        ToyPeer(
            tmp_path / "meeting", tmp_path / "x", "a", PLAIN,
            signer=Ed25519(tmp_path / "x.key"), layout=LAYOUT,
        ).begin()  # fmt: skip
    a.take(2)
    path = tmp_path / "meeting" / "exchanges" / "00000001.json"
    fields = json.loads(path.read_bytes())
    fields["entered"] = []
    (path.parent / "00000002.json").write_bytes(json.dumps({**fields, "number": 2}).encode())
    with pytest.raises(PeersError, match="was not signed by a member"):
        a.take(2)
    assert oct((tmp_path / "a.key").stat().st_mode)[-3:] == "600"


def test_the_limit_of_norms_is_that_of_most_peers() -> None:
    assert norm_limit([1.0, 1.1, 50.0]) == 4.4
    assert norm_limit([]) == float("inf")


def test_peers_meet_in_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = pytest.importorskip("obstore.store", reason="obstore is not installed")
    memory = store.MemoryStore()
    monkeypatch.setattr("megatrain.places._opened", lambda scheme, bucket: memory)
    place = open_place("s3://bucket/ours")
    settings = {**PLAIN, "publish": 1}
    a, b = (ToyPeer(place, tmp_path, name, settings, layout=LAYOUT).begin() for name in "ab")
    together([lambda: a.take(4), lambda: b.take(4)])
    assert [event["entered"] for event in a.events] == [["a", "b"], ["a", "b"]]
    c = ToyPeer(place, tmp_path, "c", settings, layout=LAYOUT).begin()
    assert c.rounds.anchor.digest == a.rounds.anchor.digest == b.rounds.anchor.digest


def test_a_peer_whose_weights_are_far_worse_is_left_out(tmp_path: Path) -> None:
    a, b = (_peer(tmp_path, name, wait=30.0, score=True) for name in "ab")
    losses, center = {"a": 0.9, "b": 1.5}, a.weights()[0]

    def loss(peer: ToyPeer) -> float:
        """Return the loss of whose weights are in memory."""
        moved = peer.weights()[0] - center
        by = {name: _moved(name, len(moved)) for name in losses}
        return next((losses[n] for n, m in by.items() if np.allclose(moved, m, atol=1e-6)), 1.0)

    a.rounds.held_out_loss = lambda: loss(a)
    b.rounds.held_out_loss = lambda: loss(b)
    together([lambda: a.take(2), lambda: b.take(2)])
    assert a.events[0]["entered"] == b.events[0]["entered"] == ["a"]
    assert a.events[0]["refused"] == {
        "b": "its held-out loss is 1.5000, and that of the anchor 1.0000"
    }
    record = a.rounds.meeting.record(1)
    assert record is not None
    assert record.scores == {"": 1.0, "a": 0.9, "b": 1.5}
    assert a.anchors() == b.anchors()


def _moved(name: str, size: int) -> Floats:
    return change(name, 1, 0, size) + change(name, 2, 0, size)

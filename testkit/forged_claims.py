"""Differences that must not enter an exchange, as a peer that means harm, or fails, puts them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from megatrain import files
from megatrain.peers.signing import SIGNATURE, Signer
from testkit.toy_peers import ToyPeer, change

REASONS = {
    "corrupt": "its difference is corrupt",
    "torn": "its difference is torn",
    "missing": "its difference is missing",
    "oversized": "bytes is the most|is the most",
    "oversized object": "its difference is torn",
    "not finite": "not finite",
    "huge": "the limit of this exchange is",
    "lie": "and it claims",
    "stale": "stale: it began from another anchor",
    "other exchange": "its claim is for exchange",
    "garbage": "it is not a difference|cut off|not finite|another length|too many|out of order",
    "not JSON": "it is not JSON",
    "unsigned": "its claim was not signed by its key",
    "other key": "its claim was not signed by its key",
    "changed": "its claim was not signed by its key",
}
"""Kinds of bad differences, and what a record says of each."""
OF_SIGNATURES = ("unsigned", "other key", "changed")


def forge(kind: str, peer: ToyPeer, number: int, other: Signer | None = None) -> None:
    """Put a bad difference of a peer, which has joined, for an exchange; `other`: another's key."""
    rounds, place = peer.rounds, peer.rounds.meeting.place
    rounds.progress = type(rounds.progress)(number=number, step=peer.step)
    for piece in peer.pieces:  # so that it is not nothing
        moved = change(peer.name, number, piece.number, piece.num_elements)
        peer.masters.write(piece, rounds.anchor.read(piece)[0] + moved)
    files.remove_folder(rounds.anchor.next)
    files.make_folder(rounds.anchor.next)
    rounds._make_difference(number, {"steps": [peer.step, peer.step + 1]})
    path = rounds.anchor.next / "difference"
    data, claim = path.read_bytes(), rounds._own_claim(number)
    assert claim is not None
    claim = {"peer": peer.name, "number": number, **claim}
    if kind in ("not finite", "huge", "garbage"):
        data = _spoilt(kind, data)
        claim |= {"sha256": hashlib.sha256(data).hexdigest(), "num_bytes": len(data)}
        if kind == "huge":
            claim["norm"] = _norm(peer, data, number)
    key = f"differences/{number:08}/{peer.name}-{claim['sha256'][:32]}"
    claim |= _lies(kind, claim)
    if kind != "missing":
        place.write(key, _stored(kind, data))
    signer = rounds.meeting.signer
    if kind == "other key":
        assert other is not None
        signer = other
    fields = signer.signed(claim)
    if kind == "unsigned":
        fields.pop(SIGNATURE, None)
    if kind == "changed":
        fields["norm"] = claim["norm"] * 0.5
    text = b"[1, 2" if kind == "not JSON" else json.dumps(fields).encode()
    place.write_new(f"claims/{number:08}/{peer.name}.json", text)


def _spoilt(kind: str, data: bytes) -> bytes:
    """Return a difference of weights in fp32 whose numbers cannot be meant."""
    if kind == "garbage":
        return data[:40] + bytes(reversed(data[40:-3])) + b"???" if len(data) > 60 else b"x" * 30
    numbers = np.frombuffer(data[16:32], "<f4").copy()
    numbers[0] = np.inf if kind == "not finite" else 1e6
    return data[:16] + numbers.tobytes() + data[32:]


def _norm(peer: ToyPeer, data: bytes, number: int) -> float:
    path = peer.rounds.anchor.next / "spoilt"
    path.write_bytes(data)
    return _measured(peer, path, number)


def _measured(peer: ToyPeer, path: Any, number: int) -> float:
    """Return the norm that everybody will measure."""
    try:
        peer.rounds._judge({"number": number, "sha256": "spoilt", "norm": -1.0}, path)
    except Exception as refusal:
        text = str(refusal)
        return float(text.split("its norm is ")[1].split(",")[0])
    raise AssertionError("a norm below 0 was believed")


def _lies(kind: str, claim: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that a claim should have otherwise."""
    return {
        "oversized": {"num_bytes": 1 << 40},
        "lie": {"norm": claim["norm"] * 0.1},
        "stale": {"anchor": "0" * 64},
        "other exchange": {"number": claim["number"] + 1},
    }.get(kind, {})


def _stored(kind: str, data: bytes) -> bytes:
    """Return what is in the bucket in place of a difference."""
    if kind == "corrupt":
        return data[:-1] + bytes([data[-1] ^ 1])
    if kind == "torn":
        return data[: len(data) // 2]
    return data + bytes(1 << 20) if kind == "oversized object" else data

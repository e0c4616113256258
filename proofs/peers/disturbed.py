"""Peers as processes, and a parent that disturbs them."""

from __future__ import annotations

import io
import json
import os
import random
import re
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatrain.errors import MegaTrainError
from megatrain.files import append, write_file
from megatrain.peers.compression import Refusal
from megatrain.peers.meeting import Meeting, Record
from megatrain.peers.rounds import Rounds
from megatrain.peers.signing import Ed25519, Signer
from testkit.forged_claims import OF_SIGNATURES, REASONS, forge
from testkit.toy_peers import PLAIN, ToyPeer, toy_layout

NUM_PEERS = 4
LAYOUT = toy_layout(2, 600)
SETTINGS = {**PLAIN, "wait": 1.5, "publish": 25}
KINDS = ("late", *REASONS)
TRIES = 5
"""Exchanges in which a bad difference is put, until one is looked at."""


def run(
    scratch: Path, *, num_kills: int, num_bad: int, seed: int, spoil: str | None, tell: bool
) -> dict[str, Any]:
    """Disturb peers so often; return what came of it."""
    if spoil == "record":
        _spoil_record()
    elif spoil == "checks":
        _spoil_checks()
    began = time.monotonic()
    world = _World(scratch, random.Random(seed), tell=tell)
    try:
        world.disturb(num_kills, num_bad)
    finally:
        world.end()
    return world.result() | {"seconds": round(time.monotonic() - began, 1)}


class _World:
    """All processes, and the counts of what was done to them."""

    def __init__(self, scratch: Path, draw: random.Random, *, tell: bool) -> None:
        self.scratch, self.draw, self.tell = scratch, draw, tell
        self.is_signed = _can_sign()
        self.living: dict[str, int] = {}
        self.away: list[str] = []
        self.counts: Counter[str] = Counter()
        self.bad: list[tuple[str, str]] = []
        self.num_names = 0

    def disturb(self, num_kills: int, num_bad: int) -> None:
        for _ in range(NUM_PEERS):
            self._join()
        self._wait_for_exchange()
        kinds = [k for k in KINDS if self.is_signed or k not in OF_SIGNATURES]
        acts: list[Callable[[], None]] = [self._disturb] * num_kills
        acts += [partial(self._put_bad, kinds[number % len(kinds)]) for number in range(num_bad)]
        self.draw.shuffle(acts)
        for number, act in enumerate(acts):
            act()
            time.sleep(self.draw.choice((0.0, 0.05, 0.3)))
            self._reap()
            if self.tell and number % 20 == 0:
                print(f"{number} of {len(acts)}: {dict(self.counts)}", file=sys.stderr)

    def _disturb(self) -> None:
        """Kill a peer, or let it leave; or start one that was, or a new one."""
        if len(self.living) <= 2 or (len(self.living) < 6 and self.draw.random() < 0.5):
            if self.away and self.draw.random() < 0.8:
                self._start(self.away.pop(self.draw.randrange(len(self.away))))
                self.counts["came back"] += 1
            else:
                self._join()
                self.counts["joined"] += 1
            return
        name = self.draw.choice(sorted(self.living))
        politely = self.draw.random() < 0.25
        os.kill(self.living[name], signal.SIGTERM if politely else signal.SIGKILL)
        os.waitpid(self.living.pop(name), 0)
        self.away.append(name)
        self.counts["left" if politely else "killed"] += 1

    def _join(self) -> None:
        self.num_names += 1
        self._start(f"p{self.num_names}")

    def _start(self, name: str) -> None:
        self.living[name] = _forked(lambda: _train(self.scratch, name, signed=self.is_signed))

    def _put_bad(self, kind: str) -> None:
        """Let a process join and put a bad difference for the newest exchange."""
        name = f"z{len(self.bad)}"
        pid = _forked(lambda: _harm(self.scratch, name, kind, signed=self.is_signed))
        _, status = os.waitpid(pid, 0)
        if status == 0:
            self.bad.append((name, kind))
            self.counts["bad"] += 1
        else:
            self.counts["bad not put"] += 1

    def _reap(self) -> None:
        """Notice processes that have ended by themselves: they have failed."""
        for name, pid in list(self.living.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self.living[name]
                self.counts["failed"] += 1
                self.away.append(name)

    def _wait_for_exchange(self) -> None:
        until = time.monotonic() + 120
        while not (self.scratch / "meeting/exchanges/00000002.json").exists():
            if time.monotonic() > until:
                print("there were no two exchanges in two minutes", file=sys.stderr)
                self.counts["failed"] += 1
                return
            time.sleep(0.1)

    def end(self) -> None:
        for pid in self.living.values():
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)

    def result(self) -> dict[str, Any]:
        """Compare the anchors of all peers, and replay everything."""
        anchors: dict[int, set[str]] = {}
        seen = 0
        for path in self.scratch.glob("machines/*/events.jsonl"):
            for line in path.read_text().splitlines():
                event = json.loads(line)
                anchors.setdefault(event["number"], set()).add(event["anchor"])
                seen += 1
        fresh = _peer(self.scratch, "fresh", signed=self.is_signed)
        fresh.rounds._adopt_published = lambda *, must: None  # type: ignore[method-assign]
        try:
            fresh.begin()
        except (MegaTrainError, Refusal) as error:
            print(f"the replay of all exchanges failed: {error}", file=sys.stderr)
        fresh.rounds._report()
        for number, anchor in fresh.anchors().items():
            anchors.setdefault(number, set()).add(anchor)
        records = sorted((self.scratch / "meeting/exchanges").glob("*.json"))
        entered = [
            (one["peer"], int(path.stem))
            for path in records
            for one in json.loads(path.read_bytes())["entered"]
        ]
        refused = {
            one["peer"]: one["reason"]
            for path in records
            for one in json.loads(path.read_bytes())["refused"]
        }
        return {
            "disturbances": sum(self.counts.values()),
            **{key.replace(" ", "_"): self.counts[key] for key in sorted(self.counts)},
            "exchanges": len(records),
            "entered": len(entered),
            "anchors_compared": seen,
            "anchors_differ": sum(len(one) > 1 for one in anchors.values()),
            "bad_refused_for_what_it_is": sum(
                re.search(REASONS.get(kind, "it was late"), refused.get(name, "")) is not None
                for name, kind in self.bad
            ),
            "bad_entered": sum(name.startswith("z") for name, _ in entered),
            "lost": len(records) - len(fresh.anchors()) + self.counts["failed"],
            "signed": self.is_signed,
        }


def _forked(call: Callable[[], None]) -> int:
    """Make a call in a process of its own; return its number."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            call()
            code = 0
        except (MegaTrainError, Refusal, AssertionError) as error:
            print(f"a process has failed: {error}", file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def _peer(
    scratch: Path, name: str, *, signed: bool, stops: Callable[[], bool] = lambda: False
) -> ToyPeer:
    return ToyPeer(
        scratch / "meeting",
        scratch / "machines" / name,
        name,
        SETTINGS,
        signer=_key(scratch, name) if signed else None,
        layout=LAYOUT,
        stops=stops,
    )


def _key(scratch: Path, name: str) -> Signer:
    return Ed25519(scratch / "keys" / name)


def _can_sign() -> bool:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        return False
    return True


def _train(scratch: Path, name: str, *, signed: bool) -> None:
    """Take steps until told to leave, and save after each."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    peer = _peer(scratch, name, signed=signed, stops=lambda: bool(asked))
    machine = scratch / "machines" / name
    machine.mkdir(parents=True, exist_ok=True)
    save = machine / "saved.npz"
    if save.exists():
        with np.load(save) as found:
            for piece in peer.pieces:
                peer.masters.write(piece, found[f"w{piece.number}"])
            peer.step, peer.saved = int(found["step"]), json.loads(str(found["saved"]))
    noted = machine / "events.jsonl"

    def note(event: dict[str, Any]) -> None:
        if event["event"] == "exchange":
            append(noted, json.dumps(event).encode() + b"\n")

    peer.rounds.note = note
    peer.begin()
    draw = random.Random(f"{name} {peer.step}")
    while not asked:
        time.sleep(draw.random() * 0.05)
        peer.take(1)
        _save(peer, save)
    peer.rounds.close()


def _save(peer: ToyPeer, path: Path) -> None:
    """Save as a run does: whole, or not at all."""
    data = io.BytesIO()
    weights = {f"w{piece.number}": peer.masters.read(piece) for piece in peer.pieces}
    np.savez(data, step=peer.step, saved=json.dumps(peer.saved), **weights)  # type: ignore[arg-type]
    write_file(path, data.getvalue(), durable=False)


def _harm(scratch: Path, name: str, kind: str, *, signed: bool) -> None:
    """Join as a member, and put a bad difference where it can do most harm."""
    peer = _peer(scratch, name, signed=signed).begin()
    meeting, other = peer.rounds.meeting, _key(scratch, "p1") if signed else None
    for _ in range(TRIES):
        number = peer.rounds._catch_up() + 1
        meeting.begin(number)  # the others wait for it
        if kind != "late":
            forge(kind, peer, number, other)
        until = time.monotonic() + 60
        while meeting.newest(number - 1) < number:
            assert time.monotonic() < until, "no exchange in a minute"
            time.sleep(0.02)
        if kind == "late":
            forge("none", peer, number)
            return
        record = meeting.record(number)
        assert record is not None
        looked_at = [one for one in record.refused if "it was late" not in one["reason"]]
        if any(one["peer"] == name for one in (*looked_at, *record.entered)):
            return


def _spoil_record() -> None:
    """Let in what has been claimed by now, and not what the record says."""
    real = Meeting.record

    def by_now(self: Meeting, number: int) -> Record | None:
        found = real(self, number)
        if found is None:
            return None
        claims = [self._claim_of(number, name) for name in sorted(self._known_members())]
        return replace(found, entered=tuple(claim for claim in claims if claim is not None))

    Meeting.record = by_now  # type: ignore[method-assign]


def _spoil_checks() -> None:
    """Believe what claims say of norms and numbers."""
    real = Rounds._judge

    def gullible(self: Rounds, claim: Any, path: Path) -> float:
        try:
            return real(self, claim, path)
        except Refusal:
            return float(claim["norm"])

    Rounds._judge = gullible  # type: ignore[method-assign]

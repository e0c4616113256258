"""Rounds: a run takes steps alone, then it exchanges what came of them with its peers.

    rounds.begin(...)        before the first step: join, and catch up with the exchanges so far
    rounds.after(step)       after each step: an exchange may be due

An exchange is about one part of the model; with one part it is about all of it, and a round is one
exchange. At an exchange a peer

    1. makes the difference of the anchor from its weights, in few bytes, and puts it,
    2. waits for the record of the exchange, or closes it,
    3. moves the anchor by the mean of what entered, piece by piece,
    4. makes the anchor its weights.

With `late` steps, all of it happens behind training but for two passes over memory. Before, the
weights are copied, 4 bytes per parameter of a part. Afterwards the difference of the new anchor
from the copy, which took its place, is added to the weights: they become the anchor plus what steps
since then have changed. Nobody waits for a link and a disk that are fast enough. With several parts
the exchanges of a round are spread over its steps, and so are its bytes.

A peer that comes too late for an exchange takes part in the next one, from the anchor; its own
steps of that round are lost, and it says so. So are its late steps if it is started again while an
exchange is under way. The inner optimizer's states stay as they are.

Laws (tests/peers/test_rounds.py, tests/run/test_peers.py)
    1. One peer, one step a round, no compression, rate 1, momentum 0: a run has the bits of one
       without peers.
    2. Peers that have taken the same exchanges have the same anchor, in every bit, whoever was
       killed, came late, joined or left, and whenever.
    3. N peers have the anchors of the same rounds in plain PyTorch within 1e-6.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatrain import files
from megatrain.config.sections import PeerSettings
from megatrain.errors import CheckpointMismatch, PeersError
from megatrain.memory.store import Store
from megatrain.peers.anchor import Anchor, Masters, OuterStep, Piece, layout_mark, pieces_of
from megatrain.peers.compression import Floats, Refusal, Sent, compression_of
from megatrain.peers.meeting import Claim, Meeting, PatientPlace, Record
from megatrain.peers.signing import Signer
from megatrain.places import Place
from megatrain.progress import Say

_MAGIC = b"differ 1"
_LENGTH = struct.Struct("<Q")
_DIFFERENCE, _CLAIM, _DECIDED = "difference", "claim.json", "decided.json"
_AT_A_TIME = 4
"""Pieces that are in work at the same time."""
_SAME_NORM = 1e-6
"""Relative difference of a norm that is claimed from the one that is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A run between two exchanges; it is in every checkpoint."""

    number: int
    """The exchange that comes next, or is under way."""
    step: int
    """The step after which this peer's last exchange began."""
    is_under_way: bool = False

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Progress:
        """Raises CheckpointMismatch."""
        try:
            number, step = fields["number"], fields["step"]
            if type(number) is not int or type(step) is not int:
                raise TypeError("not counts")
            return cls(number=number, step=step, is_under_way=bool(fields["is_under_way"]))
        except (KeyError, TypeError) as error:
            raise CheckpointMismatch(f"the checkpoint has no round of peers: {error}") from None


class Rounds:
    """The rounds of one run."""

    def __init__(
        self,
        settings: PeerSettings,
        store: Store,
        settle: Callable[[], None],
        *,
        folder: Path,
        place: Place,
        signer: Signer,
        stops: Callable[[], bool] = lambda: False,
    ) -> None:
        """`settle` finishes all updates; `stops` is asked while other peers are waited for."""
        assert settings.name is not None
        self.settings = settings
        self._settle = settle
        self._masters = Masters(store)
        self.changed: Callable[[], None] = lambda: None
        """Called when masters were changed."""
        self.pieces = pieces_of(store.layout, settings.parts)
        self._compression = compression_of(
            settings.compression, density=settings.density, bits=settings.bits
        )
        step = OuterStep(rate=settings.outer_rate, momentum=settings.momentum)
        self.anchor = Anchor(folder, self.pieces, self._compression, step)
        self._layout = layout_mark(store.layout)
        self.meeting = Meeting(
            place=PatientPlace(place=place, stops=stops),
            name=settings.name,
            signer=signer,
            terms={},
            most_bytes=self._most_bytes,
            wait_s=settings.wait,
            stops=stops,
        )
        self.progress = Progress(number=1, step=0)
        self._exchange: _Behind | None = None
        self._shared: dict[int, Floats] = {}
        """Weights as they were when the exchange that is under way began, by piece."""
        self._changes: dict[int, Floats] = {}
        """The new anchor less these weights."""
        self._norms: dict[tuple[int, str], float] = {}
        """Norms of differences that were measured, by exchange and hash."""
        self._later: deque[dict[str, Any]] = deque()
        self.say: Say = lambda text: None
        self.note: Callable[[dict[str, Any]], None] = lambda event: None
        """Called with an event of each exchange."""
        self.facts: Callable[[], dict[str, Any]] = dict
        """Returns what a claim says of the steps that led to a difference."""
        self.held_out_loss: Callable[[], float] | None = None
        """Returns the loss of the weights in memory, for `peers.score`."""

    @property
    def every(self) -> int:
        """Steps between two exchanges."""
        return self.settings.inner_steps // self.settings.parts

    def part(self, number: int) -> list[Piece]:
        """Return the pieces that an exchange is about."""
        part = (number - 1) % self.settings.parts
        return [piece for piece in self.pieces if piece.part == part]

    def begin(self, saved: Mapping[str, Any] | None, step: int, member: Mapping[str, Any]) -> None:
        """Join the meeting, and go on from its newest exchange.

        `saved`: the progress in the checkpoint that the weights are from; None: they are those
        that training begins with. Raises ConfigError, PeersError, PlaceError or CheckpointMismatch.
        """
        self._settle()
        if self.settings.score:
            self.meeting.score = self._score
        is_new = not self.anchor.exists
        if is_new and saved is None:
            self.anchor.begin(self._masters)
        terms = self._terms()
        if is_new and saved is None:
            terms["anchor"] = self.anchor.digest
        self._join(terms, member)
        if is_new:
            self._adopt_published(must=saved is not None)
        newest = self._catch_up()
        there = None if saved is None else Progress.from_json(saved)
        if there is not None and there.number == newest + 1:
            self.progress = there
            if there.is_under_way:
                self._begin_exchange()
                if not self.settings.late:
                    self._end_exchange(step)
        else:
            self._take_anchor(self.pieces)
            self.progress = Progress(number=newest + 1, step=step)
            if newest:
                self.say(f"peers: weights are those of the anchor after exchange {newest}")
        self.meeting.begin(self.progress.number)
        self._report()
        if saved is None and self.settings.compression == "sparse":
            self.say(
                f"peers: an exchange sends {self.settings.density:.1%} of the numbers, so a run of "
                f"fewer than {1 / self.settings.density:,.0f} rounds sends less than the whole "
                "model. Raise peers.density for a short one."
            )

    def after(self, step: int, *, is_last: bool = False) -> dict[str, Any]:
        """Take the exchanges that are due after a step; return the progress for a checkpoint."""
        is_due = step >= self.progress.step + self.settings.late or is_last
        if self.progress.is_under_way and is_due:
            self._end_exchange(step)
        if not self.progress.is_under_way:
            self._share_if_due(step, is_last=is_last)
        if is_last and not self.progress.is_under_way:
            self.meeting.leave(self.progress.number)
        return asdict(self.progress)

    def _share_if_due(self, step: int, *, is_last: bool) -> None:
        taken = step - self.progress.step
        if taken >= self.every or (is_last and taken and self.settings.parts == 1):
            self._share(step)
            if self.progress.is_under_way and (is_last or not self.settings.late):
                self._end_exchange(step)

    def close(self) -> None:
        """Let go of an exchange that is under way: it is continued when the run is resumed."""
        if self._exchange is not None:
            self.meeting.stops = lambda: True
            self._exchange.join()

    def _terms(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "version": 2,
            "layout": self._layout,
            "compression": self._compression.name,
            "outer_rate": settings.outer_rate,
            "momentum": settings.momentum,
            "parts": settings.parts,
            "signed": settings.signed,
            "members": dict(settings.members) or None,
        }

    def _join(self, terms: dict[str, Any], member: Mapping[str, Any]) -> None:
        """Join; a peer that has moved on from the first anchor takes that of the terms."""
        there = self.meeting.terms_there()
        if "anchor" not in terms and there is None:
            raise PeersError(
                f"{self.meeting.place.url} has no meeting, and this run has begun at one. Set "
                "peers.at to the place where it began."
            )
        terms.setdefault("anchor", (there or {}).get("anchor"))
        self.meeting.terms = terms
        self.meeting.join(member)

    def _catch_up(self) -> int:
        """Take the anchor through all exchanges that have a record; return the last of them."""
        done = max(self.anchor.head(piece)[0] for piece in self.pieces)
        newest = self.meeting.newest(max(0, done - 1))
        if done > newest:
            raise PeersError(
                f"{self.meeting.place.url} has {newest} exchanges, and the anchor in "
                f"{self.anchor.folder} has had {done}: it is the anchor of another meeting"
            )
        for number in range(max(done, 1), newest + 1):
            record = self.meeting.record(number)
            assert record is not None
            self._move(record)
        return newest

    def _share(self, step: int) -> None:
        """Begin an exchange, with the weights as they are."""
        number = self.progress.number
        self._settle()
        facts = {"steps": [self.progress.step, step], **self.facts()}
        self.progress = Progress(number=number, step=step, is_under_way=True)
        if self.settings.late:
            pieces = self.part(number)
            with _threads() as pool:
                copies = list(pool.map(self._masters.read, pieces))
            self._shared = {piece.number: one for piece, one in zip(pieces, copies, strict=True)}
        self._begin_exchange(lambda: self._make_difference(number, facts))

    def _make_difference(self, number: int, facts: Mapping[str, Any]) -> None:
        """Write the difference and its claim to the disk, with what it leaves unsent."""
        anchor = self.anchor
        files.remove_folder(anchor.next)
        files.make_folder(anchor.next)
        anchor_digest = anchor.digest  # reads all heads, before several threads do
        path, digest = anchor.next / _DIFFERENCE, hashlib.sha256()
        squared, num_bytes, weights = 0.0, 0, hashlib.sha256()
        with files.open_new(path) as file:

            def put(data: bytes) -> None:
                nonlocal num_bytes
                file.write(data)
                digest.update(data)
                num_bytes += len(data)

            put(_MAGIC)
            pieces = self.part(number)
            with _threads() as pool:
                for first in range(0, len(pieces), _AT_A_TIME):
                    for made in pool.map(self._made, pieces[first : first + _AT_A_TIME]):
                        put(_LENGTH.pack(len(made.data)))
                        put(made.data)
                        squared += made.squared_norm
                        weights.update(made.weights.encode())
            files.close_durably(file)
        claim = {
            "anchor": anchor_digest,
            "sha256": digest.hexdigest(),
            "num_bytes": num_bytes,
            "norm": math.sqrt(squared),
            "weights": weights.hexdigest(),
            **facts,
        }
        files.write_file(anchor.next / _CLAIM, json.dumps({"number": number, **claim}).encode())

    def _made(self, piece: Piece) -> _Made:
        """Return a piece of a difference; keep what it leaves unsent."""
        center = self.anchor.weights(piece)
        weights = self._shared.get(piece.number)
        if weights is None:
            weights = self._masters.read(piece)
        made = self._compression.encode(center, weights, self.anchor.error(piece))
        if made.error is not None:
            self.anchor.leave(piece, made.error)
        sent = self._compression.decode(memoryview(made.data), piece.num_elements)
        return _Made(
            data=made.data,
            squared_norm=sent.squared_norm(center),
            weights=hashlib.sha256(weights.tobytes()).hexdigest(),
        )

    def _begin_exchange(self, prepare: Callable[[], None] = lambda: None) -> None:
        """Put the difference, and wait for the record: behind training if the run allows it."""
        self._exchange = _Behind(lambda: self._exchanged(prepare), waits=not self.settings.late)

    def _exchanged(self, prepare: Callable[[], None]) -> _Outcome | None:
        """Take the exchange to its end, but for the weights; None: the run is to end before.

        A difference that was claimed by this peer before it was killed stands.
        """
        number, meeting = self.progress.number, self.meeting
        if meeting.record(number) is None and meeting.standing(number) is None:
            prepare()
            if (claim := self._own_claim(number)) is not None:
                meeting.claim(number, claim, self.anchor.next / _DIFFERENCE)
        record = meeting.resolve(number, self.anchor.digest, self._got, self._judge)
        if record is None:
            return None
        self._move(record)
        newest = meeting.newest(number)
        if newest == number:
            meeting.begin(number + 1)
        return _Outcome(record=record, newest=newest)

    def claim_here(self, number: int, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the claim that the weights in memory lead to, without putting anything.

        What it leaves unsent counts for the next one.
        """
        self._make_difference(number, facts)
        claim = self._own_claim(number)
        assert claim is not None
        return claim

    def replay(self, number: int, *, takes: bool) -> Record:
        """Take the anchor through an exchange that has a record, and make it the weights."""
        record = self.meeting.record(number)
        if record is None:
            raise PeersError(f"{self.meeting.place.url} has no exchange {number}")
        self._move(record)
        if takes:
            self._take_anchor(self.pieces)
        return record

    def observe(self) -> None:
        """Look at a meeting without taking part, from the model in memory. Raises PeersError."""
        there = self.meeting.terms_there()
        if there is None:
            raise PeersError(f"{self.meeting.place.url} has no meeting")
        self.meeting.terms = there
        self.anchor.begin(self._masters)
        if self.anchor.digest != there.get("anchor"):
            raise PeersError("the model here is not the one that the peers began with")

    def _own_claim(self, number: int) -> dict[str, Any] | None:
        """Return the claim for the difference on the disk, if it is that of an exchange."""
        try:
            fields: dict[str, Any] = json.loads((self.anchor.next / _CLAIM).read_bytes())
        except (OSError, ValueError):
            return None
        return fields if fields.pop("number", None) == number else None

    def _end_exchange(self, step: int) -> None:
        """Take over the anchor that came of the exchange, if its record is there."""
        if self._exchange is None:  # it was let go of, because the run was to end
            self._begin_exchange()
        assert self._exchange is not None
        found = self._exchange.join()
        self._exchange = None
        self._report()
        if found is None:
            return
        number = found.record.number
        self._take_part(number)
        files.remove_folder(self.anchor.next)
        files.remove_folder(self._got)
        self._norms.clear()
        self.progress = Progress(
            number=number + 1, step=self.progress.step if self.settings.late else step
        )
        if not found.record.has(self.meeting.name):
            self._say_missed(number, number, step)
        self._publish(number)
        if found.newest > number:
            self._go_on_from_newest(step)

    def _go_on_from_newest(self, step: int) -> None:
        """Catch up with others that have closed further exchanges in the meantime."""
        first, newest = self.progress.number, self._catch_up()
        self._report()
        self._take_anchor(self.pieces)
        self.progress = Progress(number=newest + 1, step=step)
        self._say_missed(first, newest, step)
        self.meeting.begin(self.progress.number)

    def _say_missed(self, first: int, last: int, step: int) -> None:
        text = f"peers: too late for exchange {first}" + (f" to {last}" if last > first else "")
        self.say(f"{text}: the steps since the last one are lost")
        self.note({"event": "missed exchange", "first": first, "last": last, "step": step})

    def _move(self, record: Record) -> None:
        """Take the anchor through an exchange."""
        number = record.number
        pieces = self.part(number)
        if all(self.anchor.head(piece)[0] >= number for piece in pieces):
            return
        entered, refused = self._decided(record)
        own = self._own_claim(number)
        if own is not None and any(c["sha256"] == own["sha256"] for c, _ in entered):
            self.anchor.keep_errors(pieces)  # first: a piece that was moved is not looked at again
        opened = [_Difference(path, pieces, self._compression) for _, path in entered]

        def move(place: int) -> None:
            piece = pieces[place]
            center = self.anchor.move(piece, number, [one.sent(place) for one in opened])
            if (shared := self._shared.pop(piece.number, None)) is not None:
                self._changes[piece.number] = np.subtract(center, shared, out=shared)

        with _threads() as pool:
            list(pool.map(move, range(len(pieces))))
        names = [str(claim["peer"]) for claim, _ in entered]
        all_refused = {str(one["peer"]): str(one["reason"]) for one in record.refused} | refused
        self._later.append(
            {
                "event": "exchange",
                "number": number,
                "entered": names,
                "refused": all_refused,
                "num_bytes": sum(int(claim["num_bytes"]) for claim, _ in entered),
                "anchor": self.anchor.digest,
            }
        )

    def _report(self) -> None:
        """Say and note what became of exchanges, on the thread of the run."""
        while self._later:
            event = self._later.popleft()
            self.note(event)
            said = "; ".join(f"{name}: {reason}" for name, reason in event["refused"].items())
            entered = len(event["entered"])
            self.say(
                f"peers: exchange {event['number']}: {entered} entered"
                + (f". Refused: {said}" if said else "")
            )

    def _decided(self, record: Record) -> tuple[list[tuple[Claim, Path]], dict[str, str]]:
        """Return which claims of a record enter, with their files, and why others do not.

        It is decided once, from the anchor as it was, and kept until all pieces are moved: a
        process that dies in between finds some pieces that are already those after the exchange.
        """
        path = self.anchor.folder / _DECIDED
        try:
            kept = json.loads(path.read_bytes())
        except (OSError, ValueError):
            kept = {}
        if kept.get("nonce") == record.nonce:
            claims = [one for one in record.entered if one["peer"] in kept["entered"]]
            return [(one, self.meeting.kept(one, self._got)) for one in claims], kept["refused"]
        entered, refused = self.meeting.valid(record, self.anchor.digest, self._got, self._judge)
        names = [str(claim["peer"]) for claim, _ in entered]
        decided = {"nonce": record.nonce, "entered": names, "refused": refused}
        files.write_file(path, json.dumps(decided).encode())
        return entered, refused

    def _take_anchor(self, pieces: Sequence[Piece]) -> None:
        """Make the anchor the weights."""
        self._settle()
        for piece in pieces:
            self._masters.write(piece, self.anchor.weights(piece))
        self.changed()

    def _take_part(self, number: int) -> None:
        """Make the anchor the weights, and what steps have changed since the exchange began."""
        pieces, changes = self.part(number), self._changes
        self._changes = {}
        if not changes:
            if self.settings.late:
                self.say(
                    "peers: the run was started again while an exchange was under way: its steps "
                    "since then are lost"
                )
            self._take_anchor(pieces)
            return
        self._settle()
        for piece in pieces:
            self._masters.add(piece, changes[piece.number])
        self.changed()

    def _judge(self, claim: Claim, path: Path) -> float:
        """Return the norm of a difference. Raises Refusal for one that cannot enter."""
        pieces = self.part(int(claim["number"]))
        key = int(claim["number"]), str(claim["sha256"])
        if (norm := self._norms.get(key)) is None:
            difference = _Difference(path, pieces, self._compression)

            def squared(place: int) -> float:
                sent = difference.sent(place)
                center = self.anchor.weights(pieces[place]) if sent.are_weights else _NOTHING
                return sent.squared_norm(center)

            with _threads() as pool:
                norm = self._norms[key] = math.sqrt(sum(pool.map(squared, range(len(pieces)))))
        if not abs(norm - float(claim["norm"])) <= _SAME_NORM * norm:
            raise Refusal(f"its norm is {norm:.6g}, and it claims {float(claim['norm']):.6g}")
        return norm

    def _score(self, claim: Claim | None, path: Path | None) -> float:
        """Return the held-out loss of the weights of a claim, or of the anchor.

        Weights in memory are then others: the exchange ends with those of the anchor.
        """
        assert self.held_out_loss is not None
        if claim is None or path is None:
            self._take_anchor(self.pieces)
            return self.held_out_loss()
        pieces = self.part(int(claim["number"]))
        difference = _Difference(path, pieces, self._compression)
        for place, piece in enumerate(pieces):
            center = self.anchor.weights(piece)
            sent = difference.sent(place)
            found = sent.alone(piece.num_elements)
            weights = found if sent.are_weights else center - found
            self._masters.write(piece, weights.astype(np.float32))
        return self.held_out_loss()

    def _most_bytes(self, number: int) -> int:
        return len(_MAGIC) + sum(
            _LENGTH.size + self._compression.most_bytes(piece.num_elements)
            for piece in self.part(number)
        )

    def _publish(self, number: int) -> None:
        """Put the anchor after an exchange, if this peer does so and it is time."""
        if self.settings.publish is None or number % self.settings.publish:
            return
        self.meeting.publish(number, self.anchor.digest, dict(self.anchor.objects()))

    def _adopt_published(self, *, must: bool) -> None:
        """Begin from the newest anchor that was published, if there is one."""
        found = self.meeting.published()
        if found is None:
            if must:
                raise PeersError(
                    f"{self.anchor.folder} has no anchor, and none was published. Start this peer "
                    "without --resume, with another save.dir: it begins from the model and takes "
                    "all exchanges."
                )
            return
        number, digest, keys = found
        if len(keys) != len(self.pieces):
            raise PeersError(f"the anchor that was published after exchange {number} is damaged")
        for piece, key in zip(self.pieces, keys, strict=True):
            self.anchor.adopt(piece, self.meeting.object(key))
        if self.anchor.digest != digest:
            raise PeersError(f"the anchor that was published after exchange {number} is damaged")
        self.anchor.forget_errors()
        self.say(f"peers: took the anchor that was published after exchange {number}")

    @property
    def _got(self) -> Path:
        return self.anchor.folder / "got"


_NOTHING = np.zeros(0, np.float32)


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="peers")


class _Difference:
    """A difference in a file, piece by piece."""

    def __init__(self, path: Path, pieces: Sequence[Piece], compression: Any) -> None:
        """Raises Refusal for a file that is none."""
        self._path, self._pieces, self._compression = path, pieces, compression
        self._spans: list[tuple[int, int]] = []
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise Refusal("it is not a difference")
            offset = len(_MAGIC)
            for piece in pieces:
                head = file.read(_LENGTH.size)
                length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else size
                offset += _LENGTH.size
                if length > compression.most_bytes(piece.num_elements) or offset + length > size:
                    raise Refusal("it is cut off")
                self._spans.append((offset, length))
                offset += length
                file.seek(offset)
        if offset != size:
            raise Refusal("it is longer than its pieces")

    def sent(self, place: int) -> Sent:
        """Return the numbers of the piece at a place. Raises Refusal."""
        offset, length = self._spans[place]
        with self._path.open("rb") as file:
            file.seek(offset)
            data = file.read(length)
        found: Sent = self._compression.decode(memoryview(data), self._pieces[place].num_elements)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """A piece of a difference."""

    data: bytes
    squared_norm: float
    weights: str
    """Hash of the weights that it was made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """An exchange that has its record, and has moved the anchor."""

    record: Record
    newest: int
    """The last exchange that had a record then."""


class _Behind:
    """A call on a thread of its own; or on this one, if somebody waits for it anyway."""

    def __init__(self, call: Callable[[], _Outcome | None], *, waits: bool) -> None:
        self._call = call
        self._found: _Outcome | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        if waits:
            self._found = call()
        else:
            self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._call()
        except BaseException as error:
            self._error = error

    def join(self) -> _Outcome | None:
        """Return what it returned. Raises what it raised."""
        if self._thread.ident is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found

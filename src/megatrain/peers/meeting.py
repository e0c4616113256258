"""The meeting place of peers: objects in a bucket, and no other way from one peer to another.

    meeting.json                  the terms, made by the first peer
    members/NAME.json             a peer: its key, and what it trains on
    begun/00000007/NAME           the peer is at work for exchange 7: the others wait for it
    left/00000007/NAME            the run of the peer has ended: nobody waits for it in exchange 7
    differences/00000007/NAME-DIGEST
    claims/00000007/NAME.json     what the peer says of its difference, signed
    exchanges/00000007.json       the record: which claims entered, and which were refused, and why
    anchors/00000006.json         an anchor that was published, for those who come later

An exchange is decided by one conditional put, that of its record. Whoever finds that all peers that
have begun, or that entered the exchange before, have claimed, or has waited long enough by its own
clock, looks at each claim and puts the record; of several one succeeds, and the others read it. A
record has the claims themselves, and a claim the hash of its difference, so the bits of the next
anchor are decided there and then: nothing that is put or changed later enters. No clocks are
compared and no listing must be right. A listing that is out of date hides a new member for an
exchange.

Whether a claim that a record names is valid is decided again by every peer, by the same rules: its
signature, its size, its norm, and that its numbers are finite. A closer cannot let anything else
enter. It may leave claims out: by a held-out loss, which is in the record, and which no other
peer could repeat bit for bit.

Laws (tests/peers/test_meeting.py)
    1. Of several peers that close an exchange one does, and all read the same record.
    2. Nothing enters that is late, stale, torn, corrupt, too large, not finite, unsigned or signed
       by another key; each is named in the record with the reason.
    3. A place that fails is asked again: an honest claim is not refused for it.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from megatrain import files
from megatrain.config.value_types import is_peer_name
from megatrain.errors import ConfigError, PeersError, PlaceError
from megatrain.peers.compression import Refusal
from megatrain.peers.signing import SIGNATURE, Signer, canonical
from megatrain.places import Place, Stored, is_key

CLAIM_BYTES, RECORD_BYTES = 1 << 16, 1 << 24
NORM_FACTOR = 4.0
"""A difference whose norm is as many times the median of this exchange and the last is refused."""
SCORE_LIMIT = 1.02
"""A peer whose weights have as many times the held-out loss of the anchor is refused."""
_AT_ONCE = 8
"""Questions that are under way at the same time: a link across the world is slow to answer each."""
_AHEAD = 2
"""Differences that are brought while one is looked at."""
_READ_BYTES = 8 << 20
_RETRY_S = 300.0

Answer = TypeVar("Answer")
Item = TypeVar("Item")
Claim = Mapping[str, Any]
Judge = Callable[[Claim, Path], float]
"""Returns the norm of a difference whose bytes are those of its claim. Raises Refusal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The outcome of an exchange."""

    number: int
    anchor: str
    """Hash of the anchor that all began from."""
    entered: tuple[Claim, ...]
    refused: tuple[Mapping[str, Any], ...]
    scores: Mapping[str, float]
    """Held-out losses of the anchor, under an empty name, and of each peer; empty: not taken."""
    closed_by: str
    nonce: str

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "anchor": self.anchor,
            "entered": [dict(one) for one in self.entered],
            "refused": [dict(one) for one in self.refused],
            "scores": dict(self.scores),
            "closed_by": self.closed_by,
            "nonce": self.nonce,
        }

    def has(self, name: str) -> bool:
        """Return whether a peer's claim was looked at."""
        return any(one.get("peer") == name for one in (*self.entered, *self.refused))


@dataclass(slots=True, kw_only=True)
class PatientPlace:
    """A place that is asked again for a while when it fails."""

    place: Place
    pause_s: float = 1.0
    stops: Callable[[], bool] = lambda: False
    """Whether to give up at once."""
    pause: Callable[[float], object] = time.sleep

    @property
    def url(self) -> str:
        return self.place.url

    def read(self, key: str, span: range | None = None) -> bytes | None:
        return self._asked(lambda: self.place.read(key, span))

    def write(self, key: str, data: bytes | memoryview) -> None:
        self._asked(lambda: self.place.write(key, data))

    def send(self, key: str, path: Path) -> None:
        self._asked(lambda: self.place.send(key, path))

    def write_new(self, key: str, data: bytes) -> bool:
        """Make an object unless it exists; True also if an earlier try of this call has made it."""
        return self._asked(lambda: self.place.write_new(key, data) or self.place.read(key) == data)

    def stat(self, key: str) -> Stored | None:
        return self._asked(lambda: self.place.stat(key))

    def listed(self, prefix: str = "") -> list[Stored]:
        return self._asked(lambda: self.place.listed(prefix))

    def _asked(self, ask: Callable[[], Answer]) -> Answer:
        until = time.monotonic() + _RETRY_S
        while True:
            try:
                return ask()
            except PlaceError:
                if time.monotonic() > until or self.stops():
                    raise
                self.pause(self.pause_s)


@dataclass(slots=True, kw_only=True)
class Meeting:
    """A peer's view of the meeting place."""

    place: PatientPlace
    name: str
    signer: Signer
    terms: Mapping[str, Any]
    most_bytes: Callable[[int], int]
    """Returns the most bytes of a difference of an exchange."""
    wait_s: float
    poll_s: float = 1.0
    stops: Callable[[], bool] = lambda: False
    """Asked while others are waited for: whether to return without a record."""
    score: Callable[[Claim | None, Path | None], float] | None = None
    """Returns the held-out loss of a peer's weights, or of the anchor; None: none is taken."""
    _members: dict[str, dict[str, Any]] = field(default_factory=dict)
    _records: dict[int, Record] = field(default_factory=dict)
    """The newest ones that were read: they never change."""
    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="meeting")
    )

    def join(self, member: Mapping[str, Any]) -> None:
        """Take part: agree on the terms, and put this peer's own entry.

        Raises ConfigError if terms differ, if the name is another peer's, or if another peer trains
        on the same rows in the same order.
        """
        terms = dict(self.terms)
        if not self.place.write_new("meeting.json", canonical(terms)):
            there = self.terms_there() or {}
            differing = [
                f"{key} is {_short(terms.get(key))} here and {_short(there.get(key))} there"
                for key in sorted({*terms, *there})
                if terms.get(key) != there.get(key)
            ]
            if differing:
                raise ConfigError(
                    f"{self.place.url} is a meeting on other terms: {'; '.join(differing)}. Use "
                    "the same model and settings of peers, or set peers.at to another place."
                )
        allowed = terms.get("members")
        if allowed is not None and allowed.get(self.name) != self.signer.public:
            raise ConfigError(
                f"peers.members has no entry {self.name}: {self.signer.public}, the public key of "
                "this peer. Ask those who keep the list for one."
            )
        entry = self.signer.signed({"name": self.name, "key": self.signer.public, **member})
        key = f"members/{self.name}.json"
        if not self.place.write_new(key, _bytes(entry)):
            there = self._json(key, CLAIM_BYTES) or {}
            if there.get("key") != self.signer.public:
                raise ConfigError(
                    f"{self.place.url} has another peer of the name {self.name}. Set peers.name."
                )
            if {**there, SIGNATURE: None} != {**entry, SIGNATURE: None}:
                self.place.write(key, _bytes(entry))  # its own recipe has changed
        for other in self._known_members().values():
            if other["name"] != self.name and other.get("order") == member.get("order"):
                raise ConfigError(
                    f"peer {other['name']} trains on the same rows in the same order as "
                    f"{self.name}. Set data.seed to another number, or give other rows."
                )

    def terms_there(self) -> dict[str, Any] | None:
        """Return the terms that the first peer has made; None: there is no meeting yet."""
        try:
            return self._json("meeting.json", RECORD_BYTES)
        except Refusal as error:
            raise PeersError(f"{self.place.url}/meeting.json has no terms: {error}") from None

    def begin(self, number: int) -> None:
        """Announce that this peer is at work for an exchange."""
        self.place.write(_begun_key(number, self.name), b"")

    def leave(self, number: int) -> None:
        """Tell the others not to wait for this peer in an exchange."""
        self.place.write(_left_key(number, self.name), b"")

    def newest(self, known: int = 0) -> int:
        """Return the number of the last exchange that has a record; `known`: one that has."""
        low, stride = known, 1
        while self._is_there(low + stride):
            low, stride = low + stride, 2 * stride
        high = low + stride
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._is_there(middle) else (low, middle)
        return low

    def record(self, number: int) -> Record | None:
        """Return the record of an exchange, None while there is none.

        Raises PeersError for one that no member has signed.
        """
        if number in self._records:
            return self._records[number]
        key = _record_key(number)
        where = f"{self.place.url}/{key}"
        try:
            fields = self._json(key, RECORD_BYTES)
            if fields is None:
                return None
            found = Record(
                number=int(fields["number"]),
                anchor=str(fields["anchor"]),
                entered=tuple(dict(one) for one in fields["entered"]),
                refused=tuple(
                    {"peer": str(one["peer"]), "reason": str(one["reason"])}
                    for one in fields["refused"]
                ),
                scores={str(name): float(one) for name, one in fields["scores"].items()},
                closed_by=str(fields["closed_by"]),
                nonce=str(fields["nonce"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError, Refusal) as error:
            raise PeersError(f"{where} is not a record of an exchange: {error}") from None
        closer = self.member(found.closed_by)
        if found.number != number or not closer or not self.signer.is_by(fields, closer["key"]):
            raise PeersError(
                f"{where} was not signed by a member: somebody else writes to this place. Those "
                "who own it must delete the object, and change who may write"
            )
        self._records = {
            old: record for old, record in self._records.items() if old == number - 1
        } | {number: found}
        return found

    def standing(self, number: int) -> Claim | None:
        """Return this peer's own claim of an exchange, if it has made one."""
        return self._json(_claim_key(number, self.name), CLAIM_BYTES)

    def claim(self, number: int, fields: Mapping[str, Any], difference: Path) -> None:
        """Put a difference, and then the claim that names it."""
        claim = self.signer.signed({"peer": self.name, "number": number, **fields})
        key = _difference_key(number, self.name, str(fields["sha256"]))
        self.place.send(key, difference)
        data = _bytes(claim)
        self.place.write_new(_claim_key(number, self.name), data)

    def resolve(self, number: int, anchor: str, folder: Path, judge: Judge) -> Record | None:
        """Return the record of an exchange: wait for it, or close it. None: `stops`.

        Differences that were looked at are in `folder`, by the name of the peer.
        """
        began = time.monotonic()
        while (record := self.record(number)) is None:
            if self.stops():
                return None
            if self._all_claimed(number) or (time.monotonic() - began > self.wait_s):
                self._close(number, anchor, folder, judge)
            else:
                self.place.pause(self.poll_s)
        return record

    def valid(
        self, record: Record, anchor: str, folder: Path, judge: Judge
    ) -> tuple[list[tuple[Claim, Path]], dict[str, str]]:
        """Return the claims of a record that enter the mean, with their files; and the others.

        The same on every peer: it depends on the record, the keys of members, and bytes that the
        record has the hashes of. Waits for differences that cannot be read now. Raises PeersError
        if one cannot be had, or if the record was made from another anchor.
        """
        if record.anchor != anchor:
            raise PeersError(
                f"exchange {record.number} began from anchor {record.anchor[:16]}, and the anchor "
                f"here is {anchor[:16]}"
            )
        entered, refused = [], {}
        names = [str(one.get("peer")) for one in record.entered]
        norms: dict[str, float] = {}
        checked = []
        for name, claim in zip(names, record.entered, strict=True):
            try:
                self._check_claim(claim, name, record.number, anchor)
                if names.count(name) != 1:
                    raise Refusal("it has two claims")
                checked.append(claim)
            except Refusal as error:
                refused[name] = str(error)
        for claim, path in self._ahead(lambda claim: self.kept(claim, folder), checked):
            name = str(claim["peer"])
            try:
                norms[name] = judge(claim, path())
                entered.append((claim, path()))
            except Refusal as error:
                refused[name] = str(error)
        limit = norm_limit([*norms.values(), *self._norms_before(record.number)])
        for name, norm in norms.items():
            if norm > limit:
                refused[name] = _beyond(norm, limit)
        found = [one for one in entered if str(one[0]["peer"]) not in refused]
        return sorted(found, key=lambda one: str(one[0]["peer"])), refused

    def claim_in(self, record: Record, name: str) -> Claim | None:
        """Return the claim of a peer in a record; None if it has signed none for this exchange."""
        for claim in record.entered:
            with suppress(Refusal):
                self._check_claim(claim, name, record.number, record.anchor)
                return claim
        return None

    def publish(self, number: int, anchor: str, objects: Mapping[str, Path]) -> None:
        """Put the anchor after an exchange, unless it is there; its index comes last."""
        key = _anchor_key(number)
        if self.place.stat(key) is not None:
            return
        keys = [f"anchors/{number:08}/{name}" for name in objects]
        for one, path in zip(keys, objects.values(), strict=True):
            self.place.send(one, path)
        index = {"number": number, "anchor": anchor, "objects": keys, "peer": self.name}
        data = _bytes(self.signer.signed(index))
        self.place.write_new(key, data)

    def published(self) -> tuple[int, str, list[str]] | None:
        """Return the newest anchor that a member has published: number, hash and objects."""
        listed = self.place.listed("anchors")
        indexes = [one.key for one in listed if one.key.count("/") == 1]
        for key in sorted(indexes, reverse=True):
            with suppress(Refusal, KeyError, TypeError, ValueError, OverflowError):
                index = self._json(key, RECORD_BYTES) or {}
                member = self.member(str(index["peer"]))
                if member is None or not self.signer.is_by(index, str(member["key"])):
                    continue
                number = int(index["number"])
                if key != _anchor_key(number) or self.record(number) is None:
                    continue
                after = self.record(number + 1)
                if after is None or after.anchor == index["anchor"]:
                    return number, str(index["anchor"]), [str(one) for one in index["objects"]]
        return None

    def object(self, key: str) -> bytes:
        """Return the bytes of an object. Raises PeersError if it is absent."""
        data = self.place.read(key)
        if data is None:
            raise PeersError(f"{self.place.url}/{key} is missing")
        return data

    def _close(self, number: int, anchor: str, folder: Path, judge: Judge) -> None:
        """Look at all claims, and put the record unless there is one."""
        before = self.record(number - 1) if number > 1 else None
        entered: dict[str, Claim] = {}
        norms: dict[str, float] = {}
        refused = self._late(before)
        checked = []
        for name, found in self._at_once(
            lambda name: self._claim_of(number, name), sorted(self._known_members())
        ):
            try:
                claim = found()
                if claim is not None:
                    self._check_claim(claim, name, number, anchor)
                    checked.append(claim)
            except Refusal as error:
                refused.append({"peer": name, "reason": str(error)})
        for claim, path in self._ahead(lambda claim: self._brought(claim, folder), checked):
            name = str(claim["peer"])
            try:
                norms[name] = judge(claim, path())
                entered[name] = claim
            except Refusal as error:
                refused.append({"peer": name, "reason": str(error)})
        limit = norm_limit([*norms.values(), *self._norms_before(number)])
        for name, norm in norms.items():
            if norm > limit:
                del entered[name]
                refused.append({"peer": name, "reason": _beyond(norm, limit)})
        scores = self._scored(entered, refused, folder)
        record = Record(
            number=number,
            anchor=anchor,
            entered=tuple(entered[name] for name in sorted(entered)),
            refused=tuple(refused),
            scores=scores,
            closed_by=self.name,
            nonce=secrets.token_hex(8),
        )
        data = _bytes(self.signer.signed(record.to_json()))
        self.place.write_new(_record_key(number), data)

    def _scored(
        self, entered: dict[str, Claim], refused: list[dict[str, Any]], folder: Path
    ) -> dict[str, float]:
        """Take the held-out loss of each peer's weights, and refuse those that are far worse."""
        if self.score is None:
            return {}
        found = {"": self.score(None, None)}
        for name, claim in list(entered.items()):
            loss = self.score(claim, self._brought(claim, folder))
            if not loss <= SCORE_LIMIT * found[""]:
                del entered[name]
                reason = f"its held-out loss is {loss:.4f}, and that of the anchor {found['']:.4f}"
                refused.append({"peer": name, "reason": reason})
            found[name] = loss if math.isfinite(loss) else -1.0  # JSON has no infinity
        return found

    def _norms_before(self, number: int) -> list[float]:
        """Return the norms of what entered the exchange before, one of each peer.

        Claims that their peers have not signed do not count: a closer could invent as many as it
        needs to move the median.
        """
        before = self.record(number - 1) if number > 1 else None
        if before is None:
            return []
        found: dict[str, float] = {}
        for claim in before.entered:
            name = str(claim.get("peer"))
            with suppress(Refusal):
                self._check_claim(claim, name, number - 1, before.anchor)
                found.setdefault(name, claim["norm"])
        return list(found.values())

    def _late(self, before: Record | None) -> list[dict[str, Any]]:
        """Return who has claimed in the exchange before when it was over."""
        if before is None:
            return []
        seen = {str(one.get("peer")) for one in (*before.entered, *before.refused)}
        names = [name for name in sorted(self._known_members()) if name not in seen]
        number = before.number
        claims = self._at_once(lambda name: self.place.stat(_claim_key(number, name)), names)
        return [
            {"peer": name, "reason": f"it was late for exchange {number}"}
            for name, claim in claims
            if claim() is not None
        ]

    def _all_claimed(self, number: int) -> bool:
        """Return whether all members that have begun an exchange have claimed.

        One that entered the exchange before may still be at work on it: it has begun this one, too.
        """
        before = self.record(number - 1) if number > 1 else None
        entered = {str(one.get("peer")) for one in (() if before is None else before.entered)}

        def is_awaited(name: str) -> bool:
            stat = self.place.stat
            return (
                stat(_claim_key(number, name)) is None
                and (name in entered or stat(_begun_key(number, name)) is not None)
                and stat(_left_key(number, name)) is None
            )

        return not any(found() for _, found in self._at_once(is_awaited, self._known_members()))

    def _known_members(self) -> dict[str, dict[str, Any]]:
        """Return all members that a listing shows, or that were seen before."""
        listed = [one.key.split("/")[-1] for one in self.place.listed("members")]
        for name in (one.removesuffix(".json") for one in listed if one.endswith(".json")):
            self.member(name)
        return self._members

    def member(self, name: str) -> dict[str, Any] | None:
        """Return a member. Its key stays the one that was seen first."""
        if name not in self._members:
            if not is_peer_name(name):  # names of files are made of it
                return None
            allowed = self.terms.get("members")
            try:
                found = self._json(f"members/{name}.json", CLAIM_BYTES)
            except Refusal:
                return None
            key = None if found is None else found.get("key")
            if found is None or found.get("name") != name or not isinstance(key, str):
                return None
            is_allowed = allowed is None or allowed.get(name) == key
            if not is_allowed or not self.signer.is_by(found, key):
                return None
            self._members[name] = found
        return self._members[name]

    def _claim_of(self, number: int, name: str) -> Claim | None:
        return self._json(_claim_key(number, name), CLAIM_BYTES)

    def _check_claim(self, claim: Claim, name: str, number: int, anchor: str) -> None:
        """Raise Refusal for a claim that cannot enter, whatever its difference is."""
        member = self.member(name)
        if member is None:
            raise Refusal("it is not a member")
        if claim.get("peer") != name or not self.signer.is_by(claim, str(member["key"])):
            raise Refusal("its claim was not signed by its key")
        if claim.get("number") != number:
            raise Refusal(f"its claim is for exchange {_short(claim.get('number'))}")
        if claim.get("anchor") != anchor:
            raise Refusal("stale: it began from another anchor")
        num_bytes, norm, digest = claim.get("num_bytes"), claim.get("norm"), claim.get("sha256")
        most = self.most_bytes(number)
        if type(num_bytes) is not int or not 0 <= num_bytes <= most:
            raise Refusal(f"its difference has {_short(num_bytes)} bytes, and {most} is the most")
        if type(norm) is not float or not math.isfinite(norm) or norm < 0:
            raise Refusal("its norm is not finite")
        if not isinstance(digest, str) or len(digest) != 64 or not digest.isalnum():
            raise Refusal("its claim has no hash")

    def _brought(self, claim: Claim, folder: Path) -> Path:
        """Return a file with the bytes of a difference. Raises Refusal, PeersError, PlaceError."""
        name, number, size = str(claim["peer"]), int(claim["number"]), int(claim["num_bytes"])
        path = folder / f"{number:08}-{name}-{claim['sha256'][:32]}.got"
        if path.exists() and path.stat().st_size == size:
            return path
        key = _difference_key(number, name, str(claim["sha256"]))
        stored = self.place.stat(key)
        if stored is None:
            raise Refusal("its difference is missing")
        if stored.num_bytes != size:
            raise Refusal(f"its difference is torn: {stored.num_bytes} bytes of {size}")
        files.make_folder(folder)
        temporary = files.temporary_name(path)
        digest = hashlib.sha256()
        try:
            with files.open_new(temporary) as file:
                for start in range(0, size, _READ_BYTES):
                    span = range(start, min(start + _READ_BYTES, size))
                    data = self.place.read(key, span) or b""
                    digest.update(data)
                    file.write(data)
            if digest.hexdigest() != claim["sha256"]:
                raise Refusal("its difference is corrupt: the bytes do not have its hash")
            files.rename(temporary, path)
        finally:
            with suppress(Exception):
                files.remove(temporary)
        return path

    def kept(self, claim: Claim, folder: Path) -> Path:
        """Return a file with a difference that a record names: its bytes were right then."""
        try:
            return self._brought(claim, folder)
        except Refusal as error:
            raise PeersError(
                f"{self.place.url}: the difference of {claim['peer']} entered exchange "
                f"{claim['number']}, and can no longer be had: {error}. Bring it back from a "
                "backup, or begin from a later anchor that was published"
            ) from None

    def _at_once(
        self, ask: Callable[[Item], Answer], items: Iterable[Item]
    ) -> list[tuple[Item, Callable[[], Answer]]]:
        """Ask about several items at the same time; return each with its answer, or its error."""
        return [(item, self._pool.submit(ask, item).result) for item in list(items)]

    def _ahead(
        self, bring: Callable[[Claim], Path], claims: Sequence[Claim]
    ) -> Iterator[tuple[Claim, Callable[[], Path]]]:
        """Yield each claim with its difference, or its error; the next ones are on their way."""
        pool = ThreadPoolExecutor(_AHEAD, thread_name_prefix="differences")
        try:
            yield from [(claim, pool.submit(bring, claim).result) for claim in claims]
        finally:
            pool.shutdown(cancel_futures=True)

    def _is_there(self, number: int) -> bool:
        return self.place.stat(_record_key(number)) is not None

    def _json(self, key: str, most_bytes: int) -> dict[str, Any] | None:
        """Return the fields of an object, None if it is absent. Raises Refusal."""
        if not is_key(key):  # of a listing, or of a claim: it cannot be asked for
            raise Refusal(f"{_short(key)!r} is not a name for an object")
        stored = self.place.stat(key)
        if stored is None:
            return None
        if stored.num_bytes > most_bytes:
            raise Refusal(f"{key} has {stored.num_bytes} bytes, and {most_bytes} is the most")
        data = self.place.read(key)
        try:
            found = json.loads(data or b"")
        except (ValueError, RecursionError):
            raise Refusal("it is not JSON") from None
        if not isinstance(found, dict):
            raise Refusal("it is not JSON with names")
        return found


def norm_limit(norms: Sequence[float]) -> float:
    """Return the largest norm that enters."""
    return NORM_FACTOR * median(norms) if norms else math.inf


def _beyond(norm: float, limit: float) -> str:
    return f"its norm is {norm:.4g}, and the limit of this exchange is {limit:.4g}"


def _bytes(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _short(value: object) -> str:
    return str(value)[:80]


def _record_key(number: int) -> str:
    return f"exchanges/{number:08}.json"


def _anchor_key(number: int) -> str:
    return f"anchors/{number:08}.json"


def _claim_key(number: int, name: str) -> str:
    return f"claims/{number:08}/{name}.json"


def _begun_key(number: int, name: str) -> str:
    return f"begun/{number:08}/{name}"


def _left_key(number: int, name: str) -> str:
    return f"left/{number:08}/{name}"


def _difference_key(number: int, name: str, digest: str) -> str:
    return f"differences/{number:08}/{name}-{digest[:32]}"

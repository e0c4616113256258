"""A place that fails: at a chosen call, before or after it has done what was asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megatrain.errors import StorageError
from megatrain.places import Place, Stored


@dataclass(slots=True)
class FaultyPlace:
    """Passes calls on, counts them, and asks `fails` before and after each."""

    place: Place
    fails: Callable[[int, str, str, bool], bool] = lambda number, action, key, is_done: False
    """Takes the number of the call, its name, the key, and whether it is done."""
    calls: list[tuple[str, str]] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes written, by key."""

    @property
    def url(self) -> str:
        return self.place.url

    def read(self, key: str, span: range | None = None) -> bytes | None:
        number = self._begin("read", key)
        data = self.place.read(key, span)
        self._end(number, "read", key)
        return data

    def write(self, key: str, data: bytes | memoryview) -> None:
        number = self._begin("write", key)
        self.place.write(key, data)
        self.sent[key] = len(data)
        self._end(number, "write", key)

    def send(self, key: str, path: Path) -> None:
        number = self._begin("send", key)
        self.place.send(key, path)
        self._end(number, "send", key)

    def write_new(self, key: str, data: bytes) -> bool:
        number = self._begin("write_new", key)
        made = self.place.write_new(key, data)
        if made:
            self.sent[key] = len(data)
        self._end(number, "write_new", key)
        return made

    def delete(self, key: str) -> None:
        number = self._begin("delete", key)
        self.place.delete(key)
        self._end(number, "delete", key)

    def stat(self, key: str) -> Stored | None:
        number = self._begin("stat", key)
        found = self.place.stat(key)
        self._end(number, "stat", key)
        return found

    def listed(self, prefix: str = "") -> list[Stored]:
        number = self._begin("listed", prefix)
        found = self.place.listed(prefix)
        self._end(number, "listed", prefix)
        return found

    def _begin(self, action: str, key: str) -> int:
        self.calls.append((action, key))
        number = len(self.calls)
        if self.fails(number, action, key, False):
            raise StorageError(f"{action} {key}: made to fail")
        return number

    def _end(self, number: int, action: str, key: str) -> None:
        if self.fails(number, action, key, True):
            raise StorageError(f"{action} {key}: its answer was lost")

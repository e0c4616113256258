"""Mutations for fuzzing: JSON that is changed in its structure, and bytes that are changed blindly.

Everything is a function of the `random.Random` handed in, so that an input is known by its number.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 16, 255, 512, 4096, 65535, 1 << 14, 1 << 18, 1 << 20, 1 << 24, 1 << 28,
    (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40, 1 << 53, 1 << 63, 1 << 64, -(1 << 63), 10**30,
    10**400, 0.5, -0.0, 1e-9, 1e308, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
TEXTS = (
    "", "a", " ", "\0", "\n", "\x1b[2J", "\ud800", "\u202e", "../x", "/etc/passwd", "evil/kernel",
    "__class__", "os.system", "auto", "bfloat16", "x" * 300, "y" * 70_000, "%s%n", "1e999", "NaN",
)  # fmt: skip
SHAPES: tuple[Any, ...] = (
    None, True, False, [], {}, [[]], [{}], [0], [None], {"": 0}, {"a": {"b": {}}}, [0] * 50,
    {"__float__": "Infinity"}, {"__float__": "NaN"}, ["a", 1], [["a"], 1], [[["a"], 3]],
)  # fmt: skip
_DEEP = 40


class Mutator:
    """Changes values and bytes; `keys` and `values` are what a format has meaning for."""

    def __init__(
        self, rng: random.Random, keys: Sequence[str], values: Sequence[Any], seeds: Sequence[Any]
    ) -> None:
        self._rng = rng
        self._keys = keys
        self._values = values
        self._seeds = seeds

    def mutate(self) -> bytes:
        """Return one of the seeds, changed in a few places."""
        rng = self._rng
        value = copy.deepcopy(rng.choice(self._seeds))
        if rng.random() < 0.9:
            for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3, 6))):
                value = self._change(value)
        data = self._text(value)
        if rng.random() < 0.25:
            for _ in range(rng.choice((1, 1, 2, 8))):
                data = self._change_bytes(data)
        return data

    def _change(self, value: Any) -> Any:
        """Return `value` with one node changed."""
        nodes = _nodes(value)
        if not nodes:
            return self._any()
        holder, key = self._rng.choice(nodes)
        action = self._rng.choice((self._replace, self._scale, self._scale, self._reshape))
        if isinstance(holder, dict) and self._rng.random() < 0.4:
            self._change_keys(holder, key)
        else:
            holder[key] = action(holder[key])
        return value

    def _change_keys(self, holder: dict[str, Any], key: str) -> None:
        kind = self._rng.randrange(5)
        if kind == 0:
            del holder[key]
        elif kind == 1:
            holder[self._key()] = holder.pop(key)
        elif kind == 2:
            holder[self._key()] = copy.deepcopy(holder[key])
        else:
            holder[self._key()] = self._any()

    def _replace(self, _: Any) -> Any:
        return self._any()

    def _scale(self, value: Any) -> Any:
        if isinstance(value, bool):
            return not value
        if isinstance(value, float):
            return value * self._rng.choice((0.0, -1.0, 2.0, 1e-6, 1e6, 1e300))
        if not isinstance(value, int):
            return self._any()
        power = 1 << min(self._rng.randrange(64), self._rng.randrange(64))
        changed = (value + 1, value - 1, -value, 2 * value, value * power, value + power, power)
        return self._rng.choice(changed)

    def _reshape(self, value: Any) -> Any:
        kind = self._rng.randrange(5)
        if kind == 0:
            return [copy.deepcopy(value) for _ in range(self._rng.choice((1, 2, 40)))]
        if kind == 1:
            return {self._key(): value}
        if kind == 2:
            for _ in range(self._rng.randrange(_DEEP)):
                value = [value] if self._rng.random() < 0.5 else {"a": value}
            return value
        if kind == 3:
            return str(value)
        return self._part_of_a_seed()

    def _part_of_a_seed(self) -> Any:
        nodes = _nodes(self._rng.choice(self._seeds))
        holder, key = self._rng.choice(nodes)
        return copy.deepcopy(holder[key])

    def _any(self) -> Any:
        pool: Sequence[Any] = self._rng.choice((NUMBERS, NUMBERS, TEXTS, SHAPES, self._values))
        return copy.deepcopy(self._rng.choice(pool))  # a later change must not reach the pool

    def _key(self) -> str:
        if self._rng.random() < 0.7:
            return str(self._rng.choice(self._keys))
        return str(self._rng.choice((*TEXTS, "a", "b", "_x", "__x__")))

    def _text(self, value: Any) -> bytes:
        text = json.dumps(value, ensure_ascii=self._rng.random() < 0.7)
        if self._rng.random() < 0.03 and text.startswith("{"):
            name = json.dumps(self._rng.choice(self._keys))
            text = f"{{{name}: {json.dumps(self._any())}, {text[1:]}"  # maybe the same key twice
        return text.encode("utf-8", "surrogatepass")

    def _change_bytes(self, data: bytes) -> bytes:
        rng = self._rng
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 1, 4, 64)))
        kind = rng.randrange(7)
        if kind == 0 and at < len(data):
            return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        if kind == 1:
            return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        if kind == 2:
            return data[:at]
        if kind == 3:
            return data[:at] + data[end:]
        if kind == 4:
            return data[:end] + data[at:end] * rng.choice((1, 3)) + data[end:]
        if kind == 5:
            return data[:at] + rng.choice(
                (b"[", b"{", b'"', b",", b"\\u", b"-", b"9" * 99, b"\xff")
            )
        other = json.dumps(rng.choice(self._seeds)).encode()
        return data[:at] + other[rng.randrange(len(other)) :]


def _nodes(value: Any) -> list[tuple[Any, Any]]:
    """Return each place in a JSON value as (what holds it, its key or position)."""
    found: list[tuple[Any, Any]] = []
    open_values = [value]
    while open_values:
        holder = open_values.pop()
        if isinstance(holder, dict):
            found += [(holder, key) for key in holder]
            open_values += holder.values()
        elif isinstance(holder, list):
            found += [(holder, place) for place in range(len(holder))]
            open_values += holder
    return found

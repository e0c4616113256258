"""Damage of every kind to the files of checkpoints, and what a resume makes of it.

A run has checkpoints of steps 1 to 4. Each trial damages the newest, and sometimes the one before
it too; then `resume` must take the newest that was left alone, with every bit of its tensors; it
must name the file of each that it passed over, and the tensor if the damage is inside of one. The
damage is undone, and the next trial begins.

Chunks are of one page here, so that a file has many and a damaged tensor is not named by luck.
"""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatrain import files
from megatrain.config import Config
from megatrain.disk.checkpoint import checked_read, manifest, retried
from megatrain.disk.checkpoint.manifest import MANIFEST_NAME
from megatrain.disk.hf import exported
from megatrain.disk.hf.safetensors_format import read_entries
from megatrain.errors import MegaTrainError
from megatrain.memory import direct
from megatrain.run.opening import resumption
from megatrain.run.state import RunState
from proofs.crash.tiny import TinyRun

CHUNK_BYTES = direct.DISK_PAGE
NUM_STEPS = 4
SECOND_SHARE = 0.2
"""Of trials that damage the checkpoint before the newest too."""


def run(scratch: Path, count: int, first: int, *, tell: bool) -> dict[str, Any]:
    """Damage `count` checkpoints or more."""
    began = time.monotonic()
    with (
        patch.object(direct, "CHUNK_BYTES", CHUNK_BYTES),
        patch.object(manifest, "CHUNK_BYTES", CHUNK_BYTES),
        patch.object(checked_read, "CHUNK_BYTES", CHUNK_BYTES),
        patch.object(exported, "CHUNK_BYTES", CHUNK_BYTES),
        patch.object(retried, "PAUSES_S", (0.0,) * len(retried.PAUSES_S)),  # EIO is there for good
    ):
        victim = Victim(scratch / "run")
        for number in range(first, first + count):
            victim.try_damage(number)
            if tell and number % 500 == 0:
                print(f"{time.monotonic() - began:.0f} s: {dict(victim.counts)}", flush=True)
            if len(victim.failures) >= 20:
                break
    counts = victim.counts
    keys = ("damaged", "found", "in a tensor", "tensor named", "right fallback", "right bits")
    result = {key: counts[key] for key in keys}
    kinds = {key: counts[key] for key in sorted(counts) if key not in keys}
    seconds = round(time.monotonic() - began, 1)
    return {
        "what": "corrupt", **result, "kinds": kinds, "seconds": seconds,
        "failures": victim.failures,
    }  # fmt: skip


class Victim:
    """A run that is damaged, resumed and repaired."""

    def __init__(self, folder: Path) -> None:
        self._run = TinyRun(folder)
        self._config = Config.model_validate(
            {"model": "m", "data": "d", "train": {"batch_tokens": 4096}}
        ).decided(packing=True, learning_rate=1e-5)  # as a run has decided
        self._folders = []
        for _ in range(NUM_STEPS):
            self._run.take_step()
            self._folders.append(self._run.save(**self._facts()))
        self._folders.reverse()
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._unreadable: set[Path] = set()

    def _facts(self) -> dict[str, Any]:
        """Return what a resume asks of a manifest."""
        return {
            "config": self._config.model_dump(mode="json"),
            "run": RunState(global_step=self._run.step).to_json(),
            "num_updates": [[0, self._run.step], [1, self._run.step]],
            "data": {"order": "tiny", "epoch": 0, "window": 0, "row": self._run.step},
            "micro_batch_tokens": 64,
        }

    def try_damage(self, number: int) -> None:
        """Damage, resume, judge, repair."""
        draw = random.Random(f"damage {number}")
        hurt = self._folders[: 2 if draw.random() < SECOND_SHARE else 1]
        kept = {folder: _copied(folder) for folder in self._folders}
        whole = [folder for folder in self._folders if folder not in hurt]
        damages = [self._damage(folder, whole, draw) for folder in hurt]
        self._run.fill(100)
        try:
            with (
                patch.object(resumption, "checkpoint_parts", lambda home: self._run.parts),
                patch.object(resumption, "conversion_of", lambda *_: None),
                patch.object(files, "os", _Unreadable(self._unreadable)),
            ):
                found = resumption.resume(
                    self._run.checkpoints,
                    self._config,
                    self._run,  # type: ignore[arg-type]
                )
            self._judge(number, damages, hurt, found)
        except MegaTrainError as error:
            self.counts.update(["damaged"] * len(hurt))
            self._fail(number, damages, f"{type(error).__name__}: {error}")
        finally:
            self._unreadable.clear()
            for folder, copy in kept.items():
                _repair(folder, copy)

    def _judge(self, number: int, damages: list[Damage], hurt: list[Path], found: Any) -> None:
        self.counts["damaged"] += len(hurt)
        self.counts.update(damage.kind for damage in damages)
        expected = self._folders[len(hurt)]
        if found is None or found.path != expected:
            self._fail(number, damages, f"took {found and found.path.name}")
            return
        self.counts["right fallback"] += len(hurt)
        if not self._run.holds(NUM_STEPS - len(hurt)):
            self._fail(number, damages, "other bits")
            return
        self.counts["right bits"] += len(hurt)
        told = list(found.skipped)
        for damage, folder in zip(damages, hurt, strict=True):
            if damage.is_silent:  # without a manifest it is no checkpoint
                self.counts["found"] += 1
                continue
            text = next((line for line in told if folder.name in line), "")
            self.counts["found"] += bool(text)
            if not text:
                self._fail(number, [damage], "nothing was said")
            if damage.tensor is not None:
                self.counts["in a tensor"] += 1
                is_named = re.search(rf"\b{re.escape(damage.tensor)}\b", text) is not None
                self.counts["tensor named"] += is_named
                if not is_named:
                    self._fail(number, [damage], f"{damage.tensor} is not named: {text}")

    def _fail(self, number: int, damages: list[Damage], text: str) -> None:
        told = "; ".join(f"{damage.kind} {damage.name}" for damage in damages)
        self.failures.append(f"trial {number}: {told}: {text}")

    def _damage(self, folder: Path, others: list[Path], draw: random.Random) -> Damage:
        """Damage `folder`; what is stale comes from `others`."""
        names = sorted(
            str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
        )
        kind, hurt = draw.choice(KINDS)
        while True:
            damage = Damage(kind, folder, draw.choice(names), draw.choice(others), draw)
            damage.unreadable = self._unreadable
            if hurt(damage):
                return damage


class Damage:
    """One thing that happens to a file of a checkpoint."""

    def __init__(
        self, kind: str, folder: Path, name: str, other: Path, draw: random.Random
    ) -> None:
        self.kind, self.folder, self.name, self.other, self.draw = kind, folder, name, other, draw
        self.path = folder / name
        self.data = self.path.read_bytes()
        self.tensor: str | None = None
        """The one that holds the damaged byte."""
        self.is_silent = False
        self.unreadable: set[Path] = set()

    def change(self, data: bytes) -> bool:
        """Give the file other bytes; False if they are the same."""
        if data == self.data:
            return False
        if self.name.endswith(".safetensors") and len(data) == len(self.data):
            first = next(n for n, (a, b) in enumerate(zip(data, self.data, strict=True)) if a != b)
            self._name_tensor(first)
        self.path.write_bytes(data)
        return True

    def _name_tensor(self, position: int) -> None:
        for entry in read_entries(self.path):
            # A header that cannot be read names nothing.
            if entry.start <= position < entry.stop and position >= CHUNK_BYTES:
                self.tensor = entry.name


def _flip(damage: Damage) -> bool:
    data = bytearray(damage.data)
    data[damage.draw.randrange(len(data))] ^= 1 << damage.draw.randrange(8)
    return damage.change(bytes(data))


def _flip_a_tensor(damage: Damage) -> bool:
    """Flip a bit of a tensor, for most bytes of real checkpoints are in one."""
    if not damage.name.endswith(".safetensors"):
        return False
    entry = damage.draw.choice(read_entries(damage.path))
    position = damage.draw.randrange(entry.start, entry.stop)
    data = bytearray(damage.data)
    data[position] ^= 1 << damage.draw.randrange(8)
    damage.change(bytes(data))
    damage.tensor = entry.name
    return True


def _cut(damage: Damage) -> bool:
    length = damage.draw.choice([0, len(damage.data) - 1, damage.draw.randrange(len(damage.data))])
    return damage.change(damage.data[:length])


def _extend(damage: Damage) -> bool:
    count = damage.draw.choice([1, 2, 512, 4096])
    more = damage.draw.choice([bytes(count), b"\n" * count, damage.draw.randbytes(count)])
    return damage.change(damage.data + more)


def _zero(damage: Damage) -> bool:
    start = damage.draw.randrange(len(damage.data)) // 512 * 512
    end = min(start + damage.draw.choice([512, 4096]), len(damage.data))
    return damage.change(damage.data[:start] + bytes(end - start) + damage.data[end:])


def _move(damage: Damage) -> bool:
    """A block is written where another belongs."""
    count = min(512, len(damage.data) // 2)
    source, target = (damage.draw.randrange(len(damage.data) - count + 1) for _ in range(2))
    data = bytearray(damage.data)
    data[target : target + count] = damage.data[source : source + count]
    return damage.change(bytes(data))


def _stale(damage: Damage) -> bool:
    """The file is that of another step."""
    return damage.change((damage.other / damage.name).read_bytes())


def _stale_block(damage: Damage) -> bool:
    """One block of the file is that of another step."""
    other = (damage.other / damage.name).read_bytes()
    start = damage.draw.randrange(len(damage.data)) // 512 * 512
    data = damage.data[:start] + other[start : start + 512] + damage.data[start + 512 :]
    return len(data) == len(damage.data) and damage.change(data)


def _swap(damage: Damage) -> bool:
    """Two files of the checkpoint have changed names."""
    names = [str(p.relative_to(damage.folder)) for p in damage.folder.rglob("*") if p.is_file()]
    other = damage.folder / damage.draw.choice(sorted(names))
    data = other.read_bytes()
    if data == damage.data or MANIFEST_NAME in (other.name, damage.name):
        return False
    other.write_bytes(damage.data)
    damage.path.write_bytes(data)
    return True


def _stale_folder(damage: Damage) -> bool:
    """All files are those of another step."""
    shutil.rmtree(damage.folder)
    shutil.copytree(damage.other, damage.folder)
    return True


def _remove(damage: Damage) -> bool:
    damage.path.unlink()
    damage.is_silent = damage.name == MANIFEST_NAME
    return True


def _make_folder(damage: Damage) -> bool:
    damage.path.unlink()
    damage.path.mkdir()
    return True


def _cannot_be_read(damage: Damage) -> bool:
    """The disk gives EIO."""
    damage.unreadable.add(damage.path)
    return damage.name != MANIFEST_NAME


KINDS: list[tuple[str, Callable[[Damage], bool]]] = [
    ("bit", _flip), ("bit", _flip), ("bit", _flip), ("bit of a tensor", _flip_a_tensor),
    ("bit of a tensor", _flip_a_tensor), ("cut", _cut), ("extended", _extend), ("zeroed", _zero),
    ("moved", _move), ("stale file", _stale), ("stale block", _stale_block), ("swapped", _swap),
    ("stale folder", _stale_folder), ("missing", _remove), ("a folder", _make_folder),
    ("unreadable", _cannot_be_read),
]  # fmt: skip


class _Unreadable:
    """The system, but that some files give EIO when they are read."""

    def __init__(self, paths: set[Path]) -> None:
        self._paths = {str(path) for path in paths}

    def __getattr__(self, name: str) -> Any:
        if name != "preadv" or not self._paths:
            return getattr(os, name)

        def read(fd: int, *args: Any) -> int:
            if os.readlink(f"/proc/self/fd/{fd}") in self._paths:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return os.preadv(fd, *args)

        return read


def _copied(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def _repair(folder: Path, copy: dict[str, bytes]) -> None:
    for name, data in copy.items():
        path = folder / name
        if path.is_dir():
            path.rmdir()
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)

"""Every state that a power loss may leave of real saves, judged as a resume would judge it.

The calls of a few saves and deletes are recorded (recorded.py). A power loss may come after any of
them, and of what was not forced by then any part may be on the disk: each block of each file, each
length, each name. An fsync of a file forces its blocks and length, an fsync of a folder the names
in it, nothing else forces anything. That is weaker than any file system we know, so what survives
here survives there. In each state:

    torn    a folder with a manifest does not hold what was saved: who trusts names takes it
    taken   the reader takes something that was never saved
    lost    the reader finds nothing as new as what was acknowledged
    lines   the lines of the steps up to the one that is taken are not all there

The same count is made of protocols with one thing left out; each must show faults.

Ranks that save together write one log (rank_saves.py), and are judged in the same way.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatrain.disk.checkpoint.manifest import MANIFEST_NAME, Manifest, parse_manifest
from megatrain.disk.checkpoint.retention import clear_unfinished
from megatrain.errors import CheckpointCorrupted
from megatrain.memory.direct import digests
from megatrain.run.folder import FOLDER
from proofs.crash.disk_states import Disk, Files
from proofs.crash.protocols import PROTOCOLS, RANK_PROTOCOLS
from proofs.crash.rank_saves import record_ranks
from proofs.crash.recorded import Died, Log, Op, Recorder, recorded
from proofs.crash.tiny import TinyRun, newest_whole

NUM_RESTARTS = 100
"""A kill at each of the first calls, then a restart; a save takes about as many."""
LOG_STATES = 200
"""About as many calls has a log, each of which leaves a state at least: fewer states need fewer
logs."""
PER_LOG = 6
"""States of a log that the real reader, which takes 0.1 s, judges too."""
RANKS = (2, 3)
PER_RANKS = 10
"""Logs of one process for each of several ranks; their calls come in another order each time."""
FAULTS = ("torn", "taken", "lost", "lines", "unlike")


def run(
    scratch: Path, count: int, first: int, *, tell: bool, spoil: str | None = None
) -> dict[str, Any]:
    """Judge at least `count` states of the real protocol, and fewer of each broken one.

    `spoil` names what the ranks other than the first leave out (rank_saves.py): it must be found.
    """
    began = time.monotonic()
    logs = [record(scratch / "run")]
    every = max(1, NUM_RESTARTS * LOG_STATES // max(count, 1))
    restarts = range(first % every, NUM_RESTARTS, every)
    sizes = RANKS * (1 + len(restarts) // PER_RANKS)
    joint = [record_ranks(scratch / "ranks", size, spoil) for size in sizes]
    logs += [record(scratch / f"restart-{k}", die_at=k) for k in restarts]
    counts: Counter[str] = Counter()
    share = count // (len(logs) + len(joint)) + 1
    for number, log in enumerate([*logs, *joint]):
        found = judge(log, share, first, scratch / "real", PER_LOG)
        counts.update(found)
        counts["of ranks"] += found["states"] if number >= len(logs) else 0
        if tell:
            print(f"{time.monotonic() - began:.0f} s: {dict(counts)}", flush=True)
    broken = {}
    for name, change in {**PROTOCOLS, **RANK_PROTOCOLS}.items():
        log = joint[-1] if name in RANK_PROTOCOLS else logs[0]
        of_it = judge(change(log), share=max(count // 20, 500), seed=first)
        broken[name] = {key: of_it[key] for key in ("states", "torn", "lost", "lines")}
    failures = [f"{counts[key]} {key}" for key in FAULTS if counts[key]]
    for name, of_protocol in broken.items():
        if not any(of_protocol[key] for key in ("torn", "lost", "lines")):
            failures.append(f"{name}: no fault was found")
    if counts["states"] < count:
        failures.append(f"only {counts['states']} states")
    keys = ("states", "of ranks", "instants", "compared", *FAULTS)
    result = {key: counts[key] for key in keys} | {"broken": broken}
    seconds = round(time.monotonic() - began, 1)
    return {"what": "states", **result, "seconds": seconds, "failures": failures}


def record(folder: Path, die_at: int | None = None) -> list[Op]:
    """Return what a run of three saves does to the disk; if told it dies once and is resumed."""
    log = Log()
    if die_at is not None:
        with suppress(Died):
            _save_thrice(folder, log, die_at)
    _save_thrice(folder, log, None)
    shutil.rmtree(folder)
    return log.ops


def _save_thrice(folder: Path, log: Log, die_at: int | None) -> None:
    recorder = Recorder(folder.parent, log, die_at)
    with recorded(recorder):
        run = TinyRun(folder)
        try:
            clear_unfinished(run.checkpoints)
            run.take_up()
            while run.step < 3:
                run.take_step()
                run.save()
                recorder.ack(run.step)
                run.prune(keep=1)
        finally:
            run.folder.close()


def judge(
    log: Sequence[Op], share: int, seed: int, real: Path | None = None, num_compared: int = 0
) -> Counter[str]:
    """Count the states of a log, about `share` of them, and what is wrong with them.

    About `num_compared` of them are written to `real`, for the real reader to judge.
    """
    disk, draw = Disk(log), random.Random(seed)
    reader = Reader(disk)
    counts: Counter[str] = Counter()
    most, num_states = _most_each(disk, share)
    acknowledged = 0
    for instant in range(len(log) + 1):
        if instant and log[instant - 1].kind == "ack":
            acknowledged = log[instant - 1].size
        for files in disk.states(instant, most, draw):
            found = reader.read(files)
            counts["states"] += 1
            counts["torn"] += found.num_damaged > 0
            counts["taken"] += found.is_foreign
            counts["lost"] += found.step < acknowledged
            counts["lines"] += not found.has_lines
            if real is not None and draw.random() < num_compared / num_states:
                counts["compared"] += 1
                counts["unlike"] += (found.step, found.num_damaged) != really_read(files, real)
        counts["instants"] += 1
    return counts


def _most_each(disk: Disk, share: int) -> tuple[int, int]:
    """Return how many states of an instant to take for `share` in all, and how many there are."""
    free = [len(disk.unforced(instant)) for instant in range(len(disk.log) + 1)]
    most = 1
    while (num_states := sum(min(2**number, most) for number in free)) < share and most < share:
        most *= 2
    return most, num_states


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a resume would find in a state."""

    step: int
    """0 if it would begin again."""
    num_damaged: int
    """Folders with a manifest that are not whole, the ones being deleted too."""
    is_foreign: bool
    """Whether what is taken was never saved."""
    has_lines: bool


class Reader:
    """Judges states in memory as `finished` and `verify` do on a disk."""

    def __init__(self, disk: Disk) -> None:
        self._parse = cache(_parsed)
        self._digests = cache(digests)
        self._saved: dict[bytes, Files] = {}
        """By the bytes of its manifest: all files of the run when it got its name."""
        for number, op in enumerate(disk.log):
            if op.kind in ("rename", "ack"):
                self._remember(disk.whole(number + 1))

    def _remember(self, files: Files) -> None:
        for folder in _checkpoints(files):
            manifest = files[f"{folder}/{MANIFEST_NAME}"]
            if self._is_whole(folder, files):
                self._saved.setdefault(manifest, files)

    def read(self, files: Files) -> Found:
        """Return what a resume would find."""
        folders = _checkpoints(files)
        whole = [folder for folder in folders if self._is_whole(folder, files)]
        if not whole:
            return Found(step=0, num_damaged=len(folders), is_foreign=False, has_lines=True)
        taken = whole[0]
        data = files[f"{taken}/{MANIFEST_NAME}"]
        manifest, saved = self._parse(data), self._saved.get(data, {})
        assert manifest is not None
        names = [f"{taken}/{name}" for name in manifest.files]
        run = taken.split("/")[0]
        lines = {f"{run}/{name}": end for name, end in manifest.training["lines"].items()}
        return Found(
            step=manifest.step,
            num_damaged=len(folders) - len(whole),
            is_foreign=any(files[name] != saved.get(name) for name in names),
            has_lines=all(
                files.get(name, b"")[:end] == saved.get(name, b"")[:end]
                for name, end in lines.items()
            ),
        )

    def _is_whole(self, folder: str, files: Files) -> bool:
        manifest = self._parse(files[f"{folder}/{MANIFEST_NAME}"])
        return manifest is not None and all(
            (data := files.get(f"{folder}/{name}")) is not None
            and len(data) == record.num_bytes
            and self._digests(data) == record.digests
            for name, record in manifest.files.items()
        )


def really_read(files: Files, scratch: Path) -> tuple[int, int]:
    """Write a state to a disk; return what the real reader takes, and how many are damaged."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    for path, data in files.items():
        (scratch / path).parent.mkdir(parents=True, exist_ok=True)
        (scratch / path).write_bytes(data)
    run = next(scratch.iterdir(), scratch)
    step, damaged = newest_whole(run / FOLDER)
    return step, len(damaged)


def _checkpoints(files: Files) -> list[str]:
    """Return the folders that have a manifest, the newest first."""
    found = [path.removesuffix(f"/{MANIFEST_NAME}") for path in files if _is_manifest(path)]
    return sorted(found, reverse=True)


def _is_manifest(path: str) -> bool:
    return path.endswith(f"/{MANIFEST_NAME}")


def _parsed(data: bytes) -> Manifest | None:
    try:
        return parse_manifest(data, "")
    except CheckpointCorrupted:
        return None

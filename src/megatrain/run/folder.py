"""A run's folder: everything that explains the run, written as it happens.

    config.yaml     the config, resolved           machine.json    the machine
    config.used.yaml  the same, beside a config.yaml that somebody has edited
    plan.json       memory, planned and measured   data_card.json  its training data
    hub.json        commits of models and data from the Hub
    tracking.json   names of the run in W&B and Trackio
    metrics.jsonl   one line per step and per evaluation
    samples.jsonl   text before and during training
    events.jsonl    saves, resumes, signals, rollbacks
    checkpoints/    step-N-id, each complete or absent; links `last` and `best` for people
    trace.json      one step, for Perfetto         report.html
    .megatrain      the mark by which we know a folder as ours; it is written first

A run writes only into a folder that is new, empty, or marked as ours: nothing of anybody else's is
ever replaced. A config.yaml that somebody has edited stays as it is too. A dry run looks and writes
nothing at all.

Appends write full lines, so a run that dies leaves all of them but perhaps the last. A checkpoint
knows how long the files were; a resumed run continues from there, and each line comes once. Only
one process writes to a folder: it holds a lock as long as it lives.

A disk that is full or fails must not end a run of weeks: lines it does not take are kept in memory
and written with a later one, in order, and no checkpoint is begun before they are all written.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from megatrain import files
from megatrain.config import Config, dump_config, load_config
from megatrain.config.load import CONFIG_NAME, USED_NAME
from megatrain.errors import DiskError, MegaTrainError, RunFolderError, listing
from megatrain.memory.host import num_cores

if TYPE_CHECKING:  # it imports torch
    from megatrain.run.uploads import Uploads

FOLDER = "checkpoints"
RESUMED_FILES = ("metrics.jsonl", "samples.jsonl")
"""Files whose lines belong to steps; events belong to the clock."""
EVENTS = "events.jsonl"
MARK = ".megatrain"
_MARK_DATA = b'{"megatrain": "run folder"}\n'
_NOTHING = (".lock", "lost+found")
"""Names that an empty folder may hold: of a start that was killed, of a new disk."""
_REQUEST = ".save"
LAUNCH_FILE = ".launch"
_OF_A_START = {MARK, ".lock", LAUNCH_FILE}
"""What is in a folder before a run is known to be possible."""
_PIECE_BYTES = 1 << 16


class RunFolder:
    """The folder of one run, locked. Use it in a `with` block, or `close` it."""

    def __init__(self, path: str | Path, *, dry: bool = False) -> None:
        """Make the folder if it is not there. `dry` makes, locks and writes nothing.

        Raises RunFolderError if the folder is in use, or is not a run folder.
        """
        self.path = Path(path)
        self.trouble: str | None = None
        """Why lines wait in memory; None while none do."""
        self.uploads: Uploads | None = None
        """Sends checkpoints to the bucket of the run, if it has one."""
        self._dry = dry
        self._made = False
        """Whether the folder was not there before."""
        self._lock: int | None = None
        self._waiting: dict[str, bytes] = {}
        self._starts: dict[str, int] = {}
        require_usable(self.path)
        self.had_run = has_run(self.path)
        """Whether a run had left something here before this process."""
        if not dry:
            self._take()

    def _take(self) -> None:
        try:
            self._made = not self.path.exists()
            files.make_folder(self.path)
            self._lock = files.lock(self.path / ".lock")
        except (OSError, DiskError) as error:
            raise RunFolderError(f"cannot use {self.path} as a run folder: {error}") from error
        try:
            self._require_no_links()
            if not is_run(self.path):
                files.write_file(self.path / MARK, _MARK_DATA)
        except BaseException:
            self.close()
            raise

    def _require_no_links(self) -> None:
        """Refuse at once what `files.append` would refuse later, after a step was computed."""
        for name in (*RESUMED_FILES, EVENTS):
            if (self.path / name).is_symlink():
                raise RunFolderError(
                    f"{self.path / name} is a link to {os.readlink(self.path / name)}, and no link "
                    "is followed for writing. Remove the link, or set save.dir to another folder."
                )

    @property
    def is_dry(self) -> bool:
        """Whether nothing is written here."""
        return self._dry

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Add a line to `metrics.jsonl`, `samples.jsonl` or `events.jsonl`, sooner or later."""
        if self._dry:
            return
        line = json.dumps(record, ensure_ascii=False, allow_nan=True) + "\n"
        data = line.encode("utf-8", "backslashreplace")
        self._waiting[name] = self._waiting.get(name, b"") + data
        try:
            self._write_waiting()
            self.trouble = None
        except (DiskError, OSError) as error:  # OSError: the folder was removed
            self.trouble = str(error)

    def _write_waiting(self) -> None:
        for name, data in list(self._waiting.items()):
            path = self.path / name
            if name not in self._starts:
                self._starts[name] = path.stat().st_size if path.exists() else 0
            files.append(path, data, self._starts[name])
            del self._waiting[name], self._starts[name]

    def lengths(self) -> dict[str, int]:
        """Return how long the step's files are now; so much of them is then on stable storage.

        Raises DiskError or OSError, also if lines wait that the disk still does not take.
        """
        self._write_waiting()
        return {name: files.sync_file(self.path / name) for name in RESUMED_FILES}

    def sizes(self) -> dict[str, int]:
        """Return how long the step's files will be, once lines that wait are written."""
        return {
            name: self._starts.get(name, _size(self.path / name))
            + len(self._waiting.get(name, b""))
            for name in RESUMED_FILES
        }

    def cut(self, lengths: Mapping[str, int]) -> list[str]:
        """Forget the lines of steps after a checkpoint: they will come again.

        A torn line at the end of a file is dropped, so that the next one begins on a new
        line. Returns messages about lost bytes.
        """
        if self._dry:
            return []
        lost: list[str] = []
        for name in RESUMED_FILES:
            lost += self._cut(name, int(lengths.get(name, 0)))
        return lost if EVENTS in self._waiting else lost + self._cut(EVENTS, None)

    def _cut(self, name: str, known: int | None) -> list[str]:
        """Cut one file to its last complete line within the `known` bytes; None means all bytes."""
        self._waiting.pop(name, None)
        self._starts.pop(name, None)
        path = self.path / name
        size = _size(path)
        known = size if known is None else known
        end = _end_of_lines(path, min(size, known))
        files.cut(path, end)
        lost = []
        if size < known:
            lost.append(f"{name}: {known - size} bytes have disappeared since the checkpoint")
        if torn := min(size, known) - end:
            lost.append(f"{name}: dropped an incomplete last line of {torn} bytes")
        return lost

    def write_config(self, config: Config) -> list[str]:
        """Write config.yaml, unless it was edited; return messages."""
        path = self.path / CONFIG_NAME
        if path.exists() and not _is_as_we_write_it(path):
            self.write(USED_NAME, dump_config(config))
            return [f"{path} was edited, and is kept; the settings in use are in {USED_NAME}"]
        self.write(CONFIG_NAME, dump_config(config))
        if not self._dry:
            files.remove(self.path / USED_NAME)  # of a time when config.yaml was edited
        return []

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, json.dumps(value, indent=1, ensure_ascii=False) + "\n")

    def write(self, name: str, text: str) -> None:
        """Write a complete file, or none."""
        if not self._dry:
            data = text.encode("utf-8", "backslashreplace")
            files.write_file(self.path / name, data, durable=False)

    def save_was_asked(self) -> bool:
        """Return whether someone asked for a save since the last call."""
        request = self.path / _REQUEST
        if not request.exists():
            return False
        with suppress(DiskError):  # then it is asked again after the next step
            files.remove(request)
        return True

    def close(self) -> None:
        if self.uploads is not None:
            self.uploads.close()
            self.uploads = None
        if self._lock is not None:
            files.close(self._lock)
            self._lock = None

    def discard(self) -> None:
        """Close the folder of a run that was refused, and remove it if nothing else is in it."""
        if self._lock is not None and self._made and not self._waiting:
            with suppress(OSError, DiskError):
                if set(os.listdir(self.path)) <= _OF_A_START:
                    files.remove_folder(self.path)
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def is_run(path: Path) -> bool:
    """Return whether a folder bears our mark."""
    try:
        return (path / MARK).read_bytes() == _MARK_DATA
    except OSError:
        return False


def has_run(path: Path) -> bool:
    """Return whether a run has left something in a folder."""
    return any((path / name).exists() for name in ("metrics.jsonl", FOLDER))


def require_idle(path: Path) -> None:
    """Raise RunFolderError if a process is training in a run folder; the error names it."""
    with suppress(DiskError):  # a folder that cannot be written to is refused elsewhere
        if (path / ".lock").exists():
            files.close(files.lock(path / ".lock"))


def require_new(path: Path) -> None:
    """Raise RunFolderError unless `path` can be the folder of a run that is not resumed."""
    require_usable(path)
    if has_run(path):
        raise RunFolderError(
            f"{path} already has a run. Continue it with --resume, or set save.dir to another "
            "folder."
        )


def require_usable(path: Path) -> None:
    """Raise RunFolderError unless `path` is new, empty, or a run folder."""
    try:
        if not path.exists() or is_run(path):
            return
        found = [name for name in os.listdir(path) if not _is_nothing(name)]
    except OSError as error:
        raise RunFolderError(
            f"cannot use {path} as a run folder: {error.strerror}. Set save.dir to another folder."
        ) from error
    if found:
        raise RunFolderError(
            f"{path} is not empty and is not a run folder (it has {listing(found, 3)}). "
            "Nothing in it was changed. Set save.dir to a new or empty folder."
        )


def _is_nothing(name: str) -> bool:
    return name in _NOTHING or (name.startswith(f".{MARK}.") and name.endswith(".tmp"))


def _is_as_we_write_it(path: Path) -> bool:
    try:
        return dump_config(load_config(path)) == path.read_text()
    except (MegaTrainError, OSError, UnicodeDecodeError):
        return False


def _end_of_lines(path: Path, limit: int) -> int:
    """Return where the last complete line within the first `limit` bytes of a file ends."""
    if limit == 0:
        return 0
    with path.open("rb") as file:
        stop = limit
        while stop > 0:
            start = max(0, stop - _PIECE_BYTES)
            file.seek(start)
            newline = file.read(stop - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            stop = start
    return 0


def ask_for_save(run: Path) -> None:
    """Ask the process that trains in a run to save. Raises RunFolderError if there is none."""
    if not (run / "metrics.jsonl").exists():
        raise RunFolderError(f"{run} has no metrics.jsonl. Give a run folder.")
    try:
        files.close(files.lock(run / ".lock"))
    except RunFolderError:
        files.append(run / _REQUEST, b"")
        return
    raise RunFolderError(f"{run}: no process is training there")


def settings_by_key(config: Config) -> dict[str, Any]:
    """Return the settings of a config, `section.key` by `section.key`, as JSON has them."""
    return {
        f"{section}.{key}": value
        for section, values in config.model_dump(mode="json").items()
        for key, value in values.items()
    }


def machine_facts() -> dict[str, Any]:
    """Return where this runs, for a report or a bug report. Imports torch."""
    import psutil
    import torch
    import transformers

    from megatrain.version import __version__

    return {
        "megatrain": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": platform.machine(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "ram_bytes": psutil.virtual_memory().total,
    }

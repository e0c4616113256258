"""Runs a loader on hostile folders in a child process, and tells what it did with each.

    fork --> limit of memory --> audit hook --> for each folder: load, report through a pipe

The hook cannot be removed once it is in place, which is why it lives in a child. It notes, and
does not stop, every event by which a folder could reach beyond itself: code of the folder that is
run, other programs, libraries, pickles, sockets, files written anywhere, files read that are not
the folder's. Payloads of the corpus carry MARKER, so that code made from a file's text is
recognized wherever it is compiled. The parent never waits longer than DEADLINE_S: a loader that
hangs on a pipe is killed and the outcome says so. A child that has done anything wrong is replaced.
"""

from __future__ import annotations

import json
import math
import os
import resource
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from megatrain import load_model
from megatrain.errors import MegaTrainError
from testkit.patience import HANG_S

MARKER = "megatrain_attack_marker"
DEADLINE_S = HANG_S
"""Of the clock: a loader that waits for something spends no processor time."""
ADDRESS_BYTES = 4 << 30
"""What a child may map beyond its parent: enough to show a fault, too little to hurt the host."""

LOADED = "loaded"
HUNG = "hung"
DIED = "died"

_FORBIDDEN = (
    "ctypes.dlopen", "os.exec", "os.fork", "os.forkpty", "os.kill", "os.killpg",
    "os.posix_spawn", "os.spawn", "os.startfile", "os.system", "pickle.find_class", "pty.spawn",
    "subprocess.Popen", "webbrowser.open", "sqlite3.connect", "urllib.Request", "http.client.",
    "ftplib.", "smtplib.", "socket.", "tempfile.", "shutil.", "os.chmod", "os.chown", "os.link",
    "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate", "os.utime",
    "os.setxattr", "os.removexattr", "os.putenv", "os.unsetenv",
)  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# The interpreter and its packages, and what the system says about its memory.
_READABLE = tuple(
    os.path.realpath(path)
    for path in (*(p for p in sys.path if p), sys.prefix, sys.base_prefix, "/proc", "/sys")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one folder."""

    end: str
    """LOADED, HUNG, DIED, or the name of the class of the error."""
    ours: bool
    """Whether the error is one of the closed list."""
    text: str
    events: tuple[str, ...]
    """What the audit hook noted; none is the only good number."""
    out_of_memory: bool
    """Whether an allocation failed on the way, also where that was turned into an error of ours."""
    seconds: float
    """Processor time: what the folder cost, however busy the machine is with other things."""
    extra_bytes: int
    """Peak resident memory above what the child began with."""


Loader = Callable[[Path], Any]


class Sandbox:
    """A child that plays `loader` on one folder after the other."""

    def __init__(self, loader: Loader = load_model, deadline_s: float = DEADLINE_S) -> None:
        self._loader = loader
        self._deadline_s = deadline_s
        self._child = 0
        self.spent_s = 0.0
        """Processor time of all attacks so far."""

    def attack(self, folder: Path) -> Outcome:
        """Return what the loader does with `folder`."""
        if not self._child:
            self._start()
        os.write(self._to_child, os.fsencode(folder) + b"\n")
        line = _read_line(self._from_child, time.monotonic() + self._deadline_s)
        if line:
            fields = json.loads(line)
            outcome = Outcome(**fields | {"events": tuple(fields["events"])})
        else:
            outcome = Outcome(
                end=HUNG if line is None else DIED, ours=False, text="", events=(),
                out_of_memory=False, seconds=self._deadline_s, extra_bytes=0,
            )  # fmt: skip
        self.spent_s += outcome.seconds
        if outcome.events or outcome.out_of_memory or not line:
            self.close()
        return outcome

    def close(self) -> None:
        """End the child."""
        if self._child:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
            os.close(self._to_child)
            os.close(self._from_child)
            self._child = 0

    def _start(self) -> None:
        folders, self._to_child = os.pipe()
        self._from_child, reports = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork while threads exist
            self._child = os.fork()
        if self._child == 0:
            try:
                os.close(self._to_child)
                os.close(self._from_child)
                _play(self._loader, folders, reports)
            finally:
                os._exit(0)
        os.close(folders)
        os.close(reports)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _read_line(pipe: int, deadline: float) -> bytes | None:
    """Return the next line, what there is of it if its writer died, or None if it is late."""
    line = b""
    while not line.endswith(b"\n"):
        if not select.select([pipe], [], [], _left(deadline))[0]:
            return None
        part = os.read(pipe, 1 << 16)
        if not part:
            return b""
        line += part
    return line


def _left(deadline: float) -> float | None:
    return None if math.isinf(deadline) else max(deadline - time.monotonic(), 0)


def _play(loader: Loader, folders: int, reports: int) -> None:
    """Be the child: load each folder that the parent names, and report."""
    # torch makes its pool of threads anew after a fork, at the first call that asks for it; of two
    # threads that ask at once, the second finds none.
    torch.set_num_threads(torch.get_num_threads())
    most = _status()["VmSize"] + ADDRESS_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.dont_write_bytecode = True
    watch = _Watch()
    sys.addaudithook(watch)
    while line := _read_line(folders, math.inf):
        report = _report(loader, Path(os.fsdecode(line[:-1])), watch)
        view = memoryview(json.dumps(report).encode() + b"\n")
        while view:
            view = view[os.write(reports, view) :]


def _report(loader: Loader, folder: Path, watch: _Watch) -> dict[str, Any]:
    """Load one folder under the eyes of the hook; return the fields of its Outcome."""
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is resident now
    resident = _status()["VmRSS"]
    modules = set(sys.modules)
    error: BaseException | None = None
    begin = time.process_time()
    with watch.over(folder):
        try:
            loader(folder)
        except BaseException as caught:
            error = caught
    seconds = time.process_time() - begin
    return {
        "end": type(error).__name__ if error else LOADED,
        "ours": isinstance(error, MegaTrainError),
        "text": str(error) if error else "",
        "events": [*watch.events, *_imported(folder, modules)][:20],
        "out_of_memory": _out_of_memory(error),
        "seconds": seconds,
        "extra_bytes": _status()["VmHWM"] - resident,
    }


class _Watch:
    """The audit hook, and what it noted of one folder."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._home = ""

    @contextmanager
    def over(self, folder: Path) -> Iterator[None]:
        """Note what happens inside."""
        self.events = []
        self._home = os.path.realpath(folder)
        try:
            yield
        finally:
            self._home = ""

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        home, self._home = self._home, ""  # what happens below is ours
        if home:
            if fault := _fault(event, args, home):
                self.events.append(fault)
            self._home = home


def _fault(event: str, args: tuple[Any, ...], home: str) -> str:
    """Return what is wrong with an event, or nothing."""
    if event.startswith(_FORBIDDEN):
        return f"{event} {args!r:.200}"
    if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
        path = os.path.realpath(os.fsdecode(args[0]))
        if _writes(*args[1:3]):
            return f"writes {path}"
        blobs = os.path.join(os.path.dirname(os.path.dirname(home)), "blobs")  # the hub's cache
        if not _inside(path, (home, blobs, *_READABLE)):
            return f"reads {path}"
    if event == "compile" and MARKER in _text(args[0]):
        return f"compiles {args[1]!r:.200}"
    if event == "exec" and isinstance(args[0], CodeType):
        code = args[0]
        if MARKER in _constants(code) or _inside(code.co_filename, (home,)):
            return f"runs {code.co_filename}"
    return ""


def _writes(mode: Any, flags: Any) -> bool:
    letters = isinstance(mode, str) and any(letter in mode for letter in "wax+")
    return letters or (isinstance(flags, int) and bool(flags & _WRITING))


def _inside(path: str, homes: tuple[str, ...]) -> bool:
    return any(path == home or path.startswith(home.rstrip("/") + "/") for home in homes)


def _text(source: Any) -> str:
    return source.decode("latin-1") if isinstance(source, bytes) else str(source)


def _constants(code: CodeType) -> str:
    inner = (_constants(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts)
    return " ".join((*code.co_names, *inner))


def _imported(folder: Path, before: set[str]) -> list[str]:
    home = os.path.realpath(folder)
    files = {name: getattr(sys.modules[name], "__file__", None) for name in {*sys.modules} - before}
    return [
        f"imported {name} from {file}"
        for name, file in files.items()
        if file and _inside(os.path.realpath(file), (home,))
    ]


def _out_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _status() -> dict[str, int]:
    """Return the lines of /proc/self/status that count memory, in bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) << 10 for line in lines if line[-1] == "kB"}

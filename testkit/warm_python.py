"""An interpreter that has imported the libraries: a program starts in 0.1 s instead of 4 s.

`WarmPython` starts one process that imports torch, transformers and this package, and then forks
once for each program. `command` stands where `sys.executable` would: the process behind it hands
its arguments, environment, working directory and standard streams to the fork, forwards signals to
it, and ends as it ends. A test that measures or forbids imports needs a real interpreter.

Invariants
    1. A program prints, fails, spawns and dies by a signal as it does under `sys.executable`.
    2. Nothing that one program changes is seen by the next.
    3. A variable that libraries read while they are imported cannot differ: the program is refused.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import multiprocessing.process
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

CLIENT = Path(__file__).with_name("warm_client.py")
REFUSED = 97
PRELOADED = (
    "megatrain.cli.verbs", "megatrain.cli.checkpoint_verbs", "megatrain.cli.demo",
    "megatrain.doctor.examine", "megatrain.run.trainer", "megatrain.report.page",
    "transformers.modeling_utils", "transformers.models.llama.modeling_llama",
)  # fmt: skip
READ_ON_IMPORT = ("HF_", "OMP_", "PYTHON", "TORCH_", "TORCHINDUCTOR_", "TRANSFORMERS_")
"""Prefixes of the variables that libraries read while they are imported."""
_GIVEN = dict(os.environ)  # before any test changes it


@functools.cache
def warm_python() -> WarmPython:
    """Return one with the environment of the tests, for all of this process."""
    warm = WarmPython(_GIVEN)
    atexit.register(warm.close)
    return warm


class WarmPython:
    """A server that starts when `command` is first asked for, and ends with `close`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._folder = Path(tempfile.mkdtemp(prefix="warm-"))
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def command(self) -> list[str]:
        """Return the words that stand where `sys.executable` would."""
        address = self._folder / "socket"
        if self._server is None:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(address))
                listener.listen(64)
                self._server = self._start(listener.fileno())
        return [sys.executable, "-I", "-S", str(CLIENT), str(address)]

    def _start(self, listener: int) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).parents[1])
        code = f"import sys; sys.path.insert(0, {root!r}); import testkit.warm_python as warm"
        return subprocess.Popen(
            [sys.executable, "-c", f"{code}; warm.serve({listener})"],
            env=self._environment, stdin=subprocess.PIPE, pass_fds=[listener],
            start_new_session=True,
        )  # fmt: skip

    def close(self) -> None:
        """End the server and every program that it still runs."""
        if self._server is not None:
            assert self._server.stdin is not None
            self._server.stdin.close()  # by which it ends, as it does when this process dies
            self._server.wait()
        shutil.rmtree(self._folder)


def serve(fd: int) -> None:
    """Fork for each client until standard input ends; in a fork, be the program."""
    given = dict(os.environ)
    for name in PRELOADED:
        __import__(name)
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    request = _Server(socket.socket(fileno=fd)).until_fork()
    if request is not None:
        _take(request["environment"], given)
        _leave(_exit_code(request))


class _Server:
    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._clients: dict[int, socket.socket] = {}
        self._woken = socket.socketpair()

    def until_fork(self) -> dict[str, Any] | None:
        """Return the request in each fork, and None once the server shall end."""
        self._woken[1].setblocking(False)
        signal.set_wakeup_fd(self._woken[1].fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as events:
            for source in (sys.stdin, self._listener, self._woken[0]):
                events.register(source, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in events.select()]
                if sys.stdin in ready:
                    self._kill(self._clients)
                    return None
                if self._woken[0] in ready:
                    self._woken[0].recv(4096)
                    self._report_ends()
                self._kill(pid for pid, client in self._clients.items() if _is_closed(client))
                if self._listener in ready and (request := self._accept()) is not None:
                    return request

    def _accept(self) -> dict[str, Any] | None:
        client = self._listener.accept()[0]
        length, streams, _, _ = socket.recv_fds(client, 4, 3)
        try:
            request: dict[str, Any] = json.loads(_read(client, int.from_bytes(length, "big")))
        except (OSError, EOFError):  # it was killed before it had asked
            client.close()
            for fd in streams:
                os.close(fd)
            return None
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, fd in enumerate(streams):
                os.dup2(fd, number)
            for end in (client, self._listener, *self._woken, *self._clients.values()):
                end.close()
        for fd in streams:
            os.close(fd)
        if pid == 0:
            return request
        self._clients[pid] = client
        with suppress(OSError):  # it was killed: the fork will be
            client.sendall(f"{pid}\n".encode())
        return None

    def _report_ends(self) -> None:
        with suppress(ChildProcessError):
            while (gone := os.waitpid(-1, os.WNOHANG))[0]:
                with self._clients.pop(gone[0]) as client, suppress(OSError):
                    client.sendall(f"{os.waitstatus_to_exitcode(gone[1])}\n".encode())

    def _kill(self, pids: Iterable[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # not yet waited for: still its own


def _is_closed(client: socket.socket) -> bool:
    try:
        return not client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ConnectionResetError:  # it went without reading what was said to it
        return True


def _read(client: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length or not length:
        if not (part := client.recv(length - len(data))):
            raise EOFError
        data += part
    return data


def _exit_code(request: dict[str, Any]) -> int:
    try:
        _be(request)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _leave(code: int) -> None:
    """End as an interpreter does, without taking a thousand modules apart."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _be(request: dict[str, Any]) -> None:
    """Be `python WORDS` until it ends."""
    os.chdir(request["folder"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream.isatty() or stream is sys.stderr)  # type: ignore[union-attr]
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    what, *words = request["words"]
    if what == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *words[1:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec"), vars(main))
    else:
        sys.path[0] = str(Path(what).resolve().parent)
        sys.argv = [what, *words]
        runpy.run_path(what, run_name="__main__")


def _take(environment: dict[str, str], given: dict[str, str]) -> None:
    """Have the environment of the program, and what the imports have added to their own."""
    fixed = sorted(
        name
        for name in environment.keys() | given.keys()
        if name.startswith(READ_ON_IMPORT) and environment.get(name) != given.get(name)
    )
    if fixed:
        print(f"WarmPython was started with another value of {', '.join(fixed)}", file=sys.stderr)
        sys.exit(REFUSED)
    for name in given.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)

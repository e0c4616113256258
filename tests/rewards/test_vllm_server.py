"""Laws of vllm_server.py: with a package in vLLM's place that starts at once."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megatrain.errors import ConfigError, GeneratorError
from megatrain.rewards import vllm_server
from megatrain.rewards.vllm_server import INSIDE, ServerFiles, StartedServer, VllmServer
from testkit.patience import eventually

FILES = ServerFiles(files={"config.json": b"{}"}, dtype="float32")
SERVER = """
import http.server, json, os, pathlib, subprocess, sys
words = sys.argv
port = int(words[words.index("--port") + 1])
model = pathlib.Path(words[words.index("--model") + 1])
assert json.loads((model / "config.json").read_text()) == {}
if "--broken" in words:
    sys.exit("no such kernel")
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("engine", engine.pid, os.environ["PYTHONPATH"], flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def python(tmp_path: Path) -> str:
    """Return a Python that finds a package named vllm."""
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(SERVER)
    script = tmp_path / "python"
    script.write_text(
        f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{tmp_path}" exec {sys.executable} -S "$@"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def group_of(server: StartedServer) -> list[psutil.Process]:
    group = server.process.pid
    found = [one for one in psutil.process_iter() if _is_in(one, group)]
    assert len(found) == 3, "guard, server and engine"
    return found


def _is_in(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group
    except ProcessLookupError:
        return False


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(one.is_running() and one.status() != "zombie" for one in processes)


def test_a_server_ends_with_all_of_its_processes(python: str) -> None:
    server = StartedServer(python, FILES)
    processes = group_of(server)
    assert server.is_healthy()
    server.stop()
    assert eventually(lambda: all_gone(processes))
    server.stop()


def test_a_server_that_was_killed_leaves_nothing_behind(python: str) -> None:
    server = StartedServer(python, FILES)
    guard, *_ = processes = sorted(group_of(server), key=lambda one: one.create_time())
    (api,) = guard.children()
    api.kill()
    assert eventually(lambda: all_gone(processes))
    assert not server.is_healthy()
    server.stop()


def test_a_trainer_that_was_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    """The system closes its end of the pipe; here that is all there is of it."""
    command = [sys.executable, "-S", str(INSIDE / "guarded.py"), "sleep", "600"]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert eventually(lambda: psutil.Process(guard.pid).children())
    (child,) = psutil.Process(guard.pid).children()
    assert guard.stdin is not None
    guard.stdin.close()
    assert guard.wait() == -signal.SIGKILL
    assert eventually(lambda: all_gone([child]))


def test_a_server_that_does_not_start_says_why(
    python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(GeneratorError, match=r"(?s)started and has ended.*no such kernel"):
        StartedServer(python, FILES, ["--broken"])
    with pytest.raises(GeneratorError, match="cannot start vLLM by /none: No such file"):
        StartedServer("/none", FILES)
    monkeypatch.setattr(vllm_server, "START_S", 0.0)
    monkeypatch.setattr(StartedServer, "is_healthy", lambda self: False)
    with pytest.raises(GeneratorError, match="was started and does not answer"):
        StartedServer(python, FILES)


@pytest.mark.parametrize(
    "address", ["http://10.0.0.7:8000", "https://127.0.0.1", "http://example.com", "127.0.0.1:80"]
)
def test_addresses_beyond_this_host_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address of this host"):
        VllmServer.found(address)

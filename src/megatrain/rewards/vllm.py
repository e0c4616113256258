"""A plain vLLM server that draws answers with the weights of training.

    export   the model, adapters merged, to a folder in memory that the server sees too
    pause    requests that run are finished, new ones wait
    reload   collective_rpc reload_weights: vLLM reads the folder
    reset    keys and values of the old weights are forgotten
    resume   answers come from the new weights

No code of ours runs inside vLLM. The server is found at an address, on this host or on another one
that mounts the same folder, or it is started here. A started server has a process group of its own,
which ends with this process, however that ends (guarded.py). If it dies, it is started again with
the weights of now, once for each draw.

Invariants (tests/rewards/test_vllm.py, tests/integrations/test_trl_vllm.py)
    1. No answer counts unless the server had the weights of the last update, whole, before and
       after the request. No update uses a name of weights twice, and no other trainer's.
    2. After an update that failed there are no answers.
    3. A server that ended, one that was stopped, and a trainer that was killed leave no process
       behind. The next start removes what a killed trainer has left in the shared folder.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from megatrain.disk.hf.model import HostModel
from megatrain.errors import ConfigError, DiskError, GeneratorError
from megatrain.files import remove_folder
from megatrain.rewards import guarded
from megatrain.rewards.completions import CompletionsServer, asked
from megatrain.rewards.rollouts import Rollout

VLLM_PYTHON, VLLM_ARGUMENTS = "MEGATRAIN_VLLM_PYTHON", "MEGATRAIN_VLLM_ARGUMENTS"
"""Environment variables: the Python that has vLLM, and further arguments of the server. A config
names neither, because no key of it runs a program."""
SHARED_FOLDER = "/dev/shm"
START_S = 3600.0
"""vLLM may compile kernels at its start. One that fails ends, which is noticed at once."""
_POLL_S, _RESET_S = 0.25, 60.0
_PREFIX = "megatrain-weights-"
_ERROR = re.compile(r"\b[A-Z]\w*(?:Error|Exception): .*")
_MAX_ERROR_CHARS, _MAX_ERRORS, _TAIL_CHARS = 300, 5, 2000
_Result = TypeVar("_Result")


class Vllm:
    """A vLLM server and the weights that it has. Close it when done."""

    def __init__(
        self,
        url: str | None = None,
        *,
        arguments: Sequence[str] = (),
        folder: str | Path = SHARED_FOLDER,
        timeout_s: float = 600.0,
        connect_s: float = 0.0,
    ) -> None:
        """`url`: of a server that runs; None starts one, with `arguments`, at the first `load`.

        `folder` is seen by both processes. A server that is not up yet is waited for, for
        `connect_s`. Raises ConfigError if the folder is not there.
        """
        self._url, self._arguments, self._timeout_s = url, tuple(arguments), timeout_s
        self._connect_s = connect_s
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise ConfigError(
                f"{folder} is no folder: weights go to vLLM through one that both processes see. "
                "Without /dev/shm give another, like a mount that the server's host has too."
            )
        self._started: _StartedServer | None = None
        self._home: HostModel | None = None
        self._server: CompletionsServer | None = None
        self._version: str | None = None
        """Name of the weights that the server has; None: it has none of ours."""
        self._is_tempered = False
        _remove_left_behind(self._folder)

    def load(self, home: HostModel) -> None:
        """Give the server the weights of `home`; adapters are merged. Raises GeneratorError.

        The caller has finished late updates. The folder takes 2 bytes per parameter meanwhile.
        """
        self._home = home
        self._retry_after_death(self._load)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        num_samples: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
        eos_token_ids: Collection[int] = (),
    ) -> list[Rollout]:
        """Return `num_samples` answers to each prompt, drawn with the weights of the last `load`.

        Log-probabilities are those at the temperature. Raises GeneratorError, or ConfigError if the
        server reports others.
        """

        def draw() -> list[Rollout]:
            if self._version is None:
                if self._url is not None or self._home is None:
                    raise GeneratorError("the server has no weights of ours: its last load failed")
                self._load()  # it was started here, and has died
            assert self._server is not None
            self._require_version("before")
            if temperature != 1:
                self._require_tempered(prompts[0][0])
            found = self._server.generate(
                prompts,
                max_new_tokens=max_new_tokens,
                num_samples=num_samples,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                eos_token_ids=eos_token_ids,
            )
            self._require_version("after")
            return found

        return self._retry_after_death(draw)

    def close(self) -> None:
        """End the server, if it was started here. A second call does nothing."""
        self._version = self._server = None
        if self._started is not None:
            self._started.stop()
            self._started = None

    def _retry_after_death(self, work: Callable[[], _Result]) -> _Result:
        """Do the work; do it once more if a server of ours has died meanwhile."""
        try:
            return work()
        except GeneratorError:
            if self._started is None or self._started.is_alive():
                raise
            self.close()
        return work()

    def _load(self) -> None:
        assert self._home is not None
        self._version = None  # no draw counts before all of this is done
        version = secrets.token_hex(8)
        with self._exported(self._home) as model:
            if self._server is None:
                self._connect(model)
            if self._started is None or self._started.has_weights:
                self._post("pause?mode=wait")
                reload: dict[str, Any] = {"weights_path": str(model)}
                self._post("collective_rpc", {"method": "reload_weights", "kwargs": reload})
                self._reset_prefix_cache()
        if self._started is not None:
            self._started.has_weights = True
        self._post("update_weight_version", {"new_version": version})
        self._post("resume")
        self._version = version
        self._require_version("after the update")

    @contextmanager
    def _exported(self, home: HostModel) -> Iterator[Path]:
        """Write the model into the shared folder; it is removed when the block ends."""
        prefix = f"{_PREFIX}{socket.gethostname()}-{os.getpid()}-"
        with tempfile.TemporaryDirectory(prefix=prefix, dir=self._folder) as folder:
            home.export(Path(folder, "model"), merge=home.decoder.adapters is not None)
            yield Path(folder, "model")

    def _connect(self, model: Path) -> None:
        """Find the server, or start it with the weights of a folder."""
        if self._url is None:
            self._started = _StartedServer(model, self._arguments)
        address, until = self._address, time.monotonic() + self._connect_s
        while True:
            try:
                found = asked(f"{address}/v1/models", None, timeout_s=self._timeout_s)
                break
            except GeneratorError:
                if time.monotonic() >= until:
                    raise
                time.sleep(_POLL_S)
        try:
            name = found["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            raise GeneratorError(f"{address} serves no model: {str(found)[:200]}") from None
        self._server = CompletionsServer(
            url=f"{address}/v1", model=str(name), timeout_s=self._timeout_s
        )

    @property
    def _address(self) -> str:
        if self._started is not None:
            return self._started.address
        assert self._url is not None
        return self._url.rstrip("/")

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            return asked(f"{self._address}/{path}", body or {}, timeout_s=self._timeout_s)
        except GeneratorError as error:
            raise GeneratorError(
                f"{error}. A server that was not started here needs VLLM_SERVER_DEV_MODE=1, and "
                f"must see {self._folder} under that name"
            ) from None

    def _reset_prefix_cache(self) -> None:
        """Let vLLM forget keys and values; a request that was given up may still hold some."""
        until = time.monotonic() + _RESET_S
        while (answer := self._post("reset_prefix_cache")) == {"success": False}:
            if time.monotonic() > until:
                raise GeneratorError(
                    f"{self._address} keeps keys and values of older weights ({answer!s:.200}): "
                    "start it again"
                )
            time.sleep(_POLL_S)

    def _require_version(self, when: str) -> None:
        """Raise GeneratorError unless the server has the weights of the last update."""
        found = asked(f"{self._address}/weight_info", None, timeout_s=self._timeout_s)
        if self._version is None or self._version not in json.dumps(found):
            raise GeneratorError(
                f"{self._address} has the weights {found!s:.80} {when}, not {self._version}: "
                "another trainer uses it, or it was started again. No answer of it was taken."
            )

    def _require_tempered(self, token: int) -> None:
        """Raise ConfigError unless log-probabilities are those at the temperature."""
        assert self._server is not None
        if not self._is_tempered and not self._server.reports_tempered(token):
            raise ConfigError(
                f"{self._address} reports log-probabilities before the temperature, and the "
                "temperature is not 1: start it with --logprobs-mode processed_logprobs."
            )
        self._is_tempered = True


class _StartedServer:
    """A server process of ours, on the loopback alone: who reaches it can change its weights."""

    def __init__(self, model: Path, arguments: Sequence[str]) -> None:
        """Start it with the model of a folder, and wait until it answers: a minute or more.

        Raises GeneratorError.
        """
        python = os.environ.get(VLLM_PYTHON, sys.executable)
        port = _free_port()
        self.address = f"http://127.0.0.1:{port}"
        self.has_weights = False
        """Whether `load` has given it weights since; it starts with those of `model`."""
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        command = [
            python, "-I", guarded.__file__,
            python, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(model), "--served-model-name", f"policy-{secrets.token_hex(4)}",
            "--host", "127.0.0.1", "--port", str(port), "--generation-config", "vllm",
            "--logprobs-mode", "processed_logprobs", *arguments,
            *shlex.split(os.environ.get(VLLM_ARGUMENTS, "")),
        ]  # fmt: skip
        # vLLM has an environment of its own, which must not find the modules of this one.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        environment |= {"DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            self._output.close()
            raise GeneratorError(f"cannot start vLLM by {python}: {error.strerror}") from None
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def is_alive(self) -> bool:
        """Return whether it runs and answers."""
        if self.process.poll() is not None:
            return False
        try:
            asked(f"{self.address}/health", None, timeout_s=30.0)
        except GeneratorError:
            return False
        return True

    def stop(self) -> None:
        """End it and all of its processes. A second call does nothing."""
        assert self.process.stdin is not None
        if self.process.stdin.closed:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self._output.close()

    def _wait(self) -> None:
        until = time.monotonic() + START_S
        while not self.is_alive():
            has_ended = self.process.poll() is not None
            if has_ended or time.monotonic() > until:
                self._output.seek(0)
                output = self._output.read().decode(errors="replace")
                why = "has ended" if has_ended else "does not answer"
                raise GeneratorError(f"vLLM was started and {why}. {_causes(output)}")
            time.sleep(_POLL_S)


def _causes(output: str) -> str:
    """Return the errors in what a server has printed, the first of which is often the cause."""
    errors = dict.fromkeys(match[0][:_MAX_ERROR_CHARS] for match in _ERROR.finditer(output))
    named = "".join(f"\n  {error}" for error in list(errors)[:_MAX_ERRORS])
    missing = ""
    if "No module named" in output and "vllm" in output:
        missing = f"Give the Python of an environment that has vLLM: export {VLLM_PYTHON}=...\n"
    errors_text = f"Its errors:{named}\n" if named else ""
    return f"{missing}{errors_text}Its last lines:\n{output[-_TAIL_CHARS:]}"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _remove_left_behind(folder: Path) -> None:
    """Remove exports of trainers of this host that were killed: in memory they take room."""
    prefix = f"{_PREFIX}{socket.gethostname()}-"
    for path in folder.glob(f"{prefix}*"):
        pid = path.name.removeprefix(prefix).partition("-")[0]
        with suppress(ValueError, PermissionError, DiskError):
            try:
                os.kill(int(pid), 0)
            except ProcessLookupError:
                remove_folder(path)

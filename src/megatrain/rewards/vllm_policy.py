"""Answers from a vLLM server that has the weights of our own store, proved before they count.

    update   copy of the weights -> server paused -> loaded in one call -> caches reset
             -> digest of every tensor as its kernels have it = ours -> resumed
    draw     which weights the worker has, the request, which weights it has: all three the same

A server of ours that has died is started again, gets the weights again and is asked again, once.

Laws (tests/rewards/test_vllm_policy.py; against vLLM itself: proofs/rollouts.py)
    1. No answer counts unless the worker had the weights of the last update, whole, before and
       after the request. Names of weights are never used twice, by no trainer.
    2. A digest that differs ends the update, and the server stays paused.
    3. After an update that failed there are no answers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import torch

from megatrain.config.value_types import is_gate
from megatrain.disk.adapters.merge import merged
from megatrain.disk.hf.export import config_bytes
from megatrain.disk.hf.model import HostModel
from megatrain.disk.hf.weights_file import NamedTensor, folder_tensors
from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError, GeneratorError, listing
from megatrain.models.config_json import CONFIG_NAME
from megatrain.rewards.far_server import FarServer
from megatrain.rewards.rollouts import Rollout
from megatrain.rewards.shared_weights import WeightsCopy, digest_of
from megatrain.rewards.vllm_server import ServerFiles, StartedServer, VllmServer

_Result = TypeVar("_Result")


class VllmPolicy:
    """A vLLM server draws: on this host, or behind a gate on another."""

    exact = False

    def __init__(
        self,
        *,
        address: str | None = None,
        python: str | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        """`address`: of a server that runs, or of its gate (far_server.py).

        Else one is started by `python`, with `arguments`; None is the Python of this process.
        Raises ConfigError.
        """
        if address is not None and (python is not None or arguments):
            raise ConfigError(
                f"the server at {address} runs already: give an address, or a Python and arguments"
            )
        if address is not None:
            _kind_of(address)(address, "")  # refuses what cannot be asked
        self._address = address
        self._python = python or sys.executable
        self._arguments = tuple(arguments)
        self._server: VllmServer | None = None
        self._copy: WeightsCopy | None = None
        self._home: HostModel | None = None
        self._ends: frozenset[int] = frozenset()
        self._label: str | None = None
        self._is_tempered = False

    def update(self, engine: Engine, home: HostModel, version: int) -> None:
        self._label = None
        if not engine.ranks.owner.is_alone:
            raise ConfigError("rollouts.engine vllm is for one process: train without torchrun")
        engine.settle()
        self._home, self._ends = home, engine.end_tokens
        self._surely(self._publish)

    def draw(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        num_samples: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
        end_tokens: Collection[int] | None = None,
    ) -> list[Rollout]:
        ends = self._ends if end_tokens is None else frozenset(end_tokens)

        def drawn() -> list[Rollout]:
            if self._server is None:  # it was ours, and has died
                self._publish()
            assert self._server is not None
            self._require_weights("before")
            if temperature != 1:
                self._require_tempered(prompts[0][0])
            answers = self._server.completions.generate(
                prompts,
                max_new_tokens=max_new_tokens,
                num_samples=num_samples,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                end_tokens=ends,
            )
            self._require_weights("after")
            return answers

        if self._label is None:
            raise GeneratorError("the server has no weights of ours: its last update has failed")
        return self._surely(drawn)

    def close(self) -> None:
        self._label = None
        if self._server is not None:
            self._server.stop()
            self._server = None
        if self._copy is not None:
            self._copy.close()
            self._copy = None

    def _surely(self, work: Callable[[], _Result]) -> _Result:
        """Do it; once more if a server of ours has died meanwhile."""
        try:
            return work()
        except GeneratorError:
            if not isinstance(self._server, StartedServer) or self._server.is_healthy():
                raise
            self._server.stop()
            self._server = None
        return work()

    def _publish(self) -> None:
        """Give the server the weights that are at home now, and prove that it has them."""
        assert self._home is not None
        self._label = None
        tensors = served_tensors(self._home)
        if self._server is None:
            self._server = self._found()
        dtype = _dtype(self._server.state().get("dtype"))
        if self._copy is None:
            self._copy = self._server.copy_of(tensors)
        ours = self._copy.write(tensors, dtype)
        found = self._server.load(self._copy.address, self._copy.version)
        _prove(found.get("digests"), ours, tensors, dtype)
        self._server.resume()
        self._label = self._copy.label
        self._require_weights("after the update")

    def _found(self) -> VllmServer:
        assert self._home is not None
        if self._address is not None:
            return _kind_of(self._address).found(self._address)
        return StartedServer(self._python, server_files(self._home), self._arguments)

    def _require_tempered(self, token: int) -> None:
        """Raise ConfigError unless the server's log-probabilities are those at the temperature."""
        assert self._server is not None
        if self._is_tempered or self._server.completions.reports_tempered(token):
            self._is_tempered = True
            return
        raise ConfigError(
            f"{self._server.address} reports log-probabilities before the temperature, and "
            "rollouts.temperature is not 1: start it with --logprobs-mode processed_logprobs"
        )

    def _require_weights(self, when: str) -> None:
        """Raise GeneratorError unless the worker has the weights of the last update."""
        assert self._server is not None
        label = self._server.state().get("label")
        if self._label is None or label != self._label:
            raise GeneratorError(
                f"{self._server.address} has the weights {label!s:.80} {when}, not "
                f"{self._label}: another trainer uses it, or it was started again. No answer of "
                "it was taken."
            )


def _kind_of(address: str) -> type[VllmServer]:
    return FarServer if is_gate(address) else VllmServer


def server_files(home: HostModel) -> ServerFiles:
    """Return what a server needs to be started for a model, weights excepted."""
    dtype = home.decoder.model.dtype
    files = {**home.carried, CONFIG_NAME: config_bytes(home.config_json, dtype)}
    return ServerFiles(files=files, dtype=str(dtype).removeprefix("torch."))


def served_tensors(home: HostModel) -> list[NamedTensor]:
    """Return the model as an export would have it, adapters merged: views, as far as they can."""
    found = merged(folder_tensors(home.decoder, home.store), home.decoder, home.store)
    return [*(tensor for _, tensor in found), *home.beside]


def _prove(
    found: object, ours: dict[str, str], tensors: Sequence[NamedTensor], dtype: torch.dtype
) -> None:
    """Raise GeneratorError unless the worker has every tensor of ours, bit for bit."""
    if not isinstance(found, dict) or found.keys() != ours.keys():
        given = set(found) if isinstance(found, dict) else set()
        raise GeneratorError(
            "the server gave no digest of these tensors, so that its weights are not proved: "
            f"{listing(ours.keys() ^ given)}"
        )
    wrong = []
    for tensor in tensors:
        its, digest = found[tensor.name]
        expected = ours[tensor.name] if _dtype(its) == dtype else digest_of(tensor, _dtype(its))
        if digest != expected:
            wrong.append(tensor.name)
    if wrong:
        raise GeneratorError(
            f"{len(wrong)} of {len(ours)} tensors of the server are not those that were sent: "
            f"{listing(wrong)}. It stays paused; start it again"
        )


def _dtype(name: object) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise GeneratorError(f"the server names the dtype {name!s:.80}, which is none")
    return found

"""The seam behind which answers are drawn: by the engine that trains, or by a server.

    policy.update(engine, home, version)       # the weights after `version` steps, before each draw
    rollouts = policy.draw(prompts, ...)       # num_samples answers to each prompt, in a row
    policy.close()

A run knows nothing else of who draws. Log-probabilities of a policy that is not `exact` come from
other kernels than training has: the run computes its own, logs how far they are apart, and weighs
each token by what is between them, up to a limit (truncated importance sampling).

Laws (tests/rewards/test_policy.py)
    1. Answers are those of the weights that the last `update` named; before the first there are
       none.
    2. A policy that cannot say which weights an answer has raises, and gives no answer.
    3. The same weights, prompts and seed give the same answers, within rounding.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Sequence
from typing import Protocol

from megatrain.config import Config
from megatrain.disk.hf.model import HostModel
from megatrain.engine.engine import Engine
from megatrain.rewards.generation import generate
from megatrain.rewards.rollouts import Rollout

VLLM_PYTHON, VLLM_ARGUMENTS = "MEGATRAIN_VLLM_PYTHON", "MEGATRAIN_VLLM_ARGUMENTS"
"""Variables: the Python of an environment that has vLLM, and more arguments of its server."""


class Policy(Protocol):
    """Answers to prompts, by known weights."""

    @property
    def exact(self) -> bool:
        """Whether log-probabilities are those of training, within rounding."""

    def update(self, engine: Engine, home: HostModel, version: int) -> None:
        """Take the weights of `home` as they are now: after `version` steps.

        All ranks call it, between steps and before each draw. Late updates of `engine` are not
        finished before `engine.settle()`; both may be others than at the last call. A return means
        that every later answer has these weights, and no other; an exception (GeneratorError) that
        none will come.
        """

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
        """Return `num_samples` answers to each prompt, those of one prompt in a row.

        All ranks call it with the same arguments, and each gets all answers. An answer that ended
        in any way but by an end token or the limit is a GeneratorError.
        """

    def close(self) -> None:
        """End what was started for it; a second call does nothing."""


class OwnPolicy:
    """The engine that trains draws too, between its steps."""

    exact = True

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def update(self, engine: Engine, home: HostModel, version: int) -> None:
        self._engine = engine

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
        assert self._engine is not None, "update comes first"
        return generate(
            self._engine,
            prompts,
            max_new_tokens=max_new_tokens,
            num_samples=num_samples,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            end_tokens=end_tokens,
        )

    def close(self) -> None:
        self._engine = None


def open_policy(config: Config) -> Policy:
    """Return who draws the answers of a run: `rollouts.engine`.

    Which program a server is started with comes from the environment, not from the config: a config
    may be a stranger's, and no key of it runs a program.
    """
    given = config.rollouts
    if given.engine == "own":
        return OwnPolicy()
    from megatrain.rewards.vllm_policy import VllmPolicy

    if given.server is not None:
        return VllmPolicy(address=given.server)
    return VllmPolicy(
        python=os.environ.get(VLLM_PYTHON),
        arguments=shlex.split(os.environ.get(VLLM_ARGUMENTS, "")),
    )

"""Steps that another library's trainer takes on the engine of a run: TRL's, for GRPO.

The run asks for one step after another, and does all else itself: metrics, evaluations, saves,
signals, the report. What stands here is what a run needs to know of such a trainer;
integrations/trl_run.py has TRL's.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatrain.batch import MicroBatch
from megatrain.config import Config
from megatrain.data.steps.steps import State
from megatrain.disk.hf.model import HostModel
from megatrain.engine.engine import Engine
from megatrain.engine.results import StepResult
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.data.prompts import Prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalStep:
    """A step that was taken."""

    result: StepResult
    batch: Sequence[MicroBatch]
    prepare_s: float
    """Seconds until the engine's forward began: drawing answers and rewarding them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalEvaluation:
    """What the trainer's own evaluation found."""

    loss: float
    """What the best model and patience go by; of rewards it is the mean reward, negated."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Further metrics, whose names begin with eval_."""

    def metrics(self) -> dict[str, float]:
        """Return the figures by their names in metrics.jsonl."""
        return {"eval_loss": self.loss, **self.figures}

    def in_words(self) -> str:
        reward = self.figures.get("eval_reward")
        return f"loss {self.loss:.4f}" if reward is None else f"reward {reward:.4f}"


class ExternalSteps(abc.ABC):
    """The data and the objective of a run, in place of TrainingData. Close it when done."""

    eval_names: tuple[str, ...] = ()
    step_tokens = None

    def __init__(self, config: Config, rows: Prompts) -> None:
        self.config, self.rows = config, rows
        self.held_fraction = config.data.eval if isinstance(config.data.eval, float) else None
        self.figures: Mapping[str, float] = {}
        """Metrics of the last step, by the trainer's names."""

    @property
    def card(self) -> dict[str, Any]:
        """The sources' cards as one."""
        return self.rows.card()

    @property
    def num_judged(self) -> int:
        """Rows that an evaluation reads."""
        return len(self.rows.held)

    @property
    @abc.abstractmethod
    def steps_in_epoch(self) -> int:
        """Steps of one pass over the rows."""

    @property
    def num_steps(self) -> int:
        """Steps of the run."""
        train = self.config.train
        return train.steps or self.steps_of(train.epochs or 1.0)

    def steps_of(self, epochs: float) -> int:
        """Return how many steps so many epochs have; a part of a step counts as one."""
        return math.ceil(self.steps_in_epoch * epochs)

    @property
    @abc.abstractmethod
    def epoch(self) -> int:
        """Passes over the rows that are complete."""

    @property
    @abc.abstractmethod
    def is_at_start(self) -> bool:
        """Whether the next step is the first of an epoch."""

    @abc.abstractmethod
    def attach(self, engine: Engine, home: HostModel) -> None:
        """Train this engine and model from now on."""

    @abc.abstractmethod
    def take_step(self) -> ExternalStep:
        """Take the next step. An error leaves the state as it was after the step before."""

    @abc.abstractmethod
    def judged(self) -> ExternalEvaluation | None:
        """Evaluate; None without rows to evaluate on."""

    @abc.abstractmethod
    def samples(self, count: int) -> Iterator[dict[str, Any]]:
        """Yield some texts of the last evaluation or step, with prompts and rewards."""

    @abc.abstractmethod
    def state(self) -> State:
        """Return all that the next step depends on besides tensors of the engine."""

    @abc.abstractmethod
    def seek(self, state: State) -> None:
        """Continue from a saved state. Raises DataError if it belongs to other rows."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the trainer, and what it has started."""


OpenExternal = Callable[[Config, Any, StepSettings, "Prompts"], ExternalSteps]
"""Makes the steps of a run of its config, tokenizer, settings and rows."""

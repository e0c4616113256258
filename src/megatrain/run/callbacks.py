"""Callbacks: code of the caller that a run calls at its events, by the names of transformers.

    class Stop(mt.Callback):
        def on_evaluate(self, config, state, control, metrics, **_):
            control.should_training_stop = metrics["eval_loss"] < 1.0

Callbacks are called in their order, between steps, by the thread that trains. They see the run and
ask for things; they cannot change a step. An error in one ends the run as any error does. Each of
several ranks calls its own callbacks, and a request on one rank is obeyed by all.

Laws (tests/run/test_callbacks.py)
    1. A run with callbacks that ask for nothing has the bits of one without.
    2. Events come in the documented order, and what a callback asks for happens.
    3. A callback with an event that no run has is refused; an error in one ends the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from megatrain.config import Config
from megatrain.errors import ConfigError, listing
from megatrain.ranks.ranks import Ranks
from megatrain.run.state import RunState

if TYPE_CHECKING:  # it opens rows, which a program may bring with its callbacks
    from megatrain.run.external_steps import ExternalSteps
    from megatrain.run.opening.training_data import TrainingData


@dataclass(slots=True, kw_only=True)
class TrainerControl:
    """Requests of callbacks to their run; an attribute of any other name is an error."""

    should_training_stop: bool = False
    """End the run after this step, saved, as if it were its last."""
    should_save: bool = False
    """Save after this step."""
    should_evaluate: bool = False
    """Evaluate after this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The progress of a run."""

    global_step: int
    """Steps that are done."""
    max_steps: int
    epoch: int
    """Passes over the rows that are complete."""
    num_input_tokens_seen: int
    loss: float | None
    """Loss of the last step."""
    eval_loss: float | None
    """Loss of an evaluation at this very step."""
    best_loss: float | None
    """Lowest loss of all evaluations."""
    best_step: int
    is_world_process_zero: bool
    """Whether this process writes the run folder; one process alone does."""
    run_dir: Path

    @classmethod
    def of(
        cls,
        state: RunState,
        data: TrainingData | ExternalSteps,
        run_dir: Path,
        *,
        leads: bool,
    ) -> Self:
        """Return the progress of a run after a step."""
        return cls(
            global_step=state.global_step,
            max_steps=data.num_steps,
            epoch=data.epoch,
            num_input_tokens_seen=state.total_tokens,
            loss=state.last_loss,
            eval_loss=state.eval_loss,
            best_loss=state.evaluations.best_loss,
            best_step=state.evaluations.best_step,
            is_world_process_zero=leads,
            run_dir=run_dir,
        )


class Callback:
    """Methods that a run calls; override those that you need.

    Each gets the config, the state (mt.TrainerState) and the control (mt.TrainerControl) of the
    run, and by name `trainer` and what is noted below. What it returns is ignored.
    """

    def on_init_end(
        self, config: Config, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The model is loaded, and a resumed run is at its checkpoint."""

    def on_train_begin(
        self, config: Config, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """`train()` was called."""

    def on_epoch_begin(
        self, config: Config, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The next step is the first of a pass over the rows."""

    def on_step_begin(
        self, config: Config, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """A step begins."""

    def on_step_end(
        self, config: Config, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """A step is done, its line in metrics.jsonl written."""

    def on_log(
        self, config: Config, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """A step is logged (log.every); `logs` is its line of metrics.jsonl."""

    def on_evaluate(
        self, config: Config, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """An evaluation is done; `metrics` is its line of metrics.jsonl."""

    def on_save(
        self, config: Config, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """A checkpoint is complete; `checkpoint` is its folder. Saves end some steps later."""

    def on_epoch_end(
        self, config: Config, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The last step was the last of a pass over the rows."""

    def on_train_end(
        self, config: Config, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """All steps are done, or a callback ended the run; the last checkpoint is complete."""


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Callbacks:
    """The callbacks of one run, and their requests."""

    def __init__(self, callbacks: Sequence[Callback], ranks: Ranks) -> None:
        self._callbacks = tuple(callbacks)
        self._ranks = ranks
        self.control = TrainerControl()

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def tell(self, event: str, config: Config, state: TrainerState, **details: Any) -> None:
        """Call the event's method of each callback; a request on one rank becomes that of all."""
        assert event in HOOKS
        if not self._callbacks:
            return
        control = self.control
        for callback in self._callbacks:
            if (method := getattr(callback, event, None)) is not None:
                method(config, state, control, **details)
        if event != "on_save":  # rank 0 alone may see a save
            asked = {name: bool(getattr(control, name)) for name in TrainerControl.__slots__}
            heard = self._ranks.agree({"control": asked})
            for name in asked:
                setattr(control, name, any(said["control"][name] for said in heard))

    def take(self, name: str) -> bool:
        """Return whether something is asked for, which is then no longer so."""
        asked = bool(getattr(self.control, name))
        setattr(self.control, name, False)
        return asked


INSTEAD = {
    "EarlyStoppingCallback": "eval.patience stops a run that no longer improves",
    "PrinterCallback": "a run prints its own lines, every log.every steps",
    "ProgressCallback": "a run prints its own lines, every log.every steps",
    "WandbCallback": "log.to: [wandb] sends metrics there",
    "TensorBoardCallback": "log.to: [tensorboard] writes metrics for it",
    "TrackioCallback": "log.to: [trackio] sends metrics there",
    "MLflowCallback": "log.to: [mlflow] sends metrics there",
}
"""Callbacks of transformers that a setting replaces."""


def require_callback(callback: Any) -> None:
    """Raise ConfigError for an object that no event of a run would reach, or that needs a Trainer.

    Subclasses of transformers.TrainerCallback are welcome if their events are ours. Those that
    transformers itself ships read its TrainingArguments, which a run does not have.
    """
    if isinstance(callback, type):
        raise ConfigError(
            f"callbacks: {callback.__name__} is a class. Give an object: {callback.__name__}()."
        )
    name = type(callback).__name__
    if type(callback).__module__.startswith("transformers."):
        way_out = INSTEAD.get(name, "write the events that you need as an mt.Callback")
        raise ConfigError(
            f"callbacks: {name} is a part of transformers and reads its TrainingArguments, which a "
            f"run does not have: {way_out}."
        )
    methods = {event for event in dir(callback) if event.startswith("on_")}
    own = {event for event in methods if not _is_inherited(callback, event)}
    unknown = own - set(HOOKS)
    if unknown or not own:
        fault = f"has {listing(unknown)}, which no run calls" if unknown else "has no event"
        raise ConfigError(f"callbacks: {name} {fault}. The events are {listing(HOOKS)}.")


def _is_inherited(callback: Any, event: str) -> bool:
    """Return whether a method is that of transformers' base class, which does nothing."""
    owner = next((kind for kind in type(callback).__mro__ if event in vars(kind)), None)
    names = None if owner is None else (owner.__module__, owner.__name__)
    return names == ("transformers.trainer_callback", "TrainerCallback")

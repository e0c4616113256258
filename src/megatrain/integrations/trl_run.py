"""A run whose steps TRL's GRPOTrainer takes, on the engine and in the folder of the run.

    config, rows, reward functions -> GRPOConfig, dataset -> streamed(GRPOTrainer)
    take_step   TRL draws, rewards and computes a loss; the engine goes forward, back and updates
    judged      TRL's evaluation
    state       its position, random states and buffered answers, as JSON in the run's checkpoints

TRL's loop runs in a thread of its own, which waits whenever a step is done: exactly one thread
runs at a time. So the run's own loop stays in charge, and saves, evaluations, signals, metrics and
the report are those of any run.

Invariants (tests/integrations/test_trl_run.py)
    1. A run that was stopped and resumed, however often, ends in the bits of one that was not, in
       later epochs and between steps on the same answers too.
    2. A reward function that fails ends the run with its name, after a save.
    3. Losses and norms of gradients are those of GRPOTrainer with the same arguments, at any
       temperature.
"""

from __future__ import annotations

import base64
import contextvars
import math
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatrain.config import Config
from megatrain.data.prompts import Prompt, Prompts
from megatrain.data.steps.steps import State
from megatrain.disk.hf.model import HostModel
from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError, DataError, MissingPackage
from megatrain.integrations.reward_functions import RewardFunction
from megatrain.integrations.trl import streamed
from megatrain.run.external_steps import (
    ExternalEvaluation,
    ExternalStep,
    ExternalSteps,
    OpenExternal,
)
from megatrain.step.settings import StepSettings

LOSSES: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
}
"""TRL's arguments for each loss.name."""
_RUNTIME = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "epoch"}
_NOT_METRICS = {"loss", "grad_norm", "learning_rate", "epoch", "step_time", "num_tokens"}
"""What TRL logs that a run has under names of its own."""


def open_with(functions: Sequence[RewardFunction]) -> OpenExternal:
    """Return what makes the steps of a run on rewards. Raises MissingPackage without TRL."""
    try:
        import trl  # noqa: F401
    except ImportError as error:
        raise MissingPackage(
            f"TRL computes losses on rewards, and cannot be imported ({error}): "
            "pip install 'megatrain[trl]'"
        ) from None

    def open_external(
        config: Config, tokenizer: Any, settings: StepSettings, rows: Prompts
    ) -> ExternalSteps:
        return TrlSteps(config, tokenizer, settings, rows, functions)

    return open_external


def require_supported(config: Config) -> None:
    """Raise ConfigError for settings that TRL's loop cannot honor, all of them at once."""
    refused = {
        "train.on_nonfinite: rollback": config.train.on_nonfinite == "rollback",
        "train.on_spike: rollback": config.train.on_spike == "rollback",
        "a weight of data.train: repeat the file": any(s.weight != 1 for s in config.data.train),
    }
    if faults := [name for name, is_asked in refused.items() if is_asked]:
        raise ConfigError(f"TRL trains on rewards, and cannot honor: {'; '.join(faults)}.")


class TrlSteps(ExternalSteps):
    """Steps of a GRPOTrainer."""

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        settings: StepSettings,
        rows: Prompts,
        functions: Sequence[RewardFunction],
    ) -> None:
        super().__init__(config, rows)
        self._tokenizer, self._settings, self._functions = tokenizer, settings, functions
        assert config.train.batch_rows is not None, "the config has it"
        self._prompts_per_step = config.train.batch_rows
        if len(rows.train) < self._prompts_per_step:
            raise DataError(
                f"there are {len(rows.train)} prompts, and train.batch_rows is "
                f"{self._prompts_per_step}. Lower it."
            )
        self._folder = tempfile.TemporaryDirectory(prefix="megatrain-trl-")
        self._trainer: Any = None
        self._loop: _Loop | None = None
        self._saved: dict[str, Any] | None = None
        """TRL's state after the last step; None before the first one."""
        self._forward_s = 0.0
        self._evaluated: list[dict[str, Any]] = []
        """Texts of the last evaluation, until they are asked for."""

    @property
    def steps_in_epoch(self) -> int:
        draws = len(self.rows.train) // self._prompts_per_step
        return draws * self.config.rollouts.iterations

    @property
    def _step(self) -> int:
        return 0 if self._saved is None else int(self._saved["state"]["global_step"])

    @property
    def epoch(self) -> int:
        return self._step // self.steps_in_epoch

    @property
    def is_at_start(self) -> bool:
        return self._step % self.steps_in_epoch == 0

    def attach(self, engine: Engine, home: HostModel) -> None:
        self._engine = engine
        self._trainer = self._make_trainer(engine, home)
        self._trainer._served[0].on_forward = self._note_forward

    def _note_forward(self) -> None:
        """Begin the trace of the step: what came before was drawing and rewarding."""
        self._forward_s = time.monotonic()
        if self._engine.trace is not None:
            self._engine.trace.spans.clear()

    def take_step(self) -> ExternalStep:
        begun = time.monotonic()
        trainer = self._trainer
        if self._loop is None:
            self._loop = trainer.loop = _Loop(self._train)
        try:
            is_over = self._loop.advance()
        except BaseException:
            self._loop = None
            with suppress(Exception):  # what failed is not the cause
                trainer._forget_step()
            raise
        assert not is_over, "TRL has as many steps as the run"
        served, logs = trainer._served[0], trainer.logged
        assert served.result is not None
        self._saved = trainer.saved_state()
        self.figures = {
            name: value
            for name, value in logs.items()
            if isinstance(value, float) and name not in _NOT_METRICS
        }
        result = replace(served.result, loss=float(logs["loss"]))
        return ExternalStep(
            result=result, batch=served.batch, prepare_s=max(0.0, self._forward_s - begun)
        )

    def _train(self) -> None:
        """Run TRL's loop, from the saved state on. In its thread."""
        if self._saved is None:
            self._trainer.train()
            return
        from transformers import TrainerState

        state = TrainerState(**self._saved["state"])
        with tempfile.TemporaryDirectory() as folder:
            state.save_to_json(str(Path(folder, "trainer_state.json")))
            self._trainer.train(resume_from_checkpoint=folder)

    def judged(self) -> ExternalEvaluation | None:
        if not self.rows.held:
            return None
        before, logs = _random_states(), self._trainer._logs
        for column in (logs["prompt"], logs["completion"], *logs["rewards"].values()):
            column.clear()  # of answers that were trained on
        try:
            found = self._trainer.evaluate()
        finally:
            _restore_random_states(before)  # the next step is the same with and without it
        self._evaluated = self._texts()
        figures = {
            name: float(value)
            for name, value in found.items()
            if isinstance(value, int | float) and name not in _RUNTIME
        }
        loss = figures.pop("eval_loss")
        if "eval_reward" in figures:
            loss = -figures["eval_reward"]
        return ExternalEvaluation(loss=loss, figures=figures)

    def samples(self, count: int) -> Iterator[dict[str, Any]]:
        answers = self.config.rollouts.samples
        found, self._evaluated = self._evaluated or self._texts()[::answers], []
        yield from found[:count]

    def _texts(self) -> list[dict[str, Any]]:
        """Return the answers that TRL has drawn last, with their rewards."""
        logs = self._trainer._logs
        rewards = [logs["rewards"][one.name] for one in self._functions]
        weights = [one.weight for one in self._functions]
        found = []
        for prompt, text, *given in zip(logs["prompt"], logs["completion"], *rewards, strict=True):
            reward = sum(w * r for w, r in zip(weights, given, strict=True) if not math.isnan(r))
            found.append({"prompt": _text(prompt), "text": _text(text), "reward": float(reward)})
        return found

    def state(self) -> State:
        more = {} if self._saved is None else {"trainer": self._saved}
        row = self._step % self.steps_in_epoch
        return {"order": self._order, "epoch": self.epoch, "window": 0, "row": row, **more}

    def seek(self, state: State) -> None:
        if state["order"] != self._order:
            raise DataError(
                "the prompts differ from those of the run: their tokens, rows or seed, or how many "
                "are held out, have changed. Resume with the same files, tokenizer and data "
                "settings, or start a new run from the exported model with another save.dir."
            )
        self._end_loop()
        self._saved = state.get("trainer")
        self._trainer.begin_at(self._saved)

    @property
    def _order(self) -> str:
        """A name for everything that decides the prompts of a step."""
        data, rollouts = self.config.data, self.config.rollouts
        parts = (self._prompts_per_step, rollouts.samples, rollouts.iterations)
        return f"trl {parts} {data.seed} {data.shuffle} {data.eval}-{self.rows.digest}"

    def close(self) -> None:
        self._end_loop()
        if self._trainer is not None:
            self._trainer.end_vllm()
        self._folder.cleanup()

    def _end_loop(self) -> None:
        if self._loop is not None:
            self._loop.end()
            self._loop = None

    def _make_trainer(self, engine: Engine, home: HostModel) -> Any:
        from datasets import Dataset, disable_progress_bars
        from transformers.trainer_callback import PrinterCallback
        from trl import GRPOConfig, GRPOTrainer

        disable_progress_bars()
        kind = streamed(
            GRPOTrainer,
            settings=self._settings,
            opened=(home, engine),
            weights_folder=self.config.rollouts.weights_folder,
        )
        kind = type("RunGRPOTrainer", (_RunTrainer, kind), {"data_seed": self.config.data.seed})
        held = [_row(one) for one in self.rows.held]
        given = grpo_arguments(self.config, self._functions, self.num_steps, self._folder.name)
        trainer: Any = kind(
            model=str(home.weights),
            args=GRPOConfig(**given),
            reward_funcs=list(self._functions),
            train_dataset=Dataset.from_list([_row(one) for one in self.rows.train]),
            eval_dataset=Dataset.from_list(held) if held else None,
            processing_class=self._tokenizer,
        )
        trainer.remove_callback(PrinterCallback)
        return trainer


def grpo_arguments(
    config: Config, functions: Sequence[RewardFunction], num_steps: int, folder: str
) -> dict[str, Any]:
    """Return the arguments of GRPOConfig for a run. What the run does itself is off."""
    assert config.train.batch_rows is not None, "the config has it"
    loss, rollouts = config.loss, config.rollouts
    given: dict[str, Any] = dict(LOSSES[loss.name])
    given |= {} if loss.clip is None else {"epsilon": loss.clip}
    given |= {} if loss.clip_high is None else {"epsilon_high": loss.clip_high}
    if rollouts.engine == "vllm":
        given |= {"use_vllm": True, "vllm_max_model_length": config.data.max_length}
        given |= {"vllm_mode": "colocate" if rollouts.server is None else "server"}
        given |= {"vllm_server_base_url": rollouts.server, "vllm_server_timeout": 0.0}
    answers = config.train.batch_rows * rollouts.samples
    return {
        "output_dir": folder,
        "max_steps": num_steps,
        "per_device_train_batch_size": answers,  # the engine cuts it into micro-batches
        "gradient_accumulation_steps": 1,
        "num_generations": rollouts.samples,
        "num_iterations": rollouts.iterations,
        "max_completion_length": rollouts.max_new_tokens,
        "temperature": rollouts.temperature,
        "mask_truncated_completions": rollouts.mask_truncated,
        "beta": loss.kl or 0.0,
        "reward_weights": [one.weight for one in functions],
        "shuffle_dataset": config.data.shuffle,
        "chat_template_kwargs": dict(config.data.template_kwargs),
        "per_device_eval_batch_size": answers,
        "num_generations_eval": 1,
        "lr_scheduler_type": "constant",  # the engine's optimizer has the run's schedule
        "bf16": config.model.dtype == "bf16",
        "use_cpu": True,  # of the loss of log-probabilities: the model is the engine's
        "gradient_checkpointing": False,
        "seed": config.train.seed,
        "eval_strategy": "no",
        "save_strategy": "no",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **given,
    }


def _row(prompt: Prompt) -> dict[str, Any]:
    """Return a prompt as TRL reads it, with the other columns of its row for reward functions."""
    columns = {
        name: value
        for name, value in prompt.row.items()
        if name not in ("prompt", "completion", "messages")
    }
    asked = prompt.text if prompt.messages is None else [dict(one) for one in prompt.messages]
    return {"prompt": asked, **columns}


def _text(turns: Any) -> str:
    """Return a prompt or completion of TRL as text."""
    if isinstance(turns, str):
        return turns
    return "\n".join(str(turn.get("content", "")) for turn in turns)


_BASE: Any = object
"""A streamed trainer takes its place."""


class _RunTrainer(_BASE):  # type: ignore[misc]
    """What a streamed GRPOTrainer has in place of its own, where a run is around it."""

    data_seed: int
    loop: _Loop
    logged: dict[str, Any]
    """What TRL logged of the last step."""
    _begins_at: dict[str, Any] | None = None
    _last_step = 0

    def log(self, logs: dict[str, Any], *more: Any) -> None:
        super().log(logs, *more)
        self.logged = dict(logs)
        self.state.log_history.clear()  # metrics.jsonl has it

    def _maybe_log_save_evaluate(self, *given: Any, **named: Any) -> None:
        super()._maybe_log_save_evaluate(*given, **named)
        if self.state.global_step == self._last_step:  # the end of an epoch comes here too
            return
        self._last_step = self.state.global_step
        self._random = _random_states()
        self.loop.pause()
        _restore_random_states(self._random)

    def saved_state(self) -> dict[str, Any]:
        """Return what the next step depends on, as JSON has it."""
        state = asdict(self.state) | {"log_history": []}
        found = {"state": state, "random": self._random, "micro_step": self._step}
        if self.num_iterations > 1:
            found["answers"] = _encoded(self._buffered_inputs)
        return found

    def begin_at(self, saved: dict[str, Any] | None) -> None:
        """Let the next `train` continue from a state; None: from the beginning."""
        self._begins_at = saved
        step = 0 if saved is None else int(saved["state"]["global_step"])
        self._last_step = self.state.global_step = step
        self._step = 0 if saved is None else int(saved["micro_step"])
        self._buffered_inputs = None
        if saved is not None and "answers" in saved:
            self._buffered_inputs = _decoded(saved["answers"])
        self._vllm_step = None

    def _get_train_sampler(self, *given: Any) -> Any:
        seed, self.args.seed = self.args.seed, self.data_seed
        sampler = super()._get_train_sampler(*given)
        self.args.seed = seed
        # Each epoch draws an order from one generator, which begins anew in a resumed process.
        num_orders = 0
        if self._begins_at is not None and self.shuffle_dataset:
            prompts = self.args.generation_batch_size // self.num_generations
            per_epoch = len(self.train_dataset) // prompts * self.num_iterations
            num_orders = int(self._begins_at["state"]["global_step"]) // per_epoch
        for _ in range(num_orders):
            torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    def _load_rng_state(self, checkpoint: str | None) -> None:
        assert self._begins_at is not None
        _restore_random_states(self._begins_at["random"])

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Leave it: the run has restored masters and states."""

    def end_vllm(self) -> None:
        """End the server that draws, if one was started."""
        if self._vllm is not None:
            self._vllm.close()


class _Ended(BaseException):
    """Nobody waits for TRL's loop any more."""


class _Loop:
    """TRL's loop in a thread of its own, which runs only while `advance` waits."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run_loop = run
        self._go: SimpleQueue[bool] = SimpleQueue()
        self._paused: SimpleQueue[bool] = SimpleQueue()
        self._error: BaseException | None = None
        context = contextvars.copy_context().run
        self._thread = threading.Thread(target=context, args=(self._run,), name="TRL", daemon=True)

    def advance(self) -> bool:
        """Let it run until a step is done; return whether it has ended. Raises what it raises."""
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._go.put(True)
        is_over = self._paused.get()  # a signal's handler runs meanwhile, in this thread
        if is_over:
            self._thread.join()
            if self._error is not None:
                raise self._error
        return is_over

    def pause(self) -> None:
        """Wait for the next `advance`. Called in the thread."""
        self._paused.put(False)
        if not self._go.get():
            raise _Ended

    def end(self) -> None:
        """End the thread, if it waits."""
        if self._thread.is_alive():
            self._go.put(False)
            self._thread.join()

    def _run(self) -> None:
        try:
            self._run_loop()
        except _Ended:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._paused.put(True)


def _random_states() -> dict[str, Any]:
    """Return the states of the generators of Python, NumPy and torch, as JSON has them."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    version, words, second = random.getstate()
    return {
        "python": [version, list(words), second],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
    }


def _restore_random_states(states: Mapping[str, Any]) -> None:
    version, words, second = states["python"]
    random.setstate((version, tuple(words), second))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    data = bytearray(base64.b64decode(states["torch"]))
    torch.set_rng_state(torch.frombuffer(data, dtype=torch.uint8))


def _encoded(value: Any) -> Any:
    """Return answers that wait for further steps as JSON has them: tensors by their bytes."""
    if isinstance(value, Tensor):
        data = base64.b64encode(
            value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
        name = str(value.dtype).removeprefix("torch.")
        return {"tensor": data.decode(), "dtype": name, "shape": list(value.shape)}
    if isinstance(value, Mapping):
        return {"mapping": {name: _encoded(one) for name, one in value.items()}}
    if isinstance(value, list | tuple):
        return [_encoded(one) for one in value]
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(one) for one in value]
    if isinstance(value, Mapping) and "mapping" in value:
        return {name: _decoded(one) for name, one in value["mapping"].items()}
    if isinstance(value, Mapping):
        data = torch.frombuffer(bytearray(base64.b64decode(value["tensor"])), dtype=torch.uint8)
        return data.view(getattr(torch, value["dtype"])).view(value["shape"])
    return value

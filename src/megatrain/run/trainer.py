"""Training, from a config to a model that has learned.

    with Trainer(config) as trainer:                        # everything in a config
        trainer.train()
        trainer.save_model("out")
    Trainer(model="folder", train_dataset=rows, train={"steps": 100})     # or rows in memory

Each step: take a batch, let the engine train on it, write a line to metrics.jsonl. On schedule:
evaluate, let the model write, save. Everything the run knows about itself is in its folder.

Laws (tests/run/test_trainer.py, test_resume.py)
    1. Weights after a run are those of the engine given the same batches.
    2. Every step has its line in metrics.jsonl, also in a run that dies.
    3. Counts are of real tokens; a step's split adds up to its time.
    4. A run that was stopped and resumed, however often, ends in the bits of one that was not, and
       has the same lines, except for times.
    5. All ranks take the same way: they decide by what they have agreed on (test_ranks.py).
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from megatrain.batch import MicroBatch
from megatrain.config import Config
from megatrain.disk.checkpoint.retention import finished, step_of
from megatrain.disk.hf.export import Origin
from megatrain.disk.hf.source_mark import source_mark
from megatrain.engine.results import StepResult
from megatrain.errors import (
    CheckpointCorrupted,
    ConfigError,
    DiskError,
    Interrupted,
    NonFiniteStep,
    OutOfDeviceMemory,
    RewardError,
    RunFolderError,
    StepAborted,
    listing,
)
from megatrain.lanes.trace import step_split
from megatrain.losses.loss import Loss
from megatrain.planning.roofline import Roofline
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run import optional
from megatrain.run.arguments import ComputeMetrics, read_arguments
from megatrain.run.callbacks import Callback, Callbacks, TrainerState
from megatrain.run.checkpoints import Checkpoints, load_best
from megatrain.run.console import Live
from megatrain.run.evaluation.mean_loss import MeanLoss, judged_loss
from megatrain.run.external_steps import ExternalSteps, OpenExternal
from megatrain.run.interrupts import Interrupts, Pause
from megatrain.run.opening.banner import (
    first_notes,
    nothing_to_resume,
    rate_jump,
    resumed_event,
    resumed_in_words,
    startup_lines,
    write_facts,
    write_samples,
    writes_after,
)
from megatrain.run.opening.opening import Opening, checkpoint_facts, open_run
from megatrain.run.opening.planned import can_be_compared, compared_with_plan, facts
from megatrain.run.opening.recipe import learning_rate
from megatrain.run.opening.resumption import LoadedCheckpoint, resume
from megatrain.run.opening.retry_smaller import can_shrink, keep_snapshot, opened_smaller
from megatrain.run.opening.training_data import TrainingData
from megatrain.run.rollback import Rollbacks
from megatrain.run.saving import Saving
from megatrain.run.sinks import Sinks
from megatrain.run.state import RunState, TrainOutput

if TYPE_CHECKING:
    from megatrain.run.external_steps import ExternalEvaluation

Acted = TypeVar("Acted")
TRACED_STEP = 3
"""The first ones warm up."""
TIMED_STEPS = 1000
"""The last ones, whose times are kept: a run of weeks must not grow by every step."""


class Trainer:
    """One run. Use it in a `with` block, or `close` it."""

    def __init__(
        self,
        config: Config | None = None,
        *,
        model: str | Mapping[str, Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        callbacks: Sequence[Callback] = (),
        loss: Loss | Mapping[str, Any] | str | None = None,
        compute_metrics: ComputeMetrics | None = None,
        dry_run: bool = False,
        verbose: bool = False,
        interrupts: Interrupts | None = None,
        ranks: Ranks = ALONE,
        open_external: OpenExternal | None = None,
        **sections: Any,
    ) -> None:
        """Open the run folder, read the data and load the model: all that can fail early.

        Give a config; or a model, rows, and sections of a config by name, `train={...}` and others
        (docs/python.md). If the folder has a run, the model is that of its newest complete
        checkpoint. With `dry_run` nothing is written, and `train` may not be called. `verbose`
        prints the whole plan and every note before the first step, not ten lines.
        `interrupts` are open already, and `train` ends early on their request. With several `ranks`
        all do the same calls; the one that leads writes and prints. `open_external` lets another
        library's trainer take the steps (integrations/trl_run.py).
        """
        config, given = read_arguments(
            config,
            model=model,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=callbacks,
            loss=loss,
            compute_metrics=compute_metrics,
            sections=sections,
            ranks=ranks,
        )
        given = replace(given, open_external=open_external)
        self.interrupts = interrupts or Interrupts()
        self._ranks = ranks
        self._is_dry, self._is_verbose = dry_run, verbose
        self._pause = Pause(listens=interrupts is None)
        self._callbacks = Callbacks(given.callbacks, ranks)
        opened = open_run(config, dry_run=dry_run, ranks=ranks, given=given)
        try:
            self._take_parts(opened)
            self._prepare_saving()
            self._begin(opened)
            self._tell("on_init_end")
        except BaseException:
            opened.close()
            raise

    def _take_parts(self, opened: Opening) -> None:
        """Take what was opened."""
        self._opened = opened
        self.config = opened.config
        self.folder = opened.folder
        self.plan = opened.plan
        self.device = opened.device
        self.engine = opened.engine
        self.home = opened.home
        self.tokenizer = opened.tokenizer
        self.data = opened.data
        self.num_steps = self.data.num_steps
        self._rate = learning_rate(self.config, self.num_steps)
        self._roofline = self.plan.roofline() if can_be_compared(self.plan) else None
        self.interrupts.notice_s = self.config.save.notice
        if self.config.save.notice is not None and self._ranks.owner.is_alone:
            self.engine.should_abort = self.interrupts.leaves

    def _prepare_saving(self) -> None:
        config, folder = self.config, self.folder
        self.checkpoints = Checkpoints(
            folder.path,
            self.home,
            self.engine,
            keep=config.save.keep,
            keep_best=config.keeps_best,
            ranks=self._ranks,
        )
        parts = (folder, self.checkpoints, self.interrupts)
        self.saving = Saving(config, *parts, self._facts, self._ranks)
        self.saving.on_saved = lambda path: self._tell("on_save", checkpoint=path)

    def _begin(self, opened: Opening) -> None:
        """Set the state of the run. The folder of a run waits with changes for `train`."""
        self.state = RunState(owes_look=True)
        self.notes: list[str] = []
        """What was resumed, chosen and found while opening, what needs attention first."""
        self._rollbacks = Rollbacks(self._ranks)
        self._step_seconds: deque[float] = deque(maxlen=TIMED_STEPS)
        self._compared_ops: Sequence[Mapping[str, Any]] = ()
        self._watch()
        self._has_ended = False
        self._holds_another = False
        """Whether memory has the model of another step than the state: `train` loads the last."""
        self._source_mark = (
            source_mark(self.home.source)
            if opened.resumed is None
            else opened.resumed.known.source_mark
        )
        self._resumed = opened.resumed
        """The checkpoint that `state` is of; None: the run begins."""
        if opened.resumed is not None:
            self._restore(opened.resumed)
        self.notes += first_notes(opened, self.checkpoints.shortage())
        self._has_begun = False
        """Whether the run folder is that of this run."""
        if self._is_dry or not self._ranks.decide(lambda: self.folder.had_run):
            self._begin_folder()

    def _restore(self, resumed: LoadedCheckpoint) -> None:
        """Restore everything but tensors from the checkpoint."""
        known = resumed.known
        self._resumed = resumed
        self.engine.restore(resumed.manifest.step, known.num_updates)
        self.data.seek(known.data)
        self.state = known.state
        step = self.state.global_step
        aside = [*resumed.unreadable, *resumed.refused]
        self.checkpoints.took_up(step, resumed.path, resumed.damaged, aside)
        self.notes += resumed_in_words(resumed)
        self.notes += rate_jump(self._rate, known.learning_rate, step, self.num_steps)

    def _begin_folder(self) -> None:
        """Write the known facts into the run folder, and drop lines of steps that come again."""
        self._has_begun = True
        self._cut_lines()
        self.notes += self.folder.write_config(self.config)
        self.notes += write_facts(self._opened)
        self._write_plan()

    def _cut_lines(self) -> None:
        """Drop the lines of steps after the restored checkpoint, and record the resume."""
        resumed = self._resumed
        lost = self.folder.cut({} if resumed is None else resumed.known.lines)
        self.notes += lost
        if resumed is not None:
            event = resumed_event(resumed, self.state.global_step, lost)
            self.folder.append("events.jsonl", event)

    def _continue(self, checkpoint: bool | str | Path | None) -> None:
        """Continue the run that the folder has, if that is what the caller of `train` wants.

        Raises RunFolderError if it is not, or if there is no such checkpoint.
        """
        self._ranks.require_same(lambda: {"resume_from_checkpoint": str(checkpoint)})
        if checkpoint and not isinstance(checkpoint, bool):
            self._load(Path(checkpoint))
        if checkpoint and self._resumed is None and not self.state.global_step:
            self.notes.append(nothing_to_resume(self.folder))
        if self._has_begun:
            return
        if not checkpoint:
            raise RunFolderError(
                f"{self.folder.path} already has a run, at step {self.state.global_step}. Continue "
                "it with train(resume_from_checkpoint=True), or set save.dir to another folder."
            )
        self._begin_folder()

    def _load(self, checkpoint: Path) -> None:
        """Go back to one of the checkpoints of this run."""
        folder = self.checkpoints.folder
        paths = self._ranks.decide(lambda: [str(path) for path in finished(folder)])
        asked = folder / checkpoint.name
        if str(asked) not in paths or asked.resolve() != checkpoint.resolve():
            there = listing(sorted(Path(path).name for path in paths)) or "none"
            raise RunFolderError(
                f"resume_from_checkpoint: {checkpoint} is no checkpoint of this run. Those in "
                f"{folder}: {there}. To train another run's model, give its folder as the model."
            )
        self.engine.synchronize()
        self.saving.wait()
        if self._resumed is not None and self._resumed.path == asked and not self._has_begun:
            return
        self._holds_another, step = True, step_of(asked)
        found = resume(
            folder, self.config, self.home, self._ranks,
            wants=lambda known: known.state.global_step == step,
        )  # fmt: skip
        if found is None or found.path != asked:
            raise CheckpointCorrupted(
                f"{asked} is damaged: `megatrain verify {asked}` shows where. "
                "train(resume_from_checkpoint=True) continues from the newest that is complete."
            )
        self._holds_another = False
        if self._resumed is not None and not self._has_begun:
            self.notes.remove(f"resumed from {self._resumed.path.name}")
        self._restore(found)
        if self._has_begun:
            self._cut_lines()

    def startup_lines(self, *, verbose: bool) -> list[str]:
        """Return what is printed before the first step; `verbose`: the whole plan, every note."""
        return startup_lines(self._opened, self.notes, verbose=verbose)

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> TrainOutput:
        """Run all steps; return the result. The run folder then has all facts.

        A folder that has a run already is refused unless it is to be resumed: True continues from
        its newest complete checkpoint, or begins if there is none; a path is that of a checkpoint
        in the folder.

        Raises Interrupted, once the state is saved, if the run is to end early. In a program that
        leaves Ctrl-C to Python, the first one raises KeyboardInterrupt when the step is done; the
        next call continues.
        """
        assert not self._is_dry, "a dry run takes no step"
        self._continue(resume_from_checkpoint)
        self._callbacks.control.should_training_stop = self._has_ended = False
        config, began = self.config, time.monotonic()
        if self._holds_another and self.state.global_step < self.num_steps and not self._is_over():
            self._take_last_again()
        state = self.state
        leads = self._ranks.leads
        with (
            Live(self.num_steps, speaks=leads) as live,
            Sinks(
                config, self.folder.path, live.say, resumed_step=state.global_step, speaks=leads
            ) as self._sinks,
            self._pause,
        ):
            self._live = live
            for line in self.startup_lines(verbose=self._is_verbose):
                live.say(line)
            self.interrupts.patient = True
            self._tell("on_train_begin")
            try:
                self._take_steps()
                self.saving.at_end(self.state.global_step, self._live.say)
            except RewardError as error:
                raise self._unrewarded(error) from None
            except StepAborted:  # what is new is saved, as far as the notice allows
                self.saving.at_end(self.state.global_step, live.say)
                raise self._interrupted(self.interrupts.reason or "asked to end") from None
            state = self.state
            self.saving.requests.ask()
            stop = self.saving.requests.stop
            if stop is not None and self.checkpoints.saved_step != state.global_step:
                raise self._interrupted(stop)
            self._has_ended = True
            self.interrupts.patient = False
            self._compare_ops(is_last=True)
            self._if_possible(self._write_plan)
            if self._roofline is not None and self._step_seconds:
                live.say(compared_with_plan(self.plan, self._step_seconds, self.engine.trace))
            self.saving.report_trouble(live.say)
            self._tell("on_train_end")
        return state.outcome(time.monotonic() - began)

    def _take_last_again(self) -> None:
        """Fill memory with the last model: an export has put the best one there."""
        found = resume(self.checkpoints.folder, self.config, self.home, self._ranks)
        if found is None:
            raise DiskError(
                f"{self.checkpoints.folder} has no checkpoint any more, and memory has the best "
                "model, which was exported: there is no last one to continue from."
            )
        self._restore(found)
        self._cut_lines()
        self._holds_another = False

    def _take_steps(self) -> None:
        """Take all steps that are left. Raises StepAborted, Interrupted, and what steps raise."""
        self._make_up()
        while self.state.global_step < self.num_steps and not self._is_over():
            self._pause.raise_if_asked(self.state.global_step)
            self._take_step(self.state.global_step + 1)
            step = self.state.global_step
            is_asked = self._callbacks.take("should_save")
            is_same = step in self.state.left_out
            self.saving.if_due(step, self._live.say, is_asked=is_asked, is_same=is_same)
            self._end_if_asked()
            self._make_up()

    def _make_up(self) -> None:
        """Evaluate and let the model write, if that was left, or is to be done again."""
        step = self.state.global_step
        if not self.state.owes_look:
            return
        self._look(step)
        if step:
            self.checkpoints.last_step = None  # it may be the best, which nobody knew
            self.saving.if_due(step, self._live.say)

    def _take_step(self, step: int) -> None:
        """Train one step, or leave it out; then evaluate if it is time."""
        config, state = self.config, self.state
        if self._callbacks and self.data.is_at_start:
            self._tell("on_epoch_begin")
        self._tell("on_step_begin")
        try:
            metrics = self._fitting(f"step {step}", lambda: self._step(step))
        except NonFiniteStep as error:
            if config.train.on_nonfinite != "rollback":
                raise
            self._roll_back(step, str(error))
            return
        spike, on_spike = metrics.get("spike"), config.train.on_spike
        if spike is not None and on_spike != "record":
            if on_spike == "stop":
                raise NonFiniteStep(f"step {step}: {spike}")
            self._roll_back(step, spike)
            return
        self._compare_ops()
        every = config.eval.every
        state.global_step, state.eval_loss = step, None
        state.owes_look = step == self.num_steps or (every is not None and step % every == 0)
        metrics["total_tokens"] = state.total_tokens
        self.folder.append("metrics.jsonl", metrics)
        self._tell("on_step_end")
        is_logged = step % config.log.every == 0 or step == self.num_steps
        self._live.step(metrics, stays=is_logged)
        if is_logged:
            self._sinks.log(metrics)
            self._tell("on_log", logs=metrics)
        if self._callbacks.take("should_evaluate") or state.owes_look:
            self._look(step)
        if self._callbacks and self.data.is_at_start:
            self._tell("on_epoch_end")

    def _step(self, step: int) -> dict[str, Any]:
        """Train on the next batch, or leave it out; return the step's line of metrics.jsonl.

        The step is counted in the state, and its loss judged. The line lacks the tokens of the run.
        """
        state, requests, began = self.state, self.saving.requests, time.monotonic()
        if isinstance(self.data, ExternalSteps):
            taken = self.data.take_step()
            requests.ask()
            return self._counted(step, taken.result, taken.batch, began, taken.prepare_s)
        batch = self.data.next_batch()
        if (reason := state.left_out.get(step)) is not None:
            self.engine.skip_step()
            requests.ask()
            return {"step": step, "applied": False, "fault": f"left out: {reason}"}
        data_seconds = time.monotonic() - began
        trace = self.engine.trace
        assert trace is not None
        trace.spans.clear()
        result = self.engine.step(batch, requests.says)
        requests.hear(result.rank_info)
        return self._counted(step, result, batch, began, data_seconds)

    def _counted(
        self,
        step: int,
        result: StepResult,
        batch: Sequence[MicroBatch],
        began: float,
        data_seconds: float,
    ) -> dict[str, Any]:
        """Count a step in the state, judge its loss, and return its line of metrics.jsonl."""
        state, trace, seconds = self.state, self.engine.trace, time.monotonic() - began
        assert trace is not None
        split = step_split(trace, seconds, data_seconds)
        rate = self._rate.rate(step - 1)
        metrics = step_metrics(step, result, rate, seconds, split, self._roofline)
        is_drawn = not isinstance(self.data, TrainingData)
        if not isinstance(self.data, TrainingData):
            metrics |= {**self.data.figures, "draw_seconds": round(data_seconds, 6)}
            state.last_reward = self.data.figures.get("reward")
            if state.first_reward is None:
                state.first_reward = state.last_reward
        if result.applied:
            # Advantages of a group add up to 0, so a loss on rewards is around 0: none is unusual.
            spikes = [] if is_drawn else [state.judge("loss", result.loss)]
            if result.grad_norm is not None:
                spikes.append(state.judge("gradient norm", result.grad_norm))
            if found := [spike for spike in spikes if spike is not None]:
                metrics["spike"] = "; ".join(found)
        state.total_tokens += result.num_tokens
        state.first_loss = result.loss if state.first_loss is None else state.first_loss
        state.last_loss = result.loss
        self._step_seconds.append(seconds - data_seconds)
        if self._watched is not None:
            self._watched.add(trace, batch, seconds - data_seconds)
        if step == min(TRACED_STEP, self.num_steps):
            self._if_possible(self._write_trace)
        return metrics

    def _watch(self) -> None:
        """Collect the first steps, where the plan has predicted their time."""
        from megatrain.run.first_steps import watched_steps

        self._watched = watched_steps(self._opened)

    def _compare_ops(self, *, is_last: bool = False) -> None:
        """Once the first steps are known, print their ops against the plan, and keep the rates."""
        watched = self._watched
        if watched is None or not (watched.is_full or is_last):
            return
        self._watched = None
        if (compared := watched.compared()) is None:
            return
        if compared.is_busy:
            self._roofline = None
        else:
            self._compared_ops = compared.rows
        for line in compared.lines():
            self._live.say(line)
        self._if_possible(self._write_plan)

    def _fitting(self, what: str, act: Callable[[], Acted]) -> Acted:
        """Do it; in smaller micro-batches if it does not fit, while weights are those of a step."""
        before = self.data.state()
        while True:
            try:
                return act()
            except StepAborted:
                self.data.seek(before)
                raise
            except OutOfDeviceMemory as error:
                self._if_possible(partial(keep_snapshot, self.folder, error, self._live.say))
                if not can_shrink(self._opened, what, error):
                    raise
                reason = str(error)
            gc.collect()  # the error held what compute was at
            self.engine.close()
            self.saving.wait()  # a save reads the store, and another engine would not wait for it
            step, say = self.state.global_step, self._live.say
            self._take_parts(opened_smaller(self._opened, step, what, reason, say))
            self.checkpoints.engine = self.engine
            self.data.seek(before)
            if self._watched is not None:
                self._watch()
            self._write_plan()

    def _look(self, step: int) -> None:
        """Evaluate, and let the model write. If that is left, it is as if it had not begun.

        So it is if its answers cannot be rewarded.
        """
        before, lines = self.state.to_json(), self.folder.sizes()
        try:
            self._look_now(step)
        except (StepAborted, RewardError):
            self.state = RunState.from_json(before | {"owes_look": True})
            self.folder.cut(lines)
            raise
        self.state.owes_look = False

    def _look_now(self, step: int) -> None:
        found = self._fitting(f"the evaluation after step {step}", self._judged)
        if found is not None:
            record: dict[str, Any] = {"step": step, **found.metrics()}
            self.saving.best_is_new = self.state.evaluations.is_best(step, found.loss)
            self.state.eval_loss = found.loss
            if step < self.num_steps and self._lost_patience():
                record |= self.state.evaluations.facts()
            self.folder.append("metrics.jsonl", record)
            self._sinks.log(record)
            self._live.say(f"step {step}: evaluation {found.in_words()}")
            if "stopped_early" in record:
                self._live.say(self.state.evaluations.in_words())
            self._tell("on_evaluate", metrics=record)
        if not writes_after(step, self.num_steps, self.config):
            return
        what = f"writing samples after step {step}"
        self._fitting(what, lambda: write_samples(self._opened, step))
        self.saving.requests.ask()  # it may have taken long

    def _roll_back(self, step: int, reason: str) -> None:
        """Go back to a checkpoint, and leave the step out from then on, or try older weights."""
        self.engine.synchronize()
        self.saving.wait()
        self.saving.report(self._live.say)
        back = self._rollbacks.load(step, reason, self.checkpoints, self.config, self.home)
        left_out = back.left_out(self.state.left_out)
        self._restore(back.found)
        self._cut_lines()
        self.state.left_out |= left_out
        self._live.say(str(back))
        self.folder.append("events.jsonl", back.event())

    def _unrewarded(self, error: RewardError) -> RewardError:
        """Save, and return the error of a run whose answers cannot be rewarded."""
        step = self.state.global_step
        if step:
            self.saving.at_end(step, self._live.say)
        saved = self.checkpoints.saved_step
        self.folder.append(
            "events.jsonl", {"event": "reward failed", "step": step, "reason": str(error)}
        )
        kept = (
            "nothing was trained yet" if saved is None else f"the run is saved after step {saved}"
        )
        return RewardError(
            f"{error}. Repair it and continue with `megatrain train ... --resume`: {kept}"
        )

    def _end_if_asked(self) -> None:
        self.saving.requests.refresh()
        if (reason := self.saving.requests.stop) is not None:
            self.saving.at_end(self.state.global_step, self._live.say)
            raise self._interrupted(reason)

    def _interrupted(self, reason: str) -> Interrupted:
        """Return the error of a run that was asked to end, and record that it ends."""
        step, saved = self.state.global_step, self.checkpoints.saved_step
        record = {"event": "interrupted", "step": step, "reason": reason}
        self.folder.append("events.jsonl", record)
        return Interrupted(
            f"{reason}: stopped after step {step} of {self.num_steps}, "
            + (f"saved after step {saved}" if saved is not None else "nothing is saved")
            + "; continue with `megatrain train ... --resume`"
        )

    def _is_over(self) -> bool:
        return self._lost_patience() or self._callbacks.control.should_training_stop

    def _lost_patience(self) -> bool:
        return self.state.evaluations.is_over(self.config.eval.patience)

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of the model as it is now on the evaluation rows.

        Their names begin with eval_, as in metrics.jsonl: eval_loss, the mean over trained tokens
        or what the loss of the run counts, eval_perplexity where it is that of tokens, and others.
        Raises ConfigError if there are no such rows.
        """
        found = self._judged()
        if found is None:
            raise ConfigError(
                "evaluate: there are no evaluation rows. Give eval_dataset, or data.eval."
            )
        return found.metrics()

    def _judged(self) -> MeanLoss | ExternalEvaluation | None:
        compute = self._opened.given.compute_metrics
        data = self.data
        if not isinstance(data, TrainingData):
            return data.judged()
        return judged_loss(self.engine, data.eval_batches(), compute, data.eval_names)

    def save_model(self, folder: str | Path) -> str:
        """Write the model as a folder that `from_pretrained` loads; return which one it is.

        `folder` may be a URL, like s3://bucket/name.
        A run that keeps its best model gives that one once it has ended; memory then holds it too,
        until `train` continues from the last.
        Otherwise it is the model as it is now.
        """
        self.engine.synchronize()
        said = f"model of step {self.state.global_step}"
        origin = Origin(step=self.state.global_step)
        if self._has_ended and self.config.keeps_best:
            origin, said = load_best(self.checkpoints, self.home, self.state, self._ranks)
            self._holds_another = origin.step != self.state.global_step
        write = partial(self.home.export, origin=origin, ranks=self._ranks)
        optional.uploads.export_to(folder, write, self._ranks)
        return said

    def push_to_hub(self, repo_id: str, *, private: bool | None = None) -> str:
        """Export the model with a model card, and commit it to the Hub; return its address."""
        if self._is_dry:
            raise ConfigError("push_to_hub: a dry run has nothing to push.")
        run, ranks = self.folder.path, self._ranks
        return optional.publishing.push_to_hub(
            run, self.config, repo_id, self.save_model, private=private, ranks=ranks
        )

    def close(self) -> None:
        """Finish updates and saves, and let go of the device and the folder."""
        try:
            self.engine.close()
        finally:
            self.checkpoints.wait()
            self.home.store.close()
            self.data.close()
            self.folder.close()

    def _tell(self, event: str, **details: Any) -> None:
        """Call the callbacks."""
        if self._callbacks:
            leads = self._ranks.leads
            progress = TrainerState.of(self.state, self.data, self.folder.path, leads=leads)
            self._callbacks.tell(event, self.config, progress, trainer=self, **details)

    def _facts(self) -> dict[str, Any]:
        """Return what a checkpoint knows of the run, besides tensors and lines."""
        rate = self._rate.rate(self.state.global_step - 1) if self.state.global_step else None
        return checkpoint_facts(self._opened, self.state, rate, self._source_mark)

    def _if_possible(self, write: Callable[[], None]) -> None:
        """Write what only explains the run: a disk that fails must not end it."""
        try:
            write()
        except (DiskError, OSError) as error:
            self._live.say(f"{error}. Training continues.")

    def _write_plan(self) -> None:
        parts = self._step_seconds, self._compared_ops, self.notes
        found = facts(self.plan, self.device, *parts)
        self.folder.write_json("plan.json", found)

    def _write_trace(self) -> None:
        path = self.folder.path / "trace.json"
        self._ranks.on_first(lambda: self.engine.write_trace(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def step_metrics(
    step: int,
    result: StepResult,
    rate: float,
    seconds: float,
    split: dict[str, float],
    roofline: Roofline | None,
) -> dict[str, Any]:
    """Return a step's line of metrics.jsonl; `roofline` is None where nothing can be compared."""
    metrics: dict[str, Any] = {
        "step": step,
        "loss": result.loss,
        **({} if result.aux_loss is None else {"aux_loss": result.aux_loss}),
        **result.metrics,
        "grad_norm": result.grad_norm,
        "learning_rate": rate,
        "num_tokens": result.num_tokens,
        "num_valid_tokens": result.num_valid_tokens,
        "seconds": round(seconds, 6),
        "tokens_per_s": round(result.num_tokens / seconds, 3),
        "split": split,
        "applied": result.applied,
    }
    if roofline is not None:
        least_s, name = roofline.of(result.num_tokens)
        # The roofline is a prediction: a step may be faster, and is then at it.
        metrics |= {"of_roofline": round(min(1.0, least_s / seconds), 4), "roofline": name}
    if result.nonfinite is not None:
        metrics["fault"] = str(result.nonfinite)
    return metrics

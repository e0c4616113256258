"""Training, from a config to a model that has learned.

    with Trainer(config) as trainer:
        trainer.train()
        trainer.export("out")

Each step: take a batch, let the engine train on it, write a line to metrics.jsonl. On schedule:
evaluate, let the model write, save. Everything the run knows about itself is in its folder.

Laws (tests/run/test_trainer.py, test_resume.py)
    1. Weights after a run are those of the engine given the same batches.
    2. Every step has its line in metrics.jsonl, also in a run that dies.
    3. Counts are of real tokens; a step's split adds up to its time.
    4. A run that was stopped and resumed, however often, ends in the bits of one that was not, and
       has the same lines, except for times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from megatrain.config import Config
from megatrain.disk.hf.export import Origin
from megatrain.disk.hf.source_mark import source_mark
from megatrain.errors import DiskError, Interrupted, NonFiniteStep
from megatrain.memory.kinds import Kind
from megatrain.run.best_model import load_best
from megatrain.run.checkpoints import Checkpoints
from megatrain.run.console import Live
from megatrain.run.evaluation.mean_loss import mean_loss
from megatrain.run.evaluation.samples import samples_in_words, writes_after, written_texts
from megatrain.run.folder import RunFolder, machine_facts
from megatrain.run.interrupts import Interrupts
from megatrain.run.opening import places
from megatrain.run.opening.assembly import learning_rate
from megatrain.run.opening.balancing import balancing_note
from megatrain.run.opening.first_lines import data_lines, opening_line, tier_lines
from megatrain.run.opening.opening import Opening, open_run
from megatrain.run.opening.planned import facts, in_words, predicted_against_measured
from megatrain.run.opening.resumption import KEPT, LoadedCheckpoint, resume
from megatrain.run.saving import Saving
from megatrain.run.sinks import Sinks
from megatrain.run.state import Outcome, RunState
from megatrain.run.step_time import step_metrics, step_split

KEPT_FOR_PATIENCE = "eval.patience: the best checkpoint is kept and exported, as with save.best"
NOTHING_TO_JUDGE = "save.best: data.eval is null, so there is no best model; the last is used"
TRACED_STEP = 3
"""The first ones warm up."""
MOST_ROLLBACKS = 3
"""From one checkpoint: more would mean that something else is wrong."""


class Trainer:
    """One run. Use it in a `with` block, or `close` it."""

    def __init__(
        self,
        config: Config,
        *,
        resume: bool = False,
        dry_run: bool = False,
        interrupts: Interrupts | None = None,
    ) -> None:
        """Open the run folder, read the data and load the model: all that can fail early.

        With `resume` continue from the newest complete checkpoint in the folder, or start if it
        has none. With `dry_run` nothing is written, and `train` may not be called. `interrupts`
        are open already, and `train` ends early on their request.
        """
        self.interrupts = interrupts or Interrupts()
        opened = open_run(config, resumes=resume, dry_run=dry_run)
        self.config, self.folder, self.plan = opened.config, opened.folder, opened.plan
        self.device, self.engine, self.home = opened.device, opened.engine, opened.home
        self.tokenizer, self.data = opened.tokenizer, opened.data
        try:
            self._begin(opened, resume)
        except BaseException:
            opened.close()
            raise

    def _begin(self, opened: Opening, wants_resume: bool) -> None:
        """Set the state of the run, and write the known facts into its folder."""
        config, folder = self.config, self.folder
        self.num_steps = self.data.num_steps
        self._rate = learning_rate(config, self.num_steps)
        self._bound = self.plan.bound() if self.plan.knows_time else None
        self.checkpoints = Checkpoints(
            folder.path,
            self.home,
            self.engine,
            keep=config.save.keep,
            keep_best=config.keeps_best,
        )
        self.saving = Saving(
            config, folder, self.checkpoints, self.engine, self.interrupts, self._facts
        )
        self.state = RunState()
        weight_bytes = self.home.store.arena(Kind.HI).nbytes
        self.notes = [
            samples_in_words(config, self.plan, self.num_steps, weight_bytes),
            *data_lines(self.data, needs_count=config.train.steps is None),
            *tier_lines(self.home, self.plan),
            *opened.notes,
        ]
        """Notes on choices and findings while opening."""
        self._rollbacks: list[int] = []
        self._step_seconds: list[float] = []
        self._has_ended = False
        if config.keeps_best != config.save.best:
            self.notes.append(KEPT_FOR_PATIENCE if config.keeps_best else NOTHING_TO_JUDGE)
        if (note := balancing_note(config, self.home.decoder)) is not None:
            self.notes.append(note)
        if (shortage := self.checkpoints.shortage()) is not None:
            self.notes.append(shortage)
        if wants_resume and opened.resumed is None:
            self.notes.append(_nothing_to_resume(folder))
        self._source_mark = (
            source_mark(self.home.source)
            if opened.resumed is None
            else opened.resumed.known.source_mark
        )
        self._take_up(opened.resumed)
        self.notes += folder.write_config(config)
        folder.write_json("machine.json", machine_facts())
        folder.write_json("data_card.json", self.data.card)
        if opened.pins:
            folder.write_json(places.FILE, opened.pins)
            self.notes += places.commits_in_words(opened.pins)
        self._write_plan()

    def _take_up(self, resumed: LoadedCheckpoint | None) -> None:
        """Restore everything but tensors from the checkpoint."""
        if resumed is None:
            self.notes += self.folder.cut({})
            return
        known = resumed.known
        self.engine.restore(resumed.manifest.step, known.num_updates)
        self.data.seek(known.data)
        self.state = known.state
        lost = self.folder.cut(known.lines)
        self.checkpoints.took_up(self.state.step, resumed.path, resumed.damaged)
        self.notes += [f"skipped: {reason}" for reason in resumed.skipped]
        self.notes += [f"changed: {text}" for text in resumed.changed]
        self.notes += [*lost, *resumed.converted]
        self.notes += self._rate_jump(known.learning_rate)
        self.notes.append(f"resumed from {resumed.path.name}")
        record = {"event": "resumed", "step": self.state.step, "checkpoint": resumed.path.name}
        changes = {"skipped": resumed.skipped, "changed": resumed.changed, "lost": lost}
        changes |= {"converted": resumed.converted} if resumed.converted else {}
        self.folder.append("events.jsonl", record | changes)

    def _rate_jump(self, before: float | None) -> list[str]:
        """Return a note if the schedule is not the one that the last step was trained by."""
        step = self.state.step
        if before in (None, self._rate.rate(step - 1)) or step >= self.num_steps:
            return []
        return [
            f"the learning rate jumps: step {step} was trained at {before:.3g}, step {step + 1} "
            f"will be at {self._rate.rate(step):.3g}, because train or optim settings changed"
        ]

    def train(self) -> Outcome:
        """Run all steps; return the result. The run folder then has all facts.

        Raises Interrupted, once the state is saved, if the run is to end early.
        """
        assert not self.folder.is_dry, "a dry run takes no step"
        config, state, began = self.config, self.state, time.monotonic()
        with (
            Live(self.num_steps) as live,
            Sinks(config, self.folder.path, live.say) as self._sinks,
        ):
            self._live = live
            live.say(opening_line(config, self.device, self.home, self.num_steps))
            live.say(in_words(self.plan, self.num_steps))
            for note in self.notes:
                live.say(note)
            self.interrupts.patient = True
            if state.step == 0:
                self._look(0)
            while state.step < self.num_steps and not self._is_over():
                self._take_step(state.step + 1)
                state = self.state
                self.saving.if_due(state.step, live.say)
                self._end_if_asked()
            self.saving.at_end(state.step, live.say)
            if self.interrupts.reason is not None and self.checkpoints.saved_step != state.step:
                raise self._interrupted(self.interrupts.reason)
            self._has_ended = True
            self.interrupts.patient = False
            self._if_possible(self._write_plan)
            if self.plan.knows_time and self._step_seconds:
                live.say(predicted_against_measured(self.plan, self._step_seconds))
            self.saving.report_trouble(live.say)
        return Outcome(
            num_steps=state.step,
            first_loss=math.nan if state.first_loss is None else state.first_loss,
            last_loss=math.nan if state.last_loss is None else state.last_loss,
            eval_loss=state.eval_loss,
            seconds=time.monotonic() - began,
            total_tokens=state.total_tokens,
        )

    def evaluate(self) -> float | None:
        """Return the mean loss over the evaluation's tokens; None without such data."""
        found = mean_loss(self.engine, self.data.eval_batches())
        return None if found is None else found.loss

    def export(self, folder: str | Path) -> str:
        """Write the model as a folder that `from_pretrained` loads; return which one it is.

        A run that keeps its best model gives that one once it has ended; memory then holds it too.
        Otherwise it is the model as it is now.
        """
        self.engine.settle()
        said = f"model of step {self.state.step}"
        origin = Origin(step=self.state.step)
        if self._has_ended and self.config.keeps_best:
            origin, said = load_best(self.checkpoints, self.home, self.state)
        self.home.export(folder, origin=origin)
        return said

    def close(self) -> None:
        """Finish updates and saves, and let go of the device and the folder."""
        try:
            self.engine.close()
        finally:
            self.checkpoints.wait()
            self.home.store.close()
            self.data.close()
            self.folder.close()

    def _take_step(self, step: int) -> None:
        """Train one step, or leave it out; then evaluate if it is time."""
        config, state = self.config, self.state
        try:
            metrics = self._step(step)
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
        state.step, state.eval_loss = step, None
        metrics["total_tokens"] = state.total_tokens
        self.folder.append("metrics.jsonl", metrics)
        if step % config.log.every == 0 or step == self.num_steps:
            self._live.step(metrics)
            self._sinks.log(metrics)
        every = config.eval.every
        if step == self.num_steps or (every is not None and step % every == 0):
            self._look(step)

    def _step(self, step: int) -> dict[str, Any]:
        state, began = self.state, time.monotonic()
        batch = self.data.next_batch()
        if (reason := state.left_out.get(step)) is not None:
            self.engine.leave_out()
            return {"step": step, "applied": False, "fault": f"left out: {reason}"}
        data_seconds = time.monotonic() - began
        trace = self.engine.trace
        assert trace is not None
        trace.spans.clear()
        result = self.engine.step(batch)
        seconds = time.monotonic() - began
        self._step_seconds.append(seconds - data_seconds)
        if step == min(TRACED_STEP, self.num_steps):
            self._if_possible(lambda: self.engine.write_trace(self.folder.path / "trace.json"))
        split = step_split(trace, seconds, data_seconds)
        rate = self._rate.rate(step - 1)
        metrics = step_metrics(step, result, rate, seconds, split, self._bound)
        if result.applied:
            spikes = [state.judge("loss", result.loss)]
            if result.grad_norm is not None:
                spikes.append(state.judge("gradient norm", result.grad_norm))
            if found := [spike for spike in spikes if spike is not None]:
                metrics["spike"] = "; ".join(found)
        state.total_tokens += result.num_tokens
        state.first_loss = result.loss if state.first_loss is None else state.first_loss
        state.last_loss = result.loss
        return metrics

    def _look(self, step: int) -> None:
        """Evaluate, and let the model write."""
        found = mean_loss(self.engine, self.data.eval_batches())
        if found is not None:
            record: dict[str, Any] = {"step": step, **found.metrics()}
            self.saving.best_is_new = self.state.evaluations.is_best(step, found.loss)
            self.state.eval_loss = found.loss
            if step < self.num_steps and self._is_over():
                record |= self.state.evaluations.facts()
            self.folder.append("metrics.jsonl", record)
            self._sinks.log(record)
            self._live.say(f"step {step}: evaluation {found.in_words()}")
            if "stopped_early" in record:
                self._live.say(self.state.evaluations.in_words())
        if not writes_after(step, self.num_steps, self.config):
            return
        asked = self.data.questions(self.config.eval.samples)
        for record in written_texts(self.engine, self.home, self.tokenizer, asked):
            self.folder.append("samples.jsonl", {"step": step, **record})

    def _facts(self) -> dict[str, Any]:
        """Return what a checkpoint knows of the run, besides tensors and lines."""
        return {
            "run": self.state.to_json(),
            "eval_loss": self.state.eval_loss,
            "data": self.data.state(),
            "config": self.config.model_dump(mode="json"),
            **{name: getattr(self.plan.settings, name) for name in KEPT},
            "learning_rate": self._rate.rate(self.state.step - 1) if self.state.step else None,
            "source_mark": self._source_mark,
        }

    def _if_possible(self, write: Callable[[], None]) -> None:
        """Write what only explains the run: a disk that fails must not end it."""
        try:
            write()
        except (DiskError, OSError) as error:
            self._live.say(f"{error}. Training continues.")

    def _end_if_asked(self) -> None:
        reason = self.interrupts.reason
        if reason is not None:
            self.saving.at_end(self.state.step, self._live.say)
            raise self._interrupted(reason)

    def _interrupted(self, reason: str) -> Interrupted:
        self.folder.append(
            "events.jsonl", {"event": "interrupted", "step": self.state.step, "reason": reason}
        )
        saved = self.checkpoints.saved_step
        return Interrupted(
            f"{reason}: stopped after step {self.state.step} of {self.num_steps}, "
            + (f"saved after step {saved}" if saved is not None else "nothing is saved")
            + "; continue with `megatrain train ... --resume`"
        )

    def _is_over(self) -> bool:
        return self.state.evaluations.is_over(self.config.eval.patience)

    def _roll_back(self, step: int, reason: str) -> None:
        """Go back to the last checkpoint, and leave the step out from then on."""
        self.engine.settle()
        self.checkpoints.wait()
        self.saving.report(self._live.say)
        found = resume(self.checkpoints.folder, self.config, self.home)
        if found is None or self._rollbacks.count(found.manifest.step) == MOST_ROLLBACKS:
            raise NonFiniteStep(
                f"step {step}: {reason}. There is no checkpoint to return to"
                + (f" that was not tried {MOST_ROLLBACKS} times." if found else ".")
            )
        self._rollbacks.append(found.manifest.step)
        left_out = self.state.left_out
        self._take_up(found)
        self.state.left_out |= left_out | {step: reason}
        self._live.say(f"step {step}: {reason}: back to step {self.state.step}, leaving it out")
        record = {"event": "rolled back", "step": step, "to": self.state.step, "reason": reason}
        self.folder.append("events.jsonl", record)

    def _write_plan(self) -> None:
        found = facts(self.plan, self.device, self._step_seconds)
        self.folder.write_json("plan.json", found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _nothing_to_resume(folder: RunFolder) -> str:
    dropped = "; the lines of unsaved steps are dropped" if folder.has_run else ""
    return f"nothing to resume: {folder.path} has no checkpoint. Starting at step 0{dropped}"

"""Training, from a config to a model that has learned.

    with Trainer(config) as trainer:
        trainer.train()
        trainer.export("out")

Each step: take a batch, let the engine train on it, write a line to metrics.jsonl. On schedule:
evaluate, and let the model write. Everything the run knows about itself is in its folder.

Laws (tests/trainer/test_loop.py)
    1. Weights after a run are those of the engine given the same batches.
    2. Every step has its line in metrics.jsonl, also in a run that dies.
    3. Counts are of real tokens; a step's split adds up to its time.
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatrain.config import Config, dump_config
from megatrain.disk.hf import HostModel, load_model
from megatrain.errors import RunFolderError
from megatrain.memory.host import resident_bytes
from megatrain.memory.ledger import Ledger, Line
from megatrain.memory.store import WITH_CLIP, WITHOUT_CLIP, store_ledger
from megatrain.optim.adamw import AdamW
from megatrain.optim.learning_rate import LearningRate
from megatrain.pipeline.batch import StepResult
from megatrain.pipeline.engine import Engine
from megatrain.sampling import continue_texts
from megatrain.trainer.dataset import (
    TrainingData,
    end_tokens,
    load_tokenizer,
    mean_loss,
    open_data,
)
from megatrain.trainer.live import Live
from megatrain.trainer.resolve import Resolved, open_device, refuse_unsupported, resolve
from megatrain.trainer.run_folder import RunFolder, machine_facts
from megatrain.trainer.sinks import Sinks, check_sinks
from megatrain.trainer.step_time import step_split

SAMPLE_TOKENS = 64
TRACED_STEP = 3
"""The first ones warm up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run came to."""

    num_steps: int
    first_loss: float
    last_loss: float
    eval_loss: float | None
    seconds: float
    total_tokens: int


class Trainer:
    """One run. Use it in a `with` block, or `close` it."""

    def __init__(self, config: Config) -> None:
        """Open the run folder, read the data and load the model: all that can fail early."""
        self.config = config
        self.folder = RunFolder(config.run_dir)
        try:
            self._open()
        except BaseException:
            self.folder.close()
            raise

    def _open(self) -> None:
        config, folder = self.config, self.folder
        if folder.has_run:
            raise RunFolderError(
                f"{folder.path}: holds a run already. Give save.dir another folder, or remove it."
            )
        refuse_unsupported(config)
        check_sinks(config.log.to)
        self.device, name = open_device(config)
        self.resolved: Resolved = resolve(config, self.device, name)
        self.tokenizer = load_tokenizer(config.model.name_or_path)
        self.data: TrainingData = open_data(config, self.tokenizer, self.resolved)
        self.num_steps = config.train.steps or self.data.steps_of(config.train.epochs or 1.0)
        self._base_bytes = resident_bytes()
        late = self.resolved.update == "late"
        self.home: HostModel = load_model(
            config.model.name_or_path,
            dtype=config.model.dtype,
            kinds=WITH_CLIP if late else WITHOUT_CLIP,
            frozen=config.model.frozen,
            attn=None if config.model.attn == "auto" else config.model.attn,
        )
        self._rate = _learning_rate(config, self.num_steps).rate
        self.engine = self._make_engine()
        folder.write_text("config.yaml", dump_config(config))
        folder.write_json("machine.json", machine_facts())
        folder.write_json("data_card.json", self.data.card)
        self._write_plan()

    def _make_engine(self) -> Engine:
        config, resolved = self.config, self.resolved
        optimizer = AdamW(
            self.home.store,
            learning_rate=self._rate,
            betas=config.optim.betas,
            eps=config.optim.eps,
            weight_decay=config.optim.weight_decay,
            no_decay=config.optim.no_decay,
            max_grad_norm=config.train.max_grad_norm,
            num_threads=max(1, len(os.sched_getaffinity(0)) // 2),
        )
        return Engine(
            self.home.decoder,
            self.home.store,
            optimizer=optimizer,
            update=resolved.update,
            device=self.device,
            num_slots=resolved.slots,
            tape=resolved.tape,
            chunk_tokens=config.memory.chunk_tokens,
            seed=config.train.seed,
            trace=True,
            on_nonfinite=config.train.on_nonfinite,
            compile=config.train.compile,
            gather_embedding=config.memory.gather_embedding,
        )

    def train(self) -> Outcome:
        """Run all steps; return what came of it. The run folder then explains itself."""
        config, began = self.config, time.monotonic()
        losses: list[float] = []
        total_tokens, eval_loss = 0, None
        with (
            Live(self.num_steps) as live,
            Sinks(config, self.folder.path, live.say) as self._sinks,
        ):
            live.say(self._opening())
            live.say("no checkpoints are written yet: the model is saved when the run ends")
            eval_loss = self._look(0, live)
            for step in range(1, self.num_steps + 1):
                metrics, result = self._step(step)
                total_tokens += result.num_tokens
                losses.append(result.loss)
                metrics |= {"total_tokens": total_tokens}
                self.folder.append("metrics.jsonl", metrics)
                if step % config.log.every == 0 or step == self.num_steps:
                    live.step(metrics)
                    self._sinks.log(metrics)
                every = config.eval.every
                if step == self.num_steps or (every is not None and step % every == 0):
                    eval_loss = self._look(step, live)
            self.engine.settle()
            self._write_plan()
        return Outcome(
            num_steps=self.num_steps,
            first_loss=losses[0],
            last_loss=losses[-1],
            eval_loss=eval_loss,
            seconds=time.monotonic() - began,
            total_tokens=total_tokens,
        )

    def evaluate(self) -> float | None:
        """Return the mean loss over the evaluation's tokens; None without such data."""
        found = mean_loss(self.engine, self.data.eval_batches())
        return None if found is None else found[0]

    def export(self, folder: str | Path) -> None:
        """Write the model as a folder that `from_pretrained` loads."""
        self.engine.settle()
        self.home.export(folder)

    def close(self) -> None:
        """Finish updates and let go of the device and the folder."""
        try:
            self.engine.close()
        finally:
            self.data.close()
            self.folder.close()

    def _step(self, step: int) -> tuple[dict[str, Any], StepResult]:
        began = time.monotonic()
        batch = self.data.next_batch()
        data_seconds = time.monotonic() - began
        trace = self.engine.trace
        assert trace is not None
        trace.spans.clear()
        result = self.engine.step(batch)
        seconds = time.monotonic() - began
        if step == min(TRACED_STEP, self.num_steps):
            self.engine.write_trace(self.folder.path / "trace.json")
        metrics: dict[str, Any] = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": self._rate(step - 1),
            "num_tokens": result.num_tokens,
            "num_trained": result.num_trained,
            "seconds": round(seconds, 6),
            "tokens_per_s": round(result.num_tokens / seconds, 3),
            "split": step_split(trace, seconds, data_seconds),
            "applied": result.applied,
        }
        if result.fault is not None:
            metrics["fault"] = str(result.fault)
        return metrics, result

    def _look(self, step: int, live: Live) -> float | None:
        """Evaluate, and let the model write."""
        loss = self.evaluate()
        if loss is not None:
            record = {"step": step, "eval_loss": loss, "eval_perplexity": perplexity(loss)}
            self.folder.append("metrics.jsonl", record)
            self._sinks.log(record)
            live.say(f"step {step}: evaluation loss {loss:.4f}, perplexity {perplexity(loss):.4g}")
        self._sample(step)
        return loss

    def _sample(self, step: int) -> None:
        prompts = self.data.prompts(self.config.eval.samples)
        if not prompts:
            return
        made = continue_texts(self.engine, prompts, SAMPLE_TOKENS, end_tokens(self.tokenizer))
        for prompt, tokens in zip(prompts, made, strict=True):
            texts = {"prompt": self._text(prompt), "text": self._text(tokens)}
            self.folder.append("samples.jsonl", {"step": step, **texts})

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens)))

    def _opening(self) -> str:
        resolved, card = self.resolved, self.data.card
        num_params = sum(param.num_elements for param in self.home.decoder.params)
        return (
            f"{num_params:,} params of {self.config.model.name_or_path} on {resolved.device}, "
            f"{self.num_steps} steps of {self.config.train.batch_tokens:,} tokens, "
            f"{card.get('rows', 0):,} rows; run folder {self.folder.path}"
        )

    def _write_plan(self) -> None:
        base = Line(place="host", purpose="Python and libraries", num_bytes=self._base_bytes)
        ledger = Ledger([base]) + store_ledger(self.home.store.layout, self.home.store.kinds)
        lines = [
            {"place": line.place, "purpose": line.purpose, "num_bytes": line.num_bytes}
            for line in ledger.lines
        ]
        measured = {
            "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            "device_peak_bytes": self.device.peak_bytes,
        }
        settings = self.resolved.facts()
        plan = {"ledger": lines, "measured": measured, "settings": settings}
        self.folder.write_json("plan.json", plan)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()


def _learning_rate(config: Config, num_steps: int) -> LearningRate:
    optim = config.optim
    return LearningRate(
        peak=optim.learning_rate,
        shape=optim.schedule,
        num_steps=num_steps,
        warmup=optim.warmup,
        decay=optim.decay,
        final_fraction=optim.final_fraction,
    )


def perplexity(loss: float) -> float:
    """Return what a mean loss is as a perplexity; finite, however large the loss."""
    return math.exp(min(loss, 700.0))

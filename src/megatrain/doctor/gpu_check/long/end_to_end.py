"""Part `end_to_end`: `megatrain train` as a user starts it, whole, and killed and resumed.

    whole    20 steps; how long until the first of them is done
    killed   the same run, ended by SIGKILL once it has saved step 10 and gone on
    resumed  with --resume; its losses against those of the whole run

A model of random weights and rows of random tokens are written beside the results, and removed with
the runs. Kernels that sum in a changing order (attention's backward on CUDA, unless deterministic
ones are asked for) let losses differ in their last digits: the page says by how much.

Laws (tests/doctor/gpu_check/long/test_end_to_end.py)
    1. A run that continues with other weights than it had is found.
    2. The model leaves room on the disk; where nothing fits, the part says so.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megatrain.config.load import write_yaml
from megatrain.doctor.gpu_check.long.given import Given
from megatrain.doctor.gpu_check.long.long_model import LongModel, forms
from megatrain.doctor.gpu_check.long.results import CannotRun
from megatrain.doctor.gpu_check.long.running import PART
from megatrain.doctor.timed_step import TimedModel
from megatrain.files import make_folder, remove_folder, write_file
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.search import Search
from megatrain.text import duration, figure, size

STEPS, SAVED_STEP, KILLED_STEP = 20, 10, 12
DISK_BYTES = 40
"""Free disk for each parameter: the model, and two checkpoints of 14 bytes, with room."""
STEP_S = 1.5
"""The most that a step may take by the rate of products, on a device that is fast."""
_POLL_S = 0.02
_CONFIG = """\
model: {{name_or_path: {model}, dtype: bf16}}
data: {{train: {rows}, max_length: {length}}}
train: {{steps: {steps}, batch_tokens: {tokens}}}
optim: {{learning_rate: 1e-4}}
memory: {{device: "{device}"}}
save: {{dir: {run}, every: {saved}, keep: 1}}
log: {{every: 1}}
"""


def measure(given: Given) -> dict[str, Any]:
    """Return the times of the three runs, and how far losses are apart."""
    free = shutil.disk_usage(given.scratch).free
    model = model_for(given.profile, given.scale, free)
    form = model.form
    params = _write_model(given.scratch, form)
    _write_rows(given.scratch, form, model.step_tokens)
    given.say(f"{STEPS} steps of {figure(params)} parameters, whole")
    whole = _Run(given, model, "whole")
    whole.wait(lambda: False)
    remove_folder(whole.folder)  # its checkpoints; the metrics were read
    began = f"The first step was done after {duration(whole.first_s)}."
    figures = model.facts() | {
        "params": params,
        "first_step_s": whole.first_s,
        "free_disk_bytes": free,
    }
    given.keep({"lead": began, "figures": figures, "tables": {"Runs": [whole.facts()]}})
    given.say(f"the same, killed after step {KILLED_STEP}")
    killed = _Run(given, model, "killed")
    killed.wait(lambda: killed.has_saved() and killed.num_steps() >= KILLED_STEP)
    given.say("resumed")
    resumed = _Run(given, model, "killed", "--resume")
    resumed.wait(lambda: False)
    rows = [run.facts() for run in (whole, killed, resumed)]
    apart = differences(whole.losses, resumed.losses)
    most = max(apart.values(), default=float("inf"))
    is_whole = sorted(apart) == list(range(1, STEPS + 1))
    then = "lacks steps"
    if is_whole:
        far = f"has losses that differ by {most:.2g} at most"
        then = far if most else "continues with the same bits"
    lead = f"{began} The run that was killed {then}."
    figures |= {
        "resumed_first_step_s": resumed.first_s,
        "largest_difference": most,
        "compared_steps": len(apart),
    }
    losses = [
        {"step": step, "whole": whole.losses[step], "killed_and_resumed": resumed.losses[step]}
        for step in sorted(apart)
    ]
    return {"lead": lead, "figures": figures, "tables": {"Runs": rows, "Losses": losses}}


def model_for(profile: MachineProfile, scale: float, free_disk: int) -> LongModel:
    """Return the largest model that memory, disk and time allow. Raises CannotRun."""
    flops, smallest = max(point.flops for point in profile.forward_flops), None
    for model in forms():
        workload = model.workload(model.step_tokens, packed=True)
        params = workload.model.params
        if params * DISK_BYTES > free_disk or Search(profile, workload).first_home() is None:
            continue
        smallest = model
        if 8 * params * model.step_tokens / flops <= scale * STEP_S:
            break
    if smallest is None:
        raise CannotRun(f"no model is small enough for {size(free_disk)} of disk and this memory")
    return smallest


def differences(first: Mapping[int, float], second: Mapping[int, float]) -> dict[int, float]:
    """Return how far the losses of each step that both have are apart."""
    return {step: abs(first[step] - second[step]) for step in first if step in second}


class _Run:
    """One process of `megatrain train`."""

    def __init__(self, given: Given, model: LongModel, name: str, *words: str) -> None:
        self.folder = given.scratch / name
        self._name, self._given = f"{name}{''.join(words)}", given
        config = given.scratch / f"{name}.yaml"
        text = _CONFIG.format(
            model=write_yaml(str(given.scratch / "model")),
            rows=write_yaml(str(given.scratch / "rows.jsonl")),
            run=write_yaml(str(self.folder)),
            length=model.form.length,
            steps=STEPS,
            tokens=model.step_tokens,
            device=given.subject.place,
            saved=SAVED_STEP,
        )
        write_file(config, text.encode(), durable=False)
        self._before = self.num_steps()
        self._begin = time.monotonic()
        self.first_s = self.seconds = 0.0
        self.losses: dict[int, float] = {}
        environment = {k: v for k, v in os.environ.items() if k != PART}
        quiet = {"MEGATRAIN_MEASURE": "0", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [*given.command, "train", str(config), *words],
            env=environment | quiet,
            stdin=subprocess.DEVNULL,
            stdout=2,  # into the log of the part
        )

    def wait(self, should_die: Callable[[], bool]) -> None:
        """Wait for the end, or bring it about. Raises CannotRun if it fails, or takes too long."""
        was_killed = False
        while self._process.poll() is None:
            if not self.first_s and self.num_steps() > 0 and self._is_new():
                self.first_s = time.monotonic() - self._begin
            if should_die() or self._given.left_s() < 0:
                was_killed = self._given.left_s() >= 0
                self._process.send_signal(signal.SIGKILL)
                self._process.wait()
            time.sleep(_POLL_S)
        self.seconds = time.monotonic() - self._begin
        self.losses = {line["step"]: line["loss"] for line in self._lines() if "loss" in line}
        if self._process.returncode and not was_killed:
            late = "its time was over" if self._given.left_s() < 0 else "see end_to_end.log"
            code = self._process.returncode
            raise RuntimeError(f"the run {self._name} ended with exit code {code}: {late}")

    def has_saved(self) -> bool:
        return (self.folder / "last").exists()

    def num_steps(self) -> int:
        return sum("loss" in line for line in self._lines())

    def facts(self) -> dict[str, Any]:
        return {
            "run": self._name,
            "seconds": self.seconds,
            "first_step_s": self.first_s,
            "steps": len(self.losses),
        }

    def _is_new(self) -> bool:
        """Whether a step of this process is in the file; a resumed run cuts what it repeats."""
        return self.num_steps() != self._before

    def _lines(self) -> Sequence[Mapping[str, Any]]:
        try:
            text = (self.folder / "metrics.jsonl").read_text()
        except OSError:
            return ()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _write_model(folder: Path, form: TimedModel) -> int:
    """Write a model of random weights and a tokenizer; return its number of parameters."""
    make_folder(folder / "model")
    form.config().save_pretrained(folder / "model")
    words = {f"w{number}": number for number in range(form.vocabulary)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0", eos_token="w1")
    tokenizer.save_pretrained(folder / "model")
    generator, tensors = torch.Generator().manual_seed(0), {}
    for param in form.decoder().params:
        weight = torch.ones(param.shape, dtype=torch.bfloat16)
        if len(param.shape) > 1:
            weight.normal_(0.0, 0.02, generator=generator)
        tensors[param.name] = weight
    save_file(tensors, folder / "model" / "model.safetensors", metadata={"format": "pt"})
    return sum(weight.numel() for weight in tensors.values())


def _write_rows(folder: Path, form: TimedModel, step_tokens: int) -> None:
    """Write rows of random tokens, enough for all steps."""
    generator = torch.Generator().manual_seed(1)
    num_rows = 4 + STEPS * step_tokens // form.length
    ids = torch.randint(2, form.vocabulary, (num_rows, form.length), generator=generator)
    lines = (json.dumps({"input_ids": row}) + "\n" for row in ids.tolist())
    write_file(folder / "rows.jsonl", "".join(lines).encode(), durable=False)

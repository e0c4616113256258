"""Tiny runs that can be stopped anywhere, and what two of them must have in common."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from megatrain.cli.demo import byte_tokenizer
from megatrain.config import Config
from megatrain.engine import actions
from megatrain.memory.kinds import TensorKind
from megatrain.optim.states import STATES
from megatrain.run.evaluation.mean_loss import MeanLoss
from megatrain.run.interrupts import Interrupts
from megatrain.run.trainer import Trainer
from megatrain.step.ops import Op

NUM_STEPS = 9
TIMES = ("seconds", "tokens_per_s", "split", "of_roofline", "draw_seconds")
State = dict[tuple[str, TensorKind], torch.Tensor]


class Killed(BaseException):
    """Stands for a death at a given place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One kind of run."""

    clips: bool = True
    packing: bool = True
    micro_batches: bool = True
    dropout: float = 0.0
    dtype: str = "bf16"
    save_every: int | None = 2
    keep: int = 2
    best: bool = False
    eval_every: int | None = 3
    tape: str = "device"
    frozen: bool = False
    optimizer: str = "adamw"
    state: str | None = "fp32"
    """None: the config does not name it."""
    tier: str = "none"
    """Other than none only under `forced_tier`."""


def setting_of(number: int) -> Setting:
    """Return a setting at random, the same for the same number."""
    draw = random.Random(number)
    return Setting(
        clips=draw.random() < 0.5,
        packing=draw.random() < 0.5,
        micro_batches=draw.random() < 0.7,
        dropout=draw.choice([0.0, 0.1]),
        dtype=draw.choice(["bf16", "fp32"]),
        save_every=draw.choice([1, 2, 3, None]),
        keep=draw.choice([1, 2]),
        best=draw.random() < 0.3,
        eval_every=draw.choice([2, 3, None]),
        tape=draw.choice(["device", "host"]),
        frozen=draw.random() < 0.2,
        state=list(STATES["adamw"])[number % 3],
    )


def write_model(
    folder: Path,
    dropout: float,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> None:
    """Write a tiny model with a tokenizer of bytes; `changes` are those of its config."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 2} | changes
    config = LlamaConfig(
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=False, attention_dropout=dropout, pad_token_id=0, eos_token_id=1,
        bos_token_id=None, **sizes,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)


def write_world(folder: Path, num_rows: int = 60) -> None:
    """Write two models, with and without dropout, and some rows."""
    write_model(folder / "model-0.0", 0.0)
    write_model(folder / "model-0.1", 0.1)
    draw = random.Random(0)
    rows = []
    for _ in range(num_rows):
        first, second = draw.randrange(10**4), draw.randrange(10 ** draw.randrange(1, 6))
        turns = [{"role": "user", "content": f"{first} + {second}"}]
        turns.append({"role": "assistant", "content": str(first + second)})
        rows.append(json.dumps({"messages": turns}) + "\n")
    (folder / "rows.jsonl").write_text("".join(rows))


def config_of(world: Path, run: Path, setting: Setting, **changes: Any) -> Config:
    frozen = ["model.embed_tokens*"] if setting.frozen else []
    model = {"name_or_path": str(world / f"model-{setting.dropout}"), "dtype": setting.dtype}
    train = {
        "steps": NUM_STEPS,
        "batch_tokens": 192,
        "micro_batch_tokens": 64 if setting.micro_batches else 192,
        "max_grad_norm": 1.0 if setting.clips else None,
    }
    values: dict[str, Any] = {
        "model": model | {"frozen": frozen},
        "data": {
            "train": str(world / "rows.jsonl"),
            "eval": 0.1,
            "max_length": 64,
            "packing": setting.packing,
        },
        "train": train,
        "optim": {
            "name": setting.optimizer,
            "learning_rate": 1e-2,
            "schedule": "cosine",
            "warmup": 2,
            **({} if setting.state is None else {"state": setting.state}),
        },
        "memory": {
            "device": "cpu",
            "tape": setting.tape,
            "disk": None if setting.tier == "none" else str(world),
        },
        "eval": {"every": setting.eval_every, "samples": 1},
        "save": {
            "dir": str(run),
            "every": setting.save_every,
            "keep": setting.keep,
            "best": setting.best,
        },
        "log": {"every": 100},
    }
    for section, keys in changes.items():
        values[section] = values.get(section, {}) | keys
    return Config.model_validate(values)


class StopAfter(Interrupts):
    """Asks a run to end after a step."""

    trainer: Trainer

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    @property
    def reason(self) -> str | None:
        return "a test" if self.trainer.state.global_step >= self._step else None

    @reason.setter
    def reason(self, value: str | None) -> None:
        pass


def judge_by(patch: pytest.MonkeyPatch, losses: Iterable[float]) -> None:
    """Let the evaluations of a run have these losses."""
    given = iter(losses)

    def judged(engine: object, batches: object, *_: object, **__: object) -> MeanLoss:
        return MeanLoss(loss=next(given), num_valid_tokens=1, aux_loss=None)

    patch.setattr("megatrain.run.evaluation.mean_loss.mean_loss", judged)


def poison_at(patch: pytest.MonkeyPatch, step: int, value: float) -> None:
    """Let the loss's gradient be `value` times itself in one step, whenever it is taken."""
    real = actions.StepActions._pass_gradient

    def spoilt(self: actions.StepActions, op: Op, gradient: torch.Tensor | None) -> None:
        if gradient is not None and self._step == step:
            gradient = gradient * value
        real(self, op, gradient)

    patch.setattr(actions.StepActions, "_pass_gradient", spoilt)


def state_of(trainer: Trainer) -> State:
    store = trainer.home.store
    return {
        (name, kind): (
            store.narrow(name) if place.param.form else store.at_rest(name, kind)
        ).clone()
        for name, place in store.layout.places.items()
        for kind in store.kinds
        if kind is not TensorKind.GRAD and place.has(kind)
    }


def run(
    config: Config, *, resume: bool = False, stop: int | None = None, die: int | None = None
) -> State | None:
    """Train to the end and return the state; or stop politely, or die after a step's line."""
    interrupts = None if stop is None else StopAfter(stop)
    with Trainer(config, interrupts=interrupts) as trainer:
        if interrupts is not None:
            interrupts.trainer = trainer
        if die is not None:
            _let_die(trainer, die)
        try:
            trainer.train(resume_from_checkpoint=resume)
        except Killed:
            return None
        return state_of(trainer)


def _let_die(trainer: Trainer, at: int) -> None:
    if_due = trainer.saving.if_due

    def die_or_save(step: int, say: Callable[[str], None], **asked: bool) -> None:
        if step == at:
            trainer.checkpoints.wait()  # a save of an earlier step, on a busy machine
            raise Killed
        if_due(step, say, **asked)

    trainer.saving.if_due = die_or_save  # type: ignore[method-assign]


def lines_of(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Return a run's lines without what depends on the clock."""
    lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return every name under a folder, when it was changed, and what it holds."""
    return {
        path.relative_to(folder).as_posix(): (
            path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in sorted(folder.rglob("*"))
    }


def unequal(ended: State | None, expected: State | None) -> list[str]:
    """Return the tensors that two states do not have in common, in every bit."""
    if ended is None or expected is None or ended.keys() != expected.keys():
        return ["other tensors"]
    return [
        f"{kind} of {name}"
        for (name, kind), value in expected.items()
        if not torch.equal(ended[name, kind].view(torch.uint8), value.view(torch.uint8))
    ]


def differences(
    world: Path, ended: State | None, run: Path, whole: tuple[State, Path]
) -> list[str]:
    """Return what a run has not in common with the uninterrupted one."""
    expected, at = whole
    found = unequal(ended, expected)
    if ended is None or ended.keys() != expected.keys():
        return found
    found += [
        name
        for name in ("metrics.jsonl", "samples.jsonl")
        if lines_of(run, name) != lines_of(at, name)
    ]
    return found

"""Invariants of trl_run.py: `megatrain train --rewards`, with TRL's own trainer inside."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import megatrain as mt
from megatrain.errors import ConfigError, DataError, Interrupted, RewardError
from megatrain.run.interrupts import Interrupts
from megatrain.run.trainer import Trainer

pytestmark = [
    pytest.mark.merge,
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None,
        reason="trl is not installed; run this in the environment of `python -m proofs.trainers`",
    ),
]
REWARD = """
import os

CALLS = []

def letters(completions, answer, **_):
    CALLS.append(len(completions))
    if os.environ.get("FAIL_AT") == str(len(CALLS)):
        raise KeyError("spoiled")
    return [len(set(text)) + 0.1 * len(a) for text, a in zip(completions, answer)]

def short(completions, **_):
    return [-float(len(text)) for text in completions]
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from proofs.trainers.cases import write_model

    path: Path = tmp_path_factory.mktemp("world")
    write_model(path / "model", "llama")
    rows = [{"prompt": f"{n} + {n * 7 % 13} = ", "answer": str(n)} for n in range(14)]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "reward.py").write_text(REWARD)
    return path


def config_of(world: Path, run: Path, **sections: Any) -> mt.Config:
    given: dict[str, Any] = {
        "model": {"name_or_path": str(world / "model"), "dtype": "fp32"},
        "data": {
            "train": str(world / "rows.jsonl"),
            "eval": 0.15,
            "max_length": 64,
            "chat_template": "none",
        },
        "loss": "grpo",
        "rollouts": {"samples": 2, "max_new_tokens": 6},
        "train": {"steps": 6, "batch_rows": 4},
        "optim": {"learning_rate": 1e-3, "schedule": "cosine"},
        "eval": {"every": 4, "samples": 2},
        "memory": {"device": "cpu"},
        "save": {"dir": str(run), "every": 2},
    }
    for name, section in sections.items():
        known = given.get(name, {})
        given[name] = {**known, **section} if isinstance(known, dict) else section
    return mt.Config(**given)


def trainer_of(world: Path, run: Path, *, names: tuple[str, ...] = (), **sections: Any) -> Trainer:
    from megatrain.integrations.reward_functions import load_reward_functions
    from megatrain.integrations.trl_run import open_with

    file = world / "reward.py"
    functions = load_reward_functions([f"{file}:{name}" for name in names or ("letters",)])
    functions[0].function.__globals__["CALLS"].clear()
    return Trainer(
        config_of(world, run, **sections),
        interrupts=Interrupts(),
        open_external=open_with(functions),
    )


def trained(world: Path, run: Path, *, resume: bool = False, **given: Any) -> dict[str, Tensor]:
    with trainer_of(world, run, **given) as trainer:
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(run / "out")
    return load_file(run / "out" / "model.safetensors")


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_has_what_every_run_has(world: Path, tmp_path: Path) -> None:
    with trainer_of(world, tmp_path, names=("letters", "short=0.1")) as trainer:
        outcome = trainer.train()
    steps = [line for line in lines(tmp_path) if "grad_norm" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert {"loss", "reward", "rewards/letters/mean", "rewards/short/mean", "num_tokens",
            "learning_rate", "draw_seconds", "split"} <= steps[0].keys()  # fmt: skip
    judged = [line for line in lines(tmp_path) if "eval_reward" in line]
    assert [line["step"] for line in judged] == [0, 4, 6]
    assert judged[0]["eval_loss"] == -judged[0]["eval_reward"]
    samples = [json.loads(x) for x in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert {"step", "prompt", "text", "reward"} <= samples[0].keys()
    held = {one["prompt"] for one in samples if one["step"] == 0}
    assert held == {one["prompt"] for one in samples if one["step"] == 6}
    assert len(held) == 2
    assert {"plan.json", "config.yaml", "machine.json"} <= {p.name for p in tmp_path.iterdir()}
    assert outcome.last_reward == steps[-1]["reward"]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "same answers twice": {"rollouts": {"iterations": 2}, "train": {"steps": 9}},
    "reference": {"loss": {"name": "grpo", "kl": 0.1}},
    "adapters": {"lora": {"rank": 2}},
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(
    world: Path, tmp_path: Path, case: str
) -> None:
    """An epoch has two draws of four prompts of eleven: a resume is in the third one."""
    name = "adapter_model" if case == "adapters" else "model"
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"

    def run(folder: Path, stop_after: int | None, *, resume: bool) -> None:
        with trainer_of(world, folder, **CASES[case]) as trainer:
            if stop_after is not None:
                interrupt_after(trainer, stop_after)
                with pytest.raises(Interrupted, match=f"saved after step {stop_after}"):
                    trainer.train(resume_from_checkpoint=resume)
                return
            trainer.train(resume_from_checkpoint=resume)
            trainer.save_model(folder / "out")

    run(whole, None, resume=False)
    for at in (1, 5):
        run(stopped, at, resume=at > 1)
    run(stopped, None, resume=True)
    found = [load_file(one / f"out/{name}.safetensors") for one in (whole, stopped)]
    assert same(*found)
    figures = [[(line["step"], line["loss"]) for line in lines(one) if "loss" in line]
               for one in (whole, stopped)]  # fmt: skip
    assert figures[0] == figures[1]


def interrupt_after(trainer: Trainer, step: int) -> None:
    """Ask the run to end after a step, as SIGTERM does."""
    take = trainer.data.take_step  # type: ignore[union-attr]

    def taken() -> Any:
        found = take()
        if trainer.state.global_step + 1 == step:
            trainer.interrupts.reason = "SIGTERM"
        return found

    trainer.data.take_step = taken  # type: ignore[method-assign,union-attr]


def test_other_random_states_would_be_noticed(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatrain.integrations import trl_run

    with trainer_of(world, tmp_path / "stopped") as trainer:
        interrupt_after(trainer, 1)
        with pytest.raises(Interrupted):
            trainer.train()
    monkeypatch.setattr(trl_run, "_restore_random_states", lambda states: torch.manual_seed(5))
    again = trained(world, tmp_path / "stopped", resume=True)
    monkeypatch.undo()
    assert not same(again, trained(world, tmp_path / "whole"))


def test_a_signal_saves_and_ends_the_run(world: Path, tmp_path: Path) -> None:
    with Interrupts() as interrupts:
        with trainer_of(world, tmp_path) as trainer:
            trainer.interrupts = interrupts
            trainer.saving._interrupts = trainer.saving.requests._interrupts = interrupts
            take: Callable[[], Any] = trainer.data.take_step  # type: ignore[union-attr]

            def taken() -> Any:
                if trainer.state.global_step == 2:
                    threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
                return take()

            trainer.data.take_step = taken  # type: ignore[method-assign,union-attr]
            with pytest.raises(Interrupted, match=r"SIGTERM: stopped after step [34].*--resume"):
                trainer.train()
        interrupts.reason = None


def test_a_reward_that_fails_is_named_and_the_run_is_saved(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first call is the evaluation before the first step.
    monkeypatch.setenv("FAIL_AT", "5")
    message = r"reward.py:letters raised KeyError: 'spoiled' \(reward.py, line 9\).*after step 3"
    with trainer_of(world, tmp_path / "run") as trainer, pytest.raises(RewardError, match=message):
        trainer.train()
    monkeypatch.delenv("FAIL_AT")
    again = trained(world, tmp_path / "run", resume=True)
    assert same(again, trained(world, tmp_path / "whole"))


def test_settings_that_trl_cannot_honor_are_named(world: Path, tmp_path: Path) -> None:
    from megatrain.integrations.trl_run import require_supported

    config = config_of(world, tmp_path, train={"on_spike": "rollback"})
    with pytest.raises(ConfigError, match=r"cannot honor: train\.on_spike: rollback"):
        require_supported(config)
    with pytest.raises(DataError, match=r"there are 11 prompts, and train\.batch_rows is 50"):
        trainer_of(world, tmp_path, train={"batch_rows": 50})


Pairs = list[tuple[dict[str, Any], dict[str, Any]]]


def beside_trl(world: Path, tmp_path: Path, **changes: Any) -> Pairs:
    """Return each step of a run at temperature 0.7, and of TRL's own trainer with `changes`.

    TRL's trainer gets the answers that the run has drawn, and trains its own model.
    """
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sections: dict[str, Any] = {
        "rollouts": {"temperature": 0.7},
        "optim": {"schedule": "constant", "warmup": 0},
        "data": {"eval": None},
        "save": {"every": None},
    }
    drawn: list[tuple[Any, Any]] = []
    with trainer_of(world, tmp_path / "run", **sections) as trainer:
        inner: Any = trainer.data._trainer  # type: ignore[union-attr]
        turn = inner._generate_single_turn

        def noted(prompts: Any, *more: Any, **named: Any) -> Any:
            found = turn(prompts, *more, **named)
            drawn.append((prompts, found[0]))
            return found

        inner._generate_single_turn = noted
        args = inner.args
        trainer.train()
        rows = [dict(row) for row in inner.train_dataset]
    given = {"learning_rate": 1e-3, "max_grad_norm": 1.0, "output_dir": str(tmp_path / "theirs")}
    changed = trl.GRPOConfig(**{**_given(args), **given, **changes})
    waiting = iter(drawn)

    def roll_out(asked: Any, _: Any) -> dict[str, Any]:
        prompts, completions = next(waiting)
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": None}

    theirs = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(world / "model", dtype=torch.float32),
        args=changed,
        reward_funcs=list(inner.reward_funcs),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(world / "model"),
        rollout_func=roll_out,
    )
    theirs._get_train_sampler = inner._get_train_sampler
    theirs.train()
    found = [line for line in lines(tmp_path / "run") if "grad_norm" in line]
    expected = [line for line in theirs.state.log_history if "grad_norm" in line]
    return list(zip(found, expected, strict=True))


@pytest.fixture
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.mark.usefixtures("_quiet")
def test_steps_are_those_of_trl_with_the_same_arguments(world: Path, tmp_path: Path) -> None:
    for ours, theirs in beside_trl(world, tmp_path):
        assert ours["reward"] == pytest.approx(theirs["reward"], abs=1e-6)
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)


@pytest.mark.usefixtures("_quiet")
def test_another_temperature_of_the_loss_would_be_noticed(world: Path, tmp_path: Path) -> None:
    ours, theirs = beside_trl(world, tmp_path, temperature=1.0)[0]
    assert ours["grad_norm"] != pytest.approx(theirs["grad_norm"], rel=1e-2)


def _given(args: Any) -> dict[str, Any]:
    """Return the arguments of TRL that a run sets."""
    names = (
        "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "loss_type",
        "num_generations", "max_completion_length", "temperature", "reward_weights", "use_cpu",
        "shuffle_dataset", "lr_scheduler_type", "seed", "save_strategy", "logging_steps",
        "report_to", "disable_tqdm", "gradient_checkpointing", "bf16", "beta", "weight_decay",
    )  # fmt: skip
    return {name: getattr(args, name) for name in names}

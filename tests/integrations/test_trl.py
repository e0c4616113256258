"""Laws of streamed trainers, with TRL's own. proofs/trainers compares losses."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    EarlyStoppingCallback,
    TrainerCallback,
)

from megatrain.batch import MicroBatch
from megatrain.engine.engine import Engine
from megatrain.errors import CheckpointMismatch, ConfigError
from megatrain.integrations.trl import streamed
from megatrain.models.adapters.lora import LoraConfig
from megatrain.step.settings import StepSettings
from proofs.trainers.cases import CASES, write_model
from proofs.trainers.sides import make_trainer, run

pytestmark = [
    pytest.mark.merge,
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None,
        reason="trl is not installed; run this in the environment of `python -m proofs.trainers`",
    ),
    # TRL 1.16's own default, with transformers from 5.23 on
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    write_model(path, "llama")
    return path


def trainer_of(model: Path, output: Path, name: str = "sft", **changes: Any) -> Any:
    return make_trainer(CASES[name], model, output, is_streamed=True, **changes)


def weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a folder."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    assert one.keys() == other.keys()
    return bool(one) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    model: Path, tmp_path: Path, name: str
) -> None:
    saving: dict[str, Any] = {
        "max_steps": 5,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 9,
    }
    whole = trainer_of(model, tmp_path / "whole", name, **saving)
    whole.train()
    again = trainer_of(model, tmp_path / "again", name, **saving)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert again.state.global_step == 5
    found, expected = ([line["loss"] for line in one.state.log_history if "loss" in line][3:]
                       for one in (again, whole))  # fmt: skip
    assert found == expected
    last = weights(tmp_path / "whole" / "checkpoint-5")
    assert same(weights(tmp_path / "again" / "checkpoint-5"), last)
    assert not same(weights(tmp_path / "whole" / "checkpoint-4"), last)
    for one in (whole, again):
        one.close()


def test_a_checkpoint_without_states_is_refused(model: Path, tmp_path: Path) -> None:
    saving: dict[str, Any] = {
        "max_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_only_model": True,
    }
    trainer = trainer_of(model, tmp_path, **saving)
    trainer.train()
    with pytest.raises(CheckpointMismatch, match="save_only_model"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    trainer.close()


def test_micro_batches_share_the_passes_of_a_step(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[tuple[str, int]] = []

    def noting(name: str) -> Any:
        plain = getattr(Engine, name)

        def noted(engine: Engine, batch: Sequence[MicroBatch], *more: Any, **named: Any) -> Any:
            passes.append((name, len(batch)))
            return plain(engine, batch, *more, **named)

        return noted

    for name in ("forward", "token_outputs"):
        monkeypatch.setattr(Engine, name, noting(name))
    changes = {"max_steps": 2, "gradient_accumulation_steps": 4}
    trainer = trainer_of(model, tmp_path, "dpo", **changes)
    trainer.train()
    trainer.close()
    assert passes == [("forward", 4), ("token_outputs", 4)] * 2


def test_calls_are_cut_into_micro_batches_of_the_settings(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a step is cut, it is the same step, within rounding."""
    sizes: list[int] = []
    forward = Engine.forward

    def noted(engine: Engine, batch: Sequence[MicroBatch], *more: Any) -> Any:
        sizes.append(len(batch))
        return forward(engine, batch, *more)

    monkeypatch.setattr(Engine, "forward", noted)
    norms = []
    for tokens in (8192, 64):
        settings = StepSettings(micro_batch_tokens=tokens)
        trainer = trainer_of(model, tmp_path, "dpo", max_steps=1, settings=settings)
        trainer.train()
        norms.append(trainer.state.log_history[0]["grad_norm"])
        trainer.close()
    assert sizes[0] == 2 < sizes[1]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_callbacks_of_transformers_work(model: Path, tmp_path: Path) -> None:
    """The rate is so large that the third evaluation is worse, and the best one is loaded."""
    trainer = trainer_of(
        model,
        tmp_path,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=1)],
        disable_tqdm=False,
        learning_rate=0.5,
        warmup_steps=1,
        lr_scheduler_type="constant_with_warmup",
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
    )
    trainer.train()
    lines = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert len(lines) == trainer.state.global_step == 3
    assert trainer.evaluate()["eval_loss"] == min(lines)
    trainer.close()


class StopBetween(TrainerCallback):  # type: ignore[misc]
    """Ends training between the micro-batches of the third step."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 2


def test_a_step_that_is_stopped_between_its_micro_batches_is_not_taken(
    model: Path, tmp_path: Path
) -> None:
    found: dict[str, dict[str, Tensor]] = {}
    runs: dict[str, dict[str, Any]] = {
        "stopped": {"callbacks": [StopBetween()]},
        "two": {"max_steps": 2},
        "three": {"max_steps": 3},
    }
    for name, changes in runs.items():
        trainer = trainer_of(model, tmp_path, lr_scheduler_type="constant", **changes)
        trainer.train()
        trainer.save_model(str(tmp_path / name))
        trainer.close()
        found[name] = weights(tmp_path / name)
    assert same(found["stopped"], found["two"])
    assert not same(found["two"], found["three"])


def test_grpo_draws_from_the_engine_and_a_resumed_run_draws_the_same(
    model: Path, tmp_path: Path
) -> None:
    drawn: list[list[str]] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        drawn.append(completions)
        return [float(len(set(text))) for text in completions]

    case = replace(CASES["grpo"], given={"reward_funcs": reward})
    saving: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    for name, checkpoint in {"whole": None, "again": str(tmp_path / "whole/checkpoint-2")}.items():
        trainer = make_trainer(case, model, tmp_path / name, is_streamed=True, **saving)
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.close()
    assert len(drawn) == 6
    assert drawn[4:] == drawn[2:4]
    assert drawn[2] != drawn[3]
    last = "checkpoint-4"
    assert same(weights(tmp_path / "whole" / last), weights(tmp_path / "again" / last))


@pytest.mark.parametrize(
    "lora", [None, LoraConfig(rank=2, alpha=4), LoraConfig(rank=2, alpha=4, dora=True)]
)
def test_the_reference_of_grpo_is_the_model_as_it_began(
    model: Path, tmp_path: Path, lora: LoraConfig | None
) -> None:
    ids = torch.arange(10, 26)[None]

    def scored(one: Any) -> Tensor:
        with torch.no_grad():
            found: Tensor = one(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
        return found

    case = replace(CASES["grpo"], given={"reward_funcs": CASES["grpo"].given["reward_funcs"]})
    changes: dict[str, Any] = {"max_steps": 2, "beta": 0.1, "save_strategy": "steps", "lora": lora}
    changes |= {"save_steps": 1, "learning_rate": 1e-2}
    trainer = make_trainer(case, model, tmp_path, is_streamed=True, **changes)
    before = scored(trainer.ref_model)
    assert torch.equal(scored(trainer.model), before)
    trainer.train()
    assert torch.equal(scored(trainer.ref_model), before)
    assert not torch.equal(scored(trainer.model), before)
    trainer.close()
    again = make_trainer(case, model, tmp_path, is_streamed=True, **changes)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert torch.equal(scored(again.ref_model), before)
    again.close()


def test_other_ways_to_draw_are_refused_by_name(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"top_k=5, min_p=0\.1: the engine draws"):
        make_trainer(CASES["grpo"], model, tmp_path, is_streamed=True, top_k=5, min_p=0.1)


def test_a_reward_model_gets_its_head_and_loads_as_such(model: Path, tmp_path: Path) -> None:
    trainer = trainer_of(model, tmp_path, "reward")
    history = run(trainer, folder=str(tmp_path / "model"))
    assert history.of("accuracy")[-1] == 1.0
    found = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert found.score.weight.shape == (1, 64)


def test_a_reward_head_beside_adapters_loads_in_peft(model: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    trainer = trainer_of(model, tmp_path, "reward", max_steps=2, lora=LoraConfig(rank=4, alpha=8))
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    trainer.close()
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    found = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert type(found) is peft.PeftModelForSequenceClassification
    score = found.base_model.model.score.modules_to_save["default"].weight
    saved = weights(tmp_path / "adapter")["base_model.model.score.weight"]
    assert torch.equal(score, saved.to(score.dtype))


def test_adapters_are_trained_and_load_in_peft(model: Path, tmp_path: Path) -> None:
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    args = trl.SFTConfig(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], max_steps=2, logging_steps=1,
        disable_tqdm=True, save_strategy="no", learning_rate=1e-2,
    )  # fmt: skip
    kind = streamed(trl.SFTTrainer, lora=LoraConfig(rank=4, alpha=8))
    trainer = kind(
        model=str(model), args=args, train_dataset=Dataset.from_list(CASES["sft"].rows())
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    trainer.close()
    peft = pytest.importorskip("peft")
    loaded = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model), tmp_path / "adapter"
    )
    moved = [p for name, p in loaded.named_parameters() if "lora_B" in name and p.abs().max() > 0]
    assert moved


def test_a_model_in_memory_is_refused(tmp_path: Path) -> None:
    import trl

    args = trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(ConfigError, match="model: weights are streamed from a folder"):
        streamed(trl.SFTTrainer)(model=object(), args=args)

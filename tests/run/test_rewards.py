"""A run on rewards: as exact as every run, and nothing that a reward function does loses it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.cli.demo import byte_tokenizer
from megatrain.config import Config
from megatrain.data.prompts import gather_prompts
from megatrain.disk.checkpoint.retention import finished, step_of
from megatrain.errors import CheckpointMismatch, ConfigError, DataError, Interrupted, RewardError
from megatrain.memory.kinds import Kind
from megatrain.planning.memory.predicted import REFERENCE
from megatrain.ranks.ranks import ALONE
from megatrain.rewards.policy import OwnPolicy
from megatrain.run import drawn_data
from megatrain.run.callbacks import Callback
from megatrain.run.drawn_data import DrawnData
from megatrain.run.folder import FOLDER
from megatrain.run.opening import model as opened_model
from megatrain.run.trainer import Trainer
from megatrain.step.settings import StepSettings
from testkit.rank_runs import run_on_ranks
from testkit.runs import Setting, config_of, differences, lines_of, run, state_of

NUM_STEPS = 6
SOURCE = """
import pathlib, time

def letters(rows, texts):
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows)
    mode = pathlib.Path(__file__).with_name("mode")
    mode = mode.read_text() if mode.exists() else ""
    while mode == "loops":
        time.sleep(0.01)
    if mode == "raises":
        raise ValueError("no judge today")
    return [len(set(text)) / 8 for text in texts]

def game(row):
    answer = yield
    if len(answer) % 2:
        answer = yield "more"
    return 0.1 * len(answer)

def short(rows, texts):
    return [-len(text) for text in texts]
"""

SERVED = {"max_new_tokens": 6, "engine": "vllm"}


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(SOURCE)
    return path


def config(world: Path, folder: Path, given: Path, **changes: Any) -> Config:
    """A run of six steps, two on each draw of two answers to each of four prompts."""
    timeout = changes.pop("timeout", 60)
    rollouts = changes.get("rollouts", {})
    if "environment" in rollouts:
        changes["rollouts"] = rollouts | {"environment": f"{given}:game"}
    functions = [f"{given}:letters", {"function": f"{given}:short", "weight": 0.01}]
    return config_of(
        world,
        folder,
        Setting(packing=False, save_every=2, eval_every=3),
        **{
            "loss": {"name": "grpo"},
            "rewards": {"functions": functions, "timeout": timeout},
            "rollouts": {"samples": 2, "max_new_tokens": 6, "iterations": 2},
            "train": {"steps": NUM_STEPS, "batch_tokens": None, "batch_rows": 4},
            **changes,
        },
    )


@pytest.mark.merge
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss": {"name": "gspo", "kl": 0.1}, "lora": {"rank": 2}},
        {"loss": {"name": "grpo", "kl": 0.1}, "model": {"add_tokens": ["<think>"]}},
        {"rollouts": {"samples": 2, "max_new_tokens": 6, "mask_truncated": True}},
        {"rollouts": {"samples": 2, "max_new_tokens": 24, "environment": "", "iterations": 2}},
    ],
    ids=["full", "adapters and kl", "full and kl", "masked", "several turns"],
)
def test_a_stopped_run_ends_with_the_bits_of_a_whole_one(
    world: Path, tmp_path: Path, rewards: Path, changes: dict[str, Any]
) -> None:
    """Stopped between two steps on the same answers, and killed after a save."""
    ended = run(config(world, tmp_path / "whole", rewards, **changes))
    assert ended is not None
    stopped = config(world, tmp_path / "stopped", rewards, **changes)
    with pytest.raises(Interrupted):
        run(stopped, resume=True, stop=3)
    assert run(stopped, resume=True, die=5) is None
    resumed = run(stopped, resume=True)
    whole = (ended, tmp_path / "whole")
    assert differences(world, resumed, tmp_path / "stopped", whole) == []


@pytest.mark.merge
def test_the_reference_is_the_model_as_it_began_and_not_as_it_is(
    world: Path, tmp_path: Path, rewards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {"loss": {"name": "grpo", "kl": 0.1}}
    with Trainer(config(world, tmp_path / "run", rewards, **changes)) as trainer:
        reference, store = trainer.home.reference, trainer.home.store
        assert reference is not None
        before = store.arena(Kind.HI).clone()
        trainer.train()
        assert torch.equal(reference.arena(Kind.HI), before)
        assert not torch.equal(store.arena(Kind.HI), before)
        lines = [line for line in trainer.plan.ledger.lines if line.purpose == REFERENCE]
        assert [line.num_bytes for line in lines] == [before.nbytes]
        whole = state_of(trainer)
    first, *_, last = [line["kl"] for line in lines_of(tmp_path / "run") if "loss" in line]
    assert abs(first) < 1e-6 < last

    monkeypatch.setattr(opened_model, "copy_of_weights", lambda store, _: store)
    other = run(config(world, tmp_path / "other", rewards, **changes))
    assert differences(world, other, tmp_path / "other", (whole, tmp_path / "run"))


@pytest.mark.merge
def test_a_resumed_run_wants_the_weights_that_its_reference_has(
    world: Path, tmp_path: Path, rewards: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(world / "model-0.0", model)
    changes = {"loss": {"name": "grpo", "kl": 0.1}, "model": {"name_or_path": str(model)}}
    stopped = config(world, tmp_path / "run", rewards, **changes)
    with pytest.raises(Interrupted):
        run(stopped, resume=True, stop=3)
    for path in model.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with pytest.raises(CheckpointMismatch, match=r"or as the reference of\s+loss.kl"):
        run(stopped, resume=True)


@pytest.mark.merge
def test_other_draws_would_be_noticed(
    world: Path, tmp_path: Path, rewards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = run(config(world, tmp_path / "whole", rewards))
    assert ended is not None
    monkeypatch.setattr(drawn_data, "draw_seed", lambda *_: 2**40)
    other = run(config(world, tmp_path / "other", rewards))
    assert differences(world, other, tmp_path / "other", (ended, tmp_path / "whole"))


def test_a_run_writes_its_rewards_its_evaluations_and_its_texts(
    world: Path, tmp_path: Path, rewards: Path
) -> None:
    train = {"steps": 2, "batch_tokens": None, "batch_rows": 4}
    changes = {"rollouts": {"samples": 2, "max_new_tokens": 6}, "train": train}
    with Trainer(config(world, tmp_path / "run", rewards, **changes)) as trainer:
        outcome = trainer.train()
        assert outcome.num_steps == 2
        assert sum(len(micro.input_ids) for micro in trainer.data.next_batch()) == 8
    step, last = [line for line in lines_of(tmp_path / "run") if "loss" in line]
    assert outcome.learned == f"reward {step['reward']:.3f} to {last['reward']:.3f}"
    assert step["reward"] == pytest.approx(step["reward/letters"] + 0.01 * step["reward/short"])
    assert {"reward_std", "answer_tokens", "ended", "ratio", "clip_fraction"} <= step.keys()
    assert step["ratio"] == pytest.approx(1, abs=0.05)
    judged = [line for line in lines_of(tmp_path / "run") if "eval_reward" in line]
    assert [line["step"] for line in judged] == [0, 2]
    assert all(line["eval_loss"] == -line["eval_reward"] for line in judged)
    samples = lines_of(tmp_path / "run", "samples.jsonl")
    assert [sample["step"] for sample in samples] == [0, 2]
    assert all({"prompt", "text", "reward"} <= sample.keys() for sample in samples)


class _BreakAfter(Callback):
    """Makes the reward function of a run fail after a step."""

    def __init__(self, step: int, rewards: Path, mode: str) -> None:
        self._step, self._mode, self._path = step, mode, rewards.with_name("mode")

    def on_step_end(self, config: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            self._path.write_text(self._mode)


SAID = {
    "raises": "raised ValueError: no judge today",
    "loops": "has not returned within 4 s",
}


@pytest.mark.merge
@pytest.mark.parametrize(("mode", "step"), [*((mode, 4) for mode in SAID), ("raises", 3)])
def test_a_reward_function_that_fails_loses_nothing(
    world: Path, tmp_path: Path, rewards: Path, mode: str, step: int
) -> None:
    """The run ends with its name, saved; repaired and resumed, it has the bits of a whole one.

    After step 3 it fails in the evaluation, after step 4 in a draw.
    """
    broken = config(world, tmp_path / "broken", rewards, timeout=4 if mode == "loops" else 60)
    with (
        Trainer(broken, callbacks=[_BreakAfter(step, rewards, mode)]) as trainer,
        pytest.raises(RewardError) as caught,
    ):
        trainer.train()
    assert f"{rewards}:letters {SAID[mode]}" in str(caught.value)
    assert f"--resume`: the run is saved after step {step}" in str(caught.value)
    assert caught.value.exit_code == 4
    assert step_of(finished(tmp_path / "broken" / FOLDER)[0]) == step
    events = (tmp_path / "broken" / "events.jsonl").read_text().splitlines()
    assert json.loads(events[-1])["event"] == "reward failed"
    rewards.with_name("mode").unlink()
    resumed = run(config(world, tmp_path / "broken", rewards), resume=True)
    ended = run(config(world, tmp_path / "whole", rewards))
    assert ended is not None
    assert differences(world, resumed, tmp_path / "broken", (ended, tmp_path / "whole")) == []


@pytest.mark.merge
def test_ranks_draw_reward_and_fail_the_same(world: Path, tmp_path: Path, rewards: Path) -> None:
    """Two share the answers of a draw; rank 0 rewards them for both."""
    alone = run(config(world, tmp_path / "alone", rewards))
    assert alone is not None
    both = config(world, tmp_path / "both", rewards)
    assert run_on_ranks(2, both, lambda one: one.train().num_steps) == [NUM_STEPS] * 2
    first, second = (
        next(line for line in lines_of(tmp_path / name) if "reward" in line)
        for name in ("alone", "both")
    )
    assert first["reward"] == second["reward"]
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=0.05)
    rewards.with_name("mode").write_text("raises")

    def failing(trainer: Trainer) -> str:
        with pytest.raises(RewardError) as caught:
            trainer.train()
        return str(caught.value)

    said = run_on_ranks(2, config(world, tmp_path / "failing", rewards), failing)
    assert said[0] == said[1]
    assert "no judge today" in said[0]


@pytest.mark.merge
def test_a_function_that_is_not_there_is_refused_before_weights_are_read(
    world: Path, tmp_path: Path, rewards: Path
) -> None:
    rewards.unlink()
    with pytest.raises(RewardError, match="there is no file"):
        Trainer(config(world, tmp_path / "run", rewards), dry_run=True)


@pytest.mark.merge
def test_other_answers_to_a_prompt_are_another_run(
    world: Path, tmp_path: Path, rewards: Path
) -> None:
    with pytest.raises(Interrupted):
        run(config(world, tmp_path / "run", rewards), stop=2)
    changed = {"samples": 3, "max_new_tokens": 6, "iterations": 2}
    with pytest.raises(CheckpointMismatch, match=r"rollouts\.samples: 2 -> 3"):
        run(config(world, tmp_path / "run", rewards, rollouts=changed), resume=True)


@pytest.mark.parametrize(
    "changed",
    [
        {"train": {"weight": 2.0}},
        {"train": {"weight": 1.0}, "eval": 0.4},
        {"train": {"weight": 1.0}, "eval": None},
    ],
    ids=["weight", "larger part held out", "nothing held out"],
)
def test_a_position_among_other_prompts_is_refused(
    world: Path, tmp_path: Path, rewards: Path, changed: dict[str, Any]
) -> None:
    def opened(*, train: dict[str, Any], eval: float | None = 0.2) -> DrawnData:
        data = {"train": {"path": str(world / "rows.jsonl"), **train}, "eval": eval}
        settled = config(world, tmp_path / "run", rewards, data=data)
        rows = gather_prompts(settled, byte_tokenizer(), {})
        settings = StepSettings(micro_batch_tokens=64)
        return DrawnData(settled, byte_tokenizer(), settings, rows, ALONE)

    with opened(train={"weight": 1.0}) as began, opened(**changed) as other:
        state = began.state() | {"row": 4}
        began.seek(state)
        assert began.state()["row"] == 4
        with pytest.raises(DataError, match="weights, or how many are held out"):
            other.seek(state)
        with pytest.raises(DataError, match="the saved position is invalid"):
            began.seek(state | {"row": began.rows.order.size})


@pytest.mark.merge
def test_answers_of_another_policy_count_by_the_ratio_of_probabilities(
    world: Path, tmp_path: Path, rewards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that says it is not exact, log-probabilities are computed again, and compared."""

    class Outside(OwnPolicy):
        exact = False

    monkeypatch.setattr(drawn_data, "open_policy", lambda _: Outside())
    own = run(config(world, tmp_path / "outside", rewards))
    monkeypatch.undo()
    steps = [line for line in lines_of(tmp_path / "outside") if "loss" in line]
    assert all(0 <= line["logprob_gap"] <= line["logprob_gap_most"] < 0.1 for line in steps)
    assert all(line["importance"] == pytest.approx(1, abs=0.05) for line in steps)
    assert own is not None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rewards": {}}, r"nothing rewards the answers. Give `rewards: \["),
        (
            {"train": {"batch_tokens": 192, "batch_rows": None}},
            r"train.batch_rows is null. Give it",
        ),
        ({"loss": {"name": "next_token"}}, r"rollouts is given and loss.name is next_token"),
        (
            {"loss": {"name": "grpo", "kl": 0.1}, "lora": {"rank": 2, "dora": True}},
            "the base alone is not the model as it began",
        ),
        (
            {"loss": {"name": "grpo", "kl": 0.1}, "lora": {"path": "adapters"}},
            r"megatrain export FOLDER MERGED --merge",
        ),
        ({"rollouts": {"max_new_tokens": 64}}, "no prompt has room before such an answer"),
        ({"data": {"overlong": "truncate"}}, "a prompt that is too long for its answer"),
        ({"rewards": {"functions": "rewards.py"}}, "rewards.py is not a function"),
        (
            {"rollouts": {"max_new_tokens": 6, "server": "http://127.0.0.1:80"}},
            "own, which has no server",
        ),
        (
            {"rollouts": {**SERVED, "server": "http://10.0.0.7:80"}},
            "http://10.0.0.7:80, no address of this host",
        ),
    ],
)
def test_a_config_that_cannot_be_is_refused(
    world: Path, tmp_path: Path, rewards: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        config(world, tmp_path / "run", rewards, **changes)


def test_rewards_may_be_a_list_of_names() -> None:
    train = {"batch_rows": 4}
    names = ["a.py:f", {"function": "b.py:g", "weight": 2}]
    found = Config(model="m", data="d", loss="grpo", rewards=names, train=train)
    assert [(one.name, one.weight) for one in found.rewards.functions] == [("f", 1), ("g", 2)]
    assert found.step_tokens == 4 * 8 * 2048
    assert Config.model_validate(found.model_dump(mode="json")) == found

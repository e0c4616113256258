"""A run in a sentence and figures."""

from __future__ import annotations

import math
from pathlib import Path

from megatrain.report.run import Run, StepLine, read_run
from megatrain.report.summary import run_facts, sentence
from megatrain.text import figure
from tests.report.fake_runs import write_run


def test_the_sentence(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, num_steps=300), "run")
    assert sentence(run) == (
        "300 steps over 39.3M tokens in 1 h 24 min of steps: the loss went from 2.758 to 1.417; "
        "83% of step time is compute, 11% updating weights."
    )
    losses = [step.values["loss"] for step in run.steps if math.isfinite(step.values["loss"])]
    assert (figure(losses[0]), figure(losses[-1])) == ("2.758", "1.417")
    assert run_facts(run)["Loss of the last step"] == "1.417", "as the command line says it"
    assert run_facts(run)["Skipped steps"] == "1, the last at step 200"
    assert "Share of the roofline" not in run_facts(run), "its machine was not measured"
    assert run_facts(run)["Best eval loss"] == "1.363 at step 300"
    run.evals.insert(0, StepLine(step=0, values={"eval_loss": 0.5}, split={}, applied=True))
    assert run_facts(run)["Best eval loss"] == "1.363 at step 300", "a model that was trained"
    assert sentence(Run(name="run")) == "No step has been logged yet."


def _rewarded() -> Run:
    """A run on rewards: its loss is around 0, its evaluation loss the negative reward."""
    steps = [
        StepLine(step=step, values={"loss": -7e-5, "reward": -0.9 + 0.01 * step, "seconds": 1.0})
        for step in range(1, 5)
    ]
    evals = [StepLine(step=4, values={"eval_loss": 0.685, "eval_reward": -0.685})]
    return Run(name="grpo", steps=steps, evals=evals)


def test_a_run_on_rewards_leads_with_its_reward() -> None:
    run = _rewarded()
    assert "the reward went from -0.89 to -0.86" in sentence(run)
    found = run_facts(run)
    assert list(found)[:3] == ["Reward of the last step", "Best reward, smoothed",
                               "Best eval reward"]  # fmt: skip
    assert found["Best reward, smoothed"] == "-0.86 at step 4", "the largest"
    assert not any("loss" in name for name in found)
    for line in run.steps:
        del line.values["reward"]  # type: ignore[attr-defined]
    assert "Best eval loss" in run_facts(run)


def test_a_prediction_is_a_range_and_is_hidden_where_steps_are_not_compared(
    tmp_path: Path,
) -> None:
    run = read_run(write_run(tmp_path, num_steps=30), "run")
    assert "Time of a step, predicted" not in run_facts(run)
    for line in run.steps:
        line.values["of_roofline"] = 0.9  # type: ignore[index]
    assert run_facts(run)["Time of a step, predicted"] == "12 to 21 s"
    assert run_facts(run)["Share of the roofline"] == "90% (compute)"

"""A run in a sentence and figures."""

from __future__ import annotations

import math
from pathlib import Path

from megatrain.report.run import Run, StepLine, read_run
from megatrain.report.summary import limits, run_facts, sentence
from megatrain.text import figure
from tests.report.fake_runs import write_run


def run_of(*splits: dict[str, float]) -> Run:
    steps = [
        StepLine(step=step, values={"seconds": sum(split.values())}, split=split)
        for step, split in enumerate(splits, 1)
    ]
    return Run(name="run", steps=steps)


def test_the_sentence(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, num_steps=300), "run")
    assert sentence(run) == (
        "300 steps over 39.3M tokens in 1 h 24 min of steps: the loss went from 2.758 to 1.417; "
        "compute limits the step with 83 % of its time, followed by updating weights with 11 %."
    )
    losses = [step.values["loss"] for step in run.steps if math.isfinite(step.values["loss"])]
    assert (figure(losses[0]), figure(losses[-1])) == ("2.758", "1.417")
    assert run_facts(run)["Loss of the last step"] == "1.417", "as the command line says it"
    assert run_facts(run)["Skipped steps"] == "1, the last at step 200"
    assert "Share of the bound" not in run_facts(run), "its machine was not measured"
    assert run_facts(run)["Best eval loss"] == "1.363 at step 300"
    run.evals.insert(0, StepLine(step=0, values={"eval_loss": 0.5}, split={}, applied=True))
    assert run_facts(run)["Best eval loss"] == "1.363 at step 300", "a model that was trained"
    assert sentence(Run(name="run")) == "No step has been logged yet."


def test_a_loss_that_is_no_number_any_more_is_said() -> None:
    losses = [2.0, 1.0, float("nan"), float("nan")]
    steps = [
        StepLine(step=step, values={"loss": loss}, split={}, applied=True)
        for step, loss in enumerate(losses, 1)
    ]
    run = Run(name="run", steps=steps)
    assert sentence(run).startswith(
        "4 steps: the loss went from 2 to 1, and is not a number after step 2"
    )
    assert run_facts(run)["Loss of the last step"] == "not a number"
    assert "not a number" not in sentence(Run(name="run", steps=steps[:2]))


def test_what_limits_the_step_and_the_setting_that_moves_it() -> None:
    assert limits(run_of({"compute": 2.0, "fetch": 3.0})) == (
        "fetching weights limits the step with 60 % of its time; "
        "a larger train.batch_tokens hides it"
    )
    assert limits(run_of({"compute": 1.0, "data": 3.0})) == (
        "reading data limits the step with 75 % of its time"
    )
    assert limits(run_of({"compute": 1.0})) == "compute limits the step with 100 % of its time"
    assert limits(Run(name="run")) == ""

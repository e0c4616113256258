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

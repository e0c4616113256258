"""What the sections say of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

from megatrain.report.config_diff import settings_of
from megatrain.report.curves import curves
from megatrain.report.memory_bars import memory_section
from megatrain.report.run import LedgerLine, Run, Sample, SpanRecord, StepLine, read_run
from megatrain.report.summary import limits, run_facts, sentence
from megatrain.report.tables import flattened
from megatrain.report.texts import samples_section
from megatrain.report.time_split import split_shares
from megatrain.report.timeline import timeline_section
from megatrain.text import figure
from tests.report.fake_runs import write_run
from tests.report.reading import read


def run_of(*splits: dict[str, float]) -> Run:
    steps = [
        StepLine(step=step, values={"seconds": sum(split.values())}, split=split, applied=True)
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


def test_samples_stand_beside_what_the_row_says() -> None:
    samples = [Sample(0, "3 + 4", "zz", "7"), Sample(9, "3 + 4", "8", "7"), Sample(9, "old", "x")]
    text = str(samples_section([Run(name="run", samples=samples)]))
    assert text.count("expected, from the row") == 1
    assert text.index("zz") < text.index("after, step 9") < text.index("expected, from the row")


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


def test_the_balance_of_experts_is_drawn_where_it_is_trained() -> None:
    def drawn(**values: float) -> str:
        steps = [
            StepLine(step=step, values={"loss": 2.0, **values}, split={}, applied=True)
            for step in range(1, 9)
        ]
        return read(curves([Run(name="run", steps=steps)])).text

    assert "Balance of experts" in drawn(aux_loss=2.01)
    assert "Balance of experts" not in drawn()


def test_a_run_on_rewards_shows_them() -> None:
    steps = [
        StepLine(step=n, values={"seconds": 4.0, "reward": 0.1 * n}, split=split, applied=True)
        for n, split in enumerate([{"compute": 1.0, "data": 3.0}] * 8, 1)
    ]
    samples = [Sample(0, "gah>", "aa", "", 0.0), Sample(8, "gah>", "hag", "", 1.0)]
    run = Run(name="run", steps=steps, samples=samples)
    charts = read(curves([run])).text
    assert "Reward" in charts
    assert "mean of the answers of a step" in charts
    assert "after, step 8, reward 1" in str(samples_section([run]))
    assert limits(run) == "drawing answers limits the step with 75 % of its time"
    assert "Reward" not in read(curves([run_of({"compute": 1.0})])).text


def test_the_first_step_is_left_out_of_the_shares_and_the_rest_is_named(tmp_path: Path) -> None:
    run = run_of({"data": 100.0}, {"compute": 3.0})
    assert split_shares(run) == {"compute": 1.0}
    line = {"step": 1, "seconds": 4.0, "split": {"compute": 3.0, "fetch": -1.0, "data": math.nan}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line))
    assert split_shares(read_run(tmp_path, "run")) == {"compute": 0.75, "other": 0.25}


def test_pinned_memory_counts_as_host_memory() -> None:
    ledger = [LedgerLine("host", "moments", 2**31), LedgerLine("pinned", "weights", 2**31),
              LedgerLine("disk", "checkpoint", 2**30)]  # fmt: skip
    run = Run(name="run", ledger=ledger, measured={"host_peak_bytes": 2.0**32})
    text = read(memory_section([run])).text
    assert "Host memory measured 100 % of the plan" in text
    assert "planned4.0 GiB" in text
    assert "weights (pinned)2.0 GiB" in text
    assert "Disk" in text
    assert "Device memory" not in text


def test_many_small_spans_are_one_path() -> None:
    small = [SpanRecord("compute", "forward", "f", n / 1e4, n / 1e4 + 9e-5) for n in range(9_000)]
    run = Run(name="run", spans=[*small, SpanRecord("compute", "head", "head(0)", 0.9, 1.0)])
    html = timeline_section([run])
    assert "<title>head(0): 100 ms</title>" in html
    assert len(html) < 3_000


def test_runs_that_began_alike_share_their_first_answers(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / name, num_steps=5), name) for name in "ab"]
    text = read(samples_section(runs)).text
    assert text.count("The sky is blue. The sky is blue.") == 1
    assert "a: before, step 0" in text
    assert "b: after, step 5" in text
    assert "b: before" not in text


def test_facts_are_written_by_their_names() -> None:
    facts = {"device_bytes": 2**30, "load_s": 90, "copy_bytes_per_s": 2**30, "length": {"p50": 388},
             "ok": True, "no": None, "list": [1, 2]}  # fmt: skip
    assert flattened(facts) == {
        "device bytes": "1.0 GiB", "load s": "1 min 30 s", "copy bytes per s": "1.0 GiB/s",
        "length, p50": "388", "ok": "yes", "no": "none", "list": "1, 2"}  # fmt: skip


def test_configs_that_unfold_without_end_are_cut() -> None:
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
        for old, new in zip("abcdefghi", "bcdefghij", strict=True)
    )
    assert all(len(text) < 400 for text in (settings_of(bomb) or {}).values())
    assert settings_of("a: [") is None
    assert settings_of("only text") is None
    assert settings_of("a: {b: 1, c: x}\n") == {"a.b": "1", "a.c": "x"}

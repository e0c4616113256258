"""The verbs, as a user types them."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from pathlib import Path

import pytest

from megatrain.cli.demo import byte_tokenizer, streamed_equals_resident, write_demo
from megatrain.cli.verbs import sample_from
from testkit.patience import HANG_S
from testkit.warm_python import warm_python


def megatrain(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MEGATRAIN_CACHE": str(folder / "cache"), "COLUMNS": "120"}
    return subprocess.run(
        [*warm_python().command, "-m", "megatrain", *words],
        capture_output=True, text=True, cwd=folder, env=environment, timeout=4 * HANG_S,
        check=False,
    )  # fmt: skip


def said(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo of a few steps, which have taught it little."""
    folder = tmp_path_factory.mktemp("demo")
    text = said(megatrain(folder, "demo", "d", "--steps", "6"))
    assert "streamed = resident: 31 tensors bit-identical" in text
    return folder


@pytest.mark.merge
def test_the_demo_learns_and_leaves_a_folder_that_explains_itself(tmp_path: Path) -> None:
    assert "3 + 4 = 7\n9 + 8 = 17\n" in said(megatrain(tmp_path, "demo", "d"))
    run = tmp_path / "d" / "run"
    losses = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, *_, last = [line["eval_loss"] for line in losses if "eval_loss" in line]
    assert last < first / 2
    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.merge
def test_a_run_is_evaluated_and_answers(demo: Path) -> None:
    found = said(megatrain(demo, "eval", "d/run", "d/rows.jsonl", "--max-rows", "20"))
    loss, perplexity = re.fullmatch(
        r"loss ([\d.]+), perplexity ([\d.]+) over \d+ trained tokens\n", found
    ).groups()  # type: ignore[union-attr]
    assert float(perplexity) == pytest.approx(math.exp(float(loss)), rel=1e-3)
    said(megatrain(demo, "sample", "d/run", "1 + 1", "--max-new-tokens", "4"))


@pytest.mark.merge
def test_exact_answers_are_counted(demo: Path) -> None:
    words = ("d/run", "d/rows.jsonl", "--max-rows", "30", "--answers")
    found = said(megatrain(demo, "eval", *words))
    num_exact = int(re.search(r"^exact answers (\d+) of 30 ", found, re.M)[1])  # type: ignore[index]
    written = sample_from(demo / "d" / "run", [f"{n // 10} + {n % 10}" for n in range(30)], 3)
    assert num_exact == sum(text == str(n // 10 + n % 10) for n, text in enumerate(written))


def test_a_run_is_exported(demo: Path) -> None:
    assert "from_pretrained loads it" in said(megatrain(demo, "export", "d/run", "out"))
    assert (demo / "out" / "model.safetensors").exists()


@pytest.mark.merge
def test_data_is_shown(demo: Path) -> None:
    found = said(megatrain(demo, "data", "d/rows.jsonl", "-m", "d/model", "--samples", "1"))
    assert "detected: messages (role, content)" in found
    assert "800 rows" in found
    assert "--- document 0: 10 tokens, 2 trained" in found


def test_runs_are_compared(demo: Path) -> None:
    found = said(megatrain(demo, "report", "d/run", "d/run", "--to", "both.html"))
    assert "report in both.html" in found
    assert (demo / "both.html").exists()


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("train", "missing.yaml"), 2, "missing.yaml"),
        (("train", "d/demo.yaml", "train.stepz=3"), 2, "train.steps"),
        (("train", "d/demo.yaml"), 5, "already has a run"),
        (("report", "d/model"), 5, "has no metrics.jsonl"),
        (("sample", "d/no/where", "hello"), 4, "d/no/where"),
        (("sample", "d/run", "hi", "--temperature", "-1"), 2, "temperature is -1; give 0 or"),
        (("demo", "d"), 5, "exists. Give another name"),
        (("export", "d/run", "d"), 2, "exists and is not empty"),
        (("export", "d/no/where", "out2"), 4, "d/no/where"),
        (("eval", "d/run", "d/rows.jsonl", "--max-rows", "0"), 2, "max-rows"),
    ],
)
def test_what_goes_wrong_is_said_with_its_exit_code(
    demo: Path, words: tuple[str, ...], code: int, text: str
) -> None:
    done = megatrain(demo, *words)
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_config_is_begun_and_brought_from_another_tool(tmp_path: Path) -> None:
    assert "wrote run.yaml" in said(megatrain(tmp_path, "init"))
    (tmp_path / "axolotl.yml").write_text(
        "base_model: some/model\nsequence_len: 1024\nmicro_batch_size: 2\n"
        "gradient_accumulation_steps: 4\nlearning_rate: 2e-5\n"
        "datasets:\n  - path: train.jsonl\n    type: chat_template\n"
    )
    found = said(megatrain(tmp_path, "init", "new.yaml", "--from", "axolotl.yml"))
    assert "sequence_len" in found
    assert "max_length" in (tmp_path / "new.yaml").read_text()
    assert "batch_rows: 8" in (tmp_path / "new.yaml").read_text()


def test_a_method_that_is_not_here_ends_with_an_error_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "grpo.yml").write_text("base_model: some/model\nrl: grpo\nmicro_batch_size: 2\n")
    refused = megatrain(tmp_path, "init", "new.yaml", "--from", "grpo.yml")
    assert refused.returncode == 2
    assert "grpo.yml:2: rl is grpo: rewards are functions of your own here" in refused.stderr
    assert "docs/rewards.md" in refused.stderr
    assert not (tmp_path / "new.yaml").exists()


def test_a_file_of_any_tool_is_read_as_the_tool_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text("model_name_or_path: m\nper_device_train_batch_size: 2\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    refused = megatrain(tmp_path, "init", "new.yaml", "--from", "sft.yaml")
    assert (refused.returncode, "Name the tool, like `--tool trl`" in refused.stderr) == (2, True)
    words = ("--from", "sft.yaml", "--tool", "trl", "--gpus", "3")
    refused = megatrain(tmp_path, "init", "new.yaml", *words)
    assert (refused.returncode, "name it, like `--tool trl-sft`" in refused.stderr) == (2, True)
    assert not (tmp_path / "new.yaml").exists()
    words = ("--from", "sft.yaml", "--tool", "trl-sft", "--gpus", "3")
    unfinished = megatrain(tmp_path, "init", "new.yaml", *words)
    assert unfinished.returncode == 2
    assert "model_name_or_path" in unfinished.stdout
    assert "new.yaml was written, and does not load yet:\n" in unfinished.stderr
    assert "data.train is missing" in unfinished.stderr
    (tmp_path / "sft.yaml").write_text(
        "dataset_name: rows.jsonl\n" + (tmp_path / "sft.yaml").read_text()
    )
    words = ("--from", "sft.yaml", "--tool", "trl", "--gpus", "3")
    said(megatrain(tmp_path, "init", "whole.yaml", *words))
    written = (tmp_path / "whole.yaml").read_text()
    assert "batch_rows: 6" in written
    assert "train_on: completion" in written
    assert "chat_template: none" in written


def test_a_bit_that_differs_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_demo(tmp_path)
    monkeypatch.setattr("megatrain.cli.demo.resident_gradients", _nudged)
    with pytest.raises(AssertionError, match=r"^loss: "):
        streamed_equals_resident(tmp_path / "model")


def _nudged(model: object, batch: object) -> tuple[list[float], dict[str, object]]:
    return [1.0], {}


def test_the_byte_tokenizer_reads_back_what_it_wrote() -> None:
    tokenizer = byte_tokenizer()
    for text in ("1 + 2\n= 3", "\u00e9\u4e2d", "<|end|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.merge
def test_a_run_without_a_file_keeps_its_config_and_is_resumed_by_it(demo: Path) -> None:
    words = ("--model", "d/model", "--data", "d/rows.jsonl", "save.dir=kept", "train.steps=1",
             "data.max_length=64", "eval.samples=0", "data.eval=null")  # fmt: skip
    done = megatrain(demo, "train", *words)
    assert "model of step 1" in said(done)
    assert "config in kept/run.yaml" in done.stderr
    kept = (demo / "kept" / "run.yaml").read_text()
    assert "  steps: 1\n" in kept
    assert kept.startswith("# fits: ")
    taken = megatrain(demo, "train", *words)
    assert (taken.returncode, "kept already has a run" in taken.stderr) == (5, True)
    again = megatrain(demo, "train", "kept/run.yaml", "train.steps=2", "--resume")
    assert "in 2 steps" in said(again)
    assert (demo / "kept" / "run.yaml").read_text() == kept

"""The verbs, as a user types them."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from pathlib import Path

import pytest

from megatrain.cli.demo import streamed_equals_resident, write_demo
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


FRONT_PAGE = (Path(__file__).parents[2] / "docs/index.md").read_text()


def _lines_not_printed(shown: str, done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines of a page that a command did not print, apart from its decimal figures."""
    page, printed = (
        re.sub(r"\d+\.\d+", "#", text).splitlines() for text in (shown, done.stdout + done.stderr)
    )
    return [line for line in page if line not in ("...", *printed)]


@pytest.mark.merge
def test_the_demo_learns_and_leaves_a_folder_that_explains_itself(tmp_path: Path) -> None:
    done = megatrain(tmp_path, "demo", "d")
    assert "3 + 4 = 7\n9 + 8 = 17\n" in said(done)
    (shown,) = re.findall(r"\$ megatrain demo \w+\n(.*?)```", FRONT_PAGE, re.S)
    assert _lines_not_printed(shown, done) == []
    assert _lines_not_printed(shown.replace("= 17", "= 18"), done) == ["9 + 8 = 18"]
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


def test_a_run_is_exported(demo: Path) -> None:
    assert "from_pretrained loads it" in said(megatrain(demo, "export", "d/run", "out"))
    assert (demo / "out" / "model.safetensors").exists()


@pytest.mark.merge
def test_data_is_shown(demo: Path) -> None:
    found = said(megatrain(demo, "data", "d/rows.jsonl", "-m", "d/model", "--samples", "1"))
    assert "detected: messages (role, content)" in found
    assert "800 rows" in found
    assert "--- document 0: 10 tokens, 2 trained" in found


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
    (tmp_path / "sft.yml").write_text("base_model: some/model\nlearning_rate: 2e-5\nbf16: true\n")
    unfinished = megatrain(tmp_path, "init", "new.yaml", "--from", "sft.yml")
    assert unfinished.returncode == 2
    assert "yours to decide (1):\n  bf16: true  model.dtype is bf16" in unfinished.stdout
    assert "new.yaml was written, and does not load yet:\n" in unfinished.stderr
    assert "learning_rate: 2.0e-05" in (tmp_path / "new.yaml").read_text()


def test_a_bit_that_differs_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_demo(tmp_path)
    monkeypatch.setattr("megatrain.cli.demo.resident_gradients", _nudged)
    with pytest.raises(AssertionError, match=r"^loss: "):
        streamed_equals_resident(tmp_path / "model")


def _nudged(model: object, batch: object) -> tuple[list[float], dict[str, object]]:
    return [1.0], {}


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

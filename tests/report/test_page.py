"""One file, whole, small, and safe to open whatever a model wrote."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain.errors import ConfigError
from megatrain.report.page import render, write_report
from megatrain.report.run import Run, StepLine, read_run
from tests.report.fake_runs import jsonl, metrics, write_run
from tests.report.reading import Page, read

CURVES = ("loss", "grad_norm", "learning_rate", "tokens_per_s", "seconds", "num_tokens")
EVIL = '</pre><script>alert(1)</script><img src=x onerror="a()">\x1b[31m\u202e&lt;\ud800"\'>'


def page_of(*folders: Path) -> Page:
    return read(render([read_run(folder, folder.name) for folder in folders]))


def headings(page: Page) -> set[str]:
    return {value for name, value in page.attributes if name == "href" and value}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "first", num_steps=300)


def test_every_section_is_there_and_every_drawing_has_a_title(run: Path) -> None:
    page = page_of(run)
    assert headings(page) == {
        "#summary", "#curves", "#time-of-a-step", "#memory", "#samples", "#files"}  # fmt: skip
    told = [value for name, value in page.attributes if name == "aria-label" and value]
    assert any(text.startswith("Loss by step: smoothed from 2.") for text in told)
    assert any(text.startswith("Time of a step: compute 83%, fetch ") for text in told)
    for svg in re.findall(r"<svg[^>]*>.{7}", render([read_run(run, "run")])):
        assert svg.endswith("<title>") or 'aria-hidden="true"' in svg


def test_nothing_is_loaded_and_nothing_runs(run: Path) -> None:
    html = render([read_run(run, "run")])
    page = read(html)
    assert not {"script", "img", "link", "iframe", "object"} & set(page.tags)
    assert not re.search(r"url\(|@import|https?:", html)
    assert not any(name.startswith("on") or name == "src" for name, _ in page.attributes)
    policies = [value for _, value in page.attributes if value and "default-src" in value]
    assert policies == [
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    ]


def test_foreign_text_stays_text(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<b>&", num_steps=9)
    lines = [{"step": step, "prompt": EVIL, "text": f"{step} {EVIL}"} for step in (0, 9)]
    (folder / "samples.jsonl").write_text(jsonl(lines))
    (folder / "config.yaml").write_text("a: </pre><script>alert(1)</script>")
    for name in ("machine.json", "data_card.json"):
        (folder / name).write_text('{"<script>x": "</td><script>alert(1)</script>"}')
    page = page_of(folder, folder)
    assert not {"script", "img"} & set(page.tags)
    assert page.text.count("<script>alert(1)</script>") >= 6
    assert r"\x1b[31m\u202e&lt;\ud800" in page.text
    render([read_run(folder, "run")]).encode()


def test_text_put_in_unescaped_would_be_noticed(run: Path) -> None:
    html = render([read_run(run, "run")]).replace("Why is the sky blue?", EVIL)
    with pytest.raises(AssertionError):
        read(html)


@pytest.mark.merge
def test_a_hundred_thousand_steps_stay_under_a_megabyte(run: Path) -> None:
    long = read_run(run, "long")
    long.steps = [
        StepLine(step=line["step"], values={name: line[name] for name in CURVES if name in line},
                 split=line["split"])
        for line in metrics(100_000, random.Random(0), 1e-5)
        if "loss" in line
    ]  # fmt: skip
    assert len(long.steps) == 100_000
    assert len(render([long]).encode()) < 1_000_000


def test_what_is_not_finite_is_said(run: Path) -> None:
    html = render([read_run(run, "run")])
    assert html.count("not finite: step 200<") == 2
    assert not re.search(r'd="[^"]*(nan|inf)', html)


def test_two_runs_are_laid_over_each_other(run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "second", num_steps=200, seed=1, learning_rate=2e-5)
    page = page_of(run, other)
    assert "second, eval" in page.text
    assert "first: 300 steps over" in page.text
    assert "Steps300200" in page.text
    assert page.text.count("Host memory") == 2


def _objective(run: Path, name: str, **figures: float) -> Run:
    """A run whose loss measures something else, with these figures in each step."""
    found = read_run(run, name)
    found.steps = [
        StepLine(step=line.step, values={**line.values, **figures}, split=line.split)
        for line in found.steps
    ]
    return found


def test_losses_of_different_kinds_have_a_chart_each(run: Path) -> None:
    sft, kto = read_run(run, "sft"), _objective(run, "kto", kl=0.1)
    page = read(render([sft, kto]))
    told = [value for name, value in page.attributes if name == "aria-label" and value]
    losses = [text for text in told if text.startswith("Loss by step: ")]
    assert [("sft" in text, "kto" in text) for text in losses] == [(True, False), (False, True)]
    assert "Loss per trained token" in page.text
    assert "Loss per row of preferences" in page.text
    same = read(render([sft, read_run(run, "other")]))
    alike = [value for name, value in same.attributes if name == "aria-label" and value]
    assert sum(text.startswith("Loss by step: ") for text in alike) == 1


def test_a_report_on_rewards_shows_them_first_and_no_evaluation_beside_its_loss(run: Path) -> None:
    found = _objective(run, "grpo", reward=-0.9, ended=0.95)
    html = render([found])
    assert html.index("Reward by step: ") < html.index("Loss by step: ")
    loss = re.search(r'aria-label="(Loss by step: [^"]*)"', html)
    assert loss is not None
    assert "eval" not in loss[1]
    supervised = re.search(r'aria-label="(Loss by step: [^"]*)"', render([read_run(run, "sft")]))
    assert supervised is not None
    assert "eval" in supervised[1]


def test_shares_are_drawn_from_0_to_1(run: Path) -> None:
    figure = render([_objective(run, "grpo", reward=0.1, ended=1.0)])
    chart = figure.partition("Completed answers")[2].partition("</figure>")[0]
    labels = re.findall(r'class="y" style="bottom:([\d.]+)%"[^>]*>([^<]*)<', chart)
    assert [(float(place), float(text)) for place, text in (labels[0], labels[-1])] == [
        (0.0, 0.0), (100.0, 1.0),
    ]  # fmt: skip


def test_files_appear_whole_or_not_at_all(run: Path, tmp_path: Path) -> None:
    write_report([run], tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == [tmp_path / "report.html"]
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match=r"taken exists and was not written by megatrain"):
        write_report([run], tmp_path / "taken")
    assert len(list(tmp_path.iterdir())) == 2


def test_only_a_report_of_ours_is_replaced(run: Path, tmp_path: Path) -> None:
    write_report([run], tmp_path / "report.html")
    first = (tmp_path / "report.html").read_bytes()
    write_report([run], tmp_path / "report.html")
    assert (tmp_path / "report.html").read_bytes() == first
    for name, content in (
        ("rows.jsonl", b"{}"), ("page.html", b"<!DOCTYPE html>\n<html></html>"), ("empty", b""),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"{name} exists and was not written by megatrain"):
            write_report([run], tmp_path / name)
        assert (tmp_path / name).read_bytes() == content


def test_a_report_needs_no_torch() -> None:
    code = "import sys, megatrain.report.page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

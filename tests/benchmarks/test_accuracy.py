"""The side-by-side fine-tuning: plain fp32 and ours agree, and a wrong rate would be noticed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.rivals.accuracy import SIDES, figures_of, job_of, losses_of, prepare
from benchmarks.rivals.curves import REFERENCE, Curves
from benchmarks.rivals.real_text import Text, read_text, without_repeats
from benchmarks.rivals.subjects import qwen3
from benchmarks.rivals.workers.serving import Job

NUM_STEPS, NUM_HELD_OUT = 3, 2
WITHIN = 2e-6
"""Of losses near 6, in fp32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("accuracy")


@pytest.fixture(scope="module")
def job(folder: Path) -> Job:
    """Return the common job of a tiny model on a little of the text."""
    text = read_text()
    little = Text(
        pretraining=text.pretraining[:40_000],
        training=text.training[:20_000],
        held_out=text.held_out[:4_000],
    )
    config = qwen3(hidden_size=64, num_hidden_layers=2, vocab_size=320, head_dim=32)
    return prepare(
        folder, little, NUM_STEPS, config, pretraining_steps=2, held_out_steps=NUM_HELD_OUT
    )


@pytest.fixture(scope="module")
def plain(folder: Path, job: Job) -> list[float]:
    return losses_of(REFERENCE, job_of(SIDES[REFERENCE], job), folder)


def distance(folder: Path, job: Job, plain: list[float]) -> float:
    """Return the largest distance of ours, held-out rows included."""
    ours = losses_of("ours_fp32", job_of(SIDES["ours_fp32"], job), folder)
    return max(abs(one - other) for one, other in zip(ours, plain, strict=True))


@pytest.mark.merge
def test_ours_takes_the_steps_of_plain_fp32(folder: Path, job: Job, plain: list[float]) -> None:
    assert len(plain) == NUM_STEPS + NUM_HELD_OUT
    assert distance(folder, job, plain) < WITHIN


@pytest.mark.merge
def test_a_wrong_rate_would_be_noticed(folder: Path, job: Job, plain: list[float]) -> None:
    wrong = replace(job, rates=[1.1 * rate for rate in job.rates])
    assert distance(folder, wrong, plain) > 10 * WITHIN


def test_held_out_rows_do_not_train(folder: Path, job: Job) -> None:
    start = job_of(SIDES["start_fp32"], job)
    assert start.rates == [0.0]
    assert job.rates[NUM_STEPS:] == [0.0] * NUM_HELD_OUT
    assert 0.0 not in job.rates[1:NUM_STEPS]


def test_no_paragraph_is_trained_and_held_out() -> None:
    def paragraphs(part: str) -> set[str]:
        return {" ".join(paragraph.split()) for paragraph in part.split("\n\n")}

    text = read_text()
    assert paragraphs(text.training).isdisjoint(paragraphs(text.held_out))
    repeated = {"b": "one\n  two\n\n\nthree", "a": "zero\n\none two"}
    assert without_repeats(repeated) == ["zero", "one two", "three"]


def test_figures() -> None:
    curves: Curves = {
        REFERENCE: [4.0, 3.0, 2.0, 2.0],
        "ours_bf16": [4.0, 3.5, 2.5, 2.5],
        "other_order": [3.0, 4.0, 2.0, 3.0],
        "start_fp32": [4.0, 4.0],
        "start_bf16": [4.5, 4.5],
    }
    figures = figures_of(curves, 2)
    assert figures["ours_bf16_held_out_loss"] == 2.5
    assert figures["ours_bf16_held_out_gap"] == 0.5
    assert figures["ours_bf16_gain_share"] == 1.0
    assert figures["other_order_gain_share"] == 0.75
    assert figures["ours_bf16_max_distance"] == 0.5
    assert figures["ours_bf16_mean_distance"] == 0.25
    assert figures["ours_bf16_equal_steps"] == 1
    assert "other_order_max_distance" not in figures

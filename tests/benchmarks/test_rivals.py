"""The protocol of benchmarks/rivals: workers take the same steps, one at a time, and say so."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rivals.compared import SECOND_BACKWARD
from benchmarks.rivals.contestants import Contestant, WorkerFailed
from benchmarks.rivals.subjects import qwen3, write_model, write_tokens
from benchmarks.rivals.workers import fsdp2, ours, plain
from benchmarks.rivals.workers.serving import Job

VOCABULARY = 320
STEPS = 4
Figures = list[tuple[float, float]]
"""Loss and norm of each step."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("rivals")
    config = qwen3(hidden_size=64, num_hidden_layers=2, vocab_size=VOCABULARY, head_dim=32)
    tokens = write_tokens(
        folder / "tokens.npy", steps=STEPS, rows=4, sequence=24, vocabulary=VOCABULARY
    )
    return Job(
        model=str(write_model(folder / "model", config)),
        tokens=str(tokens),
        micro_batches=2,
        lr=1e-2,
        max_grad_norm=0.5,
        threads=1,
    )


def steps_of(worker: Any, job: Job) -> Figures:
    prepared = worker.prepare(job)
    assert prepared.params > VOCABULARY * 64
    try:
        return [prepared.step(job.batch(number)) for number in range(STEPS)]
    finally:
        prepared.close()


@pytest.fixture(scope="module")
def taken(job: Job) -> Figures:
    return steps_of(ours, job)


def furthest(one: Figures, other: Figures) -> float:
    """Return the largest difference of two runs."""
    return max(
        abs(a - b) for pair in zip(one, other, strict=True) for a, b in zip(*pair, strict=True)
    )


@pytest.mark.merge
@pytest.mark.parametrize("head", ["own", "chunked"])
def test_plain_takes_the_steps_that_we_take(job: Job, taken: Figures, head: str) -> None:
    found = steps_of(plain, replace(job, settings={"head": head}))
    assert furthest(found, taken) < 2e-5


@pytest.mark.merge
def test_fsdp2_takes_the_steps_that_we_take(job: Job, taken: Figures) -> None:
    assert furthest(steps_of(fsdp2, job), taken) < 2e-5


@pytest.mark.parametrize("tier", ["states", "gradients"])
def test_a_disk_changes_no_step_of_ours(
    job: Job, taken: Figures, tmp_path: Path, tier: str
) -> None:
    settings = {"disk": str(tmp_path), "step": {"tier": tier}}
    assert steps_of(ours, replace(job, settings=settings)) == taken


def test_a_second_backward_changes_no_step_of_ours(job: Job, taken: Figures) -> None:
    assert steps_of(ours, replace(job, settings=SECOND_BACKWARD)) == taken


@pytest.mark.merge
@pytest.mark.parametrize(
    "change",
    [
        {"lr": 0.9e-2},
        {"weight_decay": 0.5},
        {"max_grad_norm": 0.05},
        {"betas": (0.5, 0.95)},
        {"eps": 1e-3},
    ],
)
def test_another_job_would_be_noticed(job: Job, taken: Figures, change: dict[str, Any]) -> None:
    assert furthest(steps_of(plain, replace(job, **change)), taken) > 2e-4


@pytest.mark.merge
def test_a_worker_answers_step_by_step_and_says_why_it_ends(
    job: Job, taken: Figures, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens.npy"
    tokens.write_bytes(Path(job.tokens).read_bytes())
    path = replace(job, tokens=str(tokens)).write(tmp_path / "job.json")
    with Contestant("plain", path, python=sys.executable) as worker:
        ready = worker.ready()
        assert ready["params"] > VOCABULARY * 64
        assert ready["seconds"] > 0
        for loss, norm in taken[:2]:
            step = worker.step()
            assert step.grad_norm is not None
            assert abs(step.loss - loss) + abs(step.grad_norm - norm) < 4e-5
            assert step.peak_bytes > 100 << 20
        tokens.unlink()
        with pytest.raises(WorkerFailed, match=r"(?s)plain ended with 1:.*tokens\.npy"):
            worker.step()

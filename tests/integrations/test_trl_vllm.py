"""GRPO under TRL whose answers a vLLM server draws: a server with vLLM's routes in its place."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatrain.errors import ConfigError, GeneratorError
from testkit.plain_vllm import PlainVllm, plain_vllm

pytestmark = [
    pytest.mark.merge,
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None,
        reason="trl is not installed; run this in the environment of `python -m proofs.trainers`",
    ),
]
DIFFERENCE = "sampling/sampling_logp_difference/mean"
"""TRL's mean difference of log-probabilities between the server and the model that trains."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from proofs.trainers.cases import write_model

    path: Path = tmp_path_factory.mktemp("model")
    write_model(path, "llama")
    return path


def trainer_of(model: Path, output: Path, server: PlainVllm, **changes: Any) -> Any:
    from proofs.trainers.cases import CASES
    from proofs.trainers.sides import make_trainer

    def letters(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text))) for text in completions]

    case = replace(CASES["grpo"], given={"reward_funcs": letters})
    given: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": server.address,
        "vllm_server_timeout": 0.0,
        "learning_rate": 1e-2,
        "max_steps": 4,
    }
    return make_trainer(case, model, output, is_streamed=True, **given | changes)


def differences(model: Path, output: Path, **server: Any) -> list[float]:
    """Return the difference of log-probabilities in each step of a run at temperature 0.7."""
    with plain_vllm(model, **server) as vllm:
        trainer = trainer_of(model, output, vllm)
        trainer.train()
        trainer.close()
        return [line[DIFFERENCE] for line in trainer.state.log_history if DIFFERENCE in line]


def test_vllm_has_the_weights_of_each_step(model: Path, tmp_path: Path) -> None:
    found = differences(model, tmp_path)
    assert len(found) == 4
    assert max(found) < 1e-4


def test_stale_weights_would_be_noticed(model: Path, tmp_path: Path) -> None:
    first, *later = differences(model, tmp_path, ignores_weights=True)
    assert first < 1e-4
    assert min(later) > 1e-2


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    model: Path, tmp_path: Path
) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    with plain_vllm(model) as vllm:
        for name, checkpoint in {"whole": None, "again": tmp_path / "whole/checkpoint-2"}.items():
            trainer = trainer_of(model, tmp_path / name, vllm, **saving)
            trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
            trainer.close()
    last = [load_file(tmp_path / name / "checkpoint-4/model.safetensors") for name in
            ("whole", "again")]  # fmt: skip
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])


def test_a_server_that_does_not_answer_is_named(model: Path, tmp_path: Path) -> None:
    with plain_vllm(model) as vllm:
        pass
    trainer = trainer_of(model, tmp_path, vllm)
    with pytest.raises(GeneratorError, match="does not answer"):
        trainer.train()
    trainer.close()


def test_what_vllm_does_not_get_from_here_is_refused(model: Path, tmp_path: Path) -> None:
    with plain_vllm(model) as vllm:
        with pytest.raises(ConfigError, match="vllm_enable_sleep_mode=True"):
            trainer_of(model, tmp_path, vllm, vllm_enable_sleep_mode=True)
        with pytest.raises(ConfigError, match="top_k=5"):
            trainer_of(model, tmp_path, vllm, top_k=5)

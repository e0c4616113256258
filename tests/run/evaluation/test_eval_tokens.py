"""What compute_metrics gets: targets, likeliest tokens and log-probabilities, as transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.errors import ConfigError
from megatrain.run.evaluation.mean_loss import EvalPrediction, _checked
from megatrain.run.opening.training_data import TrainingData
from megatrain.run.trainer import Trainer
from testkit.runs import Setting, config_of

pytestmark = pytest.mark.usefixtures("cache_in_world")


@pytest.mark.parametrize("packing", [True, False])
def test_tokens_are_those_of_the_resident_model(world: Path, tmp_path: Path, packing: bool) -> None:
    seen: list[EvalPrediction] = []

    def compute(tokens: EvalPrediction) -> dict[str, Any]:
        seen.append(tokens)
        return {"accuracy": np.mean(tokens.predictions == tokens.targets)}

    setting = Setting(packing=packing, dtype="fp32")
    config = config_of(world, tmp_path, setting)
    with Trainer(config, compute_metrics=compute) as trainer:
        metrics = trainer.evaluate()
        assert isinstance(trainer.data, TrainingData)
        batches = [micro for batch in trainer.data.eval_batches() for micro in batch]
    (tokens,) = seen
    model = AutoModelForCausalLM.from_pretrained(world / "model-0.0", dtype=torch.float32)
    at, document = 0, 0
    for micro in batches:
        for part in micro.documents():
            mask = part.attention_mask
            length = int(part.input_ids.numel() if mask is None else mask.sum())
            ids, labels = part.input_ids[:, :length], part.labels[0, :length]
            logits = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            kept = labels[1:] != -100
            span = slice(at, at + int(kept.sum()))
            targets = labels[1:][kept]
            assert tokens.targets[span].tolist() == targets.tolist()
            assert tokens.predictions[span].tolist() == logits[kept].argmax(-1).tolist()
            expected = logits[kept].gather(1, targets[:, None])[:, 0].detach().numpy()
            np.testing.assert_allclose(tokens.logprobs[span], expected, atol=1e-5)
            assert (tokens.documents[span] == document).all()
            at, document = span.stop, document + 1
    assert at == len(tokens.targets)
    assert metrics["eval_loss"] == pytest.approx(
        -tokens.logprobs.astype(np.float64).mean(), rel=1e-6
    )


def test_metrics_are_names_and_numbers() -> None:
    assert _checked({"f1": np.float32(0.5), "eval_em": 1}) == {"eval_f1": 0.5, "eval_em": 1.0}
    for wrong in (0.5, {"f1": "high"}, {1: 0.5}):
        with pytest.raises(ConfigError, match="compute_metrics"):
            _checked(wrong)
